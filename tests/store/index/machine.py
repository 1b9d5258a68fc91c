"""What all rules of the state machine use: the index, its reference, and the memory of the producers.

Each producer process has memory of its own, which is written and given back as a Grant says. It outlives
the index, which may lose all that it knew.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from weightdepot.store.errors import WeightDepotError
from weightdepot.store.index import Grant, Index, Part, Process, Version, Wait
from weightdepot.store.index.records import Held

from .hand import Hand
from .reference import Reference
from .reference_state import Outcome

T = TypeVar("T")
PROCESS = Process("boot/host", 1, 2)
TTL = 3600.0  # nothing runs out by itself: the machine says when
GROUPS = ("g", "h")
_examples = itertools.count()

often = st.integers(0, 7).map(lambda n: n == 7)  # seldom true; shrinks to False
ranks = st.integers(0, 1)


class Machine(RuleBasedStateMachine):
    url: str  # set by the test
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        run = f"machine{next(_examples)}"
        self.index = Index(self.url, run=run)
        self.hand = Hand(self.url, run, "m")
        self.ref = Reference()
        self.names = itertools.count()
        self.former: dict[tuple[str, int], str] = {}  # who held a rank before
        self.given: dict[tuple[str, int], int] = {}  # (group, round) -> version
        self.attempts: set[str] = set()
        self.highest = -1  # version that was ever ready, as the index knows
        self.next_version = 0
        self.exists = False
        self.processes: dict[str, str] = {}  # session of a producer -> its process: its first session
        self.rank_of: dict[str, int] = {}  # of a process
        self.memory: dict[str, dict[int, Held]] = {}  # process that has not left -> slot -> what is in it
        self.grants: dict[tuple[str, int], Grant] = {}  # (session, version) -> where it writes

    def teardown(self) -> None:
        self.call(self.index.close)
        self.hand.close()

    # -- asking ----------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        return self.loop.run_until_complete(function(*args))

    def outcome(self, function: Callable[..., Awaitable[T]], *args: Any) -> T | Outcome:
        """The answer; an error or a wait as the reference puts it."""
        try:
            answer = self.call(function, *args)
        except WeightDepotError as error:
            return ("error", error.slug)
        if isinstance(answer, Wait):
            return ("wait", answer.reason)
        return answer

    def same_version(self, answer: Version | Outcome, expected: Outcome) -> None:
        assert ((answer.state.value,) if isinstance(answer, Version) else answer) == expected

    # -- who and what there is -------------------------------------------------------------------------

    def producer(self, rank: int, stale: bool) -> str:
        former = self.former.get(("", rank), "nobody")
        return former if stale else self.ref.producers.get(rank, former)

    def consumer(self, group: str, rank: int, stale: bool) -> str:
        former = self.former.get((group, rank), "nobody")
        band = self.ref.groups.get(group)
        return band.ranks[rank].session if band and rank in band.ranks and not stale else former

    def live_sessions(self) -> list[str]:
        return sorted(self.ref.sessions, key=lambda s: int(s[1:]))

    def known_versions(self) -> list[int]:
        return sorted(self.ref.versions)

    def version_number(self, data: st.DataObject) -> int:
        below = self.next_version
        return data.draw(st.integers(max(0, below - 3), below + 1))

    def in_flight(self) -> list[tuple[str, int]]:
        """Ranks that began a round and did not finish it."""
        bands = sorted(self.ref.groups.items())
        return [(g, k) for g, band in bands for k, r in sorted(band.ranks.items()) if r.begun > r.done]

    def some_rank(self, data: st.DataObject, preferred: list[tuple[str, int]]) -> tuple[str, int]:
        """One of the preferred, more often than not."""
        if preferred and data.draw(st.sampled_from([True, True, False])):
            return data.draw(st.sampled_from(preferred))
        return data.draw(st.sampled_from(GROUPS)), data.draw(ranks)

    # -- the memory of the producers -------------------------------------------------------------------

    def starts(self, session: str, rank: int, process: str = "") -> None:
        """A producer has joined; as another session of a process that was there before, or as a new one."""
        self.processes[session] = process or session
        self.rank_of[process or session] = rank
        self.memory.setdefault(process or session, {})

    def granted(self, session: str, grant: Grant) -> None:
        """What a rank may give back it does, and begins to write."""
        mine = self.processes[session]
        self.grants.pop((session, grant.version), None)
        self.grants[session, grant.version] = grant  # the newest comes last
        kept = {mine, *(self.processes[s] for s in grant.keep_sessions)}
        for process in set(self.memory) - kept:
            if self.rank_of[process] == self.rank_of[mine]:
                self.memory[process] = {}
        slots = self.memory[mine]
        self.memory[mine] = {s: held for s, held in slots.items() if s in grant.slots and s != grant.slot}

    def part_of(self, version: int, rank: int, session: str, digest: str) -> Held:
        """A part as it is sealed, named after the attempt that it was written for."""
        grant = self.grants.get((session, version), Grant(version, 0, "T", 0))
        part = Part(rank, session, {"shm": {"name": grant.attempt}}, 10, digest)
        return Held(version, grant.attempt, grant.slot, grant.tiling, part, b"\x00\xff")

    def written(self, session: str, held: Held) -> None:
        """A part is complete; what was granted since in its slot wins."""
        grant = self.grants.get((session, held.version))
        memory = self.memory.get(self.processes[session])  # None: it has left
        if memory is None or grant is None or held.slot < 0:
            return
        if grant == self.newest_grant(session):
            memory[held.slot] = held

    def newest_grant(self, session: str) -> Grant | None:
        return next((g for (s, _), g in reversed(self.grants.items()) if s == session), None)

    def gone(self, session: str) -> None:
        """A process has left, and its memory with it."""
        if session in self.processes:
            self.memory.pop(self.processes[session], None)
