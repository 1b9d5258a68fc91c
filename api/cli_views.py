"""Commands that look: status, versions, wait, converged, events."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from weightdepot.api import cli_common
from weightdepot.api.cli_common import (
    FAILED,
    AsJson,
    Ca,
    ControllerUrl,
    ModelArgument,
    Run,
    Token,
    asking,
    print_json,
)
from weightdepot.api.client import ControllerClient
from weightdepot.api.report import ModelReport, report_on
from weightdepot.api.tables import show_convergence, show_status, show_versions
from weightdepot.store.errors import UnknownModel


def status(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Only this one.")] = None,
    *,
    ranks: Annotated[bool, typer.Option("--ranks", help="Each rank of each group too.")] = False,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Who publishes, which versions there are, who holds which, who lags, and what is stuck."""
    with asking(controller, run, token, ca) as client:
        reports = reports_of(client, model, cli_common.ANSWER_TIMEOUT)
        if as_json:
            shown = [_plain(report) for report in reports]
            print_json({"controller": client.url, "run": client.run, "models": shown})
        else:
            show_status(Console(), client.url, reports, ranks=ranks)


def versions(
    model: ModelArgument,
    *,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """The versions of a model that still matter, and the last few that are gone."""
    with asking(controller, run, token, ca) as client:
        found = client.versions(model, timeout=cli_common.ANSWER_TIMEOUT)
        if as_json:
            print_json({"model": model, "versions": msgspec.to_builtins(found)})
        else:
            show_versions(Console(), model, found)


def wait(
    model: ModelArgument,
    *,
    min_version: Annotated[int, typer.Option(min=0, help="No older version will do.")] = 0,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds; then the exit code is 3.")] = 600.0,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a version is ready; print its number."""
    with asking(controller, run, token, ca) as client:
        _find(client, timeout)
        if sys.stderr.isatty():
            print(f"Waiting for version {min_version} or newer of {model!r}...", file=sys.stderr)
        found = client.latest(model, min_version=min_version, timeout=timeout)
        if as_json:
            print_json(msgspec.to_builtins(found))
        else:
            print(found.version)


def converged(
    model: ModelArgument,
    *,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for it.")] = 0.0,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Whether every live group serves the current version: the exit code is 1 where not."""
    with asking(controller, run, token, ca) as client:
        _find(client, max(wait, cli_common.ANSWER_TIMEOUT))
        seen = client.convergence(model, timeout=wait)
        if as_json:
            print_json(msgspec.to_builtins(seen))
        else:
            show_convergence(Console(), seen)
        if not seen.converged:
            raise typer.Exit(FAILED)


def events(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Only of this one.")] = None,
    *,
    seconds: Annotated[float | None, typer.Option(min=0, help="End after so many; else Ctrl-C.")] = None,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """What changes, a line for each change, as it happens. With --json each line is a JSON value."""
    with asking(controller, run, token, ca) as client:
        _find(client, cli_common.ANSWER_TIMEOUT)
        try:
            for event in client.events(model, timeout=seconds):
                plain = event._asdict()
                if as_json:
                    print(msgspec.json.encode(plain).decode(), flush=True)
                elif event.model:  # `subscribed` says nothing to a person
                    what = "" if event.version is None else f" {event.version}"
                    who = f" ({event.group})" if event.group else ""
                    print(f"{event.model}: {event.kind}{what}{who}", flush=True)
        except KeyboardInterrupt:
            return


def _find(client: ControllerClient, timeout: float) -> None:
    """A controller that is not there is said at once, however long the command would wait for the rest."""
    client.ready(timeout=min(timeout, cli_common.ANSWER_TIMEOUT))


def reports_of(client: ControllerClient, model: str | None, timeout: float) -> list[ModelReport]:
    """Of one model, or of all. `timeout`: seconds for each answer."""
    names = [model] if model is not None else client.models(timeout=timeout)
    reports = []
    for name in names:
        try:
            reports.append(
                report_on(client.model(name, timeout=timeout), client.groups(name, timeout=timeout))
            )
        except UnknownModel:  # forgotten since the names were listed
            if model is not None:
                raise
    return reports


def _plain(report: ModelReport) -> dict[str, Any]:
    model: dict[str, Any] = msgspec.to_builtins(report.model)
    return {**model, "groups": msgspec.to_builtins(report.groups), "troubles": list(report.troubles)}
