"""Waiters: woken by events, bounded by their time, and not a load on the index when many wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from weightdepot.api.waiting import Waiters
from weightdepot.store.errors import IndexUnavailable, VersionGone
from weightdepot.store.index.records import Event, Wait

NOT_YET = Wait("version", "not yet")


class Looks:
    """Answers `Wait` until told otherwise, and counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0
        self.answer: str | Wait = NOT_YET

    async def __call__(self) -> str | Wait:
        self.count += 1
        await asyncio.sleep(0)
        return self.answer


async def test_an_answer_that_is_there_is_given_at_once() -> None:
    looks = Looks()
    looks.answer = "there"
    assert await Waiters(recheck=1).until("m", looks, wait=10) == "there"
    assert looks.count == 1


async def test_without_a_wait_one_looks_once() -> None:
    looks = Looks()
    assert await Waiters(recheck=1).until("m", looks, wait=0) is NOT_YET
    assert looks.count == 1


async def test_an_event_of_the_model_wakes_and_one_of_another_does_not() -> None:
    waiters, looks = Waiters(recheck=30), Looks()
    task = asyncio.create_task(waiters.until("m", looks, wait=30))
    await asyncio.sleep(0.02)
    waiters.ring("other")
    await asyncio.sleep(0.02)
    assert looks.count == 1
    looks.answer = "there"
    waiters.ring("m")
    assert await asyncio.wait_for(task, 0.5) == "there"
    assert waiters.waiting == 0


async def test_events_that_cannot_change_the_answer_do_not_wake() -> None:
    waiters, looks = Waiters(recheck=30), Looks()
    task = asyncio.create_task(waiters.until("m", looks, wait=30, deaf=frozenset({"sealed"})))
    await asyncio.sleep(0.02)
    waiters.ring("m", "sealed")
    await asyncio.sleep(0.02)
    assert looks.count == 1
    looks.answer = "there"
    waiters.ring("m", "ready")
    assert await asyncio.wait_for(task, 0.5) == "there"


async def test_what_changes_during_the_first_look_is_not_missed() -> None:
    waiters = Waiters(recheck=30)
    answers: list[str | Wait] = [NOT_YET, "there"]

    async def look() -> str | Wait:
        answer = answers.pop(0)
        waiters.ring("m")  # the change comes after the look read its answer
        return answer

    assert await asyncio.wait_for(waiters.until("m", look, wait=30), 0.5) == "there"


async def test_a_lost_event_costs_at_most_one_recheck() -> None:
    waiters, looks = Waiters(recheck=0.05), Looks()
    task = asyncio.create_task(waiters.until("m", looks, wait=30))
    await asyncio.sleep(0.01)
    looks.answer = "there"
    assert await asyncio.wait_for(task, 0.5) == "there"


async def test_the_time_is_kept_and_a_last_look_is_taken() -> None:
    waiters, looks = Waiters(recheck=30), Looks()
    begun = time.monotonic()
    task = asyncio.create_task(waiters.until("m", looks, wait=0.1))
    await asyncio.sleep(0.05)
    looks.answer = "there"  # nobody rings
    assert await task == "there"
    assert 0.08 < time.monotonic() - begun < 0.5


async def test_closing_ends_all_waits_with_what_they_have() -> None:
    waiters = Waiters(recheck=30)
    tasks = [asyncio.create_task(waiters.until("m", Looks(), wait=30)) for _ in range(3)]
    await asyncio.sleep(0.02)
    waiters.close()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 0.5) == [NOT_YET] * 3
    assert await waiters.until("m", Looks(), wait=30) is NOT_YET, "and none is begun any more"


async def test_an_error_of_a_look_is_raised_and_leaves_nobody_waiting() -> None:
    waiters = Waiters(recheck=30)

    async def look() -> str | Wait:
        raise VersionGone("gone")

    with pytest.raises(VersionGone):
        await waiters.until("m", look, wait=30)
    assert waiters.waiting == 0


async def test_many_waiters_and_many_events_do_not_multiply() -> None:
    """200 waiters, 200 events within 0.2 s: far fewer than 40,000 looks."""
    waiters, looks = Waiters(recheck=30), Looks()
    tasks = [asyncio.create_task(waiters.until("m", looks, wait=1.5)) for _ in range(200)]
    for _ in range(200):
        waiters.ring("m")
        await asyncio.sleep(0.001)
    looks.answer = "there"
    waiters.ring("m")
    assert await asyncio.wait_for(asyncio.gather(*tasks), 2) == ["there"] * 200
    assert looks.count < 3000


class Source:
    """Events from a script: an exception breaks the connection."""

    def __init__(self, *script: list[Event | Exception]) -> None:
        self._script = list(script)
        self.subscribed = 0

    async def events(self) -> AsyncIterator[Event]:
        self.subscribed += 1
        for item in self._script.pop(0) if self._script else []:
            if isinstance(item, Exception):
                raise item
            yield item
        if not self._script:
            await asyncio.sleep(30)


async def test_a_broken_subscription_is_begun_again_and_everybody_looks() -> None:
    subscribed = Event("", "subscribed", None)
    source = Source([subscribed, IndexUnavailable("cut")], [subscribed])
    waiters, looks = Waiters(recheck=30), Looks()
    heard: list[Event] = []
    waiting = asyncio.create_task(waiters.until("m", looks, wait=5))
    await asyncio.sleep(0.01)
    listening = asyncio.create_task(waiters.listen(source, heard.append))
    await asyncio.sleep(0.05)
    looks.answer = "there"  # while the connection is broken: no event tells
    assert await asyncio.wait_for(waiting, 1) == "there"
    assert source.subscribed == 2
    assert heard == [subscribed, subscribed]
    listening.cancel()
