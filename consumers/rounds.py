"""One rank's part in its group's rounds, as the controller keeps them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, forgotten
from weightdepot.store.errors import (
    InvalidRequest,
    LeaseLost,
    MemberConflict,
    SourceLost,
    StaleGroup,
    UnknownModel,
    WeightDepotError,
)
from weightdepot.store.index.records import GroupState, Round
from weightdepot.store.timeouts import Timeouts

RETRY = 0.05  # seconds between two looks at a round that another rank is about to give up


@dataclass(frozen=True)
class Ask:
    """Which version a rank wants: the current one, unless this says more."""

    min_version: int = 0
    """Not an older one."""
    version: int | None = None
    """Exactly this one."""
    tag: str = ""
    """Exactly that which this name points to."""
    max_lag: int | None = None
    """None at all, when what the group holds is at most so many published versions behind."""

    @classmethod
    def of(cls, min_version: int | None, version: int | str | None, max_lag: int | None) -> Ask:
        """Raises InvalidRequest for what makes no sense, alone or together."""
        numbers = {"min_version": min_version, "max_lag": max_lag}
        if not isinstance(version, str):
            numbers["version"] = version
        for name, value in numbers.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise InvalidRequest(f"{name}={value!r}: a whole number, 0 or more")
        if version is not None and (min_version is not None or max_lag is not None):
            raise InvalidRequest("version asks for exactly that one: leave min_version and max_lag out")
        if version == "":
            raise InvalidRequest("version='' is no tag")
        return cls(
            min_version or 0,
            version if isinstance(version, int) else None,
            version if isinstance(version, str) else "",
            max_lag,
        )

    @property
    def least(self) -> int:
        """No version below this one will do."""
        return self.min_version if self.version is None else self.version

    def __str__(self) -> str:
        if self.version is not None:
            return f"version {self.version}"
        if self.tag:
            return f"the version tagged {self.tag!r}"
        return f"version {self.min_version} or newer" if self.min_version else "the newest version"


class Rounds:
    """Call `begin`, then `watch`, then perhaps `stage`, and `finish` or `fail`; `give_up` a round that is not
    wanted any more. One round at a time.

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
        timeouts: Timeouts,
    ) -> None:
        self._client, self._membership, self._timeouts = client, membership, timeouts
        self._model, self._group, self._rank = model, group, rank
        self._session = membership.session  # of the round under way: a later one is not in it

    def begin(self, ask: Ask, deadline: float) -> Round:
        """The round that the group is in, or a new one.

        Raises WaitTimeout, StaleGroup, MemberConflict, VersionGone for an exact version that is gone.
        """
        while True:
            try:
                return self._membership.asking(lambda session: self._begin(ask, session, deadline), deadline)
            except UnknownModel as error:
                raise forgotten(error, "Make a new Consumer, once the producers are back") from error
            except StaleGroup as error:
                # A round to a version that will not do: the rank that has staged it is about to give it up,
                # for it is asked for the same.
                unfit = {"min_version", "wanted"} & error.details.keys()
                if not unfit or time.monotonic() + RETRY > deadline:
                    raise
                time.sleep(RETRY)

    def _begin(self, ask: Ask, session: str, deadline: float) -> Round:
        self._session = session
        return self._client.begin_round(
            self._model,
            self._group,
            rank=self._rank,
            session=session,
            min_version=ask.min_version,
            version=ask.version,
            tag=ask.tag,
            max_lag=ask.max_lag,
            lease_ttl=self._timeouts.lease,
            timeout=max(deadline - time.monotonic(), 0.0),
        )

    def begun_in_vain(self, error: WeightDepotError, deadline: float) -> bool:
        """Whether a round failed since the controller has lost its state, or has ended this rank's claim, and
        this rank has joined anew."""
        refusal = error.__cause__ or error  # what the controller said itself
        if isinstance(refusal, UnknownModel | MemberConflict):
            self._membership.renew(self._session, deadline - time.monotonic())
        return self._forgotten() and time.monotonic() < deadline

    def watch(self, turn: Round) -> None:
        self._membership.watch(self._group, turn.round)

    def unwatch(self, turn: Round) -> None:
        self._membership.unwatch(self._group, turn.round)

    def check_lease(self, turn: Round) -> None:
        """Raises LeaseLost."""
        if self._forgotten() or self._membership.lost(self._group, turn.round):
            raise LeaseLost(
                f"the lease on version {turn.version} of {self._model!r} ran out while it was read "
                f"(longer than {self._timeouts.lease} s without a renewal): what was read is discarded",
                model=self._model,
                version=turn.version,
                group=self._group,
                rank=self._rank,
            )

    def stage(self, turn: Round) -> None:
        """Say that this rank has read all that it needs: when all have, the lease is given back. The
        controller has then confirmed that the lease lived. Raises LeaseLost."""
        with self._told_when_forgotten(turn, confirmed=False):
            self._client.stage_round(
                self._model,
                self._group,
                rank=self._rank,
                session=self._session,
                round=turn.round,
                timeout=self._timeouts.call,
            )

    def goes_on(self, turn: Round, *, ask_controller: bool) -> bool:
        """Whether a round in which this rank has staged is still under way: no rank failed in it.

        ask_controller: False for a rank alone, in whose round no other can fail: what the heartbeats have
        brought is enough, and the weights stand still for one call less."""
        if self._forgotten():
            return False
        if not ask_controller:
            return True
        try:
            group = self._client.group(self._model, self._group, timeout=self._timeouts.call)
        except UnknownModel:
            return False  # the controller has lost its state
        return group.state is GroupState.MOVING and group.round == turn.round

    def finish(self, turn: Round, deadline: float, *, confirmed: bool, stats: Mapping[str, Any]) -> None:
        """Report the version applied, and wait for the other ranks. Raises StaleGroup, LeaseLost.

        confirmed: whether the controller has said (`stage`) that what was read is good.
        """
        try:
            with self._told_when_forgotten(turn, confirmed=confirmed):
                status = self._client.finish_round(
                    self._model,
                    self._group,
                    rank=self._rank,
                    session=self._session,
                    round=turn.round,
                    stats=dict(stats),
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

    def fail(self, turn: Round, error: BaseException, *, torn: bool) -> None:
        """Tell the group, so that nobody waits for this rank. The first error is what the caller must see.

        torn: whether anything was written into the weights.
        """
        with contextlib.suppress(WeightDepotError):
            if isinstance(error, SourceLost) and isinstance(error.details.get("rank"), int):
                self._client.report_lost(
                    self._model,
                    turn.version,
                    rank=error.details["rank"],
                    reason=str(error),
                    timeout=self._timeouts.call,
                )
        self.give_up(turn, f"{type(error).__name__}: {error}", torn=torn)

    def give_up(self, turn: Round, reason: str, *, torn: bool) -> None:
        self.unwatch(turn)
        with contextlib.suppress(WeightDepotError):
            self._client.finish_round(
                self._model,
                self._group,
                rank=self._rank,
                session=self._session,
                round=turn.round,
                error=reason,
                torn=torn,
                timeout=self._timeouts.call,
            )

    def _forgotten(self) -> bool:
        """Whether this rank has joined anew since the round began."""
        return self._membership.session != self._session

    @contextlib.contextmanager
    def _told_when_forgotten(self, turn: Round, *, confirmed: bool) -> Iterator[None]:
        """Say what it means when the controller does not know the round any more, having lost its state."""
        try:
            yield
        except (UnknownModel, MemberConflict, InvalidRequest) as error:
            if not isinstance(error, UnknownModel) and not self._forgotten():
                raise
            known = "whether the others have it is not known" if confirmed else "what was read is discarded"
            raise (StaleGroup if confirmed else LeaseLost)(
                f"the controller has lost its state while group {self._group!r} of {self._model!r} was on "
                f"its way to version {turn.version}: {known}; call update again on every rank",
                model=self._model,
                version=turn.version,
                group=self._group,
                rank=self._rank,
            ) from error
