"""Rounds: all ranks of a consumer group move to the same version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weightdepot.store.index import check, wire
from weightdepot.store.index.asking import Asking
from weightdepot.store.index.records import Round, RoundStatus, Wait
from weightdepot.store.index.scripts_consumers import BEGIN_ROUND, FINISH_ROUND, ROUND_STATUS, STAGE_ROUND


class GroupRounds(Asking):
    async def begin_round(
        self,
        m: str,
        group: str,
        rank: int,
        session: str,
        min_version: int,
        lease_ttl: float,
        version: int | None = None,
        max_lag: int | None = None,
        tag: str = "",
    ) -> Round | Wait:
        """What this rank moves to: the same version for every rank of the group in the same round.

        The group's lease on it is taken (or, if it still lives, renewed) for `lease_ttl` seconds.
        That is the newest ready one, or the one that the model is held at. `version` or `tag`: exactly this
        one, also where the model is held or the group holds a newer one. `max_lag`: what the group holds is
        kept while no more than so many newer versions were published.
        Waits for `group` or `version`. Raises `VersionGone` for an exact version that gives no new leases,
        `MemberConflict` (was replaced), `UnknownModel`, and `StaleGroup` when the round under way moves to
        less than `min_version`, or not to the exact version.
        """
        answer = await self._ask_or_wait(
            BEGIN_ROUND,
            m,
            check.name("group", group),
            int(rank),
            check.token("session", session),
            check.version(min_version),
            check.ttl("lease_ttl", lease_ttl),
            "" if version is None else check.version(version),
            "" if max_lag is None else check.count("max_lag", max_lag),
            check.name("tag", tag) if tag else "",
            type=wire.RoundWire,
        )
        return answer if isinstance(answer, Wait) else answer.record(group)

    async def stage_round(self, m: str, group: str, rank: int, session: str, round: int) -> None:
        """This rank has read its version whole, and will put it in place later, without the store.

        When every rank of the group has, the lease goes back, and the round cannot fail through it any more.
        Raises `LeaseLost` when the lease did not hold until now, and as `finish_round` does.
        """
        await self._ask(
            STAGE_ROUND,
            m,
            check.name("group", group),
            int(rank),
            check.token("session", session),
            check.count("round", round),
            type=bool,
        )

    async def finish_round(
        self,
        m: str,
        group: str,
        rank: int,
        session: str,
        round: int,
        error: str = "",
        torn: bool = True,
        stats: Mapping[str, Any] | None = None,
    ) -> RoundStatus:
        """Reports the version applied (`error` ""), or failed: then the rank holds nothing, unless it had
        written nothing (`torn` False). `stats`: figures of this update, shown with the member.

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
            "1" if torn else "0",
            msgspec.json.encode(stats) if stats else "",
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
