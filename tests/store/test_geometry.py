"""Boxes, regions and flat ranges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightdepot.store.geometry import (
    Box,
    contiguous_strides,
    extent,
    flat_range_boxes,
    overlaps_itself,
)


def boxes(dims: int) -> st.SearchStrategy[Box]:
    side = st.tuples(*[st.integers(0, 6)] * dims)
    return st.builds(Box, side, side)


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*[range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)]))


pairs = st.integers(0, 3).flatmap(lambda d: st.tuples(boxes(d), boxes(d)))


@given(pairs)
def test_an_intersection_has_the_common_points(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert (points(common) if common else set()) == points(a) & points(b)


@given(pairs)
def test_a_difference_is_disjoint_small_and_has_the_remaining_points(pair: tuple[Box, Box]) -> None:
    a, b = pair
    rest = a.subtract(b)
    found = [p for box in rest for p in points(box)]
    assert len(found) == len(set(found))
    assert set(found) == points(a) - points(b)
    assert len(rest) <= max(2 * len(a.shape), 1)


@given(st.lists(st.integers(1, 5), max_size=4).flatmap(lambda s: st.tuples(st.just(s), st.data())))
def test_a_flat_range_is_at_most_2n_minus_1_disjoint_boxes(drawn: tuple[list[int], st.DataObject]) -> None:
    shape, data = drawn
    total = int(np.prod(shape))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = list(flat_range_boxes(shape, start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    flat = [int(np.ravel_multi_index(p, shape)) if shape else 0 for box in found for p in sorted(points(box))]
    assert flat == list(range(start, stop))


def test_a_flat_range_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        list(flat_range_boxes((2, 3), 0, 7))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_overlap_and_extent_are_those_of_the_touched_addresses(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    nested = contiguous_strides([shape[d] for d in order])
    strides = [0] * len(shape)
    for position, dim in enumerate(order):
        strides[dim] = nested[position] * data.draw(st.integers(0, 2))
    addresses = [
        sum(i * s for i, s in zip(p, strides, strict=True)) for p in itertools.product(*map(range, shape))
    ]
    assert extent(shape, strides) == max(addresses) + 1
    if not overlaps_itself(shape, strides):
        assert len(set(addresses)) == len(addresses)


def test_a_box_with_negative_numbers_or_of_two_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Box((0,), (-1,))
    with pytest.raises(ValueError, match="length"):
        Box((0,), (1, 2))
