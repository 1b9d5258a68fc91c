"""One look at the index for all who want the same at the same moment: an event wakes everybody who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any


class Together:
    """Owned by one event loop."""

    def __init__(self) -> None:
        self._next: dict[Hashable, asyncio.Task[Any]] = {}  # looks that have not begun

    async def look(self, key: Hashable, look: Callable[[], Awaitable[Any]]) -> Any:
        """What `look` gives, or raises, whoever began it. It begins after this call, so that it sees all that
        happened before. `key` says what is looked at."""
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.ensure_future(self._begin(key, look))
            task.add_done_callback(_seen)
        # one who goes away takes nothing from the others
        return await asyncio.shield(task)

    async def _begin(self, key: Hashable, look: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(0)  # whom the same event woke comes first
        del self._next[key]
        return await look()


def _seen(task: asyncio.Task[Any]) -> None:
    """Its error was told to those who waited; where none was left, it is nobody's."""
    if not task.cancelled():
        task.exception()
