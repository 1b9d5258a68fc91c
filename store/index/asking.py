"""How the index's scripts are asked: one connection, one key prefix for each model, typed answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from weightdepot.store.errors import InvalidRequest
from weightdepot.store.index import check, wire
from weightdepot.store.index.connection import Connection
from weightdepot.store.index.records import Event, Wait

T = TypeVar("T")


class Asking:
    """What the rooms of `Index` share."""

    def __init__(
        self,
        redis_url: str,
        run: str = "default",
        connect_timeout: float = 2.0,
        op_timeout: float = 5.0,
    ) -> None:
        """Connects lazily. Time-outs in seconds; a call takes at most about twice their sum."""
        self.run = check.name("run", run)
        self._redis = Connection(redis_url, connect_timeout=connect_timeout, op_timeout=op_timeout)
        self._channel = f"wd:{run}:events"
        self._models = f"wd:{run}:models"

    async def close(self) -> None:
        """Gives the connections back; `events` iterators end by themselves or by cancellation."""
        await self._redis.close()

    async def ping(self) -> float:
        """Seconds of one round trip to Redis."""
        return await self._redis.ping()

    async def events(self) -> AsyncIterator[Event]:
        """What changed, as it happens: (model, kind, version).

        The first event, of kind `subscribed` and model "", says that from here on nothing is missed:
        who waits looks again when it comes, and it comes again after a reconnect. Raises
        `IndexUnavailable` when the link breaks for good: iterate again, after a pause.
        """
        async for payload in self._redis.subscribe(self._channel):
            if payload is None:
                yield Event("", "subscribed", None)
            else:
                yield wire.event(payload)

    # -- blobs ---------------------------------------------------------------------------------------

    async def put_blob(self, kind: str, digest: str, data: bytes, ttl_s: float) -> None:
        """Stores bytes under the digest of what they mean, for `ttl_s` seconds. kind: layout|tiling|plan."""
        await self._redis.put(self._blob(kind, digest), data, check.ttl("ttl_s", ttl_s))

    async def get_blob(self, kind: str, digest: str, ttl_s: float | None = None) -> bytes | None:
        """The bytes, or None. With `ttl_s` they are kept for that many seconds from now on."""
        return await self._redis.get(
            self._blob(kind, digest), None if ttl_s is None else check.ttl("ttl_s", ttl_s)
        )

    def _blob(self, kind: str, digest: str) -> str:
        if kind not in ("layout", "tiling", "plan"):
            raise InvalidRequest(f"unknown kind of blob {kind!r}: layout, tiling or plan")
        return f"wd:{self.run}:blob:{kind}:{check.token('digest', digest)}"

    # -- scripts -------------------------------------------------------------------------------------

    def _prefix(self, m: str) -> str:
        # one hash tag per model: all of its keys are on one shard, so that one script may change them
        return f"wd:{{{self.run}/{check.name('model', m)}}}:"

    async def _ask_or_wait(
        self, script: str, m: str, *args: str | bytes | int | float, type: type[T]
    ) -> T | Wait:
        raw = await self._redis.run(script, self._prefix(m), self._channel, m, *args)
        return wire.decode(raw, type)

    async def _ask(self, script: str, m: str, *args: str | bytes | int | float, type: type[T]) -> T:
        answer = await self._ask_or_wait(script, m, *args, type=type)
        if isinstance(answer, Wait):
            raise TypeError(f"a script that never waits answered {answer}")
        return answer
