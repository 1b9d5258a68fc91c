"""Where settings come from: a file, then the environment, then options; the later wins, and each is known.

The file is TOML, with a table for each of the two sides:

    [controller]          # how `weightdepot serve` runs: the fields of `Settings`
    port = 8300
    [controller.timeouts]
    sweep = 2.0
    [client]              # whom the other commands ask: the fields of `ClientSettings`
    controller = "http://trainer:8300"

In the environment the same keys are WEIGHTDEPOT_PORT, WEIGHTDEPOT_TIMEOUTS_SWEEP, WEIGHTDEPOT_CONTROLLER. An
option of the command line has the key's own name.
"""

from __future__ import annotations

import difflib
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from weightdepot.api.settings import DEFAULT_RUN, DEFAULT_URL, Settings, redacted
from weightdepot.store.errors import InvalidRequest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "WEIGHTDEPOT_"
FILE_VARIABLE = PREFIX + "CONFIG"
SYSTEM_FILE = Path("/etc/weightdepot/weightdepot.toml")
# Of other tools (`./run`), and what Kubernetes sets for a Service that is named weightdepot.
NOT_OURS = (
    "WEIGHTDEPOT_VENV",
    "WEIGHTDEPOT_SERVICE_",
    "WEIGHTDEPOT_PORT_",
    "WEIGHTDEPOT_REDIS_SERVICE_",
    "WEIGHTDEPOT_REDIS_PORT",
)

T = TypeVar("T")


@dataclass(frozen=True)
class ClientSettings:
    """Whom the commands ask, and as whom."""

    controller: str = DEFAULT_URL  # one URL, or several with commas between them
    run: str = DEFAULT_RUN
    token: str | None = None
    ca: Path | None = None  # certificates (PEM) that the controller's is checked against


@dataclass(frozen=True)
class Origin:
    """One value in force: its key, and what set it."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class Configured(Generic[T]):
    settings: T
    origins: tuple[Origin, ...]

    def shown(self) -> list[tuple[str, str, str]]:
        """(key, value, source) of every key, as text; secrets are not in it."""
        return [(o.key, _shown(o.key, o.value), o.source) for o in self.origins]


def configured(
    kind: type[T],
    section: str,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Configured[T]:
    """Settings of this kind. `options`: by key, as given on the command line; None: not given.

    Raises InvalidRequest that names the file and key, variable or option, and what it takes.
    """
    environment = os.environ if environment is None else environment
    path = file_in_force(environment, file)
    table = _table(path, section) if path is not None else {}
    known = dict(_keys(kind))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, raw in _flat(table):
        where = f"{path}, key [{section}] {key}"
        if key not in known:
            raise InvalidRequest(f"{where}: no such key{_near(key, known)}")
        values[key], sources[key] = _converted(raw, known[key], where, strict=True), f"file {path}"
    for key, wanted in known.items():
        name = variable(key)
        if name in environment:
            values[key] = _converted(environment[name], wanted, f"the variable {name}", strict=False)
            sources[key] = f"variable {name}"
    for key, raw in (options or {}).items():
        if raw is not None:
            values[key] = _converted(raw, known[key], f"the option --{key.replace('_', '-')}", strict=False)
            sources[key] = f"option --{key.replace('_', '-')}"
    try:
        settings = _made(kind, values)
    except InvalidRequest:
        for key, value in values.items():
            _alone(kind, key, value, sources[key])
        raise  # no value by itself, but several together
    origins = (Origin(key, _get(settings, key), sources.get(key, "default")) for key in known)
    return Configured(settings, tuple(origins))


def variable(key: str) -> str:
    """The environment variable of a key."""
    return PREFIX + key.upper().replace(".", "_")


def file_in_force(environment: Mapping[str, str], given: Path | None = None) -> Path | None:
    """The settings file: the one given, or that WEIGHTDEPOT_CONFIG names, or the system's where it exists."""
    if given is not None:
        return given
    named = environment.get(FILE_VARIABLE)
    if named:
        return Path(named)
    return SYSTEM_FILE if SYSTEM_FILE.is_file() else None


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables that look like ours and set nothing, each with what may have been meant."""
    environment = os.environ if environment is None else environment
    known = {variable(key): key for kind in (Settings, ClientSettings) for key, _ in _keys(kind)}
    known[FILE_VARIABLE] = ""
    return [
        f"{name}{_near(name, known)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known and not name.startswith(NOT_OURS)
    ]


def _table(path: Path, section: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"the settings file {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the settings file {path} is not TOML: {error}") from error
    for name in document:
        if name not in ("controller", "client"):
            raise InvalidRequest(f"{path}: no such table [{name}]: [controller] and [client] are taken")
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise InvalidRequest(f"{path}: {section} is a table: write [{section}], and its keys below it")
    return table


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _keys(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a settings class and of those in it, as `timeouts.sweep`, with their types."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hints[field.name]


def _converted(raw: Any, wanted: Any, where: str, *, strict: bool) -> Any:
    value = raw
    if not strict and isinstance(raw, str) and isinstance(wanted, types.UnionType) and not raw:
        value = None  # an empty variable unsets what may be unset
    try:
        return msgspec.convert(value, wanted, strict=strict, dec_hook=_path)
    except msgspec.ValidationError as error:
        hint = ""
        if isinstance(raw, str) and raw.startswith("tcp://"):
            hint = " (Kubernetes sets this for a Service of that name: enableServiceLinks: false ends it)"
        raise InvalidRequest(f"{where} is {raw!r}: {_named(wanted)} is taken{hint}") from error


def _path(wanted: type[Any], value: Any) -> Any:
    if wanted is Path and isinstance(value, str | Path):
        return Path(value)
    raise NotImplementedError


def _named(wanted: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    if isinstance(wanted, types.UnionType):
        return " or ".join(_named(one) for one in typing.get_args(wanted) if one is not type(None))
    if typing.get_origin(wanted) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(wanted)))
    return names.get(wanted, str(wanted))


def _alone(kind: type[Any], key: str, value: Any, source: str) -> None:
    """Raises InvalidRequest with the key's place where this value cannot work whatever the others are."""
    try:
        _made(kind, {key: value})
    except InvalidRequest as error:
        raise InvalidRequest(f"{source}, key {key}: {error.message}", **error.details) from error


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, _, rest = key.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    defaults = kind()
    for name, changed in inner.items():
        own[name] = replace(getattr(defaults, name), **changed)
    return replace(defaults, **own)  # type: ignore[type-var]


def _get(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


def _near(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "token":
        return "(set)"
    return redacted(value) if key == "redis_url" else str(value)
