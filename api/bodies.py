"""A limit on what a request may send, enforced while it arrives and not after."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightdepot.api.problems import ProblemResponse, http_problem


class BodyLimit:
    """ASGI middleware: 413 for a body of more than `limit` bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        text = f"the body is larger than the {self._limit} bytes that are taken"
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdecimal() and (len(stated) > 18 or int(stated) > self._limit):
            await ProblemResponse(http_problem(413, text))(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                # raised where the body is read, hence inside the handlers of problems.py
                raise HTTPException(413, text)
            return message

        await self._app(scope, counted, send)
