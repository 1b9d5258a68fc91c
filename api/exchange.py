"""One HTTP exchange with the controller, repeated until the caller's time is up.

Every operation of the controller may be repeated, so a lost connection, a restart of the controller and an
index that is away for a moment are all met by asking again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from weightdepot.api.names import check_name
from weightdepot.api.settings import RUN_HEADER
from weightdepot.store.errors import (
    PROBLEM_BASE,
    ControllerUnavailable,
    IndexUnavailable,
    InvalidRequest,
    WaitTimeout,
    WeightDepotError,
    from_problem,
)

T = TypeVar("T")

# Statuses that a proxy gives in the controller's stead while that restarts.
GATEWAY_STATUSES = (502, 503, 504)


@dataclass(frozen=True)
class ExchangeTimeouts:
    """Seconds, all of them."""

    connect: float = 3.0
    answer: float = 10.0  # beyond what the request itself waits; then the connection counts as dead
    # What an answer is given at least, even past the caller's deadline: an operation ends at most so late.
    grace: float = 2.0
    poll: float = 10.0  # one long poll
    backoff_first: float = 0.05
    backoff_most: float = 1.0


class Deadline:
    """When the caller's patience ends."""

    def __init__(self, timeout: float) -> None:
        if not timeout >= 0:
            raise InvalidRequest(f"a timeout of {timeout} s: a number of seconds, 0 or more, is wanted")
        self.timeout = timeout
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Exchange:
    """A connection pool to one controller. Safe to use from several threads at once; not after a fork."""

    def __init__(
        self,
        url: str,
        run: str,
        timeouts: ExchangeTimeouts,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`transport`: a seam for tests. Raises InvalidRequest for what is no URL or no run name."""
        self.url = url.rstrip("/")
        self.timeouts = timeouts
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{url!r} is not a controller URL: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InvalidRequest(f"{url!r} is not a controller URL: http://HOST:PORT is wanted")
        self._closed = threading.Event()
        self._client = httpx.Client(
            base_url=self.url,
            headers={RUN_HEADER: check_name("run", run)},
            transport=transport,
            # The controller is named by its address; a proxy for the world outside would only be in the way.
            trust_env=False,
            verify=parsed.scheme == "https",
            # below the server's keep-alive, so that it is this side that ends idle connections
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=30.0),
        )

    def close(self) -> None:
        self._closed.set()
        self._client.close()

    def send(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        body: Any = None,
        content: bytes | None = None,
        params: Mapping[str, str | int | float] | None = None,
        wait: float = 0.0,
    ) -> bytes:
        """The body of a successful answer.

        body: sent as JSON; bytes in it become base64.
        content: sent as it is, instead of `body`.
        wait: seconds that the controller may hold the request (as `params` says).

        Raises what the controller answered, as the error class that it names; ControllerUnavailable when
        it did not answer (or something else did) until the deadline; IndexUnavailable when it answered
        until then that it cannot reach its index.
        """
        headers = {}
        if body is not None:
            content, headers["Content-Type"] = msgspec.json.encode(body), "application/json"
        elif content is not None:
            headers["Content-Type"] = "application/octet-stream"
        delay, attempts = self.timeouts.backoff_first, 0
        while True:
            attempts += 1
            if self._closed.is_set():
                raise ControllerUnavailable(f"the client of the controller at {self.url} was closed")
            failure: WeightDepotError
            try:
                response = self._client.request(
                    method, path, content=content, params=params, headers=headers,
                    timeout=self._timeout(deadline, wait),
                )  # fmt: skip
                if response.is_success:
                    return response.content
                failure = self._error(response)
                if not isinstance(failure, IndexUnavailable | ControllerUnavailable):
                    raise failure
            except httpx.RequestError as error:
                if self._closed.is_set():  # by another thread, under this call
                    raise ControllerUnavailable(
                        f"the client of the controller at {self.url} was closed"
                    ) from error
                failure = self._unreachable(error, deadline, attempts)
                failure.__cause__ = error
            except RuntimeError as error:  # httpx: the client was closed by another thread meanwhile
                if not self._closed.is_set():
                    raise
                raise ControllerUnavailable(
                    f"the client of the controller at {self.url} was closed"
                ) from error
            if deadline.passed:
                raise failure
            self._closed.wait(min(delay * random.uniform(0.5, 1.0), deadline.remaining()))  # noqa: S311
            delay = min(2 * delay, self.timeouts.backoff_most)

    def decode(self, content: bytes, type: type[T]) -> T:
        """The JSON of an answer as a typed value."""
        try:
            return msgspec.json.decode(content, type=type)
        except msgspec.MsgspecError as error:
            raise ControllerUnavailable(
                f"what answers at {self.url} is not a controller of this release: {error}. "
                "Look at `weightdepot --version` on both sides"
            ) from error

    def _timeout(self, deadline: Deadline, wait: float) -> httpx.Timeout:
        t = self.timeouts
        spare = deadline.remaining() - wait
        answer = wait + min(max(spare, t.grace), t.answer)
        connect = min(max(deadline.remaining(), t.grace), t.connect)
        return httpx.Timeout(answer, connect=connect, write=t.answer, pool=connect)

    def _unreachable(
        self, error: httpx.RequestError, deadline: Deadline, attempts: int
    ) -> ControllerUnavailable:
        times = "once" if attempts == 1 else f"{attempts} times"
        why = str(error) or type(error).__name__
        return ControllerUnavailable(
            f"no weightdepot controller answers at {self.url} ({why}; tried {times} within "
            f"{deadline.timeout:g} s). Start one with `weightdepot serve`, or give "
            "the URL of the one that runs",
            url=self.url,
        )

    def _error(self, response: httpx.Response) -> WeightDepotError:
        problem: Any = None
        try:
            problem = msgspec.json.decode(response.content)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            problem = None
        kind = str(problem.get("type", "")) if isinstance(problem, dict) else ""
        if not kind.startswith(PROBLEM_BASE):
            if response.status_code in GATEWAY_STATUSES:
                what = "a proxy says that the controller does not answer"
            else:
                what = "something else than a weightdepot controller answers"
            return ControllerUnavailable(
                f"{what} at {self.url} (HTTP {response.status_code} to {response.request.method} "
                f"{response.request.url.path})",
                url=self.url,
            )
        if kind == PROBLEM_BASE + "nothing-ready":
            return WaitTimeout(str(problem.get("detail")), **dict(problem.get("details") or {}))
        return from_problem(problem)
