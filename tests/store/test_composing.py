"""Two layouts in a row: the composed one says what going through both would give, element by element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightdepot.store.composing import compose
from weightdepot.store.errors import LayoutError
from weightdepot.store.geometry import Box, contiguous_strides, flat_range_boxes
from weightdepot.store.layout import Layout, LayoutBuilder


def views(draw: st.DrawFn, whole: torch.Tensor) -> torch.Tensor:
    """A view of a whole tensor, as exporters make: slices, transposes, splits and merges of dimensions."""
    view = whole
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "transpose", "split", "merge", "select", "step"]))
        dims = view.dim()
        if kind == "narrow" and dims:
            dim = draw(st.integers(0, dims - 1))
            a = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, a, draw(st.integers(1, view.shape[dim] - a)))
        elif kind == "transpose" and dims > 1:
            view = view.transpose(0, draw(st.integers(1, dims - 1)))
        elif kind == "split" and dims:
            dim = draw(st.integers(0, dims - 1))
            factor = draw(st.sampled_from([f for f in (1, 2, 3, 4) if view.shape[dim] % f == 0]))
            shape = tuple(view.shape)
            view = view.view(*shape[:dim], factor, shape[dim] // factor, *shape[dim + 1 :])
        elif kind == "merge" and dims > 1:
            dim = draw(st.integers(0, dims - 2))
            if view.stride(dim) == view.stride(dim + 1) * view.shape[dim + 1]:
                view = view.flatten(dim, dim + 1)
        elif kind == "select" and dims:
            dim = draw(st.integers(0, dims - 1))
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        elif kind == "step" and dims:
            view = view[:: draw(st.integers(1, 3))]
    return view


def region(
    buffer: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    return buffer.as_strided(shape, strides, buffer.storage_offset() + offset)


def sliced(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@st.composite
def exports(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Layout, Layout, dict[str, torch.Tensor]]:
    """Whole intermediate tensors with a number in each element, an export of views of them, and shards."""
    full, shards = LayoutBuilder(), LayoutBuilder()
    checkpoint: dict[str, torch.Tensor] = {}
    local: dict[str, torch.Tensor] = {}
    count = 0
    for i in range(draw(st.integers(1, 2))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        whole = torch.arange(count, count + math.prod(shape)).reshape(shape)
        count += whole.numel()
        name = f"f{i}"
        full.buffer(name, shape, contiguous_strides(shape), "int64")
        shards.tensor(name, shape, "int64")
        for j in range(draw(st.integers(1, 3))):
            view = views(draw, whole)
            tensor = f"{name}.{j}"
            checkpoint[tensor] = view.contiguous()
            full.tensor(tensor, view.shape, "int64")
            full.place(tensor, Box.whole(view.shape), name, int(view.storage_offset()), view.stride())
        if draw(st.booleans()):  # a flat range
            a = draw(st.integers(0, whole.numel()))
            b = draw(st.integers(a, whole.numel()))
            pad = draw(st.integers(0, 3))
            local[name] = torch.full((pad + b - a + 2,), -1)
            local[name][pad : pad + b - a] = whole.reshape(-1)[a:b]
            shards.buffer(name, local[name].shape, (1,), "int64")
            shards.place_flat(name, a, b, name, pad)
        else:  # a box, held transposed or plainly
            offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
            box = Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
            held = sliced(whole, box)
            order = draw(st.permutations(range(len(shape))))
            local[name] = held.permute(order).contiguous()
            back = [order.index(d) for d in range(len(shape))]
            shards.buffer(name, local[name].shape, local[name].stride(), "int64")
            shards.place(name, box, name, 0, [local[name].stride(k) for k in back])
    return checkpoint, full.build(), shards.build(), local


@given(exports())
def test_the_composed_layout_is_both_one_after_the_other(
    export: tuple[dict[str, torch.Tensor], Layout, Layout, dict[str, torch.Tensor]],
) -> None:
    checkpoint, full, shards, local = export
    made = compose(full, shards)
    held = {int(v) for b in local.values() for v in b.reshape(-1) if v >= 0}
    seen = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in checkpoint.items()}
    for p in made.placements():
        there = region(local[p.buffer], p.box.shape, p.strides, p.offset)
        assert torch.equal(there, sliced(checkpoint[p.tensor], p.box)), p
        sliced(seen[p.tensor], p.box).add_(1)
    for name, whole in checkpoint.items():
        expected = torch.tensor([int(v) in held for v in whole.reshape(-1)]).reshape(whole.shape)
        assert torch.equal(seen[name].bool(), expected), name
        assert int(seen[name].max()) <= 1


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_a_flat_range_lies_where_flattening_puts_it(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).reshape(shape)
    flat = whole.permute(order).reshape(-1)
    builder = LayoutBuilder()
    builder.tensor("w", shape, "int64")
    builder.buffer("flat", (stop - start + 3,), (1,), "int64")
    builder.place_flat("w", start, stop, "flat", 2, order)
    buffer = torch.full((stop - start + 3,), -1)
    buffer[2 : 2 + stop - start] = flat[start:stop]
    layout = builder.build()
    total = 0
    for p in layout.placements():
        assert torch.equal(region(buffer, p.box.shape, p.strides, p.offset), sliced(whole, p.box))
        total += p.box.numel
    assert total == stop - start
    assert len(layout.table) <= max(1, 2 * len(shape) - 1)
    if order == list(range(len(shape))):
        assert [p.box for p in layout.placements()] == list(flat_range_boxes(shape, start, stop))


def test_a_flat_range_outside_its_tensor_is_refused() -> None:
    builder = LayoutBuilder()
    builder.tensor("w", (2, 3), "int64")
    with pytest.raises(ValueError, match="outside"):
        builder.place_flat("w", 3, 7, "flat", 0)
    with pytest.raises(ValueError, match="no order"):
        builder.place_flat("w", 0, 6, "flat", 0, (0, 0))


def test_layouts_that_do_not_speak_of_the_same_tensors_are_refused_by_name() -> None:
    full, shards = LayoutBuilder(), LayoutBuilder()
    full.tensor("w", (4, 2), "float32")
    full.buffer("a", (4, 2), (2, 1), "float32")
    full.place("w", Box.whole((4, 2)), "a", 0, (2, 1))
    shards.tensor("a", (8, 2), "float32")
    with pytest.raises(
        LayoutError, match=r"a: is float32 \[4, 2\] as a whole, but the shards are of"
    ) as caught:
        compose(full.build(), shards.build())
    assert [f.tensor for f in caught.value.faults] == ["a"]


def test_what_a_rank_holds_nothing_of_is_left_out() -> None:
    full, shards = LayoutBuilder(), LayoutBuilder()
    for name in ("a", "b"):
        full.tensor(f"w.{name}", (4,), "float32")
        full.buffer(name, (4,), (1,), "float32")
        full.place(f"w.{name}", Box.whole((4,)), name, 0, (1,))
    shards.tensor("b", (4,), "float32")
    shards.buffer("here", (2,), (1,), "float32")
    shards.place("b", Box((2,), (2,)), "here", 0, (1,))
    made = compose(full.build(), shards.build())
    assert [t.name for t in made.tensors] == ["w.b"]
    assert [(p.box, p.offset) for p in made.placements()] == [(Box((2,), (2,)), 0)]
