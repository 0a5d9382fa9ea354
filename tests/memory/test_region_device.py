"""Regions and a device: registered in pieces, waited for, let go; device memory; memory nodes."""

from __future__ import annotations

import gc
import mmap

import pytest

from stepwell.base.errors import InputError, MisuseError, RefusedError
from stepwell.memory.ask import Ask, Kind, Trait
from stepwell.memory.gpu import nearest_node, read_nodes
from stepwell.memory.machine import read_machine
from stepwell.memory.prepare import STRIDE_BYTES
from stepwell.memory.region import Region
from stepwell.testing.gpu import FakeGpu

PAGE = mmap.PAGESIZE
DEVICE_PAGE = 1 << 16
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def test_registration_happens_in_pieces_and_nothing_is_told_before():
    gpu = FakeGpu()
    told = []

    def ready(bytes_so_far):
        told.append(bytes_so_far)
        assert sum(gpu.registered.values()) == bytes_so_far

    piece = STRIDE_BYTES + MIB  # so that a piece is longer than what is touched at once
    size_bytes = piece + 3 * PAGE
    with Region.open(Ask(size_bytes, pinned=True, piece_bytes=piece), gpu=gpu) as region:
        assert gpu.calls == []
        record = region.prepare(ready)
        first = region.address
        assert gpu.calls == [("register", first, piece), ("register", first + piece, 3 * PAGE)]
        assert told == [piece, size_bytes]
        assert record.registered_bytes == size_bytes
        assert record.pinned
        assert not record.locked
        assert region.prepare(told.append) == record
        assert len(gpu.calls) == 2
    assert gpu.registered == {}


def test_what_the_runtime_pins_is_not_locked_as_well():
    """Locked memory is counted against a limit that pinning does not need."""
    before = read_machine().locked_bytes
    with Region.open(Ask(4 * MIB, pinned=True), gpu=FakeGpu()) as region:
        region.prepare()
        assert read_machine().locked_bytes == before


def test_only_what_is_to_be_pinned_is_registered(of):
    gpu = FakeGpu()
    with Region.open(of(Kind.SHARED, PAGE), gpu=gpu) as region:
        region.prepare()
    assert gpu.calls == []


def test_closing_waits_for_the_device_and_unregisters_everything(mapped):
    gpu = FakeGpu()
    region = Region.open(Ask(3 * MIB, pinned=True, piece_bytes=MIB), gpu=gpu)
    region.prepare()
    first = region.address
    gpu.calls.clear()
    region.close()
    assert gpu.calls[0] == ("synchronise",)
    assert sorted(gpu.calls[1:]) == [("unregister", first + n * MIB) for n in range(3)]
    assert not mapped(first)
    gpu.calls.clear()
    region.close()
    assert gpu.calls == []


def test_a_piece_that_the_runtime_refuses_is_an_error_and_what_came_before_stays():
    gpu = FakeGpu(most_bytes=2 * MIB)
    told = []
    with Region.open(Ask(4 * MIB, pinned=True, piece_bytes=MIB), gpu=gpu) as region:
        with pytest.raises(RefusedError) as caught:
            region.prepare(told.append)
        assert f"bytes {2 * MIB} to {3 * MIB} on cuda:0: out of memory" in caught.value.fact
        assert "ulimit -l" in caught.value.remedy
        assert told == [MIB, 2 * MIB]
        assert region.record.ready_bytes == region.record.registered_bytes == 2 * MIB
        assert not region.record.pinned
        gpu._most_bytes = None  # somebody let go of memory
        assert region.prepare(told.append).pinned
        assert told == [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    assert gpu.registered == {}


def test_a_refused_piece_that_may_be_lacking_is_noted_once_and_asked_for_once():
    gpu = FakeGpu(most_bytes=MIB)
    told = []
    ask = Ask(4 * MIB, pinned=True, may_lack=frozenset({Trait.PINNED}), piece_bytes=MIB)
    with Region.open(ask, gpu=gpu) as region:
        record = region.prepare(told.append)
        assert told == [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
        assert record.ready_bytes == 4 * MIB
        assert record.registered_bytes == MIB
        assert not record.pinned
        (refusal,) = record.refusals
        assert refusal.what == "pinned"
        assert f"bytes {MIB} to {2 * MIB}" in refusal.reason
        assert len([call for call in gpu.calls if call[0] == "register"]) == 2
    assert gpu.registered == {}


@pytest.mark.parametrize("asked", [1, DEVICE_PAGE, 3 * DEVICE_PAGE + 1])
def test_device_memory_begins_and_ends_with_a_page_of_the_device(gpu, asked):
    with Region.open(Ask(asked, Kind.DEVICE), gpu=gpu) as region:
        assert region.address % DEVICE_PAGE == 0
        assert region.size_bytes % DEVICE_PAGE == 0
        assert 0 <= region.size_bytes - asked < DEVICE_PAGE
        assert region.record.page_bytes == DEVICE_PAGE
        assert region.record.ready_bytes == region.size_bytes
        told = []
        region.prepare(told.append)
        assert told == []
        tensor = region._mapping.tensor
        assert tensor.data_ptr() == region.address
        assert tensor.numel() == region.size_bytes
        with pytest.raises(MisuseError, match="no bytes here"):
            region.view(0, 1)
        with pytest.raises(MisuseError, match="device region has no descriptor"):
            _ = region.descriptor
    assert [call[0] for call in gpu.calls] == ["allocate", "synchronise"]


def test_device_memory_that_is_not_there_is_refused():
    ask = Ask(8 * MIB, Kind.DEVICE)
    with pytest.raises(RefusedError, match="no GPU runtime") as caught:
        Region.open(ask)
    assert "find_gpu" in caught.value.remedy
    with pytest.raises(RefusedError, match=r"8\.0 MiB on cuda:0: out of device memory"):
        Region.open(ask, gpu=FakeGpu(most_bytes=MIB))


def test_the_nearest_node_is_what_the_overrides_say_or_else_the_machine():
    assert nearest_node(FakeGpu(nearest=1), {}) == 1
    assert nearest_node(FakeGpu(nearest=1), {"cuda:1": 7}) == 1
    assert nearest_node(FakeGpu(nearest=1), {"cuda:0": 0}) == 0
    assert nearest_node(FakeGpu(nearest=None), {"cuda:0": 3}) == 3
    with pytest.raises(RefusedError, match="cuda:4") as caught:
        nearest_node(FakeGpu("cuda:4", nearest=None), {"cuda:0": 3})
    assert read_nodes(caught.value.remedy.split('"')[1]) == {"cuda:4": 0}  # can be copied


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", {}),
        (" , ", {}),
        ("cuda:0=0", {"cuda:0": 0}),
        (" cuda:0 = 0,cuda:1=12, ", {"cuda:0": 0, "cuda:1": 12}),
    ],
)
def test_nodes_of_devices_are_read(text, nodes):
    assert read_nodes(text) == nodes


@pytest.mark.parametrize(
    "text", ["cuda:0", "=1", "cuda:0=", "cuda:0=-1", "cuda:0=a", "cuda:0=0=1", "cuda:0=0,cuda:0=0"]
)
def test_nodes_of_devices_in_another_form_are_refused(text):
    with pytest.raises(InputError, match="device=node"):
        read_nodes(text)


def test_a_failed_unregistration_is_reported_and_spoils_nobody_elses_open(gpu, monkeypatch):
    region = Region.open(Ask(PAGE, pinned=True), gpu=gpu)
    region.prepare()

    def refuse(_):
        raise OSError(22, "not registered")

    monkeypatch.setattr(gpu, "unregister", refuse)
    mapping = region._mapping
    del region
    gc.collect()
    with pytest.warns(ResourceWarning) as told, Region.open(Ask(PAGE)):
        pass
    assert "a region was lost" in str(told[0].message)
    assert "it stays mapped: [Errno 22] not registered" in str(told[0].message)
    assert mapping.mapped
    monkeypatch.undo()
    mapping.close()
