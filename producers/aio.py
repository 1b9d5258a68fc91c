"""A Producer for programs that run on asyncio: the same one, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from weightdepot.producers.producer import Producer
from weightdepot.producers.publishing import Published
from weightdepot.producers.waiting import Wait
from weightdepot.store.aio import InThread, taking_what
from weightdepot.store.layout import Layout

T = TypeVar("T")


class AsyncProducer:
    """`async with AsyncProducer(...) as producer`, with what `Producer` takes; then its methods, awaited.

    They do what they do there, and raise what they raise there, one after the other, while the event loop
    goes on. The weights are read in the producer's thread: they are the caller's again when `publish` has
    returned, or raised.
    """

    @taking_what(Producer)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._in_thread = InThread("weightdepot-producer", partial(Producer, *arguments, **options))

    @property
    def producer(self) -> Producer:
        """The one behind it. Raises InvalidRequest where it is not open."""
        return self._in_thread.object

    @property
    def layout(self) -> Layout:
        return self.producer.layout

    @property
    def highest(self) -> int | None:
        return self.producer.highest

    @property
    def latest(self) -> int | None:
        return self.producer.latest

    async def publish(
        self, version: int, *, timeout: float | None = None, wait: Wait | None = None
    ) -> Published:
        """Where the caller is cancelled, the version is given up, unless its part is copied already; the
        cancellation is passed on when the weights are not read any more, in about a second at most while it
        waits, and at the end of the copy while it copies."""
        return await self._giving_up(lambda p, given_up: p._publish(version, timeout, wait, given_up))

    async def flush(self, timeout: float | None = None) -> None:
        await self._giving_up(lambda p, given_up: p._flush(timeout, given_up))

    async def _giving_up(self, call: Callable[[Producer, Callable[[], bool]], T]) -> T:
        given_up = threading.Event()
        asked = asyncio.ensure_future(self._in_thread.run(lambda p: call(p, given_up.is_set)))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            given_up.set()
            while not asked.done():
                try:
                    await asyncio.wait([asked])
                except asyncio.CancelledError:
                    continue  # the weights may still be read, however often it is asked
            asked.exception()  # nobody is left whom it could be told
            raise

    async def open(self) -> None:
        """What `async with` begins with."""
        await self._in_thread.open()

    async def close(self) -> None:
        """Leave the model and free the memory, once the calls before are through."""
        await self._in_thread.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
