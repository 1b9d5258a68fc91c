"""The asynchronous producer: the same one, in a thread of its own; weights are safe when a call has ended."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from weightdepot import Producer
from weightdepot.api.client import ControllerClient
from weightdepot.producers import publishing
from weightdepot.producers.aio import AsyncProducer
from weightdepot.store.errors import InvalidRequest, VersionNotNewer
from weightdepot.store.index.records import VersionState
from weightdepot.store.moving import pack

from .fleet import full, holds, ranks
from .harness import QUICK


def producer_of(
    controller: str, model: str, weights: dict[str, torch.Tensor], **options: Any
) -> AsyncProducer:
    return AsyncProducer(controller, model=model, weights=weights, timeouts=QUICK, **options)


async def test_versions_are_published_while_the_event_loop_runs(controller: str, model: str) -> None:
    held = {"w": full(1)}
    with ranks(controller, model, 1) as (reader,):
        async with producer_of(controller, model, held) as producer:
            waiting = asyncio.create_task(producer.publish(1, wait="applied"))
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert not waiting.done()
            assert await asyncio.to_thread(reader.update) == 1
            assert (await waiting).applied == ("rollout",)
            held["w"].fill_(2)
            done = await producer.publish(2)
            await producer.flush()
            assert done.sealed.result(0).version == 2
            assert (producer.latest, producer.highest) == (2, 2)
            assert await asyncio.to_thread(reader.update) == 2
            assert holds(reader) == 2
    with pytest.raises(InvalidRequest, match="not open"):
        await producer.publish(3)


async def test_a_publish_that_is_cancelled_while_it_waits_ends_soon_and_leaves_nothing(
    controller: str, model: str
) -> None:
    """Rank 1 never comes."""
    async with producer_of(controller, model, {"w": full(1)}, world_size=2) as producer:
        waiting = asyncio.create_task(producer.publish(1, timeout=50))
        await asyncio.sleep(0.3)
        waiting.cancel()
        done, _ = await asyncio.wait([waiting], timeout=10)
        assert done
        assert waiting.cancelled()
        with ControllerClient(controller) as client:
            assert client.versions(model) == ()
        producer_1 = await asyncio.to_thread(
            Producer, controller, model=model, weights={"w": full(1)}, rank=1, world_size=2, timeouts=QUICK
        )
        with producer_1:
            second = asyncio.create_task(asyncio.to_thread(producer_1.publish, 1))
            assert (await producer.publish(1, wait="ready")).version == 1
            await second


async def test_a_publish_that_is_cancelled_while_it_copies_returns_the_weights_when_it_has_copied(
    controller: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, copied = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        copying.set()
        assert go_on.wait(20)
        pack(*arguments)
        copied.set()

    go_on = threading.Event()
    monkeypatch.setattr(publishing, "pack", slow)
    async with producer_of(controller, model, {"w": full(1)}) as producer:
        publish = asyncio.create_task(producer.publish(1))
        assert await asyncio.to_thread(copying.wait, 20)
        publish.cancel()
        await asyncio.sleep(0.1)
        assert not publish.done()
        publish.cancel()  # however often
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await publish
        assert copied.is_set()
        with ControllerClient(controller) as client:
            assert client.version(model, 1).state is VersionState.ABORTED
        assert (await producer.publish(1, wait="ready")).version == 1


async def test_what_fails_is_raised_where_it_is_awaited(controller: str, model: str) -> None:
    async with producer_of(controller, model, {"w": full(1)}) as producer:
        await producer.publish(5, wait="ready")
        with pytest.raises(VersionNotNewer, match="not above"):
            await producer.publish(4)
