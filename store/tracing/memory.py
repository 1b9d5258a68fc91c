"""Virtual memory: for every element of a storage, which element of the checkpoint lies there.

No operation is remembered. A copy reads the map of the source view and writes it into the target's; what
was there before is hidden, element by element, by what was written later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from weightdepot.store.geometry import overlaps_itself
from weightdepot.store.layout import Ints
from weightdepot.store.tracing.content import Constant, Content, Old
from weightdepot.store.tracing.lattice import Dim, Dims, Frame, Piece, cut, disjoint


class Entry(NamedTuple):
    """One write: a lattice of this memory, whose images are positions in what `content` names."""

    start: int
    image: int
    dims: Dims  # (n, step here, step of the image)
    content: Content


class _Layer(NamedTuple):
    piece: Piece
    content: Content


class _Layers:
    """The entries of a memory, oldest first, as boxes of one frame."""

    __slots__ = ("counts", "digits", "disjoint", "rows")

    def __init__(self, rows: list[_Layer], width: int) -> None:
        self.rows = rows
        shape = (len(rows), width)
        self.digits: Ints = np.array([r.piece.digits for r in rows], dtype=np.int64).reshape(shape)
        self.counts: Ints = np.array([r.piece.counts for r in rows], dtype=np.int64).reshape(shape)
        self.disjoint = disjoint(self.digits, self.counts)

    def meeting(self, piece: Piece) -> list[_Layer]:
        """Those that share an element with the piece, newest first."""
        low = np.array(piece.digits, dtype=np.int64)
        high = low + np.array(piece.counts, dtype=np.int64)
        hits = ((self.digits < high) & (self.digits + self.counts > low)).all(axis=1)
        return [self.rows[i] for i in np.flatnonzero(hits)[::-1].tolist()]


class Memory:
    """The elements of one storage, counted from its first byte in units of `itemsize`."""

    __slots__ = ("_layers", "_linear", "entries", "initial", "itemsize", "numel", "preferred", "watcher")

    def __init__(self, initial: Content, itemsize: int, numel: int, strides: Iterable[int]) -> None:
        self.initial = initial  # what unwritten elements hold; their image is their own position
        self.itemsize = itemsize
        self.numel = numel
        self.preferred = tuple(s for s in strides if s > 0)
        self.entries: list[Entry] = []
        self.watcher: Callable[[Content], None] | None = None  # is told what is written, overwritten or not
        self._layers: tuple[tuple[int, ...], _Layers] | None = None
        self._linear: tuple[int, int, Content] | None = (0, 1, initial)

    def write(self, entry: Entry) -> None:
        """Positions of an entry differ from one another, unless all its elements are the same. Steps may be
        negative here, and are turned round."""
        if any(d[1] <= 0 for d in entry.dims):
            entry = _rising(entry)
        numel = math.prod(d[0] for d in entry.dims)
        if numel == 0:
            return
        if self.watcher is not None:
            self.watcher(entry.content)
        self._layers = None
        self._linear = None
        if numel == self.numel and not overlaps_itself(
            [d[0] for d in entry.dims], [d[1] for d in entry.dims]
        ):
            self.entries.clear()  # nothing older can be seen any more
            self._linear = _linear(entry)
        self.entries.append(entry)

    def read(self, start: int, image: int, dims: Iterable[Dim], origin: int = 0) -> list[Entry]:
        """What a view of this memory holds, as entries of the memory that its images lie in.

        `origin`: the position at which a tensor begins, where several lie in one memory; boxes are cut along
        its rows. Raises TooIrregular where the answer is no sensible number of boxes.
        """
        dims = tuple(d for d in dims if d[0] != 1)
        if any(d[0] == 0 for d in dims):
            return []
        if self._linear is not None:
            first, step, content = self._linear
            return [Entry(image, first + start * step, tuple((n, t, s * step) for n, s, t in dims), content)]
        # broadcast dimensions do not move here: they are no matter of the frame
        free = tuple((n, t, 0) for n, s, t in dims if s == 0)
        solid = [d for d in dims if d[1] != 0]
        stop = start + sum((n - 1) * s for n, s, _ in solid) + 1
        near = [e for e in self.entries if e.start < stop and _stop(e) > start]
        steps = {d[1] for e in near for d in e.dims if d[0] != 1}
        frame = Frame.of_memory((d[1] for d in solid), self.preferred, steps)
        shift = origin % frame.steps[0]
        layers = self._cut(near, frame, shift)
        found: list[Entry] = []
        for piece in cut(start - shift, image, solid, frame):
            hits, rest = _resolve(piece, layers)
            for layer, (digits, counts) in hits:
                first = layer.piece.image + _dot(digits, layer.piece.digits, layer.piece.image_steps)
                found.append(
                    _entry(piece, digits, counts, first, layer.piece.image_steps, layer.content, free)
                )
            for digits, counts in rest:
                first = shift + sum(d * s for d, s in zip(digits, frame.steps, strict=True))
                found.append(_entry(piece, digits, counts, first, frame.steps, self.initial, free))
        return found

    def seen(self) -> list[Content]:
        """What can be seen anywhere in it, and perhaps something that cannot any more."""
        whole = self.entries and math.prod(d[0] for d in self.entries[0].dims) == self.numel
        found = dict.fromkeys(e.content for e in self.entries)
        return list(found if whole else {self.initial: None, **found})

    def _cut(self, entries: list[Entry], frame: Frame, shift: int) -> _Layers:
        key = (len(entries), shift, *frame.steps)
        if self._layers is not None and self._layers[0] == key and len(entries) == len(self.entries):
            return self._layers[1]
        # what lies before `shift` has a negative first digit, which does no harm
        rows = [_Layer(p, e.content) for e in entries for p in cut(e.start - shift, e.image, e.dims, frame)]
        layers = _Layers(rows, len(frame.steps))
        if len(entries) == len(self.entries):
            self._layers = key, layers
        return layers


def _rising(entry: Entry) -> Entry:
    """The same write with positive steps only; a step of 0 writes one and the same element."""
    start, image, dims = entry.start, entry.image, []
    for n, step, image_step in entry.dims:
        if step > 0:
            dims.append((n, step, image_step))
        elif step == 0:
            dims.append((min(n, 1), 0, 0))
        else:
            start, image = start + (n - 1) * step, image + (n - 1) * image_step
            dims.append((n, -step, -image_step))
    return Entry(start, image, tuple(dims), entry.content)


def _stop(entry: Entry) -> int:
    return entry.start + sum((n - 1) * s for n, s, _ in entry.dims) + 1


def _linear(entry: Entry) -> tuple[int, int, Content] | None:
    """(origin, step): the image is `origin + step * position` for a whole memory; None where it is not so."""
    if isinstance(entry.content, Constant | Old) and not (
        isinstance(entry.content, Old) and entry.content.buffer >= 0
    ):
        return 0, 0, entry.content
    dims = sorted((d for d in entry.dims if d[0] != 1), key=lambda d: d[1])
    ratio, expected = None, 1
    for n, step, image_step in dims:
        if step != expected or (ratio is not None and image_step != ratio * step):
            return None
        ratio = image_step if ratio is None else ratio
        expected = step * n
    return entry.image - entry.start * (ratio or 0), ratio or 0, entry.content


Part = tuple[tuple[int, ...], tuple[int, ...]]  # digits and counts


def _resolve(piece: Piece, layers: _Layers) -> tuple[list[tuple[_Layer, Part]], list[Part]]:
    """The parts of a piece with the newest layer over each, and the parts that no layer covers."""
    whole = (piece.digits, piece.counts)
    meeting = layers.meeting(piece)
    if layers.disjoint:
        alone = [
            (layer, part) for layer in meeting if (part := intersect(whole, layer.piece[:2])) is not None
        ]
        if sum(math.prod(counts) for _, (_, counts) in alone) == math.prod(piece.counts):
            return alone, []
    hits: list[tuple[_Layer, Part]] = []
    still = [whole]
    for layer in meeting:
        todo, still = still, []
        for part in todo:
            common = intersect(part, layer.piece[:2])
            if common is None:
                still.append(part)
            else:
                hits.append((layer, common))
                still.extend(subtract(part, common))
        if not still:
            break
    return hits, still


def intersect(a: Part, b: Part) -> Part | None:
    """The common part of two boxes of digits; None where there is none."""
    digits, counts = [], []
    for x, n, y, m in zip(*a, *b, strict=True):
        low, high = max(x, y), min(x + n, y + m)
        if low >= high:
            return None
        digits.append(low)
        counts.append(high - low)
    return tuple(digits), tuple(counts)


def subtract(part: Part, common: Part) -> list[Part]:
    """A box without a box inside it, as disjoint boxes."""
    rest: list[Part] = []
    digits, counts = list(part[0]), list(part[1])
    for j, (low, n) in enumerate(zip(*common, strict=True)):
        begin, end = digits[j], digits[j] + counts[j]
        for a, b in ((begin, low), (low + n, end)):
            if a < b:
                rest.append(((*digits[:j], a, *digits[j + 1 :]), (*counts[:j], b - a, *counts[j + 1 :])))
        digits[j], counts[j] = low, n
    return rest


def _dot(digits: Sequence[int], base: Sequence[int], steps: Sequence[int]) -> int:
    return sum((d - b) * s for d, b, s in zip(digits, base, steps, strict=True))


def _entry(
    piece: Piece, digits: tuple[int, ...], counts: tuple[int, ...],
    origin: int, origin_steps: Sequence[int], content: Content, free: Dims,
) -> Entry:  # fmt: skip
    dims = tuple(
        (n, there, s) for n, there, s in zip(counts, piece.image_steps, origin_steps, strict=True) if n != 1
    )
    return Entry(piece.image + _dot(digits, piece.digits, piece.image_steps), origin, dims + free, content)
