"""Updating: one rollout rank's weights, pulled in place, in step with the other ranks of its group."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Literal

from torch import nn
from typing_extensions import Self, TypeIs

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, check_rank
from weightdepot.consumers.generation import Generation, Serving
from weightdepot.consumers.hooks import Hook, Hooks, nothing
from weightdepot.consumers.prefetch import Prefetching, Wanted
from weightdepot.consumers.rounds import Ask, Rounds
from weightdepot.consumers.seat import Seat
from weightdepot.consumers.target import LoadWeights, target_of
from weightdepot.consumers.updating import Claim, Install, Updated, Updating
from weightdepot.store.errors import InvalidRequest, WaitTimeout, WeightDepotError
from weightdepot.store.index.records import Group, VersionState
from weightdepot.store.layout import Layout, TensorSpec
from weightdepot.store.progress import OnProgress, Progress, ignore
from weightdepot.store.spans import Span, span
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Mapped, Weights

Tracer = Callable[[Sequence[TensorSpec]], Mapped]

# states of a version that was published: it counts towards the lag of those that hold an older one
PUBLISHED = (VersionState.READY, VersionState.RETIRED, VersionState.FREED)


class Consumer:
    """One rank of a rollout engine. All ranks of `group` move to the same version in the same round.

    controller: its URL, or those of several, separated by commas.
    model: the name under which versions are published.
    weights: an `nn.Module`, or a mapping of names to tensors; updated in place. Adapters give a function that
    makes a `Mapped` of the checkpoint's tensors, once they are known.
    load_weights: the engine's own loader (it takes an iterable of names and tensors), traced once to find
    where each element goes; None where names and shapes are the checkpoint's.
    group, rank, world_size: the engine, and this rank's place in it; never read from the environment.
    tensors: the checkpoint's tensors, where they are known without asking (else the producers say).
    transport: "auto" (the best that reaches each source), "shm", "tcp" or "mooncake".
    verify: compare the digest of every tile that arrives with the one that the trainer took.
    optional: parameters that the loader may leave alone.
    install: how new weights are put in place, where that is more than a copy: it is given the staged buffers
    by name, which it must not keep. Every update then goes through staging memory.
    before_write, before_serve, after_serve: called with the version, see `Hooks`.
    token, ca: for a controller that asks for a token, and whose certificate these authorities signed.
    on_progress: called with a `Progress` during waits and pulls.

    A context manager. `update`, `prefetch` and `apply` are for one thread at a time; the others may be called
    from any, at any time. When the controller has forgotten this rank (its index has lost its data), it joins
    anew by itself.

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
        transport: Literal["auto", "shm", "tcp", "mooncake"] = "auto",
        verify: bool = True,
        optional: Iterable[str] = (),
        install: Install | None = None,
        before_write: Hook = nothing,
        before_serve: Hook = nothing,
        after_serve: Hook = nothing,
        run: str = "default",
        token: str | None = None,
        ca: str | None = None,
        timeouts: Timeouts | None = None,
        on_progress: OnProgress = ignore,
    ) -> None:
        check_rank(model, rank, world_size)
        self.model, self.group, self.rank, self.world_size = model, group, rank, world_size
        self.timeouts = timeouts or Timeouts()
        self._weights, self._load_weights, self._optional = weights, load_weights, frozenset(optional)
        self._on_progress = on_progress
        self._target: Mapped | None = None
        self._last: Updated | None = None
        self._busy = threading.Lock()  # one `update` at a time
        self._working = threading.Lock()  # held by whoever, `update` or a prefetch, is in a round
        self._preparing = threading.Lock()
        self._claim: Claim | None = None
        self._staged: int | None = None
        self._prefetching = Prefetching(
            f"weightdepot-prefetch-{model}", self._listen, self._prefetch, self._working
        )
        self._serving = Serving(model, group)
        self._closed = False
        self._pid = os.getpid()
        if tensors is not None:
            self._target = self._trace(tuple(tensors))
        elif load_weights is None and not _is_tracer(weights):
            self._target = self._trace(())
        with contextlib.ExitStack() as undo:
            self._transports = undo.enter_context(contextlib.closing(Transports(transport)))
            self._client = undo.enter_context(
                contextlib.closing(ControllerClient(controller, run=run, token=token, ca=ca))
            )
            layout = self._target.layout if self._target else None
            self._seat = Seat(self._client, model, group, rank, world_size, self.timeouts, layout)
            session = self._seat.take()
            self._membership = undo.enter_context(
                contextlib.closing(Membership(self._client, model, session, self.timeouts, self._seat.retake))
            )
            self._rounds = Rounds(self._client, self._membership, model, group, rank, self.timeouts)
            self._updating = Updating(
                self._client,
                self._rounds,
                self._transports,
                self._serving,
                model=model,
                timeouts=self.timeouts,
                verify=verify,
                install=install,
                hooks=Hooks(before_write, before_serve, after_serve),
                on_progress=on_progress,
            )
            if self._target is not None:
                self._updating.target = self._target
            self._undo = undo.pop_all()

    @property
    def version(self) -> int | None:
        """The version that the weights are; None before the first, and after an update that failed once it
        had begun to write, until a whole version is in."""
        return self._updating.version

    @property
    def last(self) -> Updated | None:
        """What the last successful `update` did."""
        return self._last

    @property
    def staged(self) -> int | None:
        """The version that a prefetch has staged, or is reading."""
        return self._staged

    def newest(self) -> int | None:
        """What `update` would bring: the newest ready version, or that at which the model is held."""
        return self._client.model(self.model, timeout=self.timeouts.call).current

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
                self._seat.register(target.layout, self._membership)
                self._updating.target = self._target = target
            return self._target.layout

    def _trace(self, tensors: Sequence[TensorSpec]) -> Mapped:
        weights = self._weights
        if _is_tracer(weights):
            return weights(tensors)
        return target_of(weights, self._load_weights, tensors, self._optional)

    def update(
        self,
        min_version: int | None = None,
        timeout: float | None = None,
        *,
        version: int | str | None = None,
        max_lag: int | None = None,
    ) -> int:
        """Bring the weights to the current version, in place; the version now held.

        The current version is the newest that is ready, or that at which an operator holds the model, which
        may be an older one. min_version: wait for this one or a newer one. version: exactly this one, or that
        which a tag (a text) points to; it may be older than what is held. max_lag: change nothing when what
        the group holds is at most so many published versions behind the newest.

        Every rank of the group calls it, with the same wishes, and gets the same version. It waits until
        there is such a version, and until every rank of the group has applied it. When the group holds it
        already, it returns at once. What a prefetch has brought is taken if it will do.

        Raises WaitTimeout, VersionGone (the exact one is no more), SourceLost, LeaseLost, IntegrityError,
        LayoutError, what a hook raises, and StaleGroup when another rank failed or did not come. Where it
        failed before the first byte was written, the weights are what they were; else `version` is None, the
        group is marked, and the next `update` brings all ranks to a whole version.
        """
        self._check_open()
        ask = Ask.of(min_version, version, max_lag)
        limit = self._patience(timeout)
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest("update was called while another thread is in it", model=self.model)
        try:
            with self._traced("weightdepot.update") as traced:
                now = self._update(ask, limit)
                if self._last is not None:
                    traced.set(version=now, **self._last.figures())
                return now
        finally:
            self._busy.release()

    def prefetch(
        self, min_version: int | None = None, timeout: float | None = None, *, version: int | None = None
    ) -> Future[int]:
        """Read the next version into staging memory, in the background, while the weights serve; returns at
        once. `apply` puts it in place.

        It waits until there is a version that is newer than the one held (at least `min_version`, if given;
        or exactly `version`); `timeout` bounds this wait, None: until there is one. The future's result is
        the version that is staged; it raises what `update` raises, and the weights are then as they were, and
        the next `apply` reads for itself. At most one version is staged: a prefetch that is under way, or
        whose version was not applied yet, is returned again (InvalidRequest where it is not the exact one
        that is asked for). `update` and `apply` end one that still waits.

        The round of this version begins here: its lease keeps the version in the store until every rank of
        the group has read it. Then all must call `apply` (or `update`), but the store no longer waits for it.
        """
        self._check_open()
        ask = Ask.of(min_version, version, None)
        if ask.version is not None:
            return self._prefetching.ask(ask.version, timeout, exact=True)
        newer = 0 if self.version is None else self.version + 1
        return self._prefetching.ask(max(ask.min_version, newer), timeout)

    def apply(self, timeout: float | None = None) -> int:
        """Put in place what `prefetch` has staged, at a safe point; the version now held.

        Every rank of the group calls it. It is `update`: what no prefetch has brought is read now, and a
        prefetch that is reading is waited for.
        """
        return self.update(timeout=timeout)

    def generation(self) -> Generation:
        """For tagging what is generated: `with consumer.generation() as g`, then `g.start`, `g.end` and
        `g.versions`. Entering it raises StaleGroup when no whole version serves."""
        return Generation(self._serving)

    def gate(self, max_lag: int, timeout: float | None = None) -> int:
        """Wait until what this group serves is at most `max_lag` published versions behind the newest; the
        version. Another thread (or rank) updates meanwhile.

        Raises WaitTimeout, saying how far behind the group is.
        """
        self._check_open()
        Ask.of(None, None, max_lag)
        limit = self._patience(timeout)
        deadline = time.monotonic() + limit
        group = self._membership.asking(
            lambda _: self._client.freshness(
                self.model, self.group, max_lag=max_lag, timeout=max(deadline - time.monotonic(), 0.0)
            ),
            deadline,
        )
        if group.is_fresh(max_lag) and group.last is not None:
            return group.last
        raise WaitTimeout(
            f"waited {limit:g} s for group {self.group!r} of {self.model!r} to be at most {max_lag} versions "
            f"behind: {self._how_far(group)}",
            model=self.model,
            group=self.group,
            version=group.last,
            lag=group.lag,
        )

    def _how_far(self, group: Group) -> str:
        text = "it holds no version"
        if group.last is not None:
            text = f"it holds version {group.last}, {group.lag} behind"
        if group.error:
            text += f", and is half-way: {group.error}"
        with contextlib.suppress(WeightDepotError):
            model = self._client.model(self.model, timeout=self.timeouts.call)
            if model.held:
                text += f"; the model is held at version {model.current}"
        return text

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

    def _listen(self, wanted: Wanted, timeout: float) -> None:
        self.prepare(timeout)
        there_is = self._client.latest if wanted.exact else self._client.current
        there_is(self.model, min_version=wanted.version, timeout=timeout)

    def _prefetch(self, wanted: Wanted) -> int:
        deadline = min(wanted.deadline, time.monotonic() + self.timeouts.update)
        # but for an exact one, what the group is in: another rank may have begun
        turn = self._rounds.begin(Ask(version=wanted.version if wanted.exact else None), deadline)
        self._staged = turn.version
        try:
            with self._traced("weightdepot.prefetch") as traced:
                traced.set(version=turn.version)
                self._claim = replace(self._updating.stage(turn, deadline), prefetched=True)
        except BaseException:
            self._staged = None
            raise
        return turn.version

    def _traced(self, name: str) -> AbstractContextManager[Span]:
        return span(name, model=self.model, group=self.group, rank=self.rank, world_size=self.world_size)

    def _update(self, ask: Ask, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        begun = time.perf_counter()
        self._prefetching.end()
        if not self._working.acquire(timeout=timeout):
            raise WaitTimeout(
                f"waited {timeout:g} s for the prefetch of {self.model!r} that is under way", model=self.model
            )
        try:
            self.prepare(max(deadline - time.monotonic(), 0.0))
            claim = self._take_staged(ask)
            if claim is None:
                self._on_progress(Progress(self.model, "wait", ask.least or None, 0, 0, f"for {ask}"))
                claim = self._begin(ask, deadline)
            try:
                self._last = self._serve(claim, begun, deadline)
            except WeightDepotError as error:
                # What a rank alone has staged is put in place without asking first (`_take_staged`).
                alone = claim.prefetched and self.world_size == 1
                if not alone or not self._rounds.begun_in_vain(error, deadline):
                    raise
                claim = self._begin(ask, deadline)
                self._last = self._serve(claim, begun, deadline)
        finally:
            self._working.release()
        return claim.turn.version

    def _serve(self, claim: Claim, begun: float, deadline: float) -> Updated:
        """Put in place what was read, and report it. begun: of the performance counter, the whole update."""
        waited = time.perf_counter() - begun - (0.0 if claim.prefetched else claim.pull)
        place = self._updating.place(claim)
        placed = time.perf_counter()
        updated = Updated(
            claim.turn.version,
            wait=waited,
            pull=0.0 if claim.prefetched else claim.pull,
            place=place,
            group=0.0,
            needed=claim.done.needed,
            moved=claim.done.moved,
            transports=claim.done.transports,
            prefetched=claim.prefetched,
            sources=claim.done.sources,
        )
        with span("finish"):
            self._updating.finish(claim, deadline, updated.figures())
        return replace(updated, group=time.perf_counter() - placed)

    def _begin(self, ask: Ask, deadline: float) -> Claim:
        """Begin a round and read its version; again where the controller lost its state meanwhile."""
        while True:
            with span("begin"):
                turn = self._rounds.begin(ask, deadline)
            try:
                return self._updating.read(turn, deadline)
            except WeightDepotError as error:
                if self._updating.wrote or not self._rounds.begun_in_vain(error, deadline):
                    raise

    def _take_staged(self, ask: Ask) -> Claim | None:
        """What a prefetch has staged, if it will do and the group's round is still under way."""
        claim = self._claim
        if claim is None:
            return None
        turn = claim.turn
        if not self._fits(turn.version, ask):
            self._rounds.give_up(turn, f"{ask} was asked for, {turn.version} was staged", torn=False)
            claim = None
        elif not self._rounds.goes_on(turn, ask_controller=self.world_size > 1):
            # A new round is begun. The controller must not think that this rank had written in the old one.
            self._rounds.give_up(turn, "the round has failed on another rank", torn=False)
            claim = None
        self._claim = self._staged = None
        return claim

    def _fits(self, version: int, ask: Ask) -> bool:
        if ask.version is not None:
            return version == ask.version
        if not ask.tag and ask.max_lag is None:
            return version >= ask.min_version
        model = self._client.model(self.model, timeout=self.timeouts.call)
        if ask.tag:
            return model.tags.get(ask.tag) == version
        newer = [v for v in model.versions if v.version > version and v.state in PUBLISHED]
        return version >= ask.min_version and len(newer) <= (ask.max_lag or 0)

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
