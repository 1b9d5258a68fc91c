"""Updating: one rollout rank's weights, pulled in place, in step with the other ranks of its group."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from typing_extensions import Self

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, new_session, take_rank
from weightdepot.consumers.pull import Pulled, pull
from weightdepot.consumers.target import LoadWeights, target_of
from weightdepot.store.errors import InvalidRequest, LeaseLost, SourceLost, StaleGroup, WeightDepotError
from weightdepot.store.hosts import this_process
from weightdepot.store.index.records import GroupState, Round
from weightdepot.store.layout import Layout, TensorSpec
from weightdepot.store.planning import Plan
from weightdepot.store.progress import OnProgress, Progress, ignore
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Mapped, Weights


@dataclass(frozen=True)
class Updated:
    """What the last `update` did. Times in seconds, sizes in bytes."""

    version: int
    wait: float
    """For the version, and for the other ranks to begin."""
    pull: float
    """Reading, checking and writing into the parameters."""
    group: float
    """For the other ranks to finish."""
    needed: int
    """What this rank's layout has a place for."""
    moved: int
    """What was read to get it."""
    transports: tuple[str, ...]
    """Those really in use."""


class Consumer:
    """One rank of a rollout engine. All ranks of `group` move to the same version in the same round.

    controller: its URL. model: the name under which versions are published.
    weights: an `nn.Module`, or a mapping of names to tensors; updated in place.
    load_weights: the engine's own loader (it takes an iterable of names and tensors), traced once to find
    where each element goes; None where names and shapes are the checkpoint's.
    group, rank, world_size: the engine, and this rank's place in it; never read from the environment.
    tensors: the checkpoint's tensors, where they are known without asking (else the producers say).
    transport: "auto" (the best that reaches each source), "shm" or "mooncake".
    verify: compare the digest of every tile that arrives with the one that the trainer took.
    optional: parameters that the loader may leave alone.
    on_progress: called with a `Progress` during waits and pulls.

    A context manager. Used by one thread at a time.

    Raises MemberConflict when a living process has this rank or the world sizes disagree, LayoutError for
    weights that cannot be mapped (once the checkpoint is known), ControllerUnavailable when it does not
    answer within `timeouts.join`.
    """

    def __init__(
        self,
        controller: str,
        *,
        model: str,
        weights: Weights,
        load_weights: LoadWeights | None = None,
        group: str = "rollout",
        rank: int = 0,
        world_size: int = 1,
        tensors: Iterable[TensorSpec] | None = None,
        transport: Literal["auto", "shm", "mooncake"] = "auto",
        verify: bool = True,
        optional: Iterable[str] = (),
        run: str = "default",
        timeouts: Timeouts | None = None,
        on_progress: OnProgress = ignore,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise InvalidRequest(
                f"rank {rank} of {world_size}: ranks count from 0 to world_size - 1", model=model
            )
        self.model, self.group, self.rank, self.world_size = model, group, rank, world_size
        self.timeouts = timeouts or Timeouts()
        self._weights, self._load_weights, self._optional = weights, load_weights, frozenset(optional)
        self._verify, self._on_progress = verify, on_progress
        self._target: Mapped | None = None
        self._version: int | None = None
        self._last: Updated | None = None
        self._plans: dict[str, Plan] = {}
        self._busy = threading.Lock()
        self._closed = False
        self._session = new_session()
        if tensors is not None or load_weights is None:
            self._target = target_of(weights, load_weights, tuple(tensors or ()), self._optional)
        with contextlib.ExitStack() as undo:
            self._transports = undo.enter_context(contextlib.closing(Transports(transport)))
            self._client = undo.enter_context(contextlib.closing(ControllerClient(controller, run=run)))
            if self._target is not None:
                self._put_layout(self._target.layout)
            take_rank(
                lambda replace: self._client.join_consumer(
                    model,
                    group,
                    rank=rank,
                    world_size=world_size,
                    session=self._session,
                    layout=self._target.layout.digest if self._target else "",
                    process=this_process(),
                    ttl=self.timeouts.member,
                    replace=replace,
                    timeout=self.timeouts.join,
                ),
                self.timeouts.join,
            )
            self._membership = undo.enter_context(
                contextlib.closing(Membership(self._client, model, self._session, self.timeouts))
            )
            self._undo = undo.pop_all()

    @property
    def version(self) -> int | None:
        """The version that the weights are; None before the first, and after an update that failed while it
        wrote, until a whole version is in."""
        return self._version

    @property
    def last(self) -> Updated | None:
        """What the last successful `update` did."""
        return self._last

    @property
    def layout(self) -> Layout | None:
        """Where the checkpoint's elements go; None until `prepare` (or `update`) has found out."""
        return self._target.layout if self._target else None

    def prepare(self, timeout: float | None = None) -> Layout:
        """Find and register the layout; `update` does it when it was not done before.

        Waits until the producers have said what the checkpoint holds. Versions published after this are cut
        for this rank, so that it moves just what it needs.
        Raises LayoutError naming everything that does not map, WaitTimeout when no producer came.
        """
        if self._target is None:
            self._on_progress(Progress(self.model, "wait", None, 0, 0, "for the producers"))
            limit = self.timeouts.update if timeout is None else timeout
            tensors = self._client.manifest(self.model, timeout=limit)
            target = target_of(self._weights, self._load_weights, tensors, self._optional)
            self._put_layout(target.layout)
            self._client.set_layout(
                self.model,
                self.group,
                rank=self.rank,
                session=self._session,
                layout=target.layout.digest,
                timeout=self.timeouts.call,
            )
            self._target = target
        return self._target.layout

    def update(self, min_version: int | None = None, timeout: float | None = None) -> int:
        """Bring the weights to the newest ready version, in place; the version now held.

        Every rank of the group calls it, and gets the same version. It waits until there is a version (at
        least `min_version`, if given), and until every rank of the group has applied it. When there is
        nothing newer than what the group holds, it returns at once.

        Raises WaitTimeout, SourceLost, LeaseLost, IntegrityError, LayoutError, and StaleGroup when another
        rank failed or did not come: then `version` may be None, the group is marked, and the next `update`
        brings all ranks to a whole version.
        """
        if self._closed:
            raise InvalidRequest(
                f"this consumer of {self.model!r} is closed: make a new one", model=self.model
            )
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest("update was called while another thread is in it", model=self.model)
        try:
            return self._update(min_version, self.timeouts.update if timeout is None else timeout)
        finally:
            self._busy.release()

    def _update(self, min_version: int | None, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        begun = time.perf_counter()
        self.prepare(timeout)
        self._on_progress(Progress(self.model, "wait", min_version, 0, 0, "for a version"))
        turn = self._client.begin_round(
            self.model,
            self.group,
            rank=self.rank,
            session=self._session,
            min_version=min_version or 0,
            lease_ttl=self.timeouts.lease,
            timeout=max(deadline - time.monotonic(), 0.0),
        )
        waited = time.perf_counter()
        done = Pulled(0, 0, ())
        if turn.held != turn.version or self._version != turn.version:
            done = self._move(turn, deadline)
        pulled = time.perf_counter()
        status = self._client.finish_round(
            self.model,
            self.group,
            rank=self.rank,
            session=self._session,
            round=turn.round,
            timeout=max(deadline - time.monotonic(), 0.1),
        )
        if status.state is GroupState.HALF:
            raise StaleGroup(
                f"group {self.group!r} of {self.model!r} did not get to version {turn.version} as a whole: "
                f"{status.error}; call update again on every rank",
                model=self.model,
                group=self.group,
                version=turn.version,
            )
        self._last = Updated(
            turn.version,
            wait=waited - begun,
            pull=pulled - waited,
            group=time.perf_counter() - pulled,
            needed=done.needed,
            moved=done.moved,
            transports=done.transports,
        )
        return turn.version

    def _move(self, turn: Round, deadline: float) -> Pulled:
        """Pull the version of this round into the weights, while its lease is renewed in the background."""
        self._membership.watch(self.group, turn.round)
        try:
            plan = self._plan(turn.tiling, deadline)
            assert self._target is not None
            self._version = None  # from the first byte on the weights are neither the old nor the new
            done = pull(
                turn=turn,
                plan=plan,
                target=self._target,
                digests=self._client.digests(
                    self.model, turn.version, plan.sources, timeout=self.timeouts.call
                )
                if self._verify
                else None,
                transports=self._transports,
                deadline=deadline,
                model=self.model,
                on_progress=self._on_progress,
            )
            if self._membership.lost(self.group, turn.round):
                raise LeaseLost(
                    f"the lease on version {turn.version} of {self.model!r} ran out while it was read "
                    f"(longer than {self.timeouts.lease} s without a renewal): what was read is discarded",
                    model=self.model,
                    version=turn.version,
                    group=self.group,
                    rank=self.rank,
                )
        except BaseException as error:
            self._fail(turn, error)
            raise
        finally:
            self._membership.unwatch(self.group, turn.round)
        self._version = turn.version
        return done

    def _fail(self, turn: Round, error: BaseException) -> None:
        """Tell the group, so that nobody waits for this rank. The first error is what the caller must see."""
        with contextlib.suppress(WeightDepotError):
            if isinstance(error, SourceLost) and isinstance(error.details.get("rank"), int):
                self._client.report_lost(
                    self.model,
                    turn.version,
                    rank=error.details["rank"],
                    reason=str(error),
                    timeout=self.timeouts.call,
                )
        with contextlib.suppress(WeightDepotError):
            self._client.finish_round(
                self.model,
                self.group,
                rank=self.rank,
                session=self._session,
                round=turn.round,
                error=f"{type(error).__name__}: {error}",
                timeout=self.timeouts.call,
            )

    def _plan(self, tiling: str, deadline: float) -> Plan:
        assert self._target is not None
        found = self._plans.get(tiling)
        if found is None:
            found = self._client.plan(
                self.model,
                tiling,
                self._target.layout.digest,
                timeout=max(deadline - time.monotonic(), 0.0),
            )
            while len(self._plans) > 1:
                self._plans.pop(next(iter(self._plans)))
            self._plans[tiling] = found
        return found

    def _put_layout(self, layout: Layout) -> None:
        self._client.put_layout(layout, timeout=self.timeouts.join)

    def close(self) -> None:
        """Leave the group. The weights stay as they are."""
        self._closed = True
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
