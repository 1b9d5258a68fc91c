"""Every n-th version as a checkpoint, as they come: `STEP/`, `STEP/`, ... under one place."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from weightdepot.api.client import ControllerClient
from weightdepot.consumers.files.export import Exported, export
from weightdepot.consumers.files.places import place_for
from weightdepot.consumers.files.shards import LARGEST_FILE
from weightdepot.store.errors import (
    ControllerUnavailable,
    IndexUnavailable,
    InvalidRequest,
    LeaseLost,
    SourceLost,
    UnknownModel,
    VersionGone,
    WaitTimeout,
)
from weightdepot.store.files import MANIFEST, filesystem, is_remote, local_path
from weightdepot.store.index.records import VersionState

log = logging.getLogger("weightdepot.export")

POLL = 30.0  # seconds of one wait for the next version
PAUSE = 1.0  # seconds before a failed export is tried again, if its version is still there


def name_of(version: int) -> str:
    """The folder of a version; sorts as versions do."""
    return f"{version:08d}"


def follow(
    client: ControllerClient,
    model: str,
    target: str,
    *,
    every: int,
    keep: int | None = None,
    description: Path | None = None,
    largest: int = LARGEST_FILE,
    on_exported: Callable[[Exported], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Export each version whose number is a multiple of `every`, until `stop` says so. Of those that are
    there, the newest `keep` stay.

    A version that is gone before it is read, or a controller that is away, is logged, and the next is waited
    for. Raises ExportFailed where the place takes no more.
    """
    if every < 1 or (keep is not None and keep < 1):
        raise InvalidRequest(f"every {every}, keep {keep}: whole numbers from 1 are wanted")
    done = max(existing(target), default=-1)
    while not stop():
        version = _next(client, model, done, every)
        if version is None:
            continue
        try:
            found = export(
                client,
                model,
                place_for(f"{target.rstrip('/')}/{name_of(version)}"),
                version=version,
                description=description,
                largest=largest,
            )
        except (SourceLost, LeaseLost, WaitTimeout, ControllerUnavailable, IndexUnavailable) as error:
            log.warning("version %d of %s was not exported, it is tried again: %s", version, model, error)
            time.sleep(PAUSE)
            continue
        except VersionGone as error:
            log.warning("version %d of %s was not exported: %s", version, model, error)
        else:
            on_exported(found)
            for old in sorted(existing(target))[: -keep if keep else 0]:
                _remove(target, old)
        done = version


def _next(client: ControllerClient, model: str, done: int, every: int) -> int | None:
    """The oldest version above `done` that is due and ready; None when there was none for a while."""
    seen = done
    try:
        while True:
            seen = client.latest(model, min_version=seen + 1, timeout=POLL).version
            found = client.versions(model, timeout=POLL)
            due = [v.version for v in found if v.state is VersionState.READY and v.version % every == 0]
            if any(v > done for v in due):
                return min(v for v in due if v > done)
    except (WaitTimeout, UnknownModel, ControllerUnavailable, IndexUnavailable) as error:
        if not isinstance(error, WaitTimeout):
            log.warning("no news of %s: %s", model, error)
            time.sleep(PAUSE)
        return None


def existing(target: str) -> Iterator[int]:
    """Versions of the whole checkpoints under a place."""
    if is_remote(target):
        fs, root = filesystem(target)
        if not fs.exists(root):
            return
        for path in fs.ls(root, detail=False):
            name = str(path).rstrip("/").rsplit("/", 1)[-1]
            if name.isdigit() and fs.exists(f"{path}/{MANIFEST}"):
                yield int(name)
        return
    folder = local_path(target)
    if folder.is_dir():
        for inner in folder.iterdir():
            if inner.name.isdigit() and (inner / MANIFEST).is_file():
                yield int(inner.name)


def _remove(target: str, version: int) -> None:
    """The manifest first: what has none is no checkpoint."""
    if is_remote(target):
        fs, root = filesystem(target)
        fs.rm(f"{root}/{name_of(version)}/{MANIFEST}")
        fs.rm(f"{root}/{name_of(version)}", recursive=True)
        return
    folder = local_path(target) / name_of(version)
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder)
