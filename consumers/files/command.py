"""`weightdepot export`: a version of the store as a standard checkpoint."""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from weightdepot.api.cli_common import AsJson, Ca, ControllerUrl, Run, Token, client_of, errors_said
from weightdepot.consumers.files.export import Exported
from weightdepot.consumers.files.export import export as export_version
from weightdepot.consumers.files.follow import follow
from weightdepot.consumers.files.places import place_for
from weightdepot.consumers.files.shards import LARGEST_FILE
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.progress import Progress as Step

GB = 10**9


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")],
    target: Annotated[
        str, typer.Argument(metavar="DIR", help="A directory that is made, or a URL as s3://BUCKET/FOLDER.")
    ],
    *,
    version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="A version's number, or a tag; none: the newest.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Go on: each version that is a multiple of this, in a folder of its own."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="With --every: only the newest so many stay.")
    ] = None,
    config_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A checkpoint whose configuration and tokenizer are copied along."),
    ] = None,
    file_size: Annotated[
        float, typer.Option(min=0.000001, metavar="GB", help="The largest file.")
    ] = LARGEST_FILE / GB,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds for one version.")] = 3600.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a Hugging Face checkpoint: sharded safetensors, their index, and a manifest.

    It appears whole under its name, or not at all. One that was killed goes on where it was when it is
    called again.
    """
    largest = int(file_size * GB)
    with errors_said(), client_of(controller, run, token, ca) as client:
        if every is not None:
            if version is not None:
                raise InvalidRequest("--every goes on with each new version: give it or --version")
            stop = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            follow(
                client, model, target, every=every, keep=keep, description=config_from, largest=largest,
                on_exported=lambda found: _say(found, as_json), stop=stop.is_set,
            )  # fmt: skip
            return
        if keep is not None:
            raise InvalidRequest("--keep goes with --every")
        exact = int(version) if version is not None and version.isdecimal() else None
        with _Bar(as_json) as bar:
            found = export_version(
                client, model, place_for(target, overwrite=overwrite), version=exact,
                tag=version if version is not None and exact is None else "", description=config_from,
                largest=largest, timeout=timeout, on_progress=bar,
            )  # fmt: skip
        _say(found, as_json)


def _say(found: Exported, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(found)), flush=True)
        return
    again = f", {found.resumed} of them from an earlier attempt" if found.resumed else ""
    print(
        f"version {found.version} of {found.model}: {found.nbytes / GB:.3f} GB in {found.files} "
        f"file{'s' if found.files > 1 else ''}{again}, {found.seconds:.1f} s -> {found.target}",
        flush=True,
    )


class _Bar:
    """Progress on a terminal; nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._progress.add_task("reading", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, step: Step) -> None:
        self._progress.update(self._task, completed=step.done, total=step.total)
