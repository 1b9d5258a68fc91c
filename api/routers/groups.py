"""Consumer groups and their rounds: all ranks of a group are told the same version."""

from __future__ import annotations

from fastapi import APIRouter

from weightdepot.api import schemas
from weightdepot.api.asking import patiently
from weightdepot.api.dependencies import IndexDep, WaitDep, WaitersDep
from weightdepot.api.openapi import problems
from weightdepot.store.errors import LeaseLost, MemberConflict, StaleGroup, UnknownModel
from weightdepot.store.index import records
from weightdepot.store.index.records import GroupState, RoundStatus, Wait

router = APIRouter(prefix="/models/{model}/groups", tags=["groups"])


@router.get(
    "", summary="All consumer groups", response_model=schemas.Groups, responses=problems(UnknownModel)
)
async def groups(model: schemas.ModelName, index: IndexDep) -> dict[str, list[records.Group]]:
    """Which rank holds which version."""
    return {"groups": await index.groups(model)}


@router.get("/{group}", summary="One group", response_model=schemas.Group, responses=problems(UnknownModel))
async def group(model: schemas.ModelName, group: schemas.GroupName, index: IndexDep) -> records.Group:
    return await index.group(model, group)


@router.post(
    "/{group}/rounds",
    summary="Begin (or join) a round",
    response_model=schemas.RoundOrWait,
    response_model_exclude_unset=True,
    responses=problems(UnknownModel, MemberConflict, StaleGroup),
)
async def begin_round(
    model: schemas.ModelName,
    group: schemas.GroupName,
    *,
    body: schemas.RoundIn,
    wait: WaitDep,
    index: IndexDep,
    waiters: WaitersDep,
) -> dict[str, records.Round | Wait]:
    """The version to move to, where its parts are, and a lease on it that covers the whole group.

    Waits for the group's ranks, for the round before to end, and for a version that is new enough.
    """

    async def attempt() -> records.Round | Wait:
        return await index.begin_round(
            model, group, body.rank, body.session, body.min_version, body.lease_ttl
        )

    answer = await waiters.until(model, patiently(model, attempt, wait, member=True), wait)
    return {"wait": answer} if isinstance(answer, Wait) else {"round": answer}


@router.post(
    "/{group}/rounds/{round}/ranks/{rank}",
    summary="A rank has finished a round",
    response_model=schemas.RoundStatus,
    responses=problems(UnknownModel, MemberConflict, LeaseLost, StaleGroup),
)
async def finish_round(
    model: schemas.ModelName,
    group: schemas.GroupName,
    round: schemas.PathNumber,
    rank: schemas.PathRank,
    *,
    body: schemas.FinishIn,
    wait: WaitDep,
    index: IndexDep,
    waiters: WaitersDep,
) -> RoundStatus:
    """Records that it applied the version (or why not), then waits for the other ranks: a barrier."""
    status = await index.finish_round(model, group, rank, body.session, round, error=body.error)
    return await _settled(model, group, round, status, wait=wait, index=index, waiters=waiters)


@router.get(
    "/{group}/rounds/{round}",
    summary="How far a round is",
    response_model=schemas.RoundStatus,
    responses=problems(UnknownModel),
)
async def round_status(
    model: schemas.ModelName,
    group: schemas.GroupName,
    round: schemas.PathNumber,
    *,
    wait: WaitDep,
    index: IndexDep,
    waiters: WaitersDep,
) -> RoundStatus:
    """With `wait`: answers when no rank is pending any more, or when the time is up."""
    status = await index.round_status(model, group, round)
    return await _settled(model, group, round, status, wait=wait, index=index, waiters=waiters)


async def _settled(
    model: str,
    group: str,
    round: int,
    status: RoundStatus,
    *,
    wait: float,
    index: IndexDep,
    waiters: WaitersDep,
) -> RoundStatus:
    """The round's status, the moment that it moves no more or when the time is up."""
    if wait <= 0 or status.state is not GroupState.MOVING:
        return status

    async def attempt() -> RoundStatus | Wait:
        nonlocal status
        status = await index.round_status(model, group, round)
        return Wait("group", "ranks are pending") if status.state is GroupState.MOVING else status

    await waiters.until(model, attempt, wait)
    return status
