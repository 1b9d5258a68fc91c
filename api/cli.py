"""The command line. Exit codes: 0 well, 1 an error (said on stderr), 2 wrong use, 3 the time was up."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from weightdepot.api.client import ControllerClient
from weightdepot.api.release import release
from weightdepot.api.report import ModelReport, report_on
from weightdepot.api.settings import DEFAULT_HOST, DEFAULT_PORT, DEFAULT_RUN, DEFAULT_URL, Settings
from weightdepot.api.tables import show_status, show_versions
from weightdepot.store.errors import InvalidRequest, UnknownModel, WaitTimeout, WeightDepotError

FAILED, MISUSED, TIMED_OUT = 1, 2, 3
ANSWER_TIMEOUT = 5.0  # seconds that a command gives the controller to answer

app = typer.Typer(
    name="weightdepot",
    help="Versioned weights from trainers to rollout workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class LogLevel(str, enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ControllerUrl = Annotated[
    str,
    typer.Option(
        "--controller", envvar="WEIGHTDEPOT_CONTROLLER", metavar="URL", help="The controller to ask."
    ),
]
Run = Annotated[str, typer.Option("--run", envvar="WEIGHTDEPOT_RUN", help="The run that is asked about.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value instead of tables.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]


def main() -> None:
    """The entry point `weightdepot`."""
    app()


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


def _print_release(wanted: bool) -> None:
    if wanted:
        print(f"weightdepot {release()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_release, is_eager=True, help="Print the release.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")
    ] = DEFAULT_PORT,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="WEIGHTDEPOT_REDIS_URL",
            metavar="URL",
            help="The Redis to use; none: one is started and owned.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the embedded index keeps its data; none: it starts empty.")
    ] = None,
    run: Annotated[str, typer.Option(envvar="WEIGHTDEPOT_RUN", help="The run that is served.")] = DEFAULT_RUN,
    log_level: Annotated[LogLevel, typer.Option(help="How much is said on stderr.")] = LogLevel.INFO,
) -> None:
    """Run a controller until it is told to stop (SIGTERM, Ctrl-C)."""
    # imported here: the other commands start faster without the server
    from weightdepot.api import server

    with errors_said():
        settings = Settings(
            host=host, port=port, redis_url=redis_url, data_dir=data_dir, run=run, log_level=log_level.value
        )
        server.serve(settings, announce=lambda url: print(f"serving {url}", flush=True))


@app.command()
def status(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Only this one.")] = None,
    controller: ControllerUrl = DEFAULT_URL,
    run: Run = DEFAULT_RUN,
    as_json: AsJson = False,
) -> None:
    """Who publishes, which versions there are, who holds which, and what is stuck."""
    with errors_said(), ControllerClient(controller, run) as client:
        names = [model] if model is not None else client.models(timeout=ANSWER_TIMEOUT)
        reports = []
        for name in names:
            try:
                reports.append(_report(client, name))
            except UnknownModel:  # forgotten since the names were listed
                if model is not None:
                    raise
        if as_json:
            _print_json({"controller": client.url, "run": run, "models": [_plain(r) for r in reports]})
        else:
            show_status(Console(), client.url, reports)


@app.command()
def versions(
    model: ModelArgument,
    controller: ControllerUrl = DEFAULT_URL,
    run: Run = DEFAULT_RUN,
    as_json: AsJson = False,
) -> None:
    """The versions of a model that still matter, and the last few that are gone."""
    with errors_said(), ControllerClient(controller, run) as client:
        found = client.versions(model, timeout=ANSWER_TIMEOUT)
        if as_json:
            _print_json({"model": model, "versions": msgspec.to_builtins(found)})
        else:
            show_versions(Console(), model, found)


@app.command()
def wait(
    model: ModelArgument,
    *,
    min_version: Annotated[int, typer.Option(min=0, help="No older version will do.")] = 0,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds; then the exit code is 3.")] = 600.0,
    controller: ControllerUrl = DEFAULT_URL,
    run: Run = DEFAULT_RUN,
    as_json: AsJson = False,
) -> None:
    """Wait until a version is ready; print its number."""
    with errors_said(), ControllerClient(controller, run) as client:
        client.ready(timeout=min(timeout, ANSWER_TIMEOUT))  # a controller that is not there is said at once
        if sys.stderr.isatty():
            print(f"Waiting for version {min_version} or newer of {model!r}...", file=sys.stderr)
        found = client.latest(model, min_version=min_version, timeout=timeout)
        if as_json:
            _print_json(msgspec.to_builtins(found))
        else:
            print(found.version)


def _report(client: ControllerClient, name: str) -> ModelReport:
    return report_on(client.model(name, timeout=ANSWER_TIMEOUT), client.groups(name, timeout=ANSWER_TIMEOUT))


def _plain(report: ModelReport) -> dict[str, Any]:
    groups = []
    for group in report.groups:
        plain = msgspec.to_builtins(group)
        plain["lag"] = report.lag(group.version)
        for member in plain["members"]:
            member["lag"] = report.lag(member["version"])
        groups.append(plain)
    model: dict[str, Any] = msgspec.to_builtins(report.model)
    return {**model, "groups": groups, "troubles": list(report.troubles)}


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
