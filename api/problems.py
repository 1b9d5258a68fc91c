"""Every failure leaves as a problem detail (RFC 9457): ours, the framework's, and what nobody foresaw."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from weightdepot.store.errors import (
    PROBLEM_BASE,
    IntegrityError,
    InvalidRequest,
    LayoutError,
    Unauthorized,
    WaitTimeout,
    WeightDepotError,
)

MEDIA_TYPE = "application/problem+json"
FAULTS_SHOWN = LayoutError.SHOWN

log = logging.getLogger("weightdepot.api")


class WrongRun(InvalidRequest):
    """A member of one run talks to the controller of another."""

    status, title = 409, "Another run"


class TokenRefused(Unauthorized):
    """No token where one is wanted, or one that nobody was given."""

    title = "A token is wanted"


class Forbidden(Unauthorized):
    """The token is known, and does not allow this."""

    status, title = 403, "The token does not allow this"


class UnknownLayout(InvalidRequest):
    status, title = 404, "No such layout"


class NotYet(WaitTimeout):
    """What a request was held for did not come in its time. Nothing has failed, hence no 5xx."""

    status, title = 404, "Not there yet"


class ChangedOnTheWay(IntegrityError):
    """What a request carries does not hash to what it states."""

    status = 422


class NothingReady(WeightDepotError):
    """Asked without waiting, and there is nothing yet."""

    slug, status, title = "nothing-ready", 404, "Nothing is ready yet"
    retryable = True


class ProblemResponse(Response):
    media_type = MEDIA_TYPE

    def __init__(self, problem: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        # ASCII, so that half a surrogate pair in a message cannot fail to encode
        content = json.dumps(problem, ensure_ascii=True, default=str).encode("ascii")
        status = int(problem.get("status", 500))
        super().__init__(content, status_code=status, headers=dict(headers or {}))


def answer(error: WeightDepotError) -> ProblemResponse:
    return ProblemResponse(error.to_problem(), _headers(error))


def _headers(error: WeightDepotError) -> dict[str, str]:
    if error.status == 401:
        return {"WWW-Authenticate": 'Bearer realm="weightdepot"'}
    if isinstance(error, Forbidden) and "roles" in error.details:
        scope = " ".join(error.details["roles"])
        return {
            "WWW-Authenticate": f'Bearer realm="weightdepot", error="insufficient_scope", scope="{scope}"'
        }
    return {"Retry-After": "1"} if error.status == 503 else {}


def http_problem(status: int, detail: str) -> dict[str, Any]:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Error"
    return {
        "type": PROBLEM_BASE + phrase.lower().replace(" ", "-"),
        "title": phrase,
        "status": status,
        "detail": detail,
    }


def _where(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part)[:60] for part in location)


def from_validation(error: RequestValidationError) -> InvalidRequest:
    """All faults, each with its place; what was sent is not repeated, it may be large or secret."""
    faults = [
        {"where": _where(fault["loc"]), "reason": str(fault["msg"]).removeprefix("Value error, ")}
        for fault in error.errors()
    ]
    shown = "; ".join(f"{f['where']}: {f['reason']}" for f in faults[:FAULTS_SHOWN])
    more = f"; and {len(faults) - FAULTS_SHOWN} more" if len(faults) > FAULTS_SHOWN else ""
    return InvalidRequest(f"the request is not valid: {shown}{more}", faults=faults[:100])


def install(app: FastAPI, count: Callable[[str], None]) -> None:
    """Register the handlers: first the known errors, last the one for what is a bug of ours. `count` is told
    the kind of each problem."""

    @app.exception_handler(WeightDepotError)
    async def ours(request: Request, error: WeightDepotError) -> Response:
        count(error.slug)
        if error.status >= 500:
            # that a wait was in vain is an ordinary answer to a long poll
            level = logging.DEBUG if isinstance(error, WaitTimeout) else logging.WARNING
            known = {name: error.details.get(name) for name in ("model", "version", "rank", "group")}
            known |= {"status": error.status, "path": request.url.path}
            log.log(level, "%s %s: %s", request.method, request.url.path, error.message, extra=known)
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:  # noqa: ARG001
        count("invalid")
        return answer(from_validation(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        if error.status_code in (404, 405):
            detail = f"{request.method} {request.url.path}: {detail}; the routes are listed at /docs"
        return ProblemResponse(http_problem(error.status_code, detail), error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        count("bug")
        # the server logs the traceback; the caller gets no inside of ours
        log.error("unforeseen error in %s %s: %r", request.method, request.url.path, error)
        detail = f"an error in weightdepot itself ({type(error).__name__}); the controller's log has more"
        return ProblemResponse(http_problem(500, detail))
