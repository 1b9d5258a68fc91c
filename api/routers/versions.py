"""Versions: opened by all producer ranks, sealed part by part, found by readers."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from weightdepot.api.asking import (
    holder,
    last_look,
    missing_ranks,
    patiently,
    producer_layouts,
    reader_layouts,
    timed_out,
)
from weightdepot.api.conditional import NOT_MODIFIED, IfNoneMatch, answered, matches, version_tag
from weightdepot.api.controller import Controller
from weightdepot.api.dependencies import ControllerDep, IndexDep, PlannerDep, WaitDep, WaitersDep
from weightdepot.api.openapi import problems
from weightdepot.api.planner import StillPlanning, Wanted
from weightdepot.api.problems import ChangedOnTheWay, NothingReady, NotYet
from weightdepot.api.roles import Role, allows
from weightdepot.api.routers.members import check_digests
from weightdepot.api.schemas import answers, fields, requests
from weightdepot.api.settings import PATIENCE
from weightdepot.store.errors import (
    LayoutError,
    MemberConflict,
    PublishAborted,
    UnknownModel,
    VersionGone,
    VersionNotNewer,
)
from weightdepot.store.index import records
from weightdepot.store.index.records import Grant, VersionState, Wait

router = APIRouter(prefix="/models/{model}/versions", tags=["versions"])

MAX_RANKS_ASKED = 4096


@router.get(
    "",
    summary="The versions that still matter",
    response_model=answers.Versions,
    responses=problems(UnknownModel),
)
async def versions(model: fields.ModelName, index: IndexDep) -> dict[str, tuple[records.Version, ...]]:
    """Open, ready and retired ones, and the last few that were freed or aborted."""
    return {"versions": (await index.model(model)).versions}


@router.post(
    "",
    summary="Open a version",
    response_model=answers.GrantOrWait,
    response_model_exclude_unset=True,
    responses=problems(UnknownModel, MemberConflict, VersionNotNewer, LayoutError),
)
@allows(Role.PUBLISH)
async def open_version(
    model: fields.ModelName,
    body: requests.OpenIn,
    *,
    wait: WaitDep,
    controller: ControllerDep,
    index: IndexDep,
    planner: PlannerDep,
    waiters: WaitersDep,
) -> dict[str, Grant | Wait]:
    """Every producer rank does so, and all are given the same slot.

    Waits for the missing ranks, for another open version, for a slot that no reader holds, for groups that
    lag too much (mode `bounded`), and for the tiling where the layouts are new.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait

    async def quick() -> Grant | Wait | None:
        """One script, where nothing has changed since the last version; None where something has."""
        known = planner.wanted.get(model)
        if known is None:
            return None
        answer = await index.open_version(
            model, body.version, body.rank, body.session, known.tiling, known.incarnation,
            body.seal_timeout, live=body.live, membership=known.membership,
        )  # fmt: skip
        if isinstance(answer, Wait) and answer.reason == "ranks":
            planner.wanted.pop(model, None)
            return None
        return answer

    async def attempt() -> Grant | Wait:
        answer = await quick()
        if answer is not None:
            return answer
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
            planner.wanted[model] = Wanted(found.membership, found.incarnation, tiling)
        # the incarnation that the layouts were read of: if it changed, the index answers with a wait
        return await index.open_version(
            model,
            body.version,
            body.rank,
            body.session,
            tiling,
            found.incarnation,
            body.seal_timeout,
            live=body.live,
        )

    with controller.metrics.openings.asking(model, body.version, body.rank) as told:

        async def noted() -> Grant | Wait:
            answer = await attempt()
            told(answer)
            return answer

        answer = await waiters.until(model, noted, wait)
    if isinstance(answer, Wait):
        controller.metrics.waited(model, answer.reason)
        return {"wait": answer}
    return {"grant": answer}


# What happens to versions that are not ready yet, and within groups, does not change what is newest.
ELSEWHERE = frozenset({"open", "sealed", "round", "staged", "applied"})

MinVersion = Annotated[fields.PathNumber, Query(description="No older one will do.")]
_NEWEST = {**problems(UnknownModel, NothingReady, NotYet), **NOT_MODIFIED}


@router.get("/latest", summary="The newest ready version", response_model=answers.Version, responses=_NEWEST)
async def latest(
    model: fields.ModelName,
    request: Request,
    wait: WaitDep,
    controller: ControllerDep,
    min_version: MinVersion = 0,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """A long poll: with `wait`, it answers the moment that such a version becomes ready; with
    `If-None-Match` too, the moment that it is another one."""
    return await _newest(controller, model, min_version, False, request, if_none_match, wait)


@router.get("/current", summary="The current version", response_model=answers.Version, responses=_NEWEST)
async def current(
    model: fields.ModelName,
    request: Request,
    wait: WaitDep,
    controller: ControllerDep,
    min_version: MinVersion = 0,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """What groups that ask for the newest are given: the newest ready version, or the one that the model is
    held at. A long poll, as `latest`."""
    return await _newest(controller, model, min_version, True, request, if_none_match, wait)


async def _newest(
    controller: Controller,
    model: str,
    min_version: int,
    held: bool,
    request: Request,
    known: str | None,
    wait: float,
) -> Response:
    unchanged: records.Version | None = None

    async def look() -> records.Version | Wait:
        return await controller.index.latest(model, min_version, current=held)

    async def attempt() -> records.Version | Wait:
        nonlocal unchanged
        found: records.Version | Wait = await controller.together.look((model, min_version, held), look)
        unchanged = None
        if not isinstance(found, Wait) and matches(known, version_tag(found)):
            unchanged = found
            return Wait("version", "unchanged")
        return found

    answer = await controller.waiters.until(model, patiently(model, attempt, wait), wait, deaf=ELSEWHERE)
    if unchanged is not None:
        return answered(request, unchanged, version_tag(unchanged))
    if not isinstance(answer, Wait):
        return answered(request, answer, version_tag(answer))
    if wait <= 0:
        raise NothingReady(f"{answer.message}; give wait=SECONDS to wait for it", **answer.details)
    raise timed_out(answer, wait)


@router.get(
    "/{version}",
    summary="One version",
    response_model=answers.Version,
    responses=problems(UnknownModel, VersionGone),
)
async def version(model: fields.ModelName, version: fields.PathNumber, index: IndexDep) -> records.Version:
    return await index.version(model, version)


@router.post(
    "/{version}/parts/{rank}",
    summary="Seal a part",
    response_model=answers.Version,
    responses=problems(UnknownModel, PublishAborted, MemberConflict, VersionGone, ChangedOnTheWay),
)
@allows(Role.PUBLISH)
async def seal(
    model: fields.ModelName,
    version: fields.PathNumber,
    rank: fields.PathRank,
    body: requests.SealIn,
    controller: ControllerDep,
    index: IndexDep,
) -> records.Version:
    """This rank has written its part. The last seal makes the version ready, in one step."""
    check_digests(model, version, rank, body.tile_digests, body.digests)
    part = records.Part(rank, body.session, body.endpoints, body.nbytes, body.digests, body.stats)
    sealed = await index.seal(model, version, rank, body.session, part, body.tile_digests)
    controller.metrics.sealed(model, body.nbytes, body.stats)
    return sealed


@router.post(
    "/{version}/abort",
    summary="Abort an open version",
    response_model=answers.Version,
    responses=problems(UnknownModel, MemberConflict, VersionGone, PublishAborted),
)
@allows(Role.PUBLISH)
async def abort(
    model: fields.ModelName, version: fields.PathNumber, body: requests.EndIn, index: IndexDep
) -> records.Version:
    """Nothing of it is made visible; the same number may be opened again."""
    return await index.abort(model, version, body.session, body.reason)


@router.post(
    "/{version}/withdraw",
    summary="Take a version back",
    response_model=answers.Version,
    responses=problems(UnknownModel, MemberConflict, VersionGone),
)
@allows(Role.PUBLISH)
async def withdraw(
    model: fields.ModelName, version: fields.PathNumber, body: requests.EndIn, index: IndexDep
) -> records.Version:
    """By a producer of it, at once: its memory is going to change. Who still reads it has lost its lease."""
    return await index.withdraw(model, version, body.session, body.reason)


@router.get(
    "/{version}/applied",
    summary="Which groups have applied a version",
    response_model=answers.Applied,
    responses=problems(UnknownModel, VersionGone),
)
async def applied(
    model: fields.ModelName,
    version: fields.PathNumber,
    *,
    wait: WaitDep,
    index: IndexDep,
    waiters: WaitersDep,
) -> records.Applied:
    """With `wait`: answers when no live group is pending, or when the time is up."""
    return await last_look(
        waiters, model, lambda: index.applied(model, version), lambda seen: not seen.pending, wait
    )


@router.post(
    "/{version}/lost",
    summary="Report that a source cannot be reached",
    response_model=answers.Version,
    responses=problems(UnknownModel, VersionGone),
)
@allows(Role.CONSUME, Role.PUBLISH)
async def report_lost(
    model: fields.ModelName, version: fields.PathNumber, body: requests.LostIn, index: IndexDep
) -> records.Version:
    """Frees the version if that rank's process is gone; changes nothing while it lives."""
    return await index.report_lost(model, version, body.rank, body.reason)


@router.get(
    "/{version}/digests",
    summary="The tile digests of a version",
    response_model=answers.Digests,
    responses=problems(UnknownModel, VersionGone),
)
async def digests(
    model: fields.ModelName,
    version: fields.PathNumber,
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
