"""The index against a plain-Python reference: any calls, in any order, with deaths and lost leases between.

Two checks run side by side. The answers, and what the views show, must be the reference's. And some
promises are checked on the raw keys after every step, whatever the reference says: a ready version has
all parts of one incarnation, no slot is granted that somebody may still read, the ranks of a group are
given the same version in the same round.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from weightdepot.store.errors import WeightDepotError
from weightdepot.store.index import Grant, Index, Part, Process, Round, Version, Wait
from weightdepot.store.index.records import Mode, Policy

from .hand import Hand
from .reference import Outcome, Reference

T = TypeVar("T")
PROCESS = Process("boot/host", 1, 2)
TTL = 3600.0  # nothing runs out by itself: the machine says when
GROUPS = ("g", "h")
# more for a search by hand: WEIGHTDEPOT_INDEX_EXAMPLES=5000 pytest tests/store/index -k sequence
EXAMPLES = int(os.environ.get("WEIGHTDEPOT_INDEX_EXAMPLES", "100"))
_examples = itertools.count()

often = st.integers(0, 7).map(lambda n: n == 7)  # seldom true; shrinks to False
ranks = st.integers(0, 1)


class IndexMachine(RuleBasedStateMachine):
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
        self.next_version = 0
        self.exists = False

    def teardown(self) -> None:
        try:
            self.look()
        finally:
            self.call(self.index.close)
            self.hand.close()

    # -- helpers -------------------------------------------------------------------------------------

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

    @initialize(started=st.sampled_from(["all", "all", "members", "nothing"]))
    def start(self, started: str) -> None:
        """Most examples begin where it gets interesting."""
        if started == "nothing":
            return
        for rank in (0, 1):
            self.join_producer(rank, 2, False, False)
            self.join_consumer("g", rank, 2, False)
        if started == "all":
            self.publish(1)
            self.update("g")
            self.publish(1)
            self.begin_it("g", 0, self.consumer("g", 0, False), 0)

    def in_flight(self) -> list[tuple[str, int]]:
        """Ranks that began a round and did not finish it."""
        bands = sorted(self.ref.groups.items())
        return [(g, k) for g, band in bands for k, r in sorted(band.ranks.items()) if r.begun > r.done]

    def expected(self) -> list[tuple[str, int]]:
        """Ranks that have not begun a round that is under way."""
        bands = [(g, b) for g, b in sorted(self.ref.groups.items()) if b.moving]
        return [(g, k) for g, b in bands for k, r in sorted(b.ranks.items()) if r.begun < self.ref.rounds[g]]

    def some_rank(self, data: st.DataObject, preferred: list[tuple[str, int]]) -> tuple[str, int]:
        """One of the preferred, more often than not."""
        if preferred and data.draw(st.sampled_from([True, True, False])):
            return data.draw(st.sampled_from(preferred))
        return data.draw(st.sampled_from(GROUPS)), data.draw(ranks)

    # -- members -------------------------------------------------------------------------------------

    @rule(rank=ranks, size=st.sampled_from([2, 2, 2, 2, 2, 2, 1, 3]), replace=st.booleans(), retention=often)
    def join_producer(self, rank: int, size: int, replace: bool, retention: bool) -> None:
        if rank >= size:
            return
        session = f"p{next(self.names)}"
        holder = self.ref.producers.get(rank, "")
        by_name = holder if replace else ""
        slots = 3 if retention else 2
        expected = self.ref.join_producer(rank, size, session, "L", slots, by_name)
        answer = self.outcome(
            self.index.join_producer, "m", rank, size, session, "L", PROCESS, slots, TTL, by_name
        )
        self.joined("", rank, holder, answer, expected)

    @precondition(lambda self: self.ref.producers)
    @rule(data=st.data(), layout=st.sampled_from(["L", "L", "K"]))
    def rejoin_producer(self, data: st.DataObject, layout: str) -> None:
        rank, session = data.draw(st.sampled_from(sorted(self.ref.producers.items())))
        size, slots = self.ref.size, self.ref.retention
        expected = self.ref.join_producer(rank, size, session, layout, slots, "")
        answer = self.outcome(self.index.join_producer, "m", rank, size, session, layout, PROCESS, slots, TTL)
        self.joined("", rank, session, answer, expected)

    @rule(
        group=st.sampled_from(GROUPS),
        rank=ranks,
        size=st.sampled_from([2, 2, 2, 2, 2, 1]),
        replace=st.booleans(),
    )
    def join_consumer(self, group: str, rank: int, size: int, replace: bool) -> None:
        if rank >= size:
            return
        session = f"c{next(self.names)}"
        band = self.ref.groups.get(group)
        holder = band.ranks[rank].session if band and rank in band.ranks else ""
        by_name = holder if replace else ""
        expected = self.ref.join_consumer(group, rank, size, session, by_name)
        answer = self.outcome(
            self.index.join_consumer, "m", group, rank, size, session, "", PROCESS, TTL, by_name
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
            self.call(self.index.leave, "m", session)
            self.ref.leave(session)
        self.join_producer(rank, self.ref.size, True, self.ref.retention == 3)

    @precondition(lambda self: self.ref.sessions)
    @rule(data=st.data(), long=often)
    def die(self, data: st.DataObject, long: bool) -> None:
        session = data.draw(st.sampled_from(self.live_sessions()))
        self.hand.kill(session, 7200.0 if long else 60.0)
        self.ref.kill(session, long)

    @precondition(lambda self: self.ref.sessions)
    @rule(data=st.data(), gone=often)
    def leave(self, data: st.DataObject, gone: bool) -> None:
        session = "nobody" if gone else data.draw(st.sampled_from(self.live_sessions()))
        self.call(self.index.leave, "m", session)
        self.ref.leave(session)

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

    # -- versions ------------------------------------------------------------------------------------

    def version_number(self, data: st.DataObject) -> int:
        below = self.next_version
        return data.draw(st.integers(max(0, below - 3), below + 1))

    def open_it(self, version: int, rank: int, session: str, incarnation: int) -> Outcome:
        expected = self.ref.open_version(version, rank, session, "T", incarnation)
        live = {v: self.hand.live_leases(v) for v in self.known_versions()}
        taken = {self.hand.field(f"version:{v}", "slot") for v in live if live[v]}
        was_open = self.hand.field("meta", "open")
        answer = self.outcome(self.index.open_version, "m", version, rank, session, "T", incarnation, TTL)
        if isinstance(answer, Grant):
            assert str(answer.slot) not in taken or was_open == str(version), "granted while it is read"
            self.next_version = max(self.next_version, version + 1)
            answer = (
                answer.version, answer.slot, answer.tiling, answer.incarnation,
                frozenset(answer.keep_sessions),
            )  # fmt: skip
        assert answer == expected
        return expected

    def seal_it(self, version: int, rank: int, session: str, digest: str) -> None:
        expected = self.ref.seal(version, rank, session, digest)
        part = Part(rank, session, {"shm": {"name": f"{version}"}}, 10, digest)
        answer = self.outcome(self.index.seal, "m", version, rank, session, part, b"\x00\xff")
        self.same_version(answer, expected)

    def same_version(self, answer: Version | Outcome, expected: Outcome) -> None:
        assert ((answer.state.value,) if isinstance(answer, Version) else answer) == expected

    @precondition(lambda self: self.exists)
    @rule(data=st.data(), rank=ranks, stale=often, wrong=often)
    def open_version(self, data: st.DataObject, rank: int, stale: bool, wrong: bool) -> None:
        incarnation = self.ref.incarnation - (1 if wrong else 0)
        self.open_it(self.version_number(data), rank, self.producer(rank, stale), incarnation)

    @precondition(lambda self: self.ref.versions)
    @rule(data=st.data(), rank=ranks, stale=often, other=often)
    def seal(self, data: st.DataObject, rank: int, stale: bool, other: bool) -> None:
        version = data.draw(st.sampled_from([*reversed(self.known_versions()), self.next_version + 5]))
        if self.ref.open is not None and data.draw(st.sampled_from([True, True, False])):
            version = self.ref.open
        self.seal_it(version, rank, self.producer(rank, stale), "other" if other else "digest")

    @precondition(lambda self: self.ref.producers)
    @rule(times=st.sampled_from([1, 1, 2, 3]))
    def publish(self, times: int) -> None:
        """Every rank opens and seals the next version."""
        for _ in range(times):
            version = self.next_version
            for rank, session in sorted(self.ref.producers.items()):
                if self.open_it(version, rank, session, self.ref.incarnation)[0] == version:
                    self.seal_it(version, rank, session, "digest")

    @precondition(lambda self: self.ref.producers)
    @rule()
    def open_everywhere(self) -> None:
        """Every rank opens the next version, or joins the open one."""
        version = self.next_version if self.ref.open is None else self.ref.open
        for rank, session in sorted(self.ref.producers.items()):
            self.open_it(version, rank, session, self.ref.incarnation)

    @precondition(lambda self: self.ref.versions)
    @rule(data=st.data(), rank=ranks, stale=often)
    def abort(self, data: st.DataObject, rank: int, stale: bool) -> None:
        version = data.draw(st.sampled_from(list(reversed(self.known_versions()))))
        session = self.producer(rank, stale)
        answer = self.outcome(self.index.abort, "m", version, session, "because")
        self.same_version(answer, self.ref.abort(version, session))

    @precondition(lambda self: self.ref.open is not None)
    @rule()
    def pass_deadline(self) -> None:
        version = self.ref.open
        assert version is not None
        self.hand.overdue(version)
        self.ref.versions[version].overdue = True

    @precondition(lambda self: self.ref.versions)
    @rule(data=st.data(), rank=st.integers(0, 2))
    def report_lost(self, data: st.DataObject, rank: int) -> None:
        version = data.draw(st.sampled_from(list(reversed(self.known_versions()))))
        answer = self.outcome(self.index.report_lost, "m", version, rank, "no route")
        self.same_version(answer, self.ref.report_lost(version, rank))

    # -- what is kept ----------------------------------------------------------------------------------

    @precondition(lambda self: self.ref.versions)
    @rule(data=st.data(), how=st.sampled_from(["pin", "hold", "best", "reference"]))
    def keep(self, data: st.DataObject, how: str) -> None:
        version = data.draw(st.sampled_from(list(reversed(self.known_versions()))))
        expected = self.ref.keep(version, how)
        if how == "pin":
            self.same_version(self.outcome(self.index.pin, "m", version), expected)
        elif how == "hold":
            answer = self.outcome(self.index.change_hold, "m", version)
            assert (answer or ("ready",)) == expected
        else:
            self.same_version(self.outcome(self.index.tag, "m", how, version), expected)

    @precondition(lambda self: self.ref.protected)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.ref.protected)))
        if version in self.ref.pins:
            self.same_version(self.outcome(self.index.unpin, "m", version), self.ref.unpin(version))
        for name in [name for name, v in self.ref.tags.items() if v == version]:
            self.call(self.index.untag, "m", name)
            del self.ref.tags[name]
        if self.ref.hold_at == version:
            self.call(self.index.change_hold, "m", None)
            self.ref.hold_at = None

    @precondition(lambda self: self.exists)
    @rule(max_lag=st.sampled_from([None, None, 0, 1, 2]))
    def change_policy(self, max_lag: int | None) -> None:
        mode = Mode.ASYNC if max_lag is None else Mode.BOUNDED
        self.call(self.index.change_policy, "m", Policy(mode, max_lag or 0))
        self.ref.bounded = max_lag

    @precondition(lambda self: self.ref.versions)
    @rule(data=st.data(), rank=ranks, stale=often)
    def withdraw(self, data: st.DataObject, rank: int, stale: bool) -> None:
        version = data.draw(st.sampled_from(list(reversed(self.known_versions()))))
        session = self.producer(rank, stale)
        answer = self.outcome(self.index.withdraw, "m", version, session, "taken back")
        self.same_version(answer, self.ref.withdraw(version, session))

    # -- rounds --------------------------------------------------------------------------------------

    def begin_it(
        self,
        group: str,
        rank: int,
        session: str,
        minimum: int,
        exact: int | None = None,
        max_lag: int | None = None,
    ) -> int | None:
        expected = self.ref.begin_round(group, rank, session, minimum, exact, max_lag)
        answer = self.outcome(self.index.begin_round, "m", group, rank, session, minimum, TTL, exact, max_lag)
        if not isinstance(answer, Round):
            assert answer == expected
            return None
        assert (answer.round, answer.version, answer.held, bool(answer.parts)) == expected
        assert self.given.setdefault((group, answer.round), answer.version) == answer.version
        if answer.held != answer.version:
            assert f"{group}/{answer.round}" in self.hand.live_leases(answer.version), "nothing protects it"
        return answer.round

    def finish_it(
        self, group: str, rank: int, session: str, number: int, failed: bool, torn: bool = True
    ) -> None:
        expected = self.ref.finish_round(group, rank, session, number, failed, torn)
        why = "broken" if failed else ""
        answer = self.outcome(self.index.finish_round, "m", group, rank, session, number, why, torn)
        if not isinstance(answer, tuple):
            answer = (answer.state.value, answer.version)
        assert answer == expected

    @precondition(lambda self: self.ref.groups)
    @rule(data=st.data(), stale=often, choosy=often)
    def begin_round(self, data: st.DataObject, stale: bool, choosy: bool) -> None:
        preferred = self.expected() or self.in_flight()
        group, rank = self.some_rank(data, preferred)
        minimum = self.version_number(data) if choosy else 0
        wish = data.draw(st.sampled_from(["newest", "newest", "newest", "exact", "fresh"]))
        exact = self.version_number(data) if wish == "exact" else None
        max_lag = data.draw(st.integers(0, 3)) if wish == "fresh" else None
        self.begin_it(group, rank, self.consumer(group, rank, stale), minimum, exact, max_lag)

    @precondition(lambda self: self.ref.groups)
    @rule(data=st.data(), stale=often, failed=st.sampled_from([False, False, True]), torn=st.booleans())
    def finish_round(self, data: st.DataObject, stale: bool, failed: bool, torn: bool) -> None:
        group, rank = self.some_rank(data, self.in_flight())
        band = self.ref.groups.get(group)
        begun = band.ranks[rank].begun if band and rank in band.ranks else 0
        number = max(0, begun - data.draw(st.sampled_from([0, 0, 0, 1])))
        self.finish_it(group, rank, self.consumer(group, rank, stale), number, failed, torn)

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data(), stale=often)
    def stage_round(self, data: st.DataObject, stale: bool) -> None:
        group, rank = self.some_rank(data, self.in_flight())
        band = self.ref.groups.get(group)
        begun = band.ranks[rank].begun if band and rank in band.ranks else 0
        session = self.consumer(group, rank, stale)
        answer = self.outcome(self.index.stage_round, "m", group, rank, session, begun)
        assert (answer or ("staged",)) == self.ref.stage_round(group, rank, session, begun)

    @precondition(lambda self: self.ref.groups)
    @rule(group=st.sampled_from(GROUPS))
    def update(self, group: str) -> None:
        """Every rank of a group begins and finishes a round."""
        band = self.ref.groups.get(group)
        for rank, member in sorted(band.ranks.items()) if band else ():
            number = self.begin_it(group, rank, member.session, 0)
            if number is not None:
                self.finish_it(group, rank, member.session, number, False)

    @precondition(lambda self: self.ref.groups)
    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def round_status(self, data: st.DataObject, group: str) -> None:
        last = self.ref.rounds.get(group, 0)
        number = max(0, last - data.draw(st.sampled_from([0, 0, 0, 1, 2])))
        answer = self.outcome(self.index.round_status, "m", group, number)
        if not isinstance(answer, tuple):
            answer = (answer.state.value, answer.version)
        assert answer == self.ref.round_status(group, number)

    @precondition(lambda self: any(v.leases for v in self.ref.versions.values()))
    @rule(data=st.data())
    def lose_lease(self, data: st.DataObject) -> None:
        leases = sorted((n, lease) for n, v in self.ref.versions.items() for lease in v.leases)
        version, (group, number) = data.draw(st.sampled_from(leases))
        self.hand.end_lease(version, f"{group}/{number}")
        self.ref.end_lease(version, (group, number))

    # -- what is seen --------------------------------------------------------------------------------

    @precondition(lambda self: self.exists)
    @rule()
    def sweep(self) -> None:
        self.call(self.index.sweep, "m")
        self.ref.sweep()

    @precondition(lambda self: self.exists)
    @rule()
    def look(self) -> None:
        """The views show what the reference holds."""
        if not self.exists:
            return
        model = self.call(self.index.model, "m")
        self.ref.abort_overdue()
        self.ref.free_idle()
        assert (model.incarnation, model.world_size, model.latest) == (
            self.ref.incarnation, self.ref.size, self.ref.latest,
        )  # fmt: skip
        hold = self.ref.hold_at
        assert (model.held, model.current) == (hold is not None, self.ref.latest if hold is None else hold)
        assert model.tags == self.ref.tags
        assert {v.version for v in model.versions if v.pinned} == self.ref.pins
        assert {p.rank: (p.session, p.alive) for p in model.producers} == {
            rank: (s, self.ref.alive(s)) for rank, s in self.ref.producers.items()
        }
        assert {v.version: (v.state.value, v.slot, set(v.sealed), set(v.leases)) for v in model.versions} == {
            n: (v.state, v.slot, set(v.sealed), {f"{g}/{r}" for g, r in v.leases})
            for n, v in self.ref.versions.items()
        }
        groups = {g.group: g for g in self.call(self.index.groups, "m")}
        self.ref.settle_all()
        assert set(groups) == set(self.ref.groups)
        for name, band in self.ref.groups.items():
            seen = groups[name]
            assert (seen.state.value, seen.round) == (band.state, self.ref.rounds[name])
            assert seen.version == (band.whole_at() if band.state == "whole" else None)
            assert seen.target == (band.target if band.moving else None)
            assert bool(seen.error) == band.failed
            assert (seen.last, seen.lag, seen.live) == (band.last, self.ref.lag(band), self.ref.live(band))
            assert {m.rank: (m.session, m.version) for m in seen.members} == {
                rank: (m.session, m.held) for rank, m in band.ranks.items()
            }

    @invariant()
    def ready_means_all_parts_of_one_incarnation(self) -> None:
        for version in self.known_versions():
            if self.hand.field(f"version:{version}", "state") in ("ready", "retired"):
                expect = self.hand.table(f"expect:{version}")
                parts = self.hand.table(f"parts:{version}")
                size = int(self.hand.field(f"version:{version}", "world_size") or 0)
                assert set(parts) == set(expect) == {str(r) for r in range(size)}
                assert all(f'"session":"{expect[r]}"' in parts[r] for r in parts)

    @invariant()
    def what_is_kept_is_ready(self) -> None:
        """Pinned, tagged and held versions are never retired."""
        for version in self.ref.protected:
            assert self.hand.field(f"version:{version}", "state") == "ready"

    @invariant()
    def living_versions_have_slots_of_their_own(self) -> None:
        slots = [
            self.hand.field(f"version:{v}", "slot")
            for v in self.known_versions()
            if self.hand.field(f"version:{v}", "state") in ("open", "ready", "retired")
        ]
        assert len(slots) == len(set(slots))

    @invariant()
    def a_whole_group_holds_one_version_that_was_ready(self) -> None:
        for name, band in self.ref.groups.items():
            held = self.hand.table(f"held:{name}")
            assert all(0 <= int(v) < max(1, self.next_version) for v in held.values())
            if band.state == "whole":
                assert len(set(held.values())) == 1
                assert len(held) == band.size


def test_any_sequence_of_calls_is_answered_as_the_reference_answers(valkey: str) -> None:
    """A run that fails is shortened to the fewest calls that go wrong."""
    loop = asyncio.new_event_loop()
    IndexMachine.url, IndexMachine.loop = valkey, loop
    try:
        run_state_machine_as_test(
            IndexMachine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        loop.close()
