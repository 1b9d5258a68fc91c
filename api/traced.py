"""A span for each request that is part of a trace. See store/spans.py."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightdepot.store.spans import HEADER, span


class Traced:
    """Requests that say no trace (heartbeats, scrapes, browsers) have none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parent = _header(scope) if scope["type"] == "http" else ""
        if not parent:
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        with span(method, kind="server", parent=parent, http__request__method=method) as request:

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    request.set(http__response__status_code=status)
                    if status >= 500:
                        request.fail(f"HTTP {status}")
                await send(message)

            try:
                await self._app(scope, receive, sending)
            finally:
                route = getattr(scope.get("route"), "path_format", None)
                if route is not None:
                    # what is stated is relative to the router that it was included in
                    full = f"/v1{route}" if scope["path"].startswith("/v1/") else route
                    request.rename(f"{method} {full}")
                    request.set(http__route=full)


def _header(scope: Scope) -> str:
    wanted = HEADER.encode()
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")
