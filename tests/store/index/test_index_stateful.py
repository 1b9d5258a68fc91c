"""The index against a plain-Python reference: any calls, in any order, with deaths and lost leases between.

Two checks run side by side. The answers, and what the views show, must be the reference's. And some
promises are checked on the raw keys after every step, whatever the reference says: a ready version has
all parts of one incarnation, no slot is granted that somebody may still read, the ranks of a group are
given the same version in the same round.
"""

from __future__ import annotations

import asyncio
import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from weightdepot.store.index import Version
from weightdepot.store.index.records import Applied

from .machine_members import Members
from .machine_rounds import Rounds
from .machine_versions import Versions

# more for a search by hand: WEIGHTDEPOT_INDEX_EXAMPLES=5000 pytest tests/store/index -k sequence
EXAMPLES = int(os.environ.get("WEIGHTDEPOT_INDEX_EXAMPLES", "100"))


class IndexMachine(Members, Versions, Rounds):
    def teardown(self) -> None:
        try:
            self.look()
        finally:
            super().teardown()

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
        assert model.aborted == self.ref.aborted
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

    @precondition(lambda self: self.exists)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """Who has a version, whether all serve the same, and what is the newest."""
        version = self.version_number(data)
        applied = self.outcome(self.index.applied, "m", version)
        if isinstance(applied, Applied):
            assert not set(applied.applied) & set(applied.pending)
            applied = (applied.state.value, set(applied.applied), set(applied.pending), applied.held)
        assert applied == self.ref.applied(version)
        seen = self.call(self.index.convergence, "m")
        expected = self.ref.convergence()
        assert (seen.current, set(seen.at), set(seen.behind), set(seen.absent)) == expected
        assert seen.converged == (seen.current is not None and bool(seen.at) and not seen.behind)
        for current, newest in ((False, self.ref.latest), (True, self.ref.current)):
            answer = self.outcome(self.index.latest, "m", version, current)
            there = newest is not None and newest >= version
            assert (answer.version if isinstance(answer, Version) else answer) == (
                newest if there else ("wait", "version")
            )

    @invariant()
    def ready_means_all_parts_of_one_attempt(self) -> None:
        for version in self.known_versions():
            if self.hand.field(f"version:{version}", "state") in ("ready", "retired"):
                expect = self.hand.table(f"expect:{version}")
                parts = self.hand.table(f"parts:{version}")
                size = int(self.hand.field(f"version:{version}", "world_size") or 0)
                assert set(parts) == set(expect) == {str(r) for r in range(size)}
                attempt = self.hand.field(f"version:{version}", "attempt")
                assert all(f'"name":"{attempt}"' in parts[r] for r in parts)

    @invariant()
    def what_is_ready_or_read_is_in_memory(self) -> None:
        """In every process that sealed it, and has not left, it lies as it was written."""
        for version in self.known_versions():
            at = self.hand.table(f"version:{version}")
            readable = at["state"] in ("ready", "retired") or self.hand.live_leases(version)
            if not readable or at["slot"] == "-1":
                continue
            for rank, session in self.hand.table(f"expect:{version}").items():
                memory = self.memory.get(self.processes[session])
                if memory is not None:
                    held = memory.get(int(at["slot"]))
                    assert held is not None, (version, rank)
                    assert (held.version, held.attempt) == (version, at["attempt"])

    @invariant()
    def versions_only_rise(self) -> None:
        highest = int(self.hand.field("meta", "highest") or -1)
        ready = [v for v, one in self.ref.versions.items() if one.state == "ready"]
        assert highest >= max(ready, default=-1)
        assert int(self.hand.field("meta", "open") or 1 << 60) > highest
        assert highest >= self.highest
        self.highest = highest

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
        slots = [slot for slot in slots if slot != "-1"]
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
