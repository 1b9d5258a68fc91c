"""What a layout does with each tensor, in groups: repeated layers and experts are one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weightdepot.store.geometry import Box
from weightdepot.store.layout import BufferSpec, Layout, Placement, TensorSpec
from weightdepot.store.tracing import Fault, Trace

UNKNOWN = "is in the index, but neither its shape nor its data type is known"


@dataclass(frozen=True)
class RankReport:
    """One rank's trace, with what the checkpoint's description lacked."""

    rank: int
    world_size: int
    trace: Trace
    unknown: tuple[str, ...] = ()
    """Checkpoint tensors that could not be traced, since nothing is known but the name."""

    @property
    def mapped(self) -> bool:
        """Whether everything maps."""
        return not self.trace.faults and not self.unknown

    @cached_property
    def placements(self) -> Mapping[str, tuple[Placement, ...]]:
        """By checkpoint tensor."""
        found: dict[str, list[Placement]] = {}
        for placement in self.trace.layout.placements():
            found.setdefault(placement.tensor, []).append(placement)
        return {name: tuple(ps) for name, ps in found.items()}

    def to_json(self) -> dict[str, Any]:
        trace, layout = self.trace, self.trace.layout
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "mapped": self.mapped,
            "digest": layout.digest,
            "nbytes": layout.nbytes,
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "dtype": t.dtype,
                    "tier": trace.tier(t.name),
                    "placements": [
                        {
                            "parameter": p.buffer,
                            "offset": list(p.box.offset),
                            "shape": list(p.box.shape),
                            "start": p.offset,
                            "strides": list(p.strides),
                        }
                        for p in self.placements.get(t.name, ())
                    ],
                }
                for t in layout.tensors
            ],
            "parameters": [
                {"name": b.name, "shape": list(b.shape), "strides": list(b.strides), "dtype": b.dtype}
                for b in layout.buffers
            ],
            "fills": [
                {"parameter": f.buffer, "start": f.offset, "shape": list(f.shape), "strides": list(f.strides),
                 "value": f.value}
                for f in layout.fills
            ],
            "whole": [{"tensor": n, "reason": trace.reasons.get(n, "")} for n in trace.whole],
            "written_by_loader": list(trace.whole_parameters),
            "tied": dict(trace.aliases),
            "left": [
                {"parameter": x.parameter, "boxes": [[list(b.offset), list(b.shape)] for b in x.boxes]}
                for x in trace.left
            ],
            "unused": list(trace.unused),
            "faults": [
                {"tensors": list(f.tensors), "parameter": f.parameter, "operation": f.op, "tier": f.tier,
                 "reason": f.reason}
                for f in trace.faults
            ]
            + [
                {"tensors": [n], "parameter": "", "operation": "", "tier": 0, "reason": UNKNOWN}
                for n in self.unknown
            ],
        }  # fmt: skip


def pattern(name: str) -> str:
    """A name with its numbers (of layers, of experts) replaced by `*`."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name)


@dataclass(frozen=True)
class Region:
    """Where a placement's elements lie in its parameter, in the parameter's own coordinates."""

    spans: tuple[tuple[int, int, int], ...]  # first, one past the last, and size of the dimension
    turned: bool  # dimensions are in another order than in the checkpoint
    scattered: bool  # elements of others lie in between


def region_of(placement: Placement, buffer: BufferSpec) -> Region:
    """The smallest box of the parameter that holds all of a placement."""
    steps = [(s, n) for s, n in zip(placement.strides, placement.box.shape, strict=True) if n > 1]
    low = _coordinates(placement.offset, buffer)
    high = _coordinates(placement.offset + sum(s * (n - 1) for s, n in steps), buffer)
    spans = tuple((a, b + 1, n) for a, b, n in zip(low, high, buffer.shape, strict=True))
    strides = [s for s, _ in steps]
    return Region(
        spans,
        strides != sorted(strides, reverse=True),
        math.prod(b - a for a, b, _ in spans) != placement.box.numel,
    )


def _coordinates(element: int, buffer: BufferSpec) -> tuple[int, ...]:
    found = [0] * len(buffer.shape)
    dims = [d for d, n in enumerate(buffer.shape) if n > 1]
    for d in sorted(dims, key=lambda d: -buffer.strides[d]):
        found[d], element = divmod(element, buffer.strides[d])
    return tuple(found)


def box_text(box: Box, shape: Sequence[int]) -> str:
    """As one would index the tensor: `[0:64, :]`; `all` of it."""
    if box == Box.whole(shape):
        return "all"
    return _spans(zip(box.offset, box.stop, shape, strict=True))


def _spans(spans: Iterable[tuple[int, int, int]]) -> str:
    texts = [":" if (a, b) == (0, n) else str(a) if b == a + 1 else f"{a}:{b}" for a, b, n in spans]
    return f"[{', '.join(texts)}]"


@dataclass
class Group:
    """Tensors whose names differ in numbers only, and that are treated alike. A line of the table."""

    name: str
    spec: TensorSpec
    tier: str
    taken: tuple[str, ...]  # what of the checkpoint tensor, for each placement
    parameters: tuple[str, ...]  # where each goes, by pattern
    dtype: str  # of the parameter
    names: list[str] = field(default_factory=list)
    regions: list[tuple[Region, ...]] = field(default_factory=list)  # of each tensor

    @property
    def cast(self) -> bool:
        return bool(self.dtype) and self.dtype != self.spec.dtype

    def into(self) -> tuple[str, ...]:
        """Each placement's parameter and place in it; `*` where the tensors of the group differ."""
        return tuple(self._place(i) for i in range(len(self.parameters)))

    def _place(self, i: int) -> str:
        regions = [r[i] for r in self.regions]
        texts = []
        for spans in zip(*(r.spans for r in regions), strict=True):
            a, b, n = spans[0]
            same = len(set(spans)) == 1
            texts.append((":" if (a, b) == (0, n) else str(a) if b == a + 1 else f"{a}:{b}") if same else "*")
        whole = all(t == ":" for t in texts)
        marks = [m for m, on in (("transposed", regions[0].turned), ("strided", regions[0].scattered)) if on]
        where = "" if whole else f"[{', '.join(texts)}]"
        return f"{self.parameters[i]}{where}{' ' + ', '.join(marks) if marks else ''}"


def groups_of(report: RankReport) -> list[Group]:
    """In the checkpoint's order of first appearance."""
    layout = report.trace.layout
    buffers = {b.name: b for b in layout.buffers}
    found: dict[Any, Group] = {}
    for spec in layout.tensors:
        placements = report.placements.get(spec.name, ())
        regions = tuple(region_of(p, buffers[p.buffer]) for p in placements)
        taken = tuple(box_text(p.box, spec.shape) for p in placements)
        parameters = tuple(pattern(p.buffer) for p in placements)
        dtype = buffers[placements[0].buffer].dtype if placements else ""
        tier = report.trace.tier(spec.name)
        marks = tuple((r.turned, r.scattered, tuple(n for *_, n in r.spans)) for r in regions)
        key = (pattern(spec.name), spec.shape, spec.dtype, tier, taken, parameters, dtype, marks)
        group = found.get(key)
        if group is None:
            group = found[key] = Group(key[0], spec, tier, taken, parameters, dtype)
        group.names.append(spec.name)
        group.regions.append(regions)
    return list(found.values())


@dataclass
class FaultGroup:
    """Faults that differ in numbers of layers and experts only."""

    fault: Fault
    tensors: tuple[str, ...]
    parameter: str
    count: int = 0


def fault_groups(faults: Iterable[Fault]) -> list[FaultGroup]:
    found: dict[Any, FaultGroup] = {}
    for fault in faults:
        tensors = tuple(dict.fromkeys(pattern(n) for n in fault.tensors))
        key = (fault.op, tensors, pattern(fault.parameter), fault.tier, fault.reason)
        found.setdefault(key, FaultGroup(fault, tensors, key[2])).count += 1
    return list(found.values())


def differences(a: Layout, b: Layout) -> Iterator[str]:
    """What differs between two layouts, one line for each group of names that differ in numbers only."""
    lines: dict[str, int] = {}

    def note(line: str) -> None:
        lines[line] = lines.get(line, 0) + 1

    _compare_forms(note, "tensor", a.tensors, b.tensors)
    _compare_forms(note, "parameter", a.buffers, b.buffers)
    mine, theirs = _places(a), _places(b)
    for name in dict.fromkeys((*mine, *theirs)):
        first, second = mine.get(name, ()), theirs.get(name, ())
        if first != second:
            left = "; ".join(text for p, text in first if (p, text) not in second) or "not used"
            right = "; ".join(text for p, text in second if (p, text) not in first) or "not used"
            note(f"{pattern(name)}: {_without_numbers(left)}, and {_without_numbers(right)}")
    if set(a.fills) != set(b.fills):
        for fill in sorted(set(a.fills) ^ set(b.fills), key=repr):
            which = "first" if fill in set(a.fills) else "second"
            count = math.prod(fill.shape)
            note(
                f"{pattern(fill.buffer)}: {count} elements are filled with {fill.value:g} only in the {which}"
            )
    for line, count in lines.items():
        yield line + (f"  ×{count}" if count > 1 else "")


def _compare_forms(
    note: Callable[[str], None],
    kind: str,
    first: Sequence[TensorSpec | BufferSpec],
    second: Sequence[TensorSpec | BufferSpec],
) -> None:
    mine, theirs = {s.name: s for s in first}, {s.name: s for s in second}
    for name in dict.fromkeys((*mine, *theirs)):
        if name not in theirs:
            note(f"{kind} {pattern(name)}: only in the first")
        elif name not in mine:
            note(f"{kind} {pattern(name)}: only in the second")
        elif mine[name] != theirs[name]:
            note(f"{kind} {pattern(name)}: {_form(mine[name])}, and {_form(theirs[name])}")


def _without_numbers(text: str) -> str:
    """The numbers in the names of parameters, but not those of places."""
    return " ".join(pattern(word) if "[" not in word else _named(word) for word in text.split(" "))


def _named(word: str) -> str:
    name, bracket, place = word.partition("[")
    return pattern(name) + bracket + place


def _form(spec: TensorSpec | BufferSpec) -> str:
    strides = f" with strides {list(spec.strides)}" if isinstance(spec, BufferSpec) else ""
    return f"{spec.dtype} {list(spec.shape)}{strides}"


def _places(layout: Layout) -> dict[str, tuple[tuple[Placement, str], ...]]:
    """By tensor: its placements in an order of their own, each with its text."""
    shapes = {t.name: t.shape for t in layout.tensors}
    buffers = {b.name: b for b in layout.buffers}
    found: dict[str, list[tuple[Placement, str]]] = {}
    for p in layout.placements():
        region = region_of(p, buffers[p.buffer])
        text = f"{box_text(p.box, shapes[p.tensor])} in {p.buffer}{_spans(region.spans)}"
        found.setdefault(p.tensor, []).append((p, text))
    return {
        name: tuple(sorted(ps, key=lambda item: (item[0].box, item[0].buffer, item[0].offset)))
        for name, ps in found.items()
    }
