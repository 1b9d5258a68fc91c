"""Reading a map back: from labels that came out of an operation to boxes in which they rise evenly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from weightdepot.store.layout import Ints
from weightdepot.store.tracing.lattice import MAX_PIECES, TooIrregular

Index = tuple[int | slice, ...]


class Run(NamedTuple):
    """A box of an array, and the labels in it: `first + sum(i_d * steps_d)`. Steps may be 0 or negative."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    steps: tuple[int, ...]


def runs_of(
    labels: Ints, bounds: Sequence[int], natural: Collection[int] = (1,), limit: int = MAX_PIECES
) -> list[Run]:
    """The array as disjoint boxes, every element in exactly one of them.

    Labels of different owners are never in one box; owner k has the labels `bounds[k]` to `bounds[k + 1]`
    (exclusive). A box grows from the first element that is in none yet, along the last dimension first. Any
    two labels make a step: two alone are joined only by one of the `natural` ones.

    Raises TooIrregular beyond `limit` boxes.
    """
    edges: Ints = np.asarray(bounds, dtype=np.int64)
    taken = np.zeros(labels.shape, dtype=bool)
    flat = taken.reshape(-1)
    found: list[Run] = []
    at = 0
    while True:
        at = _next_free(flat, at)
        if at == flat.size:
            return found
        if len(found) == limit:
            raise TooIrregular(f"would be cut into more than {limit} boxes")
        start = tuple(int(i) for i in np.unravel_index(at, labels.shape)) if labels.ndim else ()
        run = _grow(labels, taken, edges, natural, start)
        taken[tuple(slice(o, o + n) for o, n in zip(run.offset, run.shape, strict=True))] = True
        found.append(run)


def _next_free(flat: np.typing.NDArray[np.bool_], at: int) -> int:
    width = 64
    while at < flat.size:
        free = np.flatnonzero(~flat[at : at + width])
        if len(free):
            return at + int(free[0])
        at += width
        width = min(width * 4, 1 << 20)
    return int(flat.size)


def _grow(
    labels: Ints,
    taken: np.typing.NDArray[np.bool_],
    edges: Ints,
    natural: Collection[int],
    offset: tuple[int, ...],
) -> Run:
    shape, steps = [1] * labels.ndim, [0] * labels.ndim
    first = int(labels[offset])
    owner = int(np.searchsorted(edges, first, side="right"))
    low = high = first  # the smallest and largest label of the box so far
    for dim in range(labels.ndim - 1, -1, -1):
        inner = tuple(slice(o, o + n) for o, n in zip(offset[dim + 1 :], shape[dim + 1 :], strict=True))
        at: Index = (*offset[: dim + 1], *inner)
        here = labels[at]
        room = labels.shape[dim] - offset[dim]
        count, step, width = 1, 0, 8
        while count < room:
            stop = min(count + width, room)
            rows: Index = (*offset[:dim], slice(offset[dim] + count, offset[dim] + stop), *inner)
            block = labels[rows].reshape(stop - count, -1)
            if count == 1:
                step = int(block[0, 0]) - first
            far = step * np.arange(count, stop, dtype=np.int64)
            good = (block - here.reshape(1, -1) == far[:, None]).all(axis=1)
            good &= ~taken[rows].reshape(stop - count, -1).any(axis=1)
            for end in (low, high):
                good &= np.searchsorted(edges, end + far, side="right") == owner
            bad = np.flatnonzero(~good)
            if len(bad):
                count += int(bad[0])
                break
            count, width = stop, width * 4
        if count == 2 and step not in natural:
            count = 1
        shape[dim], steps[dim] = count, step if count > 1 else 0
        reach = steps[dim] * (count - 1)
        low, high = low + min(reach, 0), high + max(reach, 0)
    return Run(offset, tuple(shape), first, tuple(steps))
