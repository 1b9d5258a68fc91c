"""Tilings and plans in their binary form. Their names say all that they are made of, so they never change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from weightdepot.api import schemas
from weightdepot.api.dependencies import PlannerDep, WaitDep
from weightdepot.api.openapi import binary, problems
from weightdepot.api.planner import StillPlanning
from weightdepot.api.problems import UnknownLayout
from weightdepot.api.settings import PATIENCE
from weightdepot.store.errors import LayoutError, VersionGone, WaitTimeout

router = APIRouter(prefix="/models/{model}", tags=["planning"])

_HEADERS = {"Cache-Control": "private, max-age=86400, immutable"}


async def _made(what: str, wait: float, make: Callable[[float], Awaitable[bytes]]) -> Response:
    patience = max(wait, PATIENCE)
    try:
        data = await make(patience)
    except StillPlanning as error:
        raise WaitTimeout(
            f"waited {patience:g} s: {what} is being made; ask again", reason="planning"
        ) from error
    return Response(data, media_type="application/octet-stream", headers=_HEADERS)


@router.get(
    "/tilings/{tiling}/sources/{rank}",
    summary="What a producer rank stores",
    response_class=Response,
    responses={**problems(VersionGone, WaitTimeout), **binary("A SourceTiling, compressed.")},
)
async def source_tiling(
    model: schemas.ModelName,
    tiling: schemas.TilingId,
    rank: schemas.PathRank,
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
        **problems(VersionGone, UnknownLayout, LayoutError, WaitTimeout),
        **binary("A Plan, compressed."),
    },
)
async def plan(
    model: schemas.ModelName,
    tiling: schemas.TilingId,
    layout: schemas.Digest,
    wait: WaitDep,
    planner: PlannerDep,
) -> Response:
    """Which tiles from which source, and where each element goes."""
    what = f"the plan for layout {layout} of {model!r}"
    return await _made(what, wait, lambda patience: planner.plan(tiling, layout, patience))
