"""What changes, as it happens: server-sent events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import StreamingResponse

from weightdepot.api.dependencies import ControllerDep
from weightdepot.api.feed import MEDIA_TYPE, TooManyListeners
from weightdepot.api.openapi import problems
from weightdepot.api.schemas import fields

router = APIRouter(tags=["events"])

_RESPONSES = {
    **problems(TooManyListeners),
    200: {
        "description": "`id`, `event` (its kind) and `data` (an Event as JSON) of each; comments in between "
        "are signs of life.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    },
}
# Nobody on the way may keep or gather what comes (nginx does unless it is told).
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Seconds = Annotated[
    float | None,
    Query(gt=0, le=fields.MAX_TTL, allow_inf_nan=False, description="End after so many seconds."),
]


@router.get(
    "/events", summary="Changes of all models", response_class=StreamingResponse, responses=_RESPONSES
)
async def events(
    controller: ControllerDep,
    model: Annotated[fields.ModelName | None, Query(description="Only this one.")] = None,
    seconds: Seconds = None,
) -> StreamingResponse:
    """The first is `subscribed`: from there on nothing is missed. It comes again when something may have
    been; then look. A listener that does not keep up is sent `lagged`, and let go."""
    return StreamingResponse(controller.feed.stream(model, seconds), media_type=MEDIA_TYPE, headers=_HEADERS)


@router.get(
    "/models/{model}/events",
    summary="Changes of one model",
    response_class=StreamingResponse,
    responses=_RESPONSES,
)
async def model_events(
    model: fields.ModelName, controller: ControllerDep, seconds: Seconds = None
) -> StreamingResponse:
    """As `/events`; the model need not exist yet."""
    return StreamingResponse(controller.feed.stream(model, seconds), media_type=MEDIA_TYPE, headers=_HEADERS)
