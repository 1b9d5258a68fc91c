"""The connection to Redis, and the one place where its errors become ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from weightdepot.store.errors import IndexUnavailable, InvalidRequest

MAX_CONNECTIONS = 64  # of one controller; more calls than that at once queue up
QUIET_S = 5.0  # a subscription that hears nothing for so long is asked whether it still lives


class Connection:
    """A pool of connections to one Redis, bound to the event loop that first uses it.

    Every method raises `IndexUnavailable` when Redis cannot be reached, does not answer in time, or
    cannot serve (loading, read-only, out of memory, busy with a script).
    """

    def __init__(self, url: str, *, connect_timeout: float, op_timeout: float) -> None:
        try:
            parts = urlsplit(url)
            # what messages may show: no user, no password
            self.where = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=op_timeout,
                socket_connect_timeout=connect_timeout,
                socket_timeout=op_timeout,
                socket_keepalive=True,
                # One more try at once, for pooled connections that a restart of Redis left dead: every
                # script may be repeated. Time-outs are not tried again, the caller's time is bounded.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            )
        except (ValueError, RedisError) as error:
            raise InvalidRequest(f"this is no Redis URL: {error}") from error
        self._client: Redis = Redis.from_pool(pool)
        self._scripts: dict[str, AsyncScript] = {}

    async def close(self) -> None:
        with self._mapped("close"):
            await self._client.aclose()

    async def ping(self) -> float:
        begin = time.perf_counter()
        with self._mapped("ping"):
            await self._client.ping()
        return time.perf_counter() - begin

    async def run(self, script: str, key: str, *args: str | bytes | int | float) -> bytes:
        """Runs a script that is given one key, and answers a string."""
        known = self._scripts.get(script)
        if known is None:
            known = self._scripts[script] = self._client.register_script(script)
        with self._mapped("script"):
            raw = await known(keys=[key], args=args)
        return _bytes(raw)

    async def put(self, key: str, data: bytes, ttl_s: float) -> None:
        with self._mapped("write"):
            await self._client.set(key, data, px=max(1, round(ttl_s * 1000)))

    async def get(self, key: str, ttl_s: float | None) -> bytes | None:
        with self._mapped("read"):
            if ttl_s is None:
                raw = await self._client.get(key)
            else:
                raw = await self._client.getex(key, px=max(1, round(ttl_s * 1000)))
        return None if raw is None else _bytes(raw)

    async def add(self, key: str, member: str) -> None:
        with self._mapped("write"):
            await self._client.sadd(key, member)

    async def members(self, key: str) -> list[str]:
        with self._mapped("read"):
            return sorted(_bytes(raw).decode() for raw in await self._client.smembers(key))

    async def fields(self, key: str, names: Sequence[int]) -> dict[int, bytes]:
        """Those fields of a hash that there are."""
        if not names:
            return {}
        with self._mapped("read"):
            values = await self._client.hmget(key, [str(name) for name in names])
        return {name: _bytes(raw) for name, raw in zip(names, values, strict=True) if raw is not None}

    async def subscribe(self, channel: str) -> AsyncIterator[bytes | None]:
        """Payloads of a channel; None each time that a subscription has begun (also after a reconnect)."""
        pubsub = self._client.pubsub()
        quiet = False  # nothing came since the last probe
        try:
            with self._mapped("subscribe"):
                await pubsub.subscribe(channel)
            while True:
                with self._mapped("listen"):
                    message = await pubsub.get_message(timeout=QUIET_S)
                    if message is None:
                        if quiet:
                            raise RedisConnectionError(f"no answer for {2 * QUIET_S:.0f} s")
                        quiet = True
                        await pubsub.ping()
                        continue
                quiet = False
                if message["type"] == "message":
                    yield _bytes(message["data"])
                elif message["type"] == "subscribe":
                    yield None
        finally:
            with self._mapped("unsubscribe"):
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    @contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            raise IndexUnavailable(
                f"the index at {self.where} does not serve ({what}): {type(error).__name__}: {error}."
                " Is Redis up, writable and reachable from the controller?",
                operation=what,
            ) from error


def _bytes(raw: object) -> bytes:
    """redis-py's types allow for decoded answers, which this pool does not ask for."""
    if not isinstance(raw, bytes):
        raise TypeError(f"Redis answered {type(raw).__name__}, not bytes")
    return raw
