"""One HTTP exchange with a controller, repeated until the caller's time is up.

Every operation of the controller may be repeated, so a lost connection, a restart of the controller and an
index that is away for a moment are all met by asking again. Where several controllers are named, the next one
is asked when one does not answer, and stays the one that is asked from then on.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from weightdepot.api.names import check_name
from weightdepot.api.settings import CA_VARIABLE, RUN_HEADER
from weightdepot.store.errors import (
    PROBLEM_BASE,
    ControllerUnavailable,
    IndexUnavailable,
    InvalidRequest,
    WaitTimeout,
    WeightDepotError,
    from_problem,
)
from weightdepot.store.spans import HEADER, traceparent

T = TypeVar("T")

# Statuses that a proxy gives in the controller's stead while that restarts.
GATEWAY_STATUSES = (502, 503, 504)


@dataclass(frozen=True)
class ExchangeTimeouts:
    """Seconds, all of them."""

    connect: float = 3.0
    answer: float = 10.0  # beyond what the request itself waits; then the connection counts as dead
    # the same where there is another controller to ask
    answer_of_several: float = 3.0
    # What an answer is given at least, even past the caller's deadline: an operation ends at most so late.
    grace: float = 0.8
    poll: float = 10.0  # one long poll
    backoff_first: float = 0.05
    backoff_most: float = 1.0
    silence: float = 15.0  # in a stream of events, which has a sign of life every 5 s


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


def checked_urls(text: str) -> tuple[str, ...]:
    """The URLs of controllers, from one text with commas between them. Raises InvalidRequest."""
    urls = tuple(part.strip().rstrip("/") for part in text.split(","))
    for url in urls:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{url!r} is not a controller URL: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InvalidRequest(
                f"{url!r} is not a controller URL: http://HOST:PORT is wanted (or several, with commas)"
            )
    return urls


def _authorities(ca: str | Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"the certificates in {ca} cannot be used: {error}") from error


def _authorization(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest("the token is not one: printable ASCII characters without blanks are wanted")
    return f"Bearer {token}"


class Exchange:
    """A connection pool to the controllers of one run. Safe to use from several threads at once; not after a
    fork."""

    def __init__(
        self,
        url: str,
        run: str,
        timeouts: ExchangeTimeouts,
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """ca: a PEM file that https certificates are checked against; None: the usual authorities.
        transport: a seam for tests. Raises InvalidRequest for what is no URL, run name, token or PEM file.
        """
        self.timeouts = timeouts
        self._urls = checked_urls(url)
        self._at = 0  # which of them is asked
        self._closed = threading.Event()
        self._streams: set[httpx.Response] = set()
        headers = {RUN_HEADER: check_name("run", run)}
        if token is not None:
            headers["Authorization"] = _authorization(token)
        secure = any(url.startswith("https:") for url in self._urls)
        self._client = httpx.Client(
            headers=headers,
            transport=transport,
            # The controller is named by its address; a proxy for the world outside would only be in the way.
            trust_env=False,
            verify=(True if ca is None else _authorities(ca)) if secure else False,
            # below the server's keep-alive, so that it is this side that ends idle connections
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=30.0),
        )

    @property
    def url(self) -> str:
        """The URL, or all of them with commas between."""
        return ",".join(self._urls)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        for response in list(self._streams):
            _hang_up(response)
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
        poll: bool = False,
    ) -> bytes:
        """The body of a successful answer.

        body: sent as JSON; bytes in it become base64.
        content: sent as it is, instead of `body`.
        poll: the controller may hold the request (parameter `wait`), for the time that is left or less.

        Raises what the controller answered, as the error class that it names; ControllerUnavailable when
        none did answer (or something else did) until the deadline; IndexUnavailable when it answered until
        then that it cannot reach its index.
        """
        headers = {}
        if body is not None:
            content, headers["Content-Type"] = msgspec.json.encode(body), "application/json"
        elif content is not None:
            headers["Content-Type"] = "application/octet-stream"

        def ask(url: str) -> httpx.Response:
            # anew at each attempt, since less time is left
            wait = self._patience(deadline) if poll else 0.0
            return self._client.request(
                method, url + path, content=content, headers=headers,
                params={**(params or {}), "wait": wait} if poll else params,
                timeout=self._timeout(deadline, wait),
            )  # fmt: skip

        trace = traceparent()
        if trace:  # the work is part of a trace; what the client does on its own (heartbeats) is not
            headers[HEADER] = trace
        return self._answer(ask, deadline).content

    @contextlib.contextmanager
    def stream(
        self, path: str, deadline: Deadline, params: Mapping[str, str | int | float], rest: float
    ) -> Iterator[Iterator[str]]:
        """The lines of an answer that goes on until either side ends it, in `rest` seconds at most.

        Raises as `send` does while it has not begun, which `deadline` is for; what breaks it later is raised
        by the iterator, as ControllerUnavailable.
        """

        def ask(url: str) -> httpx.Response:
            t = self.timeouts
            connect = self._timeout(deadline, 0.0).connect
            timeout = httpx.Timeout(min(t.silence, rest + t.grace), connect=connect)
            request = self._client.build_request("GET", url + path, params=params, timeout=timeout)
            response = self._client.send(request, stream=True)
            if not response.is_success:
                response.read()
            return response

        response = self._answer(ask, deadline)
        self._streams.add(response)
        try:
            self._check_open()  # `close` may have come before this stream was known to it
            yield self._lines(response)
        finally:
            self._streams.discard(response)
            response.close()

    def decode(self, content: bytes, type: type[T]) -> T:
        """The JSON of an answer as a typed value."""
        try:
            return msgspec.json.decode(content, type=type)
        except msgspec.MsgspecError as error:
            raise ControllerUnavailable(
                f"what answers at {self._shown} is not a controller of this release: {error}. "
                "Look at `weightdepot --version` on both sides"
            ) from error

    def pause(self, seconds: float) -> None:
        """Sleep; less when another thread closes this."""
        self._closed.wait(seconds)

    def _answer(self, ask: Callable[[str], httpx.Response], deadline: Deadline) -> httpx.Response:
        """A successful answer of the controller that is asked now, or of the next that gives one."""
        delay, attempts = self.timeouts.backoff_first, 0
        while True:
            attempts += 1
            at = self._at
            failure: WeightDepotError
            self._check_open()
            try:
                response = ask(self._urls[at])
                if response.is_success:
                    return response
                failure = self._error(response)
                if not isinstance(failure, IndexUnavailable | ControllerUnavailable):
                    raise failure
            except httpx.RequestError as error:
                self._check_open(error)  # by another thread, under this call
                failure = self._unreachable(error, deadline, attempts)
                failure.__cause__ = error
                if "CERTIFICATE_VERIFY_FAILED" in str(error) and attempts >= len(self._urls):
                    raise failure from error  # the next attempt would meet the same certificate
            except RuntimeError as error:  # httpx: the client was closed by another thread meanwhile
                self._check_open(error)
                raise
            if self._at == at:  # else another thread has turned to the next already
                self._at = (at + 1) % len(self._urls)
            if deadline.passed:
                raise failure
            if attempts % len(self._urls) == 0:  # none of them answered
                self.pause(min(delay * random.uniform(0.5, 1.0), deadline.remaining()))  # noqa: S311
                delay = min(2 * delay, self.timeouts.backoff_most)

    def _check_open(self, cause: BaseException | None = None) -> None:
        if self._closed.is_set():
            raise ControllerUnavailable(
                f"the client of the controller at {self._shown} was closed"
            ) from cause

    def _lines(self, response: httpx.Response) -> Iterator[str]:
        try:
            yield from response.iter_lines()
        except (httpx.RequestError, httpx.StreamError) as error:
            self._check_open(error)
            raise ControllerUnavailable(f"the stream from {self._shown} broke: {_why(error)}") from error

    def _patience(self, deadline: Deadline) -> float:
        """Seconds that the controller may hold a request: never 0 for a caller who waits, since it answers
        that otherwise; with others to ask, half of what is left at most."""
        shortest = 0.01 if deadline.timeout > 0 else 0.0
        return max(shortest, min(deadline.remaining() / self._turns, self.timeouts.poll / self._turns))

    def _timeout(self, deadline: Deadline, wait: float) -> httpx.Timeout:
        t, rest = self.timeouts, deadline.remaining()
        most = t.answer if self._turns == 1 else t.answer_of_several
        connect = min(max(rest / self._turns, t.grace), t.connect)
        return httpx.Timeout(
            wait + min(max((rest - wait) / self._turns, t.grace), most),
            connect=connect,
            write=min(max(rest, t.grace), t.answer),
            pool=connect,
        )

    @property
    def _turns(self) -> int:
        """Into how many parts the time is cut, so that it suffices for another controller."""
        return min(len(self._urls), 2)

    @property
    def _shown(self) -> str:
        return " or ".join(self._urls)

    def _unreachable(
        self, error: httpx.RequestError, deadline: Deadline, attempts: int
    ) -> ControllerUnavailable:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return ControllerUnavailable(
                f"the certificate of the controller at {self._shown} is not trusted ({_why(error)}): name "
                f"the authority that issued it, or itself, with ca=FILE, --ca FILE or {CA_VARIABLE}",
                url=self.url,
            )
        times = "once" if attempts == 1 else f"{attempts} times"
        return ControllerUnavailable(
            f"no weightdepot controller answers at {self._shown} ({_why(error)}; tried {times} within "
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
            asked = response.request
            return ControllerUnavailable(
                f"{what} at {asked.url.copy_with(raw_path=b'/')} (HTTP {response.status_code} to "
                f"{asked.method} {asked.url.path})",
                url=self.url,
            )
        if kind == PROBLEM_BASE + "nothing-ready":
            return WaitTimeout(str(problem.get("detail")), **dict(problem.get("details") or {}))
        return from_problem(problem)


def _hang_up(response: httpx.Response) -> None:
    """Wake the thread that reads it: closing the connection under it would leave it waiting."""
    stream = response.extensions.get("network_stream")
    link = None if stream is None else stream.get_extra_info("socket")
    if link is not None:
        with contextlib.suppress(OSError):  # the other side was quicker
            link.shutdown(socket.SHUT_RDWR)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
