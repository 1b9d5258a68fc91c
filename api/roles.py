"""What a caller may do, and what each route asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Role(str, Enum):
    """`read` looks; `consume` and `publish` also take part; `admin` also decides what is served."""

    READ = "read"
    CONSUME = "consume"
    PUBLISH = "publish"
    ADMIN = "admin"


_IMPLIED = {
    Role.READ: frozenset({Role.READ}),
    Role.CONSUME: frozenset({Role.READ, Role.CONSUME}),
    Role.PUBLISH: frozenset({Role.READ, Role.PUBLISH}),
    Role.ADMIN: frozenset(Role),
}

_ASKED = "weightdepot_roles"


def with_implied(roles: Collection[Role]) -> frozenset[Role]:
    """These roles and those that they include."""
    return frozenset().union(*(_IMPLIED[role] for role in roles))


def allows(*roles: Role) -> Callable[[F], F]:
    """Marks a route's function: a caller needs one of these roles. None at all: it is open to everybody.

    A route without this mark is for `read` where it only reads (GET), for `admin` else: forgetting it
    locks the route, and never opens it.
    """

    def mark(function: F) -> F:
        setattr(function, _ASKED, frozenset(roles))
        return function

    return mark


def asked_of(function: Callable[..., Any], method: str) -> frozenset[Role]:
    """The roles of which a caller of this route needs one; empty where it is open."""
    default = frozenset({Role.READ if method in ("GET", "HEAD") else Role.ADMIN})
    asked: frozenset[Role] = getattr(function, _ASKED, default)
    return asked
