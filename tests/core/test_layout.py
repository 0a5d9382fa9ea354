"""Layouts: any two hold the same KV, each in its own order."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.core import layout
from stepwell.core.layout import AXES, Layout

ALL = [
    layout.LAYER_FIRST_NHD,
    layout.LAYER_FIRST_HND,
    layout.PAGE_FIRST_NHD,
    layout.PAGE_FIRST_HND,
]
ODD = {"layer": 3, "page": 7, "slot": 5, "head": 2, "dim": 9}
COUNT = 3 * 7 * 5 * 2 * 9
by_id = pytest.mark.parametrize("order", ALL, ids=lambda one: one.id)


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.product(ALL, ALL)), ids=lambda one: one.id
)
def test_any_layout_can_be_copied_to_any_other_and_back(one, other):
    values = np.arange(COUNT, dtype=np.int32)
    rng = np.random.default_rng(5)
    rng.shuffle(values)
    there, back = np.full(COUNT, -1, np.int32), np.full(COUNT, -1, np.int32)
    np.copyto(other.view(there, ODD), one.view(values, ODD))
    np.copyto(one.view(back, ODD), other.view(there, ODD))
    assert (back == values).all()
    assert (one is other) == bool((there == values).all())


@by_id
def test_a_view_has_its_axes_in_canonical_order_and_shares_memory(order):
    buffer = np.arange(COUNT)
    view = order.view(buffer, ODD)
    assert view.shape == tuple(ODD[axis] for axis in AXES)
    view[2, 6, 4, 1, 8] = -1
    assert buffer[-1] == -1


@by_id
def test_every_element_is_where_the_order_of_the_axes_puts_it(order):
    """The address, computed by hand from the innermost axis outwards."""
    view = order.view(np.arange(COUNT), ODD)
    for place in itertools.product(*(range(ODD[axis]) for axis in AXES)):
        at = dict(zip(AXES, place, strict=True))
        address = 0
        for axis in order.axes:
            address = address * ODD[axis] + at[axis]
        assert view[place] == address


@pytest.mark.parametrize("axes", list(itertools.permutations(AXES))[::7], ids=".".join)
@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float64])
def test_strides_are_numpys(axes, dtype):
    order = Layout(axes)
    array = np.zeros(order.shape(ODD), dtype)
    strides = order.strides(ODD, array.itemsize)
    assert tuple(strides[axis] for axis in order.axes) == array.strides
    view = order.view(array, ODD)
    assert tuple(strides[axis] for axis in AXES) == view.strides


@by_id
def test_shape_follows_the_order(order):
    assert order.shape(ODD) == tuple(ODD[axis] for axis in order.axes)


def test_ids_name_the_order_and_are_all_different():
    assert layout.PAGE_FIRST_HND.id == "page.layer.head.slot.dim"
    assert len({order.id for order in ALL}) == 4


def test_layer_first_and_page_first_differ_in_what_is_outermost():
    for order in (layout.LAYER_FIRST_NHD, layout.LAYER_FIRST_HND):
        assert order.axes[:2] == ("layer", "page")
    for order in (layout.PAGE_FIRST_NHD, layout.PAGE_FIRST_HND):
        assert order.axes[:2] == ("page", "layer")


@given(st.lists(st.sampled_from([*AXES, "batch"]), max_size=6))
def test_only_orders_of_all_five_axes_are_layouts(axes):
    if sorted(axes) == sorted(AXES):
        assert Layout(tuple(axes)).axes == tuple(axes)
    else:
        with pytest.raises(InputError, match="axes"):
            Layout(tuple(axes))


@by_id
@pytest.mark.parametrize("count", [0, COUNT - 1, COUNT + 1])
def test_a_buffer_of_another_size_is_refused(order, count):
    with pytest.raises(InputError, match=f"{count} elements"):
        order.view(np.zeros(count), ODD)


@by_id
def test_a_buffer_with_gaps_is_refused(order):
    """A reshape would copy it, and what is written to the copy would be lost."""
    with pytest.raises(InputError, match="contiguous=False"):
        order.view(np.zeros(2 * COUNT)[::2], ODD)
