"""Models, and the checkpoint that each publishes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from weightdepot.api.asking import missing_ranks, patiently, producer_layouts, timed_out
from weightdepot.api.conditional import NOT_MODIFIED, IfNoneMatch, answered
from weightdepot.api.dependencies import IndexDep, PlannerDep, WaitDep, WaitersDep
from weightdepot.api.openapi import problems
from weightdepot.api.planner import StillPlanning
from weightdepot.api.problems import NotYet
from weightdepot.api.schemas import answers, fields
from weightdepot.api.settings import PATIENCE
from weightdepot.store.errors import LayoutError, UnknownModel
from weightdepot.store.index import records

router = APIRouter(prefix="/models", tags=["models"])


@router.get("", summary="All models", responses=problems())
async def models(index: IndexDep) -> answers.Models:
    return answers.Models(models=sorted(await index.models()))


@router.get(
    "/{model}",
    summary="One model",
    response_model=answers.Model,
    responses={**problems(UnknownModel), **NOT_MODIFIED},
)
async def model(
    model: fields.ModelName,
    index: IndexDep,
    request: Request,
    if_none_match: IfNoneMatch = None,  # noqa: ARG001
) -> Response:
    """Its producer ranks, and the versions that still matter."""
    return answered(request, await index.model(model))


@router.get(
    "/{model}/manifest",
    summary="The checkpoint that is published",
    response_model=answers.Manifest,
    responses=problems(UnknownModel, LayoutError, NotYet),
)
async def manifest(
    model: fields.ModelName, wait: WaitDep, index: IndexDep, planner: PlannerDep, waiters: WaitersDep
) -> Response:
    """Names, shapes and data types, once every producer rank has joined."""

    async def attempt() -> bytes | records.Wait:
        found = await index.model(model)
        missing = missing_ranks(found)
        if missing is not None:
            return missing
        try:
            return await planner.manifest(producer_layouts(found), max(wait, PATIENCE))
        except StillPlanning:
            return records.Wait("planning", f"the manifest of {model!r} is being made", {"model": model})

    answer = await waiters.until(model, patiently(model, attempt, wait), wait)
    if isinstance(answer, records.Wait):
        raise timed_out(answer, wait)
    return Response(answer, media_type="application/json")
