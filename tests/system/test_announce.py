"""Redis lost its data: producers say what is still in their memory, and readers go on with it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import IndexUnavailable, UnknownModel
from weightdepot.store.index.records import VersionState

from .fleet import holds, publish, ranks, trainer
from .harness import Child, Redis, Server, eventually, together

Start = Callable[..., Child]


class Cluster:
    """A controller, and its index in a process of its own."""

    def __init__(self, redis: Redis, server: Server) -> None:
        self.redis, self.url = redis, server.url

    def lose_all_data(self) -> None:
        self.redis.kill()
        self.redis.forget()
        self.redis.start()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        redis = Redis(tmp_path)
        stack.callback(redis.stop)
        server = Server("--port", "0", "--redis-url", redis.url)
        stack.callback(server.stop)
        yield Cluster(redis, server)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[ControllerClient]:
    with ControllerClient(cluster.url) as client:
        yield client


def ready(client: ControllerClient, model: str) -> dict[int, str]:
    """Version -> attempt, of those that readers can have; none where the model is not known."""
    with contextlib.suppress(UnknownModel, IndexUnavailable):
        return {v.version: v.attempt for v in client.versions(model) if v.state is VersionState.READY}
    return {}


@pytest.mark.parametrize("world_size", [1, 2])
def test_case_09_versions_that_are_still_in_memory_come_back_when_redis_lost_its_data(
    cluster: Cluster, client: ControllerClient, model: str, start: Start, world_size: int
) -> None:
    producers = [
        start("producer", controller=cluster.url, rank=r, world_size=world_size) for r in range(world_size)
    ]
    reader = start("consumer", controller=cluster.url, group="steady")
    for version in (1, 2, 3):
        for p in producers:
            p.tell(f"publish {version}")
        assert [p.heard()["version"] for p in producers] == [version] * world_size
    eventually(lambda: set(ready(client, model)) == {2, 3})
    before = ready(client, model)

    cluster.lose_all_data()
    assert ready(client, model) in ({}, before)
    eventually(lambda: ready(client, model) == before)
    # bit-equal, to a reader that was there, and to one that comes now
    answer = reader.ask("update")
    assert answer["seen"] == 3, answer
    late = start("consumer", controller=cluster.url, group="late")
    assert late.ask("update version=2")["seen"] == 2

    refused = producers[0].ask("publish 3")
    assert refused["error"] == "VersionNotNewer"
    for p in producers:
        p.tell("publish 4")
    assert [p.heard()["version"] for p in producers] == [4] * world_size
    assert reader.ask("update 4")["seen"] == 4


def test_a_publish_right_after_the_loss_waits_for_what_comes_back(
    cluster: Cluster, client: ControllerClient, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the slots of versions that are on their way back would look free, the newest one's first."""
    announce = ControllerClient.announce

    def late(self: ControllerClient, model: str, **options: Any) -> tuple[int, ...]:
        if options["rank"] == 1:
            time.sleep(0.5)
        return announce(self, model, **options)

    monkeypatch.setattr(ControllerClient, "announce", late)
    with (
        trainer(cluster.url, model, world_size=2) as first,
        trainer(cluster.url, model, world_size=2, rank=1) as second,
    ):

        def publish_both(version: int) -> None:
            together(lambda: publish(first, version), lambda: publish(second, version))

        for version in (1, 2, 3):  # in slots 0, 1 and 0
            publish_both(version)
        before = ready(client, model)
        assert set(before) == {2, 3}
        cluster.lose_all_data()
        publish_both(4)
        assert set(ready(client, model)) == {3, 4}
        assert ready(client, model)[3] == before[3]
        with ranks(cluster.url, model, 1) as (reader,):
            assert reader.update(version=3) == 3
            assert holds(reader) == 3
            assert reader.update() == 4
            assert holds(reader) == 4


def test_a_rank_that_died_with_the_index_takes_its_versions_along_and_publishing_goes_on(
    cluster: Cluster, client: ControllerClient, model: str, start: Start
) -> None:
    producers = [start("producer", controller=cluster.url, rank=r, world_size=2) for r in range(2)]
    for p in producers:
        p.tell("publish 1")
    assert [p.heard()["version"] for p in producers] == [1, 1]
    producers[1].kill()
    cluster.lose_all_data()
    producers[1] = start("producer", controller=cluster.url, rank=1, world_size=2)
    for p in producers:
        p.tell("publish 2")
    assert [p.heard()["version"] for p in producers] == [2, 2]
    reader = start("consumer", controller=cluster.url)
    assert reader.ask("update 2")["seen"] == 2
    assert 1 not in ready(client, model)


def test_the_memory_of_what_came_back_is_kept_by_a_successor_of_its_producer(
    cluster: Cluster, client: ControllerClient, model: str, start: Start
) -> None:
    """Its file bears the session that the producer began with, not the one that it announced with."""
    first = start("producer", controller=cluster.url)
    assert first.ask("publish 1")["version"] == 1
    cluster.lose_all_data()
    eventually(lambda: set(ready(client, model)) == {1})
    first.kill()
    second = start("producer", controller=cluster.url)
    assert second.ask("publish 2")["version"] == 2
    reader = start("consumer", controller=cluster.url)
    assert reader.ask("update version=1")["seen"] == 1


def test_a_rank_that_was_away_for_too_long_comes_back_with_what_it_has(controller: str, model: str) -> None:
    with (
        ControllerClient(controller) as client,
        trainer(controller, model) as producer,
        ranks(controller, model, 1) as (reader,),
    ):
        publish(producer, 1)
        session = producer._membership.session
        client.leave(model, session)  # what the controller does with members that it has not heard of
        eventually(lambda: producer._membership.session != session)
        publish(producer, 2)
        assert reader.update() == 2
        assert holds(reader) == 2


def test_a_rank_that_another_process_has_taken_meanwhile_is_told_so(
    controller: str, model: str, start: Start
) -> None:
    first = start("producer")
    first.signal(signal.SIGSTOP)
    with ControllerClient(controller) as client:
        (member,) = client.model(model).producers
        client.leave(model, member.session)
    second = start("producer")
    first.signal(signal.SIGCONT)
    refused = first.ask("publish 1")
    assert refused["error"] == "MemberConflict", refused
    assert "rank 0" in refused["message"]
    assert second.ask("publish 1")["version"] == 1
