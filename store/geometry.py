"""Boxes and strided regions: the arithmetic that everything else stands on. Pure, small, no tensors.

A *box* is an N-D rectangle in a checkpoint tensor. A *region* is where the elements of a box lie in a
local buffer: an element offset and one stride per checkpoint dimension. Transposed, fused, interleaved
and stacked parameters differ in nothing but these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """`offset` inclusive, `offset + shape` exclusive, in elements of the checkpoint tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"offset {self.offset} and shape {self.shape} differ in length")
        if any(n < 0 for n in (*self.offset, *self.shape)):
            raise ValueError(f"negative number in box {self.offset} {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part; None where there is none (an empty box meets nothing)."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def subtract(self, other: Box) -> list[Box]:
        """This box without `other`: at most 2N disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        rest: list[Box] = []
        offset, stop = list(self.offset), list(self.stop)
        for dim in range(len(offset)):
            for a, b in ((offset[dim], common.offset[dim]), (common.stop[dim], stop[dim])):
                if a < b:
                    piece_offset, piece_stop = offset.copy(), stop.copy()
                    piece_offset[dim], piece_stop[dim] = a, b
                    shape = tuple(q - p for p, q in zip(piece_offset, piece_stop, strict=True))
                    rest.append(Box(tuple(piece_offset), shape))
            offset[dim], stop[dim] = common.offset[dim], common.stop[dim]
        return rest

    def translate(self, delta: Sequence[int]) -> Box:
        return Box(tuple(o + d for o, d in zip(self.offset, delta, strict=True)), self.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to one past the last that a strided region touches; 0 where it is empty."""
    if any(n == 0 for n in shape):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two index tuples may share an element (exact for the nested strides that views produce)."""
    dims = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1)
    reach = 0
    for stride, n in dims:
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that cover elements `start` to `stop` (exclusive) of a row-major tensor: at most 2N - 1.

    FSDP1 and ZeRO-3 shard parameters so.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"range {start} to {stop} is outside a tensor of {total} elements")
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        for inner in flat_range_boxes(shape[1:], start - first * row, stop - first * row):
            yield Box((first, *inner.offset), (1, *inner.shape))
        return
    whole_from = first if start == first * row else first + 1
    whole_to = last + 1 if stop == (last + 1) * row else last
    if whole_from > first:
        for inner in flat_range_boxes(shape[1:], start - first * row, row):
            yield Box((first, *inner.offset), (1, *inner.shape))
    if whole_to > whole_from:
        yield Box((whole_from, *(0,) * (len(shape) - 1)), (whole_to - whole_from, *shape[1:]))
    if whole_to <= last:
        for inner in flat_range_boxes(shape[1:], 0, stop - last * row):
            yield Box((last, *inner.offset), (1, *inner.shape))
