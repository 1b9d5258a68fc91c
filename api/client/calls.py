"""How each operation is asked: one exchange, or polls until there is an answer or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from weightdepot.api.exchange import Deadline, Exchange
from weightdepot.api.names import check_name
from weightdepot.store.errors import StaleGroup, StoreFull, WaitTimeout, WeightDepotError
from weightdepot.store.index.records import Wait

T = TypeVar("T")

TIMEOUT = 30.0  # seconds, of the methods that do not wait for anything but the controller itself
MAX_TEXT = 2000  # characters of a reason that is sent along

Params = Mapping[str, str | int | float]

# What a wait becomes when the time is up.
_FITTING: Mapping[str, type[WeightDepotError]] = {"slot": StoreFull, "group": StaleGroup}


class Calls:
    """What the parts of the client are made of."""

    def __init__(self, http: Exchange) -> None:
        self._http = http

    def _model(self, model: str) -> str:
        return f"/v1/models/{check_name('model', model)}"

    def _version(self, model: str, version: int) -> str:
        return f"{self._model(model)}/versions/{version}"

    def _group(self, model: str, group: str) -> str:
        return f"{self._model(model)}/groups/{check_name('group', group)}"

    def _ask(self, method: str, path: str, timeout: float, type: type[T], body: Any = None) -> T:
        return self._http.decode(self._http.send(method, path, Deadline(timeout), body=body), type)

    def _tell(self, method: str, path: str, timeout: float, body: Any = None) -> None:
        self._http.send(method, path, Deadline(timeout), body=body)

    def _poll(self, method: str, path: str, timeout: float, what: str, params: Params | None = None) -> bytes:
        """Ask until the controller does not answer `wait-timeout` any more."""
        deadline = Deadline(timeout)
        while True:
            begun = time.monotonic()
            try:
                return self._http.send(method, path, deadline, params=params, poll=True)
            except WaitTimeout as error:
                if deadline.passed:
                    message = error.message.split(" s: ", 1)[-1]
                    raise WaitTimeout(
                        f"waited {timeout:g} s for {what}: {message}", **error.details
                    ) from None
            self._breathe(begun, deadline)

    def _until(
        self, path: str, timeout: float, what: str, body: Any, read: Callable[[bytes], T | Wait | None]
    ) -> T:
        """Ask until the answer is no wait; when the time is up, the error that fits what was waited for."""
        deadline = Deadline(timeout)
        while True:
            begun = time.monotonic()
            answer = read(self._http.send("POST", path, deadline, body=body, poll=True))
            if answer is None:
                answer = Wait("unknown", "the controller's answer was empty")
            if not isinstance(answer, Wait):
                return answer
            if deadline.passed:
                fitting = _FITTING.get(answer.reason, WaitTimeout)
                raise fitting(
                    f"waited {timeout:g} s for {what}: {answer.message}",
                    **{"reason": answer.reason, **answer.details},
                )
            self._breathe(begun, deadline)

    def _settled(
        self,
        path: str,
        timeout: float,
        type: type[T],
        settled: Callable[[T], bool],
        params: Params | None = None,
    ) -> T:
        """Ask until the answer is settled; the last one when the time is up."""
        deadline = Deadline(timeout)
        while True:
            begun = time.monotonic()
            content = self._http.send("GET", path, deadline, params=params, poll=True)
            answer = self._http.decode(content, type)
            if settled(answer) or deadline.passed:
                return answer
            self._breathe(begun, deadline)

    def _breathe(self, begun: float, deadline: Deadline) -> None:
        """A controller that answers at once that there is nothing (it shuts down) is not asked at full
        speed."""
        early = self._http.timeouts.backoff_first - (time.monotonic() - begun)
        if early > 0:
            self._http.pause(min(early, deadline.remaining()))
