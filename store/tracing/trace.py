"""`trace_load`: run a framework's own loader over tensors without data, and get the layout it carries out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from weightdepot.store.dtypes import ITEMSIZE, dtype_name
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.geometry import Box, contiguous_strides, overlaps_itself
from weightdepot.store.layout import Fill, Layout, LayoutBuilder, TensorSpec
from weightdepot.store.tracing import ops
from weightdepot.store.tracing.content import Constant, Fault, Old, Poison, Source, Untraceable, reread
from weightdepot.store.tracing.coverage import Left, is_optional
from weightdepot.store.tracing.lattice import Frame, OutsideFrame, TooIrregular, cut
from weightdepot.store.tracing.memory import Entry
from weightdepot.store.tracing.recorder import Place, Recorder

assert ops  # importing it registers the operations

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]
MAX_RESTARTS = 32  # of a loader that raises: enough to name what is wrong


@dataclass(frozen=True)
class Trace:
    """What one rank's loader does. The buffers of `layout` are the parameters, by name."""

    layout: Layout
    unused: tuple[str, ...]  # checkpoint tensors of which no element lies in a parameter
    left: tuple[
        Left, ...
    ]  # parameters (or parts) that nothing fills; only optional ones, unless faults are kept
    aliases: Mapping[str, str] = field(
        default_factory=dict
    )  # tied parameter -> the one that the layout lists
    tiers: Mapping[str, str] = field(default_factory=dict)  # checkpoint tensor -> "traced"
    faults: tuple[Fault, ...] = ()  # empty unless faults were asked to be kept

    def tier(self, tensor: str) -> str:
        """How the tensor's map was found; "refused" where it was not, "unused" where it is not needed."""
        return self.tiers.get(tensor) or (
            "refused" if any(tensor in f.tensors for f in self.faults) else "unused"
        )

    def report(self) -> str:
        """Readable text: counts, then what a person should look at."""
        layout = self.layout
        lines = [
            f"{len(self.tiers)} of {len(layout.tensors)} checkpoint tensors are placed in "
            f"{len(layout.buffers)} parameters: {len(layout.table)} placements, "
            f"{len(layout.fills)} constant fills, {layout.nbytes:,} bytes"
        ]
        lines += [f"  {tier}: {n} tensors" for tier, n in sorted(Counter(self.tiers.values()).items())]
        casts = Counter(
            (layout.tensors[t].dtype, layout.buffers[b].dtype)
            for t, b in set(zip(layout.table.tensor.tolist(), layout.table.buffer.tolist(), strict=True))
            if layout.tensors[t].dtype != layout.buffers[b].dtype
        )
        lines += [f"  cast {a} to {b}: {n} tensors" for (a, b), n in sorted(casts.items())]
        lines += _listed("tied", [f"{a} is {b}" for a, b in self.aliases.items()])
        lines += _listed("unused", self.unused)
        lines += _listed("left", [str(x) for x in self.left])
        lines += _listed("faults", [f"{', '.join(f.tensors) or f.parameter}: {f}" for f in self.faults])
        return "\n".join(lines)


def _listed(title: str, items: Sequence[str], shown: int = 12) -> list[str]:
    if not items:
        return []
    more = [f"    ... and {len(items) - shown} more"] if len(items) > shown else []
    return [f"  {title}: {len(items)}", *(f"    {x}" for x in items[:shown]), *more]


@dataclass(frozen=True)
class _Target:
    """A parameter as it was before the trace."""

    name: str
    tensor: Tensor
    kept: Tensor  # an alias of its data: put back, should the loader give the parameter other data
    place: Place
    needed: bool  # whether it must be filled


def trace_load(
    load_weights: LoadWeights,
    tensors: Sequence[TensorSpec],
    parameters: Mapping[str, Tensor],
    *,
    optional: Collection[str] = (),
    buffers: Mapping[str, Tensor] | None = None,
    on_fault: Literal["raise", "keep"] = "raise",
    after: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Trace:
    """The layout of the parameters that `load_weights` fills from a checkpoint of `tensors`.

    The loader is called with (name, tensor) pairs, as if with a checkpoint; the tensors hold no data.
    `parameters` are those it writes to, live on any device or on meta. They are neither changed nor read, and
    need no more memory. `buffers` are further places that may be written but need not be (a module's
    buffers). Names or patterns (`*`) in `optional` may be left unfilled. `after` is called when the loader is
    through, and gives the tensors that then go by the parameters' names: it may have replaced some.

    The loader may be called again after it raised, with the tensors that follow, to find what else is wrong.
    It should be deterministic, and copy in the calling thread.

    Raises LayoutError with every fault at once, each with the checkpoint tensor or the parameter concerned;
    with `on_fault="keep"` the trace is returned with its `faults`, and the layout lacks what they concern.
    Raises InvalidRequest for tensors or parameters that cannot be described.
    """
    _check(tensors)
    recorder = Recorder(tensors)
    targets = _targets(recorder, parameters, buffers or {})
    found: dict[str, Tensor] = {}
    try:
        with torch.no_grad(), recorder:
            _run(recorder, load_weights, tensors)
            if after is not None:
                found = dict(after())
            for target in targets:
                _follow(recorder, target, found.get(target.name, target.tensor))
    finally:
        for target in targets:
            if _moved(target.tensor, target):
                target.tensor.data = target.kept
    return _conclude(recorder, tensors, targets, tuple(optional), on_fault)


def _check(tensors: Sequence[TensorSpec]) -> None:
    names = Counter(t.name for t in tensors)
    wrong = [f"{name!r} is listed {n} times" for name, n in names.items() if n > 1]
    wrong += [f"{t.name!r} has an unknown data type {t.dtype!r}" for t in tensors if t.dtype not in ITEMSIZE]
    if wrong:
        raise InvalidRequest(f"the checkpoint cannot be traced: {'; '.join(wrong[:12])}")


def _targets(
    recorder: Recorder, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> list[_Target]:
    targets = []
    for number, (name, tensor) in enumerate([*parameters.items(), *buffers.items()]):
        kept = tensor.detach()
        try:
            dtype_name(tensor.dtype)
            recorder.know(kept, number)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            # a sparse tensor, or a wrapper subclass (DTensor): it has no storage of its own
            raise InvalidRequest(
                f"parameter {name!r} ({type(tensor).__name__}) cannot be traced: {error}"
            ) from error
        place = recorder.place(kept)
        assert place is not None
        if tensor.numel() and overlaps_itself(place.shape, place.strides):
            raise InvalidRequest(f"parameter {name!r} cannot be traced: its elements share memory")
        targets.append(_Target(name, tensor, kept, place, name in parameters))
    return targets


def _moved(tensor: Tensor, target: _Target) -> bool:
    return (
        tensor.untyped_storage()._cdata != target.kept.untyped_storage()._cdata
        or tensor.storage_offset() != target.place.offset
        or tuple(tensor.shape) != target.place.shape
        or tensor.stride() != target.place.strides
        or tensor.dtype != target.place.dtype
    )


def _follow(recorder: Recorder, target: _Target, now: Tensor) -> None:
    """Where a parameter was replaced (`param.data = ...`, a new Parameter), take the new one's content."""
    if not _moved(now, target):
        return
    if tuple(now.shape) != target.place.shape:
        reason = f"is replaced by a tensor of shape {list(now.shape)}, not {list(target.place.shape)}"
        recorder.faults.append(Fault("set_data", (), target.name, 0, reason))
        return
    place = recorder.place(now)
    if place is None:
        recorder.faults.append(Fault("set_data", (), target.name, 0, "is replaced by an unrecorded tensor"))
    elif place.dtype != target.place.dtype:
        reason = f"is replaced by a tensor of {place.dtype}, not {target.place.dtype}"
        recorder.faults.append(Fault("set_data", (), target.name, 0, reason))
    else:
        recorder.copy(target.place, place)


def _run(recorder: Recorder, load_weights: LoadWeights, tensors: Sequence[TensorSpec]) -> None:
    """Call the loader; when it raises, again with what it has not seen yet."""
    state = {"next": 0, "done": False}

    def weights() -> Iterator[tuple[str, Tensor]]:
        while state["next"] < len(tensors):
            i = state["next"]
            state["next"] = i + 1
            yield tensors[i].name, recorder.incoming(i)
        state["done"] = True

    for _ in range(MAX_RESTARTS):
        before = state["next"]
        try:
            load_weights(weights())
        except Untraceable:
            pass  # its fault is recorded already
        except Exception as error:  # noqa: BLE001 - whatever the loader raises becomes a fault of its tensor
            at = state["next"] - 1
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if at < 0 or state["done"]:
                when = "before it took a tensor" if at < 0 else "after it had taken all tensors"
                recorder.faults.append(Fault("load_weights", (), "", 0, f"the loader raised {when}: {text}"))
            else:
                shape = list(tensors[at].shape)
                reason = f"the loader raised while it loaded this tensor {shape}: {text}"
                recorder.faults.append(Fault("load_weights", (tensors[at].name,), "", 0, reason))
        else:
            return
        if state["done"] or state["next"] == before or state["next"] == len(tensors):
            return


class _Writer:
    """Turns what lies in the parameters into a layout."""

    def __init__(self, recorder: Recorder, tensors: Sequence[TensorSpec]) -> None:
        self.recorder = recorder
        self.tensors = tensors
        self.builder = LayoutBuilder()
        self.faults: dict[Fault, None] = {}
        self.used: set[int] = set(recorder.touched)
        self.left: list[Left] = []
        self._frames: dict[tuple[int, ...], Frame] = {}
        for spec in tensors:
            self.builder.tensor(spec.name, spec.shape, spec.dtype)

    def target(self, target: _Target) -> None:
        place = target.place
        left: list[Entry] = []
        entries = self.recorder.read(place, origin=place.offset)
        if not target.needed and all(isinstance(e.content, Old) for e in entries):
            return
        strides = contiguous_strides(place.shape) if 0 in place.shape else place.strides
        self.builder.buffer(target.name, place.shape, strides, dtype_name(place.dtype))
        for entry in entries:
            # `read` gave images at the beginning of the view
            self._entry(target, entry, left)
        if left:
            self.left.append(_left(target, left))

    def _entry(self, target: _Target, entry: Entry, left: list[Entry]) -> None:
        content, dtype = entry.content, target.place.dtype
        if isinstance(content, Source):
            if content.dtype != dtype:
                self._fault(target, (self.tensors[content.tensor].name,),
                            f"bits of {content.dtype} are stored in a parameter of {dtype}", 3)  # fmt: skip
                return
            self._place(target, entry, content)
        elif isinstance(content, Constant):
            held = reread(content, dtype)
            if held is None:
                self._fault(target, (), f"a constant of {content.dtype} is stored as bits in {dtype}", 3)
                return
            dims = [d for d in entry.dims if d[0] != 1]
            self.builder.fill(
                Fill(
                    target.name, entry.start, tuple(d[0] for d in dims), tuple(d[1] for d in dims), held.value
                )
            )
        elif isinstance(content, Poison):
            f = content.fault
            self._fault(target, f.tensors, f.reason, f.tier, f.op)
        else:
            untouched = content.buffer >= 0 and entry.image == entry.start + target.place.offset
            if content.buffer < 0 or (
                untouched and all(a == b for _, a, b in entry.dims) and content == target.place.memory.initial
            ):
                left.append(entry)
            else:
                self._fault(target, (), "holds old values of a parameter, moved by the loader", 3)

    def _place(self, target: _Target, entry: Entry, content: Source) -> None:
        spec = self.tensors[content.tensor]
        frame = self._frames.get(spec.shape)
        if frame is None:
            frame = self._frames[spec.shape] = Frame.of_tensor(spec.shape, contiguous_strides(spec.shape))
        self.used.add(content.tensor)
        try:
            pieces = cut(entry.image, entry.start, [(n, s, t) for n, t, s in entry.dims], frame)
        except (TooIrregular, OutsideFrame) as error:
            self._fault(target, (spec.name,), f"its elements are taken so irregularly that it {error}", 2)
            return
        for piece in pieces:
            offset, shape, steps = frame.coordinates(piece)
            self.builder.place(spec.name, Box(offset, shape), target.name, piece.image, steps)

    def _fault(
        self, target: _Target, names: tuple[str, ...], reason: str, tier: int, op: str = "copy_"
    ) -> None:
        self.faults[Fault(op, names, target.name, tier, reason)] = None


def _left(target: _Target, entries: list[Entry]) -> Left:
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


def _conclude(
    recorder: Recorder, tensors: Sequence[TensorSpec], targets: list[_Target], optional: tuple[str, ...],
    on_fault: Literal["raise", "keep"],
) -> Trace:  # fmt: skip
    writer = _Writer(recorder, tensors)
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for target in targets:
        key = (id(target.place.memory), *target.place[1:])
        owner = first.setdefault(key, target.name)
        if owner != target.name:
            aliases[target.name] = owner
        else:
            writer.target(target)
    layout = writer.builder.build()
    faults = tuple(dict.fromkeys((*recorder.faults, *recorder.tokens.lost(), *writer.faults)))
    needed = {t.name for t in targets if t.needed}
    tied: dict[str, list[str]] = {}
    for alias, owner in aliases.items():
        tied.setdefault(owner, [owner]).append(alias)
    missing = [
        x for x in writer.left
        if x.parameter in needed
        and not any(is_optional(n, optional) for n in tied.get(x.parameter, [x.parameter]))
    ]  # fmt: skip
    refused = {name for f in faults for name in f.tensors}
    trace = Trace(
        layout,
        unused=tuple(t.name for i, t in enumerate(tensors) if i not in writer.used and t.name not in refused),
        left=tuple(writer.left),
        aliases=aliases,
        tiers={t.name: "traced" for i, t in enumerate(tensors) if i in writer.used and t.name not in refused},
        faults=(*faults, *(Fault("", (), x.parameter, 0, "is not filled by the loader") for x in missing)),
    )
    if on_fault == "raise" and trace.faults:
        lines = [LayoutFault(", ".join(f.tensors) or f.parameter or "(loader)", str(f)) for f in faults]
        lines += [LayoutFault(x.parameter, x.text + " by the loader") for x in missing]
        raise LayoutError("the loader cannot be traced to a layout", lines)
    return trace
