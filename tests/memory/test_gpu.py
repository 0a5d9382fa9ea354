"""Host memory of a real device: registered in pieces, read by the device, let go. Skips loudly without one."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.memory.arena import Arena
from stepwell.memory.ask import Ask, Kind
from stepwell.memory.gpu import find_gpu
from stepwell.memory.region import Region

PIECE = 4 << 20


@pytest.mark.gpu
def test_a_registered_frame_is_copied_to_the_device_and_back():
    import torch

    gpu = find_gpu()
    assert gpu is not None
    ask = Ask(16 << 20, pinned=True, piece_bytes=PIECE)
    with Region.open(ask, gpu=gpu) as region, Arena(1 << 20, 16) as arena:
        arena.add(region)
        assert region.record.registered_bytes == 16 << 20
        with arena.reserve(2, "copy") as lease:
            with lease.buffer(0).view() as view:
                host = torch.frombuffer(view, dtype=torch.uint8)
                assert host.is_pinned()
                host.copy_(torch.arange(1 << 20, dtype=torch.int64).to(torch.uint8))
                there = host.to("cuda", non_blocking=True)
                gpu.synchronise()
                del host
            with lease.buffer(1).view() as view:
                back = torch.frombuffer(view, dtype=torch.uint8)
                back.copy_(there, non_blocking=True)
                gpu.synchronise()
                got = back.numpy().copy()
                del back
            assert (got == np.arange(1 << 20).astype(np.uint8)).all()


@pytest.mark.gpu
def test_device_memory_begins_at_a_page_and_has_no_bytes_here():
    gpu = find_gpu()
    assert gpu is not None
    with Region.open(Ask(1 << 20, Kind.DEVICE), gpu=gpu) as region, Arena(1 << 16, 16) as arena:
        assert region.address % (1 << 16) == 0
        assert arena.add(region) == 16


@pytest.mark.gpu
def test_a_real_device_says_its_memory_node_or_that_it_does_not_know():
    gpu = find_gpu()
    assert gpu is not None
    assert gpu.node() is None or gpu.node() >= 0
