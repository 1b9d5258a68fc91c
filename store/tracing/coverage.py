"""Proof that a layout fills its buffers: every element by exactly one placement or fill, or named as left."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.geometry import Box
from weightdepot.store.layout import BufferSpec, Layout
from weightdepot.store.tracing.lattice import Dim, Frame, OutsideFrame, TooIrregular, cut, disjoint

Region = tuple[int, list[Dim]]


@dataclass(frozen=True)
class Left:
    """What nothing fills. `boxes` in the buffer's own coordinates; none where all of it is left."""

    parameter: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...] = ()

    @property
    def whole(self) -> bool:
        return not self.boxes

    def __str__(self) -> str:
        return f"{self.parameter}: {self.text}"

    @property
    def text(self) -> str:
        if self.whole:
            return f"{list(self.shape)} is not filled at all"
        first = self.boxes[0]
        spans = ", ".join(f"{a}:{b}" for a, b in zip(first.offset, first.stop, strict=True))
        more = f" and {len(self.boxes) - 1} more boxes" if len(self.boxes) > 1 else ""
        return f"[{spans}]{more} of {list(self.shape)} is not filled"


def is_optional(name: str, optional: Iterable[str]) -> bool:
    """Whether a parameter is named, or matched by a pattern with `*`, among those that may be left."""
    return any(name == o or ("*" in o and fnmatchcase(name, o)) for o in optional)


def coverage(layout: Layout, *, optional: Collection[str] = ()) -> tuple[Left, ...]:
    """What the layout leaves of its buffers, all of it `optional` (names, or patterns with `*`).

    Raises LayoutError naming every buffer of which an element is filled twice, or lies in no region and is
    not optional, and every region that reaches elements that are not the buffer's.
    """
    regions: list[list[Region]] = [[] for _ in layout.buffers]
    table = layout.table
    rows = zip(
        table.buffer.tolist(), table.start.tolist(), table.shape.tolist(), table.strides.tolist(), strict=True
    )
    for buffer, start, shape, strides in rows:
        regions[buffer].append((start, [(n, s, 0) for n, s in zip(shape, strides, strict=True) if n != 1]))
    number = {b.name: i for i, b in enumerate(layout.buffers)}
    for fill in layout.fills:
        dims = [(n, s, 0) for n, s in zip(fill.shape, fill.strides, strict=True) if n != 1]
        regions[number[fill.buffer]].append((fill.offset, dims))
    faults: list[LayoutFault] = []
    left: list[Left] = []
    for spec, mine in zip(layout.buffers, regions, strict=True):
        try:
            rest = _rest(spec, mine)
        except (OutsideFrame, TooIrregular, _Twice) as error:
            faults.append(LayoutFault(spec.name, str(error)))
            continue
        if rest is not None:
            left.append(rest)
            if not is_optional(spec.name, optional):
                faults.append(LayoutFault(spec.name, rest.text))
    if faults:
        raise LayoutError("the layout does not cover its buffers", faults)
    return tuple(left)


class _Twice(ValueError):
    pass


def _rest(spec: BufferSpec, regions: list[Region]) -> Left | None:
    """The elements of a buffer in no region. Raises _Twice where two regions share an element."""
    whole = Box.whole(spec.shape)
    regions = [r for r in regions if all(d[0] for d in r[1])]
    if not regions:
        return Left(spec.name, spec.shape) if whole.numel else None
    frame = Frame.of_tensor(spec.shape, spec.strides)
    boxes = []
    for start, dims in regions:
        for piece in cut(start, 0, dims, frame):
            offset, shape, _ = frame.coordinates(piece)
            boxes.append(Box(offset, shape))
    low = np.array([b.offset for b in boxes], dtype=np.int64).reshape(len(boxes), len(spec.shape))
    counts = np.array([b.shape for b in boxes], dtype=np.int64).reshape(len(boxes), len(spec.shape))
    if not disjoint(low, counts):
        raise _Twice("an element is filled by more than one placement or fill")
    if int(counts.prod(axis=1).sum()) == whole.numel:
        return None  # disjoint, inside, and as many elements as there are
    rest = [whole]
    for box in boxes:
        rest = [piece for part in rest for piece in part.subtract(box)]
    return Left(spec.name, spec.shape, tuple(sorted(rest)))
