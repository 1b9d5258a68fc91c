"""What people decide: how a model is synchronized, which version is served, what is kept."""

from __future__ import annotations

from fastapi import APIRouter, Response

from weightdepot.api.asking import last_look
from weightdepot.api.dependencies import IndexDep, WaitDep, WaitersDep
from weightdepot.api.openapi import problems
from weightdepot.api.roles import Role, allows
from weightdepot.api.schemas import answers, fields, requests
from weightdepot.store.errors import UnknownModel, VersionGone
from weightdepot.store.index import records

router = APIRouter(prefix="/models/{model}", tags=["operations"])


@router.put(
    "/policy",
    summary="Set how versions are synchronized",
    response_model=answers.Model,
    responses=problems(UnknownModel),
)
@allows(Role.ADMIN)
async def set_policy(model: fields.ModelName, body: requests.PolicyIn, index: IndexDep) -> records.Model:
    """Holds from the next publish on."""
    return await index.set_policy(model, records.Policy(body.mode, body.max_lag))


@router.put(
    "/current",
    summary="Hold the model at a version",
    response_model=answers.Model,
    responses=problems(UnknownModel, VersionGone),
)
@allows(Role.ADMIN)
async def hold(model: fields.ModelName, body: requests.VersionIn, index: IndexDep) -> records.Model:
    """Roll back: groups that ask for the newest are given this one, which stays until it is released.

    Publishing goes on. The version must be ready.
    """
    return await index.hold(model, body.version)


@router.delete(
    "/current",
    summary="End the hold",
    response_model=answers.Model,
    responses=problems(UnknownModel),
)
@allows(Role.ADMIN)
async def release(model: fields.ModelName, index: IndexDep) -> records.Model:
    """The newest version is the current one again. Without a hold this changes nothing."""
    return await index.release(model)


@router.put(
    "/tags/{tag}",
    summary="Give a version a name",
    response_model=answers.Version,
    responses=problems(UnknownModel, VersionGone),
)
@allows(Role.PUBLISH)
async def tag(
    model: fields.ModelName, tag: fields.TagName, body: requests.VersionIn, index: IndexDep
) -> records.Version:
    """A name points to one version, which is kept for as long; moving it is one step."""
    return await index.tag(model, tag, body.version)


@router.delete(
    "/tags/{tag}",
    summary="Take a name away",
    status_code=204,
    response_model=None,
    response_class=Response,
    responses=problems(UnknownModel),
)
@allows(Role.PUBLISH)
async def untag(model: fields.ModelName, tag: fields.TagName, index: IndexDep) -> None:
    """Its version is kept no longer than any other. A name that points nowhere is no error."""
    await index.untag(model, tag)


@router.put(
    "/versions/{version}/pin",
    summary="Keep a version",
    response_model=answers.Version,
    responses=problems(UnknownModel, VersionGone),
)
@allows(Role.PUBLISH)
async def pin(model: fields.ModelName, version: fields.PathNumber, index: IndexDep) -> records.Version:
    """It is not retired, however many come after it, and takes up memory for as long."""
    return await index.pin(model, version)


@router.delete(
    "/versions/{version}/pin",
    summary="Keep a version no longer",
    response_model=answers.Version,
    responses=problems(UnknownModel, VersionGone),
)
@allows(Role.PUBLISH)
async def unpin(model: fields.ModelName, version: fields.PathNumber, index: IndexDep) -> records.Version:
    return await index.unpin(model, version)


@router.get(
    "/convergence",
    summary="Whether all groups serve the current version",
    response_model=answers.Convergence,
    responses=problems(UnknownModel),
)
async def convergence(
    model: fields.ModelName, wait: WaitDep, index: IndexDep, waiters: WaitersDep
) -> records.Convergence:
    """With `wait`: answers when they do, or when the time is up."""
    return await last_look(
        waiters, model, lambda: index.convergence(model), lambda seen: seen.converged, wait
    )
