"""Long polls: a request that cannot be answered yet is held until something changed, or its time is up.

One subscription per process feeds all waiters. Events only say "look again": a lost one costs a waiter at
most one re-check interval, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

from weightdepot.store.errors import IndexUnavailable
from weightdepot.store.index.records import Event, Wait

T = TypeVar("T")

log = logging.getLogger("weightdepot.api")

# Seconds between two looks of one waiter, for each waiter on the same model. A step of 256 ranks gives as
# many events as it has waiters; answering each of them to each would load the index with the square.
SPACING = 0.0005
RECONNECT = (0.1, 2.0)  # seconds before the first and between the later attempts to subscribe again


class EventSource(Protocol):
    def events(self) -> AsyncIterator[Event]:
        """Every change, and first (and after each reconnection) `subscribed` with model "".

        Raises IndexUnavailable when the connection breaks.
        """
        ...


class Waiters:
    """Wakes the requests that wait for a model. Owned by one event loop."""

    def __init__(self, recheck: float) -> None:
        """`recheck`: seconds after which a waiter looks again even when no event came."""
        self._recheck = recheck
        # by model: who waits, and the kinds of events that say nothing to them
        self._bells: dict[str, dict[asyncio.Event, frozenset[str]]] = defaultdict(dict)
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many requests wait now."""
        return sum(len(bells) for bells in self._bells.values())

    def close(self) -> None:
        """End all waits with the answer that they have; none is begun any more."""
        self._closed = True
        self.ring_all()

    def ring(self, model: str, kind: str = "") -> None:
        for bell, deaf in self._bells.get(model, {}).items():
            if kind not in deaf:
                bell.set()

    def ring_all(self) -> None:
        for bells in self._bells.values():
            for bell in bells:
                bell.set()

    @contextlib.contextmanager
    def _bell(self, model: str, deaf: frozenset[str]) -> Iterator[asyncio.Event]:
        bell = asyncio.Event()
        self._bells[model][bell] = deaf
        try:
            yield bell
        finally:
            del self._bells[model][bell]
            if not self._bells[model]:
                del self._bells[model]

    async def until(
        self,
        model: str,
        attempt: Callable[[], Awaitable[T | Wait]],
        wait: float,
        deaf: frozenset[str] = frozenset(),
    ) -> T | Wait:
        """The first answer that is no `Wait`; after `wait` seconds the last `Wait`.

        `attempt` is called at least once, and once more when the time is up; what it raises is raised.
        deaf: kinds of events that cannot change its answer. Looking after them would only make the look after
        the one that matters a later one.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        # registered before the first look: what changes after it rings
        with self._bell(model, deaf) as bell:
            while True:
                bell.clear()
                answer = await attempt()
                # judged after the look: one that took past the deadline is not followed by another
                if not isinstance(answer, Wait) or self._closed or loop.time() >= deadline:
                    return answer
                looked = loop.time()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(bell.wait(), max(0.0, min(self._recheck, deadline - looked)))
                pause = SPACING * len(self._bells[model]) - (loop.time() - looked)
                if pause > 0 and not self._closed:
                    await asyncio.sleep(min(pause, self._recheck))

    async def listen(self, source: EventSource, hear: Callable[[Event], None]) -> None:
        """Turn the source's events into rings, for ever; subscribe again when the connection breaks.

        `hear` is given every event. `subscribed` is among them, each time that a subscription has begun:
        what happened before it was not heard.
        """
        delay = RECONNECT[0]
        while True:
            try:
                async for event in source.events():
                    delay = RECONNECT[0]
                    hear(event)
                    if event.kind == "subscribed":
                        self.ring_all()
                    else:
                        self.ring(event.model, event.kind)
            except IndexUnavailable as error:
                log.warning("no events for now, waiters look every %.1f s: %s", self._recheck, error.message)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RECONNECT[1])
