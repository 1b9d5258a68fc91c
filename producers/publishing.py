"""One rank's publish, from the weights to what the caller waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from weightdepot.api.client import ControllerClient
from weightdepot.producers.announcing import Seat
from weightdepot.producers.opening import Cancelled, Opening, never
from weightdepot.producers.sealing import Packed, Report, Sealed, Sealing, said_later
from weightdepot.producers.slots import Slots
from weightdepot.producers.waiting import Wait, wait_applied, wait_ready
from weightdepot.store.errors import WeightDepotError
from weightdepot.store.index.records import Grant, Mode, Policy
from weightdepot.store.layout import Layout
from weightdepot.store.moving import pack
from weightdepot.store.spans import carried, span
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
        self._asking = ThreadPoolExecutor(1, f"weightdepot-open-{model}")

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
        early = self._pack_early(version, buffers, deadline, cancelled)
        if early is None:
            session, grant = self._open(version, deadline, cancelled)
        elif isinstance(early, Packed):
            return early, early.grant.policy
        else:  # granted, but to be packed in another way
            session, grant = early
        try:
            packing = self._opening.packing(grant.tiling)
            source = packing.source
            self._seat.drop(grant.slot)  # from here on its bytes are not what they were
            segment = self._slots.take(grant, source.slot_nbytes)
            waited = time.perf_counter()
            self._report("pack", version, 0, source.payload, "")
            with span("pack", nbytes=source.payload):
                pack(source, packing.copies, self._layout, buffers, segment.tensor)
            stats = {"wait": waited - begun, "pack": time.perf_counter() - waited}
            if cancelled():
                raise Cancelled(f"the publish of version {version} was cancelled")
            packed = Packed(grant, session, source, segment, segment.tensor, stats)
        except BaseException as error:
            self._opening.abort(version, session, str(error))
            raise
        return packed, grant.policy

    def _pack_early(
        self,
        version: int,
        buffers: Mapping[str, torch.Tensor],
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> Packed | tuple[str, Grant] | None:
        """Pack as the last version was packed, into memory of no slot, while a slot is asked for: the copy
        hides the exchange with the controller. What is granted alone, where that packing will not do; None
        where there is nothing to do it with."""
        packing = self._opening.likely()
        segment = self._slots.borrow(packing.source.slot_nbytes) if packing is not None else None
        if packing is None or segment is None:
            return None
        stopped = threading.Event()

        def over() -> bool:
            return stopped.is_set() or cancelled()

        begun = time.perf_counter()
        asked = self._asking.submit(carried(self._open), version, deadline, over)
        try:
            source = packing.source
            self._report("pack", version, 0, source.payload, "")
            with span("pack", nbytes=source.payload):
                pack(source, packing.copies, self._layout, buffers, segment.tensor)
            packed = time.perf_counter()
            session, grant = asked.result()
        except BaseException as error:
            stopped.set()
            self._slots.back(segment)
            why = str(error)  # whenever it is granted: nobody will write it
            asked.add_done_callback(lambda done: self._unwanted(version, done, why))
            raise
        try:
            if cancelled():
                raise Cancelled(f"the publish of version {version} was cancelled")
            if self._opening.packing(grant.tiling) is not packing:
                self._slots.back(segment)
                return session, grant
            self._seat.drop(grant.slot)  # the slot's bytes are others from here on
            self._slots.put(grant, segment)
        except BaseException as error:
            self._opening.abort(version, session, str(error))
            raise
        waited = max(time.perf_counter() - packed, 0.0)
        stats = {"wait": waited, "pack": packed - begun}
        return Packed(grant, session, source, segment, segment.tensor, stats)

    def _open(self, version: int, deadline: float, cancelled: Callable[[], bool]) -> tuple[str, Grant]:
        with span("open"):
            return self._opening.open(version, deadline, cancelled=cancelled)

    def _unwanted(self, version: int, asked: Future[tuple[str, Grant]], why: str) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._opening.abort(version, asked.result()[0], why)

    def close(self) -> None:
        self._asking.shutdown(wait=False)
