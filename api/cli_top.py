"""`weightdepot top`: what `status` says, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from weightdepot.api import cli_common
from weightdepot.api.cli_common import Ca, ControllerUrl, Run, Token, asking
from weightdepot.api.cli_views import reports_of
from weightdepot.api.client import ControllerClient
from weightdepot.api.report import ModelReport
from weightdepot.api.top import Away, History, frame
from weightdepot.store.errors import (
    ControllerUnavailable,
    IndexUnavailable,
    WaitTimeout,
    WeightDepotError,
)

PATIENCE = 2.0  # seconds in which the controller must answer while it is watched


def top(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Only this one.")] = None,
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="One picture, and end; so too where the output is no terminal.")
    ] = False,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Groups, versions, throughput and what is stuck, live in the terminal. Ends with q."""
    console = Console()
    with asking(controller, run, token, ca) as client:
        # what is wrong from the start is said, and ends it
        reports = reports_of(client, model, cli_common.ANSWER_TIMEOUT)
        watching = _Watching(client, model, console)
        watching.see(reports)
        if once or not console.is_terminal:
            console.print(watching.frame())
            return
        with (
            _keys() as pressed,
            Live(console=console, screen=True, auto_refresh=False) as live,
            contextlib.suppress(KeyboardInterrupt),
        ):
            while True:
                live.update(watching.frame(), refresh=True)
                if pressed(interval) in ("q", "Q"):
                    break
                watching.look()


class _Watching:
    def __init__(self, client: ControllerClient, model: str | None, console: Console) -> None:
        self._client, self._model = client, model
        self._bars = console.encoding.lower().startswith("utf")
        self._history = History()
        self._reports: list[ModelReport] = []
        self._seen = time.monotonic()
        self._reason = ""

    def see(self, reports: list[ModelReport]) -> None:
        self._reports, self._seen, self._reason = reports, time.monotonic(), ""
        self._history.note(reports)

    def look(self) -> None:
        """Where nobody answers, the last picture stays, and says so. Other errors end it."""
        try:
            self.see(reports_of(self._client, self._model, PATIENCE))
        except (ControllerUnavailable, IndexUnavailable, WaitTimeout) as error:
            self._reason = _first_line(error)

    def frame(self) -> RenderableType:
        away = Away(time.monotonic() - self._seen, self._reason) if self._reason else None
        return frame(
            self._client.url, self._client.run, self._reports, self._history, away=away, bars=self._bars
        )


def _first_line(error: WeightDepotError) -> str:
    return error.message.splitlines()[0]


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key, and gives it, or "". Without a keyboard it waits."""
    if not sys.stdin.isatty():

        def nothing(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield nothing
        return
    import termios  # not on every platform
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        key = os.read(descriptor, 1).decode("latin-1")
        if not key:  # the terminal is gone
            raise KeyboardInterrupt
        return key

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
