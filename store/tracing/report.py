"""What tracing found, and how a person reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightdepot.store.layout import Layout
from weightdepot.store.tracing.content import Fault
from weightdepot.store.tracing.coverage import Left

SHOWN = 12


@dataclass(frozen=True)
class Trace:
    """What one rank's loader does: the buffers of `layout` are the parameters, by name.

    Or, of `trace_export`, what its exporter does: the buffers are the rank's own tensors, and the checkpoint
    is what comes out.
    """

    layout: Layout
    unused: tuple[str, ...]  # checkpoint tensors (of an exporter: own tensors) of which no element is used
    # parameters (or parts) that nothing fills; only optional ones, unless faults are kept
    left: tuple[Left, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied parameter: the one that the layout lists
    # checkpoint tensor: "traced", "probed" (found by an operation run over labels), or "whole"
    tiers: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()  # empty unless faults were asked to be kept
    # checkpoint tensors to be pulled whole and given to the loader, alone and in this order, after each
    # update's placements and fills were written
    whole: tuple[str, ...] = ()
    # what such a call writes to; where it fills all of a parameter, the layout does not list that
    whole_parameters: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)  # whole tensor: why

    def tier(self, tensor: str) -> str:
        """How the tensor's map was found; "refused" where it was not, "unused" where it is not needed."""
        return self.tiers.get(tensor) or (
            "refused" if any(tensor in f.tensors for f in self.faults) else "unused"
        )

    @property
    def needs_loader(self) -> bool:
        """Whether each update calls the loader. It may be with no tensor at all."""
        return bool(self.whole or self.whole_parameters)

    def report(self, every: bool = False) -> str:
        """Readable text: counts, then what a person should look at.

        `every`: one line for each tensor, and no list cut short.
        """
        layout, limit = self.layout, None if every else SHOWN
        counts = Counter(self.tier(t.name) for t in layout.tensors)
        lines = [
            f"{len(self.tiers)} of {len(layout.tensors)} checkpoint tensors are needed for "
            f"{len(layout.buffers)} parameters: {len(layout.table)} placements, "
            f"{len(layout.fills)} constant fills, {layout.nbytes:,} bytes"
        ]
        lines += [f"  {tier}: {_tensors(counts[tier])}" for tier in ("traced", "probed") if counts[tier]]
        if self.needs_loader:
            nbytes = sum(t.nbytes for t in layout.tensors if t.name in set(self.whole))
            lines.append(
                f"  whole: {_tensors(len(self.whole))}, {nbytes:,} bytes, through the loader at each update, "
                f"into {len(self.whole_parameters)} parameters"
            )
        lines += [f"  cast {a} to {b}: {_tensors(n)}" for (a, b), n in sorted(self._casts().items())]
        lines += _listed("tied", [f"{a} is {b}" for a, b in self.aliases.items()], limit)
        lines += _listed("probed", [n for n, tier in self.tiers.items() if tier == "probed"], limit)
        lines += _listed("whole", [f"{n}: {self.reasons.get(n, '')}" for n in self.whole], limit)
        lines += _listed("written by the loader", self.whole_parameters, limit)
        lines += _listed("unused", self.unused, limit)
        lines += _listed("left", [str(x) for x in self.left], limit)
        # all faults, always
        lines += _listed(
            "faults", [f"{', '.join(f.tensors) or f.parameter or '(loader)'}: {f}" for f in self.faults]
        )
        if every:
            lines.append("  tensors:")
            lines += [f"    {t.name} {t.dtype} {list(t.shape)}: {self.tier(t.name)}" for t in layout.tensors]
        return "\n".join(lines)

    def _casts(self) -> Counter[tuple[str, str]]:
        layout = self.layout
        pairs = set(zip(layout.table.tensor.tolist(), layout.table.buffer.tolist(), strict=True))
        types = [(layout.tensors[t].dtype, layout.buffers[b].dtype) for t, b in pairs]
        return Counter((a, b) for a, b in types if a != b)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "tensors": [
                {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "tier": self.tier(t.name)}
                for t in self.layout.tensors
            ],
            "whole": [{"name": n, "reason": self.reasons.get(n, "")} for n in self.whole],
            "whole_parameters": list(self.whole_parameters),
            "tied": dict(self.aliases),
            "unused": list(self.unused),
            "left": [{"parameter": x.parameter, "boxes": x.text} for x in self.left],
            "faults": [
                {"tensors": list(f.tensors), "parameter": f.parameter, "op": f.op, "reason": str(f)}
                for f in self.faults
            ],
        }


def _tensors(n: int) -> str:
    return f"{n} tensor{'' if n == 1 else 's'}"


def _listed(title: str, items: Sequence[str], limit: int | None = None) -> list[str]:
    if not items:
        return []
    shown = items[:limit]
    more = [f"    ... and {len(items) - len(shown)} more"] if len(items) > len(shown) else []
    return [f"  {title}: {len(items)}", *(f"    {x}" for x in shown), *more]
