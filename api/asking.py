"""Small questions about a model's members that several routes ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from weightdepot.api.problems import NotYet
from weightdepot.api.waiting import Waiters
from weightdepot.store.errors import UnknownModel
from weightdepot.store.index.records import Group, Member, Model, Wait

T = TypeVar("T")


def missing_ranks(model: Model) -> Wait | None:
    """What to wait for while not all producer ranks have joined; None when they have."""
    present = {producer.rank for producer in model.producers}
    missing = [rank for rank in range(model.world_size) if rank not in present]
    if not missing and model.producers:
        return None
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    return Wait(
        "ranks",
        f"producer ranks {shown} of {model.world_size} of {model.name!r} have not joined yet"
        if missing
        else f"no producer of {model.name!r} has joined yet",
        {"model": model.name, "missing": missing},
    )


def holder(model: Model, rank: int) -> Member | None:
    return next((producer for producer in model.producers if producer.rank == rank), None)


def producer_layouts(model: Model) -> list[str]:
    """Layout digests by rank, of a model whose ranks have all joined."""
    return [producer.layout for producer in sorted(model.producers, key=lambda member: member.rank)]


def reader_layouts(groups: list[Group]) -> set[str]:
    """The layouts of living consumers that have stated one."""
    return {member.layout for group in groups for member in group.members if member.alive and member.layout}


def patiently(
    name: str, attempt: Callable[[], Awaitable[T | Wait]], wait: float, member: bool = False
) -> Callable[[], Awaitable[T | Wait]]:
    """Waits also for the model to appear: rollouts may start before the trainer does.

    Without a wait, or for a `member` (whom waiting would not make known again), the answer is the plain
    UnknownModel.
    """

    async def or_wait() -> T | Wait:
        try:
            return await attempt()
        except UnknownModel:
            if wait <= 0 or member:
                raise
            return Wait("ranks", f"no producer of {name!r} has joined yet", {"model": name})

    return or_wait


def timed_out(wait: Wait, seconds: float) -> NotYet:
    """The problem for routes whose answer has no place for a wait."""
    return NotYet(f"waited {seconds:g} s: {wait.message}", **{"reason": wait.reason, **wait.details})


async def last_look(
    waiters: Waiters, model: str, look: Callable[[], Awaitable[T]], settled: Callable[[T], bool], wait: float
) -> T:
    """What `look` sees once it is `settled`; after `wait` seconds what it sees then."""
    seen = await look()
    if wait <= 0 or settled(seen):
        return seen

    async def attempt() -> T | Wait:
        nonlocal seen
        seen = await look()
        return seen if settled(seen) else Wait("settled", "not yet")

    await waiters.until(model, attempt, wait)
    return seen
