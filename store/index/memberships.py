"""Who is there: producers and consumers join, stay alive, and leave."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightdepot.store.errors import InvalidRequest
from weightdepot.store.index import check, wire
from weightdepot.store.index.asking import Asking
from weightdepot.store.index.records import Heartbeat, Joined, Process
from weightdepot.store.index.scripts_consumers import JOIN_CONSUMER
from weightdepot.store.index.scripts_members import HEARTBEAT, JOIN_PRODUCER, LEAVE, SET_LAYOUT, SWEEP

PRUNE_AFTER_S = 3600.0  # members that were dead for longer are forgotten by `sweep`


class Memberships(Asking):
    async def join_producer(
        self,
        m: str,
        rank: int,
        world_size: int,
        session: str,
        layout: str,
        process: Process,
        retention: int,
        ttl: float,
        replace: str = "",
        yields: bool = False,
    ) -> Joined:
        """Takes a producer rank. The same session may join again: nothing changes but its time to live.

        `retention` is the number of slots that every rank has, at least 2. `ttl` in seconds.
        A rank whose holder is dead, or is named in `replace`, gets a new incarnation: open versions
        abort, ready ones stay.

        `yields`: give way to any other that does not, of whatever world size; what was published stays.

        Raises `MemberConflict` when a live session holds the rank (details: `session`, `process`,
        `expires_in`), or when the other live ranks have another world size or retention.
        """
        check.rank(rank, world_size)
        if retention < 2:
            raise InvalidRequest(f"retention {retention} of model {m} is too small: at least 2 slots")
        await self._redis.add(self._models, check.name("model", m))
        return await self._ask(
            JOIN_PRODUCER,
            m,
            rank,
            world_size,
            check.token("session", session),
            check.token("layout", layout),
            msgspec.json.encode(process),
            int(retention),
            check.ttl("ttl", ttl),
            check.token("replace", replace) if replace else "",
            "1" if yields else "0",
            type=Joined,
        )

    async def join_consumer(
        self,
        m: str,
        group: str,
        rank: int,
        world_size: int,
        session: str,
        layout: str,
        process: Process,
        ttl: float,
        replace: str = "",
        observer: bool = False,
    ) -> Joined:
        """Takes a rank of a consumer group; the model need not have producers yet. `layout` may be "".

        `observer`: nobody waits for this group, and it does not count as lagging (an export).
        `Joined.world_size` is the group's. A session that takes over a rank holds no version, and the
        round under way fails. Raises `MemberConflict` as `join_producer` does.
        """
        check.rank(rank, world_size)
        await self._redis.add(self._models, check.name("model", m))
        return await self._ask(
            JOIN_CONSUMER,
            m,
            check.name("group", group),
            rank,
            world_size,
            check.token("session", session),
            check.token("layout", layout) if layout else "",
            msgspec.json.encode(process),
            check.ttl("ttl", ttl),
            check.token("replace", replace) if replace else "",
            "1" if observer else "0",
            type=Joined,
        )

    async def set_layout(self, m: str, group: str, rank: int, session: str, layout: str) -> None:
        """Says what a consumer rank needs. Raises `MemberConflict` when the session was replaced."""
        await self._ask(
            SET_LAYOUT,
            m,
            check.name("group", group),
            int(rank),
            check.token("session", session),
            check.token("layout", layout),
            type=bool,
        )

    async def leave(self, m: str, session: str) -> None:
        """A clean goodbye; unknown sessions are no error.

        The memory of a producer goes with it: its versions become freed, open ones abort. A consumer
        that leaves fails the round under way; the last one takes the group with it.
        """
        await self._ask(LEAVE, m, check.token("session", session), type=bool)

    async def heartbeat(
        self,
        m: str,
        session: str,
        ttl: float,
        rounds: Sequence[tuple[str, int]] = (),
        lease_ttl: float = 30.0,
    ) -> Heartbeat:
        """A sign of life: renews the membership, and the leases of `rounds` (group, round), in seconds.

        Never brings anything back: a replaced session hears `member=False`, a lease that ran out is
        `lost`. Name a round from its beginning until the *group* is through, not only this rank.
        """
        answer = await self._ask(
            HEARTBEAT,
            m,
            check.token("session", session),
            check.ttl("ttl", ttl),
            check.ttl("lease_ttl", lease_ttl),
            *(part for g, r in rounds for part in (check.name("group", g), check.count("round", r))),
            type=wire.HeartbeatWire,
        )
        return Heartbeat(answer.member, tuple(answer.lost))

    async def sweep(self, m: str, prune_after_s: float = PRUNE_AFTER_S) -> list[str]:
        """Makes due transitions happen though nobody asks; says what it did, in words.

        Aborts open versions past their deadline, frees retired ones without leases, fails rounds whose
        member died, forgets members that were dead for longer than `prune_after_s` seconds.
        """
        return (
            await self._ask(SWEEP, m, check.ttl("prune_after_s", prune_after_s), type=wire.SweepWire)
        ).done
