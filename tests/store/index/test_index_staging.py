"""Staging gives a lease back early; a failure that wrote nothing makes nothing half."""

from __future__ import annotations

import pytest

from weightdepot.store.errors import InvalidRequest, LeaseLost
from weightdepot.store.index import GroupState, Index, VersionState

from .actors import begin, consumers, finish, open_version, producers, publish, update
from .hand import Hand


async def stage(index: Index, rank: int, round: int) -> None:
    await index.stage_round("m", "g", rank, f"c{rank}", round)


async def test_the_lease_goes_back_when_every_rank_has_read_everything(index: Index, hand: Hand) -> None:
    await producers(index, size=1)
    await consumers(index)
    await publish(index, 1, size=1)
    turns = [await begin(index, rank) for rank in (0, 1)]
    await stage(index, 0, turns[0].round)
    assert hand.live_leases(1) == {"g/1"}  # the other one reads
    assert [m.staged for m in (await index.group("m", "g")).members] == [1, None]
    await stage(index, 1, turns[1].round)
    await stage(index, 1, turns[1].round)
    assert hand.live_leases(1) == set()
    for version in (2, 3, 4):  # nobody keeps the trainer waiting
        await publish(index, version, size=1)
    assert (await index.version("m", 1)).state is VersionState.FREED
    assert (await index.group("m", "g")).state is GroupState.MOVING
    for rank in (0, 1):
        await finish(index, rank, 1)
    group = await index.group("m", "g")
    assert (group.state, group.version, [m.staged for m in group.members]) == (
        GroupState.WHOLE,
        1,
        [None, None],
    )


async def test_a_rank_that_staged_may_finish_after_the_lease_one_that_did_not_may_not(
    index: Index, hand: Hand
) -> None:
    await producers(index, size=1)
    await consumers(index)
    await publish(index, 1, size=1)
    for rank in (0, 1):
        await begin(index, rank)
    await stage(index, 0, 1)
    hand.end_lease(1, "g/1")
    with pytest.raises(LeaseLost):
        await stage(index, 1, 1)
    beat = await index.heartbeat("m", "c0", 60, [("g", 1)])
    assert beat.lost == ()
    assert (await index.heartbeat("m", "c1", 60, [("g", 1)])).lost == (1,)
    assert (await finish(index, 0, 1)).state is GroupState.HALF  # through the other one
    with pytest.raises(LeaseLost):
        await finish(index, 1, 1)
    assert [m.version for m in (await index.group("m", "g")).members] == [1, None]


async def test_only_the_round_that_a_rank_is_in_can_be_staged(index: Index) -> None:
    await producers(index, size=1)
    await consumers(index, size=1)
    await publish(index, 1, size=1)
    await begin(index)
    with pytest.raises(InvalidRequest, match="rank 0 is not in round 7"):
        await stage(index, 0, 7)
    assert await update(index, size=1) == 1
    await begin(index)  # nothing to move: allowed, no effect
    await stage(index, 0, 2)


async def test_a_rank_that_begins_again_what_it_had_staged_is_given_a_new_round(
    index: Index, hand: Hand
) -> None:
    """It lost what it had read: the lease is gone, and must not come back on memory that is written again."""
    await producers(index, size=1)
    await consumers(index, size=1)
    await publish(index, 1, size=1)
    await begin(index)
    await stage(index, 0, 1)
    for version in (2, 3, 4):
        await publish(index, version, size=1)
    turn = await begin(index)
    assert (turn.round, turn.version, turn.held) == (2, 4, None)
    assert hand.live_leases(1) == set()


async def test_a_failure_before_the_first_byte_keeps_what_the_group_holds(index: Index) -> None:
    await producers(index, size=1)
    await consumers(index)
    await publish(index, 1, size=1)
    await update(index)
    await publish(index, 2, size=1)
    for rank in (0, 1):
        await begin(index, rank)
    for rank in (0, 1):
        status = await index.finish_round("m", "g", rank, f"c{rank}", 2, "source lost", torn=False)
        assert status.state is GroupState.HALF  # that round was in vain
    group = await index.group("m", "g")
    assert (group.state, group.version, group.error) == (GroupState.WHOLE, 1, "")
    assert await update(index) == 2


async def test_a_group_of_which_one_rank_moved_on_is_half_though_the_other_wrote_nothing(
    index: Index,
) -> None:
    await producers(index, size=1)
    await consumers(index)
    await publish(index, 1, size=1)
    await update(index)
    await publish(index, 2, size=1)
    for rank in (0, 1):
        await begin(index, rank)
    await finish(index, 0, 2)
    await index.finish_round("m", "g", 1, "c1", 2, "source lost", torn=False)
    group = await index.group("m", "g")
    assert (group.state, group.last) == (GroupState.HALF, 1)
    assert "source lost" in group.error
    assert await update(index) == 2


async def test_a_group_that_never_held_anything_is_empty_after_such_a_failure(index: Index) -> None:
    await producers(index, size=1)
    await consumers(index, size=1)
    await publish(index, 1, size=1)
    await begin(index)
    await index.finish_round("m", "g", 0, "c0", 1, "source lost", torn=False)
    assert (await index.group("m", "g")).state is GroupState.EMPTY


async def test_figures_of_an_update_are_shown_with_the_member(index: Index) -> None:
    await producers(index, size=1)
    await consumers(index, size=1)
    await publish(index, 1, size=1)
    await begin(index)
    await index.finish_round("m", "g", 0, "c0", 1, stats={"pull": 0.25, "transports": "shm"})
    (member,) = (await index.group("m", "g")).members
    assert member.stats == {"pull": 0.25, "transports": "shm"}


async def test_an_open_version_aborts_when_a_rank_that_has_not_sealed_dies(index: Index, hand: Hand) -> None:
    await producers(index)
    for rank in (0, 1):
        await open_version(index, 1, rank)
    hand.kill("p1")
    assert any("rank 1 died" in text for text in await index.sweep("m"))
    found = await index.version("m", 1)
    assert found.state is VersionState.ABORTED
    assert "rank 1 died before it sealed its part" in found.reason
