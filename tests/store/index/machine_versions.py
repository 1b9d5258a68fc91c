"""Rules of the state machine: versions are opened, sealed, given up, kept, taken back."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from weightdepot.store.index import Grant
from weightdepot.store.index.records import Mode, Policy

from .machine import TTL, Machine, often, ranks
from .reference_state import Outcome


class Versions(Machine):
    def open_it(
        self, version: int, rank: int, session: str, incarnation: int, in_place: bool = False
    ) -> Outcome:
        expected = self.ref.open_version(version, rank, session, "T", incarnation, in_place)
        live = {v: self.hand.live_leases(v) for v in self.known_versions()}
        taken = {self.hand.field(f"version:{v}", "slot") for v in live if live[v]} - {"-1"}
        was_open = self.hand.field("meta", "open")
        answer = self.outcome(
            self.index.open_version, "m", version, rank, session, "T", incarnation, TTL, in_place
        )
        if isinstance(answer, Grant):
            assert str(answer.slot) not in taken or was_open == str(version), "granted while it is read"
            self.next_version = max(self.next_version, version + 1)
            self.granted(session, answer)
            one = self.ref.versions[version]
            one.attempt = one.attempt or self.new_attempt(answer)
            assert answer.attempt == one.attempt
            answer = (
                answer.version, answer.slot, answer.tiling, answer.incarnation,
                frozenset(answer.keep_sessions), frozenset(answer.slots),
            )  # fmt: skip
        assert answer == expected
        return expected

    def new_attempt(self, grant: Grant) -> str:
        """No attempt is taken for another, also where the index has lost its memory between them."""
        assert grant.attempt not in self.attempts
        self.attempts.add(grant.attempt)
        return grant.attempt

    def seal_it(self, version: int, rank: int, session: str, digest: str) -> None:
        held = self.part_of(version, rank, session, digest)
        expected = self.ref.seal(version, rank, session, digest)
        answer = self.outcome(self.index.seal, "m", version, rank, session, held.part, held.digests)
        self.same_version(answer, expected)
        if expected[0] != "error":
            self.written(session, held)

    @precondition(lambda self: self.exists)
    @rule(data=st.data(), rank=ranks, stale=often, wrong=often, in_place=often)
    def open_version(self, data: st.DataObject, rank: int, stale: bool, wrong: bool, in_place: bool) -> None:
        incarnation = self.ref.incarnation - (1 if wrong else 0)
        self.open_it(self.version_number(data), rank, self.producer(rank, stale), incarnation, in_place)

    @precondition(lambda self: self.ref.versions)
    @rule(data=st.data(), rank=ranks, stale=often, other=often)
    def seal(self, data: st.DataObject, rank: int, stale: bool, other: bool) -> None:
        version = data.draw(st.sampled_from([*reversed(self.known_versions()), self.next_version + 5]))
        if self.ref.open is not None and data.draw(st.sampled_from([True, True, False])):
            version = self.ref.open
        self.seal_it(version, rank, self.producer(rank, stale), "other" if other else "digest")

    @precondition(lambda self: self.ref.producers)
    @rule(times=st.sampled_from([1, 1, 2, 3]), in_place=often)
    def publish(self, times: int, in_place: bool = False) -> None:
        """Every rank opens and seals the next version."""
        for _ in range(times):
            version = self.next_version
            for rank, session in sorted(self.ref.producers.items()):
                if self.open_it(version, rank, session, self.ref.incarnation, in_place)[0] == version:
                    self.seal_it(version, rank, session, "digest")

    @precondition(lambda self: self.ref.producers)
    @rule()
    def open_everywhere(self) -> None:
        """Every rank opens the next version, or joins the open one."""
        version = self.next_version if self.ref.open is None else self.ref.open
        for rank, session in sorted(self.ref.producers.items()):
            self.open_it(version, rank, session, self.ref.incarnation)

    @precondition(lambda self: self.ref.open is not None)
    @rule(data=st.data())
    def write_unheard(self, data: st.DataObject) -> None:
        """A part is complete, and its seal does not reach the index."""
        version = self.ref.open
        assert version is not None
        granted = self.ref.versions[version].granted - set(self.ref.versions[version].sealed)
        for rank in data.draw(st.sets(st.sampled_from(sorted(granted)))) if granted else ():
            session = self.ref.versions[version].expect[rank]
            self.written(session, self.part_of(version, rank, session, "digest"))

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
