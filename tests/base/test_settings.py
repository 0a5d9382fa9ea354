"""Settings: where each value comes from, and that no mistake passes in silence."""

import re
from pathlib import Path

import pytest

from stepwell.base.errors import ConfigError
from stepwell.base.settings import (
    EngineSettings,
    PoolSettings,
    Settings,
    cache_dir,
    read_settings,
)

KEYS = {
    "cache_dir",
    "pool.page_tokens",
    "pool.capacity_bytes",
    "pool.requests",
    "pool.positions",
    "pool.ahead_tokens",
    "pool.state_tokens",
    "pool.boundaries",
    "pool.minimum_hit_tokens",
    "pool.contiguous",
    "pool.debug",
    "engine.step_tokens",
    "engine.batch_requests",
    "engine.queue_requests",
    "engine.replay_tokens",
    "memory.device_nodes",
    "host.capacity_bytes",
    "host.save",
    "host.verify",
    "host.pinned",
    "host.threads",
    "host.within_ms",
    "host.slowest_bytes",
    "host.least_pages",
    "host.match_steps",
    "host.keep_percent",
    "host.breaker_faults",
    "host.breaker_rest_ms",
    "host.debug",
}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """A `stepwell.toml` of whoever runs the tests must not be read."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path):
    def write(text, name="given.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def sources(loaded):
    return {setting.key: setting.source for setting in loaded.values}


def test_without_any_source_every_value_is_its_default():
    loaded = read_settings(environment={})
    assert loaded.settings == Settings()
    assert {setting.key for setting in loaded.values} == KEYS
    assert set(sources(loaded).values()) == {"default"}


def test_every_setting_has_a_text_and_its_value_in_the_list():
    loaded = read_settings(environment={}, overrides={"pool.requests": 3})
    listed = {setting.key: setting.value for setting in loaded.values}
    assert listed["pool.requests"] == loaded.settings.pool.requests == 3
    assert all(setting.text for setting in loaded.values)


def test_settings_cannot_be_changed_after_loading():
    settings = read_settings(environment={}).settings
    with pytest.raises(AttributeError):
        settings.cache_dir = "elsewhere"
    with pytest.raises(AttributeError):
        settings.pool.page_tokens = 1


def test_the_later_source_wins_and_each_value_names_its_own(file):
    path = file("[pool]\npage_tokens = 2\nrequests = 3\npositions = 4\n")
    loaded = read_settings(
        path,
        {"STEPWELL_POOL__REQUESTS": "30", "STEPWELL_POOL__POSITIONS": "40", "OTHER": "x"},
        {"pool.positions": 400},
    )
    pool = loaded.settings.pool
    assert (pool.page_tokens, pool.requests, pool.positions) == (2, 30, 400)
    assert pool.capacity_bytes == PoolSettings().capacity_bytes
    assert loaded.settings.engine == EngineSettings()
    found = sources(loaded)
    assert found["pool.page_tokens"] == str(path)
    assert found["pool.requests"] == "environment STEPWELL_POOL__REQUESTS"
    assert found["pool.positions"] == "override"
    assert found["pool.capacity_bytes"] == "default"


def test_an_override_wins_over_everything_for_one_key(file):
    path = file('cache_dir = "a"\n')
    environment = {"STEPWELL_CACHE_DIR": "b"}
    assert read_settings(path, environment).settings.cache_dir == "b"
    assert read_settings(path, environment, {"cache_dir": "c"}).settings.cache_dir == "c"
    assert read_settings(path, {}).settings.cache_dir == "a"


def test_the_processes_own_environment_is_read_by_default(monkeypatch):
    monkeypatch.setenv("STEPWELL_ENGINE__STEP_TOKENS", "77")
    assert read_settings().settings.engine.step_tokens == 77


def test_the_working_folders_file_is_found(file):
    file("[pool]\nrequests = 5\n", "stepwell.toml")
    loaded = read_settings(environment={})
    assert loaded.settings.pool.requests == 5
    assert sources(loaded)["pool.requests"] == "stepwell.toml"


def test_the_named_file_is_read_instead_of_the_working_folders(file):
    file("[pool]\nrequests = 5\n", "stepwell.toml")
    named = file("[pool]\nrequests = 6\n", "named.toml")
    given = file("[pool]\nrequests = 7\n", "given.toml")
    environment = {"STEPWELL_CONFIG": str(named)}
    assert read_settings(environment=environment).settings.pool.requests == 6
    assert read_settings(given, environment).settings.pool.requests == 7


def test_an_unknown_key_in_the_file_names_file_and_nearest_key(file):
    path = file("[pool]\npage_token = 2\n")
    with pytest.raises(
        ConfigError, match=r"pool\.page_token.*did you mean 'pool\.page_tokens'"
    ) as e:
        read_settings(path, {})
    assert str(path) in str(e.value)


def test_an_unknown_variable_names_itself_and_the_nearest_key():
    with pytest.raises(ConfigError, match=r"engine\.step_tokens") as caught:
        read_settings(environment={"STEPWELL_ENGINE__STEP_TOKEN": "2"})
    assert "STEPWELL_ENGINE__STEP_TOKEN" in str(caught.value)


def test_an_unknown_override_names_the_nearest_key():
    with pytest.raises(ConfigError, match=r"\(override\).*did you mean 'cache_dir'"):
        read_settings(environment={}, overrides={"cachedir": "x"})


def test_a_key_without_its_section_is_led_to_the_section():
    with pytest.raises(ConfigError, match=r"did you mean 'engine\.batch_requests'"):
        read_settings(environment={}, overrides={"batch_requests": 1})


def test_a_key_like_no_other_is_led_to_the_list():
    with pytest.raises(ConfigError, match="stepwell config show"):
        read_settings(environment={}, overrides={"zzzzzzzz": 1})


def test_a_section_that_is_no_section_is_refused(file):
    with pytest.raises(ConfigError, match="'pool'"):
        read_settings(file("pool = 5\n"), {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pool.page_tokens", "many"),
        ("pool.page_tokens", "1.5"),
        ("pool.page_tokens", 1.5),
        ("pool.page_tokens", True),
        ("pool.page_tokens", None),
        ("pool.page_tokens", [16]),
        ("pool.page_tokens", ""),
        ("pool.page_tokens", "16KiB"),
        ("pool.capacity_bytes", "1 XB"),
        ("pool.capacity_bytes", False),
        ("pool.capacity_bytes", 2.0),
        ("pool.debug", "maybe"),
        ("pool.debug", 2),
        ("pool.state_tokens", -1),
        ("cache_dir", 5),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_key_and_source(key, value):
    with pytest.raises(ConfigError, match=re.escape(key)) as caught:
        read_settings(environment={}, overrides={key: value})
    assert "override" in str(caught.value)


NO_NUMBERS = {
    "cache_dir",
    "pool.debug",
    "pool.contiguous",
    "memory.device_nodes",
    "host.save",
    "host.verify",
    "host.pinned",
    "host.debug",
}
FROM_ZERO = {"pool.state_tokens", "host.capacity_bytes", "host.keep_percent"}


@pytest.mark.parametrize("key", sorted(KEYS - NO_NUMBERS - FROM_ZERO))
@pytest.mark.parametrize("value", [0, -1, "0"])
def test_a_number_below_its_range_is_refused(key, value):
    with pytest.raises(ConfigError, match=re.escape(key)):
        read_settings(environment={}, overrides={key: value})


@pytest.mark.parametrize("key", sorted(KEYS - NO_NUMBERS))
def test_the_lowest_number_of_a_range_is_taken(key):
    loaded = read_settings(environment={}, overrides={key: 1})
    assert {setting.key: setting.value for setting in loaded.values}[key] == 1


@pytest.mark.parametrize(
    ("key", "value"), [("host.save", "never"), ("host.verify", "yes"), ("host.keep_percent", 101)]
)
def test_a_value_of_the_host_tier_that_means_nothing_is_refused(key, value):
    with pytest.raises(ConfigError, match=re.escape(key)):
        read_settings(environment={}, overrides={key: value})


@pytest.mark.parametrize("given", ["512MiB", "0.5 GiB", 2**29, str(2**29)])
def test_a_capacity_may_be_written_with_its_unit(given, file):
    assert read_settings(
        environment={}, overrides={"pool.capacity_bytes": given}
    ).settings == Settings(pool=PoolSettings(capacity_bytes=2**29))


def test_a_capacity_with_a_unit_is_read_from_file_and_environment(file):
    path = file('[pool]\ncapacity_bytes = "3MiB"\n')
    assert read_settings(path, {}).settings.pool.capacity_bytes == 3 * 2**20
    environment = {"STEPWELL_POOL__CAPACITY_BYTES": "4MB"}
    assert read_settings(path, environment).settings.pool.capacity_bytes == 4_000_000


@pytest.mark.parametrize("text", ["true", "True", "1", "yes"])
def test_a_switch_can_be_turned_on_by_text(text):
    environment = {"STEPWELL_POOL__DEBUG": text}
    assert read_settings(environment=environment).settings.pool.debug is True


@pytest.mark.parametrize("text", ["false", "FALSE", "0", "no"])
def test_a_switch_can_be_turned_off_by_text(text, file):
    path = file("[pool]\ndebug = true\n")
    assert read_settings(path, {}).settings.pool.debug is True
    assert read_settings(path, {"STEPWELL_POOL__DEBUG": text}).settings.pool.debug is False


def test_a_named_file_that_is_not_there_is_an_error(tmp_path):
    gone = tmp_path / "gone.toml"
    with pytest.raises(ConfigError, match="STEPWELL_CONFIG") as caught:
        read_settings(environment={"STEPWELL_CONFIG": str(gone)})
    assert str(gone) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(gone, {})


def test_a_folder_is_no_settings_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(tmp_path, {})


@pytest.mark.parametrize("content", [b"pool = [", b"page_tokens: 3", b"\xff\xfe\x00"])
def test_what_is_not_toml_is_refused_with_its_path(content, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not TOML") as caught:
        read_settings(path, {})
    assert str(path) in str(caught.value)


def test_the_cache_folder_is_the_one_that_is_set(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir(Settings(cache_dir="/somewhere")) == Path("/somewhere")
    assert cache_dir(Settings(cache_dir="~/there")) == tmp_path / "there"


def test_the_cache_folder_is_the_users_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir(Settings()) == tmp_path / "xdg" / "stepwell"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir(Settings()) == tmp_path / ".cache" / "stepwell"
