"""The fingerprint model sees every wrong page, and the plain-dict pool answers as its text says."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.base.errors import InputError
from stepwell.base.settings import PoolSettings
from stepwell.cache.pool import Busy, Flags, NeverFits, PagePool, Ready
from stepwell.core.key import Namespace
from stepwell.core.reasons import Reason
from stepwell.testing.clock import FakeClock
from stepwell.testing.fingerprint import Fingerprint, geometry, reference
from stepwell.testing.model import DictPool

SPACE = Namespace(4, model="m")


@pytest.fixture
def pool() -> PagePool:
    sizes = PoolSettings(4, 12 * geometry().page_bytes(4), 4, 48)
    return PagePool(geometry(), sizes, device="numpy")


def test_the_fingerprint_of_a_token_depends_on_all_before_it_and_on_nothing_after() -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = reference(tokens)
    assert np.array_equal(reference(tokens[:5]), whole[:, :, :5])
    for changed in range(8):
        other = reference([*tokens[:changed], 77, *tokens[changed + 1 :]])
        assert np.array_equal(other[:, :, :changed], whole[:, :, :changed])
        assert (other[:, :, changed:] != whole[:, :, changed:]).all()
    assert (reference(tokens, weights=1) != whole).all()
    assert len(set(whole.ravel().tolist())) == whole.size


@pytest.mark.parametrize("fault", ["foreign", "stale", "swapped", "torn"])
def test_every_wrong_page_changes_what_follows(pool: PagePool, fault: str) -> None:
    """The four ways in which a page can be wrong, each put into the first two pages of a hit."""
    model = Fingerprint()
    prompt = list(range(13))
    pool.open("a", prompt, SPACE)
    right = model.step(pool.bind({"a": 13}), [prompt])
    pool.commit("a", prompt)
    pool.close("a")
    pool.open("b", prompt, SPACE)
    view = pool.bind({"b": 1})
    assert model.step(view, [prompt[12:]]) == right
    slots = view.planes[0].table[view.rows[0]]
    for buffer in (view.planes[0].buffers.k, view.planes[0].buffers.v):
        one, other = slots[:4], slots[4:8]
        if fault == "foreign":
            buffer[:, one] = buffer[:, one] + 1
        elif fault == "stale":
            buffer[:, one] = 0
        elif fault == "swapped":
            buffer[:, one], buffer[:, other] = buffer[:, other].copy(), buffer[:, one].copy()
        else:
            buffer[:, one[2:]] = buffer[:, other[2:]]
    assert model.step(view, [prompt[12:]]) != right
    assert not np.array_equal(model.read(view, 0), reference(prompt))


def test_the_plain_dict_pool_shares_prefixes_and_evicts_tails() -> None:
    model = DictPool(page_tokens=2, frames=4, requests=2, positions=8)
    assert model.open("a", [1, 2, 3, 4, 5], "m") == Ready(0, Reason.NOT_SEALED)
    model.commit("a", [1, 2, 3, 4, 5])
    model.close("a")
    assert (model.free(), model.evictable()) == (2, 2)
    assert model.open("b", [1, 2, 3, 4, 5], "m") == Ready(4, Reason.WHOLE_PREFIX)
    assert model.open("c", [1, 2, 3, 4, 6, 7, 8], "other") == Busy(short_frames=3)
    model.close("b")
    assert isinstance(model.open("c", [9] * 6, "m"), Ready)
    model.close("c")
    assert model.open("d", [1, 2, 3, 4, 5], "m", Flags.NO_WRITE) == Ready(2, Reason.NOT_SEALED)
    assert isinstance(model.open("e", [0] * 9, "m"), NeverFits)


def test_a_fake_clock_moves_forward_only() -> None:
    clock = FakeClock(5.0)
    clock.advance_s(1.5)
    assert clock.now_s() == 6.5
    with pytest.raises(InputError, match=r"-1"):
        clock.advance_s(-1)
