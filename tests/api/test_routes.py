"""Every route, over ASGI and a real Valkey."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import httpx
import pytest
import xxhash

from weightdepot.store.layout import Layout
from weightdepot.store.planning import Plan
from weightdepot.store.tiling import SourceTiling

from .helpers import body_of, rows_layout

Json = dict[str, Any]
MODEL = "/v1/models/policy"


def problem(response: httpx.Response, status: int, slug: str) -> Json:
    """The answer is this problem, in the right form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: Json = response.json()
    assert body["status"] == status
    assert body["type"].rsplit("/", 1)[-1] == slug, body
    assert body["title"]
    assert body["detail"]
    return body


async def put_layout(http: httpx.AsyncClient, layout: Layout) -> str:
    response = await http.put(f"/v1/layouts/{layout.digest}", content=layout.to_bytes())
    assert response.status_code == 200, response.text
    return layout.digest


async def join(http: httpx.AsyncClient, rank: int = 0, world_size: int = 1, **changes: Any) -> Json:
    step = 8 // world_size
    digest = await put_layout(http, rows_layout(rank * step, (rank + 1) * step))
    fields = {"rank": rank, "world_size": world_size, "session": f"s{rank}", "layout": digest, **changes}
    response = await http.post(f"{MODEL}/producers", json=body_of(**fields))
    assert response.status_code == 200, response.text
    joined: Json = response.json()
    return joined


async def join_consumer(http: httpx.AsyncClient, layout: str = "", session: str = "c0") -> Json:
    body = {**body_of(session=session), "layout": layout}
    del body["retention"]
    response = await http.post(f"{MODEL}/groups/g/consumers", json=body)
    assert response.status_code == 200, response.text
    joined: Json = response.json()
    return joined


async def open_version(http: httpx.AsyncClient, version: int, rank: int = 0, wait: float = 0.0) -> Json:
    body = {"version": version, "rank": rank, "session": f"s{rank}"}
    response = await http.post(f"{MODEL}/versions", params={"wait": wait}, json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    assert len(answer) == 1
    return answer


def seal_body(rank: int = 0, **changes: Any) -> Json:
    digests = bytes(range(16))
    return {
        "session": f"s{rank}",
        "endpoints": {"shm": {"segment": "a", "empty": [], "nothing": None, "deep": {"n": 1.5}}},
        "nbytes": 128,
        "digests": xxhash.xxh3_128_hexdigest(digests),
        "tile_digests": base64.b64encode(digests).decode(),
        **changes,
    }


async def publish(http: httpx.AsyncClient, version: int) -> Json:
    assert "grant" in await open_version(http, version)
    response = await http.post(f"{MODEL}/versions/{version}/parts/0", json=seal_body())
    assert response.status_code == 200, response.text
    sealed: Json = response.json()
    return sealed


async def begin(http: httpx.AsyncClient, wait: float = 0.0, **changes: Any) -> Json:
    body = {"rank": 0, "session": "c0", **changes}
    response = await http.post(f"{MODEL}/groups/g/rounds", params={"wait": wait}, json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


# -- service ---------------------------------------------------------------------------------------------


async def test_health_and_readiness_name_the_run(http: httpx.AsyncClient) -> None:
    run = http.headers["Weightdepot-Run"]
    health, ready = await http.get("/v1/health"), await http.get("/v1/ready")
    assert health.json()["run"] == ready.json()["run"] == run
    assert 0 < ready.json()["index_seconds"] < 5


async def test_another_runs_members_are_refused_with_both_names(http: httpx.AsyncClient) -> None:
    for call in (
        http.post(f"{MODEL}/producers", json=body_of(), headers={"Weightdepot-Run": "other"}),
        http.get("/v1/models", headers={"Weightdepot-Run": "other"}),
    ):
        body = problem(await call, 409, "invalid-request")
        assert "'other'" in body["detail"]
        assert http.headers["Weightdepot-Run"] in body["detail"]


async def test_without_a_run_one_may_read_but_not_change(http: httpx.AsyncClient) -> None:
    del http.headers["Weightdepot-Run"]
    assert (await http.get("/v1/models")).status_code == 200
    problem(await http.post(f"{MODEL}/producers", json=body_of()), 409, "invalid-request")


# -- layouts ---------------------------------------------------------------------------------------------


async def test_a_layout_comes_back_as_it_was_put(http: httpx.AsyncClient) -> None:
    layout = rows_layout(0, 8)
    stored = (await http.put(f"/v1/layouts/{layout.digest}", content=layout.to_bytes())).json()
    assert stored == {"digest": layout.digest, "tensors": 1, "placements": 1, "nbytes": 128}
    got = await http.get(f"/v1/layouts/{layout.digest}")
    assert got.headers["content-type"] == "application/octet-stream"
    assert Layout.from_bytes(got.content) == layout


async def test_a_layout_under_another_digest_is_refused_naming_both(http: httpx.AsyncClient) -> None:
    layout = rows_layout(0, 8)
    body = problem(
        await http.put(f"/v1/layouts/{'0' * 32}", content=layout.to_bytes()), 422, "invalid-request"
    )
    assert layout.digest in body["detail"]
    assert "0" * 32 in body["detail"]
    problem(await http.get(f"/v1/layouts/{'0' * 32}"), 404, "invalid-request")


@pytest.mark.parametrize(
    "content", [b"", b"no layout", b"\x28\xb5\x2f\xfd" + bytes(40)], ids=["empty", "text", "zstd"]
)
async def test_bytes_that_are_no_layout_are_refused(http: httpx.AsyncClient, content: bytes) -> None:
    problem(await http.put(f"/v1/layouts/{'0' * 32}", content=content), 422, "invalid-request")


# -- members ---------------------------------------------------------------------------------------------


async def test_a_rank_held_by_a_living_process_is_refused_naming_it(http: httpx.AsyncClient) -> None:
    await join(http)
    again = await http.post(f"{MODEL}/producers", json=body_of(session="s0"))
    assert again.status_code == 200, "the same session may join again"
    body = problem(await http.post(f"{MODEL}/producers", json=body_of(session="x")), 409, "member-conflict")
    assert "s0" in str(body["details"])
    taken = await http.post(f"{MODEL}/producers", json=body_of(session="x", replace="s0"))
    assert taken.status_code == 200, "a holder that is known to be dead may be replaced"


async def test_joining_with_a_layout_that_was_never_put_says_how_to_put_it(http: httpx.AsyncClient) -> None:
    body = problem(
        await http.post(f"{MODEL}/producers", json=body_of(layout="a" * 32)), 404, "invalid-request"
    )
    assert f"PUT /v1/layouts/{'a' * 32}" in body["detail"]


async def test_a_consumer_may_come_before_the_producers_and_state_its_layout_later(
    http: httpx.AsyncClient,
) -> None:
    joined = await join_consumer(http)
    assert joined["latest"] is None
    digest = await put_layout(http, rows_layout(0, 4))
    path = f"{MODEL}/groups/g/consumers/0/layout"
    assert (await http.put(path, json={"session": "c0", "layout": digest})).status_code == 204
    members = (await http.get(f"{MODEL}/groups/g")).json()["members"]
    assert [m["layout"] for m in members] == [digest]
    problem(await http.put(path, json={"session": "zz", "layout": digest}), 409, "member-conflict")


async def test_heartbeats_tell_a_member_from_a_stranger(http: httpx.AsyncClient) -> None:
    await join(http)
    beat = await http.post(f"{MODEL}/members/s0/heartbeat", json={"ttl": 5})
    assert beat.json() == {"member": True, "lost": []}
    stranger = await http.post(f"{MODEL}/members/nobody/heartbeat", json={})
    assert stranger.json()["member"] is False


async def test_leaving_takes_the_versions_along_and_may_be_repeated(http: httpx.AsyncClient) -> None:
    await join(http)
    await publish(http, 1)
    for _ in range(2):
        assert (await http.delete(f"{MODEL}/members/s0")).status_code == 204
    version = (await http.get(f"{MODEL}/versions/1")).json()
    assert version["state"] == "freed"
    assert version["reason"]


# -- versions --------------------------------------------------------------------------------------------


async def test_a_version_is_ready_when_its_last_part_is_sealed(http: httpx.AsyncClient) -> None:
    for rank in range(2):
        await join(http, rank, world_size=2)
    grants = [(await open_version(http, 5, rank))["grant"] for rank in range(2)]
    assert grants[0]["tiling"] == grants[1]["tiling"]
    first = (await http.post(f"{MODEL}/versions/5/parts/0", json=seal_body(0))).json()
    assert (first["state"], first["missing"]) == ("open", [1])
    problem(await http.get(f"{MODEL}/versions/latest"), 404, "nothing-ready")
    second = (await http.post(f"{MODEL}/versions/5/parts/1", json=seal_body(1))).json()
    assert (second["state"], second["missing"]) == ("ready", [])
    assert (await http.get(f"{MODEL}/versions/latest")).json()["version"] == 5
    again = await http.post(f"{MODEL}/versions/5/parts/1", json=seal_body(1))
    assert again.status_code == 200, "sealing may be repeated"
    assert [v["version"] for v in (await http.get(f"{MODEL}/versions")).json()["versions"]] == [5]
    problem(await http.get(f"{MODEL}/versions/99"), 410, "version-gone")


async def test_the_digests_come_back_by_rank(http: httpx.AsyncClient) -> None:
    await join(http)
    await publish(http, 1)
    for query in ({}, {"ranks": "0"}):
        answer = (await http.get(f"{MODEL}/versions/1/digests", params=query)).json()
        assert {rank: base64.b64decode(text) for rank, text in answer["digests"].items()} == {
            "0": bytes(range(16))
        }
    problem(await http.get(f"{MODEL}/versions/1/digests", params={"ranks": "0,7"}), 410, "version-gone")
    problem(await http.get(f"{MODEL}/versions/1/digests", params={"ranks": "0,,7"}), 422, "invalid-request")


async def test_digests_that_changed_on_their_way_are_refused(http: httpx.AsyncClient) -> None:
    await join(http)
    await open_version(http, 1)
    response = await http.post(f"{MODEL}/versions/1/parts/0", json=seal_body(digests="0" * 32))
    problem(response, 422, "integrity")


async def test_a_producer_waits_for_the_ranks_that_are_missing(http: httpx.AsyncClient) -> None:
    await join(http, 0, world_size=2)
    wait = (await open_version(http, 1))["wait"]
    assert wait["reason"] == "ranks"
    assert wait["details"]["missing"] == [1]

    async def later() -> None:
        await asyncio.sleep(0.1)
        await join(http, 1, world_size=2)

    answer, _ = await asyncio.gather(open_version(http, 1, wait=5), later())
    assert "grant" in answer


async def test_opening_as_a_stranger_or_not_above_the_last_version_is_refused(
    http: httpx.AsyncClient,
) -> None:
    await join(http)
    await publish(http, 5)
    body = {"version": 6, "rank": 0, "session": "stranger"}
    problem(await http.post(f"{MODEL}/versions", json=body), 409, "member-conflict")
    body = {"version": 5, "rank": 0, "session": "s0"}
    problem(await http.post(f"{MODEL}/versions", json=body), 409, "version-not-newer")
    unknown = await http.post("/v1/models/nothing/versions", json=body)
    problem(unknown, 404, "unknown-model")


async def test_an_aborted_version_makes_nothing_visible_and_may_be_opened_again(
    http: httpx.AsyncClient,
) -> None:
    await join(http)
    await open_version(http, 3)
    aborted = await http.post(f"{MODEL}/versions/3/abort", json={"session": "s0", "reason": "no memory"})
    assert aborted.json()["state"] == "aborted"
    problem(await http.post(f"{MODEL}/versions/3/parts/0", json=seal_body()), 409, "publish-aborted")
    problem(await http.get(f"{MODEL}/versions/latest"), 404, "nothing-ready")
    assert (await publish(http, 3))["state"] == "ready"


async def test_a_living_source_that_is_reported_lost_stays(http: httpx.AsyncClient) -> None:
    await join(http)
    await publish(http, 1)
    report = await http.post(f"{MODEL}/versions/1/lost", json={"rank": 0, "reason": "refused"})
    assert report.json()["state"] == "ready"
    await http.delete(f"{MODEL}/members/s0")
    report = await http.post(f"{MODEL}/versions/1/lost", json={"rank": 0, "reason": "refused"})
    assert report.json()["state"] == "freed"


async def test_latest_wakes_the_moment_that_a_version_is_ready(http: httpx.AsyncClient) -> None:
    await join(http)
    woken: list[float] = []

    async def reader() -> Json:
        response = await http.get(f"{MODEL}/versions/latest", params={"wait": 10, "min_version": 2})
        woken.append(time.monotonic())
        body: Json = response.json()
        return body

    reading = asyncio.create_task(reader())
    await asyncio.sleep(0.2)
    await publish(http, 1)
    await asyncio.sleep(0.1)
    assert not reading.done(), "version 1 is not new enough"
    await publish(http, 2)
    sealed = time.monotonic()
    assert (await reading)["version"] == 2
    assert woken[0] - sealed < 0.3


async def test_latest_waits_also_for_a_model_that_nobody_registered_yet(http: httpx.AsyncClient) -> None:
    problem(await http.get(f"{MODEL}/versions/latest"), 404, "unknown-model")
    reading = asyncio.create_task(http.get(f"{MODEL}/versions/latest", params={"wait": 10}))
    await asyncio.sleep(0.1)
    await join(http)
    await publish(http, 1)
    assert (await reading).json()["version"] == 1


async def test_a_long_poll_ends_when_its_time_is_up_and_says_what_is_missing(http: httpx.AsyncClient) -> None:
    await join(http)
    begun = time.monotonic()
    response = await http.get(f"{MODEL}/versions/latest", params={"wait": 0.3})
    assert 0.25 < time.monotonic() - begun < 2
    body = problem(response, 404, "wait-timeout")
    assert "nothing is ready" in body["detail"]
    assert body["details"]["reason"] == "version"


# -- tilings and plans -----------------------------------------------------------------------------------


async def test_the_manifest_is_there_once_all_ranks_are(http: httpx.AsyncClient) -> None:
    problem(await http.get(f"{MODEL}/manifest"), 404, "unknown-model")
    await join(http, 0, world_size=2)
    body = problem(await http.get(f"{MODEL}/manifest", params={"wait": 0.05}), 404, "wait-timeout")
    assert body["details"]["missing"] == [1]
    reading = asyncio.create_task(http.get(f"{MODEL}/manifest", params={"wait": 10}))
    await join(http, 1, world_size=2)
    assert (await reading).json() == {"tensors": [{"name": "w", "shape": [8, 4], "dtype": "float32"}]}


async def test_ranks_that_disagree_are_named_tensor_by_tensor(http: httpx.AsyncClient) -> None:
    await join(http, 0, world_size=2)
    digest = await put_layout(http, rows_layout(4, 8, dtype="bfloat16"))
    await http.post(f"{MODEL}/producers", json=body_of(rank=1, world_size=2, session="s1", layout=digest))
    for response in (
        await http.get(f"{MODEL}/manifest"),
        await http.post(f"{MODEL}/versions", json={"version": 1, "rank": 0, "session": "s0"}),
    ):
        assert problem(response, 409, "layout")["details"]["faults"][0]["tensor"] == "w"


async def test_a_plan_reads_each_needed_row_once_from_the_rank_that_stores_it(
    http: httpx.AsyncClient,
) -> None:
    for rank in range(2):
        await join(http, rank, world_size=2)
    reader = await put_layout(http, rows_layout(2, 6))
    await join_consumer(http, reader)
    tiling = (await open_version(http, 1))["grant"]["tiling"]
    sources = [
        SourceTiling.from_bytes((await http.get(f"{MODEL}/tilings/{tiling}/sources/{rank}")).content)
        for rank in range(2)
    ]
    assert [source.payload for source in sources] == [64, 64]
    plan = Plan.from_bytes((await http.get(f"{MODEL}/plans/{tiling}/{reader}")).content)
    assert plan.moved_nbytes == plan.needed_nbytes == 4 * 4 * 4
    assert plan.sources == (0, 1)


async def test_all_ranks_of_a_version_get_the_tiling_that_it_was_opened_with(http: httpx.AsyncClient) -> None:
    """Also when a consumer comes between them; the next version is cut for it."""
    for rank in range(2):
        await join(http, rank, world_size=2)
    first = (await open_version(http, 1, 0))["grant"]["tiling"]
    await join_consumer(http, await put_layout(http, rows_layout(2, 6)))
    assert (await open_version(http, 1, 1))["grant"]["tiling"] == first
    await http.post(f"{MODEL}/versions/1/abort", json={"session": "s0", "reason": "test"})
    assert (await open_version(http, 2, 0))["grant"]["tiling"] != first


async def test_plans_for_what_is_unknown_or_does_not_fit_are_refused(http: httpx.AsyncClient) -> None:
    await join(http)
    tiling = (await open_version(http, 1))["grant"]["tiling"]
    known = rows_layout(0, 8).digest
    other = await put_layout(http, rows_layout(0, 8, name="not published"))
    problem(await http.get(f"{MODEL}/plans/{'0' * 32}/{known}"), 410, "version-gone")
    problem(await http.get(f"{MODEL}/plans/{tiling}/{'0' * 32}"), 404, "invalid-request")
    body = problem(await http.get(f"{MODEL}/plans/{tiling}/{other}"), 409, "layout")
    assert body["details"]["faults"][0]["tensor"] == "not published"
    problem(await http.get(f"{MODEL}/tilings/{'0' * 32}/sources/0"), 410, "version-gone")
    problem(await http.get(f"{MODEL}/tilings/{tiling}/sources/5"), 422, "invalid-request")


# -- rounds ----------------------------------------------------------------------------------------------


async def test_a_round_moves_a_group_to_the_newest_version(http: httpx.AsyncClient) -> None:
    await join(http)
    await join_consumer(http)
    assert (await begin(http))["wait"]["reason"] == "version"
    beginning = asyncio.create_task(begin(http, wait=10))
    await asyncio.sleep(0.05)
    await publish(http, 4)
    round_ = (await beginning)["round"]
    assert (round_["version"], round_["held"]) == (4, None)
    assert round_["parts"][0]["endpoints"] == seal_body()["endpoints"], "endpoints come back unchanged"
    assert (await http.get(f"{MODEL}/versions/4")).json()["leases"] == [f"g/{round_['round']}"]
    beat = await http.post(
        f"{MODEL}/members/c0/heartbeat", json={"rounds": [{"group": "g", "round": round_["round"]}]}
    )
    assert beat.json() == {"member": True, "lost": []}
    path = f"{MODEL}/groups/g/rounds/{round_['round']}"
    assert (await http.get(path)).json()["state"] == "moving"
    for _ in range(2):
        done = await http.post(f"{path}/ranks/0", params={"wait": 1}, json={"session": "c0"})
        assert done.json() == {"version": 4, "state": "whole", "pending": [], "error": ""}
    group = (await http.get(f"{MODEL}/groups/g")).json()
    assert (group["state"], group["version"]) == ("whole", 4)
    listed = (await http.get(f"{MODEL}/groups")).json()["groups"]
    assert [(g["group"], g["state"], g["version"]) for g in listed] == [("g", "whole", 4)]
    assert (await http.get(f"{MODEL}/versions/4")).json()["leases"] == []


async def test_a_failed_round_marks_the_group_and_says_why(http: httpx.AsyncClient) -> None:
    await join(http)
    await join_consumer(http)
    await publish(http, 1)
    number = (await begin(http))["round"]["round"]
    path = f"{MODEL}/groups/g/rounds/{number}/ranks/0"
    done = (await http.post(path, params={"wait": 5}, json={"session": "c0", "error": "a bad digest"})).json()
    assert done["state"] == "half"
    assert "a bad digest" in done["error"]
    assert (await http.get(f"{MODEL}/groups/g")).json()["version"] is None


async def test_strangers_and_unknown_groups_are_refused(http: httpx.AsyncClient) -> None:
    await join(http)
    await join_consumer(http)
    stranger = await http.post(f"{MODEL}/groups/g/rounds", json={"rank": 0, "session": "x"})
    problem(stranger, 409, "member-conflict")
    problem(await http.get(f"{MODEL}/groups/nothing"), 404, "unknown-model")
    problem(await http.get("/v1/models/nothing"), 404, "unknown-model")
    problem(await http.get("/v1/models/nothing/groups"), 404, "unknown-model")


async def test_models_are_listed(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models")).json() == {"models": []}
    await join(http)
    assert (await http.get("/v1/models")).json() == {"models": ["policy"]}
    model = (await http.get(MODEL)).json()
    assert (model["name"], model["world_size"], model["latest"]) == ("policy", 1, None)
    assert model["producers"][0]["process"] == {"host": "h", "pid": 1, "started": 1}
