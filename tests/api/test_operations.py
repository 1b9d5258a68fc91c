"""Modes, holding, pins, tags, freshness, staging, withdrawing, announcing: over a real controller."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightdepot.api.client import ControllerClient
from weightdepot.api.tilings import checked_tiling
from weightdepot.store.errors import (
    IntegrityError,
    InvalidRequest,
    LeaseLost,
    StaleGroup,
    UnknownModel,
    VersionGone,
    WaitTimeout,
)
from weightdepot.store.index.records import GroupState, Held, Mode, Part, Policy, RoundStatus, VersionState
from weightdepot.store.tiling import Tiling, make_tiling

from .helpers import PROCESS, Trainer, join_group, rows_layout, unique


def move(client: ControllerClient, model: str, group: str, session: str, **wish: Any) -> int:
    """A group of one rank moves; what it holds then."""
    begun = client.begin_round(model, group, rank=0, session=session, timeout=5, **wish)
    client.finish_round(model, group, rank=0, session=session, round=begun.round, timeout=5)
    return begun.version


# -- modes -----------------------------------------------------------------------------------------------


def test_a_policy_is_set_and_given_with_each_grant(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    assert client.model(model).policy == Policy(Mode.ASYNC, 1)
    changed = client.set_policy(model, mode=Mode.BOUNDED, max_lag=3)
    assert changed.policy == Policy(Mode.BOUNDED, 3)
    grant = trainer.open(1)
    assert grant.policy == Policy(Mode.BOUNDED, 3)
    assert grant.attempt
    assert grant.slot in grant.slots
    with pytest.raises(UnknownModel):
        client.set_policy(unique("nothing"), mode=Mode.SYNC)


def test_a_bounded_publish_waits_for_the_group_that_lags_and_names_it(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    client.set_policy(model, mode=Mode.BOUNDED, max_lag=1)
    (session,) = join_group(client, model, "slow")
    trainer.publish(1)
    move(client, model, "slow", session)
    trainer.publish(2)
    trainer.publish(3)
    with pytest.raises(WaitTimeout, match="slow") as lagging:
        trainer.open(4, timeout=0.2)
    assert lagging.value.details["max_lag"] == 1
    opened: list[int] = []
    thread = threading.Thread(target=lambda: opened.append(trainer.open(4, timeout=10).version))
    thread.start()
    move(client, model, "slow", session)
    thread.join(10)
    assert opened == [4]


# -- which version ---------------------------------------------------------------------------------------


def test_a_model_is_rolled_back_held_and_released(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    (session,) = join_group(client, model, "g")
    trainer.publish(1)
    trainer.publish(2)
    assert move(client, model, "g", session) == 2
    held = client.hold(model, 1)
    assert (held.current, held.held, held.latest) == (1, True, 2)
    assert not client.convergence(model).converged
    assert client.current(model, timeout=1).version == 1
    assert client.latest(model, timeout=1).version == 2
    assert move(client, model, "g", session) == 1
    seen = client.convergence(model, timeout=5)
    assert (seen.converged, seen.current, seen.held, seen.at) == (True, 1, True, ("g",))
    released = client.release(model)
    assert (released.current, released.held) == (2, False)
    assert client.convergence(model).behind == ("g",)
    with pytest.raises(VersionGone):
        client.hold(model, 77)


def test_convergence_is_waited_for(client: ControllerClient, trainer: Trainer, model: str) -> None:
    (session,) = join_group(client, model, "g")
    trainer.publish(1)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(client.convergence(model, timeout=10).converged))
    thread.start()
    time.sleep(0.1)
    move(client, model, "g", session)
    thread.join(10)
    assert seen == [True]


def test_pins_and_tags_keep_a_version_and_letting_go_frees_it(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    trainer.publish(1)
    assert client.pin(model, 1).pinned
    assert client.tag(model, "best", 1).tags == ("best",)
    for version in (2, 3, 4):
        trainer.publish(version)
    assert client.version(model, 1).state is VersionState.READY
    assert client.model(model).tags == {"best": 1}
    assert client.tag(model, "best", 4).tags == ("best",)
    assert client.unpin(model, 1).pinned is False
    client.untag(model, "best")
    client.untag(model, "best")
    trainer.publish(5)
    trainer.publish(6)
    assert client.version(model, 1).state is VersionState.FREED
    with pytest.raises(VersionGone):
        client.pin(model, 1)


def test_an_exact_version_or_a_tag_may_be_asked_for_and_only_one_of_them(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    (session,) = join_group(client, model, "g")
    trainer.publish(1)
    client.tag(model, "reference", 1)
    trainer.publish(2)
    assert move(client, model, "g", session, version=1) == 1
    assert move(client, model, "g", session, version=2) == 2
    assert move(client, model, "g", session, tag="reference") == 1
    assert move(client, model, "g", session, max_lag=1) == 1, "it is fresh enough"
    assert move(client, model, "g", session, max_lag=0) == 2
    with pytest.raises(WaitTimeout):
        client.begin_round(model, "g", rank=0, session=session, version=9, timeout=0.1)
    with pytest.raises(InvalidRequest, match="at most one"):
        client.begin_round(model, "g", rank=0, session=session, version=1, tag="reference", timeout=1)


def test_freshness_is_waited_for_and_said_when_it_does_not_come(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    (session,) = join_group(client, model, "g")
    trainer.publish(1)
    move(client, model, "g", session)
    trainer.publish(2)
    assert client.freshness(model, "g", max_lag=1, timeout=5).lag == 1
    begun = time.monotonic()
    assert client.freshness(model, "g", max_lag=0, timeout=0.3).lag == 1
    assert 0.2 < time.monotonic() - begun < 2
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(client.freshness(model, "g", timeout=10).lag))
    thread.start()
    move(client, model, "g", session)
    thread.join(10)
    assert seen == [0]
    with pytest.raises(UnknownModel):
        client.freshness(model, "nothing", timeout=1)


def test_who_has_applied_a_version_is_waited_for(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    sessions = {group: join_group(client, model, group)[0] for group in ("a", "b")}
    trainer.publish(1)
    move(client, model, "a", sessions["a"])
    seen = client.applied(model, 1)
    assert (seen.applied, seen.pending) == (("a",), ("b",))
    last = []
    thread = threading.Thread(target=lambda: last.append(client.applied(model, 1, timeout=10)))
    thread.start()
    move(client, model, "b", sessions["b"])
    thread.join(10)
    assert (last[0].applied, last[0].pending) == (("a", "b"), ())
    with pytest.raises(VersionGone):
        client.applied(model, 9)


# -- rounds ----------------------------------------------------------------------------------------------


def test_a_group_whose_ranks_have_all_read_gives_its_lease_back(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    sessions = join_group(client, model, "g", world_size=2)
    trainer.publish(1)
    rounds = [client.begin_round(model, "g", rank=r, session=s, timeout=5) for r, s in enumerate(sessions)]
    for rank, session in enumerate(sessions):
        assert client.version(model, 1).leases == (f"g/{rounds[0].round}",)
        client.stage_round(model, "g", rank=rank, session=session, round=rounds[0].round)
    assert client.version(model, 1).leases == ()
    assert [member.staged for member in client.group(model, "g").members] == [1, 1]
    for rank, session in enumerate(sessions):
        status = client.finish_round(
            model, "g", rank=rank, session=session, round=rounds[0].round, timeout=5, barrier=False,
            stats={"seconds": 0.5, "nbytes": 64, "transports": "shm"},
        )  # fmt: skip
    assert status.state is GroupState.WHOLE
    members = client.group(model, "g").members
    assert members[0].stats == {"seconds": 0.5, "nbytes": 64, "transports": "shm"}


def test_a_failure_before_anything_was_written_leaves_what_the_group_holds(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    (session,) = join_group(client, model, "g")
    trainer.publish(1)
    move(client, model, "g", session)
    trainer.publish(2)

    def fail(torn: bool) -> RoundStatus:
        begun = client.begin_round(model, "g", rank=0, session=session, timeout=5)
        return client.finish_round(
            model, "g", rank=0, session=session, round=begun.round, timeout=5, error="no source", torn=torn
        )

    fail(torn=False)
    group = client.group(model, "g")
    assert (group.state, group.version) == (GroupState.WHOLE, 1)
    fail(torn=True)
    assert client.group(model, "g").state is GroupState.HALF


def test_a_version_that_is_read_in_place_takes_no_slot_and_may_be_taken_back(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    (session,) = join_group(client, model, "g")
    for rank in range(2):
        grant = client.open_version(model, 1, rank=rank, session=trainer.sessions[rank], timeout=5, live=True)
        assert grant.slot == -1
    for rank in range(2):
        trainer.seal(1, rank)
    begun = client.begin_round(model, "g", rank=0, session=session, timeout=5)
    for _ in range(2):
        taken = client.withdraw(model, 1, session=trainer.sessions[0], reason="the weights change now")
        assert taken.state is VersionState.FREED
    with pytest.raises(LeaseLost):
        client.finish_round(model, "g", rank=0, session=session, round=begun.round, timeout=5)


# -- an index that lost its state ------------------------------------------------------------------------


def test_a_part_keeps_the_figures_that_its_rank_reported(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    (session,) = join_group(client, model, "g")
    for rank in range(2):
        trainer.open(1, rank)
    for rank in range(2):
        digests = bytes(16)
        part = Part(
            rank,
            trainer.sessions[rank],
            {},
            64,
            xxhash.xxh3_128_hexdigest(digests),
            {"pack": 0.25, "how": "shm"},
        )
        client.seal(model, 1, part, digests)
    parts = client.begin_round(model, "g", rank=0, session=session, timeout=5).parts
    assert [part.stats for part in parts] == [{"pack": 0.25, "how": "shm"}] * 2


@pytest.mark.parametrize(
    "stats",
    [
        {"a": True}, {"a": None}, {"a": [1]}, {"a": {}}, {"a": "x" * 201}, {"": 1}, {"a\n": 1},
        {"a": "\x1b[2J"}, {str(number): number for number in range(65)}, {"a": 10**15}, {"x" * 201: 1},
    ],
    ids=lambda stats: str(stats)[:20],
)  # fmt: skip
def test_figures_that_are_no_figures_are_refused(controller: str, stats: dict[str, Any]) -> None:
    body = {"session": "s", "stats": stats}
    with httpx.Client(base_url=controller, headers={"Weightdepot-Run": "default"}) as http:
        response = http.post("/v1/models/m/groups/g/rounds/1/ranks/0", json=body)
    assert response.status_code == 422
    assert "body.stats" in response.json()["detail"]


def held_by(trainer: Trainer, client: ControllerClient, version: int) -> list[Held]:
    """What each rank of the trainer would announce."""
    found = client.version(trainer.model, version)
    digests = client.digests(trainer.model, version)
    return [
        Held(
            version,
            found.attempt,
            found.slot,
            found.tiling,
            Part(
                rank, session, {"shm": {"segment": f"s{rank}"}}, 64, xxhash.xxh3_128_hexdigest(digests[rank])
            ),
            digests[rank],
        )
        for rank, session in enumerate(trainer.sessions)
    ]


def test_what_producers_announce_to_an_empty_index_is_ready_again(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    """Another model plays the index that has lost its state: it knows nothing of the versions."""
    trainer.publish(5)
    held = held_by(trainer, client, 5)
    tiling = client.tiling(model, held[0].tiling)
    fresh = Trainer(client, unique("again"))
    fresh.sessions = trainer.sessions
    fresh.join_all()
    client.put_tiling(fresh.model, held[0].tiling, tiling)

    def announce(rank: int) -> tuple[int, ...]:
        return client.announce(
            fresh.model, rank=rank, session=fresh.sessions[rank], world_size=2, retention=2,
            held=[held[rank]], highest=7,
        )  # fmt: skip

    assert announce(0) == ()
    assert announce(1) == (5,)
    assert announce(1) == (5,), "it may be repeated"
    again = client.version(fresh.model, 5)
    assert (again.state, again.attempt) == (VersionState.READY, held[0].attempt)
    assert client.digests(fresh.model, 5) == client.digests(model, 5)
    assert client.model(fresh.model).highest == 7
    (session,) = join_group(client, fresh.model, "g")
    assert move(client, fresh.model, "g", session) == 5
    broken = dataclasses.replace(held[0], digests=b"changed on its way")
    with pytest.raises(IntegrityError):
        client.announce(
            fresh.model, rank=0, session=fresh.sessions[0], world_size=2, retention=2, held=[broken]
        )
    with pytest.raises(InvalidRequest, match="of rank 1"):
        client.announce(
            fresh.model, rank=0, session=fresh.sessions[0], world_size=2, retention=2, held=[held[1]]
        )


# -- tilings ---------------------------------------------------------------------------------------------

TILING = make_tiling([rows_layout(0, 4), rows_layout(4, 8)], [rows_layout(2, 6)])


def test_a_tiling_comes_back_as_it_was_put_and_a_known_one_stays(
    client: ControllerClient, model: str
) -> None:
    name = xxhash.xxh3_128_hexdigest(model.encode())
    with pytest.raises(VersionGone):
        client.tiling(model, name)
    client.put_tiling(model, name, TILING)
    other = make_tiling([rows_layout(0, 8)], [])
    client.put_tiling(model, name, other)
    assert client.tiling(model, name).to_bytes() == TILING.to_bytes()
    assert client.source_tiling(model, name, 0).payload == 64


def changed(**columns: Any) -> bytes:
    return dataclasses.replace(TILING, **columns).to_bytes()


def boxes(**columns: Any) -> bytes:
    return changed(boxes=dataclasses.replace(TILING.boxes, **columns))


def tensor(**fields: Any) -> bytes:
    return changed(tensors=(dataclasses.replace(TILING.tensors[0], **fields),))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a compressed"),
        (changed(world_size=1), "a rank that there is not"),
        (changed(world_size=0), "0 ranks"),
        (changed(source=TILING.source[::-1].copy()), "order of rank"),
        (changed(offset=TILING.offset - 1), "outside of any slot"),
        (changed(offset=TILING.offset * 0), "over each other"),
        (changed(offset=TILING.offset[:-1]), "differ in length"),
        (boxes(tensor=TILING.boxes.tensor + 1), "not listed"),
        (boxes(tensor=TILING.boxes.tensor[:-1]), "differ in length"),
        (boxes(offset=TILING.boxes.offset + 100), "outside of its tensor"),
        (boxes(shape=np.full_like(TILING.boxes.shape, 2**62)), "outside of its tensor"),
        (boxes(shape=-TILING.boxes.shape), "outside of its tensor"),
        (boxes(offset=TILING.boxes.offset[:, :1], shape=TILING.boxes.shape[:, :1]), "more than the 1 dim"),
        (tensor(dtype="float9"), "unknown data type"),
        (tensor(shape=(2**40, 2**40)), "impossible shape"),
    ],
)  # fmt: skip
def test_a_tiling_that_does_not_hold_together_is_refused(controller: str, data: bytes, says: str) -> None:
    path = f"/v1/models/m/tilings/{'1' * 32}"
    with httpx.Client(base_url=controller, headers={"Weightdepot-Run": "default"}) as http:
        response = http.put(path, content=data)
        assert response.status_code == 422, response.text
        assert says in response.json()["detail"]
        assert http.get(path).status_code == 410


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=8))
def test_no_damage_to_a_tiling_gives_anything_but_a_refusal_or_a_sound_one(at: int, damage: bytes) -> None:
    import zstandard

    frame = bytearray(zstandard.ZstdDecompressor().decompress(TILING.to_bytes()))
    at %= len(frame)
    frame[at : at + len(damage)] = damage
    try:
        sound: Tiling = checked_tiling(zstandard.ZstdCompressor().compress(bytes(frame)))
    except InvalidRequest:
        return
    for rank in range(min(sound.world_size, 4)):
        assert sound.source_tiling(rank).slot_nbytes >= sound.source_tiling(rank).payload


def test_a_rank_that_wants_another_version_than_its_group_is_told(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    sessions = join_group(client, model, "g", world_size=2)
    trainer.publish(1)
    trainer.publish(2)
    client.begin_round(model, "g", rank=0, session=sessions[0], version=1, timeout=5)
    with pytest.raises(StaleGroup, match="1"):
        client.begin_round(model, "g", rank=1, session=sessions[1], version=2, timeout=1)
    assert (
        client.join_consumer(model, "h", rank=0, world_size=1, session=unique("c"), process=PROCESS).latest
        == 2
    )
