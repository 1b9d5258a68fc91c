"""The command line's tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightdepot.api.report import ModelReport
from weightdepot.store.index.records import (
    Convergence,
    Group,
    GroupState,
    Member,
    Mode,
    Model,
    Version,
    VersionState,
)

_STATE_STYLE = {
    VersionState.OPEN: "yellow",
    VersionState.READY: "green",
    VersionState.RETIRED: "cyan",
    VersionState.FREED: "dim",
    VersionState.ABORTED: "red",
    GroupState.EMPTY: "dim",
    GroupState.WHOLE: "green",
    GroupState.MOVING: "yellow",
    GroupState.HALF: "red",
}


def size_text(nbytes: float) -> str:
    """Decimal units, as network cards and disks are sold."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def show_status(console: Console, url: str, reports: Sequence[ModelReport], *, ranks: bool = False) -> None:
    if not reports:
        console.print(Text(f"no model is registered at {url}"))
    for report in reports:
        _show_model(console, report, ranks)


def show_versions(console: Console, model: str, versions: Sequence[Version]) -> None:
    if not versions:
        console.print(Text(f"{model} has no versions yet"))
        return
    table = Table("version", "state", "slot", "sealed", "size", "leases", "note", box=None, pad_edge=False)
    for v in sorted(versions, key=lambda version: -version.version):
        table.add_row(
            str(v.version),
            state_text(v.state),
            "live" if v.live else str(v.slot),
            f"{len(v.sealed)}/{v.world_size}",
            size_text(v.nbytes),
            Text(", ".join(v.leases)),
            Text(version_note(v)),
        )
    console.print(table)


def show_convergence(console: Console, seen: Convergence) -> None:
    current = "no version is current" if seen.current is None else f"current {seen.current}"
    console.print(
        Text(seen.model, style="bold"),
        Text(f"{current}{', held' if seen.held else ''};"),
        Text("converged", style="green") if seen.converged else Text("not converged", style="red"),
    )
    for what, groups in (("there", seen.at), ("behind", seen.behind), ("absent", seen.absent)):
        if groups:
            console.print(Text(f"{what}: {', '.join(groups)}"))


def version_note(version: Version) -> str:
    kept = ["pinned"] if version.pinned else []
    return "; ".join([*kept, *(f"tag {name}" for name in version.tags), *filter(None, [version.reason])])


def _show_model(console: Console, report: ModelReport, ranks: bool) -> None:
    model = report.model
    console.print(model_title(model))
    show_versions(console, model.name, model.versions)
    if report.groups:
        table = Table("group", "state", "holds", "lag", "alive", "reads", box=None, pad_edge=False)
        for group in report.groups:
            table.add_row(Text(group.group), state_text(group.state), *group_cells(group))
        console.print(table)
    if ranks:
        for group in report.groups:
            table = Table("rank", "holds", "staged", "alive", "process", box=None, pad_edge=False)
            for member in group.members:
                table.add_row(str(member.rank), *_member(member))
            console.print(Text(group.group, style="bold"))
            console.print(table)
    for trouble in report.troubles:
        console.print(trouble_text(trouble))
    console.print()


def model_title(model: Model) -> Text:
    latest = "nothing ready" if model.latest is None else f"latest {model.latest}"
    if model.held:
        latest += f", held at {model.current}"
    alive = sum(member.alive for member in model.producers)
    mode = model.policy.mode.value
    if model.policy.mode is Mode.BOUNDED:
        mode += f" by {model.policy.max_lag}"
    return Text(model.name, style="bold").append(
        f" {latest}; {mode}; {alive} of {model.world_size} producers alive", "not bold"
    )


def trouble_text(trouble: str) -> Text:
    return Text("! ", style="red").append(trouble, "default")


def _number(version: int | None) -> str:
    return "-" if version is None else str(version)


def group_cells(group: Group) -> tuple[str | Text, ...]:
    alive = sum(member.alive for member in group.members)
    holds = _number(group.version)
    if group.state is GroupState.MOVING:
        holds = f"{_number(group.last)} > {_number(group.target)}"
    return (
        holds,
        str(group.lag),
        Text(f"{alive}/{group.world_size}", style="" if group.live else "red"),
        ", ".join(map(str, group.leased)),
    )


def _member(member: Member) -> tuple[str | Text, ...]:
    # the identity of the host is long; the name in its middle is what people know
    parts = member.process.host.split("/")
    host = parts[1] if len(parts) == 3 else member.process.host
    return (
        _number(member.version),
        _number(member.staged),
        Text("yes") if member.alive else Text(f"no, for {-member.expires_in:.0f} s", style="red"),
        Text(f"{member.process.pid} at {host}"),
    )


def state_text(state: VersionState | GroupState) -> Text:
    return Text(state.value, style=_STATE_STYLE[state])
