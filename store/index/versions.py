"""Versions: opened by all producer ranks, sealed part by part, taken back, announced anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from weightdepot.store.errors import InvalidRequest
from weightdepot.store.index import check, wire
from weightdepot.store.index.asking import Asking
from weightdepot.store.index.records import Grant, Held, Part, Version, Wait
from weightdepot.store.index.scripts_announce import ANNOUNCE, WITHDRAW
from weightdepot.store.index.scripts_versions import ABORT, OPEN_VERSION, REPORT_LOST, SEAL
from weightdepot.store.index.scripts_views import VIEW_VERSION


class Versions(Asking):
    async def version(self, m: str, v: int) -> Version:
        """One version, also a freed or aborted one while it is remembered; `VersionGone` after that."""
        answer = await self._ask(VIEW_VERSION, m, check.version(v), type=wire.VersionWire)
        return answer.record(m)

    async def open_version(
        self,
        m: str,
        version: int,
        rank: int,
        session: str,
        tiling: str,
        incarnation: int,
        seal_timeout: float,
        live: bool = False,
        membership: int | None = None,
    ) -> Grant | Wait:
        """A slot to write `version` into; the same for all ranks of the incarnation, whoever asks first.

        `incarnation` is the one that `tiling` was made for. All parts must be sealed `seal_timeout`
        seconds after the first rank opened. `live`: it is read in place, and takes no slot (slot -1).
        `membership`: the one that `tiling` was made for, where it may have changed since (see `Model`).
        Waits for `ranks`, `open-version`, `lag` (in bounded mode) or `slot`.
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
            "1" if live else "0",
            "" if membership is None else check.count("membership", membership),
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

    async def announce(
        self,
        m: str,
        rank: int,
        world_size: int,
        session: str,
        retention: int,
        held: Sequence[Held],
        highest: int | None,
    ) -> tuple[int, ...]:
        """Parts that are still in the memory of a producer, told to an index that has lost its state.

        A version is ready again once every rank has announced its part of the same attempt, in the same slot;
        what this index knows already stays as it is. `highest` is the least that the next version must be
        above. Returns those of these versions that are ready now. Raises `MemberConflict`, `UnknownModel`.
        """
        arguments: list[str | bytes | int] = []
        for one in held:
            arguments += [
                check.version(one.version), check.token("attempt", one.attempt), int(one.slot),
                check.token("tiling", one.tiling), msgspec.json.encode(one.part), one.digests,
            ]  # fmt: skip
        answer = await self._ask(
            ANNOUNCE,
            m,
            int(rank),
            check.token("session", session),
            int(world_size),
            int(retention),
            "" if highest is None else check.version(highest),
            *arguments,
            type=wire.AnnouncedWire,
        )
        return tuple(answer.ready)

    async def withdraw(self, m: str, version: int, session: str, reason: str) -> Version:
        """A producer takes a version back, whoever reads it: they lose their leases. May be repeated.

        Raises `MemberConflict` when `session` has no part in it, `VersionGone`, `UnknownModel`.
        """
        answer = await self._ask(
            WITHDRAW,
            m,
            check.version(version),
            check.token("session", session),
            check.text(reason),
            type=wire.VersionWire,
        )
        return answer.record(m)
