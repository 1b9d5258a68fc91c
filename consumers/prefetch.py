"""The thread of a prefetch: it listens for a version without side effects, then stages it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from weightdepot.store.errors import InvalidRequest, WaitTimeout

POLL = 30.0  # seconds to listen before it is asked again whether this is still wanted


@dataclass(frozen=True, eq=False)
class Wanted:
    """A version to prefetch: `version` or a newer one, or (`exact`) no other.

    deadline: of the monotonic clock; inf: none.
    """

    version: int
    exact: bool
    deadline: float
    future: Future[int] = field(default_factory=Future)

    def serves(self, version: int, exact: bool) -> bool:
        """Whether who wants this much may be given what this brings."""
        if not exact:
            return True  # `update` looks whether it is new enough
        if self.future.done():
            return not _failed(self.future) and self.future.result() == version
        return self.exact and self.version == version


class Prefetching:
    """At most one prefetch of a consumer.

    listen: returns when there is a version that will do, or raises WaitTimeout; it must change nothing, for
    a prefetch that only listens is forgotten without waiting for it. stage: brings a version into staging
    memory; its answer, or what it raises, becomes the future's. turn: a lock that is held while a version is
    staged; whoever holds it knows that nothing is being staged.
    """

    def __init__(
        self,
        name: str,
        listen: Callable[[Wanted, float], object],
        stage: Callable[[Wanted], int],
        turn: threading.Lock,
    ) -> None:
        self._name, self._listen, self._stage, self._turn = name, listen, stage, turn
        self._lock = threading.Lock()
        self._wanted: Wanted | None = None
        self._thread: threading.Thread | None = None
        self._heard_at = 0  # the version that the thread listens for: it wakes at this one or a newer one

    def ask(self, version: int, timeout: float | None, *, exact: bool = False) -> Future[int]:
        """Begin, unless one is under way or what it staged was not taken yet: then that one.

        One that only listens gives way to one for an exact version. Raises InvalidRequest when another
        version than that one is staged, or is being read.
        """
        with self._lock:
            if self._wanted is not None and not _failed(self._wanted.future):
                if self._wanted.serves(version, exact):
                    return self._wanted.future
                if not self._wanted.future.cancel():
                    raise InvalidRequest(
                        f"version {version} was asked for, but a prefetch has brought (or brings) another: "
                        f"apply it first, or call update(version={version})"
                    )
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            self._wanted = Wanted(version, exact, deadline)
            # a thread that waits for a newer one would not wake in time
            if self._thread is None or self._heard_at > version:
                self._heard_at = version
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            return self._wanted.future

    def end(self) -> None:
        """Forget the prefetch. One that is staging goes on until it has done, holding the lock `turn`."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
        if wanted is not None:
            wanted.future.cancel()

    def _next(self) -> Wanted | None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return None
            if self._wanted is None or self._wanted.future.done() or self._wanted.future.running():
                self._thread = None
                return None
            self._heard_at = self._wanted.version
            return self._wanted

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            try:
                left = wanted.deadline - time.monotonic()
                try:
                    self._listen(wanted, max(min(POLL, left), 0.0))
                except WaitTimeout:
                    if time.monotonic() < wanted.deadline:
                        continue
                    raise
                with self._turn:
                    if not wanted.future.set_running_or_notify_cancel():
                        continue
                    version = self._stage(wanted)
                wanted.future.set_result(version)
            except BaseException as error:  # noqa: BLE001  raised to whoever asks the future
                with contextlib.suppress(InvalidStateError):  # it was ended in this instant
                    wanted.future.set_exception(error)


def _failed(future: Future[int]) -> bool:
    return future.cancelled() or (future.done() and future.exception() is not None)
