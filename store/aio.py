"""Using a blocking object from asyncio: it lives in one thread of its own, and is asked from there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from weightdepot.store.errors import InvalidRequest


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)
R = TypeVar("R")
P = ParamSpec("P")


def taking_what(
    _: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorates an `__init__` that takes what this class takes, so that type checkers know it."""
    return lambda initialize: initialize


class InThread(Generic[T]):
    """An object that is made, used and closed in one thread.

    Calls are carried out one after the other. One whose caller is cancelled never begins if it waits for its
    turn; if it has begun it goes on to its end, its result is let go, and the next one waits for it: what the
    object holds is never half-way.
    """

    def __init__(self, name: str, make: Callable[[], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._object: T | None = None
        self._closing = False

    @property
    def object(self) -> T:
        """Raises InvalidRequest before it is open, and when it is closed."""
        if self._object is None or self._closing:
            raise InvalidRequest("it is not open: use it in `async with`")
        return self._object

    async def open(self) -> None:
        """Make the object. Where the caller is cancelled meanwhile, it is closed as soon as it is made."""
        if self._object is not None or self._closing:
            raise InvalidRequest("it was opened already: make a new one")
        made = self._thread.submit(self._make)
        try:
            self._object = await asyncio.wrap_future(made)
        except asyncio.CancelledError:
            self._thread.submit(_close_made, made)
            self._end()
            raise
        except BaseException:
            self._end()
            raise

    async def run(self, call: Callable[[T], R]) -> R:
        it = self.object
        return await asyncio.wrap_future(self._thread.submit(call, it))

    async def close(self) -> None:
        """Close the object, after the calls before this one; also where the caller is cancelled."""
        it = self._object
        if it is None or self._closing:
            return
        closed = self._thread.submit(it.close)
        self._end()
        await asyncio.shield(asyncio.wrap_future(closed))

    def _end(self) -> None:
        self._closing = True
        self._thread.shutdown(wait=False)  # what was submitted is still carried out


def _close_made(made: Future[T]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()
