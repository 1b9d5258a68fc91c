"""Whether the controller is there, and whether it can work."""

from __future__ import annotations

from fastapi import APIRouter

from weightdepot.api import schemas
from weightdepot.api.dependencies import ControllerDep
from weightdepot.api.openapi import problems
from weightdepot.api.release import release

router = APIRouter(tags=["service"])


@router.get("/health", summary="Is the controller there?")
async def health(controller: ControllerDep) -> schemas.Health:
    """Answers without asking the index: for a supervisor that would restart what does not answer."""
    return schemas.Health(status="ok", run=controller.settings.run, release=release())


@router.get("/ready", summary="Can the controller work?", responses=problems())
async def ready(controller: ControllerDep) -> schemas.Ready:
    """Asks the index: for a load balancer that would send requests elsewhere."""
    seconds = await controller.index.ping()
    return schemas.Ready(status="ready", run=controller.settings.run, index_seconds=seconds)
