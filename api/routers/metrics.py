"""Metrics in Prometheus' text format."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Response

from weightdepot.api.dependencies import ControllerDep
from weightdepot.api.metrics import CONTENT_TYPE
from weightdepot.api.openapi import problems
from weightdepot.store.errors import IndexUnavailable, UnknownModel
from weightdepot.store.index.records import Group, Model

router = APIRouter(tags=["service"])


@router.get(
    "/metrics",
    summary="Metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **problems()},
)
async def metrics(controller: ControllerDep) -> Response:
    """For Prometheus. Without the index it still answers, and says so (`weightdepot_index_up 0`)."""
    index = controller.index
    found: list[tuple[Model, list[Group]]] = []
    seconds: float | None = None
    with contextlib.suppress(IndexUnavailable):
        seconds = await index.ping()
        for name in await index.models():
            with contextlib.suppress(UnknownModel):  # forgotten since the names were listed
                found.append((await index.model(name), await index.groups(name)))
    text = controller.metrics.exposition(found, controller.waiters.waiting, seconds)
    return Response(text, media_type=CONTENT_TYPE)
