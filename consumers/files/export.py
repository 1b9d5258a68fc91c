"""One version of the store as a checkpoint: each file is mapped, and what it holds is pulled straight in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, new_session
from weightdepot.consumers.files.places import Identity, Place
from weightdepot.consumers.files.shards import LARGEST_FILE, ShardFile, index_of, shard_files
from weightdepot.consumers.pull import pull
from weightdepot.store.checkpoint import INDEX
from weightdepot.store.dtypes import torch_dtype
from weightdepot.store.errors import InvalidRequest, LeaseLost, WaitTimeout
from weightdepot.store.hosts import this_process
from weightdepot.store.index.records import Round
from weightdepot.store.progress import OnProgress, ignore
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Mapped, layout_of

GROUP = "export-"  # how the consumer groups of exports begin: one for each, gone when it ends
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Exported:
    """What one export did."""

    model: str
    version: int
    target: str
    files: int
    nbytes: int
    resumed: int
    """Files that an earlier attempt had written."""
    seconds: float


def export(
    client: ControllerClient,
    model: str,
    place: Place,
    *,
    version: int | None = None,
    tag: str = "",
    description: Path | None = None,
    largest: int = LARGEST_FILE,
    timeouts: Timeouts | None = None,
    timeout: float = 3600.0,
    on_progress: OnProgress = ignore,
) -> Exported:
    """Write a version (None: the newest; or that of a tag) as a checkpoint. Its lease is held all the while.

    description: a checkpoint's directory whose other files (configuration, tokenizer) are copied along.
    largest: bytes of one file.

    Raises VersionGone, WaitTimeout, SourceLost, IntegrityError, ExportFailed. Then nothing is under the
    final name, and the next attempt at the same version goes on where this one was.
    """
    timeouts = timeouts or Timeouts()
    begun, deadline = time.monotonic(), time.monotonic() + timeout
    small = _described(description)
    with _round(client, model, version, tag, timeouts, deadline) as (turn, membership):
        attempt = client.version(model, turn.version, timeout=timeouts.call).attempt
        tensors = client.tiling(model, turn.tiling, timeout=timeouts.update).tensors
        files = shard_files(tensors, largest)
        identity = Identity(model, turn.version, attempt)
        done = place.begin(identity, {file.name: file.nbytes for file in files})
        with contextlib.closing(Transports("auto")) as transports:
            for file in files:
                if file.name in done:
                    continue
                with place.file(file) as path:
                    _fill(client, model, turn, file, path, transports, timeouts, deadline, on_progress)
                    if membership.lost(turn.group, turn.round):
                        raise LeaseLost(
                            f"the lease on version {turn.version} of {model!r} ran out during the export: "
                            f"{file.name} is discarded; export again",
                            model=model,
                            version=turn.version,
                        )
        if len(files) > 1:
            small[INDEX] = index_of(files)
        place.finish(small)
    nbytes = sum(file.nbytes for file in files)
    seconds = time.monotonic() - begun
    return Exported(model, turn.version, place.where, len(files), nbytes, len(done), seconds)


@contextlib.contextmanager
def _round(
    client: ControllerClient, model: str, version: int | None, tag: str, timeouts: Timeouts, deadline: float
) -> Iterator[tuple[Round, Membership]]:
    """A lease on the version, as a consumer group of one rank that has no layout, so that nothing is cut for
    it. It is gone with the group."""
    session = new_session()
    group = GROUP + session[:12]
    client.join_consumer(
        model, group, rank=0, world_size=1, session=session, process=this_process(), ttl=timeouts.member,
        observer=True, timeout=timeouts.join,
    )  # fmt: skip
    with contextlib.closing(Membership(client, model, session, timeouts)) as membership:
        turn = client.begin_round(
            model, group, rank=0, session=session, version=version, tag=tag, lease_ttl=timeouts.lease,
            timeout=min(timeouts.update, max(deadline - time.monotonic(), 0.0)),
        )  # fmt: skip
        membership.watch(group, turn.round)
        yield turn, membership


def _fill(
    client: ControllerClient,
    model: str,
    turn: Round,
    file: ShardFile,
    path: Path,
    transports: Transports,
    timeouts: Timeouts,
    deadline: float,
    on_progress: OnProgress,
) -> None:
    """Pull what belongs into this file, into the file."""
    with path.open("r+b") as opened:
        opened.write(file.header)
    memory = torch.from_file(str(path), shared=True, size=file.nbytes, dtype=torch.uint8)
    tensors = {
        placed.spec.name: memory[placed.start : placed.start + placed.nbytes]
        .view(torch_dtype(placed.spec.dtype))
        .view(placed.spec.shape)
        for placed in file.tensors
    }
    layout = layout_of(tensors)
    client.put_layout(layout, timeout=timeouts.join)
    plan = client.plan(model, turn.tiling, layout.digest, timeout=timeouts.update)
    left = deadline - time.monotonic()
    if left <= 0:
        raise WaitTimeout(
            f"no time is left to export version {turn.version} of {model!r}; the next attempt goes on with "
            f"{file.name}",
            model=model,
            version=turn.version,
        )
    digests = client.digests(model, turn.version, plan.sources, timeout=timeouts.update)
    pull(
        turn=turn,
        plan=plan,
        target=Mapped(layout, lambda: tensors),
        digests=digests,
        transports=transports,
        deadline=deadline,
        model=model,
        on_progress=on_progress,
    )


def _described(folder: Path | None) -> dict[str, bytes]:
    """The files of a checkpoint's directory that are not weights. Raises InvalidRequest."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise InvalidRequest(f"there is no directory {folder}, whose configuration should be copied")
    found: Mapping[str, bytes] = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and path.name != INDEX
        and not path.name.startswith(".")
    }  # fmt: skip
    return dict(found)
