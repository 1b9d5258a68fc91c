"""What the commands share: the options that say whom to ask, exit codes, and how errors are said."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from weightdepot.api.client import ControllerClient
from weightdepot.api.config import ClientSettings, configured
from weightdepot.store.errors import InvalidRequest, WaitTimeout, WeightDepotError

FAILED, MISUSED, TIMED_OUT = 1, 2, 3
ANSWER_TIMEOUT = 5.0  # seconds that a command gives the controller to answer

# Left out, each is that of the environment or of the settings file, see config.py.
ControllerUrl = Annotated[
    str | None,
    typer.Option(
        "--controller",
        metavar="URL",
        help="The controller to ask; several with commas. [env: WEIGHTDEPOT_CONTROLLER]",
    ),
]
Run = Annotated[str | None, typer.Option("--run", help="The run that is asked about. [env: WEIGHTDEPOT_RUN]")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", help="Who asks. In the environment it is seen by fewer. [env: WEIGHTDEPOT_TOKEN]"
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option("--ca", metavar="FILE", help="What https is checked against (PEM). [env: WEIGHTDEPOT_CA]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value instead of tables.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
VersionArgument = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="The version's number.")]


@contextmanager
def errors_said() -> Iterator[None]:
    """Our own errors as one message; whatever else is a bug and keeps its traceback."""
    try:
        yield
    except WeightDepotError as error:
        print(f"weightdepot: {error.message}", file=sys.stderr)
        if isinstance(error, InvalidRequest):
            raise typer.Exit(MISUSED) from None
        raise typer.Exit(TIMED_OUT if isinstance(error, WaitTimeout) else FAILED) from None


def client_of(
    controller: str | None, run: str | None, token: str | None = None, ca: Path | None = None
) -> ControllerClient:
    """The client that these options mean; what is None is that of the environment or the settings file."""
    options = {"controller": controller, "run": run, "token": token, "ca": ca}
    found = configured(ClientSettings, "client", options).settings
    return ControllerClient(found.controller, found.run, token=found.token, ca=found.ca)


@contextmanager
def asking(
    controller: str | None, run: str | None, token: str | None, ca: Path | None
) -> Iterator[ControllerClient]:
    """A client for one command, whose errors are said."""
    with errors_said(), client_of(controller, run, token, ca) as client:
        yield client


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
