"""`weightdepot top` in a real terminal of 80 columns: what it shows is right, changes live, and survives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from weightdepot.api.client import ControllerClient
from weightdepot.api.top import chart

from ..system.fleet import publish, ranks, trainer
from ..system.harness import eventually
from .helpers import Trainer, join_group, serving, unique

pyte = pytest.importorskip("pyte")
COLUMNS, LINES = 80, 30


class Terminal:
    """A program in a terminal, and what is on its screen."""

    def __init__(self, *arguments: str) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightdepot.api", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs

    def lines(self) -> list[str]:
        """What is on the screen now."""
        while select.select([self._ours], [], [], 0.05)[0]:
            try:
                self._stream.feed(os.read(self._ours, 65536))
            except OSError:  # the other side has ended
                break
        return [line.rstrip() for line in self.screen.display]

    def text(self) -> str:
        return "\n".join(self.lines())

    def row(self, first: str) -> list[str]:
        found = [line.split() for line in self.lines() if line.split()[:1] == [first]]
        return found[0] if found else []

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def ended(self) -> int:
        """Its exit status; what it says meanwhile is read."""
        eventually(lambda: self.process.poll() is not None or not self.lines())
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for descriptor in (self._ours, self.theirs):
            os.close(descriptor)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


def test_it_shows_what_happens_while_it_happens(controller: str) -> None:
    model = unique("top")
    with (
        trainer(controller, model) as producer,
        ranks(controller, model, 2) as [one, two],
        terminal("top", model, "--controller", controller, "--interval", "0.1") as shown,
    ):
        for version in (1, 2, 3):
            publish(producer, version)
            eventually(lambda version=version: shown.row(str(version))[:2] == [str(version), "ready"])  # type: ignore[misc]
            with ControllerClient(controller) as client:
                assert client.group(model, "rollout").lag >= 1
            one_round(one, two)
            whole = ["rollout", "whole", str(version), "0", "2/2"]
            eventually(lambda whole=whole: shown.row("rollout")[:5] == whole)  # type: ignore[misc]
        assert re.search(r"\d+ ms, [\d.]+ [kMG]?B/s", " ".join(shown.row("rollout")))
        assert re.search(r"published at [\d.]+ [kMG]?B/s +[▁▂▃▄▅▆▇█]{3}", shown.text())
        assert "live" in shown.lines()[0] + shown.lines()[1]
        shown.press("q")
        assert shown.ended() == 0
        assert termios.tcgetattr(shown.theirs) == shown.before, "the terminal is as it was"


def one_round(*consumers: object) -> None:
    from ..system.harness import together

    together(*(c.update for c in consumers))  # type: ignore[attr-defined]


def test_a_controller_that_goes_away_is_said_and_found_again(redis_url: str) -> None:
    run = unique("run")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.ExitStack())
        url, process = first.enter_context(serving("--redis-url", redis_url, "--run", run))
        with ControllerClient(url, run) as client:
            Trainer(client, "policy").join_all().publish(1)
            join_group(client, "policy", "stuck", 2)
        shown = stack.enter_context(terminal("top", "--controller", url, "--run", run, "--interval", "0.2"))
        eventually(lambda: shown.row("1")[:2] == ["1", "ready"])
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        eventually(lambda: "what is shown is old" in " ".join(shown.lines()))
        assert shown.row("1")[:2] == ["1", "ready"], "the last picture stays"
        port = int(url.rsplit(":", 1)[1])
        stack.enter_context(serving("--redis-url", redis_url, "--run", run, port=port))
        eventually(lambda: "what is shown is old" not in " ".join(shown.lines()))
        os.killpg(shown.process.pid, signal.SIGINT)
        assert shown.ended() == 0


def test_through_a_pipe_it_is_one_picture(controller: str, client: ControllerClient, model: str) -> None:
    Trainer(client, model).join_all().publish(7)
    join_group(client, model, "rollout")
    done = subprocess.run(
        [sys.executable, "-m", "weightdepot.api", "top", model, "--controller", controller],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert re.search(r"^7 +ready", done.stdout, re.MULTILINE)
    assert re.search(r"^rollout +empty", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["top", "--controller", "http://127.0.0.1:1"], "127.0.0.1:1"),
        (["top", "nobody-has-this", "--once"], "nobody-has-this"),
        (["top", "--interval", "0"], "interval"),
    ],
)
def test_what_is_wrong_from_the_start_ends_it(controller: str, arguments: list[str], said: str) -> None:
    if "--controller" not in arguments:
        arguments = [*arguments, "--controller", controller]
    with terminal(*arguments) as shown:
        assert shown.ended() != 0
        assert said in shown.text()


def test_a_chart_is_as_high_as_its_values() -> None:
    assert chart([]) == chart([0.0]) == ""
    assert chart([8, 4, 0.1]) == "█▅▁"
