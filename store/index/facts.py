"""What a Redis says of itself: for whoever sets up a machine."""

from __future__ import annotations

import time
from dataclasses import dataclass

from redis import Redis
from redis.exceptions import RedisError

from weightdepot.store.errors import IndexUnavailable


@dataclass(frozen=True)
class Facts:
    version: str
    round_trip: float  # seconds, of the fastest of three
    clock_ahead: float  # seconds that its clock is ahead of this machine's
    appendonly: bool  # whether what it holds survives its end
    evicts: bool  # whether it throws keys away when its memory is full
    limit: int  # bytes of memory that it may use; 0: no limit
    used: int  # bytes


def facts(url: str, timeout: float) -> Facts:
    """Asks the Redis at `url`. Raises IndexUnavailable when it does not answer within `timeout` seconds."""
    try:
        with Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout) as redis:
            trips = []
            for _ in range(3):
                begun = time.perf_counter()
                redis.ping()
                trips.append(time.perf_counter() - begun)
            asked = time.time()
            seconds, micros = redis.time()
            ahead = seconds + micros / 1e6 - (asked + time.time()) / 2
            info = redis.info()
    except (RedisError, OSError, ValueError) as error:
        raise IndexUnavailable(f"{type(error).__name__}: {error}") from error
    number = info.get("valkey_version") or info.get("redis_version")
    return Facts(
        version=f"{info.get('server_name', 'redis')} {number}",
        round_trip=min(trips),
        clock_ahead=ahead,
        appendonly=bool(info.get("aof_enabled")),
        evicts=info.get("maxmemory_policy", "noeviction") != "noeviction",
        limit=int(info.get("maxmemory", 0)),
        used=int(info.get("used_memory", 0)),
    )
