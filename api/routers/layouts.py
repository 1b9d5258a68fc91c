"""Layouts by digest, in their binary form."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from weightdepot.api.dependencies import PlannerDep
from weightdepot.api.openapi import BINARY_BODY, OCTETS, binary, problems
from weightdepot.api.problems import UnknownLayout
from weightdepot.api.roles import Role, allows
from weightdepot.api.schemas import answers, fields
from weightdepot.store.errors import LayoutError

router = APIRouter(prefix="/layouts", tags=["planning"])


@router.put(
    "/{digest}",
    summary="Keep a layout",
    response_model=answers.LayoutStored,
    responses=problems(LayoutError),
    openapi_extra=BINARY_BODY,
)
@allows(Role.CONSUME, Role.PUBLISH)
async def put_layout(digest: fields.Digest, request: Request, planner: PlannerDep) -> answers.LayoutStored:
    """Decodes and checks it in full, and compares the digest. Sending it again is harmless."""
    layout = await planner.put_layout(digest, await request.body())
    return answers.LayoutStored(
        digest=digest, tensors=len(layout.tensors), placements=len(layout.table), nbytes=layout.nbytes
    )


@router.get(
    "/{digest}",
    summary="A layout",
    response_class=Response,
    responses={**problems(UnknownLayout), **binary("The layout, compressed.")},
)
async def get_layout(digest: fields.Digest, planner: PlannerDep) -> Response:
    return Response(await planner.layout(digest), media_type=OCTETS)
