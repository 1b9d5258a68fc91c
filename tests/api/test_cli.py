"""The command line: what it prints, where errors go, and its exit codes."""

from __future__ import annotations

import json
import threading
import time

import pytest
from typer.testing import CliRunner, Result

from weightdepot.api.cli import app
from weightdepot.api.client import ControllerClient

from .helpers import PROCESS, Trainer, join_group


def command(*arguments: str, controller: str | None = None) -> Result:
    """Run in this process, 120 columns wide; the controller is named as a user's shell would."""
    env = {"COLUMNS": "120", "WEIGHTDEPOT_CONTROLLER": controller or "http://127.0.0.1:1"}
    return CliRunner().invoke(app, list(arguments), env=env)


def test_status_shows_who_holds_what_and_what_is_stuck(
    controller: str, client: ControllerClient, trainer: Trainer, model: str
) -> None:
    trainer.publish(1)
    (session,) = join_group(client, model, "rollout")
    round_ = client.begin_round(model, "rollout", rank=0, session=session, timeout=5)
    client.finish_round(model, "rollout", rank=0, session=session, round=round_.round, timeout=5)
    trainer.publish(3)
    trainer.open(4, rank=0)
    shown = command("status", model, controller=controller)
    assert shown.exit_code == 0
    assert model in shown.stdout
    assert "latest 3; async; 2 of 2 producers alive" in shown.stdout
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("rollout")]
    assert line.split()[:5] == ["rollout", "whole", "1", "1", "1/1"]
    assert max(map(len, shown.stdout.splitlines())) <= 100
    ranks = command("status", model, "--ranks", controller=controller).stdout
    assert f"{PROCESS.pid} at {PROCESS.host}" in ranks
    assert "! version 4 is open: ranks 0, 1 not sealed yet" in shown.stdout
    plain = json.loads(command("status", model, "--json", controller=controller).stdout)
    (found,) = plain["models"]
    assert found["groups"][0]["lag"] == 1, "one version was published since"
    assert found["troubles"] == ["version 4 is open: ranks 0, 1 not sealed yet"]
    everything = json.loads(command("status", "--json", controller=controller).stdout)
    assert model in {m["name"] for m in everything["models"]}


def test_versions_are_listed_newest_first(controller: str, trainer: Trainer, model: str) -> None:
    trainer.publish(1)
    trainer.publish(2)
    shown = command("versions", model, controller=controller)
    assert [line.split()[:2] for line in shown.stdout.splitlines()[1:3]] == [["2", "ready"], ["1", "ready"]]
    plain = json.loads(command("versions", model, "--json", controller=controller).stdout)
    assert {v["version"]: v["state"] for v in plain["versions"]} == {1: "ready", 2: "ready"}


def test_wait_prints_the_version_that_it_waited_for(controller: str, trainer: Trainer, model: str) -> None:
    def publish() -> None:
        time.sleep(0.3)
        trainer.publish(5)

    thread = threading.Thread(target=publish)
    thread.start()
    waited = command("wait", model, "--min-version", "5", "--timeout", "10", controller=controller)
    thread.join(5)
    assert (waited.exit_code, waited.stdout) == (0, "5\n")
    again = command("wait", model, "--json", controller=controller)
    assert json.loads(again.stdout)["version"] == 5


def test_a_wait_in_vain_exits_with_3_and_says_what_there_is(
    controller: str, trainer: Trainer, model: str
) -> None:
    trainer.publish(1)
    waited = command("wait", model, "--min-version", "2", "--timeout", "0.1", controller=controller)
    assert waited.exit_code == 3
    assert "newest is 1" in waited.stderr
    assert not waited.stdout


def test_an_unknown_model_exits_with_1_and_one_message(controller: str) -> None:
    for name in ("status", "versions"):
        shown = command(name, "nothing-of-the-kind", controller=controller)
        assert shown.exit_code == 1
        assert len(shown.stderr.splitlines()) == 1
        assert "nothing-of-the-kind" in shown.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["versions"], ["wait", "m", "--timeout", "-1"], ["status", "a/b"], ["nonsense"],
        ["serve", "--port", "70000"], ["serve", "--run", "a b"], ["serve", "--log-level", "loud"],
        ["status", "--controller", "nonsense"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_use_exits_with_2(arguments: list[str]) -> None:
    shown = command(*arguments)
    assert shown.exit_code == 2
    assert shown.stderr


def test_a_controller_that_is_not_there_is_said_with_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightdepot.api.cli_common.ANSWER_TIMEOUT", 0.2)
    shown = command("status", "--controller", "http://127.0.0.1:9")
    assert shown.exit_code == 1
    assert shown.stderr.startswith("weightdepot: no weightdepot controller answers at http://127.0.0.1:9")
    assert "weightdepot serve" in shown.stderr


def test_help_and_release() -> None:
    assert command("--version").stdout.startswith("weightdepot ")
    for name in ("serve", "status", "versions", "wait"):
        assert command(name, "--help").exit_code == 0
