"""Rules of the state machine: members come, die and go; the index loses its data and is told anew."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from .machine import GROUPS, PROCESS, TTL, Machine, often, ranks
from .reference import Reference
from .reference_state import Announced, Outcome


class Members(Machine):
    @rule(
        rank=ranks,
        size=st.sampled_from([2, 2, 2, 2, 2, 2, 1, 3]),
        replace=st.booleans(),
        retention=often,
        yields=often,
    )
    def join_producer(
        self, rank: int, size: int, replace: bool, retention: bool, yields: bool = False
    ) -> None:
        if rank < size:
            holder = self.ref.producers.get(rank, "")
            self.join_as(
                f"p{next(self.names)}", rank, size, 3 if retention else 2, holder if replace else "", yields
            )

    def join_as(
        self, session: str, rank: int, size: int, slots: int, replace: str, yields: bool, process: str = ""
    ) -> bool:
        holder = self.ref.producers.get(rank, "")
        expected = self.ref.join_producer(rank, size, session, "L", slots, replace, yields)
        answer = self.outcome(
            self.index.join_producer, "m", rank, size, session, "L", PROCESS, slots, TTL, replace, yields
        )
        self.joined("", rank, holder, answer, expected)
        if not isinstance(answer, tuple):
            self.starts(session, rank, process)
        return not isinstance(answer, tuple)

    @precondition(lambda self: self.ref.producers)
    @rule(data=st.data(), layout=st.sampled_from(["L", "L", "K"]))
    def rejoin_producer(self, data: st.DataObject, layout: str) -> None:
        rank, session = data.draw(st.sampled_from(sorted(self.ref.producers.items())))
        size, slots = self.ref.size, self.ref.retention
        expected = self.ref.join_producer(rank, size, session, layout, slots)
        answer = self.outcome(self.index.join_producer, "m", rank, size, session, layout, PROCESS, slots, TTL)
        self.joined("", rank, session, answer, expected)

    @rule(
        group=st.sampled_from(GROUPS),
        rank=ranks,
        size=st.sampled_from([2, 2, 2, 2, 2, 1]),
        replace=st.booleans(),
        observer=often,
    )
    def join_consumer(self, group: str, rank: int, size: int, replace: bool, observer: bool = False) -> None:
        if rank >= size:
            return
        session = f"c{next(self.names)}"
        band = self.ref.groups.get(group)
        holder = band.ranks[rank].session if band and rank in band.ranks else ""
        by_name = holder if replace else ""
        expected = self.ref.join_consumer(group, rank, size, session, by_name, observer)
        answer = self.outcome(
            self.index.join_consumer, "m", group, rank, size, session, "", PROCESS, TTL, by_name, observer
        )
        self.joined(group, rank, holder, answer, expected)

    def joined(self, group: str, rank: int, holder: str, answer: Any, expected: Outcome) -> None:
        self.exists = True  # also a refused call makes the model known
        if isinstance(answer, tuple):
            assert answer == expected
            return
        assert (answer.incarnation, answer.world_size, answer.latest, answer.highest) == expected
        if holder:
            self.former[group, rank] = holder

    @precondition(lambda self: self.ref.producers)
    @rule(data=st.data(), cleanly=st.booleans())
    def restart_producer(self, data: st.DataObject, cleanly: bool) -> None:
        """A new session takes the place of one that left or died."""
        rank, session = data.draw(st.sampled_from(sorted(self.ref.producers.items())))
        if cleanly:
            self.leave_it(session)
        self.join_producer(rank, self.ref.size, True, self.ref.retention == 3)

    @precondition(lambda self: self.ref.sessions)
    @rule(data=st.data(), long=often)
    def die(self, data: st.DataObject, long: bool) -> None:
        session = data.draw(st.sampled_from(self.live_sessions()))
        self.hand.kill(session, 7200.0 if long else 60.0)
        self.ref.kill(session, long)

    @precondition(lambda self: self.ref.sessions)
    @rule(data=st.data(), former=often)
    def leave(self, data: st.DataObject, former: bool) -> None:
        """Also of those who were replaced, and come to their end later."""
        present = {self.processes[s] for s in self.ref.producers.values()}
        old = sorted(s for s in self.former.values() if self.processes.get(s, s) not in present)
        old = [s for s in old if s not in self.ref.sessions] or ["nobody"]
        self.leave_it(data.draw(st.sampled_from(old if former else self.live_sessions())))

    def leave_it(self, session: str) -> None:
        self.call(self.index.leave, "m", session)
        self.ref.leave(session)
        self.gone(session)

    @precondition(lambda self: self.ref.sessions)
    @rule(data=st.data(), stale=often)
    def heartbeat(self, data: st.DataObject, stale: bool) -> None:
        session = data.draw(st.sampled_from(self.live_sessions()))
        if stale and self.former:
            session = data.draw(st.sampled_from(sorted(self.former.values())))
        elif self.in_flight():
            session = self.consumer(*self.some_rank(data, self.in_flight()), False)
        rounds = [(g, data.draw(st.integers(max(1, n - 1), n))) for g, n in self.ref.rounds.items() if n]
        answer = self.call(self.index.heartbeat, "m", session, TTL, rounds, TTL)
        assert (answer.member, answer.lost) == self.ref.heartbeat(session, rounds)

    @precondition(lambda self: self.exists)
    @rule()
    def sweep(self) -> None:
        self.call(self.index.sweep, "m")
        self.ref.sweep()

    # -- what outlives the index -----------------------------------------------------------------------

    def lose_data(self) -> None:
        """The server starts anew, with nothing: not even the scripts."""
        self.hand.redis.flushall()
        self.hand.redis.script_flush()
        self.ref = Reference()
        self.given.clear()
        self.highest = -1
        self.exists = False

    @precondition(lambda self: self.ref.versions)
    @rule(rejoin=st.sampled_from(["all", "all", "none"]), announce=st.booleans())
    def restart_server(self, rejoin: str, announce: bool) -> None:
        before = self.ref
        self.lose_data()
        for rank, session in sorted(before.producers.items()) if rejoin == "all" else ():
            self.come_back(session, rank, before.size, before.retention)
        for rank, session in sorted(self.ref.producers.items()) if announce else ():
            held = list(self.memory[self.processes[session]].values())
            self.announce_it(rank, session, held, max((h.version for h in held), default=None))

    def come_back(self, session: str, rank: int, size: int, retention: int) -> None:
        """A process that was forgotten joins as another session."""
        process = self.processes[session]
        if process in self.memory:
            self.join_as(f"p{next(self.names)}", rank, size, retention, "", False, process)

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def rejoin_forgotten(self, data: st.DataObject) -> None:
        members = {self.processes[s] for s in self.ref.producers.values()}
        forgotten = sorted(set(self.memory) - members)
        if forgotten:
            process = data.draw(st.sampled_from(forgotten))
            rank, size = self.rank_of[process], self.ref.size or 2
            self.come_back(process, rank, max(size, rank + 1), self.ref.retention or 2)

    @precondition(lambda self: self.ref.producers)
    @rule(data=st.data(), rank=ranks, stale=often, lifts=st.sampled_from([None, 0, 0, 1]))
    def announce(self, data: st.DataObject, rank: int, stale: bool, lifts: int | None) -> None:
        session = self.producer(rank, stale)
        memory = self.memory.get(self.processes.get(session, ""), {})
        held = [h for h in memory.values() if data.draw(st.sampled_from([True, True, True, False]))]
        highest = max((h.version for h in memory.values()), default=None)
        known = None if lifts is None or highest is None else highest + lifts
        self.announce_it(rank, session, held, known)

    def announce_it(self, rank: int, session: str, held: list[Any], highest: int | None) -> None:
        size = self.ref.size
        parts = {h.version: Announced(h.attempt, h.slot, h.tiling, session, h.part.digests) for h in held}
        expected = self.ref.announce(rank, size, session, parts, highest)
        answer = self.outcome(self.index.announce, "m", rank, size, session, 2, held, highest)
        assert answer == (expected[1:] if expected[0] == "ready" else expected)
        self.next_version = max(self.next_version, (highest or 0) + 1)
