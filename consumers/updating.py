"""What one rank does in a round: reading a version, putting it in place, and telling that it did."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightdepot.api.client import ControllerClient
from weightdepot.consumers.generation import Serving
from weightdepot.consumers.hooks import Hooks
from weightdepot.consumers.pull import FromSource, Pulled, pull
from weightdepot.consumers.rounds import Rounds
from weightdepot.consumers.staging import Staging
from weightdepot.store.errors import StaleGroup, WaitTimeout, WeightDepotError
from weightdepot.store.index.records import Round
from weightdepot.store.planning import Plan
from weightdepot.store.progress import OnProgress
from weightdepot.store.spans import span
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Mapped

Install = Callable[[Mapping[str, torch.Tensor]], None]

UNMOVED = Pulled(0, 0, ())


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
    sources: tuple[FromSource, ...] = ()
    """By producer rank: over which transport, how many bytes, how long it took and was expected to take."""

    @property
    def reading(self) -> float:
        """Seconds that the sources took, those read side by side added up."""
        return sum(source.seconds for source in self.sources)

    @property
    def predicted(self) -> float | None:
        """The same as earlier updates let expect; None where there is a source that they say nothing of."""
        expected = [source.predicted for source in self.sources if source.predicted is not None]
        return sum(expected) if expected and len(expected) == len(self.sources) else None

    def figures(self) -> dict[str, Any]:
        """What the controller is told of it, to show it."""
        predicted = self.predicted
        return {
            **({} if predicted is None else {"predicted": predicted}),
            "reading": self.reading,
            "wait": self.wait,
            "pull": self.pull,
            "place": self.place,
            "needed": self.needed,
            "moved": self.moved,
            "transports": ",".join(self.transports),
            "prefetched": int(self.prefetched),
        }


@dataclass(frozen=True)
class Claim:
    """A round that this rank has begun and not finished, and what it has done in it."""

    turn: Round
    done: Pulled = UNMOVED
    pull: float = 0.0
    moves: bool = False
    """Whether this rank must write anything at all."""
    staged: bool = False
    """It is in staging memory, and the controller has confirmed that it is good."""
    prefetched: bool = False


class Updating:
    """`read` or `stage` a round, then `place` and `finish` the claim that they give.

    version: what the weights are; None when they are, or may be, of no version. wrote: whether anything was
    written into them in the round that was read or staged last.
    install: puts staged buffers in place, where that is more than a copy.
    """

    def __init__(
        self,
        client: ControllerClient,
        rounds: Rounds,
        transports: Transports,
        serving: Serving,
        *,
        model: str,
        timeouts: Timeouts,
        verify: bool,
        install: Install | None,
        hooks: Hooks,
        on_progress: OnProgress,
    ) -> None:
        self._client, self._rounds, self._transports, self._serving = client, rounds, transports, serving
        self._model, self._timeouts, self._verify = model, timeouts, verify
        self.install = install
        self._hooks, self._on_progress = hooks, on_progress
        self._target: Mapped | None = None
        self._staging: Staging | None = None
        self._plans: dict[str, Plan] = {}
        self.version: int | None = None
        self._unconfirmed: int | None = None  # written whole, but nobody has said that the lease lived
        self._announced: int | None = None  # what `after_serve` was last called with, since it was written
        self.wrote = False

    @property
    def target(self) -> Mapped:
        """Where elements go. To be set before anything is read."""
        if self._target is None:
            raise RuntimeError("the layout is found before a round is begun")
        return self._target

    @target.setter
    def target(self, target: Mapped) -> None:
        self._target = target

    def read(self, turn: Round, deadline: float) -> Claim:
        """Pull the version of this round: into staging memory where it is installed from there, else straight
        into the weights."""
        if self.install is not None:
            return self.stage(turn, deadline)
        if not self._moves(turn):
            return Claim(turn)
        begun = time.perf_counter()
        done = self._pull(turn, self.target, deadline, lambda: self._before_write(turn.version))
        return Claim(turn, done, time.perf_counter() - begun, moves=True)

    def stage(self, turn: Round, deadline: float) -> Claim:
        """Pull the version of this round into staging memory. The weights are as they were, whatever is
        raised; once every rank of the group has staged it, the store needs to keep it no more."""
        if not self._moves(turn):
            return Claim(turn)
        begun = time.perf_counter()
        if self._staging is None:
            self._staging = Staging(self.target.layout)
        buffers = self._staging.buffers
        done = self._pull(turn, Mapped(self.target.layout, lambda: buffers), deadline, lambda: None)
        try:
            self._rounds.stage(turn)
        except BaseException as error:
            self._fail(turn, error)
            raise
        return Claim(turn, done, time.perf_counter() - begun, moves=True, staged=True)

    def _moves(self, turn: Round) -> bool:
        """Whether this rank must write to get to the round's version."""
        if self.version is None and turn.held is not None and turn.held == self._unconfirmed:
            # The answer to the last report was lost, but the report was heard: what was written is whole.
            self.version = turn.held
            self._serving.serve(turn.held)
        self._unconfirmed, self.wrote = None, False
        if not turn.parts and self.version != turn.version:
            # The group is said to be there, so that there is nothing to read: it must be taken back first.
            reason = f"these weights are not version {turn.version}, though they were reported to be"
            self._rounds.give_up(turn, reason, torn=True)
            raise StaleGroup(
                f"{reason}: call update again on every rank", model=self._model, version=turn.version
            )
        return turn.held != turn.version or self.version != turn.version

    def _before_write(self, version: int) -> None:
        self._hooks.before_write(version)
        # from the first byte on they are neither the old nor the new
        self.version, self._announced, self.wrote = None, None, True

    def _pull(self, turn: Round, target: Mapped, deadline: float, on_write: Callable[[], None]) -> Pulled:
        """Read and check. The lease is renewed in the background from here on."""
        self._rounds.watch(turn)
        try:
            plan = self._plan(turn.tiling, deadline)
            digests = None
            if self._verify:
                digests = self._client.digests(
                    self._model, turn.version, plan.sources, timeout=self._timeouts.call
                )
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"no time is left to read version {turn.version} of {self._model!r}: nothing was written",
                    model=self._model,
                    version=turn.version,
                )
            published = str(turn.parts[0].stats.get("trace", "")) if turn.parts else ""
            with span("pull", link=published, version=turn.version) as traced:
                done = pull(
                    turn=turn,
                    plan=plan,
                    target=target,
                    digests=digests,
                    transports=self._transports,
                    deadline=deadline,
                    model=self._model,
                    on_progress=self._on_progress,
                    on_write=on_write,
                )
                traced.set(moved=done.moved, needed=done.needed, transports=",".join(done.transports))
            self._rounds.check_lease(turn)
        except BaseException as error:
            self._fail(turn, error)
            raise
        return done

    def place(self, claim: Claim) -> float:
        """Put in place what is staged, and let the engine get ready to serve it; the seconds of the copy."""
        if not claim.moves:
            return 0.0
        turn, seconds = claim.turn, 0.0
        try:
            if claim.staged:
                begun = time.perf_counter()
                with span("place"):
                    self._place(turn.version)
                seconds = time.perf_counter() - begun
            self._hooks.before_serve(turn.version)
        except BaseException as error:
            self._fail(turn, error)
            raise
        self.version = turn.version
        self._serving.serve(turn.version)
        return seconds

    def _place(self, version: int) -> None:
        if self._staging is None:
            raise RuntimeError("nothing is staged")
        if self.install is not None:
            self._before_write(version)
            self.install(self._staging.buffers)
        else:
            self._staging.place(self.target.buffers(), lambda: self._before_write(version))
            self.target.finish()

    def _fail(self, turn: Round, error: BaseException) -> None:
        """End the round with this error. Where nothing was written, what this rank holds stays."""
        if self.wrote:
            self._serving.stop(f"{type(error).__name__} in the middle of an update: {error}")
        self._rounds.fail(turn, error, torn=self.wrote)

    def finish(self, claim: Claim, deadline: float, stats: Mapping[str, Any]) -> None:
        """Report it applied, and wait for the other ranks.

        Raises StaleGroup when another rank failed: what this rank holds is whole, and was accepted. What else
        is raised may leave `version` None.
        """
        turn = claim.turn
        try:
            self._rounds.finish(turn, deadline, confirmed=claim.staged or not claim.moves, stats=stats)
        except WeightDepotError as error:
            self._serving.stop(f"{type(error).__name__} at the end of an update: {error}")
            if claim.moves and not claim.staged and not isinstance(error, StaleGroup):
                # Nobody has confirmed that the lease lived while this rank was reading: the memory may have
                # been written again meanwhile.
                self.version, self._unconfirmed = None, turn.version
            raise
        self._serving.serve(turn.version)  # again, where an earlier round had left the group half-way
        if self._announced != turn.version:
            self._announced = turn.version
            self._hooks.after_serve(turn.version)

    def _plan(self, tiling: str, deadline: float) -> Plan:
        found = self._plans.get(tiling)
        if found is None:
            found = self._client.plan(
                self._model,
                tiling,
                self.target.layout.digest,
                timeout=max(deadline - time.monotonic(), 0.0),
            )
            while len(self._plans) > 1:
                self._plans.pop(next(iter(self._plans)))
            self._plans[tiling] = found
        return found
