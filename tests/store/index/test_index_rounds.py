"""Rounds: the ranks of a group move together, under one lease, or are seen not to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from weightdepot.store.errors import InvalidRequest, LeaseLost, MemberConflict, StaleGroup, UnknownModel
from weightdepot.store.index import GroupState, Index, VersionState, Wait

from .actors import PROCESS, TTL, begin, consumers, finish, open_version, producers, publish, update
from .hand import Hand


async def waits(index: Index, rank: int = 0, minimum: int = 0) -> Wait:
    answer = await index.begin_round("m", "g", rank, f"c{rank}", minimum, TTL)
    assert isinstance(answer, Wait), answer
    return answer


async def test_all_ranks_get_the_version_that_the_first_was_given(index: Index) -> None:
    """Invariant 4, though a newer version becomes ready in between."""
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    first = await begin(index, 0)
    await publish(index, 2)
    second = await begin(index, 1)
    assert (first.version, second.version, first.round, second.round) == (1, 1, 1, 1)
    assert [p.rank for p in first.parts] == [0, 1]
    assert first.parts[1].endpoints == {"shm": {"name": "seg-p1", "bytes": 1 << 60}}
    assert first == second == await begin(index, 0)


async def test_a_round_ends_when_every_rank_applied_it_and_gives_the_lease_back(
    index: Index, hand: Hand
) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    for rank in (0, 1):
        await begin(index, rank)
    status = await finish(index, 0, 1)
    assert (status.state, status.pending, status.version) == (GroupState.MOVING, (1,), 1)
    assert hand.live_leases(1) == {"g/1"}
    group = await index.group("m", "g")
    assert (group.state, group.target, group.version, group.pending) == (GroupState.MOVING, 1, None, (1,))
    assert (await waits(index, 0)).details["pending"] == [1]
    assert (await finish(index, 1, 1)).state is GroupState.WHOLE
    assert hand.live_leases(1) == set()
    group = await index.group("m", "g")
    assert (group.state, group.version, [m.version for m in group.members]) == (GroupState.WHOLE, 1, [1, 1])


async def test_how_a_round_ended_is_known_after_the_next_began(index: Index) -> None:
    """A rank that waits for the others may ask late."""
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await update(index)
    await publish(index, 2)
    await begin(index, 1)
    assert (await index.round_status("m", "g", 1)).state is GroupState.WHOLE
    assert (await index.round_status("m", "g", 2)).state is GroupState.MOVING
    with pytest.raises(InvalidRequest, match="in round 2"):
        await index.round_status("m", "g", 3)


async def test_with_nothing_newer_a_round_moves_nothing_and_needs_no_lease(index: Index, hand: Hand) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await update(index)
    idle = await begin(index, 0)
    assert (idle.version, idle.held, idle.parts) == (1, 1, ())
    assert hand.live_leases(1) == set()
    await publish(index, 2)
    assert (await begin(index, 1)).version == 1, "the round was decided before version 2"
    assert (await index.heartbeat("m", "c0", TTL, [("g", idle.round)], TTL)).lost == ()
    for rank in (0, 1):
        status = await finish(index, rank, idle.round)
    assert status.state is GroupState.WHOLE
    assert await update(index) == 2


async def test_a_group_keeps_what_it_holds_though_that_was_freed(index: Index) -> None:
    await producers(index, size=1)
    await consumers(index)
    await publish(index, 1, size=1)
    await update(index)
    await index.leave("m", "p0")
    round = await begin(index, 0)
    assert (round.version, round.held, round.parts) == (1, 1, ())


async def test_a_rank_that_does_not_hold_the_freed_version_is_given_the_newest_ready_one(
    index: Index, hand: Hand
) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await publish(index, 2)
    await update(index)
    hand.kill("p0")
    await index.report_lost("m", 2, 0, "gone")
    await index.join_consumer("m", "g", 1, 2, "c1b", "", PROCESS, TTL, replace="c1")
    round = await begin(index, 0)
    assert (round.version, round.held, len(round.parts)) == (1, 2, 2)


async def test_waiting_for_a_version_names_the_newest_and_why_a_later_one_is_missing(index: Index) -> None:
    await producers(index)
    await consumers(index)
    assert "the newest is none" in (await waits(index)).message
    await publish(index, 1)
    await open_version(index, 2)
    await index.abort("m", 2, "p0", "disk on fire")
    wait = await waits(index, 0, minimum=2)
    assert wait.reason == "version"
    assert wait.message == (
        "no version 2 or newer of model m is ready; the newest is 1;"
        " version 2 was aborted: rank 0: disk on fire"
    )


async def test_waiting_for_the_group_names_who_is_missing_or_dead(index: Index, hand: Hand) -> None:
    await producers(index)
    await publish(index, 1)
    await index.join_consumer("m", "g", 0, 3, "c0", "", PROCESS, TTL)
    await index.join_consumer("m", "g", 1, 3, "c1", "", PROCESS, TTL)
    hand.kill("c1")
    wait = await waits(index)
    assert (wait.reason, wait.details["missing"], wait.details["dead"]) == ("group", [2], [1])


async def test_asking_for_more_than_the_round_under_way_gives_is_refused(index: Index) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await begin(index, 0)
    with pytest.raises(StaleGroup, match="asks for version 2 or newer, but round 1"):
        await begin(index, 1, minimum=2)


async def test_case_05_a_failed_round_marks_the_group_until_a_whole_version_is_in(index: Index) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await update(index)
    await publish(index, 2)
    for rank in (0, 1):
        await begin(index, rank)
    await finish(index, 0, 2)
    status = await finish(index, 1, 2, error="digest of tensor w differs")
    assert (status.state, status.error) == (GroupState.HALF, "rank 1: digest of tensor w differs")
    group = await index.group("m", "g")
    assert (group.state, group.version, group.error) == (GroupState.HALF, None, status.error)
    assert [m.version for m in group.members] == [2, None]
    rounds = [await begin(index, rank) for rank in (0, 1)]
    assert [(r.version, r.held) for r in rounds] == [(2, 2), (2, None)]
    assert (await index.group("m", "g")).error == status.error, "still not to be served"
    for rank in (0, 1):
        await finish(index, rank, 3)
    group = await index.group("m", "g")
    assert (group.state, group.version, group.error) == (GroupState.WHOLE, 2, "")


async def test_case_04_a_reader_that_outlived_its_lease_is_told_and_holds_nothing(index: Index) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    for rank in (0, 1):
        await begin(index, rank, ttl=0.05)
    await asyncio.sleep(0.12)
    assert (await index.heartbeat("m", "c0", TTL, [("g", 1)], TTL)).lost == (1,), "never brought back"
    for _ in range(2):
        with pytest.raises(LeaseLost, match="must be discarded"):
            await finish(index, 0, 1)
    status = await index.round_status("m", "g", 1)
    assert (status.state, status.version) == (GroupState.HALF, 1)
    assert "ran out" in status.error
    assert [m.version for m in (await index.group("m", "g")).members] == [None, None]


async def test_case_04_a_pull_that_takes_long_renews_its_lease(index: Index) -> None:
    await producers(index)
    await consumers(index, size=1)
    await publish(index, 1)
    await begin(index, 0, ttl=0.5)
    for _ in range(4):
        await asyncio.sleep(0.2)
        assert (await index.heartbeat("m", "c0", TTL, [("g", 1)], 0.5)).lost == ()
    assert (await finish(index, 0, 1)).state is GroupState.WHOLE


async def test_a_rank_that_is_through_keeps_the_lease_for_those_that_are_not(
    index: Index, hand: Hand
) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await begin(index, 0, ttl=1.0)
    await finish(index, 0, 1)
    await index.heartbeat("m", "c0", TTL, [("g", 1)], TTL)
    await asyncio.sleep(1.05)
    await begin(index, 1)
    assert (await finish(index, 1, 1)).state is GroupState.WHOLE


async def test_case_08_a_dead_rank_fails_the_round_and_the_others_may_finish(
    index: Index, hand: Hand
) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    for rank in (0, 1):
        await begin(index, rank)
    hand.kill("c1")
    (line,) = await index.sweep("m")
    assert line.startswith(
        "round 1 of group g failed: rank 1 died in round 1 (to version 1): it gave no sign of life"
    )
    assert hand.live_leases(1) == {"g/1"}, "rank 0 is still reading"
    assert (await finish(index, 0, 1)).state is GroupState.HALF
    assert [m.version for m in (await index.group("m", "g")).members] == [1, None]
    assert (await waits(index)).details["dead"] == [1]
    hand.end_lease(1, "g/1")
    assert await index.sweep("m") == [], "rank 0 is through: nothing is left to be marked"


@pytest.mark.parametrize("ask", ["round_status", "group", "groups", "finish", "begin", "sweep"])
async def test_whoever_asks_first_notices_the_dead_rank(index: Index, hand: Hand, ask: str) -> None:
    await producers(index)
    await consumers(index, size=3)
    await publish(index, 1)
    for rank in range(3):
        await begin(index, rank)
    hand.kill("c1")
    asked: dict[str, Callable[[], Awaitable[object]]] = {
        "round_status": lambda: index.round_status("m", "g", 1),
        "group": lambda: index.group("m", "g"),
        "groups": lambda: index.groups("m"),
        "finish": lambda: finish(index, 0, 1),
        "begin": lambda: waits(index, 0),
        "sweep": lambda: index.sweep("m"),
    }
    await asked[ask]()
    assert (hand.field("group:g", "error") or "").startswith("rank 1 died in round 1")


async def test_a_group_with_a_rank_half_way_does_not_count_as_holding_its_old_version(
    index: Index, hand: Hand
) -> None:
    """Rank 0 was writing version 2 when that was lost: 'nothing newer' would leave it torn."""
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await update(index)
    await publish(index, 2)
    await begin(index, 0)
    hand.kill("c1")
    assert (await index.group("m", "g")).state is GroupState.HALF
    hand.kill("p0")
    await index.report_lost("m", 2, 0, "gone")
    other = await begin(index, 1)
    assert (other.version, len(other.parts)) == (1, 2)
    torn = await begin(index, 0)
    assert (torn.round, torn.version, torn.held, len(torn.parts)) == (other.round, 1, None, 2)


async def test_a_rank_that_was_only_asleep_makes_the_group_whole_after_all(index: Index, hand: Hand) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    for rank in (0, 1):
        await begin(index, rank)
    hand.kill("c1")
    assert (await finish(index, 0, 1)).state is GroupState.HALF
    assert (await finish(index, 1, 1)).state is GroupState.WHOLE
    assert (await index.group("m", "g")).version == 1


async def test_while_a_rank_may_have_written_half_the_group_is_not_whole(index: Index, hand: Hand) -> None:
    """Both ranks hold version 1 in the books; rank 0 is in the middle of writing version 2."""
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await update(index)
    await publish(index, 2)
    await begin(index, 0)
    hand.kill("c1")
    group = await index.group("m", "g")
    assert (group.state, group.version) == (GroupState.HALF, None)
    await index.heartbeat("m", "c1", TTL)
    again = await begin(index, 0)
    assert (again.round, again.held) == (3, None), "it gave up half-way"


async def test_a_replaced_rank_fails_the_round_and_holds_nothing(index: Index) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await update(index)
    await publish(index, 2)
    for rank in (0, 1):
        await begin(index, rank)
    await index.join_consumer("m", "g", 1, 2, "new", "", PROCESS, TTL, replace="c1")
    status = await index.round_status("m", "g", 2)
    assert (status.state, status.error) == (GroupState.HALF, "rank 1 was replaced")
    with pytest.raises(MemberConflict, match="replaced by session new"):
        await finish(index, 1, 2)
    assert (await finish(index, 0, 2)).state is GroupState.HALF
    assert [m.version for m in (await index.group("m", "g")).members] == [2, None]


async def test_a_rank_replaced_between_rounds_leaves_the_group_half(index: Index) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    await update(index)
    await index.join_consumer("m", "g", 1, 2, "c1", "", PROCESS, TTL)
    assert (await index.group("m", "g")).state is GroupState.WHOLE, "the same session is no news"
    await index.leave("m", "c1")
    group = await index.group("m", "g")
    assert (group.state, group.error, group.missing) == (GroupState.HALF, "rank 1 left", (1,))


async def test_a_late_report_of_an_old_round_counts_for_the_rank_that_made_it(index: Index) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    for rank in (0, 1):
        await begin(index, rank)
    await finish(index, 1, 1, error="broken")
    await publish(index, 2)
    assert (await begin(index, 1)).round == 2
    assert (await finish(index, 0, 1)).state is GroupState.HALF
    late = await begin(index, 0)
    assert (late.round, late.version, late.held) == (2, 2, 1)
    with pytest.raises(InvalidRequest, match="the last one that it began is 2"):
        await finish(index, 0, 1)


async def test_the_lease_of_a_failed_round_lives_until_the_last_reader_reported(
    index: Index, hand: Hand
) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    for rank in (0, 1):
        await begin(index, rank)
    await finish(index, 1, 1, error="broken")
    assert hand.live_leases(1) == {"g/1"}
    await finish(index, 0, 1, error="broken too")
    assert hand.live_leases(1) == set()
    assert (await index.group("m", "g")).error == "rank 1: broken", "the first cause"


async def test_the_same_report_twice_is_answered_alike(index: Index) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    for rank in (0, 1):
        await begin(index, rank)
    assert await finish(index, 0, 1) == await finish(index, 0, 1)
    assert await finish(index, 1, 1) == await finish(index, 1, 1)


async def test_two_groups_do_not_wait_for_each_other(index: Index) -> None:
    await producers(index)
    await consumers(index, size=1)
    await consumers(index, size=1, group="h", prefix="h")
    await publish(index, 1)
    await begin(index)
    await publish(index, 2)
    other = await index.begin_round("m", "h", 0, "h0", 2, TTL)
    assert getattr(other, "version", None) == 2
    assert [g.group for g in await index.groups("m")] == ["g", "h"]
    assert (await index.version("m", 1)).leases == ("g/1",)
    assert (await index.version("m", 2)).leases == ("h/1",)


async def test_a_version_retired_under_a_reader_is_freed_when_it_is_through(index: Index) -> None:
    await producers(index)
    await consumers(index, size=1)
    await publish(index, 1)
    await begin(index)
    await publish(index, 2)
    answer = await index.open_version("m", 3, 0, "p0", "t", 1, TTL)
    assert isinstance(answer, Wait)
    await finish(index, 0, 1, error="gave up")
    assert (await index.version("m", 1)).state is VersionState.FREED


async def test_rounds_need_a_group_and_a_rank_in_it(index: Index) -> None:
    with pytest.raises(UnknownModel, match="nobody has registered"):
        await begin(index)
    await consumers(index)
    with pytest.raises(MemberConflict, match="join again"):
        await index.begin_round("m", "g", 5, "c5", 0, TTL)
    with pytest.raises(UnknownModel, match="no consumer group x"):
        await begin(index, group="x")
    with pytest.raises(InvalidRequest, match="not in round 1"):
        await finish(index, 0, 1)
