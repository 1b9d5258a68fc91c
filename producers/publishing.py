"""One rank's publish, from the weights to what the caller waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from weightdepot.api.client import ControllerClient
from weightdepot.producers.announcing import Seat
from weightdepot.producers.opening import Cancelled, Opening, never
from weightdepot.producers.sealing import Packed, Report, Sealed, Sealing, said_later
from weightdepot.producers.slots import Slots
from weightdepot.producers.waiting import Wait, wait_applied, wait_ready
from weightdepot.store.errors import WeightDepotError
from weightdepot.store.index.records import Mode, Policy
from weightdepot.store.layout import Layout
from weightdepot.store.moving import pack
from weightdepot.store.timeouts import Timeouts


@dataclass(frozen=True)
class Published:
    """What one `publish` did. Times in seconds, sizes in bytes."""

    version: int
    nbytes: int
    """This rank's part."""
    wait: float
    """For the version before to be sealed, the controller, the other ranks and a free slot."""
    pack: float
    """Copying the weights into the slot."""
    sealed: Future[Sealed]
    """Done when this rank's part has its digests and is sealed, which goes on in the background. It raises
    what went wrong with that; so does the next `publish` or `flush`."""
    settle: float = 0.0
    """For what was waited for after the copy: "ready", "applied"."""
    applied: tuple[str, ...] = ()
    """With "applied": the consumer groups that hold the version, or a newer one."""
    dropped: tuple[str, ...] = ()
    """With "applied": groups that were waited for until they died or left."""

    @property
    def stall(self) -> float:
        """How long the call took in all."""
        return self.wait + self.pack + self.settle


class Publishing:
    """`publish` copies the weights on the caller's thread; what follows is `Sealing`'s, in the background."""

    def __init__(
        self,
        client: ControllerClient,
        opening: Opening,
        sealing: Sealing,
        seat: Seat,
        slots: Slots,
        layout: Layout,
        model: str,
        timeouts: Timeouts,
        report: Report,
    ) -> None:
        self._client, self._opening, self._sealing = client, opening, sealing
        self._seat, self._slots, self._layout = seat, slots, layout
        self._model, self._timeouts, self._report = model, timeouts, report

    def publish(
        self,
        version: int,
        buffers: Mapping[str, torch.Tensor],
        patience: float,
        wait: Wait | None,
        cancelled: Callable[[], bool] = never,
    ) -> Published:
        """See `Producer.publish`. patience: seconds."""
        deadline = time.monotonic() + patience
        begun = time.perf_counter()
        try:
            self._sealing.settle(patience, cancelled)
        except WeightDepotError as error:
            if self._sealing.under_way is not None:  # it is just not over yet
                raise
            raise said_later(error, version) from error
        settled = time.perf_counter()
        packed, policy = self._pack(version, buffers, deadline, cancelled)
        done = Published(
            version,
            packed.source.payload,
            wait=settled - begun + packed.stats["wait"],
            pack=packed.stats["pack"],
            sealed=self._sealing.begin(packed, deadline),
        )
        if wait is None:
            wait = "applied" if policy.mode is Mode.SYNC else "packed"
        if wait == "packed":
            return done
        waiting = time.perf_counter()
        self._sealing.settle(max(deadline - time.monotonic(), 0.0), cancelled)
        self._report("wait", version, 0, 0, "for the other ranks")
        wait_ready(self._client, self._model, version, deadline, self._timeouts.call, cancelled)
        if wait == "applied":
            self._report("wait", version, 0, 0, "for the consumer groups")
            applied, dropped = wait_applied(self._client, self._model, version, deadline, cancelled)
            done = replace(done, applied=applied, dropped=dropped)
        return replace(done, settle=time.perf_counter() - waiting)

    def _pack(
        self,
        version: int,
        buffers: Mapping[str, torch.Tensor],
        deadline: float,
        cancelled: Callable[[], bool] = never,
    ) -> tuple[Packed, Policy]:
        """Copy the weights into a slot; they are not read any more when this returns. What fails after the
        grant aborts the version."""
        begun = time.perf_counter()
        self._report("wait", version, 0, 0, "for a slot")
        session, grant = self._opening.open(version, deadline, cancelled=cancelled)
        try:
            packing = self._opening.packing(grant.tiling)
            source = packing.source
            self._seat.drop(grant.slot)  # from here on its bytes are not what they were
            segment = self._slots.take(grant, source.slot_nbytes)
            waited = time.perf_counter()
            self._report("pack", version, 0, source.payload, "")
            pack(source, packing.copies, self._layout, buffers, segment.tensor)
            stats = {"wait": waited - begun, "pack": time.perf_counter() - waited}
            if cancelled():
                raise Cancelled(f"the publish of version {version} was cancelled")
            packed = Packed(grant, session, source, segment, segment.tensor, stats)
        except BaseException as error:
            self._opening.abort(version, session, str(error))
            raise
        return packed, grant.policy
