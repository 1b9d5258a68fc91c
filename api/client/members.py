"""Producer ranks and ranks of consumer groups: come, stay alive, go, come back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightdepot.api.client.calls import TIMEOUT, Calls
from weightdepot.api.names import check_name
from weightdepot.api.settings import DEFAULT_LEASE_TTL, DEFAULT_MEMBER_TTL
from weightdepot.store.index.records import Heartbeat, Held, Joined, Process


class _Announced(msgspec.Struct):
    ready: tuple[int, ...]


class MemberCalls(Calls):
    """Every member names itself by a session, which is one start of one process."""

    def join_producer(
        self,
        model: str,
        *,
        rank: int,
        world_size: int,
        session: str,
        layout: str,
        process: Process,
        retention: int = 2,
        ttl: float = DEFAULT_MEMBER_TTL,
        replace: str = "",
        yields: bool = False,
        timeout: float = TIMEOUT,
    ) -> Joined:
        """Take producer rank `rank`. `layout`: the digest of one that was put before.

        Raises MemberConflict with the holder in its details (`session`, `process`, `expires_in`) when a
        living session holds the rank; `replace` names the session that is known to be dead. `yields`: give
        way to any producer that does not.
        """
        body = {
            "rank": rank, "world_size": world_size, "session": session, "layout": layout, "process": process,
            "retention": retention, "ttl": ttl, "replace": replace, "yields": yields,
        }  # fmt: skip
        return self._ask("POST", f"{self._model(model)}/producers", timeout, Joined, body)

    def announce(
        self,
        model: str,
        *,
        rank: int,
        session: str,
        world_size: int,
        retention: int,
        held: Sequence[Held],
        highest: int | None = None,
        timeout: float = TIMEOUT,
    ) -> tuple[int, ...]:
        """Say what is still in this rank's memory, after a join to an index that may have lost its state.

        `held`: its parts as they were sealed; `highest`: the highest version that it knows of. Their
        tilings must be known, see `put_tiling`. Returns which of these versions are ready now: those of which
        every rank has announced its part. May be repeated.
        """
        body = {
            "session": session, "world_size": world_size, "retention": retention, "held": list(held),
            "highest": highest,
        }  # fmt: skip
        path = f"{self._model(model)}/producers/{rank}/announce"
        return self._ask("POST", path, timeout, _Announced, body).ready

    def join_consumer(
        self,
        model: str,
        group: str,
        *,
        rank: int,
        world_size: int,
        session: str,
        process: Process,
        layout: str = "",
        ttl: float = DEFAULT_MEMBER_TTL,
        replace: str = "",
        observer: bool = False,
        timeout: float = TIMEOUT,
    ) -> Joined:
        """Take rank `rank` of a consumer group. The layout may follow, see `set_layout`. `observer`: nobody
        waits for this group, and it does not count as lagging."""
        body = {
            "rank": rank, "world_size": world_size, "session": session, "layout": layout, "process": process,
            "ttl": ttl, "replace": replace, "observer": observer,
        }  # fmt: skip
        return self._ask("POST", f"{self._group(model, group)}/consumers", timeout, Joined, body)

    def set_layout(
        self, model: str, group: str, *, rank: int, session: str, layout: str, timeout: float = TIMEOUT
    ) -> None:
        """Say what a consumer rank needs. Raises MemberConflict when it was replaced."""
        path = f"{self._group(model, group)}/consumers/{rank}/layout"
        self._tell("PUT", path, timeout, {"session": session, "layout": layout})

    def leave(self, model: str, session: str, *, timeout: float = TIMEOUT) -> None:
        """A clean goodbye; a session that is not known (any more) is no error."""
        self._tell("DELETE", self._member(model, session), timeout)

    def heartbeat(
        self,
        model: str,
        session: str,
        *,
        rounds: Sequence[tuple[str, int]] = (),
        ttl: float = DEFAULT_MEMBER_TTL,
        lease_ttl: float = DEFAULT_LEASE_TTL,
        timeout: float = TIMEOUT,
    ) -> Heartbeat:
        """A sign of life. `rounds`: (group, round) whose leases are renewed too, while they still live."""
        body = {
            "ttl": ttl, "lease_ttl": lease_ttl,
            "rounds": [{"group": group, "round": number} for group, number in rounds],
        }  # fmt: skip
        return self._ask("POST", f"{self._member(model, session)}/heartbeat", timeout, Heartbeat, body)

    def _member(self, model: str, session: str) -> str:
        return f"{self._model(model)}/members/{check_name('session', session)}"
