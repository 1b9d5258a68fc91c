"""What the benchmarks share: figures with limits, how they are printed, and charts."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measure:
    """One figure. `limit` is on `ratio` where there is one, else on `value`; `ok` is None without a limit."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    limit: float | None = None
    ok: bool | None = None


def measure(
    name: str,
    value: float,
    unit: str,
    *,
    baseline: float | None = None,
    limit: float | None = None,
    at_least: bool = False,
) -> Measure:
    """`baseline`, in the same unit, makes the ratio. `at_least`: the limit is a lower one."""
    ratio = value / baseline if baseline else None
    ok = None
    if limit is not None:
        compared = value if ratio is None else ratio
        ok = compared >= limit if at_least else compared <= limit
    return Measure(name, value, unit, baseline, ratio, limit, ok)


@dataclass(frozen=True)
class Options:
    json: bool
    check: bool
    samples: int
    charts: Path | None
    only: tuple[str, ...]
    before: str
    """What the machine was doing when the benchmark began."""


def options(description: str | None, samples: int = 7, sections: Sequence[str] = ()) -> Options:
    """The command line of every benchmark. `sections`: the parts that `--only` chooses from."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print a list of measures")
    parser.add_argument("--check", action="store_true", help="end with 1 where a limit is missed")
    parser.add_argument("--samples", type=int, default=samples, help="of each figure; its median is shown")
    parser.add_argument("--charts", type=Path, metavar="FOLDER", help="draw the charts, into this folder")
    if sections:
        parser.add_argument("--only", nargs="+", choices=sections, default=sections, help="these parts of it")
    parsed = parser.parse_args()
    if parsed.samples < 1:
        parser.error("--samples: at least 1")
    only = tuple(parsed.only) if sections else ()
    return Options(parsed.json, parsed.check, parsed.samples, parsed.charts, only, machine())


def report(found: Sequence[Measure], chosen: Options) -> int:
    """Print the measures as was asked; the exit status."""
    if chosen.json:
        print(json.dumps([asdict(m) for m in found], indent=2))
    else:
        print(chosen.before)
        print(table(found))
    return int(chosen.check and any(m.ok is False for m in found))


def table(found: Sequence[Measure]) -> str:
    head = ("", "value", "baseline", "ratio", "limit", "")
    rows = [head, *(_row(m) for m in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        lines.append(
            "  ".join([first, *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        )
    return "\n".join(line.rstrip() for line in lines)


def _row(m: Measure) -> tuple[str, ...]:
    verdict = "" if m.ok is None else "ok" if m.ok else "MISSED"
    return (
        m.name,
        f"{_number(m.value)} {m.unit}",
        "" if m.baseline is None else f"{_number(m.baseline)} {m.unit}",
        "" if m.ratio is None else f"{m.ratio:.2f}",
        "" if m.limit is None else f"{m.limit:g}",
        verdict,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def machine() -> str:
    """What it ran on, and how busy that was before: others' load is in every absolute figure."""
    one, five, _ = os.getloadavg()
    return f"{os.cpu_count()} cores, load {one:.2f} (1 minute) and {five:.2f} (5 minutes)"


def say(text: str) -> None:
    """Progress, for people; never on standard output, which `--json` keeps for itself."""
    print(text, file=sys.stderr, flush=True)


class Samples:
    """Seconds by name, gathered in turns, so that a busy moment meets all of them."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)

    def __contains__(self, name: str) -> bool:
        return name in self._seconds

    def median(self, name: str) -> float:
        return statistics.median(self._seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """Median of the ratios within each turn: what slows a whole turn down cancels."""
        pairs = zip(self._seconds[name], self._seconds[base], strict=True)
        return statistics.median(a / b for a, b in pairs)


def chart(
    path: Path,
    title: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    diagonal: bool = False,
) -> None:
    """Lines over logarithmic axes. `diagonal`: growth in proportion, from the first point on."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (label, y), marker in zip(series.items(), "osD^vPX*" * len(series), strict=False):
        (line,) = axes.plot(x, y, marker=marker, label=label)
        if diagonal:
            axes.plot(x, [y[0] * v / x[0] for v in x], ":", color=line.get_color(), linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(list(x), [f"{v:g}" for v in x])
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
