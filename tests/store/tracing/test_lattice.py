"""Cutting lattices into boxes, casts, and the proof of coverage: against counting element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightdepot.store.errors import LayoutError
from weightdepot.store.geometry import Box, contiguous_strides
from weightdepot.store.layout import Fill, Layout, LayoutBuilder
from weightdepot.store.tracing import coverage
from weightdepot.store.tracing.content import exact
from weightdepot.store.tracing.lattice import Frame, TooIrregular, cut, disjoint

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor]:
    """A tensor's shape, and a view of its element numbers."""
    shape = draw(SHAPES)
    view = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        if view.dim() == 0:
            break
        dim = draw(st.integers(0, view.dim() - 1))
        match draw(st.integers(0, 5)):
            case 0:
                view = view.transpose(0, dim)
            case 1:
                start = draw(st.integers(0, view.shape[dim] - 1))
                view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
            case 2:
                view = view.flatten(0, dim) if view.is_contiguous() else view
            case 3:
                view = view.unsqueeze(dim).expand(*view.shape[:dim], 2, *view.shape[dim:])
            case 4:
                view = view.movedim(dim, 0)[:: draw(st.integers(1, 3))]
            case _:
                d = draw(
                    st.sampled_from([d for d in range(1, view.shape[dim] + 1) if view.shape[dim] % d == 0])
                )
                view = view.unflatten(dim, (d, view.shape[dim] // d))  # type: ignore[no-untyped-call]
    return shape, view


@settings(max_examples=300, deadline=None)
@given(views())
def test_a_view_is_cut_into_boxes_that_hold_each_of_its_elements_once(
    case: tuple[tuple[int, ...], torch.Tensor],
) -> None:
    shape, view = case
    frame = Frame.of_tensor(shape, contiguous_strides(shape))
    dims = zip(view.shape, view.stride(), contiguous_strides(view.shape), strict=True)
    pieces = cut(int(view.storage_offset()), 0, dims, frame)
    target = np.full(view.numel(), -1)
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    for piece in pieces:
        offset, counts, steps = frame.coordinates(piece)
        for index in itertools.product(*map(range, counts)):
            at = piece.image + sum(i * s for i, s in zip(index, steps, strict=True))
            assert target[at] == -1
            target[at] = numbers[tuple(o + i for o, i in zip(offset, index, strict=True))]
    assert target.tolist() == view.flatten().tolist()


def test_rows_of_a_tensor_are_one_box_however_they_are_viewed() -> None:
    frame = Frame.of_tensor((8, 6, 10), (60, 10, 1))
    for dims in (
        [(2 * 60, 1, 1)],
        [(2, 60, 60), (60, 1, 1)],
        [(2, 60, 60), (2, 30, 30), (3, 10, 10), (10, 1, 1)],
    ):
        assert [frame.coordinates(p)[:2] for p in cut(120, 0, dims, frame)] == [((2, 0, 0), (2, 6, 10))]


def test_more_boxes_than_the_limit_are_refused() -> None:
    frame = Frame.of_tensor((10_000,), (1,))
    with pytest.raises(TooIrregular, match="100"):
        cut(0, 0, [(200, 2, 1)], frame, limit=100)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 4), st.integers(1, 3)] * 2), max_size=8))
def test_disjoint_is_what_counting_says(boxes: list[tuple[int, int, int, int]]) -> None:
    grid = np.zeros((8, 8), int)
    for y, h, x, w in boxes:
        grid[y : y + h, x : x + w] += 1
    low = np.array([(y, x) for y, _, x, _ in boxes], dtype=np.int64).reshape(-1, 2)
    counts = np.array([(h, w) for _, h, _, w in boxes], dtype=np.int64).reshape(-1, 2)
    assert disjoint(low, counts) == bool((grid <= 1).all())


NARROW = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
ALL = [*NARROW, torch.int32, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("source", NARROW, ids=str)
def test_a_cast_said_to_be_exact_keeps_every_value(source: torch.dtype) -> None:
    bits = torch.arange(1 << (8 * source.itemsize), dtype=torch.int32)
    values = bits.to(torch.bool) if source == torch.bool else (
        bits.to(torch.uint8 if source.itemsize == 1 else torch.uint16).view(source)
    )  # fmt: skip
    wide = values.to(torch.float64)
    finite = ~wide.isnan()
    for target in ALL:
        kept = values.to(target).to(torch.float64)
        same = bool((kept[finite] == wide[finite]).all() and (kept.signbit() == wide.signbit())[finite].all())
        if exact(source, target):
            assert same, f"{source} to {target}"
        elif target in (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.int8):
            assert not same, f"{source} to {target} is refused for nothing"


def built(*regions: tuple[int, tuple[int, int]], fill: Fill | None = None) -> Layout:
    """A buffer (4, 6) filled by rows-by-columns boxes that begin at the given elements."""
    builder = LayoutBuilder()
    builder.tensor("w", (4, 6), "float32")
    builder.buffer("p", (4, 6), (6, 1), "float32")
    for start, shape in regions:
        builder.place("w", Box((0, 0), shape), "p", start, (6, 1))
    if fill is not None:
        builder.fill(fill)
    return builder.build()


def test_coverage_counts_each_element_once() -> None:
    assert coverage(built((0, (4, 6)))) == ()
    assert coverage(built((0, (2, 6)), fill=Fill("p", 12, (12,), (1,), 0.0))) == ()
    (left,) = coverage(built((0, (2, 6)), (13, (2, 5))), optional=("p",))
    assert left.boxes == (Box((2, 0), (2, 1)),)
    with pytest.raises(LayoutError, match=r"p: \[2:4, 0:1\] of \[4, 6\] is not filled"):
        coverage(built((0, (2, 6)), (13, (2, 5))))
    with pytest.raises(LayoutError, match="more than one"):
        coverage(built((0, (4, 6)), fill=Fill("p", 23, (), (), 0.0)), optional=("p",))
    with pytest.raises(LayoutError, match="not filled at all"):
        coverage(built())


def test_coverage_refuses_a_region_in_the_gaps_of_a_buffer() -> None:
    builder = LayoutBuilder()
    builder.tensor("w", (2, 4), "float32")
    builder.buffer("p", (2, 3), (4, 1), "float32")
    builder.place("w", Box((0, 0), (1, 4)), "p", 0, (4, 1))
    with pytest.raises(LayoutError, match="leaves the tensor"):
        coverage(builder.build(), optional=("p",))
