"""Members come, stay alive, change their layout, and go."""

from __future__ import annotations

import xxhash
from fastapi import APIRouter, Response

from weightdepot.api.dependencies import CallerDep, IndexDep, PlannerDep
from weightdepot.api.openapi import problems
from weightdepot.api.problems import ChangedOnTheWay, Forbidden, UnknownLayout
from weightdepot.api.roles import Role, allows
from weightdepot.api.schemas import answers, fields, requests
from weightdepot.store.errors import InvalidRequest, MemberConflict, UnknownModel
from weightdepot.store.index import records

router = APIRouter(prefix="/models/{model}", tags=["members"])


def _process(process: requests.Process) -> records.Process:
    return records.Process(process.host, process.pid, process.started)


@router.post(
    "/producers",
    summary="A producer rank joins",
    response_model=answers.Joined,
    responses=problems(MemberConflict, UnknownLayout),
)
@allows(Role.PUBLISH)
async def join_producer(
    model: fields.ModelName, body: requests.ProducerIn, index: IndexDep, planner: PlannerDep
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
        yields=body.yields,
    )


@router.post(
    "/producers/{rank}/announce",
    summary="A producer rank says what it still holds",
    response_model=answers.Announced,
    responses=problems(UnknownModel, MemberConflict, ChangedOnTheWay),
)
@allows(Role.PUBLISH)
async def announce(
    model: fields.ModelName, rank: fields.PathRank, body: requests.AnnounceIn, index: IndexDep
) -> dict[str, tuple[int, ...]]:
    """After a join, to an index that may have lost its state: a version whose parts are all announced is
    ready again. What the index still knows stays as it is. Send the tilings first."""
    held = [_held(model, rank, item) for item in body.held]
    ready = await index.announce(
        model, rank, body.world_size, body.session, body.retention, held, body.highest
    )
    return {"ready": tuple(ready)}


def _held(model: str, rank: int, item: requests.HeldIn) -> records.Held:
    part = item.part
    if part.rank != rank:
        raise InvalidRequest(
            f"rank {rank} announces a part of version {item.version} of {model!r} that is of rank {part.rank}"
        )
    check_digests(model, item.version, rank, item.digests, part.digests)
    return records.Held(
        item.version,
        item.attempt,
        item.slot,
        item.tiling,
        records.Part(part.rank, part.session, part.endpoints, part.nbytes, part.digests, part.stats),
        item.digests,
    )


def check_digests(model: str, version: int, rank: int, tile_digests: bytes, stated: str) -> None:
    """Raises ChangedOnTheWay where the tile digests are not those that `stated` was made of."""
    actual = xxhash.xxh3_128_hexdigest(tile_digests)
    if actual != stated:
        raise ChangedOnTheWay(
            f"the tile digests of rank {rank} of version {version} of {model!r} hash to {actual}, "
            f"not to {stated} as stated: they were changed on their way; send them again",
            model=model,
            version=version,
            rank=rank,
        )


@router.post(
    "/groups/{group}/consumers",
    summary="A rank of a consumer group joins",
    response_model=answers.Joined,
    responses=problems(MemberConflict, UnknownLayout),
)
@allows(Role.CONSUME)
async def join_consumer(
    model: fields.ModelName,
    group: fields.GroupName,
    body: requests.ConsumerIn,
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
        observer=body.observer,
    )


@router.put(
    "/groups/{group}/consumers/{rank}/layout",
    summary="A consumer rank states its layout",
    status_code=204,
    response_model=None,
    response_class=Response,
    responses=problems(MemberConflict, UnknownLayout, UnknownModel),
)
@allows(Role.CONSUME)
async def set_layout(
    model: fields.ModelName,
    group: fields.GroupName,
    rank: fields.PathRank,
    *,
    body: requests.LayoutChange,
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
@allows(Role.CONSUME, Role.PUBLISH)
async def leave(model: fields.ModelName, session: fields.Session, index: IndexDep, caller: CallerDep) -> None:
    """A producer's memory goes with it: the versions that it was part of are freed."""
    if Role.PUBLISH not in caller.roles:
        found = await index.model(model)
        if any(member.session == session for member in found.producers):
            raise Forbidden(
                f"token {caller.name!r} may not end a producer of {model!r}: that takes the role publish",
                roles=["publish"],
            )
    await index.leave(model, session)


@router.post(
    "/members/{session}/heartbeat",
    summary="A member is alive",
    response_model=answers.Heartbeat,
    responses=problems(UnknownModel),
)
@allows(Role.CONSUME, Role.PUBLISH)
async def heartbeat(
    model: fields.ModelName, session: fields.Session, body: requests.HeartbeatIn, index: IndexDep
) -> records.Heartbeat:
    """Renews its membership and the leases of its rounds; a lease that has ended stays ended."""
    rounds = [(held.group, held.round) for held in body.rounds]
    return await index.heartbeat(model, session, body.ttl, rounds=rounds, lease_ttl=body.lease_ttl)
