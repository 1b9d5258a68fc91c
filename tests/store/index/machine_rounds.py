"""Rules of the state machine: the ranks of a group move, together, fail, stage, finish late."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from weightdepot.store.index import Round

from .machine import GROUPS, TTL, Machine, often


class Rounds(Machine):
    def expected(self) -> list[tuple[str, int]]:
        """Ranks that have not begun a round that is under way."""
        bands = [(g, b) for g, b in sorted(self.ref.groups.items()) if b.moving]
        return [(g, k) for g, b in bands for k, r in sorted(b.ranks.items()) if r.begun < self.ref.rounds[g]]

    def begin_it(
        self,
        group: str,
        rank: int,
        session: str,
        minimum: int,
        exact: int | None = None,
        max_lag: int | None = None,
        tag: str = "",
    ) -> int | None:
        wish = (exact, max_lag, tag)
        expected = self.ref.begin_round(group, rank, session, minimum, *wish)
        answer = self.outcome(self.index.begin_round, "m", group, rank, session, minimum, TTL, *wish)
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
        wish = data.draw(st.sampled_from(["newest", "newest", "newest", "exact", "fresh", "best"]))
        exact = self.version_number(data) if wish == "exact" else None
        max_lag = data.draw(st.integers(0, 3)) if wish == "fresh" else None
        tag = wish if wish == "best" else ""
        self.begin_it(group, rank, self.consumer(group, rank, stale), minimum, exact, max_lag, tag)

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
