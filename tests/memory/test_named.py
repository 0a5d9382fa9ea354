"""Names in shared memory: one owner at a time, living or not, and nothing left behind."""

import contextlib
import mmap
import os
import pathlib
import signal
import threading

import pytest

from stepwell.base.errors import MisuseError, RefusedError
from stepwell.memory.ask import Ask, Kind
from stepwell.memory.named import path_of, remove_left
from stepwell.memory.region import Region

PAGE = mmap.PAGESIZE

pytestmark = [
    pytest.mark.usefixtures("nothing_stays_open"),
    pytest.mark.xdist_group(
        "names"
    ),  # the doctor removes what is left behind, which tests here leave
]

OWNER = """
    import sys
    from stepwell.memory.ask import Ask, Kind
    from stepwell.memory.region import Region

    region = Region.open(Ask(4096, Kind.NAMED, name=sys.argv[1]))
    with region.view(0, 5, readonly=False) as view:
        view[:] = b"alive"
    print("ready", flush=True)
    sys.stdin.read()
    """


def opened(name):
    return Region.open(Ask(PAGE, Kind.NAMED, name=name))


def head(region):
    with region.view(0, 5) as view:
        return view.tobytes()


def write(region, text):
    with region.view(0, 5, readonly=False) as view:
        view[:] = text


@contextlib.contextmanager
def killed(holding, name):
    """What is left of a process that had the name and was killed."""
    with holding(OWNER, name) as (child, line):
        assert line == "ready"
        child.kill()
        assert child.wait() == -signal.SIGKILL
        assert path_of(name).exists()
        yield


def test_m23_a_second_pool_of_one_name_in_one_process_is_refused(name):
    with opened(name) as region:
        write(region, b"first")
        with pytest.raises(
            RefusedError, match=f"'{name}'.*is taken by a process that lives"
        ) as caught:
            opened(name)
        assert "another name" in caught.value.remedy
        assert head(region) == b"first"
        with Region.attach_named(name) as attached:
            assert head(attached) == b"first"


def test_m23_a_second_pool_of_one_name_in_another_process_is_refused(name, holding):
    with holding(OWNER, name) as (_, line):
        assert line == "ready"
        with pytest.raises(RefusedError, match="is taken by a process that lives"):
            opened(name)
        with Region.attach_named(name) as attached:
            assert head(attached) == b"alive"
    opened(name).close()  # it closed its stdin and went


def test_m23_two_regions_of_one_name_in_turn_share_no_bytes(name):
    """The name goes to the second; whoever had the first keeps the first."""
    first = opened(name)
    with Region.attach_named(name) as reader:
        write(first, b"first")
        first.close()
        with opened(name) as second:
            write(second, b"other")
            assert head(reader) == b"first"
            with Region.attach_named(name) as attached:
                assert head(attached) == b"other"


def test_different_names_are_different_bytes(name):
    with opened(name) as one, opened(f"{name}.b") as two:
        write(one, b"one__")
        assert head(two) == bytes(5)


def test_only_the_same_user_may_open_a_segment(name):
    with opened(name):
        assert path_of(name).stat().st_mode & 0o777 == 0o600


def test_a_name_that_a_killed_process_left_is_replaced(name, holding):
    with killed(holding, name):
        left = path_of(name).stat().st_ino
        with opened(name) as region:
            assert path_of(name).stat().st_ino != left
            assert head(region) == bytes(5)
        assert not path_of(name).exists()


def test_nobody_can_vouch_for_the_bytes_of_a_killed_process(name, holding):
    with killed(holding, name):
        with pytest.raises(RefusedError, match=r"owner of .* is dead") as caught:
            Region.attach_named(name)
        assert "create it first" in caught.value.remedy


def test_readers_that_meet_at_the_name_of_a_killed_process_are_all_refused(name):
    """Looking whether a name is left takes the lock for a moment, which must not look like an owner."""
    outcomes = []
    for _ in range(100):
        path_of(name).write_bytes(bytes(PAGE))  # as a killed process leaves it: no lock
        barrier = threading.Barrier(4)

        def look(barrier=barrier):
            barrier.wait()
            try:
                Region.attach_named(name).close()
                outcomes.append("attached")
            except RefusedError as error:
                outcomes.append("dead" if "is dead" in error.fact else error.fact)

        together(look, 4)
    assert set(outcomes) == {"dead"}


def test_a_creator_gets_a_left_name_though_readers_look_at_it(name):
    outcomes = []
    for _ in range(100):
        path_of(name).write_bytes(bytes(PAGE))
        barrier = threading.Barrier(4)

        def look(barrier=barrier):
            barrier.wait()
            with contextlib.suppress(RefusedError):
                Region.attach_named(name).close()

        def create(barrier=barrier):
            barrier.wait()
            try:
                opened(name).close()
                outcomes.append("created")
            except RefusedError as error:
                outcomes.append(error.fact)

        together(look, 3, create)
    assert set(outcomes) == {"created"}


def together(work, count, *others):
    threads = [threading.Thread(target=target) for target in (*[work] * count, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_name_without_a_segment_is_refused(name):
    with pytest.raises(RefusedError, match="No such file") as caught:
        Region.attach_named(name)
    assert str(path_of(name)) in caught.value.fact


def test_who_is_attached_keeps_the_bytes_when_the_owner_closes(name):
    region = opened(name)
    with Region.attach_named(name) as attached:
        write(region, b"after")
        region.close()
        assert not path_of(name).exists()
        assert head(attached) == b"after"
        write(attached, b"still")
        with pytest.raises(RefusedError, match="No such file"):
            Region.attach_named(name)
    assert not path_of(name).exists()


def test_who_is_attached_does_not_take_the_name_away(name):
    with opened(name) as region:
        Region.attach_named(name).close()
        assert path_of(name).exists()
        with Region.attach_named(name) as attached:
            assert attached.size_bytes == region.size_bytes
            assert attached.record.ask.name == name


def test_a_name_is_taken_as_long_as_somebody_has_it_though_its_creator_was_killed(name, holding):
    with holding(OWNER, name) as (child, line):
        assert line == "ready"
        with Region.attach_named(name) as attached:
            child.kill()
            child.wait()
            with pytest.raises(RefusedError, match="is taken by a process that lives"):
                opened(name)
            assert head(attached) == b"alive"
        opened(name).close()


def test_a_name_that_was_given_to_somebody_else_is_left_alone(name):
    """An operator removed the file; the name is another region's by the time the first one closes."""
    first = opened(name)
    path_of(name).unlink()
    with opened(name) as second:
        first.close()
        assert path_of(name).exists()
        assert os.path.samestat(path_of(name).stat(), os.fstat(second.descriptor))


@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_something_else_under_the_name_is_refused_and_left_alone(name, what, tmp_path):
    """A link would lead a write to wherever its maker wants."""
    path, target = path_of(name), tmp_path / "target"
    target.write_bytes(bytes(PAGE))
    makers = {
        "link": lambda: path.symlink_to(target),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
    }
    makers[what]()
    try:
        if what != "pipe":
            with pytest.raises(RefusedError, match="cannot be opened"):
                opened(name)
            assert path.is_symlink() or path.is_dir()
        with pytest.raises(RefusedError):
            Region.attach_named(name)
        assert target.read_bytes() == bytes(PAGE)
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


@pytest.mark.parametrize("size_bytes", [0, PAGE + 1])
def test_a_segment_of_no_whole_pages_is_refused(name, size_bytes):
    """Names cannot be sealed: whoever may open one may change its size."""
    with opened(name):
        os.truncate(path_of(name), size_bytes)
        with pytest.raises(RefusedError, match=f"has {size_bytes} bytes"):
            Region.attach_named(name)


@pytest.mark.parametrize("left", [False, True], ids=["free", "left by a dead process"])
def test_of_many_processes_that_create_one_name_exactly_one_gets_it(name, holding, left):
    code = """
        import sys
        from stepwell.base.errors import RefusedError
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        print("here", flush=True)
        sys.stdin.readline()
        try:
            region = Region.open(Ask(4096, Kind.NAMED, name=sys.argv[1]))
            print("got it", flush=True)
        except RefusedError as error:
            print(error.fact, flush=True)
        sys.stdin.readline()
    """
    if left:
        path_of(name).write_bytes(bytes(PAGE))
    with contextlib.ExitStack() as all_of_them:
        children = [all_of_them.enter_context(holding(code, name)) for _ in range(6)]
        assert {line for _, line in children} == {"here"}
        for child, _ in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        outcomes = [child.stdout.readline().strip() for child, _ in children]
        Region.attach_named(name).close()
    assert outcomes.count("got it") == 1
    assert sum("is taken by a process that lives" in outcome for outcome in outcomes) == 5
    assert not path_of(name).exists()


@pytest.mark.parametrize("left", [False, True], ids=["free", "left by a dead process"])
def test_of_many_threads_that_create_one_name_exactly_one_gets_it(name, left):
    for _ in range(50):
        if left:
            path_of(name).write_bytes(bytes(PAGE))
        regions, refusals = [], []
        barrier = threading.Barrier(6)

        def create(barrier=barrier, regions=regions, refusals=refusals):
            barrier.wait()
            try:
                regions.append(opened(name))
            except RefusedError as error:
                refusals.append(error)

        together(create, 6)
        assert (len(regions), len(refusals)) == (1, 5)
        regions[0].close()


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "del region"])
def test_m35_an_exit_without_close_leaves_no_name(name, run_python, end):
    ran = run_python(
        f"""
        import sys
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        region = Region.open(Ask(4096, Kind.NAMED, name=sys.argv[1]))
        region.prepare()
        print("had it")
        {end}
        """,
        name,
    )
    assert ran.stdout == "had it\n"
    assert "Exception ignored" not in ran.stderr
    assert not path_of(name).exists()


def test_an_exit_of_a_forked_child_leaves_the_parents_name(name, run_python):
    """Exit handlers are inherited; the names are not."""
    ran = run_python(
        """
        import os, sys
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        region = Region.open(Ask(4096, Kind.NAMED, name=sys.argv[1]))
        if not os.fork():
            sys.exit(0)
        os.wait()
        Region.attach_named(sys.argv[1]).close()
        print("is there")
        """,
        name,
    )
    assert ran.stdout == "is there\n", ran.stderr
    assert not path_of(name).exists()


def test_a_forked_child_that_lives_does_not_keep_the_name_of_a_dead_parent(name, holding):
    """The lock belongs to the open file, which a child inherits and must let go."""
    code = """
        import os, sys
        from stepwell.memory.ask import Ask, Kind
        from stepwell.memory.region import Region

        region = Region.open(Ask(4096, Kind.NAMED, name=sys.argv[1]))
        if not os.fork():
            print("child", flush=True)
            sys.stdin.read()
            os._exit(0)
        os.wait()
    """
    with holding(code, name) as (parent, line):
        assert line == "child"
        parent.kill()
        parent.wait()
        with opened(name) as region:
            assert head(region) == bytes(5)


def test_a_named_region_that_is_closed_is_closed(name):
    region = opened(name)
    region.close()
    assert not path_of(name).exists()
    with pytest.raises(MisuseError, match="is closed"):
        head(region)
    assert pathlib.Path("/dev/shm").is_dir()


def test_what_dead_processes_left_is_removed_and_nothing_else(name, holding):
    with killed(holding, name), opened(f"{name}-alive") as alive:
        size_bytes = path_of(name).stat().st_size
        assert remove_left()[name] == size_bytes
        assert not path_of(name).exists()
        assert f"{name}-alive" not in remove_left()
        assert path_of(f"{name}-alive").exists()
        assert not alive.closed


def test_a_segment_of_another_user_is_not_attached(name):
    """Who owns the file can make it shorter, which would end its readers by a signal."""
    if os.geteuid():
        pytest.skip("NOT RUN: needs root")
    with opened(name):
        os.chown(path_of(name), 65534, 65534)
        with pytest.raises(RefusedError, match="belongs to user 65534"):
            Region.attach_named(name)
