"""Publishing: one rank's part of each version, packed into a slot of shared memory."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Literal

import torch
from typing_extensions import Self

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, check_rank, new_session
from weightdepot.producers.announcing import Seat
from weightdepot.producers.live import LivePublishing, LiveWeights, plain_tensors
from weightdepot.producers.opening import Cancelled, Opening, never
from weightdepot.producers.publishing import Published, Publishing
from weightdepot.producers.sealing import Sealing
from weightdepot.producers.slots import Slots, expected_nbytes
from weightdepot.producers.sources import weights_of
from weightdepot.producers.waiting import Wait
from weightdepot.store.errors import (
    InvalidRequest,
    LayoutError,
    LayoutFault,
    WeightDepotError,
)
from weightdepot.store.layout import Layout
from weightdepot.store.moving import check_buffers
from weightdepot.store.progress import OnProgress, Phase, Progress, ignore
from weightdepot.store.spans import span
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Weights, layout_of, local_buffers

log = logging.getLogger("weightdepot.producers")


class Producer:
    """One trainer rank. All ranks of one trainer publish the same versions, each its own shards.

    controller: its URL. model: the name under which versions are published.
    weights: an `nn.Module` (plain, or sharded by FSDP1, FSDP2 or ZeRO-3), a mapping of checkpoint names to
    tensors, DTensors or `Shard`s, or `Mapped` weights (docs/producers.md names the adapters). They are read
    at each `publish`; between two of them they are the caller's alone.
    rank, world_size: of this rank among all that publish; never read from the environment.
    retention: how many versions are kept in memory, at least 2, the same on every rank; where there is room,
    the memory of one more is kept, to copy into at once.
    dtype: what floating-point weights are published as, where it differs from what they are held in.
    transport: "auto" (each that works here is offered to readers), "shm", "tcp" or "mooncake".
    zero_copy: publish without a copy, to readers on this machine. The weights are moved into shared memory
    once (the tensors stay the same objects; a child that is forked later shares them); `publish` then exposes
    them until every live group has applied the version, which does not outlive the call. For plain tensors in
    host memory, published in the data type that they have.
    token, ca: who this is, and whom it trusts, see `ControllerClient`; None: as the environment says.
    on_progress: called with a `Progress` during waits and copies; also from another thread.

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
        transport: Literal["auto", "shm", "tcp", "mooncake"] = "auto",
        run: str = "default",
        timeouts: Timeouts | None = None,
        zero_copy: bool = False,
        yields: bool = False,
        token: str | None = None,
        ca: str | None = None,
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
        self._busy = threading.Lock()  # one `publish` at a time
        self._closed = False
        self._pid = os.getpid()
        owner = hashlib.blake2b(f"{run}/{model}/{rank}".encode(), digest_size=8).hexdigest()
        with contextlib.ExitStack() as undo:
            if zero_copy and transport == "mooncake":
                raise InvalidRequest(
                    "zero_copy goes over shared memory alone, not over mooncake", model=model
                )
            plain = plain_tensors(self._weights, self._layout) if zero_copy else None
            transports, session = Transports("shm" if zero_copy else transport), new_session()
            # closed last: the transports serve what lies in it
            self._slots = undo.enter_context(contextlib.closing(Slots(owner, session, transports)))
            undo.enter_context(contextlib.closing(transports))
            self._client = undo.enter_context(
                contextlib.closing(ControllerClient(controller, run=run, token=token, ca=ca))
            )
            self._seat = Seat(
                self._client, model, rank, world_size, retention, self._layout, session, self.timeouts, yields
            )
            self._seat.take()
            self._membership = undo.enter_context(
                contextlib.closing(
                    Membership(self._client, model, session, self.timeouts, rejoin=self._seat.retake)
                )
            )
            opening = Opening(
                self._client, self._membership, self._seat, self._layout, model, rank, self.timeouts
            )
            self._sealing = Sealing(
                self._client, self._membership, self._seat, opening, self._slots, transports,
                model, rank, self.timeouts, self._report,
            )  # fmt: skip
            self._publishing = undo.enter_context(
                contextlib.closing(
                    Publishing(
                        self._client, opening, self._sealing, self._seat, self._slots, self._layout,
                        model, self.timeouts, self._report,
                    )
                )
            )  # fmt: skip
            self._live: LivePublishing | None = None
            if plain is not None:
                live = LiveWeights(plain, self._layout, owner, session)
                self._live = undo.enter_context(
                    contextlib.closing(
                        LivePublishing(
                            self._client, opening, live, model, rank, self.timeouts,
                            owner, session,
                        )
                    )
                )  # fmt: skip
            self._undo = undo.pop_all()
        if not zero_copy:
            threading.Thread(target=self._prepare, name=f"weightdepot-memory-{model}", daemon=True).start()

    @property
    def layout(self) -> Layout:
        """Where this rank's shards lie, in checkpoint coordinates."""
        return self._layout

    @property
    def highest(self) -> int | None:
        """The highest version that was ever ready, when this rank joined or that it published since. The
        next one must be above it: a restarted trainer resumes past it, also when that version is gone."""
        under_way, sealed = self._sealing.under_way, self._seat.highest
        return sealed if under_way is None else under_way

    @property
    def latest(self) -> int | None:
        """The newest version that readers could have when this rank joined, or that it published since; None
        when its memory has gone with the trainer that held it."""
        under_way, sealed = self._sealing.under_way, self._seat.latest
        return sealed if under_way is None else under_way

    def publish(self, version: int, *, timeout: float | None = None, wait: Wait | None = None) -> Published:
        """Publish this rank's part of `version` (the trainer's step). Returns when the weights may be
        overwritten, or later:

        wait: "packed": then, when they are copied. "ready": when every rank has published and readers can
        have it. "applied": when every live consumer group holds it, or a newer one. None: as the model's
        policy says, "applied" in mode `sync` and else "packed".

        Digests and the seal follow in the background. What goes wrong there is raised by the next `publish`
        or `flush`, which wait for it first, and by `Published.sealed`.

        Every rank calls it, with the same version. Versions only rise; they need not be consecutive.

        Raises VersionNotNewer, StoreFull (no slot came free in time: names who holds the leases), WaitTimeout
        (ranks that never came; in mode `bounded`, groups that lag too far; with "applied", groups that did
        not come to hold it: the version stays ready), PublishAborted (another rank died, was replaced or
        never sealed: nothing was made visible, and the same version may be published again), LayoutError (the
        weights changed their form, or hold no values). Until a version is ready the store stays as it was,
        and readers stay on the last ready one.
        """
        return self._publish(version, timeout, wait, never)

    def flush(self, timeout: float | None = None) -> None:
        """Returns when what this rank has published is sealed. Raises what went wrong in the background,
        once, and WaitTimeout after `timeout` seconds (None: those of `timeouts.seal`)."""
        self._flush(timeout, never)

    def _flush(self, timeout: float | None, cancelled: Callable[[], bool]) -> None:
        self._check_open()
        with self._alone():
            self._sealing.settle(self.timeouts.seal if timeout is None else timeout, cancelled)

    def _publish(
        self, version: int, timeout: float | None, wait: Wait | None, cancelled: Callable[[], bool]
    ) -> Published:
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise InvalidRequest(f"version {version!r}: versions are whole numbers from 0", model=self.model)
        if wait not in (None, "packed", "ready", "applied"):
            raise InvalidRequest(f'wait={wait!r}: "packed", "ready" or "applied"', model=self.model)
        if self._live is not None and wait in ("packed", "ready"):
            raise InvalidRequest(
                f"wait={wait!r}: without a copy the weights are the readers' until all have applied them",
                model=self.model,
            )
        self._check_open()
        traced = span(
            "weightdepot.publish",
            model=self.model, version=version, rank=self.rank, world_size=self.world_size,
        )  # fmt: skip
        with self._alone(), traced as publish:
            done = self._publish_alone(version, timeout, wait, cancelled)
            publish.set(nbytes=done.nbytes, wait=done.wait, pack=done.pack, settle=done.settle)
            return done

    def _publish_alone(
        self, version: int, timeout: float | None, wait: Wait | None, cancelled: Callable[[], bool]
    ) -> Published:
        patience = self.timeouts.publish if timeout is None else timeout
        if cancelled():
            raise Cancelled(f"the publish of version {version} was cancelled before it was begun")
        # before anything is asked for: a fault here must not leave a version half open
        buffers = local_buffers(self._weights)
        check_buffers(self._layout, buffers)
        _check_values(buffers)
        if self._live is None:
            return self._publishing.publish(version, buffers, patience, wait, cancelled)
        done = self._live.publish(version, buffers, time.monotonic() + patience, cancelled)
        self._seat.published(version)
        return done

    def _check_open(self) -> None:
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

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest("publish was called while another thread is in it", model=self.model)
        try:
            yield
        finally:
            self._busy.release()

    def _prepare(self) -> None:
        """Have the memory of the first version at hand before it is published, if there is time."""
        try:
            nbytes = self._layout.nbytes
            if self.world_size > 1:
                nbytes = sum(t.nbytes for t in self._client.manifest(self.model, timeout=self.timeouts.join))
        except WeightDepotError:
            return  # `publish` will meet it too, and say so
        self._slots.prepare(expected_nbytes(self._layout, self.world_size, nbytes), 1)

    def _report(self, phase: Phase, version: int, done: int, total: int, note: str = "") -> None:
        self._on_progress(Progress(self.model, phase, version, done, total, note))

    def close(self) -> None:
        """Leave the model and free the memory: versions that are only here are gone. What is being sealed is
        waited for, at most `timeouts.call` seconds, and logged where it fails. May be called more than once.
        """
        if os.getpid() != self._pid or self._closed:
            return  # a child's copy: the rank is the parent's
        self._closed = True
        try:
            self._sealing.settle(self.timeouts.call)
        except WeightDepotError as error:
            log.warning("model %s, rank %d: what was published last: %s", self.model, self.rank, error)
        finally:
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_values(buffers: Mapping[str, torch.Tensor]) -> None:
    """Raises LayoutError naming the tensors that have a form and no values."""
    faults = [
        LayoutFault(n, "is on the meta device, and has no values") for n, t in buffers.items() if t.is_meta
    ]
    if faults:
        raise LayoutError(
            "weights without values cannot be published: give the model memory (`to_empty`) and load or "
            "initialize it first",
            faults,
        )
