"""Tokens, roles and runs: every route refuses who must not, and says why; a new route cannot be forgotten."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from weightdepot.api.access import Access, entry_of, new_token, read_tokens
from weightdepot.api.app import RESOURCES, create_app
from weightdepot.api.client import ControllerClient
from weightdepot.api.problems import Forbidden, TokenRefused
from weightdepot.api.roles import Role, asked_of, with_implied
from weightdepot.api.routers import health
from weightdepot.api.server import warn_of_openness
from weightdepot.api.settings import Settings
from weightdepot.store.errors import InvalidRequest, Unauthorized

from .helpers import Trainer, join_group, threaded, unique
from .test_routes import problem

RUN = "guarded"
TOKENS = {role: new_token() for role in Role}
ELSEWHERE = new_token()

SCHEMA: dict[str, Any] = create_app(Settings()).openapi()
ROUTES = [
    (method.upper(), path, frozenset(map(Role, operation.get("x-roles", []))))
    for path, methods in SCHEMA["paths"].items()
    for method, operation in methods.items()
]
GUARDED = [route for route in ROUTES if route[2]]


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps(list(entries)))
    return path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [entry_of(role.value, token, [role]) for role, token in TOKENS.items()]
    elsewhere = entry_of("elsewhere", ELSEWHERE, [Role.ADMIN], run="another")
    return write(tmp_path_factory.mktemp("access") / "tokens.json", *entries, elsewhere)


@pytest.fixture(scope="module")
def guarded(redis_url: str, tokens: Path) -> Iterator[str]:
    with threaded(Settings(redis_url=redis_url, run=RUN, tokens=tokens, port=0)) as url:
        yield url


@pytest.fixture
async def http(guarded: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=guarded, headers={"Weightdepot-Run": RUN}, timeout=10) as client:
        yield client


def filled(path: str) -> str:
    """The path with something plausible for each parameter."""
    names = dict.fromkeys(("model", "group", "session", "tag"), "m")
    digests = dict.fromkeys(("digest", "tiling", "layout"), "0" * 32)
    return re.sub(r"\{(\w+)\}", lambda found: {**names, **digests}.get(found[1], "0"), path)


async def ask(
    http: httpx.AsyncClient, route: tuple[str, str, frozenset[Role]], headers: dict[str, str] | None = None
) -> httpx.Response:
    method, path, _ = route
    params = {"seconds": "0.01"} if path.endswith("/events") else {}
    content = b"{}" if method in ("POST", "PUT") else None
    headers = {"Content-Type": "application/json", **(headers or {})}
    return await http.request(method, filled(path), params=params, content=content, headers=headers)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def name_of(route: tuple[str, str, frozenset[Role]]) -> str:
    return f"{route[0]} {route[1]}"


# -- every route -----------------------------------------------------------------------------------------


def test_the_routes_that_are_open_are_these_and_no_others() -> None:
    assert {(method, path) for method, path, roles in ROUTES if not roles} == {
        ("GET", "/v1/health"),
        ("GET", "/v1/ready"),
    }
    served = {
        (method, f"/v1{route.path_format}")
        for module in (health, *RESOURCES)
        for route in module.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    served.add(("GET", "/metrics"))
    assert served == {(method, path) for method, path, _ in ROUTES}, "and none is left out of the document"


@pytest.mark.parametrize("route", GUARDED, ids=name_of)
async def test_a_route_refuses_who_states_no_token(
    http: httpx.AsyncClient, route: tuple[str, str, frozenset[Role]]
) -> None:
    response = await ask(http, route)
    assert "WEIGHTDEPOT_TOKEN" in problem(response, 401, "unauthorized")["detail"]
    assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("route", GUARDED, ids=name_of)
async def test_a_route_refuses_a_token_that_nobody_was_given(
    http: httpx.AsyncClient, route: tuple[str, str, frozenset[Role]]
) -> None:
    for headers in (bearer(new_token()), {"Authorization": "Bearer"}, {"Authorization": "Basic YTpi"}):
        problem(await ask(http, route, headers), 401, "unauthorized")


@pytest.mark.parametrize("route", GUARDED, ids=name_of)
async def test_a_route_refuses_the_wrong_roles_and_takes_the_right_ones(
    http: httpx.AsyncClient, route: tuple[str, str, frozenset[Role]]
) -> None:
    asked = route[2]
    for role, token in TOKENS.items():
        response = await ask(http, route, bearer(token))
        if with_implied([role]) & asked:
            assert response.status_code not in (401, 403), (role, response.text)
        else:
            body = problem(response, 403, "unauthorized")
            assert role.value in body["detail"]
            assert "insufficient_scope" in response.headers["www-authenticate"]


@pytest.mark.parametrize("route", GUARDED, ids=name_of)
async def test_a_route_refuses_another_runs_members_and_tokens(
    http: httpx.AsyncClient, route: tuple[str, str, frozenset[Role]]
) -> None:
    admin = bearer(TOKENS[Role.ADMIN])
    body = problem(await ask(http, route, {**admin, "Weightdepot-Run": "other"}), 409, "invalid-request")
    assert "'other'" in body["detail"]
    if route[0] != "GET":
        del http.headers["Weightdepot-Run"]
        problem(await ask(http, route, admin), 409, "invalid-request")
        http.headers["Weightdepot-Run"] = RUN
    body = problem(await ask(http, route, bearer(ELSEWHERE)), 403, "unauthorized")
    assert "'another'" in body["detail"]


async def test_health_needs_no_token(http: httpx.AsyncClient) -> None:
    for path in ("/v1/health", "/v1/ready", "/openapi.json", "/docs"):
        assert (await http.get(path)).status_code == 200


def test_a_route_without_a_mark_is_locked_and_not_open() -> None:
    async def forgotten() -> None: ...

    assert asked_of(forgotten, "POST") == {Role.ADMIN}
    assert asked_of(forgotten, "GET") == {Role.READ}


async def test_a_refused_change_is_refused_before_its_body_is_read(guarded: str) -> None:
    """A stranger cannot make the controller take 64 MiB in."""
    host, port = guarded.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as link:
        head = f"PUT /v1/layouts/{'0' * 32} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 60000000\r\n\r\n"
        link.sendall(head.encode())
        assert link.recv(1000).startswith(b"HTTP/1.1 401 ")


# -- the client ------------------------------------------------------------------------------------------


def test_a_fleet_works_with_a_token_for_each_side(guarded: str) -> None:
    with (
        ControllerClient(guarded, RUN, token=TOKENS[Role.PUBLISH]) as publishing,
        ControllerClient(guarded, RUN, token=TOKENS[Role.CONSUME]) as consuming,
        ControllerClient(guarded, RUN, token=TOKENS[Role.ADMIN]) as deciding,
    ):
        model = unique("model")
        trainer = Trainer(publishing, model).join_all()
        trainer.publish(1)
        (session,) = join_group(consuming, model, "g")
        moved = consuming.begin_round(model, "g", rank=0, session=session, timeout=5)
        consuming.finish_round(model, "g", rank=0, session=session, round=moved.round, timeout=5)
        assert deciding.hold(model, 1).held
        with pytest.raises(Unauthorized, match="'publish' has the roles"):
            publishing.hold(model, 1)
        with pytest.raises(Unauthorized, match="may not end a producer"):
            consuming.leave(model, trainer.sessions[0])
        consuming.leave(model, session)
        publishing.leave(model, trainer.sessions[0])


def test_the_token_comes_from_the_environment_where_none_is_given(
    guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ControllerClient(guarded, RUN) as client, pytest.raises(Unauthorized, match="WEIGHTDEPOT_TOKEN"):
        client.models()
    monkeypatch.setenv("WEIGHTDEPOT_TOKEN", TOKENS[Role.READ])
    with ControllerClient(guarded, RUN) as client:
        client.models()
    with pytest.raises(InvalidRequest) as error:
        ControllerClient(guarded, token="not a\nsecret token")
    assert "secret" not in error.value.message


# -- the file --------------------------------------------------------------------------------------------


def test_open_reading_takes_a_token_for_changes_only(tokens: Path) -> None:
    access = Access(tokens, True, RUN)
    assert access.caller(None).roles == {Role.READ}
    with pytest.raises(TokenRefused):
        access.caller("Bearer unknown-unknown-unknown")
    assert Access(tokens, False, RUN).caller(None).roles == set()
    assert Access(None, False, RUN).caller(None).roles == set(Role)


def test_tokens_stand_in_json_or_toml_plain_or_hashed(tmp_path: Path) -> None:
    toml = tmp_path / "tokens.toml"
    toml.write_text('[[tokens]]\nname = "a"\ntoken = "0123456789abcdef"\nroles = ["consume"]\nrun = "r"\n')
    (caller,) = read_tokens(toml).values()
    assert (caller.name, caller.run) == ("a", "r")
    assert caller.roles == {Role.READ, Role.CONSUME}
    hashed = hashlib.sha256(b"0123456789abcdef").hexdigest()
    entries = tmp_path / "tokens.json"
    entries.write_text(json.dumps({"tokens": [{"name": "a", "sha256": hashed, "roles": ["admin"]}]}))
    assert Access(entries, False, "r").caller("bearer 0123456789abcdef").roles == set(Role)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not as it should be"),
        ("[]", "0 tokens"),
        ("{}", "no list `tokens`"),
        ('[{"name": "a", "roles": ["read"]}]', "one of `token` and `sha256`"),
        ('[{"name": "a", "roles": [], "token": "0123456789abcdef"}]', "roles are wanted"),
        ('[{"name": "a", "roles": ["root"], "token": "0123456789abcdef"}]', "root"),
        ('[{"name": "a", "roles": ["read"], "token": "secret-short"}]', "at least 16"),
        ('[{"name": "a b", "roles": ["read"], "token": "0123456789abcdef"}]', "not a token name"),
        ('[{"name": "a", "roles": ["read"], "sha256": "xyz"}]', "64 hexadecimal"),
        ('[{"name": "a", "roles": ["read"], "tokn": "secret-0123456789"}]', "tokn"),
        ('[{"name": "a", "roles": ["read"], "token": "0123456789abcdef"},'
         ' {"name": "a", "roles": ["read"], "token": "0123456789abcdeg"}]', "twice"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_naming_the_entry_and_no_token(
    tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=says) as error:
        create_app(Settings(tokens=path))
    assert str(path) in error.value.message
    assert "secret-" not in error.value.message
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_tokens(tmp_path / "none.json")


def test_a_changed_file_is_taken_up_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, first, second = tmp_path / "tokens.json", new_token(), new_token()
    access = Access(write(path, entry_of("first", first, [Role.READ])), False, RUN)
    replacement = write(tmp_path / "new.json", entry_of("second", second, [Role.ADMIN]))
    os.replace(replacement, path)
    access.reload()
    assert access.caller(f"Bearer {second}").name == "second"
    with pytest.raises(TokenRefused):
        access.caller(f"Bearer {first}")
    path.write_text("{")
    with caplog.at_level(logging.ERROR, "weightdepot.api"):
        access.reload()
        access.reload()
    assert access.caller(f"Bearer {second}").name == "second"
    assert len(caplog.records) == 1, "said once, not every second"


def test_a_token_of_another_run_is_known_and_not_let_in(tmp_path: Path) -> None:
    token = new_token()
    path = write(tmp_path / "tokens.json", entry_of("a", token, [Role.ADMIN], run="one"))
    assert Access(path, False, "one").caller(f"Bearer {token}").run == "one"
    with pytest.raises(Forbidden, match="'one'"):
        Access(path, False, "two").caller(f"Bearer {token}")


@pytest.mark.parametrize(
    ("host", "settings", "says"),
    [
        ("127.0.0.1", Settings(), ""),
        ("0.0.0.0", Settings(), "everybody who reaches"),
        ("0.0.0.0", Settings(tokens=Path("t")), "unencrypted"),
        ("::", Settings(tokens=Path("t"), tls_cert=Path("c"), tls_key=Path("k")), ""),
    ],
)
def test_a_controller_that_others_reach_says_once_what_is_not_protected(
    caplog: pytest.LogCaptureFixture, host: str, settings: Settings, says: str
) -> None:
    with caplog.at_level(logging.WARNING, "weightdepot.api"):
        warn_of_openness(settings, host)
    assert [says in record.message for record in caplog.records] == ([True] if says else [])
