"""What the reference knows of a model, and what follows from it alone. See reference.py.

Operations answer outcomes as tuples: ("error", slug), ("wait", reason), or what was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Outcome = tuple[Any, ...]
REMEMBERED = 16


def error(slug: str) -> Outcome:
    return ("error", slug)


def wait(reason: str) -> Outcome:
    return ("wait", reason)


@dataclass
class Publish:
    """A version and what became of it."""

    state: str
    slot: int  # -1: it is read in place
    tiling: str
    incarnation: int
    expect: dict[int, str]
    attempt: str = ""
    granted: set[int] = field(default_factory=set)
    sealed: dict[int, str] = field(default_factory=dict)
    overdue: bool = False
    leases: set[tuple[str, int]] = field(default_factory=set)  # live ones

    @property
    def living(self) -> bool:
        return self.state in ("open", "ready", "retired")


@dataclass(frozen=True)
class Announced:
    """A part that a rank said is still in its memory."""

    attempt: str
    slot: int
    tiling: str
    session: str
    digest: str


@dataclass
class Rank:
    """One rank of a group."""

    session: str
    held: int | None = None
    begun: int = 0
    done: int = 0
    aim: int | None = None  # of the round that it began; None: nothing to move
    staged: int = 0  # the round whose version it has read whole

    @property
    def in_flight(self) -> bool:
        return self.begun > self.done and self.aim is not None and self.aim != self.held


@dataclass
class Band:
    """A consumer group."""

    size: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    target: int | None = None
    moving: bool = False
    noop: bool = True
    failed: bool = False  # its last round failed, and it is not whole since
    observer: bool = False
    last: int | None = None  # what it held as a whole last
    base: int | None = None  # the newest ready version when the group was made
    outcomes: dict[int, tuple[str, int | None]] = field(default_factory=dict)

    def unharmed(self) -> bool:
        """No rank lost what it held, or is on its way from it."""
        touched = any(r.held is not None or r.in_flight for r in self.ranks.values())
        return self.whole_at() is not None or (not touched and self.last is None)

    def whole_at(self) -> int | None:
        held = {(r.held if not r.in_flight else None) for r in self.ranks.values()}
        return held.pop() if len(self.ranks) == self.size and len(held) == 1 else None

    def all_staged(self, round: int) -> bool:
        return all(r in self.ranks for r in range(self.size)) and all(
            r.done >= round or r.staged == round for r in self.ranks.values()
        )

    def pending(self, round: int) -> list[int]:
        return [k for k, r in sorted(self.ranks.items()) if r.done < round]

    @property
    def state(self) -> str:
        if self.moving:
            return "moving"
        if self.failed:
            return "half"
        return "empty" if self.whole_at() is None else "whole"


class State:
    def __init__(self) -> None:
        self.size = self.retention = self.incarnation = 0
        self.producers: dict[int, str] = {}
        self.layouts: dict[str, str] = {}
        self.yielding: set[str] = set()
        self.sessions: set[str] = set()  # that hold a rank of anything
        self.dead: set[str] = set()  # of these
        self.long_dead: set[str] = set()  # of these
        self.versions: dict[int, Publish] = {}
        self.announced: dict[int, dict[int, Announced]] = {}  # version -> rank -> its part
        self.highest: int | None = None
        self.aborted = 0
        self.groups: dict[str, Band] = {}
        self.rounds: dict[str, int] = {}
        self.pins: set[int] = set()
        self.tags: dict[str, int] = {}
        self.hold_at: int | None = None
        self.bounded: int | None = None  # max_lag
        self.published: set[int] = set()

    # -- who is there --------------------------------------------------------------------------------

    def alive(self, session: str | None) -> bool:
        return session in self.sessions and session not in self.dead

    def renew(self, session: str) -> None:
        self.sessions.add(session)
        self.dead.discard(session)
        self.long_dead.discard(session)

    def drop(self, session: str) -> None:
        self.renew(session)
        self.sessions.discard(session)
        self.yielding.discard(session)

    def live(self, band: Band) -> bool:
        if band.observer:
            return False
        return all(r in band.ranks and self.alive(band.ranks[r].session) for r in range(band.size))

    # -- versions ------------------------------------------------------------------------------------

    @property
    def latest(self) -> int | None:
        return max((n for n, v in self.versions.items() if v.state == "ready"), default=None)

    @property
    def current(self) -> int | None:
        return self.latest if self.hold_at is None else self.hold_at

    @property
    def open(self) -> int | None:
        return next((n for n, v in self.versions.items() if v.state == "open"), None)

    @property
    def protected(self) -> set[int]:
        return self.pins | set(self.tags.values()) | ({self.hold_at} if self.hold_at is not None else set())

    @property
    def window(self) -> int:
        return self.retention if self.bounded is None else max(self.retention, self.bounded + 2)

    def newer_than(self, v: int | None) -> int:
        return len([n for n in self.published if v is None or n > v])

    def lag(self, band: Band) -> int:
        return self.newer_than(band.last if band.last is not None else band.base)

    def leases_of(self, n: int) -> set[tuple[str, int]]:
        """Live ones; none of a version that is forgotten."""
        return self.versions[n].leases if n in self.versions else set()

    def close(self, n: int, state: str) -> None:
        self.versions[n].state = state
        self.aborted += state == "aborted"
        self.pins.discard(n)
        self.tags = {name: v for name, v in self.tags.items() if v != n}
        if self.hold_at == n:
            self.hold_at = None

    def abort_overdue(self) -> None:
        for n, v in self.versions.items():
            dead = any(r not in v.sealed and not self.alive(s) for r, s in v.expect.items())
            if v.state == "open" and (v.overdue or dead):
                self.close(n, "aborted")

    def free_idle(self) -> None:
        for n, v in self.versions.items():
            if v.state == "retired" and not v.leases:
                self.close(n, "freed")

    def forget(self) -> None:
        closed = sorted(n for n, v in self.versions.items() if not v.living)
        for n in closed[: max(0, len(closed) - REMEMBERED)]:
            if not self.versions[n].leases:
                del self.versions[n]
