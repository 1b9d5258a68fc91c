"""Which boxes of one table meet which of another: one vectorized join for tiling, packing and planning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightdepot.store.layout import Ints

COORDINATE_BITS = 40  # layout.MAX_COORDINATE


def key(tensor: Ints, coordinate: Ints) -> Ints:
    """Tensor index and coordinate as one sortable number."""
    return (tensor << COORDINATE_BITS) | coordinate


def distinct(values: Ints) -> Ints:
    """The distinct values, rising. By sorting: numpy's `unique` hashes, which costs several times as much."""
    values = np.sort(values, axis=None)
    fresh = np.ones(len(values), dtype=bool)
    fresh[1:] = values[1:] != values[:-1]
    return values[fresh]


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """For row counts `c`: each row's index repeated `c` times, and the ordinal within its row."""
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return rows, np.arange(len(rows), dtype=np.int64) - first[rows]


def widen(columns: Ints, dims: int, fill: int) -> Ints:
    """The (n, d) columns with `dims` dimensions, padded at the end; where there are more already, the caller
    knows that they are padding."""
    missing = dims - columns.shape[1]
    if missing <= 0:
        return columns[:, :dims]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=fill)


@dataclass(frozen=True)
class Boxes:
    """Boxes of a common list of tensors, as columns; unused dimensions have offset 0 and shape 1."""

    tensor: Ints  # (n,)
    offset: Ints  # (n, D)
    shape: Ints  # (n, D)

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def stop(self) -> Ints:
        return self.offset + self.shape

    @property
    def numel(self) -> Ints:
        numel: Ints = self.shape.prod(axis=1)
        return numel

    def take(self, rows: Ints) -> Boxes:
        return Boxes(self.tensor[rows], self.offset[rows], self.shape[rows])

    def widen(self, dims: int) -> Boxes:
        return Boxes(self.tensor, widen(self.offset, dims, 0), widen(self.shape, dims, 1))

    @classmethod
    def concatenate(cls, parts: list[Boxes], dims: int) -> Boxes:
        if not parts:
            return cls(np.zeros(0, np.int64), np.zeros((0, dims), np.int64), np.zeros((0, dims), np.int64))
        wide = [p.widen(dims) for p in parts]
        return cls(
            np.concatenate([p.tensor for p in wide]),
            np.concatenate([p.offset for p in wide]),
            np.concatenate([p.shape for p in wide]),
        )


@dataclass(frozen=True)
class Sorted:
    """Boxes sorted along the first dimension, so that of many only those near a box are looked at."""

    order: Ints  # (n,) the row that each had before
    boxes: Boxes
    starts: Ints  # (n,) keys of the first coordinates
    furthest: Ints  # (n,) keys of the furthest stop so far: rising, hence searchable, never below a row's own

    @classmethod
    def of(cls, boxes: Boxes) -> Sorted:
        order = np.lexsort((boxes.offset[:, 0], boxes.tensor))
        boxes = boxes.take(order)
        stops = key(boxes.tensor, boxes.stop[:, 0])
        return cls(
            order,
            boxes,
            key(boxes.tensor, boxes.offset[:, 0]),
            np.maximum.accumulate(stops) if len(stops) else stops,
        )

    def meet(self, others: Boxes) -> tuple[Ints, Ints, Boxes]:
        """All pairs (row of `others`, row of these) of the same tensor that share an element, with the common
        box; ordered by row of `others`. Both must have the same number of dimensions."""
        low = np.searchsorted(self.furthest, key(others.tensor, others.offset[:, 0]), side="right")
        high = np.searchsorted(self.starts, key(others.tensor, others.stop[:, 0]), side="left")
        rows, ordinal = expand((high - low).clip(0))
        candidates = low[rows] + ordinal
        offset = np.maximum(others.offset[rows], self.boxes.offset[candidates])
        shape = np.minimum(others.stop[rows], self.boxes.stop[candidates]) - offset
        hit = (shape > 0).all(axis=1) & (others.tensor[rows] == self.boxes.tensor[candidates])
        rows, candidates = rows[hit], candidates[hit]
        return rows, self.order[candidates], Boxes(others.tensor[rows], offset[hit], shape[hit])


def edges_of(boxes: Boxes) -> Ints:
    """Where the boxes begin and end: the distinct keys of (tensor * D + dim, coordinate), rising."""
    dims = boxes.offset.shape[1]
    lines = boxes.tensor[:, None] * dims + np.arange(dims)
    return distinct(np.concatenate([key(lines, boxes.offset), key(lines, boxes.stop)]))


@dataclass(frozen=True)
class Grid:
    """Cut points of every dimension of every tensor, and the cells between them, numbered densely."""

    points: Ints  # sorted keys of (tensor * D + dim, coordinate); each line begins with 0, ends with the size
    cells: Ints  # (tensors, D) number of intervals along each dimension
    base: Ints  # (tensors,) number of the tensor's first cell
    step: Ints  # (tensors, D) what one interval along a dimension adds to a cell's number

    @classmethod
    def cut(cls, shapes: Ints, edges: Ints) -> Grid:
        """The coarsest grid over tensors of `shapes` (t, D) that has every one of `edges` (keys) as a cut."""
        dims = shapes.shape[1]
        lines = np.arange(shapes.size, dtype=np.int64)
        ends = [key(lines, np.zeros_like(lines)), key(lines, shapes.reshape(-1))]
        points = distinct(np.concatenate([*ends, edges]))
        per_line = np.bincount(points >> COORDINATE_BITS, minlength=shapes.size)
        cells = (per_line - 1).reshape(shapes.shape)
        cells[shapes == 0] = 0  # an empty dimension has one point only
        step = np.ones_like(cells)
        for dim in range(dims - 2, -1, -1):
            step[:, dim] = step[:, dim + 1] * cells[:, dim + 1]
        total = cells.prod(axis=1)
        return cls(points, cells, np.cumsum(total) - total, step)

    @property
    def total(self) -> Ints:
        """Cells of each tensor."""
        total: Ints = self.cells.prod(axis=1)
        return total

    def split(self, boxes: Boxes) -> tuple[Ints, Boxes, Ints]:
        """The boxes cut along the grid: row of `boxes`, piece, number of the cell that holds the piece.

        A box may begin or end between two cuts; its pieces are then parts of cells.
        """
        dims = boxes.offset.shape[1]
        lines = boxes.tensor[:, None] * dims + np.arange(dims)
        first = np.searchsorted(self.points, key(lines, boxes.offset), side="right") - 1
        last = np.searchsorted(self.points, key(lines, boxes.stop), side="left")
        counts = last - first
        rows, rest = expand(counts.prod(axis=1))
        offset = np.empty((len(rows), dims), np.int64)
        stop = np.empty_like(offset)
        cell = self.base[boxes.tensor[rows]].copy()
        mask = (1 << COORDINATE_BITS) - 1
        line_start = np.searchsorted(self.points, key(lines, np.zeros_like(lines)), side="left")
        for dim in range(dims - 1, -1, -1):
            n = counts[rows, dim]
            at = first[rows, dim] + rest % n
            rest = rest // n
            offset[:, dim] = np.maximum(self.points[at] & mask, boxes.offset[rows, dim])
            stop[:, dim] = np.minimum(self.points[at + 1] & mask, boxes.stop[rows, dim])
            cell += (at - line_start[rows, dim]) * self.step[boxes.tensor[rows], dim]
        return rows, Boxes(boxes.tensor[rows], offset, stop - offset), cell
