"""What routes ask for: the controller's parts, a checked run, a capped wait."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Query, Request

from weightdepot.api.access import CALLER, Caller, check_roles
from weightdepot.api.controller import Controller
from weightdepot.api.planner import Planner
from weightdepot.api.problems import WrongRun
from weightdepot.api.roles import asked_of
from weightdepot.api.settings import DEFAULT_RUN, MAX_WAIT, RUN_HEADER
from weightdepot.api.waiting import Waiters
from weightdepot.store.index.index import Index


async def get_controller(request: Request) -> Controller:
    controller: Controller = request.app.state.controller
    return controller


ControllerDep = Annotated[Controller, Depends(get_controller)]


async def get_index(controller: ControllerDep) -> Index:
    return controller.index


async def get_waiters(controller: ControllerDep) -> Waiters:
    return controller.waiters


async def get_planner(controller: ControllerDep) -> Planner:
    return controller.planner


async def get_caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


async def check_access(request: Request) -> None:
    """Raises TokenRefused or Forbidden where the caller has none of the roles that the route asks for."""
    check_roles(await get_caller(request), asked_of(request.scope["endpoint"], request.method))


async def check_run(
    request: Request,
    controller: ControllerDep,
    run: Annotated[
        str | None,
        Header(
            alias=RUN_HEADER,
            description=f"The run that the caller belongs to. Absent: {DEFAULT_RUN!r} where something is "
            "changed, any where it is only read.",
        ),
    ] = None,
) -> None:
    """Raises WrongRun: members of another run never get in, whatever their names are."""
    if run is None and request.method == "GET":
        return
    stated = DEFAULT_RUN if run is None else run
    if stated != controller.settings.run:
        raise WrongRun(
            f"this controller serves run {controller.settings.run!r}, the call is for run {stated[:128]!r}: "
            f"use that run's controller, or set the run (header {RUN_HEADER})",
            serves=controller.settings.run,
        )


async def get_wait(
    controller: ControllerDep,
    wait: Annotated[
        float,
        Query(
            ge=0,
            allow_inf_nan=False,
            description=f"Seconds to hold the request until the answer is there; capped at {MAX_WAIT:.0f}.",
        ),
    ] = 0.0,
) -> float:
    return min(wait, controller.settings.timeouts.wait)


IndexDep = Annotated[Index, Depends(get_index)]
WaitersDep = Annotated[Waiters, Depends(get_waiters)]
PlannerDep = Annotated[Planner, Depends(get_planner)]
WaitDep = Annotated[float, Depends(get_wait)]
CallerDep = Annotated[Caller, Depends(get_caller)]
AccessCheck = Depends(check_access)
RunCheck = Depends(check_run)
