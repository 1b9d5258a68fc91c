"""The API's description for people, at /docs: one page made of the OpenAPI document.

It has no scripts, and loads nothing from anywhere.
"""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.routing import Route

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-size: 0.95em; } h3 { margin-bottom: 0.2rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: 0.1rem 1rem 0.1rem 0; vertical-align: top; }
summary { cursor: pointer; } .note { opacity: 0.75; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
# Nothing is loaded, whatever a description may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def install(app: FastAPI) -> None:
    """Serve it at /docs. Like the OpenAPI document it tells nothing of what the controller knows."""
    page: list[bytes] = []

    async def docs(_request: Request) -> Response:
        if not page:
            page.append(reference(app.openapi()).encode())
        headers = {"Content-Security-Policy": _POLICY}
        return Response(page[0], media_type="text/html", headers=headers)

    app.router.routes.append(Route("/docs", docs, include_in_schema=False))


def reference(schema: dict[str, Any]) -> str:
    """The page as HTML."""
    info = schema["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(info['title'])}: HTTP</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<pre>{escape(info['description'].strip())}</pre>",
        "<p>The same for programs: <a href=/openapi.json>/openapi.json</a>",
    ]
    for tag in schema["tags"]:
        found = [
            (method, path, operation)
            for path, methods in schema["paths"].items()
            for method, operation in methods.items()
            if tag["name"] in operation["tags"]
        ]
        if found:
            parts.append(f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}")
            parts += [_operation(schema, *one) for one in found]
    return "\n".join(parts)


def _operation(schema: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    roles = " or ".join(operation.get("x-roles", [])) or "open to everybody"
    parts = [
        f"<section id={escape(operation['operationId'])}>",
        f"<h3><code>{method.upper()} {escape(path)}</code></h3>",
        f"<p><b>{escape(operation['summary'])}</b> <span class=note>({escape(roles)})</span>",
        f"<p>{escape(operation.get('description', ''))}",
    ]
    query = [p for p in operation.get("parameters", []) if p["in"] == "query"]
    if query:
        rows = [
            f"<tr><td><code>{escape(p['name'])}</code><td>{escape(p.get('description', ''))}" for p in query
        ]
        parts.append(f"<table>{''.join(rows)}</table>")
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        name = content["schema"].get("$ref", "").rsplit("/", 1)[-1]
        parts.append(
            f"<details><summary>Body: {escape(name or media)}</summary>{_fields(schema, name)}</details>"
        )
    rows = [
        f"<tr><td>{escape(status)}<td>{escape(response['description'])}"
        for status, response in sorted(operation["responses"].items())
    ]
    parts.append(f"<details><summary>Answers</summary><table>{''.join(rows)}</table></details></section>")
    return "\n".join(parts)


def _fields(schema: dict[str, Any], name: str) -> str:
    model = schema["components"]["schemas"].get(name)
    if model is None:
        return ""
    wanted = set(model.get("required", []))
    rows = [
        f"<tr><td><code>{escape(field)}</code><td>{'' if field in wanted else 'optional'}"
        f"<td>{escape(about.get('description', ''))}"
        for field, about in model.get("properties", {}).items()
    ]
    return f"<p>{escape(model.get('description', ''))}<table>{''.join(rows)}</table>"
