"""One frozen, typed tree of settings, and the one loader that fills it.

A value comes from the last of these that names it: default, file, environment, override. An
unknown key is an error that names the nearest known one. Settings are data: objects are passed as
arguments, never through here. The only module that reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.base.errors import ConfigError, InputError
from stepwell.base.units import parse_bytes

PREFIX = "STEPWELL_"
FILE_VARIABLE = "STEPWELL_CONFIG"
FILE_NAME = "stepwell.toml"


def _spec(default: Any, text: str, low: int | None = None, *, size: bool = False) -> Any:
    return field(default=default, metadata={"text": text, "low": low, "bytes": size})


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The device side: `cache.pool.PagePool`.

    Attributes:
        page_tokens: tokens of one page.
        capacity_bytes: bytes for the K and V of all pages; files and flags may say `512MiB`.
        requests: requests that may be open at once.
        positions: tokens that one request may have.
        ahead_tokens: how far ahead of a request its window groups have room: the most that one step
            computes for it. The engine sets it to its `step_tokens`.
        state_tokens: distance of the boundaries at which a state may be kept, a multiple of
            `page_tokens`; 0: every page.
        boundaries: how many of the last boundaries of a prompt, and of an answer, are kept for
            window groups and states.
        minimum_hit_tokens: a shorter hit is a miss.
        contiguous: a fixed span of frames for each request, and no sharing.
        debug: check every invariant after every call; slow.
    """

    page_tokens: int = _spec(16, "tokens of one page", 1)
    capacity_bytes: int = _spec(1 << 30, "bytes for the K and V of all pages", 1, size=True)
    requests: int = _spec(64, "requests that may be open at once", 1)
    positions: int = _spec(32_768, "tokens that one request may have", 1)
    ahead_tokens: int = _spec(2048, "room of window groups ahead of a request", 1)
    state_tokens: int = _spec(0, "distance of kept states in tokens; 0: page_tokens", 0)
    boundaries: int = _spec(2, "last boundaries of a prompt, and of an answer, that are kept", 1)
    minimum_hit_tokens: int = _spec(1, "a shorter hit is a miss", 1)
    contiguous: bool = _spec(False, "a fixed span of frames for each request, no sharing")
    debug: bool = _spec(False, "check every invariant after every call; slow")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Continuous batching: `engine`.

    Attributes:
        step_tokens: tokens that one step may compute.
        batch_requests: requests that one step may serve.
        queue_requests: requests that may wait.
        replay_tokens: tokens at the end of a prompt that are always computed.
    """

    step_tokens: int = _spec(2048, "tokens that one step may compute", 1)
    batch_requests: int = _spec(32, "requests that one step may serve", 1)
    queue_requests: int = _spec(1024, "requests that may wait", 1)
    replay_tokens: int = _spec(1, "tokens at the end of a prompt that are always computed", 1)


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Where raw bytes come from: `memory`.

    Attributes:
        device_nodes: memory nodes that devices are nearest to, where the machine does not say it or says it
            wrong: `cuda:0=0, cuda:1=1`.
    """

    device_nodes: str = _spec("", "memory nodes of devices, such as cuda:0=0, cuda:1=1")


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The host tier: `tiers.host`, `move`, and the ledger that decides.

    Attributes:
        capacity_bytes: of its frames, with what they need beside their bytes; 0: no host tier.
        save: when pages are saved: `sealed`, `second_use`, or `evicted` from the device.
        verify: which loads compare sums: `always`, `sample` (one frame in 16), or `never`.
        pinned: whether the memory should stay in place; copies of a GPU need it.
        threads: that copy, on each rank.
        within_ms: milliseconds for a movement, beside the time for its bytes.
        slowest_bytes: that a movement has to make in a second, or it is too late.
        least_pages: a shorter load is not worth it.
        match_steps: scheduling steps after which a match that nobody loads ends.
        keep_percent: of the frames, that keeps may have.
        breaker_faults: movements in a row that fail before the tier is left alone.
        breaker_rest_ms: milliseconds for which it is.
        debug: check every invariant of the ledger after every call; slow.
    """

    capacity_bytes: int = _spec(0, "bytes of the host tier; 0: none", 0, size=True)
    save: str = _spec("sealed", "when pages are saved: sealed, second_use, evicted")
    verify: str = _spec("always", "which loads compare sums: always, sample, never")
    pinned: bool = _spec(False, "memory that stays in place; copies of a GPU need it")
    threads: int = _spec(2, "threads that copy, on each rank", 1)
    within_ms: int = _spec(1000, "milliseconds for a movement, beside those for its bytes", 1)
    slowest_bytes: int = _spec(200 << 20, "a movement below so many a second is late", 1, size=True)
    least_pages: int = _spec(1, "a shorter load is not worth it", 1)
    match_steps: int = _spec(256, "steps after which a match that nobody loads ends", 1)
    keep_percent: int = _spec(25, "of the frames, that keeps may have", 0)
    breaker_faults: int = _spec(3, "failures in a row before the tier is left alone", 1)
    breaker_rest_ms: int = _spec(1000, "milliseconds for which it is left alone", 1)
    debug: bool = _spec(False, "check every invariant of the ledger after every call; slow")

    def __post_init__(self) -> None:
        """Refuses texts that mean nothing."""
        for name, value, known in (
            ("save", self.save, ("sealed", "second_use", "evicted")),
            ("verify", self.verify, ("always", "sample", "never")),
        ):
            if value not in known:
                raise ConfigError(f"host.{name} is {value!r}", limit=", ".join(known))
        if self.keep_percent > 100:
            raise ConfigError(f"host.keep_percent is {self.keep_percent}", limit="0 to 100")


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole tree.

    Attributes:
        cache_dir: where converted models lie; empty: the user's cache folder.
        pool: the device side.
        engine: continuous batching.
        memory: where raw bytes come from.
        host: the host tier.
    """

    cache_dir: str = _spec("", "where converted models lie; empty: the user's cache folder")
    pool: PoolSettings = field(default_factory=PoolSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    host: HostSettings = field(default_factory=HostSettings)


@dataclass(frozen=True, slots=True)
class Setting:
    """One value with where it came from, for `stepwell config show`."""

    key: str
    value: object
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """A filled tree together with the source of each value."""

    settings: Settings
    values: tuple[Setting, ...]


def _leaves(kind: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """All leaf fields as dotted keys, in the order of the tree."""
    for leaf in dataclasses.fields(kind):
        factory: Any = leaf.default_factory
        if dataclasses.is_dataclass(factory):
            yield from _leaves(factory, f"{prefix}{leaf.name}.")
        else:
            yield f"{prefix}{leaf.name}", leaf


def read_settings(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> ReadSettings:
    """Fills the tree.

    Args:
        file: a TOML file that must exist; otherwise the one that `STEPWELL_CONFIG` names, or
            `stepwell.toml` in the working folder if there is one.
        environment: variables such as `STEPWELL_POOL__PAGE_TOKENS`; the process's own by default.
        overrides: dotted keys such as `pool.page_tokens`.

    Raises:
        ConfigError: an unknown key, a value of the wrong kind or range, an unreadable file.
    """
    environment = os.environ if environment is None else environment
    known = dict(_leaves(Settings))
    values: dict[str, tuple[object, str]] = {
        key: (leaf.default, "default") for key, leaf in known.items()
    }
    for raw, source, text in _given(file, environment, overrides or {}):
        key = raw.lower()
        if key not in known:
            raise _unknown(raw, source, list(known))
        values[key] = (_read(key, known[key], text, source), source)
    listed = tuple(
        Setting(key, value, source, str(known[key].metadata["text"]))
        for key, (value, source) in values.items()
    )
    return ReadSettings(
        _build(Settings, {key: value for key, (value, _) in values.items()}), listed
    )


def _given(
    file: Path | None, environment: Mapping[str, str], overrides: Mapping[str, object]
) -> Iterator[tuple[str, str, object]]:
    """All (key, source, value) that somebody gave, weakest source first."""
    named = environment.get(FILE_VARIABLE)
    path = file or (Path(named) if named else None)
    if path is None and Path(FILE_NAME).is_file():
        path = Path(FILE_NAME)
    if path is not None:
        for key, value in _flatten(_parse(path)):
            yield key, str(path), value
    for name in sorted(environment):
        if name.startswith(PREFIX) and name != FILE_VARIABLE:
            key = name[len(PREFIX) :].lower().replace("__", ".")
            yield key, f"environment {name}", environment[name]
    for key, value in overrides.items():
        yield key, "override", value


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"settings file {path} cannot be read: {error.strerror}",
            remedy=f"correct --config or {FILE_VARIABLE}",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"settings file {path} is not TOML: {error}") from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _unknown(key: str, source: str, known: list[str]) -> ConfigError:
    last_parts = {name.rsplit(".", 1)[-1]: name for name in known}
    near = difflib.get_close_matches(key, known, 1, 0.5)
    if not near:
        found = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(last_parts), 1, 0.5)
        near = [last_parts[found[0]]] if found else []
    remedy = f"did you mean {near[0]!r}?" if near else "`stepwell config show` lists all keys"
    return ConfigError(f"{key!r} ({source}) is not a setting", remedy=remedy)


def _read(key: str, leaf: dataclasses.Field[Any], value: object, source: str) -> object:
    """One value in the type of its default."""
    kind: type = type(leaf.default)
    wrong = ConfigError(f"{key} is {value!r} ({source})", limit=kind.__name__)
    if kind is bool:
        named = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        answer = value if isinstance(value, bool) else named.get(str(value).lower())
        if answer is None:
            raise wrong
        return answer
    if kind is str:
        if not isinstance(value, str):
            raise wrong
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong
    try:
        number = parse_bytes(value) if leaf.metadata["bytes"] else int(value)
    except InputError as error:
        raise ConfigError(f"{key} ({source}): {error}") from error
    except ValueError:
        raise wrong from None
    low = leaf.metadata["low"]
    if low is not None and number < low:
        raise ConfigError(f"{key} is {number} ({source})", limit=f"{low} or more")
    return number


def _build(kind: Any, values: Mapping[str, object], prefix: str = "") -> Any:
    filled: dict[str, Any] = {}
    for leaf in dataclasses.fields(kind):
        factory: Any = leaf.default_factory
        if dataclasses.is_dataclass(factory):
            filled[leaf.name] = _build(factory, values, f"{prefix}{leaf.name}.")
        else:
            filled[leaf.name] = values[f"{prefix}{leaf.name}"]
    return kind(**filled)


def cache_dir(settings: Settings) -> Path:
    """The folder for converted models: as set, else `stepwell` in the user's cache folder."""
    if settings.cache_dir:
        try:
            return Path(settings.cache_dir).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"cache_dir is {settings.cache_dir!r}: {error}") from error
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stepwell"
