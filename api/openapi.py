"""How the API describes itself: problems by status, one place for the texts."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from weightdepot.api.problems import MEDIA_TYPE, WrongRun
from weightdepot.api.schemas import Problem
from weightdepot.store.errors import IndexUnavailable, InvalidRequest, WeightDepotError

DESCRIPTION = """
Tracks the versions of a policy's weights: who publishes them, who holds which, and who may read what.
No weights pass through here; members read them from each other.

* Every failure is a problem detail (RFC 9457, `application/problem+json`) whose `type` ends in the name
  of the error.
* Every POST may be repeated: members are told apart by session, rank and round.
* Where `wait` is taken, the request is held until the answer is there, for at most 30 s. Time up: either
  `{"wait": {...}}` that says what is missing, or the problem `wait-timeout`.
* Times are Unix seconds of the index's clock.
"""

TAGS = [
    {"name": "service", "description": "Is it there, and can it work?"},
    {"name": "models", "description": "What is published under which name."},
    {"name": "members", "description": "Trainer ranks and rollout ranks: come, stay alive, go."},
    {"name": "versions", "description": "Open, seal, abort; find the newest."},
    {"name": "planning", "description": "Layouts, tilings and plans, in their binary form."},
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
    return {
        status: {"description": "; ".join(titles), "content": {MEDIA_TYPE: {"schema": _REF}}}
        for status, titles in sorted(by_status.items())
    }


def binary(description: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` entry of a route that answers with bytes."""
    schema = {"type": "string", "format": "binary"}
    return {200: {"description": description, "content": {"application/octet-stream": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    """Replace the app's schema maker by one that knows the problem's schema."""

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
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            components["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
