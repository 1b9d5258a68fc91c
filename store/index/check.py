"""What arguments may look like. Everything that becomes part of a Redis key or a script goes through here."""

from __future__ import annotations

import math
import re

from weightdepot.store.errors import InvalidRequest

# Lua counts in doubles and writes 14 digits: within this, version numbers are exact everywhere.
MAX_VERSION = 10**14 - 1
MAX_WORLD_SIZE = 1 << 16
MAX_TTL_S = 30 * 86400.0
MAX_TEXT = 2000  # characters of a reason

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=-]{0,127}")
_TOKEN = re.compile(r"[A-Za-z0-9._:@+=/-]{1,256}")


def name(what: str, value: str) -> str:
    """A run, model or group: it is part of keys, so no braces, colons or slashes."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"{what} name {value[:140]!r}: 1 to 128 letters, digits and ._@+=- are allowed,"
            " beginning with a letter or digit"
        )
    return value


def token(what: str, value: str) -> str:
    """A session or digest: opaque, but printable and without blanks."""
    if not _TOKEN.fullmatch(value):
        raise InvalidRequest(f"{what} {value[:260]!r}: 1 to 256 letters, digits and ._:@+=/- are allowed")
    return value


def version(value: int) -> int:
    if not 0 <= value <= MAX_VERSION:
        raise InvalidRequest(f"version {value} is not between 0 and {MAX_VERSION}")
    return int(value)


def count(what: str, value: int) -> int:
    if not 0 <= value <= MAX_VERSION:
        raise InvalidRequest(f"{what} {value} is not between 0 and {MAX_VERSION}")
    return int(value)


def rank(value: int, world_size: int) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidRequest(f"world size {world_size} is not between 1 and {MAX_WORLD_SIZE}")
    if not 0 <= value < world_size:
        raise InvalidRequest(f"rank {value} is not one of the {world_size} ranks from 0")


def ttl(what: str, seconds: float) -> float:
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_TTL_S):
        raise InvalidRequest(f"{what} {seconds} is not a number of seconds above 0, and at most 30 days")
    return float(seconds)


def text(value: str) -> bytes:
    """Free text as UTF-8, cut to a sensible length; what cannot be encoded is replaced."""
    return value[:MAX_TEXT].encode("utf-8", "replace")
