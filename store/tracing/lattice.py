"""Strided regions cut into boxes: the arithmetic under the tracer. Whole numbers only, no tensors.

A *lattice* is what a strided view is: the positions `start + sum(i_d * step_d)` of a linear memory, where
`i_d` runs from 0 to `n_d` exclusive. Each position has an *image*, `image + sum(i_d * image_step_d)`: where
the same element lies in another memory. A copy from one view to another is one lattice.

A *frame* is a mixed-radix numbering of a linear memory: steps that divide one another, with a digit for
each. The coordinates of a row-major tensor are such digits. `cut` turns a lattice into boxes of digits, on
each of which the image is one start and one step per digit. Boxes can be intersected and subtracted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from weightdepot.store.layout import Ints

# (n, step, image step) of one dimension
Dim = tuple[int, int, int]
Dims = tuple[Dim, ...]

MAX_PIECES = 4096  # boxes that one copy may be cut into; beyond, a map by boxes is no sensible form
UNBOUNDED = 1 << 62


class TooIrregular(ValueError):
    """A lattice that is no union of a sensible number of boxes."""


class OutsideFrame(ValueError):
    """A lattice that reaches positions to which the frame gives no coordinates."""


class Piece(NamedTuple):
    """A box of digits, and the image of its elements."""

    digits: tuple[int, ...]  # inclusive
    counts: tuple[int, ...]
    image: int  # of the first element
    image_steps: tuple[int, ...]  # for each digit


class Frame:
    """Digits, the one with the largest step first."""

    __slots__ = ("dims", "index", "ndim", "sizes", "steps")

    def __init__(self, steps: Sequence[int], sizes: Sequence[int], dims: Sequence[int], ndim: int) -> None:
        self.steps = tuple(steps)
        self.sizes = tuple(sizes)
        self.dims = tuple(dims)  # the tensor dimension that each digit is the coordinate of
        self.ndim = ndim
        self.index = {step: j for j, step in enumerate(self.steps)}

    @classmethod
    def of_tensor(cls, shape: Sequence[int], strides: Sequence[int]) -> Frame:
        """The coordinates of a tensor whose strides are nested (any permutation of dimensions, gaps too).

        Dimensions of size 1 have no digit. Raises OutsideFrame for strides that are not nested.
        """
        order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: -strides[d])
        for outer, inner in pairwise(order):
            if strides[outer] < strides[inner] * shape[inner]:
                raise OutsideFrame(f"strides {tuple(strides)} of shape {tuple(shape)} are not nested")
        return cls([strides[d] for d in order], [shape[d] for d in order], order, len(shape))

    @classmethod
    def of_memory(cls, *steps: Iterable[int]) -> Frame:
        """A frame of a whole memory: of the steps, as many as divide one another, the first ones first."""
        chain = [1]
        for step in (s for some in steps for s in sorted(set(some))):
            at = bisect_left(chain, step)
            if (
                at == 0
                or (at < len(chain) and (chain[at] == step or chain[at] % step))
                or step % chain[at - 1]
            ):
                continue
            chain.insert(at, step)
        chain.reverse()
        sizes = [UNBOUNDED, *(a // b for a, b in pairwise(chain))]
        return cls(chain, sizes, range(len(chain)), len(chain))

    def coordinates(self, piece: Piece) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Offset, shape and image steps of a piece for every dimension of the tensor."""
        if len(self.dims) == self.ndim and self.dims == tuple(range(self.ndim)):
            return piece.digits, piece.counts, piece.image_steps
        offset, shape, steps = [0] * self.ndim, [1] * self.ndim, [0] * self.ndim
        for j, dim in enumerate(self.dims):
            offset[dim], shape[dim], steps[dim] = piece.digits[j], piece.counts[j], piece.image_steps[j]
        return tuple(offset), tuple(shape), tuple(steps)


def normal(dims: Iterable[Dim], frame: Frame) -> Dims:
    """Smallest step first, with dimensions joined where both position and image run on."""
    found: list[Dim] = []
    for n, step, image_step in sorted((d for d in dims if d[0] != 1), key=_by_step):
        if found:
            m, below, image_below = found[-1]
            # a step that is no digit is enumerated later: joined, it would be enumerated for longer
            if step == m * below and image_step == m * image_below and below in frame.index:
                found[-1] = (m * n, below, image_below)
                continue
        found.append((n, step, image_step))
    return tuple(found)


def _by_step(dim: Dim) -> tuple[int, int]:
    return dim[1], -dim[0]


def cut(start: int, image: int, dims: Iterable[Dim], frame: Frame, limit: int = MAX_PIECES) -> list[Piece]:
    """The lattice as boxes of the frame's digits, every index tuple in exactly one of them.

    Raises TooIrregular beyond `limit` boxes, and OutsideFrame where a position has no digits.
    """
    steps, sizes, index = frame.steps, frame.sizes, frame.index
    pieces: list[Piece] = []
    todo: list[tuple[int, int, Dims]] = [(start, image, normal(dims, frame))]
    while todo:
        start, image, rest = todo.pop()
        digits: list[int] = []
        left = start
        for step in steps:
            digit, left = divmod(left, step)
            digits.append(digit)
        counts, image_steps = [1] * len(steps), [0] * len(steps)
        for at, (n, step, image_step) in enumerate(rest):
            j = index.get(step, -1)
            if j < 0 or counts[j] != 1:
                # no digit moves in this step (a slice with a step, a broadcast): one box for each index
                if n + len(pieces) + len(todo) > limit:
                    raise TooIrregular(f"would be cut into more than {limit} boxes")
                others = rest[:at] + rest[at + 1 :]
                todo.extend((start + i * step, image + i * image_step, others) for i in reversed(range(n)))
                break
            if digits[j] + n > sizes[j]:
                _carry(todo, start, image, rest, at, digits[j], j, frame)
                if len(pieces) + len(todo) > limit:
                    raise TooIrregular(f"would be cut into more than {limit} boxes")
                break
            counts[j], image_steps[j] = n, image_step
        else:
            if left or any(d >= s for d, s in zip(digits, sizes, strict=True)):
                raise OutsideFrame(f"position {start} is not an element of the tensor")
            pieces.append(Piece(tuple(digits), tuple(counts), image, tuple(image_steps)))
    return pieces


def _carry(
    todo: list[tuple[int, int, Dims]],
    start: int, image: int, rest: Dims, at: int, digit: int, j: int, frame: Frame,
) -> None:  # fmt: skip
    """A run that passes the end of its digit: up to the end, whole turns of the digit, and what remains."""
    n, step, image_step = rest[at]
    size = frame.sizes[j]
    if j == 0 or frame.steps[j - 1] != step * size or digit >= size:
        raise OutsideFrame(f"a run of {n} from position {start} leaves the tensor")
    others = rest[:at] + rest[at + 1 :]
    head = size - digit if digit else 0
    turns, tail = divmod(n - head, size)
    done = head + turns * size
    parts: list[tuple[int, int, Dims, Dims]] = []
    if head:
        parts.append((start, image, others, ((head, step, image_step),)))
    if turns:
        whole = ((size, step, image_step), (turns, step * size, image_step * size))
        parts.append((start + head * step, image + head * image_step, others, whole))
    if tail:
        parts.append((start + done * step, image + done * image_step, others, ((tail, step, image_step),)))
    for begin, begin_image, kept, new in reversed(parts):
        # sorted, and not joined again: joining would undo the cut
        dims = sorted((d for d in (*kept, *new) if d[0] != 1), key=_by_step)
        todo.append((begin, begin_image, tuple(dims)))


def disjoint(digits: Ints, counts: Ints) -> bool:
    """Whether no two of the boxes (rows) share an element."""
    if len(digits) < 2:
        return True
    if digits.shape[1] == 0:
        return False  # two boxes of a single element
    order = np.argsort(digits[:, 0], kind="stable")
    low = digits[order]
    high = low + counts[order]
    # rows after i that begin, along the first digit, before i ends
    reach = np.searchsorted(low[:, 0], high[:, 0], side="left")
    width = int((reach - np.arange(len(low))).max())
    block = max(1, min(1024, (1 << 22) // max(width, 1)))
    for a in range(0, len(low), block):
        b = min(a + block, len(low))
        # rows a..b against themselves and every later row that any of them can reach
        stop = min(len(low), int(reach[a:b].max()))
        if stop - a < 2:
            continue
        meets = np.ones((b - a, stop - a), dtype=bool)
        for k in range(low.shape[1]):
            meets &= low[a:b, k, None] < high[None, a:stop, k]
            meets &= low[None, a:stop, k] < high[a:b, k, None]
        rows = np.arange(b - a)
        meets[rows, rows] = False
        if meets.any():
            return False
    return True
