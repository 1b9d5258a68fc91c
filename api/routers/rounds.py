"""Rounds: all ranks of a group are told the same version, read it, and apply it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from weightdepot.api.asking import last_look, patiently
from weightdepot.api.dependencies import ControllerDep, IndexDep, WaitDep, WaitersDep
from weightdepot.api.openapi import problems
from weightdepot.api.roles import Role, allows
from weightdepot.api.schemas import answers, fields, requests
from weightdepot.store.errors import LeaseLost, MemberConflict, StaleGroup, UnknownModel, VersionGone
from weightdepot.store.index import records
from weightdepot.store.index.records import GroupState, RoundStatus, Wait

router = APIRouter(prefix="/models/{model}/groups/{group}/rounds", tags=["groups"])


# What happens to versions before they are ready says nothing to those who want to read one.
UNREADY = frozenset({"open", "sealed"})


@router.post(
    "",
    summary="Begin (or join) a round",
    response_model=answers.RoundOrWait,
    response_model_exclude_unset=True,
    responses=problems(UnknownModel, MemberConflict, StaleGroup, VersionGone),
)
@allows(Role.CONSUME)
async def begin_round(
    model: fields.ModelName,
    group: fields.GroupName,
    *,
    body: requests.RoundIn,
    wait: WaitDep,
    controller: ControllerDep,
    index: IndexDep,
    waiters: WaitersDep,
) -> dict[str, records.Round | Wait]:
    """The version to move to, where its parts are, and a lease on it that covers the whole group.

    Waits for the group's ranks, for the round before to end, and for a version that will do.
    """

    async def attempt() -> records.Round | Wait:
        return await index.begin_round(
            model,
            group,
            body.rank,
            body.session,
            body.min_version,
            body.lease_ttl,
            version=body.version,
            max_lag=body.max_lag,
            tag=body.tag or "",
        )

    answer = await waiters.until(model, patiently(model, attempt, wait, member=True), wait, deaf=UNREADY)
    if isinstance(answer, Wait):
        controller.metrics.waited(model, answer.reason)
        return {"wait": answer}
    return {"round": answer}


@router.post(
    "/{round}/ranks/{rank}/staged",
    summary="A rank has read what it needs",
    status_code=204,
    response_model=None,
    response_class=Response,
    responses=problems(UnknownModel, MemberConflict, LeaseLost),
)
@allows(Role.CONSUME)
async def stage_round(
    model: fields.ModelName,
    group: fields.GroupName,
    round: fields.PathNumber,
    rank: fields.PathRank,
    *,
    body: requests.StagedIn,
    index: IndexDep,
) -> None:
    """When every rank has said so, the lease is given back: the version's memory is needed no longer."""
    await index.stage_round(model, group, rank, body.session, round)


@router.post(
    "/{round}/ranks/{rank}",
    summary="A rank has finished a round",
    response_model=answers.RoundStatus,
    responses=problems(UnknownModel, MemberConflict, LeaseLost, StaleGroup),
)
@allows(Role.CONSUME)
async def finish_round(
    model: fields.ModelName,
    group: fields.GroupName,
    round: fields.PathNumber,
    rank: fields.PathRank,
    *,
    body: requests.FinishIn,
    controller: ControllerDep,
    wait: WaitDep,
    index: IndexDep,
    waiters: WaitersDep,
) -> RoundStatus:
    """Records that it applied the version (or why not), then waits for the other ranks: a barrier."""
    status = await index.finish_round(
        model, group, rank, body.session, round, error=body.error, torn=body.torn, stats=body.stats
    )
    controller.metrics.finished(model, group, body.error, body.stats)
    if _settled(status):
        return status
    return await last_look(waiters, model, lambda: index.round_status(model, group, round), _settled, wait)


@router.get(
    "/{round}",
    summary="How far a round is",
    response_model=answers.RoundStatus,
    responses=problems(UnknownModel),
)
async def round_status(
    model: fields.ModelName,
    group: fields.GroupName,
    round: fields.PathNumber,
    *,
    wait: WaitDep,
    index: IndexDep,
    waiters: WaitersDep,
) -> RoundStatus:
    """With `wait`: answers when no rank is pending any more, or when the time is up."""
    return await last_look(waiters, model, lambda: index.round_status(model, group, round), _settled, wait)


def _settled(status: RoundStatus) -> bool:
    return status.state is not GroupState.MOVING
