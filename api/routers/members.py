"""Members come, stay alive, change their layout, and go."""

from __future__ import annotations

from fastapi import APIRouter, Response

from weightdepot.api import schemas
from weightdepot.api.dependencies import IndexDep, PlannerDep
from weightdepot.api.openapi import problems
from weightdepot.api.problems import UnknownLayout
from weightdepot.store.errors import MemberConflict, UnknownModel
from weightdepot.store.index import records

router = APIRouter(prefix="/models/{model}", tags=["members"])


def _process(process: schemas.Process) -> records.Process:
    return records.Process(process.host, process.pid, process.started)


@router.post(
    "/producers",
    summary="A producer rank joins",
    response_model=schemas.Joined,
    responses=problems(MemberConflict, UnknownLayout),
)
async def join_producer(
    model: schemas.ModelName, body: schemas.ProducerIn, index: IndexDep, planner: PlannerDep
) -> records.Joined:
    """Its layout must have been sent before. A rank that a living process holds is refused, and named."""
    await planner.layout(body.layout)
    return await index.join_producer(
        model,
        body.rank,
        body.world_size,
        body.session,
        body.layout,
        _process(body.process),
        body.retention,
        body.ttl,
        replace=body.replace,
    )


@router.post(
    "/groups/{group}/consumers",
    summary="A rank of a consumer group joins",
    response_model=schemas.Joined,
    responses=problems(MemberConflict, UnknownLayout),
)
async def join_consumer(
    model: schemas.ModelName,
    group: schemas.GroupName,
    body: schemas.ConsumerIn,
    index: IndexDep,
    planner: PlannerDep,
) -> records.Joined:
    """The model need not exist yet, and the layout may follow."""
    if body.layout:
        await planner.layout(body.layout)
    return await index.join_consumer(
        model,
        group,
        body.rank,
        body.world_size,
        body.session,
        body.layout,
        _process(body.process),
        body.ttl,
        replace=body.replace,
    )


@router.put(
    "/groups/{group}/consumers/{rank}/layout",
    summary="A consumer rank states its layout",
    status_code=204,
    response_model=None,
    response_class=Response,
    responses=problems(MemberConflict, UnknownLayout, UnknownModel),
)
async def set_layout(
    model: schemas.ModelName,
    group: schemas.GroupName,
    rank: schemas.PathRank,
    *,
    body: schemas.LayoutChange,
    index: IndexDep,
    planner: PlannerDep,
) -> None:
    await planner.layout(body.layout)
    await index.set_layout(model, group, rank, body.session, body.layout)


@router.delete(
    "/members/{session}",
    summary="A member leaves",
    status_code=204,
    response_model=None,
    response_class=Response,
    responses=problems(UnknownModel),
)
async def leave(model: schemas.ModelName, session: schemas.Session, index: IndexDep) -> None:
    """A producer's memory goes with it: the versions that it was part of are freed."""
    await index.leave(model, session)


@router.post(
    "/members/{session}/heartbeat",
    summary="A member is alive",
    response_model=schemas.Heartbeat,
    responses=problems(UnknownModel),
)
async def heartbeat(
    model: schemas.ModelName, session: schemas.Session, body: schemas.HeartbeatIn, index: IndexDep
) -> records.Heartbeat:
    """Renews its membership and the leases of its rounds; a lease that has ended stays ended."""
    rounds = [(held.group, held.round) for held in body.rounds]
    return await index.heartbeat(model, session, body.ttl, rounds=rounds, lease_ttl=body.lease_ttl)
