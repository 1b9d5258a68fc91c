"""Calls for `Engine.collective_rpc`, carried out by each of SGLang's schedulers between two batches.

    engine.collective_rpc("weightdepot_join", controller=URL, model=NAME)
    engine.collective_rpc("weightdepot_update", version=7)
    engine.collective_rpc("weightdepot_leave")

An update is carried out at a safe point only; the caches are flushed by SGLang's own `flush_cache` before the
version counts as applied, and it becomes SGLang's weight version in the same call, so that no token is
computed in between. When a rank fails, all ranks learn it, and an engine whose weights are not whole stays
paused until an update succeeds.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from weightdepot.consumers.hooks import Hook
from weightdepot.consumers.sglang.live import EngineRank
from weightdepot.store.errors import InvalidRequest, WaitTimeout
from weightdepot.store.timeouts import Timeouts

logger = logging.getLogger("sglang.weightdepot")

GRACE = 5.0  # seconds that joining waits for the producers to say what the checkpoint holds


@dataclass(frozen=True)
class Outcome:
    """What one rank has after an update."""

    rank: int
    version: int | None
    """None: the weights that it was started with, or torn ones."""
    torn: str = ""
    error: str = ""


def judge(outcomes: Sequence[Outcome]) -> str:
    """Why an engine with ranks like these must not serve; "" when all hold the same whole weights."""
    torn = [f"rank {o.rank}: {o.torn}" for o in outcomes if o.torn]
    if not torn and len({o.version for o in outcomes}) > 1:
        torn = [
            f"rank {o.rank} has " + ("its first weights" if o.version is None else f"version {o.version}")
            for o in outcomes
        ]
    return f"the weights of this engine are not whole ({'; '.join(torn)})" if torn else ""


class Depot:
    """What a scheduler has joined. `scheduler` is SGLang's, of one tensor-parallel rank."""

    def __init__(self, scheduler: Any, make: Callable[[Hook], EngineRank], prefetch: bool) -> None:
        """make: joins as a rank, given what to call before new weights serve."""
        self._scheduler, self._prefetch = scheduler, prefetch
        self.rank = make(self._before_serve)
        self.refusal = ""
        """Why this engine must not serve; "" when it may."""
        self._paused_here = False
        self._flush_cache = True

    def prepare(self) -> None:
        """Trace now if the producers are there, else at the first update."""
        try:
            self.rank.prepare(GRACE)
        except WaitTimeout as error:
            logger.warning("not traced yet: %s", error)
        self.prefetch()

    def prefetch(self) -> None:
        future = self.rank.prefetch() if self._prefetch else None
        if future is not None:
            future.add_done_callback(_noted)

    def update(
        self,
        version: int | str | None,
        min_version: int | None,
        max_lag: int | None,
        timeout: float | None,
        flush_cache: bool,
    ) -> None:
        """Raises InvalidRequest, with nothing changed, away from a safe point; RuntimeError naming each rank
        that failed, and whether the engine stays paused."""
        self._check_safe(flush_cache)
        self._flush_cache = flush_cache
        before = None if self.refusal else self.rank.version
        error = ""
        try:
            self.rank.update(version=version, min_version=min_version, max_lag=max_lag, timeout=timeout)
        except Exception as failure:
            logger.exception("the update failed")
            error = f"{type(failure).__name__}: {failure}"
        outcomes = self._gather(Outcome(self.rank.consumer.rank, self.rank.version, self.rank.torn, error))
        self.refusal = judge(outcomes)
        errors = [f"rank {o.rank}: {o.error}" for o in outcomes if o.error]
        if self.refusal:
            self._pause()
        else:
            if self.rank.version not in (None, before):
                self._scheduler.record_weight_version_change(new_version=str(self.rank.version))
            self._resume()
            self.prefetch()
        if errors or self.refusal:
            stays = f". {self.refusal}: it stays paused until an update succeeds" if self.refusal else ""
            raise RuntimeError("the update failed: " + "; ".join(errors) + stays)

    def _check_safe(self, flush_cache: bool) -> None:
        paused = self._scheduler._engine_paused
        if flush_cache and not self._scheduler.is_fully_idle(ignore_waiting=paused):
            raise InvalidRequest(
                "requests are running: pause with mode 'retract' or 'abort', or wait until the engine is "
                "idle (or pause with 'in_place', and update with flush_cache=False, to go on with the old "
                "key-value cache)"
            )
        if not flush_cache and not (paused or self._scheduler.is_fully_idle()):
            raise InvalidRequest("requests are running: pause generation before an update")

    def _gather(self, outcome: Outcome) -> list[Outcome]:
        size = self.rank.consumer.world_size
        if size == 1:
            return [outcome]
        found: list[Outcome] = [outcome] * size
        dist.all_gather_object(found, outcome, group=self._scheduler.weight_updater.tp_cpu_group)
        return found

    def _before_serve(self, version: int) -> None:
        if self._flush_cache and not self._scheduler.flush_cache():
            raise RuntimeError(f"SGLang did not flush its caches for version {version}")

    def _pause(self) -> None:
        if not self._scheduler._engine_paused:
            self._scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
            self._paused_here = True
        logger.error("%s: paused until an update succeeds", self.refusal)

    def _resume(self) -> None:
        if self._paused_here:
            self._paused_here = False
            self._scheduler.continue_generation(ContinueGenerationReqInput())

    def close(self) -> None:
        self.rank.close()


def _noted(future: Any) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("nothing was prefetched, the next update reads for itself: %s", error)


def depot_of(scheduler: Any) -> Depot:
    found = getattr(scheduler, "_weightdepot", None)
    if not isinstance(found, Depot):
        raise InvalidRequest('the engine has not joined: collective_rpc("weightdepot_join", ...) first')
    return found


def join(
    self: Any,
    controller: str,
    model: str,
    group: str = "sglang",
    transport: Literal["auto", "shm", "tcp", "mooncake"] = "auto",
    run: str = "default",
    verify: bool = True,
    optional: str = "",
    prefetch: bool = True,
    **timeouts: float,
) -> None:
    """As `EngineRank`, in what SGLang's calls carry, which is numbers and texts: `optional` is separated by
    commas, and time-outs are `timeout_update=120.0` and so on. May be called again, to join another group."""
    leave(self)
    make = functools.partial(
        EngineRank,
        self.tp_worker.model_runner,
        controller,
        model=model,
        group=group,
        transport=transport,
        run=run,
        verify=verify,
        optional=[name.strip() for name in optional.split(",") if name.strip()],
        timeouts=_timeouts(timeouts),
    )
    self._weightdepot = Depot(self, lambda before_serve: make(before_serve=before_serve), prefetch)
    try:
        self._weightdepot.prepare()
    except BaseException:
        leave(self)
        raise


def _timeouts(given: Mapping[str, float]) -> Timeouts:
    try:
        return Timeouts(**{name.removeprefix("timeout_"): value for name, value in given.items()})
    except TypeError as error:
        raise InvalidRequest(f"weightdepot_join: {error}") from error


def update(
    self: Any,
    version: int | str | None = None,
    min_version: int | None = None,
    max_lag: int | None = None,
    timeout: float | None = None,
    flush_cache: bool = True,
) -> None:
    """version: a text is a tag. The rest as in `Consumer.update`."""
    depot_of(self).update(version, min_version, max_lag, timeout, flush_cache)


def leave(self: Any) -> None:
    """The weights stay as they are."""
    depot, self._weightdepot = getattr(self, "_weightdepot", None), None
    if isinstance(depot, Depot):
        depot.close()


def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's `continue_generation`, which does nothing while the weights are not whole."""

    @functools.wraps(method)
    def continue_generation(self: Any, recv_req: Any) -> Any:
        depot = getattr(self, "_weightdepot", None)
        if isinstance(depot, Depot) and depot.refusal:
            logger.error("%s: it stays paused until an update succeeds", depot.refusal)
            return None
        return method(self, recv_req)

    return continue_generation


def install(scheduler: Any) -> None:
    """Adds the calls to SGLang's class `Scheduler`, once."""
    if hasattr(scheduler, "weightdepot_update"):
        return
    scheduler.weightdepot_join, scheduler.weightdepot_update = join, update
    scheduler.weightdepot_leave = leave
    scheduler.continue_generation = refusing(scheduler.continue_generation)
