"""Tilings and plans in their binary form. Their names say all that they are made of, so they never change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from weightdepot.api.dependencies import PlannerDep, WaitDep
from weightdepot.api.openapi import BINARY_BODY, OCTETS, binary, problems
from weightdepot.api.planner import StillPlanning
from weightdepot.api.problems import NotYet, UnknownLayout
from weightdepot.api.roles import Role, allows
from weightdepot.api.schemas import fields
from weightdepot.api.settings import PATIENCE
from weightdepot.store.errors import LayoutError, VersionGone

router = APIRouter(prefix="/models/{model}", tags=["planning"])

_HEADERS = {"Cache-Control": "private, max-age=86400, immutable"}


async def _made(what: str, wait: float, make: Callable[[float], Awaitable[bytes]]) -> Response:
    patience = max(wait, PATIENCE)
    try:
        data = await make(patience)
    except StillPlanning as error:
        raise NotYet(f"waited {patience:g} s: {what} is being made; ask again", reason="planning") from error
    return Response(data, media_type=OCTETS, headers=_HEADERS)


@router.get(
    "/tilings/{tiling}",
    summary="A whole tiling",
    response_class=Response,
    responses={**problems(VersionGone), **binary("A Tiling, compressed.")},
)
async def tiling(model: fields.ModelName, tiling: fields.TilingId, planner: PlannerDep) -> Response:  # noqa: ARG001
    """What all producer ranks store."""
    return Response(await planner.whole_tiling(tiling), media_type=OCTETS, headers=_HEADERS)


@router.put(
    "/tilings/{tiling}",
    summary="Keep a tiling",
    status_code=204,
    response_model=None,
    response_class=Response,
    responses=problems(),
    openapi_extra=BINARY_BODY,
)
@allows(Role.PUBLISH)
async def put_tiling(
    model: fields.ModelName,  # noqa: ARG001
    tiling: fields.TilingId,
    request: Request,
    planner: PlannerDep,
) -> None:
    """By a producer whose versions were made with it, for an index that has lost it. One that is known
    stays as it is."""
    await planner.put_tiling(tiling, await request.body())


@router.get(
    "/tilings/{tiling}/sources/{rank}",
    summary="What a producer rank stores",
    response_class=Response,
    responses={**problems(VersionGone, NotYet), **binary("A SourceTiling, compressed.")},
)
async def source_tiling(
    model: fields.ModelName,
    tiling: fields.TilingId,
    rank: fields.PathRank,
    wait: WaitDep,
    planner: PlannerDep,
) -> Response:
    """Its tiles, in the order in which they lie in its slot."""
    what = f"the tile table of rank {rank} of {model!r}"
    return await _made(what, wait, lambda patience: planner.source_tiling(tiling, rank, patience))


@router.get(
    "/plans/{tiling}/{layout}",
    summary="What a consumer rank reads",
    response_class=Response,
    responses={
        **problems(VersionGone, UnknownLayout, LayoutError, NotYet),
        **binary("A Plan, compressed."),
    },
)
async def plan(
    model: fields.ModelName,
    tiling: fields.TilingId,
    layout: fields.Digest,
    wait: WaitDep,
    planner: PlannerDep,
) -> Response:
    """Which tiles from which source, and where each element goes."""
    what = f"the plan for layout {layout} of {model!r}"
    return await _made(what, wait, lambda patience: planner.plan(tiling, layout, patience))
