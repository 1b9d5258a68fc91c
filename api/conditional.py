"""Conditional answers: who has the present state already is told so (304), and is not sent it again."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import xxhash
from fastapi import Header, Request, Response

from weightdepot.store.index.records import Version

# Differs at each look, though nothing happened.
_VOLATILE = "expires_in"

IfNoneMatch = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        max_length=4096,
        description="An ETag of before: the answer is 304 while it still holds.",
    ),
]

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "Nothing has changed."}}


def version_tag(version: Version) -> str:
    """Says which version it is, and which opening of it. Weak: leases come and go under the same tag."""
    return f'W/"v{version.version}-{version.attempt}"'


def state_tag(plain: Any) -> str:
    """Of plain data, but for what differs at each look. Weak for that reason."""
    return f'W/"{xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(_lasting(plain)))}"'


def _lasting(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _lasting(value) for name, value in plain.items() if name != _VOLATILE}
    if isinstance(plain, list | tuple):
        return [_lasting(value) for value in plain]
    return plain


def matches(header: str | None, tag: str) -> bool:
    """Whether `If-None-Match` names this tag (weak comparison, RFC 9110)."""
    if header is None:
        return False
    named = [part.strip().removeprefix("W/") for part in header.split(",")]
    return "*" in named or tag.removeprefix("W/") in named


def answered(request: Request, value: Any, tag: str | None = None) -> Response:
    """The record as JSON with its ETag, or 304 without a body where the caller has it.

    Encoded here and not by FastAPI, which would take a record apart twice: these are the routes that are
    polled.
    """
    plain = msgspec.to_builtins(value)
    tag = state_tag(plain) if tag is None else tag
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if matches(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    return Response(msgspec.json.encode(plain), media_type="application/json", headers=headers)
