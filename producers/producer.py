"""Publishing: one rank's part of each version, packed into a slot of shared memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
from typing_extensions import Self

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, check_rank, forgotten, new_session, take_rank
from weightdepot.producers.sources import weights_of
from weightdepot.store.digests import combine, digest_tiles
from weightdepot.store.errors import (
    InvalidRequest,
    PublishAborted,
    UnknownModel,
    WaitTimeout,
    WeightDepotError,
)
from weightdepot.store.hosts import this_process
from weightdepot.store.index.records import Grant, Part, VersionState
from weightdepot.store.layout import Layout
from weightdepot.store.moving import check_buffers, pack
from weightdepot.store.planning import Copies, make_packing
from weightdepot.store.progress import OnProgress, Phase, Progress, ignore
from weightdepot.store.segments import Segment, remove_orphans
from weightdepot.store.tiling import SourceTiling
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Weights, layout_of, local_buffers

ABANDONED = 3600.0  # seconds; memory of dead processes that no successor of theirs has claimed since


@dataclass(frozen=True)
class Published:
    """What one `publish` did. Times in seconds, sizes in bytes."""

    version: int
    nbytes: int
    """This rank's part."""
    wait: float
    """For the controller, the other ranks and a free slot."""
    pack: float
    """Copying the weights into the slot; the trainer stands still for `wait` and `pack`."""
    digest: float
    seal: float

    @property
    def stall(self) -> float:
        """How long the call took in all."""
        return self.wait + self.pack + self.digest + self.seal


@dataclass(frozen=True)
class _Packing:
    source: SourceTiling
    copies: Copies


class Producer:
    """One trainer rank. All ranks of one trainer publish the same versions, each its own shards.

    controller: its URL. model: the name under which versions are published.
    weights: an `nn.Module` (plain, or sharded by FSDP1, FSDP2 or ZeRO-3), a mapping of checkpoint names to
    tensors, DTensors or `Shard`s, or `Mapped` weights (docs/producers.md names the adapters). They are read
    at each `publish`; between two of them they are the caller's alone.
    rank, world_size: of this rank among all that publish; never read from the environment.
    retention: how many versions are kept in memory, at least 2, the same on every rank.
    dtype: what floating-point weights are published as, where it differs from what they are held in.
    transport: "auto" (each that works here is offered to readers), "shm" or "mooncake".
    on_progress: called with a `Progress` during waits and copies.

    A context manager; `close` leaves the model and frees the memory, with all versions in it.

    Raises LayoutError for weights that cannot be placed, MemberConflict when a living process has this
    rank or the world sizes disagree, ControllerUnavailable when it does not answer within `timeouts.join`.
    """

    def __init__(
        self,
        controller: str,
        *,
        model: str,
        weights: Weights,
        rank: int = 0,
        world_size: int = 1,
        retention: int = 2,
        dtype: torch.dtype | None = None,
        transport: Literal["auto", "shm", "mooncake"] = "auto",
        run: str = "default",
        timeouts: Timeouts | None = None,
        on_progress: OnProgress = ignore,
    ) -> None:
        check_rank(model, rank, world_size)
        if retention < 2:
            raise InvalidRequest(
                f"retention {retention}: at least 2, so that the newest version can be read while the next "
                f"one is written",
                model=model,
            )
        self.model, self.rank, self.world_size = model, rank, world_size
        self.timeouts = timeouts or Timeouts()
        self._weights, self._dtype, self._on_progress = weights_of(weights), dtype, on_progress
        self._layout = layout_of(self._weights, dtype)
        self._closed = False
        self._pid = os.getpid()
        self._session = new_session()
        self._owner = hashlib.blake2b(f"{run}/{model}/{rank}".encode(), digest_size=8).hexdigest()
        self._slots: dict[int, Segment] = {}
        self._packings: dict[str, _Packing] = {}
        with contextlib.ExitStack() as undo:
            self._transports = undo.enter_context(contextlib.closing(Transports(transport)))
            self._client = undo.enter_context(contextlib.closing(ControllerClient(controller, run=run)))
            self._client.put_layout(self._layout, timeout=self.timeouts.join)
            joined = take_rank(
                lambda replace: self._client.join_producer(
                    model,
                    rank=rank,
                    world_size=world_size,
                    session=self._session,
                    layout=self._layout.digest,
                    process=this_process(),
                    retention=retention,
                    ttl=self.timeouts.member,
                    replace=replace,
                    timeout=self.timeouts.join,
                ),
                self.timeouts.join,
            )
            self._latest: int | None = joined.latest
            self._highest: int | None = joined.highest
            self._membership = undo.enter_context(
                contextlib.closing(Membership(self._client, model, self._session, self.timeouts))
            )
            self._undo = undo.pop_all()

    @property
    def layout(self) -> Layout:
        """Where this rank's shards lie, in checkpoint coordinates."""
        return self._layout

    @property
    def highest(self) -> int | None:
        """The highest version that was ever ready, when this rank joined or that it published since. The
        next one must be above it: a restarted trainer resumes past it, also when that version is gone."""
        return self._highest

    @property
    def latest(self) -> int | None:
        """The newest version that readers could have when this rank joined, or that it published since; None
        when its memory has gone with the trainer that held it."""
        return self._latest

    def publish(
        self, version: int, *, timeout: float | None = None, wait: Literal["packed", "ready"] = "packed"
    ) -> Published:
        """Publish this rank's part of `version` (the trainer's step). Returns when the weights may be
        overwritten; with `wait="ready"`, when every rank has published and readers can have it.

        Every rank calls it, with the same version. Versions only rise; they need not be consecutive.

        Raises VersionNotNewer, StoreFull (no slot came free in time: names who holds the leases),
        PublishAborted (another rank died, was replaced or never sealed: nothing was made visible, and the
        same version may be published again), WaitTimeout, LayoutError (the weights changed their form).
        After any of these the store is as it was, and readers stay on the last ready version.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise InvalidRequest(f"version {version!r}: versions are whole numbers from 0", model=self.model)
        if wait not in ("packed", "ready"):
            raise InvalidRequest(f'wait={wait!r}: "packed" or "ready"', model=self.model)
        if self._closed:
            raise InvalidRequest(
                f"this producer of {self.model!r} is closed: make a new one", model=self.model
            )
        if os.getpid() != self._pid:
            raise InvalidRequest(
                f"this producer of {self.model!r} belongs to the process that made it, not to its children: "
                f"make one after the fork",
                model=self.model,
            )
        deadline = time.monotonic() + (self.timeouts.publish if timeout is None else timeout)
        begun = time.perf_counter()
        # before anything is asked for: a fault here must not leave a version half open
        buffers = local_buffers(self._weights)
        check_buffers(self._layout, buffers)
        while True:
            try:
                published = self._attempt(version, buffers, begun, deadline)
                break
            except PublishAborted:
                # A rank was replaced while this one was writing. The weights are still here: offer them to
                # the new set of ranks, as long as there is time.
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        if wait == "ready":
            self._wait_ready(version, deadline)
        self._latest = self._highest = version
        return published

    def _attempt(
        self, version: int, buffers: Mapping[str, torch.Tensor], begun: float, deadline: float
    ) -> Published:
        self._report("wait", version, 0, 0, "for a slot")
        try:
            grant = self._client.open_version(
                self.model,
                version,
                rank=self.rank,
                session=self._session,
                seal_timeout=self.timeouts.seal,
                timeout=max(deadline - time.monotonic(), 0.0),
            )
        except UnknownModel as error:
            raise forgotten(error, "Make a new Producer on every rank") from error
        try:
            return self._fill(grant, buffers, begun)
        except BaseException as error:
            self._abort(version, f"rank {self.rank} failed: {error}")
            raise

    def _fill(self, grant: Grant, buffers: Mapping[str, torch.Tensor], begun: float) -> Published:
        version = grant.version
        packing = self._packing(grant.tiling)
        source = packing.source
        segment = self._slot(grant, source.slot_nbytes)
        waited = time.perf_counter()
        self._report("pack", version, 0, source.payload)
        pack(source, packing.copies, self._layout, buffers, segment.tensor)
        packed = time.perf_counter()
        self._report("digest", version, source.payload, source.payload)
        digests = digest_tiles(segment.tensor, source.offset, source.nbytes)
        digested = time.perf_counter()
        part = Part(
            rank=self.rank,
            session=self._session,
            endpoints=self._transports.serve(segment),
            nbytes=source.payload,
            digests=combine(digests),
        )
        self._client.seal(
            self.model, version, part, digests.astype("<u8").tobytes(), timeout=self.timeouts.call
        )
        sealed = time.perf_counter()
        return Published(
            version,
            source.payload,
            wait=waited - begun,
            pack=packed - waited,
            digest=digested - packed,
            seal=sealed - digested,
        )

    def _packing(self, tiling: str) -> _Packing:
        found = self._packings.get(tiling)
        if found is None:
            source = self._client.source_tiling(self.model, tiling, self.rank, timeout=self.timeouts.publish)
            found = _Packing(source, make_packing(source, self._layout))
            # one more than the present one is enough: a version that was begun with the former
            while len(self._packings) > 1:
                self._packings.pop(next(iter(self._packings)))
            self._packings[tiling] = found
        return found

    def _slot(self, grant: Grant, nbytes: int) -> Segment:
        """The memory of the granted slot: nobody reads it now, and nobody will before the seal."""
        segment = self._slots.get(grant.slot)
        if segment is None or segment.nbytes < nbytes:
            if segment is not None:
                del self._slots[grant.slot]
                self._transports.withdraw(segment)
                segment.close()
            # what others left long ago, and predecessors once no version that lives is in it
            remove_orphans(None, older_than_s=ABANDONED)
            remove_orphans(self._owner, keep_sessions={self._session, *grant.keep_sessions})
            segment = Segment.create(nbytes, self._owner, self._session)
            self._slots[grant.slot] = segment
        return segment

    def _abort(self, version: int, reason: str) -> None:
        # the error that led here is what the caller must see
        with contextlib.suppress(WeightDepotError):
            self._client.abort(
                self.model, version, session=self._session, reason=reason, timeout=self.timeouts.call
            )

    def _wait_ready(self, version: int, deadline: float) -> None:
        self._report("wait", version, 0, 0, "for the other ranks")
        while True:
            seen = self._client.version(self.model, version, timeout=self.timeouts.call)
            if seen.state is VersionState.ABORTED:
                raise PublishAborted(
                    f"version {version} of {self.model!r} was aborted: {seen.reason}",
                    model=self.model,
                    version=version,
                )
            if seen.state is not VersionState.OPEN:
                return
            # wakes when the version is ready; looks again at times, since it may be aborted instead
            with contextlib.suppress(WaitTimeout):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PublishAborted(
                        f"version {version} of {self.model!r} is not ready in time: rank(s) "
                        f"{list(seen.missing)} of {seen.world_size} have not sealed their part",
                        model=self.model,
                        version=version,
                        missing=list(seen.missing),
                    )
                self._client.latest(self.model, min_version=version, timeout=min(left, 1.0))

    def _report(self, phase: Phase, version: int, done: int, total: int, note: str = "") -> None:
        self._on_progress(Progress(self.model, phase, version, done, total, note))

    def close(self) -> None:
        """Leave the model and free the memory: versions that are only here are gone."""
        if os.getpid() != self._pid:
            return  # a child's copy: the rank is the parent's
        self._closed = True
        self._undo.close()
        slots, self._slots = self._slots, {}
        for segment in slots.values():
            segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
