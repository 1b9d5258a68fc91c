"""What was seen in a run, and what must hold of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from weightdepot.store.index.records import Model, VersionState

from .plan import TIMES, Fault

# What a call may take beyond its stated time-out: one exchange with a controller that does not answer, and
# what two busy cores need.
GRACE = TIMES.call + 2.0
RETENTION = 3


@dataclass(frozen=True)
class Call:
    who: str
    call: str
    bound: float
    begun: float
    ended: float
    error: str
    seconds: float
    """Without the time for which the caller itself was stopped."""

    @property
    def late(self) -> bool:
        return self.seconds > self.bound + GRACE


@dataclass
class _Serving:
    version: int
    begun: float
    ended: float | None = None


@dataclass
class Ledger:
    """Thread-safe. Times are of the monotonic clock, which all processes of a machine share."""

    calls: list[Call] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    done: list[Fault] = field(default_factory=list)
    ever_ready: set[int] = field(default_factory=set)
    updates: int = 0
    """Calls that brought another version than the rank held."""
    rejoins: int = 0
    acknowledged: int = -1
    """The highest version that a producer was told is ready."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: dict[str, list[tuple[float, float]]] = {}
        self._serving: dict[str, list[_Serving]] = {}
        self._joined: set[str] = set()
        self._lost: set[int] = set()

    def stopped(self, who: str, begun: float, ended: float) -> None:
        with self._lock:
            self._stops.setdefault(who, []).append((begun, ended))

    def hear(self, who: str, said: dict[str, Any]) -> None:
        """One line of a worker."""
        with self._lock:
            if "torn" in said:
                self.torn.append(f"{who}: {said['torn']}")
            elif "joined" in said:
                self.rejoins += who in self._joined
                self._joined.add(who)
            elif "ended" in said and "call" not in said:
                self._joined.discard(who)  # the next start is no rejoin
                self._close(who, said["ended"])
            elif "call" in said:
                self._heard_call(who, said)

    def _heard_call(self, who: str, said: dict[str, Any]) -> None:
        begun, ended, error = said["begun"], said["ended"], said.get("error", "")
        stopped = sum(max(0.0, min(ended, b) - max(begun, a)) for a, b in self._stops.get(who, ()))
        self.calls.append(
            Call(who, said["call"], said["bound"], begun, ended, error, ended - begun - stopped)
        )
        if said["call"] in ("update", "apply"):
            before = self._close(who, begun)
            if not error:
                self.updates += before != said["version"]
                self._serving.setdefault(who, []).append(_Serving(said["version"], ended))
        elif said["call"] == "publish" and not error and said["wait"] == "ready":
            self.acknowledged = max(self.acknowledged, said["version"])

    def _close(self, who: str, at: float) -> int | None:
        """What this rank served until `at`."""
        served = self._serving.get(who, [])
        if not served or served[-1].ended is not None:
            return served[-1].version if served else None
        served[-1].ended = at
        return served[-1].version

    def asked(self, who: str, call: str, bound: float, begun: float, ended: float, error: str) -> None:
        with self._lock:
            self.calls.append(Call(who, call, bound, begun, ended, error, ended - begun))

    def snapshot(self, model: Model, acknowledged: int) -> None:
        """What a controller says now. acknowledged: what `self.acknowledged` was before it was asked.

        Retention keeps the newest versions but one while the next is written. Their memory outlives the
        process that wrote it, so that nothing which befell a process may take them away.
        """
        with self._lock:
            states = {v.version: v for v in model.versions}
            self.ever_ready |= {v for v, seen in states.items() if seen.state is VersionState.READY}
            for version in sorted(self.ever_ready)[-(RETENTION - 1) :]:
                seen = states.get(version)
                if version not in self._lost and (seen is None or seen.state is not VersionState.READY):
                    what = "unknown" if seen is None else f"{seen.state.value} ({seen.reason})"
                    at = time.strftime("%H:%M:%S")
                    self.lost.append(f"version {version} was ready, and is {what} (seen at {at})")
                    self._lost.add(version)
            if (model.highest if model.highest is not None else -1) < acknowledged:
                self.lost.append(
                    f"version {acknowledged} was said to be ready; the highest is {model.highest}"
                )

    def groups_apart(self, groups: Iterable[tuple[str, ...]]) -> list[str]:
        """Where two ranks of a group served different versions at the same time."""
        apart = []
        for ranks in groups:
            for number, one in enumerate(ranks):
                for other in ranks[number + 1 :]:
                    apart += _overlaps(one, self._serving.get(one, []), other, self._serving.get(other, []))
        return apart

    def by_victim(self) -> Counter[tuple[str, str]]:
        return Counter((f.victim, f.kind) for f in self.done)

    def errors(self) -> Counter[tuple[str, str]]:
        return Counter((c.call, c.error) for c in self.calls if c.error)


def _overlaps(one: str, first: list[_Serving], other: str, second: list[_Serving]) -> list[str]:
    found = []
    forever = float("inf")
    i = j = 0
    while i < len(first) and j < len(second):
        a, b = first[i], second[j]
        a_end = forever if a.ended is None else a.ended
        b_end = forever if b.ended is None else b.ended
        if a.version != b.version and min(a_end, b_end) - max(a.begun, b.begun) > 0:
            found.append(f"{one} served version {a.version} while {other} served {b.version}")
        if a_end <= b_end:
            i += 1
        else:
            j += 1
    return found
