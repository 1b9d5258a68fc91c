"""Versions: opened by all producer ranks, sealed part by part, found by readers."""

from __future__ import annotations

import asyncio
from typing import Annotated

import xxhash
from fastapi import APIRouter, Query

from weightdepot.api import schemas
from weightdepot.api.asking import (
    holder,
    missing_ranks,
    newest_ready,
    patiently,
    producer_layouts,
    reader_layouts,
    timed_out,
)
from weightdepot.api.dependencies import IndexDep, PlannerDep, WaitDep, WaitersDep
from weightdepot.api.openapi import problems
from weightdepot.api.planner import StillPlanning
from weightdepot.api.problems import NothingReady
from weightdepot.api.settings import PATIENCE
from weightdepot.store.errors import (
    IntegrityError,
    LayoutError,
    MemberConflict,
    PublishAborted,
    UnknownModel,
    VersionGone,
    VersionNotNewer,
    WaitTimeout,
)
from weightdepot.store.index import records
from weightdepot.store.index.records import Grant, VersionState, Wait

router = APIRouter(prefix="/models/{model}/versions", tags=["versions"])

MAX_RANKS_ASKED = 4096


@router.get(
    "",
    summary="The versions that still matter",
    response_model=schemas.Versions,
    responses=problems(UnknownModel),
)
async def versions(model: schemas.ModelName, index: IndexDep) -> dict[str, tuple[records.Version, ...]]:
    """Open, ready and retired ones, and the last few that were freed or aborted."""
    return {"versions": (await index.model(model)).versions}


@router.post(
    "",
    summary="Open a version",
    response_model=schemas.GrantOrWait,
    response_model_exclude_unset=True,
    responses=problems(UnknownModel, MemberConflict, VersionNotNewer, LayoutError),
)
async def open_version(
    model: schemas.ModelName,
    body: schemas.OpenIn,
    *,
    wait: WaitDep,
    index: IndexDep,
    planner: PlannerDep,
    waiters: WaitersDep,
) -> dict[str, Grant | Wait]:
    """Every producer rank does so, and all are given the same slot.

    Waits for the missing ranks, for another open version, for a slot that no reader holds, and for the
    tiling where the layouts are new.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait

    async def attempt() -> Grant | Wait:
        found = await index.model(model)
        held = holder(found, body.rank)
        if held is None or held.session != body.session:
            raise MemberConflict(
                f"this process does not hold producer rank {body.rank} of {model!r} (any more): "
                "it was replaced or removed; join again",
                model=model,
                rank=body.rank,
                holder=held.session if held else None,
            )
        missing = missing_ranks(found)
        if missing is not None:
            return missing
        same = next((v for v in found.versions if v.version == body.version), None)
        if same is not None and same.state is VersionState.OPEN and same.incarnation == found.incarnation:
            tiling = same.tiling  # as it was opened; consumers may have come since
        else:
            readers = reader_layouts(await index.groups(model))
            try:
                tiling = await planner.tiling(
                    producer_layouts(found), readers, max(deadline - loop.time(), PATIENCE)
                )
            except StillPlanning:
                return Wait(
                    "planning",
                    f"the tiling of {found.world_size} producer and {len(readers)} consumer layouts of "
                    f"{model!r} is being made",
                    {"model": model, "version": body.version},
                )
        # the incarnation that the layouts were read of: if it changed, the index answers with a wait
        return await index.open_version(
            model, body.version, body.rank, body.session, tiling, found.incarnation, body.seal_timeout
        )

    answer = await waiters.until(model, attempt, wait)
    return {"wait": answer} if isinstance(answer, Wait) else {"grant": answer}


@router.get(
    "/latest",
    summary="The newest ready version",
    response_model=schemas.Version,
    responses=problems(UnknownModel, NothingReady, WaitTimeout),
)
async def latest(
    model: schemas.ModelName,
    wait: WaitDep,
    index: IndexDep,
    waiters: WaitersDep,
    min_version: Annotated[schemas.PathNumber, Query(description="No older one will do.")] = 0,
) -> records.Version:
    """A long poll: with `wait`, it answers the moment that such a version becomes ready."""

    async def attempt() -> records.Version | Wait:
        found = await index.model(model)
        newest = newest_ready(found, min_version)
        if newest is not None:
            return newest
        have = f"the newest is {found.latest}" if found.latest is not None else "nothing is ready"
        at_least = f" of at least {min_version}" if min_version else ""
        return Wait(
            "version",
            f"{model!r} has no ready version{at_least} yet ({have})",
            {"model": model, "min_version": min_version, "latest": found.latest},
        )

    answer = await waiters.until(model, patiently(model, attempt, wait), wait)
    if not isinstance(answer, Wait):
        return answer
    if wait <= 0:
        raise NothingReady(f"{answer.message}; give wait=SECONDS to wait for it", **answer.details)
    raise timed_out(answer, wait)


@router.get(
    "/{version}",
    summary="One version",
    response_model=schemas.Version,
    responses=problems(UnknownModel, VersionGone),
)
async def version(model: schemas.ModelName, version: schemas.PathNumber, index: IndexDep) -> records.Version:
    return await index.version(model, version)


@router.post(
    "/{version}/parts/{rank}",
    summary="Seal a part",
    response_model=schemas.Version,
    responses=problems(UnknownModel, PublishAborted, MemberConflict, VersionGone, IntegrityError),
)
async def seal(
    model: schemas.ModelName,
    version: schemas.PathNumber,
    rank: schemas.PathRank,
    body: schemas.SealIn,
    index: IndexDep,
) -> records.Version:
    """This rank has written its part. The last seal makes the version ready, in one step."""
    actual = xxhash.xxh3_128_hexdigest(body.tile_digests)
    if actual != body.digests:
        raise IntegrityError(
            f"the tile digests of rank {rank} of version {version} of {model!r} hash to {actual}, "
            f"not to {body.digests} as stated: they were changed on their way; seal again",
            model=model,
            version=version,
            rank=rank,
        )
    part = records.Part(rank, body.session, body.endpoints, body.nbytes, body.digests)
    return await index.seal(model, version, rank, body.session, part, body.tile_digests)


@router.post(
    "/{version}/abort",
    summary="Abort an open version",
    response_model=schemas.Version,
    responses=problems(UnknownModel, MemberConflict, VersionGone, PublishAborted),
)
async def abort(
    model: schemas.ModelName, version: schemas.PathNumber, body: schemas.AbortIn, index: IndexDep
) -> records.Version:
    """Nothing of it is made visible; the same number may be opened again."""
    return await index.abort(model, version, body.session, body.reason)


@router.post(
    "/{version}/lost",
    summary="Report that a source cannot be reached",
    response_model=schemas.Version,
    responses=problems(UnknownModel, VersionGone),
)
async def report_lost(
    model: schemas.ModelName, version: schemas.PathNumber, body: schemas.LostIn, index: IndexDep
) -> records.Version:
    """Frees the version if that rank's process is gone; changes nothing while it lives."""
    return await index.report_lost(model, version, body.rank, body.reason)


@router.get(
    "/{version}/digests",
    summary="The tile digests of a version",
    response_model=schemas.Digests,
    responses=problems(UnknownModel, VersionGone),
)
async def digests(
    model: schemas.ModelName,
    version: schemas.PathNumber,
    index: IndexDep,
    ranks: Annotated[
        str | None,
        Query(
            pattern=r"^[0-9]{1,5}(,[0-9]{1,5})*$",
            max_length=6 * MAX_RANKS_ASKED,
            description="Producer ranks, separated by commas; all that have sealed when absent.",
            examples=["0,1"],
        ),
    ] = None,
) -> dict[str, dict[int, bytes]]:
    if ranks is None:
        wanted = list((await index.version(model, version)).sealed)
    else:
        wanted = sorted({int(rank) for rank in ranks.split(",")})
    return {"digests": await index.digests(model, version, wanted)}
