"""The tables of `weightdepot layout`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightdepot.consumers.layout_report import UNKNOWN, Group, RankReport, fault_groups, groups_of, pattern

SHOWN = 4  # placements of one tensor that are written out
_STYLE = {"traced": "green", "probed": "cyan", "whole": "yellow", "unused": "dim", "refused": "red"}


def show_rank(console: Console, report: RankReport) -> None:
    """One rank: how each tensor maps, then what does not, then what a person may want to know."""
    trace, layout = report.trace, report.trace.layout
    counts = Counter(trace.tier(t.name) for t in layout.tensors)
    tiers = ", ".join(f"{n} {tier}" for tier, n in sorted(counts.items()))
    console.print(
        Text(f"rank {report.rank} of {report.world_size}", style="bold"),
        Text(
            f"{len(layout.tensors)} tensors ({tiers}), "
            f"{len(layout.table)} placements in {len(layout.buffers)} parameters, {layout.nbytes:,} bytes"
        ),
    )
    table = Table("tensor", "", "form", "tier", "takes", "into", box=None, pad_edge=False)
    table.columns[0].overflow = table.columns[5].overflow = "fold"
    for group in groups_of(report):
        table.add_row(*_row(group))
    console.print(table)
    _show_faults(console, report)
    _show_list(
        console,
        "whole",
        [f"{pattern(n)} {trace.reasons.get(n, '')}; the loader is given it" for n in trace.whole],
    )
    _show_list(console, "written by the loader", [pattern(n) for n in trace.whole_parameters])
    named = {b.name for b in layout.buffers}
    tied = [(a, b) for a, b in trace.aliases.items() if b in named]
    _show_list(console, "tied", [f"{pattern(a)} is {pattern(b)}" for a, b in tied])
    fills = Counter((pattern(f.buffer), f.value) for f in layout.fills)
    _show_list(console, "filled", [f"{name} in part with {value:g}" for (name, value), _ in fills.items()])
    _show_list(console, "left", [f"{pattern(x.parameter)}: {x.text}" for x in trace.left])
    console.print()


def _row(group: Group) -> tuple[str | Text, ...]:
    form = f"{group.spec.dtype} {list(group.spec.shape)}"
    if group.cast:
        form += f" cast to {group.dtype}"
    count = len(group.names)
    return (
        Text(group.name if count > 1 else group.names[0]),
        f"×{count}" if count > 1 else "",
        Text(form),
        Text(group.tier, style=_STYLE.get(group.tier, "")),
        Text("\n".join(_some(group.taken))),
        Text("\n".join(_some([_short(group.name, text) for text in group.into()]))),
    )


def _short(tensor: str, into: str) -> str:
    """A parameter's place without the part of its name that is the tensor's too."""
    name, bracket, place = into.partition("[")
    name, space, mark = name.partition(" ")
    rest = f"{space}{mark}{bracket}{place}"
    if name == tensor:
        return f"same name {rest}".rstrip()
    mine, theirs = tensor.split("."), name.split(".")
    shared = 0
    while shared < min(len(mine), len(theirs)) - 1 and mine[shared] == theirs[shared]:
        shared += 1
    return ("…" if shared else "") + ".".join(theirs[shared:]) + rest


def _some(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more]


def _show_faults(console: Console, report: RankReport) -> None:
    if report.mapped:
        return
    console.print(Text("does not map:", style="bold red"))
    for group in fault_groups(report.trace.faults):
        names = ", ".join(_some(group.tensors)) or group.parameter or "the loader"
        count = f" ×{group.count}" if group.count > 1 else ""
        console.print(Text("  ! ", style="red") + Text(f"{names}{count}: {_reason(group.fault)}"))
    for name, n in Counter(pattern(x) for x in report.unknown).items():
        count = f" ×{n}" if n > 1 else ""
        console.print(Text("  ! ", style="red") + Text(f"{name}{count}: {UNKNOWN}"))


def _reason(fault: object) -> str:
    text = str(fault)
    parameter = getattr(fault, "parameter", "")
    return text.replace(repr(parameter), repr(pattern(parameter))) if parameter else text


def _show_list(console: Console, title: str, items: Sequence[str]) -> None:
    for item, n in Counter(items).items():
        count = f" ×{n}" if n > 1 else ""
        console.print(Text(f"{title}: ", style="dim") + Text(f"{item}{count}"))
