"""Commands about this machine and its settings: `weightdepot config` and `weightdepot doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightdepot.api.cli import FAILED, errors_said
from weightdepot.api.config import ClientSettings, Configured, configured, unknown_variables, variable
from weightdepot.api.doctor import State, examine
from weightdepot.api.settings import Settings

File = Annotated[
    Path | None,
    typer.Option("--config", envvar="WEIGHTDEPOT_CONFIG", metavar="FILE", help="A settings file (TOML)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value instead of a table.")]
STYLES = {State.GOOD: "green", State.NOTE: "yellow", State.BAD: "bold red"}


def config(*, file: File = None, as_json: AsJson = False) -> None:
    """What is set, and where each value comes from: a file, the environment, or the default."""
    with errors_said():
        found: dict[str, Configured[Any]] = {
            "controller": configured(Settings, "controller", file=file),
            "client": configured(ClientSettings, "client", file=file),
        }
    if as_json:
        print(
            json.dumps(
                {
                    section: {key: {"value": value, "source": source} for key, value, source in one.shown()}
                    for section, one in found.items()
                },
                indent=2,
            )
        )
        return
    console = Console()
    for section, one in found.items():
        table = Table(title=escape(f"[{section}]"), title_justify="left", box=None, pad_edge=False)
        for heading in ("key", "value", "from", "variable"):
            table.add_column(heading, overflow="fold")
        for key, value, source in one.shown():
            style = "dim" if source == "default" else ""
            table.add_row(key, escape(value), escape(source), variable(key), style=style)
        console.print(table, "")
    for text in unknown_variables():
        console.print(f"[yellow]sets nothing:[/] {escape(text)}")


def doctor(*, file: File = None, as_json: AsJson = False) -> None:
    """Look at this machine: libraries, memory, shared memory, RDMA, ports, clock, index, controller.

    The exit code is 1 where something will not work.
    """
    with errors_said():
        settings = configured(Settings, "controller", file=file).settings
        client = configured(ClientSettings, "client", file=file).settings
    findings = list(examine(settings, client))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("", "what", "found", "what to do"):
            table.add_column(heading, overflow="fold")
        for finding in findings:
            mark = f"[{STYLES[finding.state]}]{finding.state.value}[/]"
            table.add_row(mark, *map(escape, (finding.what, finding.found, finding.advice)))
        Console().print(table)
    if any(finding.state is State.BAD for finding in findings):
        raise typer.Exit(FAILED)
