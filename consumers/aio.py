"""A Consumer for asyncio rollout servers: the same one, in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from weightdepot.consumers.consumer import Consumer
from weightdepot.consumers.generation import Generation
from weightdepot.consumers.updating import Updated
from weightdepot.store.aio import InThread, taking_what
from weightdepot.store.errors import WaitTimeout
from weightdepot.store.layout import Layout

T = TypeVar("T")

POLL = 2.0  # seconds of one look at how fresh the group is, which all that wait share


class AsyncConsumer:
    """`async with AsyncConsumer(...) as consumer`, with what `Consumer` takes; then its methods, awaited.

    They do what they do there, and raise what they raise there. Hooks, `install` and a loader run in the
    consumer's thread. Updates are carried out one after the other, while the event loop goes on; an `update`
    whose caller is cancelled ends as it would have, and the next one waits for it. `gate`, `newest`,
    `generation` and the properties do not wait for an update.
    """

    @taking_what(Consumer)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._in_thread = InThread("weightdepot-consumer", partial(Consumer, *arguments, **options))
        self._looking = ThreadPoolExecutor(2, thread_name_prefix="weightdepot-look")
        self._looks: dict[int, asyncio.Future[int]] = {}

    @property
    def consumer(self) -> Consumer:
        """The one behind it. Raises InvalidRequest where it is not open."""
        return self._in_thread.object

    @property
    def version(self) -> int | None:
        return self.consumer.version

    @property
    def last(self) -> Updated | None:
        return self.consumer.last

    @property
    def staged(self) -> int | None:
        return self.consumer.staged

    @property
    def layout(self) -> Layout | None:
        return self.consumer.layout

    async def prepare(self, timeout: float | None = None) -> Layout:
        return await self._in_thread.run(lambda c: c.prepare(timeout))

    async def update(
        self,
        min_version: int | None = None,
        timeout: float | None = None,
        *,
        version: int | str | None = None,
        max_lag: int | None = None,
    ) -> int:
        return await self._in_thread.run(
            lambda c: c.update(min_version, timeout, version=version, max_lag=max_lag)
        )

    async def prefetch(
        self, min_version: int | None = None, timeout: float | None = None, *, version: int | None = None
    ) -> int:
        """Returns the version when it is staged; make it a task to go on meanwhile. Where the caller is
        cancelled, the prefetch goes on."""
        future = self.consumer.prefetch(min_version, timeout, version=version)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def apply(self, timeout: float | None = None) -> int:
        return await self._in_thread.run(lambda c: c.apply(timeout))

    async def newest(self) -> int | None:
        return await self._look(self.consumer.newest)

    def generation(self) -> Generation:
        """`async with consumer.generation() as g`."""
        return self.consumer.generation()

    async def gate(self, max_lag: int, timeout: float | None = None) -> int:
        """Any number of requests may wait here: those that allow the same lag share one question."""
        consumer = self.consumer
        limit = consumer.timeouts.update if timeout is None else timeout
        deadline = time.monotonic() + limit
        while (left := deadline - time.monotonic()) > 0:
            look = self._looks.get(max_lag)
            if look is None or look.done():
                look = self._looks[max_lag] = self._look(partial(consumer.gate, max_lag, POLL))
                look.add_done_callback(_seen)
            if not (await asyncio.wait({look}, timeout=left))[0]:
                break
            try:
                return look.result()
            except WaitTimeout:
                continue
        return await self._look(partial(consumer.gate, max_lag, 0.0))  # what it raises says how far it is

    def _look(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._looking.submit(call))

    async def open(self) -> None:
        """What `async with` begins with."""
        try:
            await self._in_thread.open()
        except BaseException:
            self._looking.shutdown(wait=False)
            raise

    async def close(self) -> None:
        """Leave the group, once the calls before are through. The weights stay as they are."""
        self._looking.shutdown(wait=False, cancel_futures=True)
        await self._in_thread.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _seen(look: asyncio.Future[int]) -> None:
    """An error that nobody waits for any more is not worth a warning."""
    if not look.cancelled():
        look.exception()
