"""What users of such systems met on a cluster: success without a transfer, calls that grow with the model,
memory of a device in a socket's hands, and nobody who could say which worker had which version."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from weightdepot import Consumer, IntegrityError, LayoutError, Producer
from weightdepot.api.cli import app
from weightdepot.api.client import ControllerClient
from weightdepot.store import devices

from .fleet import full, holds, publish, ranks, trainer
from .harness import QUICK, Server, eventually


def test_case_06_names_that_do_not_match_are_an_error_and_nothing_counts_as_applied(
    controller: str, model: str, producer: Producer
) -> None:
    """An update that has nothing to move is no success, and says which names it misses."""
    publish(producer, 1)
    weights = {"model.w": full(-1)}
    with (
        Consumer(controller, model=model, weights=weights, timeouts=QUICK) as consumer,
        ControllerClient(controller) as client,
    ):
        with pytest.raises(LayoutError, match=re.escape("model.w")):
            consumer.update()
        assert consumer.version is None
        assert torch.equal(weights["model.w"], full(-1))
        assert client.applied(model, 1, timeout=0).applied == ()
        assert client.group(model, "rollout").version is None


def test_case_06_a_part_of_what_is_required_is_no_success_either(
    controller: str, model: str, producer: Producer
) -> None:
    publish(producer, 1)
    weights = {"w": full(-1), "bias": torch.zeros(3)}
    with (
        Consumer(controller, model=model, weights=weights, timeouts=QUICK) as consumer,
        ControllerClient(controller) as client,
    ):
        with pytest.raises(LayoutError, match="bias"):
            consumer.update()
        assert torch.equal(weights["w"], full(-1)), "the tensor that does match was left alone too"
        assert client.applied(model, 1, timeout=0).applied == ()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_case_06_what_arrived_changed_does_not_count_as_applied(
    controller: str, model: str, transport: str
) -> None:
    """A bit of the memory that a version lies in flips; the next version is whole again."""
    with (
        trainer(controller, model) as producer,
        ranks(controller, model, 1, transport=transport) as [consumer],
        ControllerClient(controller) as client,
    ):
        publish(producer, 1)
        assert consumer.update() == 1
        publish(producer, 2)
        slot = client.version(model, 2).slot
        memory = producer._slots._slots[slot].tensor
        memory[0] ^= 1
        with pytest.raises(IntegrityError, match="w"):
            consumer.update()
        assert consumer.version in (None, 1)
        assert client.applied(model, 2, timeout=0).applied == ()
        publish(producer, 3)
        assert consumer.update() == 3 == holds(consumer)
        assert client.applied(model, 3, timeout=0).applied == ("rollout",)


def calls_in(log: Path, begin: int) -> Counter[str]:
    """What was asked since the controller's access log had `begin` bytes. Heartbeats come by time."""
    time.sleep(0.3)  # a line is written after its answer was sent
    text = log.read_bytes()[begin:].decode()
    lines = re.findall(r'"(GET|POST|PUT|DELETE) /v1(\S*) HTTP', text)
    return Counter(method for method, path in lines if not path.endswith("/heartbeat"))


def test_case_30_the_control_calls_of_an_update_do_not_grow_with_the_tensors(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    server = Server("--port", "0", "--log-level", "debug", log=log)
    try:
        counted = {}
        for tensors in (10, 10_000):
            model = f"of-{tensors}"
            held = {f"layer.{i}": torch.full((2,), float(i)) for i in range(tensors)}
            got = {name: torch.zeros(2) for name in held}
            with (
                Producer(server.url, model=model, weights=held, timeouts=QUICK) as producer,
                Consumer(server.url, model=model, weights=got, timeouts=QUICK) as consumer,
            ):
                for version in range(4):  # the first ones also fetch tables, which are kept
                    begin = log.stat().st_size
                    producer.publish(version, wait="ready")
                    publishing = calls_in(log, begin)
                    begin = log.stat().st_size
                    consumer.update()
                    updating = calls_in(log, begin)
                assert all(torch.equal(got[name], held[name]) for name in held)
            assert publishing.total() > 0
            assert updating.total() > 0
            counted[tensors] = publishing, updating
        assert counted[10] == counted[10_000]
        assert sum(calls.total() for calls in counted[10]) < 12
    finally:
        server.stop()


def test_case_32_memory_that_is_not_the_hosts_is_staged_through_the_hosts(
    controller: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that count as a device's: no socket is given their address, and the bytes are right."""
    held = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    got = torch.zeros(64, 64)
    there = {held.data_ptr(), got.data_ptr()}
    staged: list[str] = []
    pack_from, brought_to = devices.pack_from, devices.brought_to

    def packed(*arguments: Any) -> None:
        staged.append("out")
        pack_from(*arguments)

    def brought(device: torch.device, memory: torch.Tensor) -> torch.Tensor:
        staged.append("in")
        return brought_to(device, memory)

    monkeypatch.setattr(devices, "on_host", lambda t: t.data_ptr() not in there)
    monkeypatch.setattr(devices, "pack_from", packed)
    monkeypatch.setattr(devices, "brought_to", brought)
    with (
        Producer(controller, model=model, weights={"w": held}, transport="tcp", timeouts=QUICK) as producer,
        Consumer(controller, model=model, weights={"w": got}, transport="tcp", timeouts=QUICK) as consumer,
    ):
        producer.publish(1, wait="ready")
        assert consumer.update() == 1
        assert consumer.last is not None
        assert consumer.last.transports == ("tcp",)
    assert torch.equal(got, held)
    assert set(staged) == {"out", "in"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_case_32_weights_on_a_gpu_are_carried_over_tcp(controller: str, model: str, transport: Any) -> None:
    held = torch.arange(4096, dtype=torch.float32, device="cuda").reshape(64, 64)
    got = torch.zeros(64, 64, device="cuda")
    with (
        Producer(controller, model=model, weights={"w": held}, timeouts=QUICK) as producer,
        Consumer(
            controller, model=model, weights={"w": got}, transport=transport, timeouts=QUICK
        ) as consumer,
    ):
        producer.publish(1, wait="ready")
        assert consumer.update() == 1
    assert torch.equal(got, held)


def test_case_36_one_command_and_one_query_say_who_holds_what_how_late_and_who_is_stuck(
    controller: str, model: str
) -> None:
    """`fast` is up to date, `slow` three versions behind, `stuck` in a read that it never ends."""
    with (
        trainer(controller, model, retention=3) as producer,
        ranks(controller, model, 1, group="fast") as [fast],
        ranks(controller, model, 1, group="slow") as [slow],
        ranks(controller, model, 1, group="stuck") as [stuck],
        ControllerClient(controller) as client,
    ):
        publish(producer, 1)
        for consumer in (fast, slow, stuck):
            assert consumer.update() == 1
        publish(producer, 2)
        client.begin_round(
            model, "stuck", rank=0, session=stuck._membership.session, lease_ttl=QUICK.lease, timeout=5
        )
        publish(producer, 3, 4)
        assert fast.update() == 4

        answer = httpx.get(f"{controller}/v1/models/{model}/groups").raise_for_status().json()
        groups = {group["group"]: group for group in answer["groups"]}
        assert {name: group["lag"] for name, group in groups.items()} == {"fast": 0, "slow": 3, "stuck": 3}
        assert [g["members"][0]["version"] for g in groups.values()] == [4, 1, 1]
        assert groups["stuck"]["state"] == "moving"
        assert groups["stuck"]["leased"] == [2]

        shown = (
            CliRunner()
            .invoke(app, ["status", model, "--controller", controller], env={"COLUMNS": "100"})
            .stdout
        )
        rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.split()}
        assert rows["fast"][1:4] == ["whole", "4", "0"], shown
        assert rows["slow"][1:4] == ["whole", "1", "3"], shown
        assert rows["stuck"][1:6] == ["moving", "1", ">", "2", "3"], shown
        (trouble,) = [line for line in shown.splitlines() if line.startswith("!") and "stuck" in line]
        assert "version 2" in trouble
        status = CliRunner().invoke(app, ["status", model, "--json", "--controller", controller])
        assert json.loads(status.stdout)["models"][0]["troubles"]
        eventually(lambda: client.group(model, "stuck").leased != (2,))  # once its lease has run out
