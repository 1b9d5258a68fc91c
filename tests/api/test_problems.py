"""Whatever is sent, the answer is a good one or a problem that says what is wrong; never a 500."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import zstandard
from fastapi.exceptions import RequestValidationError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightdepot.api import problems
from weightdepot.api.app import create_app
from weightdepot.api.settings import Limits, Settings
from weightdepot.store.errors import (
    PROBLEM_BASE,
    InvalidRequest,
    LayoutError,
    LayoutFault,
    StoreFull,
    WeightDepotError,
    from_problem,
)

from .helpers import body_of, rows_layout
from .test_routes import MODEL, problem

FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def raw(controller: str) -> Iterator[httpx.Client]:
    """Plain HTTP to the real process, so that its server is tried too."""
    with httpx.Client(base_url=controller, timeout=10.0, headers={"Weightdepot-Run": "default"}) as client:
        yield client


def check_answer(response: httpx.Response) -> None:
    """No 500, and every failure is a problem."""
    assert response.status_code != 500, response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json", response.text
        body = response.json()
        assert body["status"] == response.status_code
        assert body["type"].startswith(PROBLEM_BASE)
        assert body["detail"]


# -- known failures --------------------------------------------------------------------------------------


async def test_unknown_paths_and_methods_are_problems_that_point_to_the_routes(
    http: httpx.AsyncClient,
) -> None:
    for path in ("/nothing", "/v1", "/v1/models/", "/v1/nothing", "/v1/models/a/b/c"):
        assert "/docs" in problem(await http.get(path), 404, "not-found")["detail"]
    wrong = await http.delete("/v1/models")
    problem(wrong, 405, "method-not-allowed")
    assert wrong.headers["allow"] == "GET"


async def test_all_faults_of_a_body_are_named_with_their_places(http: httpx.AsyncClient) -> None:
    response = await http.post(f"{MODEL}/producers", json=body_of(rank=-1, session="a b", typo=1))
    body = problem(response, 422, "invalid-request")
    faults = {fault["where"]: fault["reason"] for fault in body["details"]["faults"]}
    assert set(faults) == {"body.rank", "body.session", "body.typo"}
    assert "is not a session name" in faults["body.session"]
    error = from_problem(body)
    assert isinstance(error, InvalidRequest)
    assert "body.rank" in error.message


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 1}, {"rank": True}, {"rank": "0"}, {"rank": 0.5}, {"world_size": 0}, {"world_size": 10**9},
        {"retention": 1}, {"ttl": 0}, {"ttl": -1}, {"ttl": 1e9}, {"session": ""}, {"session": ".hidden"},
        {"session": "x" * 129}, {"session": "s0\n"}, {"layout": ""}, {"layout": "A" * 32}, {"process": None},
        {"replace": "a b"},
    ],
    ids=str,
)  # fmt: skip
async def test_values_that_cannot_work_are_refused(http: httpx.AsyncClient, change: dict[str, Any]) -> None:
    problem(await http.post(f"{MODEL}/producers", json=body_of(**change)), 422, "invalid-request")


@pytest.mark.parametrize("name", ["a b", "a:b", "{a}", "x" * 129, "-a", "ä", "a\x00", "..a"])
async def test_names_outside_the_pattern_are_refused_with_the_pattern(
    http: httpx.AsyncClient, name: str
) -> None:
    body = problem(await http.get(f"/v1/models/{quote(name)}"), 422, "invalid-request")
    assert "letters, digits, '.', '_' or '-'" in body["detail"]


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "soon", ""])
async def test_waits_that_are_no_time_are_refused(http: httpx.AsyncClient, wait: str) -> None:
    response = await http.get(f"{MODEL}/versions/latest", params={"wait": wait})
    problem(response, 422, "invalid-request")


@pytest.mark.parametrize(
    "endpoints",
    [
        '{"shm": {"a": NaN}}',
        '{"shm": {"a": 1e999}}',
        '{"shm": {"\\ud800": 1}}',
        '{"shm": {"a": "\\udc00"}}',
        '{"shm": 1}',
        "[]",
        '{"shm": {"a": ' + "[" * 50 + "]" * 50 + "}}",
        '{"shm": {"a": "%s"}}' % ("x" * 70000),
    ],
    ids=["nan", "infinite", "key", "value", "number", "list", "deep", "large"],
)
async def test_endpoints_that_would_not_come_back_unchanged_are_refused(
    http: httpx.AsyncClient, endpoints: str
) -> None:
    text = '{"session": "s", "endpoints": %s, "nbytes": 0, "digests": "%s", "tile_digests": ""}'
    response = await http.post(
        f"{MODEL}/versions/1/parts/0",
        content=text % (endpoints, "0" * 32),
        headers={"Content-Type": "application/json"},
    )
    problem(response, 422, "invalid-request")


async def test_a_body_over_the_limit_is_refused_whether_its_length_is_stated_or_not(redis_url: str) -> None:
    app = create_app(Settings(redis_url=redis_url, limits=Limits(body=1000)))

    async def chunks(count: int) -> Any:
        for _ in range(count):
            yield b"x" * 100

    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            path = f"/v1/layouts/{'0' * 32}"
            for content in (b"x" * 1001, chunks(11)):
                body = problem(
                    await client.put(path, content=content, headers={"Weightdepot-Run": "default"}),
                    413,
                    body_slug(),
                )
                assert "1000 bytes" in body["detail"]
            within = await client.put(path, content=chunks(10), headers={"Weightdepot-Run": "default"})
            problem(within, 422, "invalid-request")


def body_slug() -> str:
    """The phrase of 413 has changed between Python releases."""
    slug: str = problems.http_problem(413, "")["type"].rsplit("/", 1)[-1]
    return slug


async def test_what_nobody_foresaw_is_a_problem_that_shows_no_inside(redis_url: str) -> None:
    app = create_app(Settings(redis_url=redis_url))

    @app.get("/bug")
    async def bug() -> None:
        raise KeyError("secret")

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = problem(await client.get("/bug"), 500, "internal-server-error")
    assert "KeyError" in body["detail"]
    assert "secret" not in json.dumps(body)


def test_an_error_of_ours_keeps_class_message_and_details_over_the_wire() -> None:
    for error in (
        LayoutError("does not fit", [LayoutFault("w", "missing"), LayoutFault("b", "cut")], model="m"),
        StoreFull("no slot", model="m", leases=["g/1"]),
        problems.UnknownLayout("unknown", layout="0"),
    ):
        response = problems.answer(error)
        again = from_problem(json.loads(bytes(response.body)))
        assert again.message == error.message
        assert again.details == error.details
        assert isinstance(error, type(again))
    assert problems.answer(StoreFull("x")).headers["retry-after"] == "1"


@given(st.text())
def test_any_text_can_be_said_in_a_problem(text: str) -> None:
    """Also half surrogate pairs, which UTF-8 has no bytes for."""
    response = problems.answer(WeightDepotError(text, where=text))
    assert json.loads(bytes(response.body))["detail"] == text


def test_many_faults_are_counted_not_all_shown() -> None:
    error = RequestValidationError([{"loc": ("body", n), "msg": "bad", "type": "t"} for n in range(500)])
    ours = problems.from_validation(error)
    assert "and 488 more" in ours.message
    assert len(ours.details["faults"]) == 100


# -- anything --------------------------------------------------------------------------------------------

JUNK_TEXT = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", ".", "..", "%", "a b", "\x00", "💥", "policy", "s0", "0", "-1", "1e3", "9" * 40, "latest"]
    ),
)
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2**31, 2**53, 2**63, 10**14, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["", "\ud800", "\x00", "a" * 5000, "0" * 32, "s0", "NaN"]),
)
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


def operations() -> list[tuple[str, str, Any]]:
    """(method, path, an example of its body) of every route."""
    schema = create_app(Settings()).openapi()
    found = []
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            example = None
            if content:
                name = content["schema"]["$ref"].rsplit("/", 1)[-1]
                example = schema["components"]["schemas"][name]["examples"][0]
            found.append((method.upper(), path, example))
    return found


OPERATIONS = operations()


def fill(path: str, segments: list[str]) -> str:
    """The path with each `{parameter}` replaced by a quoted segment."""
    parts = path.split("/")
    values = iter(segments)
    return "/".join(
        quote(next(values, "x").encode("utf-8", "surrogatepass"), safe="") if part.startswith("{") else part
        for part in parts
    )


@FUZZ
@given(
    st.sampled_from(OPERATIONS),
    st.lists(JUNK_TEXT, min_size=4, max_size=4),
    st.dictionaries(st.sampled_from(["min_version", "ranks", "nonsense"]), JUNK_TEXT, max_size=2),
    st.one_of(JSON, st.binary(max_size=20)),
)
def test_no_path_query_or_body_gives_a_500(
    raw: httpx.Client, operation: tuple[str, str, Any], segments: list[str], query: dict[str, str], body: Any
) -> None:
    method, path, _ = operation
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if path.endswith("/events"):
        query = {**query, "seconds": "0.01"}  # else the stream goes on
    check_answer(raw.request(method, fill(path, segments), params=query, content=content, headers=headers))


@FUZZ
@given(st.sampled_from([o for o in OPERATIONS if o[2]]), st.data())
def test_no_body_with_one_thing_wrong_gives_a_500(
    raw: httpx.Client, operation: tuple[str, str, Any], data: st.DataObject
) -> None:
    method, path, example = operation
    body = copy.deepcopy(example)
    at = body
    key = data.draw(st.sampled_from(sorted(at)))
    while isinstance(at[key], dict) and data.draw(st.booleans()):
        at = at[key]
        key = data.draw(st.sampled_from(sorted(at)))
    at[key] = data.draw(JSON)
    segments = (
        ["fuzz-model", "0", "0", "0"] if "groups" not in path else ["fuzz-model", "fuzz-group", "0", "0"]
    )
    headers = {"Content-Type": "application/json"}
    check_answer(
        raw.request(method, fill(path, segments), content=json.dumps(body).encode(), headers=headers)
    )


@FUZZ
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8), st.booleans())
def test_no_damaged_layout_gives_a_500(raw: httpx.Client, at: int, damage: bytes, inside: bool) -> None:
    data = rows_layout(0, 8).to_bytes()
    frame = bytearray(zstandard.ZstdDecompressor().decompress(data) if inside else data)
    at %= len(frame)
    frame[at : at + len(damage)] = damage
    content = zstandard.ZstdCompressor().compress(bytes(frame)) if inside else bytes(frame)
    check_answer(raw.put(f"/v1/layouts/{'0' * 32}", content=content))


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"1" * 100_000, b'{"a":' * 20_000, b"\xff\xfe", b"null", b""]
)
def test_json_that_breaks_parsers_is_refused(raw: httpx.Client, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = raw.post(f"{MODEL}/versions", content=content, headers=headers)
    assert response.status_code in (400, 422)
    check_answer(response)
