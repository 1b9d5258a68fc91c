"""From what lies in the parameters after a run of the loader to a layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from weightdepot.store.dtypes import dtype_name
from weightdepot.store.geometry import Box, contiguous_strides
from weightdepot.store.layout import Fill, LayoutBuilder
from weightdepot.store.tracing.content import Constant, Fault, Old, Poison, Source, reread
from weightdepot.store.tracing.coverage import Left
from weightdepot.store.tracing.lattice import Frame, OutsideFrame, Piece, TooIrregular, cut
from weightdepot.store.tracing.memory import Entry
from weightdepot.store.tracing.recorder import Recorder
from weightdepot.store.tracing.recording import Target


class Frames:
    """Of contiguous tensors, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Frame] = {}

    def of(self, shape: tuple[int, ...]) -> Frame:
        frame = self._made.get(shape)
        if frame is None:
            frame = self._made[shape] = Frame.of_tensor(shape, contiguous_strides(shape))
        return frame


class Row(NamedTuple):
    """A part of a parameter, its elements counted from the parameter's first one."""

    entry: Entry
    pieces: list[Piece]  # of a checkpoint tensor: its boxes
    problem: Poison | None  # why no layout can say it


def describe(
    recorder: Recorder, target: Target, frames: Frames, entries: Iterable[Entry] | None = None
) -> list[Row]:
    """What lies in a parameter (or of it only `entries`), in a layout's terms."""
    if entries is None:
        # `read` gives positions from the beginning of the view
        entries = recorder.read(target.place, origin=target.place.offset)
    return [_row(recorder, target, frames, entry) for entry in entries]


def _row(recorder: Recorder, target: Target, frames: Frames, entry: Entry) -> Row:
    content, dtype = entry.content, target.place.dtype
    if isinstance(content, Source):
        spec = recorder.tensors[content.tensor]
        if content.dtype != dtype:
            reason = f"bits of {content.dtype} are stored in a parameter of {dtype}"
            return Row(entry, [], Poison(Fault("copy_", (spec.name,), target.name, 3, reason)))
        try:
            frame = frames.of(spec.shape)
            return Row(
                entry, cut(entry.image, entry.start, [(n, s, t) for n, t, s in entry.dims], frame), None
            )
        except (TooIrregular, OutsideFrame) as error:
            reason = f"its elements are taken so irregularly that it {error}"
            return Row(entry, [], Poison(Fault("copy_", (spec.name,), target.name, 2, reason)))
    if isinstance(content, Constant):
        if reread(content, dtype) is None:
            reason = f"a constant of {content.dtype} is stored as bits in {dtype}"
            return Row(entry, [], Poison(Fault("fill_", (), target.name, 3, reason)))
    elif isinstance(content, Poison):
        return Row(entry, [], replace(content, fault=replace(content.fault, parameter=target.name)))
    elif content.buffer >= 0 and not is_untouched(entry, target):
        reason = "holds old values of a parameter, moved by the loader"
        return Row(
            entry, [], Poison(Fault("copy_", (), target.name, 3, reason), frozenset((content.buffer,)))
        )
    return Row(entry, [], None)


def is_untouched(entry: Entry, target: Target) -> bool:
    """Whether elements of a parameter are still what they were, where they were."""
    return (
        entry.content == target.place.memory.initial
        and entry.image == entry.start + target.place.offset
        and all(a == b for n, a, b in entry.dims if n > 1)
    )


class Writer:
    """Collects the rows of all parameters."""

    def __init__(self, recorder: Recorder) -> None:
        self.tensors = recorder.tensors
        self.builder = LayoutBuilder()
        self.used: set[int] = set(recorder.touched)
        self.probed: set[int] = set()
        self.left: list[Left] = []
        self.faults: list[Fault] = []
        for spec in self.tensors:
            self.builder.tensor(spec.name, spec.shape, spec.dtype)

    def target(self, target: Target, rows: Sequence[Row], frames: Frames) -> None:
        """Rows with a problem become faults."""
        place = target.place
        if not target.needed and all(isinstance(r.entry.content, Old) and not r.problem for r in rows):
            return
        strides = contiguous_strides(place.shape) if 0 in place.shape else place.strides
        self.builder.buffer(target.name, place.shape, strides, dtype_name(place.dtype))
        left: list[Entry] = []
        for entry, pieces, problem in rows:
            if problem is not None:
                self.faults.append(problem.fault)
            elif isinstance(entry.content, Source):
                self.used.add(entry.content.tensor)
                if entry.content.probed:
                    self.probed.add(entry.content.tensor)
                spec = self.tensors[entry.content.tensor]
                frame = frames.of(spec.shape)
                for piece in pieces:
                    offset, shape, steps = frame.coordinates(piece)
                    self.builder.place(spec.name, Box(offset, shape), target.name, piece.image, steps)
            elif isinstance(entry.content, Constant):
                held = reread(entry.content, place.dtype)
                assert held is not None
                dims = [d for d in entry.dims if d[0] != 1]
                shape, strides = tuple(d[0] for d in dims), tuple(d[1] for d in dims)
                self.builder.fill(Fill(target.name, entry.start, shape, strides, held.value))
            else:
                left.append(entry)
        if left:
            self.left.append(_left(target, left))


def _left(target: Target, entries: list[Entry]) -> Left:
    place = target.place
    if sum(math.prod(d[0] for d in e.dims) for e in entries) == math.prod(place.shape):
        return Left(target.name, place.shape)
    frame = Frame.of_tensor(place.shape, place.strides)
    boxes = []
    for entry in entries:
        for piece in cut(entry.start, 0, [(n, s, 0) for n, s, _ in entry.dims], frame):
            offset, shape, _ = frame.coordinates(piece)
            boxes.append(Box(offset, shape))
    return Left(target.name, place.shape, tuple(sorted(boxes)))
