"""Metrics in Prometheus' text format."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import APIRouter, Response

from weightdepot.api.dependencies import ControllerDep
from weightdepot.api.metrics import CONTENT_TYPE
from weightdepot.api.openapi import problems
from weightdepot.store.errors import IndexUnavailable, UnknownModel
from weightdepot.store.index.index import Index
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
    seconds: float | None = None
    found: list[tuple[Model, list[Group]]] = []
    # Below Prometheus' patience, also where all connections to the index are held by calls that hang.
    looking = asyncio.create_task(_look(controller.index))
    done, _ = await asyncio.wait({looking}, timeout=controller.settings.timeouts.index_operation)
    if done:
        with contextlib.suppress(IndexUnavailable):
            seconds, found = looking.result()
    else:
        looking.cancel()  # not waited for: redis-py loses a cancellation that comes while it connects
    text = controller.metrics.exposition(found, controller.waiters.waiting, seconds)
    return Response(text, media_type=CONTENT_TYPE)


async def _look(index: Index) -> tuple[float, list[tuple[Model, list[Group]]]]:
    """Seconds of one round trip, and all that there is."""
    found: list[tuple[Model, list[Group]]] = []
    seconds = await index.ping()
    for name in await index.models():
        with contextlib.suppress(UnknownModel):  # forgotten since the names were listed
            found.append((await index.model(name), await index.groups(name)))
    return seconds, found
