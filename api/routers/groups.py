"""Consumer groups: which version each holds, and how far it is behind."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from weightdepot.api.asking import last_look
from weightdepot.api.conditional import NOT_MODIFIED, IfNoneMatch, answered
from weightdepot.api.dependencies import IndexDep, WaitDep, WaitersDep
from weightdepot.api.openapi import problems
from weightdepot.api.schemas import answers, fields
from weightdepot.store.errors import UnknownModel
from weightdepot.store.index import records

router = APIRouter(prefix="/models/{model}/groups", tags=["groups"])


@router.get(
    "",
    summary="All consumer groups",
    response_model=answers.Groups,
    responses={**problems(UnknownModel), **NOT_MODIFIED},
)
async def groups(
    model: fields.ModelName,
    index: IndexDep,
    request: Request,
    if_none_match: IfNoneMatch = None,  # noqa: ARG001
) -> Response:
    """Which rank holds which version."""
    return answered(request, {"groups": await index.groups(model)})


@router.get("/{group}", summary="One group", response_model=answers.Group, responses=problems(UnknownModel))
async def group(model: fields.ModelName, group: fields.GroupName, index: IndexDep) -> records.Group:
    return await index.group(model, group)


@router.get(
    "/{group}/freshness",
    summary="Whether a group is fresh enough",
    response_model=answers.Group,
    responses=problems(UnknownModel),
)
async def freshness(
    model: fields.ModelName,
    group: fields.GroupName,
    *,
    wait: WaitDep,
    index: IndexDep,
    waiters: WaitersDep,
    max_lag: Annotated[fields.PathNumber, Query(description="Published versions.")] = 0,
) -> records.Group:
    """With `wait`: answers when what the group serves is whole and at most `max_lag` versions behind, or when
    the time is up. Look at what it says."""
    return await last_look(
        waiters, model, lambda: index.group(model, group), lambda found: found.is_fresh(max_lag), wait
    )
