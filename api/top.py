"""What `weightdepot top` draws: one frame from reports, and what it remembers from frame to frame."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from weightdepot.api.report import ModelReport
from weightdepot.api.tables import group_cells, model_title, size_text, state_text, trouble_text, version_note
from weightdepot.store.index.records import Group, Version, VersionState

BARS = "▁▂▃▄▅▆▇█"
POINTS = 16  # of a group's chart
GONE = 3  # freed and aborted versions that are shown
GONE_STATES = (VersionState.FREED, VersionState.ABORTED)


@dataclass
class History:
    """The throughput of each group's last updates, as far as they were seen."""

    _points: dict[tuple[str, str], deque[tuple[int, float]]] = field(default_factory=dict)

    def note(self, reports: Sequence[ModelReport]) -> None:
        for report in reports:
            for group in report.groups:
                speed = _speed(group)
                if group.version is None or speed is None:
                    continue
                points = self._points.setdefault((report.model.name, group.group), deque(maxlen=POINTS))
                if not points or points[-1][0] != group.version:
                    points.append((group.version, speed))

    def of(self, model: str, group: str) -> list[float]:
        """Bytes a second, the last update last."""
        return [speed for _, speed in self._points.get((model, group), ())]


@dataclass(frozen=True)
class Away:
    """The controller does not answer: what is shown is old."""

    seconds: float
    reason: str


def frame(
    url: str, run: str, reports: Sequence[ModelReport], history: History, *, away: Away | None, bars: bool
) -> RenderableType:
    """bars: whether the terminal can show charts of block characters."""
    lines: list[RenderableType] = [_head(url, run, away)]
    if not reports:
        lines.append(Text("nobody has joined yet", style="dim"))
    for report in reports:
        lines += ["", *_model(report, history, bars)]
    return Stack(*lines)


def chart(values: Sequence[float]) -> str:
    """One character for each value, as high as it is beside the largest."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    return "".join(BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in values)


def _head(url: str, run: str, away: Away | None) -> Text:
    text = Text.assemble(("weightdepot ", "bold"), f"{url}, run {run}  ")
    if away is None:
        return text.append("live", "green")
    return text.append(f"no answer for {away.seconds:.0f} s, what is shown is old: {away.reason}", "red")


def _model(report: ModelReport, history: History, bars: bool) -> list[RenderableType]:
    model = report.model
    lines: list[RenderableType] = [model_title(model), *map(trouble_text, report.troubles)]
    if report.groups:
        table = Table(
            "group", "state", "holds", "lag", "alive", "reads", "update", "", box=None, pad_edge=False
        )
        for group in report.groups:
            speeds = history.of(model.name, group.group)
            table.add_row(
                Text(group.group),
                state_text(group.state),
                *group_cells(group),
                _update(group),
                Text(chart(speeds) if bars else "", style="magenta", no_wrap=True),
            )
        lines.append(table)
    gone = [v for v in model.versions if v.state in GONE_STATES][-GONE:]
    shown = [v for v in model.versions if v.state not in GONE_STATES or v in gone]
    if shown:
        lines.append(_versions(shown))
        speeds = [s for v in model.versions if (s := _published(v)) is not None][-POINTS:]
        if speeds:
            drawn = f" {chart(speeds)}" if bars else ""
            lines.append(Text(f"published at {size_text(speeds[-1])}/s", style="dim").append(drawn, "cyan"))
    return lines


def _versions(versions: Sequence[Version]) -> Table:
    table = Table("version", "state", "size", "leases", "note", box=None, pad_edge=False)
    for v in sorted(versions, key=lambda version: -version.version):
        state = state_text(v.state)
        if v.state is VersionState.OPEN:
            state.append(f" {len(v.sealed)}/{v.world_size}")
        table.add_row(
            str(v.version), state, size_text(v.nbytes), Text(", ".join(v.leases)), Text(version_note(v))
        )
    return table


def _published(version: Version) -> float | None:
    """Bytes a second, from opening to ready."""
    if version.ready is None:
        return None
    return version.nbytes / max(version.ready - version.opened, 1e-6)


def _figures(group: Group) -> list[tuple[float, float]]:
    """Seconds of the pull and bytes moved, of each rank whose last update moved something."""
    found = []
    for member in group.members:
        pull, moved = member.stats.get("pull"), member.stats.get("moved")
        if isinstance(pull, int | float) and isinstance(moved, int | float) and pull > 0 and moved > 0:
            found.append((float(pull), float(moved)))
    return found


def _speed(group: Group) -> float | None:
    """Bytes a second of the last update: what all ranks moved in the time of the slowest."""
    figures = _figures(group)
    return sum(moved for _, moved in figures) / max(pull for pull, _ in figures) if figures else None


def _update(group: Group) -> Text:
    figures, speed = _figures(group), _speed(group)
    if speed is None:
        return Text("-", style="dim")
    slowest = max(pull for pull, _ in figures)
    took = f"{slowest * 1e3:.0f} ms" if slowest < 1 else f"{slowest:.1f} s"
    return Text(f"{took}, {size_text(speed)}/s", no_wrap=True)
