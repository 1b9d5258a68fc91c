"""Names of models, groups, runs and sessions: one pattern, so that they are safe in URLs, keys and logs."""

from __future__ import annotations

import re

from weightdepot.store.errors import InvalidRequest

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
DIGEST_PATTERN = r"^[0-9a-f]{32}$"
# The index's scripts count in doubles and write 14 digits: up to here numbers are exact everywhere.
MAX_INTEGER = 10**14 - 1

_NAME = re.compile(NAME_PATTERN[1:-1])
_DIGEST = re.compile(DIGEST_PATTERN[1:-1])


def check_name(what: str, name: str) -> str:
    """`name` itself. Raises InvalidRequest where it is not a name; `what` says whose ("model", "group")."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = str(name)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise InvalidRequest(
            f"{shown!r} is not a {what} name: 1 to 128 letters, digits, '.', '_' or '-' are taken, "
            "beginning with a letter or digit"
        )
    return name


def check_digest(what: str, digest: str) -> str:
    """`digest` itself. Raises InvalidRequest where it is not 32 lower-case hexadecimal digits."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequest(f"{digest[:60]!r} is not a {what} digest: 32 hexadecimal digits are")
    return digest
