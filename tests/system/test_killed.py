"""Processes killed, stopped and restarted: no reader ever gets a mixture, and nothing waits for ever."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable

import pytest

from weightdepot.api.client import ControllerClient
from weightdepot.store.index.records import VersionState

from .harness import Child, eventually

Start = Callable[..., Child]


@pytest.mark.parametrize("stage", ["opened", "packing", "digested", "sealing"])
def test_case_07_a_producer_killed_in_mid_publish_leaves_readers_on_the_last_version(
    start: Start, controller: str, model: str, stage: str
) -> None:
    """Killed while it packs, digests and seals; its successor publishes the next version at once."""
    steady = start("producer", rank=0, world_size=2)
    victim = start("producer", rank=1, world_size=2, halt=stage)
    reader = start("consumer")
    for p in (steady, victim):
        p.tell("publish 1")
    assert [p.heard()["version"] for p in (steady, victim)] == [1, 1]
    assert reader.ask("update")["seen"] == 1

    steady.tell("publish 2")
    victim.tell("publish 2")
    assert victim.heard() == {"halted": stage}
    assert steady.heard()["version"] == 2  # its own part is packed and sealed; the version is not ready
    assert reader.ask("update") | {"seconds": 0} == {"version": 1, "seen": 1, "seconds": 0}
    victim.kill()
    assert reader.ask("update")["seen"] == 1

    successor = start("producer", rank=1, world_size=2)
    with ControllerClient(controller) as client:
        aborted = client.version(model, 2)
        assert aborted.state is VersionState.ABORTED
        assert "rank 1" in aborted.reason
    assert reader.ask("update")["seen"] == 1
    # the same step may be published again, since nobody ever saw it
    for version in (2, 3):
        for p in (steady, successor):
            p.tell(f"publish {version}")
        assert [p.heard()["version"] for p in (steady, successor)] == [version, version]
        assert reader.ask("update")["seen"] == version


def test_case_01_a_version_of_which_one_rank_is_missing_is_not_there(start: Start) -> None:
    first, second = (start("producer", rank=r, world_size=2) for r in range(2))
    reader = start("consumer")
    for p in (first, second):
        p.tell("publish 0")
    assert [p.heard()["version"] for p in (first, second)] == [0, 0]
    assert first.ask("publish 1")["version"] == 1
    assert reader.ask("update")["seen"] == 0
    assert second.ask("publish 1")["version"] == 1
    assert reader.ask("update 1")["seen"] == 1


def test_all_ranks_killed_and_restarted_resume_past_the_last_version(start: Start) -> None:
    ranks = [start("producer", rank=r, world_size=2) for r in range(2)]
    reader = start("consumer")
    for p in ranks:
        p.tell("publish 7")
    assert [p.heard()["version"] for p in ranks] == [7, 7]
    assert reader.ask("update")["seen"] == 7
    for p in ranks:
        p.kill()
    again = [start("producer", rank=r, world_size=2, join=False) for r in range(2)]
    assert [p.heard()["latest"] for p in again] == [7, 7]
    old = again[0].ask("publish 7")
    assert old["error"] == "VersionNotNewer"
    assert "7" in old["message"]
    for p in again:
        p.tell("publish 8")
    assert [p.heard()["version"] for p in again] == [8, 8]
    assert reader.ask("update")["seen"] == 8


def test_case_08_a_consumer_killed_in_mid_pull_holds_up_nobody(
    start: Start, controller: str, model: str
) -> None:
    producer = start("producer")
    victim, other = start("consumer", group="victim", halt="pulled"), start("consumer", group="other")
    assert producer.ask("publish 1")["version"] == 1
    assert victim.ask("update")["seen"] == 1
    assert other.ask("update")["seen"] == 1
    assert producer.ask("publish 2")["version"] == 2
    victim.tell("update")
    assert victim.heard() == {"halted": "pulled"}
    victim.kill()
    # two slots: version 4 needs the one of version 2, on which the dead reader's lease runs out first
    for version in (3, 4, 5):
        assert producer.ask(f"publish {version}")["version"] == version
        assert other.ask("update")["seen"] == version
    back = start("consumer", group="victim")
    assert back.ask("update")["seen"] == 5
    with ControllerClient(controller) as client:
        assert {g.group: g.version for g in client.groups(model)} == {"victim": 5, "other": 5}


def test_case_05_a_group_of_which_one_rank_died_says_so_until_it_is_whole(
    start: Start, controller: str, model: str
) -> None:
    producer = start("producer")
    ranks = [start("consumer", rank=0, world_size=2), start("consumer", rank=1, world_size=2, halt="pulled")]
    assert producer.ask("publish 1")["version"] == 1
    for c in ranks:
        c.tell("update")
    assert [c.heard()["seen"] for c in ranks] == [1, 1]
    assert producer.ask("publish 2")["version"] == 2
    for c in ranks:
        c.tell("update")
    assert ranks[1].heard() == {"halted": "pulled"}
    ranks[1].kill()
    left = ranks[0].heard()
    assert left["error"] == "StaleGroup"
    assert "rank 1" in left["message"]
    with ControllerClient(controller) as client:
        (group,) = client.groups(model)
        assert group.state.value == "half"
        assert group.version is None
        back = start("consumer", rank=1, world_size=2)
        for c in (ranks[0], back):
            c.tell("update")
        assert [c.heard()["seen"] for c in (ranks[0], back)] == [2, 2]
        (group,) = client.groups(model)
        assert (group.state.value, group.version) == ("whole", 2)


@pytest.mark.parametrize("stage", ["begun", "pulled"])
def test_case_04_a_reader_stopped_for_longer_than_its_lease_discards_what_it_read(
    start: Start, stage: str
) -> None:
    """It holds version 2, whose slot is written twice while it is stopped; waking, it is told so."""
    producer, sleeper = start("producer"), start("consumer", group="sleeper", halt=stage, halt_seconds=1)
    assert producer.ask("publish 1")["version"] == 1
    assert sleeper.ask("update")["seen"] == 1
    assert producer.ask("publish 2")["version"] == 2
    sleeper.tell("update")
    assert sleeper.heard() == {"halted": stage}
    sleeper.signal(signal.SIGSTOP)
    for version in (3, 4, 5):
        assert producer.ask(f"publish {version}")["version"] == version
    sleeper.signal(signal.SIGCONT)
    woken = sleeper.heard()
    assert woken["error"] in ("LeaseLost", "VersionGone", "IntegrityError"), woken
    # what it says that it holds is whole: the old version where nothing was written, else none
    assert woken["held"] in (None, woken["seen"])
    assert woken["held"] in (None, 1)
    assert sleeper.ask("update")["seen"] == 5


def test_case_10_a_trainer_that_resumes_below_the_store_is_told_so(start: Start) -> None:
    producer, reader = start("producer"), start("consumer")
    assert producer.ask("publish 137")["version"] == 137
    assert reader.ask("update")["seen"] == 137
    assert producer.ask("publish 200")["version"] == 200
    producer.kill()
    resumed = start("producer", join=False)
    assert resumed.heard()["latest"] == 200
    refused = resumed.ask("publish 137")
    assert refused["error"] == "VersionNotNewer"
    assert "200" in refused["message"]
    assert resumed.ask("publish 201")["version"] == 201
    assert reader.ask("update")["seen"] == 201


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_case_27_either_side_may_come_first(start: Start, first: str) -> None:
    if first == "producer":
        producer = start("producer")
        assert producer.ask("publish 1")["version"] == 1
        reader = start("consumer")
        assert reader.ask("update")["seen"] == 1
    else:
        reader = start("consumer")
        reader.tell("update")
        producer = start("producer")
        assert producer.ask("publish 1")["version"] == 1
        assert reader.heard()["seen"] == 1


def test_memory_of_killed_producers_is_given_back_by_their_successors(start: Start, model: str) -> None:
    owner = hashlib.blake2b(f"default/{model}/0".encode(), digest_size=8).hexdigest()

    def segments() -> int:
        return len([f for f in os.listdir("/dev/shm") if f.startswith(f"weightdepot-{owner}-")])

    for round_ in range(4):
        producer = start("producer")
        for version in range(3):
            assert producer.ask(f"publish {10 * round_ + version}")["version"] == 10 * round_ + version
        # its own slots and one ahead, and as many of a predecessor whose versions live
        assert 2 <= segments() <= 6
        producer.kill()
    last = start("producer")
    assert last.ask("publish 100")["version"] == 100
    assert last.ask("publish 101")["version"] == 101
    eventually(lambda: segments() == 3)
    last.tell("exit")
    last.process.wait(20)
    assert segments() == 0
