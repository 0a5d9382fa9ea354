"""A thread that dies is seen."""

import threading

import pytest

from stepwell.base.threads import Fault, Health, start

LONG_S = 30.0


def _explode() -> None:
    raise LookupError("the tier went away")


def test_a_target_that_raises_turns_health_degraded_with_name_and_trace():
    health = Health()
    thread = start("mover", _explode, health)
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert health.degraded
    (fault,) = health.faults
    assert fault.thread == "mover"
    assert isinstance(fault.error, LookupError)
    assert "the tier went away" in fault.trace
    assert "_explode" in fault.trace


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, AssertionError, MemoryError])
def test_nothing_that_ends_a_thread_escapes_unseen(kind):
    """`except Exception` would let a SystemExit end a thread silently."""

    def target():
        raise kind("gone")

    health = Health()
    start("mover", target, health).join(LONG_S)
    assert [type(fault.error) for fault in health.faults] == [kind]


def test_a_target_that_returns_leaves_health_alone():
    ran = threading.Event()
    health = Health()
    start("mover", ran.set, health).join(LONG_S)
    assert ran.is_set()
    assert not health.degraded
    assert health.faults == ()


def test_threads_are_named_and_do_not_keep_the_process_alive():
    seen: list[str] = []
    health = Health()
    thread = start("mover", lambda: seen.append(threading.current_thread().name), health)
    thread.join(LONG_S)
    assert thread.daemon
    assert seen == ["stepwell-mover"]


def test_a_fault_stays_until_someone_recovers():
    health = Health()
    start("a", _explode, health).join(LONG_S)
    start("b", lambda: None, health).join(LONG_S)
    assert health.degraded
    health.recover()
    assert not health.degraded
    assert health.faults == ()
    start("c", _explode, health).join(LONG_S)
    assert [fault.thread for fault in health.faults] == ["c"]


def test_faults_of_many_threads_are_all_kept():
    health = Health()
    together = threading.Barrier(8)

    def target():
        together.wait(LONG_S)
        raise LookupError

    threads = [start(str(n), target, health) for n in range(8)]
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(fault.thread for fault in health.faults) == [str(n) for n in range(8)]


def test_what_is_reported_by_hand_counts_as_well():
    health = Health()
    fault = Fault("main", ValueError("x"), "trace")
    health.report(fault)
    assert health.faults == (fault,)
