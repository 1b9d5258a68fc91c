"""The thread of a prefetch: it listens for a version without side effects, then stages it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from weightdepot.store.errors import WaitTimeout

POLL = 30.0  # seconds to listen before it is asked again whether this is still wanted


@dataclass(frozen=True, eq=False)
class Wanted:
    """A version to prefetch: at least `version`. `deadline`: of the monotonic clock; inf: none."""

    version: int
    deadline: float
    future: Future[int] = field(default_factory=Future)


class Prefetching:
    """At most one prefetch, and one thread, of a consumer.

    listen: returns when there is a version that is new enough, or raises WaitTimeout; it must change nothing,
    for a prefetch that only listens is forgotten without waiting for it. stage: brings a version into staging
    memory; its answer, or what it raises, becomes the future's. turn: a lock that is held while a version is
    staged; whoever holds it knows that nothing is being staged.
    """

    def __init__(
        self,
        name: str,
        listen: Callable[[int, float], object],
        stage: Callable[[Wanted], int],
        turn: threading.Lock,
    ) -> None:
        self._name, self._listen, self._stage, self._turn = name, listen, stage, turn
        self._lock = threading.Lock()
        self._wanted: Wanted | None = None
        self._runs = False

    def ask(self, version: int, timeout: float | None) -> Future[int]:
        """Begin, unless one is under way or what it staged was not taken yet: then that one."""
        with self._lock:
            if self._wanted is not None and not _failed(self._wanted.future):
                return self._wanted.future
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            self._wanted = Wanted(version, deadline)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            return self._wanted.future

    def end(self) -> None:
        """Forget the prefetch. One that is staging goes on until it has done, holding the lock `turn`."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
        if wanted is not None:
            wanted.future.cancel()

    def _next(self) -> Wanted | None:
        with self._lock:
            if self._wanted is None or self._wanted.future.done() or self._wanted.future.running():
                self._runs = False
                return None
            return self._wanted

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            try:
                left = wanted.deadline - time.monotonic()
                try:
                    self._listen(wanted.version, max(min(POLL, left), 0.0))
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
