"""Rounds: a rank of a group begins one, reads, and finishes it together with the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from weightdepot.api.client.calls import MAX_TEXT, TIMEOUT, Calls
from weightdepot.api.exchange import Deadline
from weightdepot.api.settings import DEFAULT_LEASE_TTL
from weightdepot.store.errors import StaleGroup
from weightdepot.store.index.records import GroupState, Round, RoundStatus, Wait


class _RoundOrWait(msgspec.Struct):
    round: Round | None = None
    wait: Wait | None = None


class RoundCalls(Calls):
    """In the order of an update."""

    def begin_round(
        self,
        model: str,
        group: str,
        *,
        rank: int,
        session: str,
        timeout: float,
        min_version: int = 0,
        version: int | None = None,
        tag: str = "",
        max_lag: int | None = None,
        lease_ttl: float = DEFAULT_LEASE_TTL,
    ) -> Round:
        """What this rank moves to, with a lease on it that heartbeats renew.

        The newest version, `min_version` or above; or exactly `version`, or the one that `tag` points to; or,
        with `max_lag`, what the group holds if that is at most so many versions behind.

        Raises WaitTimeout when no such version is ready in time, VersionGone when it never will be,
        StaleGroup when the group's other ranks are not there, have not finished the round before or want
        another version; MemberConflict when this rank was replaced.
        """
        body = {
            "rank": rank, "session": session, "min_version": min_version, "lease_ttl": lease_ttl,
            "version": version, "tag": tag or None, "max_lag": max_lag,
        }  # fmt: skip
        what = f"a round of group {group!r} of {model!r}"

        def read(content: bytes) -> Round | Wait | None:
            answer = self._http.decode(content, _RoundOrWait)
            return answer.round or answer.wait

        return self._until(f"{self._group(model, group)}/rounds", timeout, what, body, read)

    def stage_round(
        self, model: str, group: str, *, rank: int, session: str, round: int, timeout: float = TIMEOUT
    ) -> None:
        """This rank has read all that it needs. When every rank has, the lease is given back, and the round
        cannot fail any more for want of it. Raises LeaseLost: what was read must be discarded."""
        path = f"{self._round(model, group, round)}/ranks/{rank}/staged"
        self._tell("POST", path, timeout, {"session": session})

    def finish_round(
        self,
        model: str,
        group: str,
        *,
        rank: int,
        session: str,
        round: int,
        timeout: float,
        error: str = "",
        torn: bool = True,
        stats: Mapping[str, Any] | None = None,
        barrier: bool = True,
    ) -> RoundStatus:
        """Report the round applied, or failed (`error`); then wait for the group's other ranks.

        The status may be `half`: its `error` says which rank failed. `torn` False, with an error: nothing
        was written into the weights. `stats`: figures of this update, numbers or short texts by name.
        `barrier` False: do not wait.

        Raises LeaseLost when the lease ran out (what was read must be discarded), StaleGroup naming the
        ranks that are pending when the time is up.
        """
        deadline = Deadline(timeout)
        path = self._round(model, group, round)
        body = {"session": session, "error": error[:MAX_TEXT], "torn": torn, "stats": dict(stats or {})}
        content = self._http.send("POST", f"{path}/ranks/{rank}", deadline, body=body, poll=barrier)
        while True:
            status = self._http.decode(content, RoundStatus)
            if not barrier or status.state is not GroupState.MOVING:
                return status
            if deadline.passed:
                pending = ", ".join(map(str, status.pending))
                raise StaleGroup(
                    f"group {group!r} of {model!r} is half-way to version {status.version}: ranks {pending} "
                    f"have not finished round {round} within {timeout:g} s",
                    model=model, group=group, version=status.version, pending=list(status.pending),
                )  # fmt: skip
            begun = time.monotonic()
            content = self._http.send("GET", path, deadline, poll=True)
            self._breathe(begun, deadline)

    def _round(self, model: str, group: str, round: int) -> str:
        return f"{self._group(model, group)}/rounds/{round}"
