"""The page at `/`: who has which version, and what is stuck. Plain files, no build step, no outside hosts.

It holds nothing of what the controller knows: it asks `/v1/overview`, with a token where one is wanted.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request, Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def install(app: FastAPI) -> None:
    """Serve it. To whoever asks: a browser cannot send a token before it has the page."""
    for path, (name, kind) in FILES.items():
        content = files(__name__).joinpath(name).read_bytes()

        async def serve(_request: Request, content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind, headers=HEADERS)

        app.router.routes.append(Route(path, serve, include_in_schema=False))
