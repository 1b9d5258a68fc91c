"""How the API describes itself: problems by status, one place for the texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from weightdepot.api.problems import MEDIA_TYPE, Forbidden, TokenRefused, WrongRun
from weightdepot.api.roles import Role, asked_of
from weightdepot.api.schemas.answers import Problem
from weightdepot.store.errors import IndexUnavailable, InvalidRequest, WeightDepotError

DESCRIPTION = """
Tracks the versions of a policy's weights: who publishes them, who holds which, and who may read what.
No weights pass through here; members read them from each other.

* Every failure is a problem detail (RFC 9457, `application/problem+json`) whose `type` ends in the name
  of the error.
* Every POST may be repeated: members are told apart by session, rank and round.
* Where `wait` is taken, the request is held until the answer is there, for at most 30 s. Time up: either
  `{"wait": {...}}` that says what is missing, or the problem `wait-timeout` (404).
* Where the controller has tokens, each request states one (`Authorization: Bearer ...`); which role an
  operation takes is said with it (`x-roles`: one of them).
* Times are Unix seconds of the index's clock.
"""

TAGS = [
    {"name": "service", "description": "Is it there, and can it work?"},
    {"name": "models", "description": "What is published under which name."},
    {"name": "members", "description": "Trainer ranks and rollout ranks: come, stay alive, go."},
    {"name": "versions", "description": "Open, seal, abort; find the newest."},
    {"name": "planning", "description": "Layouts, tilings and plans, in their binary form."},
    {"name": "operations", "description": "Modes, holding and releasing, pins and tags, convergence."},
    {"name": "events", "description": "Changes, as they happen."},
    {"name": "groups", "description": "Ranks that move together, and their rounds."},
]

_REF = {"$ref": "#/components/schemas/Problem"}


def problems(*errors: type[WeightDepotError]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may fail so; what any route may answer is added."""
    by_status: dict[int, list[str]] = {}
    every: tuple[type[WeightDepotError], ...] = (*errors, InvalidRequest, WrongRun, IndexUnavailable)
    for error in every:
        titles = by_status.setdefault(error.status, [])
        if f"{error.title} (`{error.slug}`)" not in titles:
            titles.append(f"{error.title} (`{error.slug}`)")
    return {status: _problem(titles) for status, titles in sorted(by_status.items())}


def _problem(titles: Sequence[str]) -> dict[str, Any]:
    return {"description": "; ".join(titles), "content": {MEDIA_TYPE: {"schema": _REF}}}


OCTETS = "application/octet-stream"
BINARY_BODY = {
    "requestBody": {"required": True, "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}
}


def binary(description: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` entry of a route that answers with bytes."""
    schema = {"type": "string", "format": "binary"}
    return {200: {"description": description, "content": {OCTETS: {"schema": schema}}}}


def install(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Replace the app's schema maker by one that knows the problem's schema, and each route's roles."""
    roles = {
        (route.path_format, method.lower()): sorted(asked_of(route.endpoint, method))
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                description=app.description,
                tags=TAGS,
                routes=app.routes,
            )
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema(
                ref_template="#/components/schemas/{model}"
            )
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path, methods in schema["paths"].items():
                for method, operation in methods.items():
                    _guard(operation, roles.get((path.removeprefix("/v1"), method), []))
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _guard(operation: dict[str, Any], roles: Sequence[str]) -> None:
    """Say which roles an operation asks for, and how it refuses."""
    if not roles:
        return
    operation["x-roles"] = [str(Role(role).value) for role in roles]
    # none at all too: a controller without tokens asks for none
    operation["security"] = [{"token": []}, {}]
    for error in (TokenRefused, Forbidden):
        operation["responses"].setdefault(str(error.status), _problem([f"{error.title} (`{error.slug}`)"]))
