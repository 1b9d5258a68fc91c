"""Server-sent events: each change of the index, handed on to whoever listens, as it happens.

One subscription per process feeds all streams. A listener that does not keep up is told so and let go: what
it has missed, it finds out by looking.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from weightdepot.store.errors import WeightDepotError
from weightdepot.store.index.records import Event

MEDIA_TYPE = "text/event-stream"
COMMENT = b": alive\n\n"


class TooManyListeners(WeightDepotError):
    """As many streams are open as one controller takes."""

    slug, status, title = "too-many-listeners", 503, "Too many streams of events"
    retryable = True


class _Listener:
    def __init__(self, model: str | None, backlog: int) -> None:
        self.model = model
        self.backlog = backlog
        self.waiting: deque[tuple[int, Event]] = deque()
        self.bell = asyncio.Event()
        self.lagged = False

    def hear(self, number: int, event: Event) -> None:
        # `subscribed` names no model, and concerns everybody
        if self.lagged or (self.model is not None and event.model not in ("", self.model)):
            return
        if len(self.waiting) >= self.backlog:
            self.lagged = True
            self.waiting.clear()
        else:
            self.waiting.append((number, event))
        self.bell.set()


class Feed:
    """Hands events on to streams. Owned by one event loop."""

    def __init__(self, keep_alive: float, backlog: int, listeners: int) -> None:
        """keep_alive: seconds between two signs of life; backlog: events that a stream may be behind."""
        self._keep_alive = keep_alive
        self._backlog = backlog
        self._most = listeners
        self._listeners: set[_Listener] = set()
        self._number = 0
        self._closed = False

    @property
    def listening(self) -> int:
        """How many streams are open."""
        return len(self._listeners)

    def hear(self, event: Event) -> None:
        self._number += 1
        for listener in self._listeners:
            listener.hear(self._number, event)

    def close(self) -> None:
        """End all streams; none is begun any more."""
        self._closed = True
        for listener in self._listeners:
            listener.bell.set()

    def stream(self, model: str | None, seconds: float | None) -> AsyncIterator[bytes]:
        """The events of one model (None: of all), as text/event-stream; for `seconds`, or until `close`.

        The first event is `subscribed`: from there on nothing is missed. Raises TooManyListeners.
        """
        if len(self._listeners) >= self._most:
            raise TooManyListeners(
                f"{self._most} streams of events are open here already: close some, or ask another controller"
            )
        # registered now, not when the first event is asked for
        listener = _Listener(model, self._backlog)
        listener.hear(self._number, Event("", "subscribed", None))
        self._listeners.add(listener)
        return self._streamed(listener, seconds)

    async def _streamed(self, listener: _Listener, seconds: float | None) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        end = None if seconds is None else loop.time() + seconds
        try:
            while True:
                while listener.waiting:
                    yield encoded(*listener.waiting.popleft())
                if listener.lagged:
                    yield encoded(self._number, Event(listener.model or "", "lagged", None))
                    return
                rest = self._keep_alive if end is None else min(self._keep_alive, end - loop.time())
                if self._closed or rest <= 0:
                    return
                listener.bell.clear()
                if listener.waiting or listener.lagged:  # it came while the last one was written
                    continue
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(listener.bell.wait(), rest)
                if not listener.bell.is_set() and (end is None or loop.time() < end):
                    yield COMMENT
        finally:
            self._listeners.discard(listener)


def encoded(number: int, event: Event) -> bytes:
    """One event of the stream. `number` counts what this controller process has heard."""
    data = msgspec.json.encode(
        {"model": event.model, "kind": event.kind, "version": event.version, "group": event.group}
    )
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, event.kind.encode(), data)
