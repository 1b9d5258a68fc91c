"""The asynchronous consumer: the same one, in a thread of its own, for rollout servers on asyncio."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from weightdepot import AsyncConsumer, Producer
from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import InvalidRequest, MemberConflict, StaleGroup, WaitTimeout

from .fleet import full, publish
from .harness import QUICK


def consumer_of(controller: str, model: str, **options: Any) -> AsyncConsumer:
    return AsyncConsumer(
        controller, model=model, **{"weights": {"w": full(-1)}, "timeouts": QUICK, **options}
    )


async def test_an_update_goes_on_in_its_thread_while_the_event_loop_runs(
    controller: str, model: str, producer: Producer
) -> None:
    mine = {"w": full(-1)}
    async with consumer_of(controller, model, weights=mine) as consumer:
        update = asyncio.create_task(consumer.update())
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not update.done()
        await asyncio.to_thread(publish, producer, 1)
        assert await update == 1 == consumer.version
        assert torch.equal(mine["w"], full(1))
        async with consumer.generation() as g:
            await asyncio.to_thread(publish, producer, 2)
            assert await consumer.update(version=2) == 2
        assert g.versions == (1, 2)
        assert await consumer.newest() == 2


async def test_prefetch_is_awaited_and_survives_a_cancelled_caller(
    controller: str, model: str, producer: Producer
) -> None:
    async with consumer_of(controller, model) as consumer:
        impatient = asyncio.create_task(consumer.prefetch())
        await asyncio.sleep(0.1)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        await asyncio.to_thread(publish, producer, 1)
        assert await consumer.prefetch() == 1 == consumer.staged
        assert await consumer.apply() == 1
        assert consumer.last is not None
        assert consumer.last.prefetched


async def test_an_update_whose_caller_is_cancelled_ends_whole_and_the_next_one_waits_for_it(
    controller: str, model: str, producer: Producer
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slow(version: int) -> None:
        writing.set()
        if version == 1:
            go_on.wait(20)

    async with consumer_of(controller, model, before_write=slow) as consumer:
        await asyncio.to_thread(publish, producer, 1)
        first = asyncio.create_task(consumer.update())
        await asyncio.to_thread(writing.wait, 20)
        never = asyncio.create_task(consumer.update(version=99))  # has not begun: it never will
        await asyncio.sleep(0.05)
        for task in (first, never):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.to_thread(publish, producer, 2)
        second = asyncio.create_task(consumer.update())
        await asyncio.sleep(0.05)
        assert not second.done()
        go_on.set()
        assert await second == 2 == consumer.version


async def test_many_requests_wait_at_the_gate_for_one_question(
    controller: str, model: str, producer: Producer
) -> None:
    async with consumer_of(controller, model) as consumer:
        await asyncio.to_thread(publish, producer, 1, 2)
        with pytest.raises(WaitTimeout, match="it holds no version"):
            await consumer.gate(0, timeout=0.2)
        before = threading.active_count()
        requests = [asyncio.create_task(consumer.gate(lag)) for lag in (0, 1) for _ in range(100)]
        await asyncio.sleep(0.2)
        assert threading.active_count() - before <= 3
        requests[7].cancel()
        assert await consumer.update() == 2
        done = await asyncio.gather(*requests, return_exceptions=True)
        assert isinstance(done.pop(7), asyncio.CancelledError)
        assert set(done) == {2}


async def test_errors_come_through_and_what_is_not_open_says_so(controller: str, model: str) -> None:
    closed = consumer_of(controller, model)
    with pytest.raises(InvalidRequest, match="not open"):
        await closed.update()
    async with consumer_of(controller, model) as consumer:
        with pytest.raises(MemberConflict):
            await consumer_of(controller, model).open()
        with pytest.raises(WaitTimeout):
            await consumer.update(timeout=0.1)
        with pytest.raises(StaleGroup):
            async with consumer.generation():
                pass
    with pytest.raises(InvalidRequest, match="not open"):
        await consumer.update()


async def test_an_opening_that_is_cancelled_leaves_no_rank_behind(controller: str, model: str) -> None:
    opening = asyncio.create_task(consumer_of(controller, model).open())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    # the rank is free again (or was never taken)
    async with consumer_of(controller, model, group="other"):
        pass
    with ControllerClient(controller) as client:
        for _ in range(200):
            if not any(g.group == "rollout" for g in client.groups(model)):
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("the rank is still held")
