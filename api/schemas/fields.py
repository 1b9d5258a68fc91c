"""What requests and answers are made of: names, digests, numbers, plain data, each with its limits."""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from weightdepot.api.names import DIGEST_PATTERN, MAX_INTEGER, NAME_PATTERN, check_digest, check_name

MAX_WORLD = 65536
MAX_RETENTION = 1024
MAX_TTL = 24 * 3600.0
MAX_ENDPOINTS = 64 << 10  # bytes of JSON
MAX_DEPTH = 8
MAX_TEXT = 4096
MAX_STATS = 64  # figures of one publish or update
MAX_STATS_TEXT = 200  # characters of a figure's name, or of one that is text


def _name(what: str) -> AfterValidator:
    return AfterValidator(lambda value: check_name(what, value))


def _digest(what: str, *, optional: bool = False) -> AfterValidator:
    return AfterValidator(lambda value: value if optional and not value else check_digest(what, value))


def _text(pattern: str, example: str) -> WithJsonSchema:
    """Stated for OpenAPI; checked in Python, for the clearer message."""
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


def _depth(value: object) -> int:
    """Levels of nesting; stops counting past what is allowed."""
    level, at = 0, [value]
    while at and level <= MAX_DEPTH:
        level += 1
        inner: list[object] = []
        for item in at:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        at = inner
    return level


def _plain(value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Refuses what JSON or the index could not give back unchanged: NaN, half surrogates, huge numbers."""
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"endpoints are nested more than {MAX_DEPTH} deep")
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8"))
    except ValueError as error:  # NaN and infinities; lone surrogates (UnicodeEncodeError)
        raise ValueError(f"endpoints are not plain JSON: {error}") from error
    if size > MAX_ENDPOINTS:
        raise ValueError(f"endpoints take {size} bytes; at most {MAX_ENDPOINTS} are taken")
    return value


def _figures(value: dict[str, Any]) -> dict[str, Any]:
    """Names and, for each, a finite number or a short text: what a report needs, and no more."""
    if len(value) > MAX_STATS:
        raise ValueError(f"{len(value)} figures; at most {MAX_STATS} are taken")
    for name, figure in value.items():
        if not 0 < len(name) <= MAX_STATS_TEXT or not name.isprintable():
            raise ValueError(f"a figure's name is printable text of at most {MAX_STATS_TEXT} characters")
        if isinstance(figure, str):
            if len(figure) > MAX_STATS_TEXT or not figure.isprintable():
                raise ValueError(
                    f"{name}: a text among the figures is printable, of at most {MAX_STATS_TEXT} characters"
                )
        elif isinstance(figure, bool) or not isinstance(figure, int | float):
            raise ValueError(f"{name}: a number or a short text is wanted")
        elif not abs(figure) <= MAX_INTEGER:  # also NaN
            raise ValueError(f"{name}: a number between -{MAX_INTEGER} and {MAX_INTEGER} is wanted")
    return value


def _base64(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError("base64 text is wanted")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64: {error}") from error


def _bounded(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a finite number is wanted")
    return value


# examples
PROCESS: dict[str, Any] = {"host": "6c1e2f-node-7", "pid": 4242, "started": 118824}
SESSION = "5f0c1c1e9a0b4c0f8f3f7d2a"
LAYOUT = "0f343b0931126a20f133d67c2b018a3b"
TILING = "7d1f1c3d1f0b4a6fb1a3c8b0d8b0c5aa"

ModelName = Annotated[str, _name("model"), _text(NAME_PATTERN, "policy")]
GroupName = Annotated[str, _name("group"), _text(NAME_PATTERN, "rollout-0")]
Session = Annotated[str, _name("session"), _text(NAME_PATTERN, SESSION)]
Digest = Annotated[str, _digest("layout"), _text(DIGEST_PATTERN, LAYOUT)]
OptionalDigest = Annotated[str, _digest("layout", optional=True), _text(f"^$|{DIGEST_PATTERN}", LAYOUT)]
TilingId = Annotated[str, _digest("tiling"), _text(DIGEST_PATTERN, TILING)]
PartDigest = Annotated[str, _digest("part"), _text(DIGEST_PATTERN, "99aa06d3014798d86001c324468d497f")]
# of the index's making, and opaque: unique to one opening of a version
Attempt = Annotated[
    str,
    Field(max_length=256, pattern=r"^[A-Za-z0-9._:@+=/-]*$"),
    WithJsonSchema({"type": "string", "pattern": r"^[A-Za-z0-9._:@+=/-]{0,256}$", "examples": ["3f9c-2"]}),
]
TagName = Annotated[str, _name("tag"), _text(NAME_PATTERN, "best")]
# strict: neither true nor "1" is a rank in JSON; the path's are text, hence their own
Rank = Annotated[int, Field(ge=0, lt=MAX_WORLD, strict=True, examples=[0])]
PathRank = Annotated[int, Field(ge=0, lt=MAX_WORLD, examples=[0])]
WorldSize = Annotated[int, Field(gt=0, le=MAX_WORLD, strict=True, examples=[8])]
VersionNumber = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, examples=[137])]
PathNumber = Annotated[int, Field(ge=0, le=MAX_INTEGER, examples=[137])]
RoundNumber = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, examples=[12])]
# -1: a version that is read in place, and takes no slot
Slot = Annotated[int, Field(ge=-1, le=MAX_INTEGER, strict=True, examples=[0])]
Lag = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, examples=[1])]
Bytes = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, examples=[16060522496])]
Seconds = Annotated[float, Field(gt=0, le=MAX_TTL), AfterValidator(_bounded)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Endpoints = Annotated[dict[str, dict[str, Any]], AfterValidator(_plain)]
Stats = Annotated[
    dict[str, Any],
    AfterValidator(_figures),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": ["number", "string"]},
            "examples": [{"seconds": 0.84, "nbytes": 16060522496, "transports": "shm"}],
        }
    ),
]
Base64 = Annotated[
    bytes,
    BeforeValidator(_base64),
    PlainSerializer(lambda data: base64.b64encode(data).decode("ascii"), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "examples": ["3q2+7w=="]}),
]
