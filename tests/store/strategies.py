"""Random checkpoints and layouts: splits along any dimensions, replicas, transposes, fused parameters,
padding, uneven and empty shards. Each comes with real tensors, so that what a layout says can be checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from weightdepot.store.dtypes import dtype_name
from weightdepot.store.geometry import Box, contiguous_strides
from weightdepot.store.layout import Layout, LayoutBuilder

DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.float64)
Checkpoint = dict[str, torch.Tensor]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern may occur: floats include NaNs and infinities, which must arrive too."""
    count = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of bytes, since NaN differs from itself."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
        )
    )


@dataclass
class Rank:
    """One rank: its layout and its real buffers."""

    builder: LayoutBuilder = field(default_factory=LayoutBuilder)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.builder.build()

    def own(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        self.buffers[name] = buffer
        self.builder.buffer(name, buffer.shape, buffer.stride(), dtype_name(buffer.dtype))
        return buffer

    def hold(self, name: str, whole: torch.Tensor, box: Box, how: str, pad: int = 0) -> None:
        """Place a box of a tensor in a buffer of its own: plainly, transposed, or inside a padded one."""
        self.builder.tensor(name, whole.shape, dtype_name(whole.dtype))
        if not box.numel:
            return
        dims = len(box.shape)
        if how == "transposed" and dims > 1:
            order = tuple(reversed(range(dims)))
            buffer = self.own(
                f"{name}@{box.offset}", torch.zeros([box.shape[d] for d in order], dtype=whole.dtype)
            )
            strides = tuple(buffer.stride(order.index(d)) for d in range(dims))
            self.builder.place(name, box, f"{name}@{box.offset}", 0, strides)
        elif how == "padded" and dims:
            shape = tuple(n + pad for n in box.shape)
            buffer = self.own(f"{name}@{box.offset}", torch.zeros(shape, dtype=whole.dtype))
            start = sum(s * (pad // 2) for s in buffer.stride())
            self.builder.place(name, box, f"{name}@{box.offset}", start, buffer.stride())
        else:
            self.own(f"{name}@{box.offset}", torch.zeros(box.shape, dtype=whole.dtype))
            self.builder.place(name, box, f"{name}@{box.offset}", 0, contiguous_strides(box.shape))

    def fuse(self, names: list[str], whole: Checkpoint, rows: dict[str, tuple[int, int]]) -> None:
        """Row ranges of several tensors, one under the other in one buffer (as gate_up and qkv are)."""
        first = whole[names[0]]
        total = sum(b - a for a, b in rows.values())
        label = "+".join(names)
        buffer = self.own(label, torch.zeros((total, *first.shape[1:]), dtype=first.dtype))
        at = 0
        for name in names:
            a, b = rows[name]
            tensor = whole[name]
            self.builder.tensor(name, tensor.shape, dtype_name(tensor.dtype))
            box = Box((a, *(0,) * (tensor.dim() - 1)), (b - a, *tensor.shape[1:]))
            self.builder.place(name, box, label, at * (buffer.stride(0) if total else 1), buffer.stride())
            at += b - a


def cuts(size: int, parts: int) -> st.SearchStrategy[list[int]]:
    """Where to cut a dimension in `parts` (uneven, possibly empty) pieces: parts + 1 rising numbers."""
    return st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1).map(
        lambda inner: [0, *sorted(inner), size]
    )


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    out: Checkpoint = {}
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
        out[f"t{i}"] = filled(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 30)))
    if draw(st.booleans()):
        columns = draw(st.integers(1, 6))
        for name in ("q", "k", "v"):
            out[name] = filled(
                (draw(st.integers(1, 8)), columns), torch.bfloat16, draw(st.integers(0, 1 << 30))
            )
    return out


@st.composite
def groups(draw: st.DrawFn, checkpoint: Checkpoint, complete: bool) -> list[Rank]:
    """The ranks of one group; together they hold every element when `complete`, else some of them."""
    world = draw(st.integers(1, 4))
    ranks = [Rank() for _ in range(world)]
    fused: list[str] = [n for n in ("q", "k", "v") if n in checkpoint]
    fuse = bool(fused) and draw(st.booleans())
    if fuse:
        lines = {n: draw(cuts(checkpoint[n].shape[0], world)) for n in fused}
        for r, rank in enumerate(ranks):
            rank.fuse(fused, checkpoint, {n: (lines[n][r], lines[n][r + 1]) for n in fused})
    for name, whole in checkpoint.items():
        if fuse and name in fused:
            continue
        how = draw(st.sampled_from(["plain", "transposed", "padded"]))
        pad = draw(st.integers(1, 3))
        if not complete and draw(st.integers(0, 4)) == 0:
            continue
        if whole.dim() == 0 or draw(st.integers(0, 3)) == 0:
            for rank in ranks:  # replicated
                rank.hold(name, whole, Box.whole(whole.shape), how, pad)
        elif whole.dim() > 1 and world == 4 and draw(st.booleans()):
            first, second = (draw(cuts(whole.shape[d], 2)) for d in (0, 1))
            for r, rank in enumerate(ranks):  # a 2-D mesh
                i, j = divmod(r, 2)
                offset = (first[i], second[j], *(0,) * (whole.dim() - 2))
                shape = (first[i + 1] - first[i], second[j + 1] - second[j], *whole.shape[2:])
                rank.hold(name, whole, Box(offset, shape), how, pad)
        else:
            dim = draw(st.integers(0, whole.dim() - 1))
            line = draw(cuts(whole.shape[dim], world))
            extra = draw(st.integers(0, 2))  # neighbours may overlap
            for r, rank in enumerate(ranks):
                a, b = line[r], min(line[r + 1] + extra, whole.shape[dim])
                offset = tuple(a if d == dim else 0 for d in range(whole.dim()))
                shape = tuple(b - a if d == dim else n for d, n in enumerate(whole.shape))
                rank.hold(name, whole, Box(offset, shape), how, pad)
    return ranks


def load(rank: Rank, checkpoint: Checkpoint) -> None:
    """Fill a rank's buffers from the checkpoint, placement by placement: what a reload would give."""
    for p in rank.layout.placements():
        part = checkpoint[p.tensor]
        for dim, (o, n) in enumerate(zip(p.box.offset, p.box.shape, strict=True)):
            part = part.narrow(dim, o, n)
        rank.buffers[p.buffer].as_strided(p.box.shape, p.strides, p.offset).copy_(part)
