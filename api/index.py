"""The index that a controller stands on: a Redis by URL, or an embedded one of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from weightdepot.api.settings import Settings
from weightdepot.store.index import EmbeddedRedis, Index


@contextlib.asynccontextmanager
async def open_index(settings: Settings) -> AsyncIterator[Index]:
    """An index that has answered once. Raises IndexUnavailable, and leaves nothing running then."""
    async with contextlib.AsyncExitStack() as stack:
        url = settings.redis_url
        if url is None:
            url = stack.enter_context(EmbeddedRedis(settings.data_dir)).url
        index = Index(
            url,
            run=settings.run,
            connect_timeout=settings.timeouts.index_connect,
            op_timeout=settings.timeouts.index_operation,
        )
        stack.push_async_callback(index.close)
        await index.ping()
        yield index
