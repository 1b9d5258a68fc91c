"""Layouts by digest, in their binary form."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from weightdepot.api import schemas
from weightdepot.api.dependencies import PlannerDep
from weightdepot.api.openapi import binary, problems
from weightdepot.api.problems import UnknownLayout
from weightdepot.store.errors import LayoutError

router = APIRouter(prefix="/layouts", tags=["planning"])

OCTETS = "application/octet-stream"
_BODY = {
    "requestBody": {"required": True, "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.put(
    "/{digest}",
    summary="Keep a layout",
    response_model=schemas.LayoutStored,
    responses=problems(LayoutError),
    openapi_extra=_BODY,
)
async def put_layout(digest: schemas.Digest, request: Request, planner: PlannerDep) -> schemas.LayoutStored:
    """Decodes and checks it in full, and compares the digest. Sending it again is harmless."""
    layout = await planner.put_layout(digest, await request.body())
    return schemas.LayoutStored(
        digest=digest, tensors=len(layout.tensors), placements=len(layout.table), nbytes=layout.nbytes
    )


@router.get(
    "/{digest}",
    summary="A layout",
    response_class=Response,
    responses={**problems(UnknownLayout), **binary("The layout, compressed.")},
)
async def get_layout(digest: schemas.Digest, planner: PlannerDep) -> Response:
    return Response(await planner.layout(digest), media_type=OCTETS)
