"""Who is calling, and what that allows: bearer tokens from a file, each with roles and perhaps a run.

Without a tokens file everybody may do everything, as on a laptop. Tokens are compared as SHA-256 digests, in
constant time, so that the file need not hold what it protects against.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weightdepot.api.names import check_name
from weightdepot.api.problems import Forbidden, TokenRefused, answer
from weightdepot.api.roles import Role, with_implied
from weightdepot.store.errors import InvalidRequest, Unauthorized

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger("weightdepot.api")

CALLER = "weightdepot.caller"  # where the caller is in the request's scope
SHORTEST = 16  # characters of a token that is stated as it is
MAX_TOKENS = 1000
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request."""

    name: str
    roles: frozenset[Role]
    run: str | None = None  # the one run that its token is for


EVERYBODY = Caller("", frozenset(Role))
NOBODY = Caller("", frozenset())
READER = Caller("", with_implied([Role.READ]))


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One token of the file: `token` as it is, or its `sha256` in hexadecimal digits."""

    name: str
    roles: list[Role]
    token: str | None = None
    sha256: str | None = None
    run: str | None = None


def new_token() -> str:
    """256 random bits, as text that fits a header, a URL and a shell."""
    return f"wd_{secrets.token_urlsafe(32)}"


def entry_of(name: str, token: str, roles: Collection[Role], run: str | None = None) -> dict[str, Any]:
    """The token as the tokens file takes it, without the token itself."""
    check_name("token", name)
    if run is not None:
        check_name("run", run)
    entry: dict[str, Any] = {
        "name": name,
        "sha256": hashlib.sha256(token.encode()).hexdigest(),
        "roles": sorted(role.value for role in roles),
    }
    return entry if run is None else {**entry, "run": run}


def read_tokens(path: Path) -> dict[bytes, Caller]:
    """Callers by the SHA-256 of their token. Raises InvalidRequest, which names the entry and never a token.

    JSON: `[{"name": ..., "sha256": ..., "roles": ["publish"], "run": ...}, ...]`, also under the key
    `tokens`. TOML (by the file's name): the same as `[[tokens]]`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the tokens file {path} cannot be read: {error.strerror or error}") from error
    try:
        plain = tomllib.loads(data.decode()) if path.suffix == ".toml" else msgspec.json.decode(data)
        if isinstance(plain, dict):
            plain = plain["tokens"]
        entries = msgspec.convert(plain, list[_Entry])
    except KeyError:
        raise InvalidRequest(f"the tokens file {path} has no list `tokens`") from None
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the tokens file {path} is not as it should be: {error}") from error
    if not 0 < len(entries) <= MAX_TOKENS:
        raise InvalidRequest(
            f"the tokens file {path} has {len(entries)} tokens; between 1 and {MAX_TOKENS} are taken"
        )
    found: dict[bytes, Caller] = {}
    for entry in entries:
        digest, caller = _read(path, entry)
        if digest in found or caller.name in {known.name for known in found.values()}:
            raise InvalidRequest(f"the tokens file {path} has token {caller.name!r} twice")
        found[digest] = caller
    if any(entry.token for entry in entries) and path.stat().st_mode & 0o004:
        log.warning("every user of this machine may read the tokens in %s (chmod 600, or use sha256)", path)
    return found


def _read(path: Path, entry: _Entry) -> tuple[bytes, Caller]:
    where = f"the tokens file {path}, token {entry.name[:128]!r}"
    try:
        check_name("token", entry.name)
        if entry.run is not None:
            check_name("run", entry.run)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}") from error
    if not entry.roles:
        raise InvalidRequest(f"{where}: roles are wanted, of {', '.join(role.value for role in Role)}")
    if (entry.token is None) == (entry.sha256 is None):
        raise InvalidRequest(f"{where}: one of `token` and `sha256` is wanted")
    if entry.token is not None:
        if len(entry.token) < SHORTEST or not _sendable(entry.token):
            raise InvalidRequest(
                f"{where}: a token has at least {SHORTEST} characters, printable ASCII without blanks "
                "(`weightdepot token` makes one)"
            )
        digest = hashlib.sha256(entry.token.encode()).digest()
    else:
        try:
            digest = bytes.fromhex(entry.sha256 or "")
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise InvalidRequest(f"{where}: sha256 is not 64 hexadecimal digits")
    return digest, Caller(entry.name, with_implied(entry.roles), entry.run)


def _sendable(token: str) -> bool:
    return token.isascii() and token.isprintable() and " " not in token


class Access:
    """The tokens in force. Owned by one event loop."""

    def __init__(self, tokens: Path | None, open_reading: bool, run: str) -> None:
        """`run`: the one that is served. Raises InvalidRequest for a tokens file that cannot be used."""
        self._run = run
        self._path = tokens
        self._unknown = READER if open_reading else NOBODY
        self._callers: dict[bytes, Caller] | None = None
        self._stamp: tuple[int, int, int] | None = None
        if tokens is not None:
            self._callers = read_tokens(tokens)
            self._stamp = _stamp(tokens)

    @property
    def guarded(self) -> bool:
        """Whether tokens are asked for at all."""
        return self._callers is not None

    def reload(self) -> None:
        """Take up a changed tokens file. One that cannot be used changes nothing, and is logged."""
        if self._path is None:
            return
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = read_tokens(self._path)
        except InvalidRequest as error:
            log.error("the tokens stay as they were: %s", error.message)
        else:
            log.info("%d tokens read from %s", len(self._callers), self._path)

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this header. Raises TokenRefused for a token that is not known, Forbidden for one that is
        for another run."""
        if self._callers is None:
            return EVERYBODY
        if authorization is None:
            return self._unknown
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise TokenRefused(
                f"the header Authorization has the scheme {scheme[:20]!r}; 'Bearer TOKEN' is wanted"
            )
        digest = hashlib.sha256(token.strip().encode("utf-8", "replace")).digest()
        found: Caller | None = None
        for known, caller in self._callers.items():  # all of them: how long it takes tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise TokenRefused("this token is not one of the controller's: it may have been replaced")
        if found.run not in (None, self._run):
            raise Forbidden(
                f"token {found.name!r} is for run {found.run!r}, this controller serves {self._run!r}",
                serves=self._run,
            )
        return found


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does, also when a link to it is moved on (as Kubernetes does)."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def check_roles(caller: Caller, asked: frozenset[Role]) -> None:
    """Raises TokenRefused where a token is wanted and none was sent, Forbidden where its roles do not do."""
    if not asked or asked & caller.roles:
        return
    wanted = " or ".join(sorted(role.value for role in asked))
    if not caller.name:
        raise TokenRefused(
            f"a token with the role {wanted} is wanted: set WEIGHTDEPOT_TOKEN, or give token=... or --token"
        )
    has = ", ".join(sorted(role.value for role in caller.roles))
    raise Forbidden(
        f"token {caller.name!r} has the roles {has}; this takes {wanted}",
        roles=sorted(r.value for r in asked),
    )


class Authentication:
    """ASGI middleware: says who is calling before anything of the request's body is read.

    A token that is not known is refused here, and so is a change without any; which role a route asks
    for is looked at where the route is known (`check_access`).
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            caller = self._access.caller(Headers(scope=scope).get("authorization"))
            if not caller.name and self._access.guarded and scope["method"] not in SAFE_METHODS:
                raise TokenRefused("a token is wanted: set WEIGHTDEPOT_TOKEN, or give token=... or --token")
        except Unauthorized as error:
            await answer(error)(scope, receive, send)
            return
        scope[CALLER] = caller
        await self._app(scope, receive, send)
