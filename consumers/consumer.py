"""Updating: one rollout rank's weights, pulled in place, in step with the other ranks of its group."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

import torch
from torch import nn
from typing_extensions import Self, TypeIs

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, check_rank, new_session, take_rank
from weightdepot.consumers.prefetch import Prefetching, Wanted
from weightdepot.consumers.pull import Pulled, pull
from weightdepot.consumers.rounds import Rounds
from weightdepot.consumers.staging import Staging
from weightdepot.consumers.target import LoadWeights, target_of
from weightdepot.store.errors import InvalidRequest, StaleGroup, WaitTimeout, WeightDepotError
from weightdepot.store.hosts import this_process
from weightdepot.store.index.records import Round
from weightdepot.store.layout import Layout, TensorSpec
from weightdepot.store.planning import Plan
from weightdepot.store.progress import OnProgress, Progress, ignore
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Mapped, Weights

Install = Callable[[Mapping[str, torch.Tensor]], None]
Tracer = Callable[[Sequence[TensorSpec]], Mapped]


@dataclass(frozen=True)
class Updated:
    """What the last `update` did. Times in seconds, sizes in bytes."""

    version: int
    wait: float
    """For the version, and for the other ranks to begin; for a prefetch that was under way."""
    pull: float
    """Reading, checking and writing into the parameters; 0 for what was prefetched."""
    place: float
    """Copying from staging memory into the parameters; 0 where it was read straight into them."""
    group: float
    """For the other ranks to finish."""
    needed: int
    """What this rank's layout has a place for."""
    moved: int
    """What was read to get it."""
    transports: tuple[str, ...]
    """Those really in use."""
    prefetched: bool = False
    """Whether it was read in the background."""


@dataclass(frozen=True)
class _Claim:
    """A round that this rank has begun and not finished."""

    turn: Round
    done: Pulled
    pull: float = 0.0
    staged: bool = False
    prefetched: bool = False


class Consumer:
    """One rank of a rollout engine. All ranks of `group` move to the same version in the same round.

    controller: its URL. model: the name under which versions are published.
    weights: an `nn.Module`, or a mapping of names to tensors; updated in place. Adapters give a function that
    makes a `Mapped` of the checkpoint's tensors, once they are known.
    load_weights: the engine's own loader (it takes an iterable of names and tensors), traced once to find
    where each element goes; None where names and shapes are the checkpoint's.
    group, rank, world_size: the engine, and this rank's place in it; never read from the environment.
    tensors: the checkpoint's tensors, where they are known without asking (else the producers say).
    transport: "auto" (the best that reaches each source), "shm" or "mooncake".
    verify: compare the digest of every tile that arrives with the one that the trainer took.
    optional: parameters that the loader may leave alone.
    install: how new weights are put in place, where that is more than a copy: it is given the staged buffers
    by name, which it must not keep. Every update then goes through staging memory.
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
        weights: Weights | Tracer,
        load_weights: LoadWeights | None = None,
        group: str = "rollout",
        rank: int = 0,
        world_size: int = 1,
        tensors: Iterable[TensorSpec] | None = None,
        transport: Literal["auto", "shm", "mooncake"] = "auto",
        verify: bool = True,
        optional: Iterable[str] = (),
        install: Install | None = None,
        run: str = "default",
        timeouts: Timeouts | None = None,
        on_progress: OnProgress = ignore,
    ) -> None:
        check_rank(model, rank, world_size)
        self.model, self.group, self.rank, self.world_size = model, group, rank, world_size
        self.timeouts = timeouts or Timeouts()
        self._weights, self._load_weights, self._optional = weights, load_weights, frozenset(optional)
        self._verify, self._on_progress, self._install = verify, on_progress, install
        self._target: Mapped | None = None
        self._version: int | None = None
        self._last: Updated | None = None
        self._plans: dict[str, Plan] = {}
        self._busy = threading.Lock()  # one `update` at a time
        self._working = threading.Lock()  # held by whoever, `update` or a prefetch, is in a round
        self._preparing = threading.Lock()
        self._claim: _Claim | None = None
        self._staged: int | None = None
        self._staging: Staging | None = None
        self._prefetching = Prefetching(
            f"weightdepot-prefetch-{model}", self._listen, self._prefetch, self._working
        )
        self._closed = False
        self._pid = os.getpid()
        self._session = new_session()
        if tensors is not None:
            self._target = self._trace(tuple(tensors))
        elif load_weights is None and not _is_tracer(weights):
            self._target = self._trace(())
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
            self._rounds = Rounds(
                self._client, self._membership, model, group, rank, self._session, self.timeouts
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
    def staged(self) -> int | None:
        """The version that a prefetch has staged, or is reading."""
        return self._staged

    def newest(self) -> int | None:
        """The newest ready version that there is now."""
        return self._client.model(self.model, timeout=self.timeouts.call).latest

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
        with self._preparing:
            if self._target is None:
                self._on_progress(Progress(self.model, "wait", None, 0, 0, "for the producers"))
                limit = self.timeouts.update if timeout is None else timeout
                tensors = self._client.manifest(self.model, timeout=limit)
                target = self._trace(tensors)
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

    def _trace(self, tensors: Sequence[TensorSpec]) -> Mapped:
        weights = self._weights
        if _is_tracer(weights):
            return weights(tensors)
        return target_of(weights, self._load_weights, tensors, self._optional)

    def update(self, min_version: int | None = None, timeout: float | None = None) -> int:
        """Bring the weights to the newest ready version, in place; the version now held.

        Every rank of the group calls it, and gets the same version. It waits until there is a version (at
        least `min_version`, if given), and until every rank of the group has applied it. When there is
        nothing newer than what the group holds, it returns at once. What a prefetch has brought is taken,
        unless it is older than `min_version`.

        Raises WaitTimeout, SourceLost, LeaseLost, IntegrityError, LayoutError, and StaleGroup when another
        rank failed or did not come: then `version` may be None, the group is marked, and the next `update`
        brings all ranks to a whole version.
        """
        self._check_open()
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest("update was called while another thread is in it", model=self.model)
        try:
            return self._update(min_version, self._patience(timeout))
        finally:
            self._busy.release()

    def prefetch(self, min_version: int | None = None, timeout: float | None = None) -> Future[int]:
        """Read the next version into staging memory, in the background, while the weights serve; returns at
        once. `apply` puts it in place.

        It waits until there is a version that is newer than the one held (at least `min_version`, if given);
        `timeout` bounds this wait, None: until there is one. The future's result is the version that is
        staged; it raises what `update` raises, and the weights are then as they were, and the next `apply`
        reads for itself. At most one version is staged: a prefetch that is under way, or whose version was
        not applied yet, is returned again. `update` and `apply` end one that still waits.

        The round of this version begins here: its lease keeps the version in the store until every rank of
        the group has called `apply` (or `update`), which each must do.
        """
        self._check_open()
        newer = 0 if self._version is None else self._version + 1
        return self._prefetching.ask(max(min_version or 0, newer), timeout)

    def apply(self, timeout: float | None = None) -> int:
        """Put in place what `prefetch` has staged, at a safe point; the version now held.

        Every rank of the group calls it. It is `update`: what no prefetch has brought is read now, and a
        prefetch that is reading is waited for.
        """
        return self.update(timeout=timeout)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidRequest(
                f"this consumer of {self.model!r} belongs to the process that made it, not to its children: "
                f"make one after the fork",
                model=self.model,
            )
        if self._closed:
            raise InvalidRequest(
                f"this consumer of {self.model!r} is closed: make a new one", model=self.model
            )

    def _patience(self, timeout: float | None) -> float:
        limit = self.timeouts.update if timeout is None else timeout
        if not isinstance(limit, int | float) or not math.isfinite(limit) or limit < 0:
            raise InvalidRequest(f"timeout={limit!r}: a number of seconds, 0 or more", model=self.model)
        return limit

    def _listen(self, version: int, timeout: float) -> None:
        self.prepare(timeout)
        self._client.latest(self.model, min_version=version, timeout=timeout)

    def _prefetch(self, wanted: Wanted) -> int:
        deadline = min(wanted.deadline, time.monotonic() + self.timeouts.update)
        turn = self._rounds.begin(None, deadline)  # what the group is in: another rank may have begun
        self._staged = turn.version
        try:
            self._claim = replace(self._stage(turn, deadline), prefetched=True)
        except BaseException:
            self._staged = None
            raise
        return turn.version

    def _update(self, min_version: int | None, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        begun = time.perf_counter()
        self._prefetching.end()
        if not self._working.acquire(timeout=timeout):
            raise WaitTimeout(
                f"waited {timeout:g} s for the prefetch of {self.model!r} that is under way", model=self.model
            )
        try:
            self.prepare(max(deadline - time.monotonic(), 0.0))
            claim = self._take_staged(min_version)
            if claim is None:
                self._on_progress(Progress(self.model, "wait", min_version, 0, 0, "for a version"))
                turn = self._rounds.begin(min_version, deadline)
                wait = time.perf_counter() - begun
                claim = self._read(turn, deadline)
            else:
                wait = time.perf_counter() - begun
            place = self._place(claim)
            placed = time.perf_counter()
            try:
                self._rounds.finish(claim.turn, deadline)
            except StaleGroup:
                raise  # another rank's failure: what this rank holds is whole, and was accepted
            except WeightDepotError:
                # Nobody has confirmed that the lease lived while this rank was reading: the memory may have
                # been written again meanwhile.
                if self._moves(claim.turn) or claim.done.moved:
                    self._version = None
                raise
        finally:
            self._working.release()
        self._last = Updated(
            claim.turn.version,
            wait=wait,
            pull=0.0 if claim.prefetched else claim.pull,
            place=place,
            group=time.perf_counter() - placed,
            needed=claim.done.needed,
            moved=claim.done.moved,
            transports=claim.done.transports,
            prefetched=claim.prefetched,
        )
        return claim.turn.version

    def _take_staged(self, min_version: int | None) -> _Claim | None:
        """What a prefetch has staged, if it will do and the group's round is still under way."""
        claim = self._claim
        if claim is None:
            return None
        turn = claim.turn
        fits = turn.version >= (min_version or 0)
        if fits and claim.staged and not self._rounds.goes_on(turn):
            # Another rank failed or the lease ran out: nothing was written yet, and a new round is begun.
            self._rounds.unwatch(turn)
            claim = None
        elif not fits:
            self._rounds.give_up(
                turn, f"version {min_version} or newer was asked for, {turn.version} was staged"
            )
            claim = None
        self._claim = self._staged = None
        return claim

    def _moves(self, turn: Round) -> bool:
        return turn.held != turn.version or self._version != turn.version

    def _read(self, turn: Round, deadline: float) -> _Claim:
        """Pull the version of this round: into staging memory where it is installed from there, else straight
        into the weights."""
        if self._install is not None:
            return self._stage(turn, deadline)
        if not self._moves(turn):
            return _Claim(turn, Pulled(0, 0, ()))
        assert self._target is not None
        begun = time.perf_counter()
        done = self._pull(turn, self._target, deadline, writes=True)
        self._version = turn.version
        return _Claim(turn, done, time.perf_counter() - begun)

    def _stage(self, turn: Round, deadline: float) -> _Claim:
        """Pull the version of this round into staging memory. Its lease is renewed until it is placed."""
        if not self._moves(turn):
            return _Claim(turn, Pulled(0, 0, ()))
        assert self._target is not None
        begun = time.perf_counter()
        if self._staging is None:
            self._staging = Staging(self._target.layout)
        buffers = self._staging.buffers
        done = self._pull(turn, Mapped(self._target.layout, lambda: buffers), deadline, writes=False)
        return _Claim(turn, done, time.perf_counter() - begun, staged=True)

    def _pull(self, turn: Round, target: Mapped, deadline: float, writes: bool) -> Pulled:
        """Read and check. The lease is renewed in the background from here on."""
        self._rounds.watch(turn)
        try:
            plan = self._plan(turn.tiling, deadline)
            digests = None
            if self._verify:
                digests = self._client.digests(
                    self.model, turn.version, plan.sources, timeout=self.timeouts.call
                )
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"no time is left to read version {turn.version} of {self.model!r}: nothing was written",
                    model=self.model,
                    version=turn.version,
                )
            if writes:
                self._version = None  # from the first byte on the weights are neither the old nor the new
            done = pull(
                turn=turn,
                plan=plan,
                target=target,
                digests=digests,
                transports=self._transports,
                deadline=deadline,
                model=self.model,
                on_progress=self._on_progress,
            )
            self._rounds.check_lease(turn)
        except BaseException as error:
            self._rounds.fail(turn, error)
            raise
        return done

    def _place(self, claim: _Claim) -> float:
        """Put in place what is staged; the seconds that it took."""
        if not claim.staged:
            return 0.0
        assert self._staging is not None
        assert self._target is not None
        begun = time.perf_counter()
        self._version = None
        try:
            if self._install is not None:
                self._install(self._staging.buffers)
            else:
                self._staging.place(self._target.buffers())
                self._target.finish()
        except BaseException as error:
            self._rounds.fail(claim.turn, error)
            raise
        self._version = claim.turn.version
        return time.perf_counter() - begun

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
        """Leave the group. The weights stay as they are; what is staged is let go."""
        if os.getpid() != self._pid:
            return  # a child's copy: the rank is the parent's
        self._closed = True
        self._prefetching.end()
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_tracer(weights: Weights | Tracer) -> TypeIs[Tracer]:
    return callable(weights) and not isinstance(weights, nn.Module)
