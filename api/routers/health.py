"""Whether the controller is there, and whether it can work."""

from __future__ import annotations

from fastapi import APIRouter

from weightdepot.api.dependencies import ControllerDep
from weightdepot.api.openapi import problems
from weightdepot.api.release import release
from weightdepot.api.roles import allows
from weightdepot.api.schemas import answers

router = APIRouter(tags=["service"])


@router.get("/health", summary="Is the controller there?")
@allows()
async def health(controller: ControllerDep) -> answers.Health:
    """Answers without asking the index: for a supervisor that would restart what does not answer."""
    return answers.Health(status="ok", run=controller.settings.run, release=release())


@router.get("/ready", summary="Can the controller work?", responses=problems())
@allows()
async def ready(controller: ControllerDep) -> answers.Ready:
    """Asks the index: for a load balancer that would send requests elsewhere."""
    seconds = await controller.index.ping()
    return answers.Ready(status="ready", run=controller.settings.run, index_seconds=seconds)
