"""Members: who holds a rank, how it changes hands, and what that does to versions."""

from __future__ import annotations

import asyncio
import time

import pytest

from weightdepot.store.errors import InvalidRequest, MemberConflict, PublishAborted, UnknownModel
from weightdepot.store.index import Index, Process, VersionState, Wait

from .actors import PROCESS, TTL, begin, consumers, open_version, producers, publish, seal, update
from .hand import Hand


async def test_a_model_is_unknown_until_somebody_joins(index: Index) -> None:
    with pytest.raises(UnknownModel, match="nobody has registered model m"):
        await index.model("m")
    assert await index.models() == []
    await consumers(index, size=1)
    model = await index.model("m")
    assert (model.incarnation, model.world_size, model.producers, model.latest) == (0, 0, (), None)
    assert await index.models() == ["m"]


async def test_a_live_holder_keeps_its_rank_and_the_refusal_says_who_it_is(index: Index) -> None:
    await producers(index)
    with pytest.raises(MemberConflict, match="held by session p0") as caught:
        await index.join_producer("m", 0, 2, "new", "l", PROCESS, 2, TTL)
    details = caught.value.details
    assert details["session"] == "p0"
    assert details["process"] == {"host": "boot/host", "pid": 17, "started": 4242}
    assert TTL - 60 < details["expires_in"] <= TTL


async def test_replacing_needs_the_holders_own_name(index: Index) -> None:
    await producers(index)
    with pytest.raises(MemberConflict):
        await index.join_producer("m", 0, 2, "new", "l", PROCESS, 2, TTL, replace="p1")
    joined = await index.join_producer("m", 0, 2, "new", "l", PROCESS, 2, TTL, replace="p0")
    assert joined.incarnation == 2
    assert not (await index.heartbeat("m", "p0", TTL)).member
    with pytest.raises(MemberConflict, match="replaced by session new"):
        await index.open_version("m", 0, 0, "p0", "t", 2, TTL)


async def test_joining_again_as_the_same_session_changes_nothing(index: Index) -> None:
    first = (await producers(index))[-1]
    await open_version(index, 5)
    again = await index.join_producer("m", 1, 2, "p1", "layout1", PROCESS, 2, TTL)
    assert again == first
    assert (await index.version("m", 5)).state is VersionState.OPEN


async def test_another_layout_of_the_same_session_is_another_incarnation(index: Index) -> None:
    """Case 25: experts moved at run time. A tiling made for the old layouts must not be used."""
    await producers(index)
    await open_version(index, 5)
    joined = await index.join_producer("m", 1, 2, "p1", "moved", PROCESS, 2, TTL)
    assert joined.incarnation == 2
    assert (await index.version("m", 5)).reason == "rank 1 changed its layout"
    answer = await index.open_version("m", 5, 0, "p0", "tiling", 1, TTL)
    assert isinstance(answer, Wait)
    assert answer.reason == "ranks"
    assert "membership changed" in answer.message


async def test_case_07_replacing_a_dead_rank_aborts_what_is_open_and_keeps_what_is_ready(
    index: Index, hand: Hand
) -> None:
    await producers(index)
    await publish(index, 1)
    await open_version(index, 2, 0)
    await open_version(index, 2, 1)
    await seal(index, 2, 0)
    hand.kill("p1")
    joined = await index.join_producer("m", 1, 2, "q1", "layout1", PROCESS, 2, TTL)
    assert (joined.incarnation, joined.latest, joined.highest) == (2, 1, 1)
    with pytest.raises(PublishAborted, match="rank 1 was replaced"):
        await seal(index, 2, 1)
    assert (await index.version("m", 1)).state is VersionState.READY
    await open_version(index, 2, 0)
    await open_version(index, 2, 1, "q1")
    await seal(index, 2, 0)
    assert (await seal(index, 2, 1, "q1")).state is VersionState.READY


@pytest.mark.parametrize(("size", "retention"), [(3, 2), (2, 3)])
async def test_world_size_and_retention_must_agree_with_the_live_ranks(
    index: Index, hand: Hand, size: int, retention: int
) -> None:
    await producers(index)
    with pytest.raises(MemberConflict, match=f"{size} with retention {retention}.*rank 1 joined as of 2"):
        await index.join_producer("m", 0, size, "new", "l", PROCESS, retention, TTL, replace="p0")
    hand.kill("p1")
    joined = await index.join_producer("m", 0, size, "new", "l", PROCESS, retention, TTL, replace="p0")
    assert (joined.incarnation, joined.world_size) == (2 if size == 3 else 3, size)
    assert (await index.model("m")).retention == retention


async def test_a_new_world_size_starts_the_table_anew_and_the_old_ranks_are_out(
    index: Index, hand: Hand
) -> None:
    await producers(index, size=3)
    await publish(index, 4, size=3)
    for session in ("p0", "p1", "p2"):
        hand.kill(session)
    joined = await index.join_producer("m", 0, 2, "q0", "l", PROCESS, 2, TTL)
    assert (joined.world_size, joined.incarnation, joined.latest) == (2, 2, 4)
    assert [p.session for p in (await index.model("m")).producers] == ["q0"]
    assert not (await index.heartbeat("m", "p2", TTL)).member


async def test_a_group_of_another_size_needs_its_members_dead(index: Index, hand: Hand) -> None:
    await consumers(index)
    with pytest.raises(MemberConflict, match="as one of 1, but rank 1 joined it as of 2"):
        await index.join_consumer("m", "g", 0, 1, "new", "", PROCESS, TTL, replace="c0")
    hand.kill("c1")
    hand.kill("c0")
    assert (await index.join_consumer("m", "g", 0, 1, "new", "", PROCESS, TTL)).world_size == 1
    group = await index.group("m", "g")
    assert (group.world_size, [m.session for m in group.members], group.missing) == (1, ["new"], ())


async def test_a_session_serves_one_rank(index: Index) -> None:
    await producers(index)
    with pytest.raises(MemberConflict, match="session of its own"):
        await index.join_producer("m", 1, 2, "p0", "l", PROCESS, 2, TTL)
    with pytest.raises(MemberConflict, match="session of its own"):
        await index.join_consumer("m", "g", 0, 1, "p0", "", PROCESS, TTL)


async def test_membership_runs_out_by_the_servers_clock_and_a_heartbeat_brings_it_back(index: Index) -> None:
    await index.join_producer("m", 0, 1, "p0", "l", PROCESS, 2, 0.05)
    await asyncio.sleep(0.12)
    (member,) = (await index.model("m")).producers
    assert not member.alive
    assert member.expires_in < 0
    assert (await index.heartbeat("m", "p0", TTL)).member
    assert (await index.model("m")).producers[0].alive


async def test_a_heartbeat_never_shortens_a_membership(index: Index) -> None:
    await producers(index, size=1)
    await index.heartbeat("m", "p0", 0.01)
    await asyncio.sleep(0.05)
    assert (await index.model("m")).producers[0].alive


async def test_heartbeats_to_an_index_that_lost_everything_say_so(index: Index) -> None:
    answer = await index.heartbeat("m", "p0", TTL, [("g", 3)], TTL)
    assert (answer.member, answer.lost) == (False, (3,))


async def test_a_producer_that_leaves_takes_its_versions_along(index: Index) -> None:
    await producers(index)
    await publish(index, 1)
    await open_version(index, 2)
    await index.leave("m", "p0")
    await index.leave("m", "p0")
    freed, aborted = (await index.model("m")).versions
    assert (freed.state, freed.reason) == (VersionState.FREED, "producer rank 0 left")
    assert (aborted.state, aborted.reason) == (VersionState.ABORTED, "producer rank 0 left")
    model = await index.model("m")
    assert (model.latest, model.incarnation) == (None, 2)


async def test_versions_of_a_rank_that_left_stay_if_others_sealed_them(index: Index, hand: Hand) -> None:
    """Rank 0 was replaced after version 1; when the successor leaves, version 1 is not its to take."""
    await producers(index)
    await publish(index, 1)
    await index.join_producer("m", 0, 2, "q0", "layout0", PROCESS, 2, TTL, replace="p0")
    await index.leave("m", "q0")
    assert (await index.version("m", 1)).state is VersionState.READY


async def test_the_last_consumer_that_leaves_takes_the_group_along_but_not_its_count(index: Index) -> None:
    await producers(index)
    await publish(index, 1)
    await consumers(index, size=1)
    await update(index, size=1)
    await index.leave("m", "c0")
    assert await index.groups("m") == []
    with pytest.raises(UnknownModel, match="no consumer group g"):
        await index.group("m", "g")
    await consumers(index, size=1)
    assert (await begin(index)).round == 2


async def test_set_layout_is_for_the_holder(index: Index) -> None:
    await consumers(index)
    await index.set_layout("m", "g", 1, "c1", "digest")
    assert [m.layout for m in (await index.group("m", "g")).members] == ["", "digest"]
    with pytest.raises(MemberConflict):
        await index.set_layout("m", "g", 0, "c1", "digest")


async def test_members_show_where_they_run(index: Index) -> None:
    process = Process("boot-1/ünï", 4194304, 99_999_999_999)
    before = time.time()
    await index.join_consumer("m", "g", 0, 1, "c0", "", process, TTL)
    (member,) = (await index.group("m", "g")).members
    assert member.process == process
    assert before - 1 < member.joined < time.time() + 1


async def test_sweep_forgets_members_that_were_dead_for_an_hour(index: Index, hand: Hand) -> None:
    await producers(index)
    await consumers(index)
    await publish(index, 1)
    hand.kill("p1", 3500.0)
    hand.kill("c0", 3700.0)
    hand.kill("c1", 3700.0)
    report = await index.sweep("m")
    assert sorted(report) == [
        "group g: rank 0 was gone for too long and was forgotten",
        "group g: rank 1 was gone for too long and was forgotten",
    ]
    assert await index.groups("m") == []
    assert len((await index.model("m")).producers) == 2
    hand.kill("p1", 3700.0)
    await index.sweep("m")
    model = await index.model("m")
    assert [p.session for p in model.producers] == ["p0"]
    assert model.latest == 1, "its memory may still be readable"


@pytest.mark.parametrize(
    ("rank", "size", "retention", "ttl"),
    [
        (2, 2, 2, 1.0),
        (-1, 2, 2, 1.0),
        (0, 0, 2, 1.0),
        (0, 1, 1, 1.0),
        (0, 1, 2, 0.0),
        (0, 1, 2, float("nan")),
    ],
)
async def test_impossible_members_are_refused(
    index: Index, rank: int, size: int, retention: int, ttl: float
) -> None:
    with pytest.raises(InvalidRequest):
        await index.join_producer("m", rank, size, "s", "l", PROCESS, retention, ttl)


@pytest.mark.parametrize("name", ["", "a/b", "a}b", "{a}", "a:b", "a b", "x" * 129, "-", "ä", "a\n"])
async def test_names_cannot_reach_other_keys(index: Index, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await index.join_consumer(name, "g", 0, 1, "s", "", PROCESS, TTL)
    with pytest.raises(InvalidRequest):
        await index.join_consumer("m", name, 0, 1, "s", "", PROCESS, TTL)
    with pytest.raises(InvalidRequest):
        Index("redis://127.0.0.1:1", run=name)
    assert await index.models() in ([], ["m"])
