"""One rank's part in its group's rounds, as the controller keeps them."""

from __future__ import annotations

import contextlib
import time

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, forgotten
from weightdepot.store.errors import LeaseLost, SourceLost, StaleGroup, UnknownModel, WeightDepotError
from weightdepot.store.index.records import GroupState, Round
from weightdepot.store.timeouts import Timeouts

RETRY = 0.05  # seconds between two looks at a round that another rank is about to give up


class Rounds:
    """Call `begin`, then `watch`, and `finish` or `fail`; `give_up` a round that is not wanted any more.

    From `watch` to `unwatch` (or the end of `finish`) the round's lease is renewed in the background: also
    while slower ranks of the group have not begun to read, for the lease is the whole group's.
    """

    def __init__(
        self,
        client: ControllerClient,
        membership: Membership,
        model: str,
        group: str,
        rank: int,
        session: str,
        timeouts: Timeouts,
    ) -> None:
        self._client, self._membership, self._timeouts = client, membership, timeouts
        self._model, self._group, self._rank, self._session = model, group, rank, session

    def begin(self, min_version: int | None, deadline: float) -> Round:
        """The round that the group is in, or a new one. Raises WaitTimeout, StaleGroup, MemberConflict."""
        while True:
            try:
                return self._client.begin_round(
                    self._model,
                    self._group,
                    rank=self._rank,
                    session=self._session,
                    min_version=min_version or 0,
                    lease_ttl=self._timeouts.lease,
                    timeout=max(deadline - time.monotonic(), 0.0),
                )
            except UnknownModel as error:
                raise forgotten(error, "Make a new Consumer, once the producers are back") from error
            except StaleGroup as error:
                # A round to a version that is too old: the rank that has staged it is about to give it up,
                # for it is asked for the same `min_version`.
                if "min_version" not in error.details or time.monotonic() + RETRY > deadline:
                    raise
                time.sleep(RETRY)

    def watch(self, turn: Round) -> None:
        self._membership.watch(self._group, turn.round)

    def unwatch(self, turn: Round) -> None:
        self._membership.unwatch(self._group, turn.round)

    def check_lease(self, turn: Round) -> None:
        """Raises LeaseLost."""
        if self._membership.lost(self._group, turn.round):
            raise LeaseLost(
                f"the lease on version {turn.version} of {self._model!r} ran out while it was read "
                f"(longer than {self._timeouts.lease} s without a renewal): what was read is discarded",
                model=self._model,
                version=turn.version,
                group=self._group,
                rank=self._rank,
            )

    def goes_on(self, turn: Round) -> bool:
        """Whether a watched round is still under way: no rank failed in it, and its lease lives."""
        if self._membership.lost(self._group, turn.round):
            return False
        group = self._client.group(self._model, self._group, timeout=self._timeouts.call)
        return group.state is GroupState.MOVING and group.round == turn.round

    def finish(self, turn: Round, deadline: float) -> None:
        """Report the version applied, and wait for the other ranks. Raises StaleGroup, LeaseLost."""
        try:
            status = self._client.finish_round(
                self._model,
                self._group,
                rank=self._rank,
                session=self._session,
                round=turn.round,
                timeout=max(deadline - time.monotonic(), 0.1),
            )
        finally:
            self.unwatch(turn)
        if status.state is GroupState.HALF:
            raise StaleGroup(
                f"group {self._group!r} of {self._model!r} did not get to version {turn.version} as a whole: "
                f"{status.error}; call update again on every rank",
                model=self._model,
                group=self._group,
                version=turn.version,
            )

    def fail(self, turn: Round, error: BaseException) -> None:
        """Tell the group, so that nobody waits for this rank. The first error is what the caller must see."""
        with contextlib.suppress(WeightDepotError):
            if isinstance(error, SourceLost) and isinstance(error.details.get("rank"), int):
                self._client.report_lost(
                    self._model,
                    turn.version,
                    rank=error.details["rank"],
                    reason=str(error),
                    timeout=self._timeouts.call,
                )
        self.give_up(turn, f"{type(error).__name__}: {error}")

    def give_up(self, turn: Round, reason: str) -> None:
        self.unwatch(turn)
        with contextlib.suppress(WeightDepotError):
            self._client.finish_round(
                self._model,
                self._group,
                rank=self._rank,
                session=self._session,
                round=turn.round,
                error=reason,
                timeout=self._timeouts.call,
            )
