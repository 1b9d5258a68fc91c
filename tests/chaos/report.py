"""What a run says at its end: what must hold, what there was, and which faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .ledger import GRACE, Ledger
from .plan import EVERYONE


@dataclass(frozen=True)
class Must:
    """`limit`: the most (or, where `at_least`, the least) that is well."""

    name: str
    value: float
    unit: str
    limit: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def musts(ledger: Ledger, apart: list[str], failures: list[str], converged: int, groups: int) -> list[Must]:
    faults = len(ledger.done)
    return [
        Must("torn_reads", len(ledger.torn), "reads", 0),
        Must("groups_apart", len(apart), "cases", 0),
        Must("ready_versions_lost", len(ledger.lost), "versions", 0),
        Must("waits_past_their_bound", sum(c.late for c in ledger.calls), "calls", 0),
        Must("failures", len(failures), "processes", 0),
        # a run in which nothing moves proves nothing
        Must("versions_published", len(ledger.ever_ready), "versions", max(3, faults // 2), at_least=True),
        Must("updates_applied", ledger.updates, "updates", max(6, faults), at_least=True),
        Must("groups_at_the_last_version", converged, "groups", groups, at_least=True),
    ]


def as_json(
    ledger: Ledger,
    found: list[Must],
    failures: list[str],
    seed: int,
    seconds: float,
    settings: dict[str, Any],
) -> dict[str, Any]:
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "settings": settings,
        "results": [
            {
                "name": m.name, "value": m.value, "unit": m.unit, "baseline": None, "ratio": None,
                "limit": m.limit, "ok": m.ok,
            }
            for m in found
        ],
        "faults": [
            {"at": round(f.at, 3), "victim": f.victim, "kind": f.kind, "down": round(f.down, 3)}
            for f in ledger.done
        ],
        "errors": {f"{call}: {error}": n for (call, error), n in sorted(ledger.errors().items())},
        "rejoins": ledger.rejoins,
        "longest": longest(ledger),
        "torn": ledger.torn,
        "lost": ledger.lost,
        "failures": failures,
        "late": [
            {"who": c.who, "call": c.call, "seconds": round(c.seconds, 2), "bound": c.bound, "error": c.error}
            for c in ledger.calls
            if c.late
        ],
    }  # fmt: skip


def longest(ledger: Ledger) -> dict[str, dict[str, float]]:
    """Of each kind of call, in seconds."""
    kinds: dict[str, dict[str, float]] = {}
    for call in ledger.calls:
        seen = kinds.setdefault(call.call, {"calls": 0, "longest": 0.0, "bound": call.bound})
        seen["calls"] += 1
        seen["longest"] = max(seen["longest"], round(call.seconds, 2))
    return kinds


def show(console: Console, ledger: Ledger, found: list[Must], seed: int, seconds: float) -> None:
    table = Table(title=f"{len(ledger.done)} faults in {seconds:.0f} s, seed {seed}")
    for column in ("", "value", "must be", ""):
        table.add_column(column, justify="left" if not column else "right")
    for must in found:
        sign = ">=" if must.at_least else "<="
        table.add_row(
            must.name.replace("_", " "), f"{must.value:g} {must.unit}", f"{sign} {must.limit:g}",
            "ok" if must.ok else "MISSED",
        )  # fmt: skip
    console.print(table)

    table = Table(title="Faults")
    for column in ("victim", "kills", "stops"):
        table.add_column(column, justify="left" if column == "victim" else "right")
    counts = ledger.by_victim()
    for victim in EVERYONE:
        table.add_row(victim, str(counts[victim, "kill"]), str(counts[victim, "stop"]))
    console.print(table)

    table = Table(title=f"Calls (a wait may end up to {GRACE:g} s after its bound)")
    for column in ("call", "calls", "longest", "bound", "errors"):
        table.add_column(column, justify="left" if column in ("call", "errors") else "right")
    errors = ledger.errors()
    for call, seen in sorted(longest(ledger).items()):
        said = ", ".join(f"{n} {error}" for (of, error), n in sorted(errors.items()) if of == call)
        table.add_row(
            call, f"{seen['calls']:g}", f"{seen['longest']:.1f} s", f"{seen['bound']:g} s", said or "none"
        )
    console.print(table)
    console.print(f"ranks that had to take their place anew: {ledger.rejoins}")
