"""Which version served while something was generated: the tags of a trajectory."""

from __future__ import annotations

import threading
from types import TracebackType

from weightdepot.store.errors import StaleGroup


class Generation:
    """From entering to leaving it, the versions that this rank served.

    A context manager, and an asynchronous one. Any number may be open, in any threads. An update that falls
    into one adds its version; what was computed before it is of the older one.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._versions: list[int] = []
        self._end: int | None = None
        self._broken = ""

    @property
    def start(self) -> int:
        """The version that served when it began. Raises StaleGroup when it has not begun."""
        if not self._versions:
            raise StaleGroup("this generation has not begun: use `with consumer.generation() as g`")
        return self._versions[0]

    @property
    def end(self) -> int | None:
        """The version that served when it ended; None before, and when there was none."""
        return self._end

    @property
    def versions(self) -> tuple[int, ...]:
        """All that served, in their order; the same version may come again after a roll back."""
        return tuple(self._versions)

    def __enter__(self) -> Generation:
        """Raises StaleGroup when this rank holds no version, or its group is half-way."""
        self._serving.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises StaleGroup when an update has failed half-way meanwhile: what was generated since is of no
        version."""
        try:
            self._end = self._serving.leave(self)
        except StaleGroup:
            if error is None:
                raise

    async def __aenter__(self) -> Generation:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class Serving:
    """What a rank serves, as it knows it. While new weights are written that is the old version: an engine
    that stands still meanwhile computes nothing with either."""

    def __init__(self, model: str, group: str) -> None:
        self._model, self._group = model, group
        self._lock = threading.Lock()
        self._version: int | None = None
        self._why = "no version was applied yet"
        self._open: list[Generation] = []

    def serve(self, version: int) -> None:
        """From here on it is this version, whole."""
        with self._lock:
            self._version = version
            for generation in self._open:
                if generation._versions[-1] != version:
                    generation._versions.append(version)

    def stop(self, why: str) -> None:
        """From here on it is none."""
        with self._lock:
            self._version, self._why = None, why
            for generation in self._open:
                generation._broken = why

    def enter(self, generation: Generation) -> None:
        with self._lock:
            if self._version is None:
                raise self._stale(self._why)
            generation._versions[:] = [self._version]
            generation._end, generation._broken = None, ""
            self._open.append(generation)

    def leave(self, generation: Generation) -> int:
        with self._lock:
            self._open.remove(generation)
            if generation._broken or self._version is None:
                raise self._stale(generation._broken or self._why)
            return self._version

    def _stale(self, why: str) -> StaleGroup:
        return StaleGroup(
            f"group {self._group!r} serves no version of {self._model!r}: {why}; call update on every rank",
            model=self._model,
            group=self._group,
        )
