"""Modes, pins, tags, roll back, exact requests: what operators and rollouts may ask of versions."""

from __future__ import annotations

import pytest

from weightdepot.store.errors import InvalidRequest, LeaseLost, StaleGroup, UnknownModel, VersionGone
from weightdepot.store.index import Grant, GroupState, Index, Round, Version, VersionState, Wait
from weightdepot.store.index.records import Mode, Policy
from weightdepot.store.index.scripts_policy import MAX_PROTECTED

from .actors import PROCESS, TTL, begin, consumers, finish, open_version, producers, publish, seal, update
from .hand import Hand


async def ask(
    index: Index, rank: int = 0, *, version: int | None = None, max_lag: int | None = None, tag: str = "",
    minimum: int = 0,
) -> Round | Wait:  # fmt: skip
    return await index.begin_round(
        "m", "g", rank, f"c{rank}", minimum, TTL, version=version, max_lag=max_lag, tag=tag
    )


async def moves_to(index: Index, **wishes: int | str) -> int:
    """A group of one rank takes what it is given."""
    answer = await ask(index, **wishes)  # type: ignore[arg-type]
    assert isinstance(answer, Round), answer
    await finish(index, 0, answer.round)
    return answer.version


async def states(index: Index) -> dict[int, VersionState]:
    return {v.version: v.state for v in (await index.model("m")).versions}


async def test_a_policy_is_set_while_all_runs_and_comes_with_each_grant(index: Index) -> None:
    await producers(index, size=1)
    assert (await index.model("m")).policy == Policy(Mode.ASYNC, 1)
    assert (await index.set_policy("m", Policy(Mode.BOUNDED, 3))).policy == Policy(Mode.BOUNDED, 3)
    assert (await open_version(index, 1)).policy == Policy(Mode.BOUNDED, 3)
    with pytest.raises(InvalidRequest):
        await index.set_policy("m", Policy(Mode.BOUNDED, -1))
    with pytest.raises(UnknownModel):
        await index.set_policy("other", Policy())


async def test_bounded_a_publish_waits_while_a_live_group_lags_too_far(index: Index, hand: Hand) -> None:
    await producers(index, size=1)
    await consumers(index, size=1)
    await index.set_policy("m", Policy(Mode.BOUNDED, 1))
    for version in (1, 2):  # the group came before the first: it lags 0, then 1
        await publish(index, version, size=1)
    incarnation = (await index.model("m")).incarnation
    answer = await index.open_version("m", 3, 0, "p0", "tiling", incarnation, TTL)
    assert isinstance(answer, Wait)
    assert (answer.reason, answer.details["groups"]) == ("lag", {"g": 2})
    assert "group g by 2" in answer.message
    assert await update(index, size=1) == 2
    assert (await index.group("m", "g")).lag == 0
    await publish(index, 3, size=1)
    await publish(index, 4, size=1)
    hand.kill("c0")  # it is not waited for any more
    await publish(index, 5, size=1)


async def test_bounded_the_versions_that_readers_may_still_be_at_are_kept(index: Index) -> None:
    """CASES 29: the window, and one in flight, live, whatever the retention says."""
    await producers(index, size=1)
    await index.set_policy("m", Policy(Mode.BOUNDED, 3))
    for version in range(8):
        await publish(index, version, size=1)
    ready = [v for v, state in (await states(index)).items() if state is VersionState.READY]
    assert ready == [3, 4, 5, 6, 7]


async def test_pinned_and_tagged_versions_stay_and_keep_nobody_waiting(index: Index) -> None:
    await producers(index, size=1)
    await publish(index, 0, size=1)
    assert (await index.pin("m", 0)).pinned
    await publish(index, 1, size=1)
    assert (await index.tag("m", "best", 1)).tags == ("best",)
    for version in range(2, 10):
        await publish(index, version, size=1)
    found = await states(index)
    assert [found[v] for v in (0, 1, 9)] == [VersionState.READY] * 3
    assert sum(s is VersionState.READY for s in found.values()) == 4  # two that are kept, too
    assert (await index.model("m")).tags == {"best": 1}

    await index.unpin("m", 0)
    await index.untag("m", "best")
    for version in range(10, 14):
        await publish(index, version, size=1)
    grant = await open_version(index, 14)
    assert grant.slots == (0, 1)  # the memory of the others goes back
    assert sum(s is VersionState.READY for s in (await states(index)).values()) <= 2


async def test_a_tag_is_moved_in_one_step_and_only_ready_versions_can_be_kept(index: Index) -> None:
    await producers(index, size=1)
    for version in (0, 1):
        await publish(index, version, size=1)
        await index.tag("m", "best", version)
    assert (await index.version("m", 0)).tags == ()
    assert (await index.model("m")).tags == {"best": 1}
    await index.untag("m", "never-set")
    await publish(index, 2, size=1)
    await publish(index, 3, size=1)
    for call in (index.pin("m", 0), index.tag("m", "x", 0), index.hold("m", 0)):
        with pytest.raises(VersionGone, match="version 0 of model m"):
            await call
    with pytest.raises(VersionGone):
        await index.pin("m", 99)


async def test_so_many_versions_may_be_kept_and_no_more(index: Index) -> None:
    await producers(index, size=1)
    for version in range(MAX_PROTECTED):
        await publish(index, version, size=1)
        await index.pin("m", version)
    await publish(index, MAX_PROTECTED, size=1)
    with pytest.raises(InvalidRequest, match="let one go"):
        await index.pin("m", MAX_PROTECTED)
    await index.pin("m", 0)  # again: no error
    await index.unpin("m", 0)
    await index.pin("m", MAX_PROTECTED)


async def test_roll_back_takes_every_group_to_the_older_version_and_release_forward_again(
    index: Index,
) -> None:
    await producers(index, size=1, retention=3)
    await consumers(index, size=1)
    for version in (1, 2, 3):
        await publish(index, version, size=1)
    assert await update(index, size=1) == 3
    model = await index.hold("m", 2)
    assert (model.current, model.held, model.latest) == (2, True, 3)
    assert await moves_to(index) == 2
    assert await moves_to(index) == 2  # nothing to move
    for version in (4, 5, 6):
        await publish(index, version, size=1)
    assert (await states(index))[2] is VersionState.READY
    answer = await ask(index, minimum=5)
    assert isinstance(answer, Wait)
    assert answer.details["held"] == 2
    newest, current = await index.latest("m"), await index.latest("m", current=True)
    assert isinstance(newest, Version)
    assert isinstance(current, Version)
    assert (newest.version, current.version) == (6, 2)
    assert await moves_to(index, version=6) == 6  # exact requests win
    assert await moves_to(index) == 2
    assert not (await index.release("m")).held
    assert await moves_to(index) == 6


async def test_a_held_version_whose_memory_is_gone_is_held_no_more(index: Index) -> None:
    await producers(index, size=1)
    await publish(index, 1, size=1)
    await index.hold("m", 1)
    await index.leave("m", "p0")
    model = await index.model("m")
    assert (model.held, model.current) == (False, None)


async def test_an_exact_version_is_given_waited_for_or_gone(index: Index) -> None:
    await producers(index, size=1)
    await consumers(index, size=1)
    for version in (1, 2):
        await publish(index, version, size=1)
    assert await moves_to(index, version=1) == 1
    assert await moves_to(index, version=2) == 2
    assert await moves_to(index, version=1) == 1  # back, too
    answer = await ask(index, version=9)
    assert isinstance(answer, Wait)
    assert answer.details["wanted"] == 9
    for version in (3, 4):
        await publish(index, version, size=1)
    assert await moves_to(index, version=1) == 1  # it holds it, though it is freed
    assert await moves_to(index) == 4
    with pytest.raises(VersionGone, match="version 1 of model m is freed"):
        await ask(index, version=1)
    await index.tag("m", "best", 3)
    assert await moves_to(index, tag="best") == 3
    assert isinstance(await ask(index, tag="none"), Wait)


async def test_a_rank_that_asks_for_another_version_than_its_group_moves_to_is_told(index: Index) -> None:
    await producers(index, size=1)
    await consumers(index)
    for version in (1, 2):
        await publish(index, version, size=1)
    assert isinstance(await ask(index, 0, version=1), Round)
    with pytest.raises(StaleGroup) as told:
        await ask(index, 1, version=2)
    assert told.value.details["wanted"] == 2
    with pytest.raises(StaleGroup):
        await ask(index, 1, minimum=2)


async def test_newest_within_k_keeps_what_is_fresh_enough(index: Index) -> None:
    await producers(index, size=1, retention=4)
    await consumers(index, size=1)
    await publish(index, 10, size=1)
    assert await moves_to(index) == 10
    await publish(index, 20, size=1)
    await publish(index, 30, size=1)
    assert (await index.group("m", "g")).lag == 2  # versions, not steps
    assert await moves_to(index, max_lag=2) == 10
    assert await moves_to(index, max_lag=1) == 30


async def test_who_has_applied_a_version_and_whether_all_serve_the_same(index: Index, hand: Hand) -> None:
    await producers(index, size=1)
    await consumers(index, size=1)
    await consumers(index, size=1, group="late", prefix="l")
    await index.join_consumer("m", "export", 0, 1, "e0", "", PROCESS, TTL, observer=True)
    await publish(index, 1, size=1)
    applied = await index.applied("m", 1)
    assert (applied.applied, applied.pending) == ((), ("g", "late"))
    await update(index, size=1)
    applied = await index.applied("m", 1)
    assert (applied.applied, applied.pending) == (("g",), ("late",))
    found = await index.convergence("m")
    assert (found.converged, found.at, found.behind) == (False, ("g",), ("late",))
    hand.kill("l0")
    assert (await index.applied("m", 1)).pending == ()
    found = await index.convergence("m")
    assert (found.converged, found.at, found.absent) == (True, ("g",), ("late",))
    await publish(index, 2, size=1)
    assert (await index.applied("m", 2)).pending == ("g",)
    assert (await index.applied("m", 1)).applied == ("g",)
    assert await update(index, size=1) == 2
    assert (await index.applied("m", 1)).applied == ("g",)  # a newer one does
    with pytest.raises(VersionGone):
        await index.applied("m", 77)


async def test_the_latest_version_waits_with_what_there_is(index: Index) -> None:
    with pytest.raises(UnknownModel):
        await index.latest("m")
    await producers(index, size=1)
    assert isinstance(await index.latest("m"), Wait)
    await publish(index, 4, size=1)
    found = await index.latest("m", 4)
    assert isinstance(found, Version)
    assert found.version == 4
    answer = await index.latest("m", 5)
    assert isinstance(answer, Wait)
    assert "the newest is 4" in answer.message


async def test_a_live_version_takes_no_slot_and_can_be_taken_back_from_its_readers(
    index: Index, hand: Hand
) -> None:
    await producers(index, size=1)
    await consumers(index, size=1)
    incarnation = (await index.model("m")).incarnation
    grant = await index.open_version("m", 1, 0, "p0", "tiling", incarnation, TTL, live=True)
    assert isinstance(grant, Grant)
    assert grant.slot == -1
    assert (await seal(index, 1)).live
    turn = await begin(index, 0)
    assert (await index.withdraw("m", 1, "p0", "the trainer goes on")).state is VersionState.FREED
    assert hand.live_leases(1) == set()
    with pytest.raises(LeaseLost):
        await finish(index, 0, turn.round)
    assert (await index.group("m", "g")).state is not GroupState.WHOLE
    assert (await index.withdraw("m", 1, "p0", "again")).state is VersionState.FREED
