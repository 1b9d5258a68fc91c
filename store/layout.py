"""Layouts: where the elements of checkpoint tensors lie in one rank's local buffers.

A layout is plain data. It is compared by digest, stored compressed, and never pickled. Its placements
are columns of numbers, not objects, because the largest models have a million of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import numpy as np

from weightdepot.store import wire
from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.geometry import Box, contiguous_strides, extent, flat_range_boxes, overlaps_itself

Ints = wire.Ints

MAX_DIMS = 8
MAX_COORDINATE = 1 << 40  # keys pack a tensor's index and a coordinate into one int64


@dataclass(frozen=True)
class TensorSpec:
    """A checkpoint tensor: the common language of both sides."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class BufferSpec:
    """A local tensor. `strides` in elements, as torch counts them."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Placement:
    """One box of a checkpoint tensor and where it lies in a buffer.

    `offset` counts elements from the buffer's first one; `strides` has one entry for each dimension of
    the checkpoint tensor, in elements of the buffer.
    """

    tensor: str
    box: Box
    buffer: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Fill:
    """A region of a buffer that the loader sets to a constant (padding of a vocabulary)."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Table:
    """Placements as columns. `D` is the widest tensor's number of dimensions; narrower rows are padded
    at the end with offset 0, shape 1, stride 0."""

    tensor: Ints  # (n,)  index into Layout.tensors
    offset: Ints  # (n, D)
    shape: Ints  # (n, D)
    buffer: Ints  # (n,)  index into Layout.buffers
    start: Ints  # (n,)  element offset in the buffer
    strides: Ints  # (n, D)

    DIMS: ClassVar[dict[str, int]] = {
        "tensor": 1, "offset": 2, "shape": 2, "buffer": 1, "start": 1, "strides": 2,
    }  # fmt: skip

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def dims(self) -> int:
        return int(self.offset.shape[1])


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[tuple[str, tuple[int, ...], str]]
    buffers: list[tuple[str, tuple[int, ...], tuple[int, ...], str]]
    fills: list[tuple[str, int, tuple[int, ...], tuple[int, ...], float]]


@dataclass(frozen=True, eq=False)
class Layout:
    """All placements of one rank. Build with `LayoutBuilder`; equal if and only if the digests are."""

    tensors: tuple[TensorSpec, ...]
    buffers: tuple[BufferSpec, ...]
    table: Table
    fills: tuple[Fill, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Hex BLAKE2b-128 of the uncompressed encoding."""
        return hashlib.blake2b(self._encoded, digest_size=16).hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the placements cover, in checkpoint data types."""
        sizes = np.array([ITEMSIZE[t.dtype] for t in self.tensors] or [0], dtype=np.int64)
        return int((self.table.shape.prod(axis=1) * sizes[self.table.tensor]).sum()) if len(self.table) else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def placements(self) -> Iterator[Placement]:
        """The rows as objects, for reading and for tests."""
        t = self.table
        for i in range(len(t)):
            spec = self.tensors[t.tensor[i]]
            d = len(spec.shape)
            yield Placement(
                spec.name,
                Box(tuple(t.offset[i, :d].tolist()), tuple(t.shape[i, :d].tolist())),
                self.buffers[t.buffer[i]].name,
                int(t.start[i]),
                tuple(t.strides[i, :d].tolist()),
            )

    @cached_property
    def _encoded(self) -> bytes:
        header = _Header(
            tensors=[(t.name, t.shape, t.dtype) for t in self.tensors],
            buffers=[(b.name, b.shape, b.strides, b.dtype) for b in self.buffers],
            fills=[(f.buffer, f.offset, f.shape, f.strides, f.value) for f in self.fills],
        )
        return wire.encode("layout", header, {name: getattr(self.table, name) for name in Table.DIMS})

    def to_bytes(self) -> bytes:
        return wire.compress(self._encoded)

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Decode and check everything. Raises InvalidRequest for bytes that are not a layout, and
        LayoutError for one that does not hold together."""
        header, arrays = wire.decode("layout", wire.decompress(data, "layout"), _Header, Table.DIMS)
        n, dims = arrays["offset"].shape
        if not 1 <= dims <= MAX_DIMS or any(
            a.shape != ((n,) if a.ndim == 1 else (n, dims)) for a in arrays.values()
        ):
            raise InvalidRequest("a layout whose columns differ in length")
        layout = cls(
            tuple(TensorSpec(*t) for t in header.tensors),
            tuple(BufferSpec(*b) for b in header.buffers),
            Table(**arrays),
            tuple(Fill(*f) for f in header.fills),
        )
        check(layout)
        return layout


def _spec_faults(layout: Layout) -> list[LayoutFault]:
    faults: list[LayoutFault] = []
    for kind, specs in (("tensor", layout.tensors), ("buffer", layout.buffers)):
        seen: set[str] = set()
        for spec in specs:
            if spec.name in seen:
                faults.append(LayoutFault(spec.name, f"this {kind} is listed twice"))
            seen.add(spec.name)
            if spec.dtype not in ITEMSIZE:
                faults.append(LayoutFault(spec.name, f"unknown data type {spec.dtype!r}"))
            if len(spec.shape) > MAX_DIMS or any(not 0 <= n < MAX_COORDINATE for n in spec.shape):
                faults.append(LayoutFault(spec.name, f"shape {spec.shape} is out of range"))
    faults += [
        LayoutFault(b.name, f"strides {b.strides} do not suit shape {b.shape}")
        for b in layout.buffers
        if len(b.strides) != len(b.shape) or any(not 0 <= s < MAX_COORDINATE for s in b.strides)
    ]
    by_name = {b.name: b for b in layout.buffers}
    for f in layout.fills:
        target = by_name.get(f.buffer)
        if (
            target is None
            or len(f.strides) != len(f.shape)
            or min((f.offset, *f.shape, *f.strides)) < 0
            or f.offset + extent(f.shape, f.strides) > extent(target.shape, target.strides)
        ):
            faults.append(LayoutFault(f.buffer, "a fill lies outside this buffer"))
    return faults


def check(layout: Layout) -> None:
    """Raises LayoutError naming every placement that does not lie inside its tensor and its buffer."""
    faults = _spec_faults(layout)
    table = layout.table
    if faults or not len(table):
        if faults:
            raise LayoutError("the layout does not hold together", faults)
        return
    if not (
        ((table.tensor >= 0) & (table.tensor < len(layout.tensors))).all()
        and ((table.buffer >= 0) & (table.buffer < len(layout.buffers))).all()
    ):
        raise LayoutError("the layout names tensors or buffers that it does not list")
    shapes = np.array([pad(t.shape, table.dims, 1) for t in layout.tensors], dtype=np.int64)
    ranks = np.array([len(t.shape) for t in layout.tensors], dtype=np.int64)
    extents = np.array([extent(b.shape, b.strides) for b in layout.buffers], dtype=np.int64)
    small = np.ones(len(table), dtype=bool)
    for column in (table.offset, table.shape, table.strides):
        small &= ((column >= 0) & (column < MAX_COORDINATE)).all(axis=1)
    small &= (table.start >= 0) & (table.start < MAX_COORDINATE)
    outside = (table.offset + table.shape > shapes[table.tensor]).any(axis=1)
    # in floats, since products of crafted numbers could wrap around
    last = table.start + ((table.shape - 1).clip(0).astype(np.float64) * table.strides).sum(axis=1)
    empty = (table.shape == 0).any(axis=1)
    beyond = (last >= extents[table.buffer]) & ~empty
    padded = np.arange(table.dims)[None, :] >= ranks[table.tensor][:, None]
    crooked = (padded & ((table.offset != 0) | (table.shape != 1) | (table.strides != 0))).any(axis=1)
    for bad, reason in (
        (~small, "a placement has a number out of range"),
        (small & outside, "a placement reaches outside the tensor"),
        (small & beyond, "a placement reaches outside its buffer"),
        (crooked, "a placement has more dimensions than the tensor"),
    ):
        faults += [LayoutFault(layout.tensors[table.tensor[i]].name, reason) for i in np.flatnonzero(bad)]
    if faults:
        raise LayoutError("the layout does not hold together", faults)


def pad(values: Sequence[int], dims: int, fill: int) -> tuple[int, ...]:
    return (*values, *(fill,) * (dims - len(values)))


class LayoutBuilder:
    """Collects specs and placements in any order; `build` checks them and makes the layout."""

    def __init__(self) -> None:
        self._tensors: dict[str, TensorSpec] = {}
        self._buffers: dict[str, BufferSpec] = {}
        self._placements: list[Placement] = []
        self._fills: list[Fill] = []

    def tensor(self, name: str, shape: Iterable[int], dtype: str) -> None:
        """State a checkpoint tensor. Raises LayoutError when it was stated otherwise before."""
        spec = TensorSpec(name, tuple(shape), dtype)
        if self._tensors.setdefault(name, spec) != spec:
            raise LayoutError(
                "a tensor is stated twice", [LayoutFault(name, f"{self._tensors[name]} and {spec}")]
            )

    def buffer(self, name: str, shape: Iterable[int], strides: Iterable[int], dtype: str) -> None:
        spec = BufferSpec(name, tuple(shape), tuple(strides), dtype)
        if self._buffers.setdefault(name, spec) != spec:
            raise LayoutError(
                "a buffer is stated twice", [LayoutFault(name, f"{self._buffers[name]} and {spec}")]
            )

    def place(self, tensor: str, box: Box, buffer: str, offset: int, strides: Sequence[int]) -> None:
        """Empty boxes are left out: a rank that holds nothing of a tensor is a rank like others."""
        if box.numel:
            self._placements.append(Placement(tensor, box, buffer, offset, tuple(strides)))

    def place_flat(
        self,
        tensor: str,
        start: int,
        stop: int,
        buffer: str,
        offset: int,
        order: Sequence[int] | None = None,
    ) -> None:
        """Place elements `start` to `stop` (exclusive) of a flattened tensor, which was stated before and lie
        one after another from element `offset` of a contiguous buffer on.

        order: the dimensions from the outermost to the innermost one, where it is not row-major (a parameter
        that was flattened in the order of its memory).
        Raises ValueError for a range outside the tensor, or an order that is not one of its dimensions.
        """
        shape = self._tensors[tensor].shape
        order = tuple(range(len(shape))) if order is None else tuple(order)
        if sorted(order) != list(range(len(shape))):
            raise ValueError(f"{order} is no order of the dimensions of {shape}")
        turned = tuple(shape[d] for d in order)
        steps = contiguous_strides(turned)
        back = [order.index(d) for d in range(len(shape))]
        strides = tuple(steps[j] for j in back)
        for piece in flat_range_boxes(turned, start, stop):
            first = sum(o * s for o, s in zip(piece.offset, steps, strict=True))
            box = Box(tuple(piece.offset[j] for j in back), tuple(piece.shape[j] for j in back))
            self.place(tensor, box, buffer, offset + first - start, strides)

    def fill(self, fill: Fill) -> None:
        self._fills.append(fill)

    def build(self) -> Layout:
        tensors, buffers = tuple(self._tensors.values()), tuple(self._buffers.values())
        tensor_index = {t.name: i for i, t in enumerate(tensors)}
        buffer_index = {b.name: i for i, b in enumerate(buffers)}
        faults = [
            LayoutFault(p.tensor, f"placed in {p.buffer!r}, but tensor or buffer was never stated")
            for p in self._placements
            if p.tensor not in tensor_index or p.buffer not in buffer_index
        ]
        faults += [
            LayoutFault(p.tensor, f"its region in {p.buffer!r} overlaps itself (strides {p.strides})")
            for p in self._placements
            if overlaps_itself(p.box.shape, p.strides)
        ]
        faults += [
            LayoutFault(t.name, f"has {len(t.shape)} dimensions; at most {MAX_DIMS} are carried")
            for t in tensors
            if len(t.shape) > MAX_DIMS
        ]
        if faults:
            raise LayoutError("the layout does not hold together", faults)
        dims = max([1, *(len(t.shape) for t in tensors)])
        rows = self._placements

        def column(values: Iterable[Any], *shape: int) -> Ints:
            array = np.array(list(values), dtype=np.int64).reshape(len(rows), *shape)
            array.flags.writeable = False
            return array

        layout = Layout(
            tensors,
            buffers,
            Table(
                tensor=column(tensor_index[p.tensor] for p in rows),
                offset=column((pad(p.box.offset, dims, 0) for p in rows), dims),
                shape=column((pad(p.box.shape, dims, 1) for p in rows), dims),
                buffer=column(buffer_index[p.buffer] for p in rows),
                start=column(p.offset for p in rows),
                strides=column((pad(p.strides, dims, 0) for p in rows), dims),
            ),
            tuple(self._fills),
        )
        check(layout)
        return layout


def renamed(layout: Layout, names: Mapping[str, str]) -> Layout:
    """Of the layout the tensors that `names` lists, under the names it gives them, and their buffers.

    Raises LayoutError where two tensors would bear one name.
    """
    builder = LayoutBuilder()
    faults = []
    taken: dict[str, str] = {}
    for t in layout.tensors:
        if t.name in names:
            name = names[t.name]
            if name in taken:
                faults.append(LayoutFault(name, f"would be both {taken[name]!r} and {t.name!r}"))
                continue
            taken[name] = t.name
            builder.tensor(name, t.shape, t.dtype)
    if faults:
        raise LayoutError("two tensors cannot bear one name", faults)
    buffers = {b.name: b for b in layout.buffers}
    for p in layout.placements():
        if p.tensor in names:
            b = buffers[p.buffer]
            builder.buffer(b.name, b.shape, b.strides, b.dtype)
            builder.place(names[p.tensor], p.box, p.buffer, p.offset, p.strides)
    return builder.build()


def manifest_of(layouts: Iterable[Layout]) -> tuple[TensorSpec, ...]:
    """The checkpoint that these layouts describe together, in order of first mention.

    Raises LayoutError naming every tensor on whose shape or data type they disagree.
    """
    found: dict[str, TensorSpec] = {}
    faults: dict[str, LayoutFault] = {}
    for layout in layouts:
        for spec in layout.tensors:
            first = found.setdefault(spec.name, spec)
            if first != spec:
                faults[spec.name] = LayoutFault(
                    spec.name,
                    f"{first.dtype} {list(first.shape)} on one rank, "
                    f"{spec.dtype} {list(spec.shape)} on another",
                )
    if faults:
        raise LayoutError("the ranks do not describe the same checkpoint", faults.values())
    return tuple(found.values())
