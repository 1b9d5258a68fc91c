"""`trace_export`: run a trainer's own exporter over tensors without data, for the layout of what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.geometry import Box, contiguous_strides
from weightdepot.store.layout import Layout, LayoutBuilder, Placement
from weightdepot.store.tracing.content import Constant, Fault, Poison, Source, Untraceable
from weightdepot.store.tracing.counting import Counting
from weightdepot.store.tracing.lattice import Frame, OutsideFrame, TooIrregular, cut
from weightdepot.store.tracing.memory import Entry
from weightdepot.store.tracing.recorder import Recorder
from weightdepot.store.tracing.recording import uncollected
from weightdepot.store.tracing.report import Trace
from weightdepot.store.tracing.trace import OnFault
from weightdepot.store.weights import Shard, layout_of

Exported = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Export = Callable[[Mapping[str, Tensor]], Exported]


def trace_export(
    export: Export, local: Mapping[str, Tensor | Shard], *, on_fault: OnFault = "raise"
) -> Trace:
    """The layout of a trainer's own tensors in the checkpoint that `export` makes of them.

    `local`: this rank's tensors by their own names: live or on meta, plain, DTensors, or Shards. The exporter
    is given tensors under the same names, of their global shapes, that hold no data; what comes out is the
    checkpoint, of which this rank has what comes from its own part. Nothing of `local` is changed or read.

    An exporter may view, split, join, cast, rename and pick elements. One that changes values would have to
    run at each publish, which is not supported.

    Raises LayoutError with every fault at once, each with the checkpoint tensor that it concerns (with
    `on_fault="keep"` they come with the trace), and InvalidRequest for no tensors.
    """
    if not local:
        raise InvalidRequest("there are no local tensors to export")
    held = layout_of(local)
    recorder = Recorder(held.tensors)
    faults: list[Fault] = []
    found: dict[str, Tensor] = {}
    with uncollected(), torch.no_grad(), recorder, Counting():
        given = _given(recorder, held, local)
        try:
            for name, tensor in _pairs(export(dict(given))):
                if name in found:
                    faults.append(Fault("export", (), name, 0, "is exported twice"))
                found[name] = tensor
        except Untraceable:
            pass  # its fault is recorded already
        except Exception as error:  # noqa: BLE001 - whatever the exporter raises is its fault
            after = f" after {list(found)[-1]!r}" if found else ""
            text = f"the exporter raised{after}: {type(error).__name__}: {error}"
            faults.append(Fault("export", (), "", 0, text))
        writer = _Writer(recorder, held, given)
        for name, tensor in found.items():
            writer.exported(name, tensor)
    faults += [*recorder.faults, *recorder.tokens.lost(), *writer.faults]
    return _conclude(writer, tuple(dict.fromkeys(faults)), on_fault)


def _given(recorder: Recorder, held: Layout, local: Mapping[str, Tensor | Shard]) -> dict[str, Tensor]:
    """A recording tensor for each local one; one for both names of a tie."""
    made: dict[object, Tensor] = {}
    given: dict[str, Tensor] = {}
    for i, spec in enumerate(held.tensors):
        own = local[spec.name]
        key: object = i
        strides = None
        if isinstance(own, Tensor) and type(own) in (Tensor, torch.nn.Parameter):
            # an exporter that may not view a transposed tensor shall fail here as well
            strides = tuple(own.stride()) if own.numel() else None
            key = (own.untyped_storage()._cdata, own.storage_offset(), own.shape, own.stride())
        if key not in made:
            made[key] = recorder.incoming(i, strides)
        given[spec.name] = made[key]
    return given


def _pairs(exported: Exported) -> Iterator[tuple[str, Tensor]]:
    yield from exported.items() if isinstance(exported, Mapping) else exported


class _Writer:
    def __init__(self, recorder: Recorder, held: Layout, given: Mapping[str, Tensor]) -> None:
        self.recorder = recorder
        self.held = held
        self.faults: list[Fault] = []
        self.used: set[int] = set()
        self.tiers: dict[str, str] = {}
        self.builder = LayoutBuilder()
        for buffer in held.buffers:
            self.builder.buffer(buffer.name, buffer.shape, buffer.strides, buffer.dtype)
        self._parts: dict[str, Placement] = {p.tensor: p for p in held.placements()}
        self._frames = {
            i: Frame.of_tensor(spec.shape, given[spec.name].stride()) for i, spec in enumerate(held.tensors)
        }

    def exported(self, name: str, tensor: object) -> None:
        place = self.recorder.place(tensor) if isinstance(tensor, Tensor) else None
        if place is None:
            kind = (
                f"{tensor.dtype} {list(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            self._fault(name, (), f"comes from none of the local tensors ({kind})", 0)
            return
        try:
            self.builder.tensor(name, place.shape, dtype_name(place.dtype))
        except ValueError as error:
            self._fault(name, (), str(error), 0)
            return
        tier = "traced"
        for entry in self.recorder.read(place, 0, contiguous_strides(place.shape)):
            content = entry.content
            if isinstance(content, Source):
                self.used.add(content.tensor)
                tier = "probed" if content.probed else tier
                if content.dtype != place.dtype:
                    reason = f"bits of {content.dtype} are exported as {place.dtype}"
                    self._fault(name, (self.held.tensors[content.tensor].name,), reason, 3)
                    continue
                try:
                    self._place(name, place.shape, entry, content.tensor)
                except (TooIrregular, OutsideFrame) as error:
                    reason = f"its elements are taken so irregularly that it {error}"
                    self._fault(name, (self.held.tensors[content.tensor].name,), reason, 2)
            elif isinstance(content, Poison):
                self.faults.append(replace(content.fault, parameter=name))
            elif isinstance(content, Constant):
                self._fault(
                    name, (), f"holds the constant {content.value}, which is in none of the local tensors", 0
                )
            else:
                self._fault(name, (), "has elements that the exporter does not fill", 0)
        self.tiers[name] = tier

    def _place(self, name: str, shape: tuple[int, ...], entry: Entry, tensor: int) -> None:
        """Of the elements that come from a local tensor, those that this rank holds."""
        mine = self._parts.get(self.held.tensors[tensor].name)
        if mine is None:
            return  # another rank has all of it
        out = Frame.of_tensor(shape, contiguous_strides(shape))
        frame = self._frames[tensor]
        for piece in cut(entry.image, entry.start, [(n, s, t) for n, t, s in entry.dims], frame):
            offset, counts, steps = frame.coordinates(piece)
            common = Box(offset, counts).intersect(mine.box)
            if common is None:
                continue
            at = piece.image + sum((c - o) * s for c, o, s in zip(common.offset, offset, steps, strict=True))
            start = mine.offset + sum(
                (c - o) * s for c, o, s in zip(common.offset, mine.box.offset, mine.strides, strict=True)
            )
            dims = zip(common.shape, steps, mine.strides, strict=True)
            for part in cut(at, start, dims, out):
                box_offset, box_shape, strides = out.coordinates(part)
                self.builder.place(name, Box(box_offset, box_shape), mine.buffer, part.image, strides)

    def _fault(self, name: str, tensors: tuple[str, ...], reason: str, tier: int) -> None:
        self.faults.append(Fault("export", tensors, name, tier, reason))


def _conclude(writer: _Writer, faults: tuple[Fault, ...], on_fault: OnFault) -> Trace:
    refused = {f.parameter for f in faults}
    trace = Trace(
        writer.builder.build(),
        unused=tuple(t.name for i, t in enumerate(writer.held.tensors) if i not in writer.used),
        left=(),
        tiers={name: tier for name, tier in writer.tiers.items() if name not in refused},
        faults=faults,
    )
    if on_fault == "raise" and faults:
        lines = [LayoutFault(f.parameter or ", ".join(f.tensors) or "(exporter)", _reason(f)) for f in faults]
        raise LayoutError("the exporter cannot be traced to a layout", lines)
    return trace


def _reason(fault: Fault) -> str:
    source = f" (from {', '.join(fault.tensors)})" if fault.tensors else ""
    why = ": an exporter that changes values would have to run at each publish" if fault.tier == 3 else ""
    return f"{fault.reason}{source}{why}"
