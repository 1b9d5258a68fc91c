"""The index: what is where, who is alive, which version is whole. The one place that knows Redis' keys.

Every transition is one Lua script, so that any number of controllers may call at once and any of them
may die between two calls. Nothing here waits: a method answers a value, or `Wait` (which says what to
wait for), or raises. Waiting is the business of who can be woken: see `events`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TypeVar

import msgspec

from weightdepot.store.errors import InvalidRequest
from weightdepot.store.index import check, wire
from weightdepot.store.index.connection import Connection
from weightdepot.store.index.records import (
    Event,
    Grant,
    Group,
    Heartbeat,
    Joined,
    Model,
    Part,
    Process,
    Round,
    RoundStatus,
    Version,
    Wait,
)
from weightdepot.store.index.scripts_consumers import BEGIN_ROUND, FINISH_ROUND, JOIN_CONSUMER, ROUND_STATUS
from weightdepot.store.index.scripts_members import HEARTBEAT, JOIN_PRODUCER, LEAVE, SET_LAYOUT, SWEEP
from weightdepot.store.index.scripts_versions import ABORT, OPEN_VERSION, REPORT_LOST, SEAL
from weightdepot.store.index.scripts_views import VIEW_GROUP, VIEW_GROUPS, VIEW_MODEL, VIEW_VERSION

T = TypeVar("T")

PRUNE_AFTER_S = 3600.0  # members that were dead for longer are forgotten by `sweep`


class Index:
    """The index of one run. Safe for concurrent use within one event loop.

    Order of calls. A producer rank: `join_producer`, then for each version `open_version` (again, while
    it answers `Wait`) and `seal` or `abort`; `leave` at the end. A consumer rank: `join_consumer`,
    `set_layout` where it joined without one, then for each update `begin_round` and `finish_round`, and
    `round_status` until the group is whole; `leave` at the end. Both call `heartbeat` all the while.
    The controller calls `sweep` now and then.

    All methods raise `IndexUnavailable` when Redis does not answer (in time), and `InvalidRequest` for
    arguments that can never work. A call that raised `IndexUnavailable` may or may not have happened:
    repeat it, all of them may be repeated.
    """

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

    # -- what there is -------------------------------------------------------------------------------

    async def models(self) -> list[str]:
        """Names of all models that somebody registered in this run, sorted."""
        return await self._redis.members(self._models)

    async def model(self, m: str) -> Model:
        """Producers, and the versions that still matter. Raises `UnknownModel`."""
        return (await self._ask(VIEW_MODEL, m, type=wire.ModelWire)).record(m)

    async def version(self, m: str, v: int) -> Version:
        """One version, also a freed or aborted one while it is remembered; `VersionGone` after that."""
        answer = await self._ask(VIEW_VERSION, m, check.version(v), type=wire.VersionWire)
        return answer.record(m)

    async def groups(self, m: str) -> list[Group]:
        """All consumer groups, sorted by name. Raises `UnknownModel`."""
        answer = await self._ask(VIEW_GROUPS, m, type=wire.GroupsWire)
        return sorted((g.record(m) for g in answer.groups), key=lambda g: g.group)

    async def group(self, m: str, group: str) -> Group:
        """One consumer group. Raises `UnknownModel` where there is no such model or group."""
        answer = await self._ask(VIEW_GROUP, m, check.name("group", group), type=wire.GroupWire)
        return answer.record(m)

    # -- members -------------------------------------------------------------------------------------

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
    ) -> Joined:
        """Takes a producer rank. The same session may join again: nothing changes but its time to live.

        `retention` is the number of slots that every rank has, at least 2. `ttl` in seconds.
        A rank whose holder is dead, or is named in `replace`, gets a new incarnation: open versions
        abort, ready ones stay.

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
    ) -> Joined:
        """Takes a rank of a consumer group; the model need not have producers yet. `layout` may be "".

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

    # -- versions ------------------------------------------------------------------------------------

    async def open_version(
        self,
        m: str,
        version: int,
        rank: int,
        session: str,
        tiling: str,
        incarnation: int,
        seal_timeout: float,
    ) -> Grant | Wait:
        """A slot to write `version` into; the same for all ranks of the incarnation, whoever asks first.

        `incarnation` is the one that `tiling` was made for. All parts must be sealed `seal_timeout`
        seconds after the first rank opened. Waits for `ranks`, `open-version` or `slot`.
        Raises `MemberConflict` (was replaced), `VersionNotNewer`, `UnknownModel`.
        """
        return await self._ask_or_wait(
            OPEN_VERSION,
            m,
            check.version(version),
            int(rank),
            check.token("session", session),
            check.token("tiling", tiling),
            int(incarnation),
            check.ttl("seal_timeout", seal_timeout),
            type=Grant,
        )

    async def seal(
        self, m: str, version: int, rank: int, session: str, part: Part, digests: bytes
    ) -> Version:
        """Declares a part complete; the last one makes the version ready, in the same step.

        `digests` are the rank's tile digests, in the order of its tile table. Raises `PublishAborted`
        when the version is not open (any more), `MemberConflict` when another session is expected,
        `VersionNotNewer` when this rank sealed other bytes before, `VersionGone`, `UnknownModel`.
        """
        if part.rank != rank or part.session != session:
            raise InvalidRequest(
                f"the part of version {version} of model {m} is of rank {part.rank} and session"
                f" {part.session}, sealed by rank {rank} and session {session}"
            )
        if part.nbytes < 0:
            raise InvalidRequest(f"the part of rank {rank} of version {version} has {part.nbytes} bytes")
        answer = await self._ask(
            SEAL,
            m,
            check.version(version),
            int(rank),
            check.token("session", session),
            msgspec.json.encode(part),
            check.token("digests", part.digests),
            check.count("nbytes", part.nbytes),
            bytes(digests),
            type=wire.VersionWire,
        )
        return answer.record(m)

    async def abort(self, m: str, version: int, session: str, reason: str) -> Version:
        """Gives an open version up; returns what the version is now (a ready one stays ready).

        Raises `MemberConflict` when `session` has no part in it, `VersionGone`, `UnknownModel`.
        """
        answer = await self._ask(
            ABORT,
            m,
            check.version(version),
            check.token("session", session),
            check.text(reason),
            type=wire.VersionWire,
        )
        return answer.record(m)

    async def digests(self, m: str, version: int, ranks: Iterable[int]) -> dict[int, bytes]:
        """The tile digests that `ranks` sealed. Raises `VersionGone` when they are not there (any more)."""
        wanted = sorted({check.count("rank", r) for r in ranks})
        check.version(version)
        found = await self._redis.fields(f"{self._prefix(m)}digests:{version}", wanted)
        missing = [r for r in wanted if r not in found]
        if missing:
            known = await self.version(m, version)  # raises what is more to the point
            raise wire.no_digests(known, missing)
        return found

    async def report_lost(self, m: str, version: int, rank: int, reason: str) -> Version:
        """A reader could not reach a source. Frees the version if that source is indeed gone.

        That is: if the session that sealed the rank's part is no longer alive, or was replaced.
        Returns what the version is now. Raises `VersionGone`, `UnknownModel`.
        """
        answer = await self._ask(
            REPORT_LOST,
            m,
            check.version(version),
            check.count("rank", rank),
            check.text(reason),
            type=wire.VersionWire,
        )
        return answer.record(m)

    # -- rounds --------------------------------------------------------------------------------------

    async def begin_round(
        self, m: str, group: str, rank: int, session: str, min_version: int, lease_ttl: float
    ) -> Round | Wait:
        """What this rank moves to: the same version for every rank of the group in the same round.

        The group's lease on it is taken (or, if it still lives, renewed) for `lease_ttl` seconds.
        Waits for `group` or `version`. Raises `MemberConflict` (was replaced), `UnknownModel`, and
        `StaleGroup` when the round under way moves to less than `min_version`.
        """
        answer = await self._ask_or_wait(
            BEGIN_ROUND,
            m,
            check.name("group", group),
            int(rank),
            check.token("session", session),
            check.version(min_version),
            check.ttl("lease_ttl", lease_ttl),
            type=wire.RoundWire,
        )
        return answer if isinstance(answer, Wait) else answer.record(group)

    async def finish_round(
        self, m: str, group: str, rank: int, session: str, round: int, error: str = ""
    ) -> RoundStatus:
        """Reports the version applied (`error` ""), or failed: then the rank holds nothing.

        Raises `LeaseLost` when the lease did not hold to the end (what was read must be discarded; the
        rank holds nothing), `MemberConflict` (was replaced), `InvalidRequest` for a round that this rank
        has not begun or has given up by beginning another, `UnknownModel`.
        """
        answer = await self._ask(
            FINISH_ROUND,
            m,
            check.name("group", group),
            int(rank),
            check.token("session", session),
            check.count("round", round),
            check.text(error),
            type=wire.RoundStatusWire,
        )
        return answer.record()

    async def round_status(self, m: str, group: str, round: int) -> RoundStatus:
        """How a round stands; the last 64 are remembered. Raises `InvalidRequest`, `UnknownModel`."""
        answer = await self._ask(
            ROUND_STATUS,
            m,
            check.name("group", group),
            check.count("round", round),
            type=wire.RoundStatusWire,
        )
        return answer.record()

    # -- how scripts are asked -----------------------------------------------------------------------

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
