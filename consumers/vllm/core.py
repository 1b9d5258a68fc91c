"""The engine core's side: what its ranks made of an update, and refusing to serve what is not whole.

vLLM gives a backend no say here, and three things need one, so that a few methods of `EngineCore` are wrapped
(for the backend `weightdepot` only; see `install`):

- A worker that raises leaves the answers of the other workers unread, and every later call then reads
  answers to the one before. So workers answer with an `Outcome`, and the error is raised here, with every
  rank named.
- After a failed update vLLM goes on serving. Here the scheduler is stopped, requests and `resume` are
  refused.
- The weight version is what the ranks hold, set in the same step of the engine core, so that no token can be
  computed between new weights and their version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine

from weightdepot.consumers.vllm.plugin import NAME

logger = init_logger("vllm.weightdepot")

CALLS = frozenset(
    {
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
    }
)


@dataclass(frozen=True)
class Outcome:
    """What one rank has after a call."""

    rank: int
    version: int | None
    """None: the weights that it was started with."""
    torn: str = ""
    """Why its weights are not whole; "" when they are."""
    error: str = ""
    """What the call raised."""


def in_worker(worker: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """Runs in each worker: the call, its error as a value, and where that leaves the weights."""
    error = ""
    try:
        getattr(worker, method)(*args, **kwargs)
    except Exception as failure:
        logger.exception("%s failed", method)
        error = f"{type(failure).__name__}: {failure}"
    inner = getattr(worker, "worker", worker)
    engine = inner.weight_transfer_engine
    if error and engine is not None and method != "start_weight_update":
        inner._weight_update_active = False  # so that the next one can start
        engine.reset_weight_update_target()
    rank = inner.vllm_config.parallel_config.rank
    return Outcome(rank, getattr(engine, "version", None), getattr(engine, "torn", ""), error)


@dataclass
class Refusal:
    """Why an engine core serves nothing, and how its scheduler was paused before."""

    reason: str
    before: PauseState


def refusal(core: EngineCore) -> Refusal | None:
    found = getattr(core, "_weightdepot_refusal", None)
    return found if isinstance(found, Refusal) else None


def _refuse(core: EngineCore, reason: str) -> None:
    held = refusal(core)
    before = held.before if held else core.scheduler.pause_state
    core._weightdepot_refusal = Refusal(reason, before)
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    logger.error("%s", reason)


def _serve(core: EngineCore) -> None:
    held = refusal(core)
    if held is None:
        return
    core._weightdepot_refusal = None
    if core.scheduler.pause_state == PauseState.PAUSED_ALL:
        core.scheduler.set_pause_state(held.before)
    logger.info("the weights are whole again: serving")


def judge(outcomes: list[Outcome]) -> str:
    """Why an engine with ranks like these must not serve; "" when all hold the same whole version."""
    torn = [f"rank {o.rank}: {o.torn}" for o in outcomes if o.torn]
    versions = {o.version for o in outcomes}
    if not torn and len(versions) > 1:
        torn = [
            f"rank {o.rank} has " + ("its first weights" if o.version is None else f"version {o.version}")
            for o in outcomes
        ]
    if not torn:
        return ""
    return (
        "the weights of this engine are not whole ("
        + "; ".join(torn)
        + "): it serves nothing until an update "
        "succeeds (start_weight_update, update_weights, finish_weight_update)"
    )


def settle(core: EngineCore, method: str, outcomes: list[Outcome]) -> None:
    """Acts on what the ranks answered. Raises RuntimeError with the error of each rank that has one."""
    reason = judge(outcomes)
    if reason:
        _refuse(core, reason)
    else:
        version = outcomes[0].version
        if version is not None and method == "update_weights":
            core.set_weight_version(str(version))
        _serve(core)
    errors = [f"rank {o.rank}: {o.error}" for o in outcomes if o.error]
    if errors:
        raise RuntimeError(f"{method} failed: " + "; ".join(errors) + (f". Now {reason}" if reason else ""))


def _ours(core: EngineCore) -> bool:
    config = core.vllm_config.weight_transfer_config
    return config is not None and config.backend == NAME


def _check(core: EngineCore, what: str) -> None:
    held = refusal(core)
    if held is not None:
        raise RuntimeError(f"{what} is refused: {held.reason}")


def install() -> None:
    """Wraps the methods of `EngineCore`, once in each process."""
    if getattr(EngineCore, "_weightdepot", False):
        return
    EngineCore._weightdepot = True

    def wrap(name: str, make: Callable[[Any], Any]) -> None:
        method = getattr(EngineCore, name)
        setattr(EngineCore, name, functools.wraps(method)(make(method)))

    def rpc(method: Any) -> Any:
        def collective_rpc(
            self: Any,
            call: Any = None,
            timeout: float | None = None,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
            **named: Any,
        ) -> Any:
            call = named.pop("method", call)
            if call not in CALLS or not _ours(self):
                return method(self, call, timeout, args, kwargs)
            outcomes = method(self, in_worker, timeout, (call, tuple(args), dict(kwargs or {})), None)
            settle(self, call, outcomes)
            return [None] * len(outcomes)

        return collective_rpc

    def add(method: Any) -> Any:
        def preprocess_add_request(self: Any, request: Any) -> Any:
            _check(self, "a request")
            return method(self, request)

        return preprocess_add_request

    wrap("collective_rpc", rpc)
    wrap("preprocess_add_request", add)
    LLMEngine.add_request = _refusing_add(LLMEngine.add_request)
    # subclasses (the process around an engine core, data parallelism) have their own
    for owner in [EngineCore, *_subclasses(EngineCore)]:
        if "resume_scheduler" in vars(owner):
            owner.resume_scheduler = _refusing_resume(owner.resume_scheduler)
        if "pause_scheduler" in vars(owner):
            owner.pause_scheduler = _refusing_wait(owner.pause_scheduler)


def _subclasses(cls: type) -> list[type[Any]]:
    found: list[type[Any]] = []
    below: list[type[Any]] = cls.__subclasses__()
    for one in below:
        found += [one, *_subclasses(one)]
    return found


def _refusing_add(method: Any) -> Any:
    """For an engine core in this process. `LLMEngine` counts a request before it hands it on, and would wait
    for one that was refused further in."""

    @functools.wraps(method)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        core = getattr(self.engine_core, "engine_core", None)
        if core is not None:
            _check(core, "a request")
        return method(self, *args, **kwargs)

    return add_request


def _refusing_resume(method: Any) -> Any:
    @functools.wraps(method)
    def resume_scheduler(self: Any) -> Any:
        _check(self, "resume")
        return method(self)

    return resume_scheduler


def _refusing_wait(method: Any) -> Any:
    @functools.wraps(method)
    def pause_scheduler(self: Any, mode: Any = "abort", clear_cache: bool = True) -> Any:
        if mode == "wait":
            _check(self, "draining requests")
        return method(self, mode, clear_cache)

    return pause_scheduler
