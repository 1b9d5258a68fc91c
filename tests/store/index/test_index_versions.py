"""Versions: open, sealed, ready, retired, freed, aborted; slots and who keeps them."""

from __future__ import annotations

import asyncio

import pytest

from weightdepot.store.errors import (
    InvalidRequest,
    MemberConflict,
    PublishAborted,
    UnknownModel,
    VersionGone,
    VersionNotNewer,
)
from weightdepot.store.index import Grant, Index, VersionState, Wait
from weightdepot.store.index.check import MAX_VERSION

from .actors import (
    PROCESS,
    TTL,
    begin,
    consumers,
    finish,
    open_version,
    part,
    producers,
    publish,
    seal,
    update,
)
from .hand import Hand


async def waits(index: Index, version: int, rank: int = 0, session: str = "") -> Wait:
    incarnation = (await index.model("m")).incarnation
    answer = await index.open_version("m", version, rank, session or f"p{rank}", "t", incarnation, TTL)
    assert isinstance(answer, Wait), answer
    return answer


async def test_case_01_a_version_is_ready_when_every_rank_sealed_and_not_before(index: Index) -> None:
    await producers(index)
    for rank in (0, 1):
        await open_version(index, 1, rank)
    half = await seal(index, 1, 0)
    assert (half.state, half.sealed, half.missing, half.ready) == (VersionState.OPEN, (0,), (1,), None)
    assert (await index.model("m")).latest is None
    whole = await seal(index, 1, 1)
    assert (whole.state, whole.sealed, whole.missing, whole.nbytes) == (VersionState.READY, (0, 1), (), 201)
    assert whole.ready is not None
    assert whole.opened <= whole.ready
    assert (await index.model("m")).latest == 1


async def test_every_rank_gets_the_same_grant_and_may_ask_again(index: Index) -> None:
    await producers(index)
    grants = [await open_version(index, 1, rank) for rank in (0, 1, 0)]
    attempt = grants[0].attempt if isinstance(grants[0], Grant) else ""
    assert attempt
    assert grants == [Grant(1, 0, "tiling", 1, attempt=attempt, slots=(0, 1))] * 3


async def test_nothing_opens_before_all_ranks_are_there_and_alive(index: Index, hand: Hand) -> None:
    await index.join_producer("m", 1, 3, "p1", "l", PROCESS, 2, TTL)
    wait = await waits(index, 0, 1)
    assert (wait.reason, wait.details["missing"]) == ("ranks", [0, 2])
    assert "ranks 0, 2 to join" in wait.message
    await producers(index, size=3)
    hand.kill("p2")
    wait = await waits(index, 0, 1)
    assert (wait.reason, wait.details["dead"]) == ("ranks", [2])
    await index.heartbeat("m", "p2", TTL)
    await open_version(index, 0, 1)


async def test_one_version_is_open_at_a_time_and_the_wait_names_who_is_late(index: Index) -> None:
    await producers(index)
    await open_version(index, 1, 0)
    await seal(index, 1, 0)
    wait = await waits(index, 2, 0)
    assert (wait.reason, wait.details) == ("open-version", {"version": 1, "pending": [1]})
    with pytest.raises(VersionNotNewer, match="already published by rank 0"):
        await open_version(index, 1, 0)


async def test_an_open_version_aborts_at_its_deadline_and_may_be_opened_again(index: Index) -> None:
    await producers(index)
    await open_version(index, 1, 0, seal_timeout=0.05)
    await seal(index, 1, 0)
    await asyncio.sleep(0.12)
    with pytest.raises(PublishAborted, match="rank 1 did not seal in time"):
        await seal(index, 1, 1)
    await open_version(index, 1, 0)
    assert (await index.version("m", 1)).sealed == ()
    await open_version(index, 1, 1)
    for rank in (0, 1):
        version = await seal(index, 1, rank)
    assert version.state is VersionState.READY


async def test_sweep_aborts_what_nobody_asks_for(index: Index, hand: Hand) -> None:
    await producers(index)
    await open_version(index, 1)
    assert await index.sweep("m") == []
    hand.overdue(1)
    assert await index.sweep("m") == ["version 1 aborted: ranks 0, 1 did not seal in time"]
    assert (await index.version("m", 1)).state is VersionState.ABORTED


async def test_an_opener_that_comes_after_the_deadline_aborts_first(index: Index, hand: Hand) -> None:
    await producers(index)
    await open_version(index, 1, 0)
    hand.overdue(1)
    assert (await open_version(index, 2, 0)).version == 2
    assert (await index.version("m", 1)).state is VersionState.ABORTED


async def test_a_rank_that_slept_through_an_abort_must_open_again_before_it_seals(
    index: Index, hand: Hand
) -> None:
    """It may have filled another slot: the second attempt must not take that for its own."""
    await producers(index)
    await open_version(index, 1, 0)
    await open_version(index, 1, 1)
    await index.abort("m", 1, "p0", "cannot pack")
    await open_version(index, 1, 0)
    with pytest.raises(PublishAborted, match="rank 1 must open it again"):
        await seal(index, 1, 1)
    assert (await index.abort("m", 1, "p1", "late")).state is VersionState.OPEN
    await open_version(index, 1, 1)
    await seal(index, 1, 1)


async def test_case_10_versions_only_rise_and_the_refusal_says_where_to_resume(index: Index) -> None:
    assert (await producers(index))[0].highest is None
    await publish(index, 137)
    await publish(index, 200)
    joined = await index.join_producer("m", 0, 2, "q0", "layout0", PROCESS, 2, TTL, replace="p0")
    assert (joined.latest, joined.highest) == (200, 200)
    for version in (137, 200):
        with pytest.raises(VersionNotNewer, match="not above 200") as caught:
            await open_version(index, version, 0, "q0")
        assert caught.value.details["highest"] == 200


async def test_versions_stay_above_the_highest_even_when_that_one_was_lost(index: Index, hand: Hand) -> None:
    await producers(index)
    await publish(index, 1)
    await publish(index, 2)
    hand.kill("p0")
    assert (await index.report_lost("m", 2, 0, "connection refused")).state is VersionState.FREED
    model = await index.model("m")
    assert model.latest == 1
    await index.heartbeat("m", "p0", TTL)
    with pytest.raises(VersionNotNewer, match=r"not above 2.*newest ready one is 1"):
        await open_version(index, 2)


async def test_a_source_that_still_holds_its_rank_is_not_lost(index: Index) -> None:
    await producers(index)
    await publish(index, 1)
    assert (await index.report_lost("m", 1, 0, "slow")).state is VersionState.READY
    await index.join_producer("m", 0, 2, "q0", "layout0", PROCESS, 2, TTL, replace="p0")
    assert (await index.report_lost("m", 1, 1, "slow")).state is VersionState.READY
    lost = await index.report_lost("m", 1, 0, "no such segment")
    assert (lost.state, lost.reason) == (VersionState.FREED, "rank 0 is gone: no such segment")
    with pytest.raises(InvalidRequest, match="no rank 7"):
        await index.report_lost("m", 1, 7, "?")


async def test_sealing_twice_is_fine_with_the_same_bytes_only(index: Index) -> None:
    await producers(index)
    for rank in (0, 1):
        await open_version(index, 1, rank)
    await seal(index, 1, 0)
    assert (await seal(index, 1, 0)).nbytes == 100
    with pytest.raises(VersionNotNewer, match="other bytes"):
        await index.seal("m", 1, 0, "p0", part(0, "p0", "d1"), b"")
    await seal(index, 1, 1)
    assert (await seal(index, 1, 1)).state is VersionState.READY
    assert (await index.digests("m", 1, [0, 1])) == {0: b"\x00" * 16, 1: b"\x01" * 16}


async def test_only_the_expected_session_seals_and_aborts(index: Index) -> None:
    await producers(index)
    await open_version(index, 1, 0)
    with pytest.raises(MemberConflict, match="from session p0, not from x"):
        await index.seal("m", 1, 0, "x", part(0, "x"), b"")
    with pytest.raises(MemberConflict, match="no part in version 1"):
        await index.abort("m", 1, "x", "mischief")
    with pytest.raises(InvalidRequest, match="sealed by rank 0"):
        await index.seal("m", 1, 0, "p0", part(1, "p0"), b"")
    with pytest.raises(VersionGone, match="never opened"):
        await index.seal("m", 2, 0, "p0", part(0, "p0"), b"")
    with pytest.raises(UnknownModel):
        await index.seal("other", 1, 0, "p0", part(0, "p0"), b"")


async def test_an_abort_says_who_and_why_and_leaves_ready_versions_alone(index: Index) -> None:
    await producers(index)
    await publish(index, 1)
    assert (await index.abort("m", 1, "p0", "too late")).state is VersionState.READY
    await open_version(index, 2, 1)
    aborted = await index.abort("m", 2, "p1", "out of memory \udcff ünï")
    assert (aborted.state, aborted.reason) == (VersionState.ABORTED, "rank 1: out of memory ? ünï")
    assert (await index.abort("m", 2, "p0", "me too")).reason.startswith("rank 1")


async def test_case_29_fifty_versions_use_the_slots_and_keys_of_five(index: Index, hand: Hand) -> None:
    await producers(index)
    slots, counts = set(), {}
    for version in range(50):
        slots.add((await open_version(index, version)).slot)
        await publish(index, version)
        counts[version] = len(hand.keys())
    assert slots == {0, 1}
    assert counts[49] == counts[25]
    model = await index.model("m")
    assert [v.version for v in model.versions if v.state is VersionState.READY] == [48, 49]
    assert len(model.versions) <= 20
    with pytest.raises(VersionGone, match=r"version 3 .*forgotten; the newest ready one is 49"):
        await index.version("m", 3)


async def test_a_leased_version_keeps_its_slot_and_the_wait_names_the_holder(
    index: Index, hand: Hand
) -> None:
    await producers(index)
    await consumers(index, size=1)
    await publish(index, 1)
    round = await begin(index)
    await publish(index, 2)
    wait = await waits(index, 3)
    assert (wait.reason, wait.details) == ("slot", {"versions": [1], "holders": ["g/1"], "retention": 2})
    retired = await index.version("m", 1)
    assert (retired.state, retired.leases) == (VersionState.RETIRED, ("g/1",))
    await finish(index, 0, round.round)
    assert (await open_version(index, 3)).slot == retired.slot
    assert (await index.version("m", 1)).state is VersionState.FREED


async def test_a_retired_version_gives_no_new_leases(index: Index) -> None:
    await producers(index)
    await consumers(index, size=1)
    await publish(index, 1)
    await begin(index)
    await publish(index, 2)
    await waits(index, 3)
    await consumers(index, size=1, group="h", prefix="h")
    other = await index.begin_round("m", "h", 0, "h0", 0, TTL)
    assert getattr(other, "version", None) == 2


async def test_memory_that_is_read_is_not_granted_though_another_producer_left(index: Index) -> None:
    """Rank 0 leaves, which frees the version at once; rank 1's part of it is still being read."""
    await producers(index)
    await consumers(index, size=1)
    await publish(index, 1)
    read = await index.version("m", 1)
    round = await begin(index)
    await index.leave("m", "p0")
    assert (await index.version("m", 1)).state is VersionState.FREED
    await index.join_producer("m", 0, 2, "p0", "layout0", PROCESS, 2, TTL)
    assert (await open_version(index, 2)).slot != read.slot
    assert (await open_version(index, 2, 1)).keep_sessions == ("p1",)
    assert (await index.digests("m", 1, [1])) == {1: b"\x01" * 16}
    assert (await finish(index, 0, round.round)).version == 1


async def test_a_grant_names_the_dead_sessions_whose_memory_still_counts(index: Index) -> None:
    await producers(index, retention=3)
    await publish(index, 1)
    await index.join_producer("m", 0, 2, "q0", "layout0", PROCESS, 3, TTL, replace="p0")
    assert (await open_version(index, 2, 0, "q0")).keep_sessions == ("p0",)
    assert (await open_version(index, 2, 1)).keep_sessions == ("p1",)


async def test_digests_that_are_not_there_are_an_error_that_says_why(index: Index) -> None:
    await producers(index)
    await open_version(index, 1, 0)
    await seal(index, 1, 0)
    with pytest.raises(VersionGone, match="is open; there are no digests of rank 1"):
        await index.digests("m", 1, [0, 1])
    await index.abort("m", 1, "p0", "enough")
    await index.sweep("m")
    with pytest.raises(VersionGone, match="aborted: rank 0: enough"):
        await index.digests("m", 1, [0])
    with pytest.raises(VersionGone, match="not known"):
        await index.digests("m", 9, [0])
    assert await index.digests("m", 9, []) == {}


async def test_the_largest_version_number_is_exact_everywhere(index: Index) -> None:
    await producers(index)
    await consumers(index, size=1)
    await publish(index, MAX_VERSION - 1)
    await publish(index, MAX_VERSION)
    assert (await index.model("m")).latest == MAX_VERSION
    assert await update(index, size=1) == MAX_VERSION
    assert (await index.group("m", "g")).version == MAX_VERSION
    with pytest.raises(VersionNotNewer, match=f"not above {MAX_VERSION}"):
        await open_version(index, MAX_VERSION)
    for version in (-1, MAX_VERSION + 1):
        with pytest.raises(InvalidRequest, match="between 0 and"):
            await index.version("m", version)
