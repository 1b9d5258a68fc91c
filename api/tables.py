"""The command line's tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightdepot.api.report import ModelReport
from weightdepot.store.index.records import GroupState, Member, Version, VersionState

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


def size_text(nbytes: int) -> str:
    """Decimal units, as network cards and disks are sold."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def show_status(console: Console, url: str, reports: Sequence[ModelReport]) -> None:
    if not reports:
        console.print(Text(f"no model is registered at {url}"))
    for report in reports:
        _show_model(console, report)


def show_versions(console: Console, model: str, versions: Sequence[Version]) -> None:
    if not versions:
        console.print(Text(f"{model} has no versions yet"))
        return
    table = Table("version", "state", "slot", "sealed", "size", "leases", "note", box=None, pad_edge=False)
    for v in sorted(versions, key=lambda version: -version.version):
        table.add_row(
            str(v.version),
            _state(v.state),
            str(v.slot),
            f"{len(v.sealed)}/{v.world_size}",
            size_text(v.nbytes),
            Text(", ".join(v.leases)),
            Text(v.reason),
        )
    console.print(table)


def _show_model(console: Console, report: ModelReport) -> None:
    model = report.model
    latest = "nothing ready" if model.latest is None else f"latest {model.latest}"
    alive = sum(member.alive for member in model.producers)
    console.print(
        Text(model.name, style="bold"), Text(f"{latest}; {alive} of {model.world_size} producers alive")
    )
    show_versions(console, model.name, model.versions)
    if report.groups:
        table = Table("group", "rank", "state", "holds", "lag", "alive", "process", box=None, pad_edge=False)
        for group in report.groups:
            for member in group.members:
                table.add_row(
                    Text(group.group), str(member.rank), _state(group.state), *_member(report, member)
                )
        console.print(table)
    for trouble in report.troubles:
        console.print(Text("! ", style="red") + Text(trouble))
    console.print()


def _member(report: ModelReport, member: Member) -> tuple[str | Text, ...]:
    lag = report.lag(member.version)
    return (
        "-" if member.version is None else str(member.version),
        "-" if lag is None else str(lag),
        Text("yes") if member.alive else Text(f"no, for {-member.expires_in:.0f} s", style="red"),
        Text(f"{member.process.host}/{member.process.pid}"),
    )


def _state(state: VersionState | GroupState) -> Text:
    return Text(state.value, style=_STATE_STYLE[state])
