"""Conditional queries: who has the present state is told so, and a poll wakes when it is another one."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightdepot.api.conditional import matches, state_tag

from .test_routes import MODEL, join, join_consumer, open_version, problem, publish

LATEST = f"{MODEL}/versions/latest"


async def tag_of(http: httpx.AsyncClient, path: str) -> str:
    response = await http.get(path)
    assert response.status_code == 200, response.text
    return response.headers["etag"]


@pytest.mark.parametrize("path", [LATEST, f"{MODEL}/versions/current", MODEL, f"{MODEL}/groups"])
async def test_who_has_it_gets_304_without_a_body(http: httpx.AsyncClient, path: str) -> None:
    await join(http)
    await join_consumer(http)
    await publish(http, 1)
    tag = await tag_of(http, path)
    for header in (tag, f'"other", {tag}', "*", tag.removeprefix("W/")):
        response = await http.get(path, headers={"If-None-Match": header})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == tag
    other = await http.get(path, headers={"If-None-Match": '"v1-other"'})
    assert other.status_code == 200


async def test_a_model_and_its_groups_have_the_same_tag_until_something_happens(
    http: httpx.AsyncClient,
) -> None:
    """Heartbeats, and the seconds that pass, are nothing."""
    await join(http)
    await join_consumer(http)
    model, groups = await tag_of(http, MODEL), await tag_of(http, f"{MODEL}/groups")
    await http.post(f"{MODEL}/members/s0/heartbeat", json={"ttl": 100})
    assert (await tag_of(http, MODEL), await tag_of(http, f"{MODEL}/groups")) == (model, groups)
    await publish(http, 1)
    assert await tag_of(http, MODEL) != model
    assert await tag_of(http, f"{MODEL}/groups") != groups, "the group is one version behind now"


async def test_a_version_that_was_aborted_and_published_again_is_another(http: httpx.AsyncClient) -> None:
    await join(http)
    await open_version(http, 1)
    first = (await http.get(f"{MODEL}/versions/1")).json()["attempt"]
    await http.post(f"{MODEL}/versions/1/abort", json={"session": "s0", "reason": "test"})
    await publish(http, 1)
    assert first not in await tag_of(http, LATEST)


async def test_a_poll_with_a_tag_wakes_when_the_version_is_another_one(http: httpx.AsyncClient) -> None:
    await join(http)
    await publish(http, 1)
    tag = await tag_of(http, LATEST)
    unchanged = await http.get(LATEST, params={"wait": 0.2}, headers={"If-None-Match": tag})
    assert unchanged.status_code == 304
    polling = asyncio.create_task(http.get(LATEST, params={"wait": 10}, headers={"If-None-Match": tag}))
    await asyncio.sleep(0.1)
    assert not polling.done()
    await publish(http, 2)
    assert (await polling).json()["version"] == 2


async def test_a_poll_for_the_current_version_wakes_at_a_roll_back(http: httpx.AsyncClient) -> None:
    await join(http)
    await publish(http, 1)
    await publish(http, 2)
    path = f"{MODEL}/versions/current"
    tag = await tag_of(http, path)
    polling = asyncio.create_task(http.get(path, params={"wait": 10}, headers={"If-None-Match": tag}))
    await asyncio.sleep(0.1)
    await http.put(f"{MODEL}/current", json={"version": 1})
    assert (await polling).json()["version"] == 1
    assert (await http.get(LATEST)).json()["version"] == 2
    body = problem(await http.get(path, params={"min_version": 2, "wait": 0.05}), 404, "wait-timeout")
    assert "held" in body["detail"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


@given(JSON, st.floats(0, 100), st.floats(0, 100))
def test_a_tag_is_of_all_but_what_differs_at_each_look(plain: Any, before: float, after: float) -> None:
    first, second = ({"state": plain, "members": [{"expires_in": left}]} for left in (before, after))
    assert state_tag(first) == state_tag(second)
    assert state_tag(first) != state_tag({**first, "more": 1})


def test_a_header_that_is_no_tag_matches_nothing() -> None:
    assert not matches(None, '"a"')
    assert not matches("", '"a"')
    assert not matches("a", '"a"')
