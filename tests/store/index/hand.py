"""Reaches into the keys of the index, so that tests need not wait for time to pass."""

from __future__ import annotations

import time

import redis


class Hand:
    """Reaches into the keys of one model behind the index's back: lets time pass where a test says so."""

    def __init__(self, url: str, run: str, model: str) -> None:
        self.redis = redis.Redis.from_url(url)
        self.prefix = f"wd:{{{run}/{model}}}:"

    def kill(self, session: str, seconds_ago: float = 60.0) -> None:
        """The session counts as dead, for so long already."""
        self.redis.zadd(f"{self.prefix}alive", {session: time.time() - seconds_ago})

    def end_lease(self, version: int, lease: str) -> None:
        """The lease, as "group/round", has run out."""
        self.redis.zadd(f"{self.prefix}leases:{version}", {lease: 1.0}, xx=True)

    def overdue(self, version: int) -> None:
        """The time for sealing the version is over."""
        self.redis.hset(f"{self.prefix}version:{version}", "deadline", "1")

    def live_leases(self, version: int) -> set[str]:
        found = self.redis.zrangebyscore(f"{self.prefix}leases:{version}", time.time(), "+inf")
        return {_text(raw) for raw in found}

    def field(self, key: str, name: str | int) -> str | None:
        raw = self.redis.hget(self.prefix + key, str(name))
        return None if raw is None else _text(raw)

    def table(self, key: str) -> dict[str, str]:
        return {_text(k): _text(v) for k, v in self.redis.hgetall(self.prefix + key).items()}

    def keys(self) -> set[str]:
        found = self.redis.keys(self.prefix.replace("{", "\\{") + "*")
        return {_text(raw)[len(self.prefix) :] for raw in found}

    def close(self) -> None:
        self.redis.close()


def _text(raw: object) -> str:
    assert isinstance(raw, bytes)
    return raw.decode()
