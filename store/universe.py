"""The tensors of a checkpoint, numbered once, and layouts in these numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.layout import Ints, Layout, TensorSpec, pad
from weightdepot.store.overlap import Boxes, widen


@dataclass(frozen=True)
class Universe:
    """The tensors of a checkpoint by number; `shapes` has a column for each of `dims` dimensions."""

    tensors: tuple[TensorSpec, ...]
    index: Mapping[str, int]
    shapes: Ints  # (t, D)

    @property
    def dims(self) -> int:
        return int(self.shapes.shape[1])

    @cached_property
    def itemsize(self) -> Ints:
        """(t,) bytes of one element."""
        return np.array([ITEMSIZE[t.dtype] for t in self.tensors], dtype=np.int64)

    def nbytes(self, boxes: Boxes) -> Ints:
        """(n,)"""
        return boxes.numel * self.itemsize[boxes.tensor]

    def boxes(self, layout: Layout) -> tuple[Ints, Boxes]:
        """The layout's boxes with the universe's tensor numbers, and the row of each in the layout's table.
        Tensors that the universe does not know are left out."""
        numbers = np.array([self.index.get(t.name, -1) for t in layout.tensors] or [-1], dtype=np.int64)
        table = layout.table
        rows = np.flatnonzero(numbers[table.tensor] >= 0)
        return rows, Boxes(
            numbers[table.tensor[rows]],
            widen(table.offset[rows], self.dims, 0),
            widen(table.shape[rows], self.dims, 1),
        )


def universe_of(tensors: Sequence[TensorSpec], dims: int = 1) -> Universe:
    dims = max([dims, *(len(t.shape) for t in tensors)])
    shapes = np.array([pad(t.shape, dims, 1) for t in tensors], dtype=np.int64).reshape(-1, dims)
    return Universe(tuple(tensors), {t.name: i for i, t in enumerate(tensors)}, shapes)


def check_reader(universe: Universe, layout: Layout, who: str) -> None:
    """Raises LayoutError naming every tensor that the reader wants and the checkpoint does not have so."""
    faults = []
    wanted = set(np.unique(layout.table.tensor).tolist())
    for i, spec in enumerate(layout.tensors):
        if i not in wanted:
            continue
        at = universe.index.get(spec.name)
        if at is None:
            faults.append(LayoutFault(spec.name, "no producer rank publishes it"))
        elif universe.tensors[at] != spec:
            have = universe.tensors[at]
            faults.append(
                LayoutFault(
                    spec.name,
                    f"published as {have.dtype} {list(have.shape)}, "
                    f"wanted as {spec.dtype} {list(spec.shape)}",
                )
            )
    if faults:
        raise LayoutError(f"{who} asks for tensors that are not published so", faults)
