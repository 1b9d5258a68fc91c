"""The command line. Exit codes: 0 well, 1 an error (said on stderr), 2 wrong use, 3 the time was up."""

from __future__ import annotations

from typing import Annotated

import typer

from weightdepot.api import cli_operations, cli_serve, cli_top, cli_views
from weightdepot.api.cli_common import FAILED, AsJson, Ca, ControllerUrl, Run, Token, client_of, errors_said
from weightdepot.api.release import release as installed_release

__all__ = [
    "FAILED",
    "AsJson",
    "Ca",
    "ControllerUrl",
    "Run",
    "Token",
    "app",
    "client_of",
    "errors_said",
    "main",
]

app = typer.Typer(
    name="weightdepot",
    help="Versioned weights from trainers to rollout workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point `weightdepot`."""
    app()


def _print_release(wanted: bool) -> None:
    if wanted:
        print(f"weightdepot {installed_release()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_release, is_eager=True, help="Print the release.")
    ] = False,
) -> None:
    pass


for command in (
    cli_serve.serve,
    cli_serve.token,
    cli_views.status,
    cli_top.top,
    cli_views.versions,
    cli_views.wait,
    cli_views.converged,
    cli_views.events,
    cli_operations.policy,
    cli_operations.hold,
    cli_operations.release,
    cli_operations.pin,
    cli_operations.unpin,
    cli_operations.tag,
    cli_operations.untag,
):
    app.command()(command)
