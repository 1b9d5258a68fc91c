"""Changes, as they happen."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weightdepot.api.client.calls import TIMEOUT, Calls
from weightdepot.api.exchange import Deadline
from weightdepot.store.errors import ControllerUnavailable
from weightdepot.store.index.records import Event

PATIENCE = TIMEOUT  # seconds for a controller to be found, at first and when a stream breaks
LONGEST = 3600.0  # seconds of one stream; the next one follows by itself


class _Event(msgspec.Struct):
    model: str
    kind: str
    version: int | None = None
    group: str = ""


class EventCalls(Calls):
    def events(self, model: str | None = None, *, timeout: float | None = None) -> Iterator[Event]:
        """What changes in one model, or in all; for `timeout` seconds (None: until the caller breaks off).

        An event of kind `subscribed` is the first, and comes again whenever something may have been missed
        (the stream broke, or this reader was too slow): look then, from there on nothing is missed.
        Raises ControllerUnavailable when none is found for 30 s.
        """
        path = "/v1/events" if model is None else f"{self._model(model)}/events"
        deadline = Deadline(float("inf") if timeout is None else timeout)
        while not deadline.passed:
            rest, begun = deadline.remaining(), False
            params = {} if timeout is None else {"seconds": min(rest, LONGEST)}
            try:
                with self._http.stream(path, Deadline(min(rest, PATIENCE)), params, rest) as lines:
                    begun = True
                    yield from self._events(lines)
            except ControllerUnavailable:
                if self._http.closed or not begun:
                    raise
            self._http.pause(min(self._http.timeouts.backoff_first, deadline.remaining()))

    def _events(self, lines: Iterator[str]) -> Iterator[Event]:
        """Of one stream, until it ends. `lagged` ends it too: the next one begins with `subscribed`."""
        for line in lines:
            if line.startswith("data: "):
                event = self._http.decode(line.removeprefix("data: ").encode(), _Event)
                if event.kind != "lagged":
                    yield Event(event.model, event.kind, event.version, event.group)
