"""`weightdepot import`: a checkpoint as a version, so that rollouts can start before the trainer does."""

from __future__ import annotations

import json
import signal
import threading
from typing import Annotated

import typer

from weightdepot.api.cli_common import AsJson, Ca, ControllerUrl, Run, Token, client_of, errors_said
from weightdepot.api.client import ControllerClient
from weightdepot.producers.checkpoint import checkpoint_weights, manifest_version
from weightdepot.producers.producer import Producer
from weightdepot.store.errors import InvalidRequest, VersionGone, WeightDepotError
from weightdepot.store.index.records import VersionState

LOOK = 1.0  # seconds between two looks whether the version is still wanted


def import_(
    source: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint's directory, or a URL as s3://BUCKET/FOLDER.")
    ],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to publish it as.")],
    *,
    version: Annotated[
        int | None, typer.Option(min=0, help="Its number; none: that which it was exported from, else 0.")
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Compare the files with the digests of an exported checkpoint.")
    ] = True,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint, and serve it from this process until a trainer's versions have replaced it.

    A trainer, of any number of ranks, takes the model over by joining it; its versions must be above this.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with errors_said(), client_of(controller, run, token, ca) as client:
        with checkpoint_weights(source, verify=verify) as weights:
            chosen = version if version is not None else manifest_version(source) or 0
            if not weights:
                raise InvalidRequest(f"{source} holds no tensors")
            producer = Producer(
                client.url,
                model=model,
                weights=weights,
                run=client.run,
                token=token,
                ca=str(ca) if ca else None,
                yields=True,
            )
            try:
                published = producer.publish(chosen, wait="ready")
            except BaseException:
                producer.close()
                raise
        with producer:
            if as_json:
                print(json.dumps({"model": model, "version": chosen, "nbytes": published.nbytes}), flush=True)
            else:
                print(
                    f"version {chosen} of {model} is ready ({published.nbytes / 1e9:.3f} GB, from {source}); "
                    f"it is served until a trainer's versions replace it, or Ctrl-C",
                    flush=True,
                )
            _serve(client, model, chosen, stop)


def _serve(client: ControllerClient, model: str, version: int, stop: threading.Event) -> None:
    """Returns when the version is not wanted any more, or this process is told to stop."""
    while not stop.wait(LOOK):
        try:
            state = client.version(model, version, timeout=LOOK).state
        except VersionGone:
            return
        except WeightDepotError:
            continue  # the controller is away: what is here may still be wanted
        if state in (VersionState.FREED, VersionState.ABORTED):
            return
