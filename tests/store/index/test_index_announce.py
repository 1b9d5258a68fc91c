"""An index that lost its data is told what is still in memory; nothing comes back but what was whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightdepot.store.errors import MemberConflict, PublishAborted, VersionNotNewer
from weightdepot.store.index import GroupState, Index, VersionState
from weightdepot.store.index.records import Held

from .actors import PROCESS, TTL, begin, consumers, open_version, part, producers, publish, update
from .hand import Hand


async def lose(index: Index, hand: Hand, version: int = 5) -> list[Held]:
    """Two ranks publish a version, and the index forgets everything; what each of them still has."""
    await producers(index)
    await publish(index, version)
    found = await index.version("m", version)
    held = [
        Held(version, found.attempt, found.slot, "tiling", part(rank, f"p{rank}"), bytes([rank]) * 16)
        for rank in (0, 1)
    ]
    hand.redis.flushall()
    return held


async def announce(index: Index, rank: int, held: list[Held], highest: int | None = None) -> tuple[int, ...]:
    return await index.announce("m", rank, 2, f"p{rank}", 2, held, highest)


async def test_a_version_is_back_when_every_rank_has_announced_its_part(index: Index, hand: Hand) -> None:
    held = await lose(index, hand)
    await producers(index)
    await consumers(index, size=1)
    assert await announce(index, 0, [held[0]], highest=7) == ()
    assert await announce(index, 1, [held[1]]) == (5,)
    assert await announce(index, 0, [held[0]]) == (5,)  # again: nothing changes
    model = await index.model("m")
    assert (model.latest, model.highest) == (5, 7)
    turn = await begin(index)
    assert (turn.version, [p.session for p in turn.parts]) == (5, ["p0", "p1"])
    assert await index.digests("m", 5, [0, 1]) == {0: b"\0" * 16, 1: b"\1" * 16}
    with pytest.raises(VersionNotNewer):
        await open_version(index, 7)
    await open_version(index, 8)


@pytest.mark.parametrize("other", [{"attempt": "another"}, {"slot": 1}, {"tiling": "another"}])
async def test_parts_of_different_attempts_are_never_put_together(
    index: Index, hand: Hand, other: dict[str, object]
) -> None:
    held = await lose(index, hand)
    await producers(index)
    await announce(index, 0, [held[0]])
    assert await announce(index, 1, [replace(held[1], **other)]) == ()  # type: ignore[arg-type]
    assert (await index.model("m")).latest is None
    assert await announce(index, 1, [held[1]]) == (5,)


async def test_a_part_of_a_session_that_was_replaced_meanwhile_does_not_count(
    index: Index, hand: Hand
) -> None:
    held = await lose(index, hand)
    await producers(index)
    await announce(index, 0, [held[0]])
    await index.join_producer("m", 0, 2, "q0", "layout0", PROCESS, 2, TTL, replace="p0")
    assert await announce(index, 1, [held[1]]) == ()
    with pytest.raises(MemberConflict):
        await announce(index, 0, [held[0]])


async def test_a_slot_that_a_newer_version_has_is_not_given_back(index: Index, hand: Hand) -> None:
    held = await lose(index, hand)
    await producers(index)
    await publish(index, 9)  # into slot 0, where version 5 was
    for rank in (0, 1):
        assert await announce(index, rank, [held[rank]]) == ()
    assert (await index.model("m")).latest == 9


async def test_an_open_version_below_what_was_ready_before_is_aborted(index: Index, hand: Hand) -> None:
    """It was opened before anybody had told how far the versions had come."""
    held = await lose(index, hand)
    await producers(index)
    await open_version(index, 4, 0, "p0")
    await announce(index, 0, [held[0]], highest=5)
    aborted = await index.version("m", 4)
    assert (aborted.state, (await index.model("m")).highest) == (VersionState.ABORTED, 5)
    assert "versions only rise" in aborted.reason
    with pytest.raises(PublishAborted):
        await index.seal("m", 4, 0, "p0", part(0, "p0"), b"\0" * 16)
    assert await announce(index, 1, [held[1]], highest=5) == (5,)


async def test_what_the_index_knows_to_be_freed_or_aborted_stays_so(index: Index, hand: Hand) -> None:
    await producers(index)
    await publish(index, 5)
    found = await index.version("m", 5)
    held = [
        Held(5, found.attempt, found.slot, "tiling", part(rank, f"p{rank}"), bytes([rank]) * 16)
        for rank in (0, 1)
    ]
    await index.withdraw("m", 5, "p0", "taken back")
    for rank in (0, 1):
        assert await announce(index, rank, [held[rank]]) == ()
    assert (await index.version("m", 5)).state is VersionState.FREED


async def test_groups_go_on_from_what_came_back(index: Index, hand: Hand) -> None:
    held = await lose(index, hand)
    await producers(index)
    for rank in (0, 1):
        await announce(index, rank, [held[rank]])
    await consumers(index)
    assert await update(index) == 5
    await publish(index, 6)
    assert await update(index) == 6
    assert (await index.group("m", "g")).state is GroupState.WHOLE


async def test_an_importer_gives_way_and_its_version_stays_until_it_leaves(index: Index) -> None:
    await index.join_producer("m", 0, 1, "i0", "layout", PROCESS, 2, TTL, yields=True)
    await publish_as(index, 3, "i0")
    await producers(index)  # two ranks, though one lives
    assert (await index.version("m", 3)).state is VersionState.READY
    assert not (await index.heartbeat("m", "i0", TTL)).member
    with pytest.raises(MemberConflict):  # it does not come back by itself
        await index.join_producer("m", 0, 1, "i0", "layout", PROCESS, 2, TTL, yields=True)
    await publish(index, 4)
    await index.leave("m", "i0")
    assert (await index.version("m", 3)).state is VersionState.FREED
    assert (await index.version("m", 4)).state is VersionState.READY


async def publish_as(index: Index, version: int, session: str) -> None:
    await open_version(index, version, 0, session)
    await index.seal("m", version, 0, session, part(0, session), b"\0" * 16)
