"""What happens to a part once it lies in its slot: its digests, and the seal, in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership
from weightdepot.producers.announcing import Seat
from weightdepot.producers.opening import LOOK, RETRY, Cancelled, Opening, never
from weightdepot.producers.repacking import pack_again
from weightdepot.producers.slots import Slots
from weightdepot.store.digests import combine, digest_tiles
from weightdepot.store.errors import (
    LayoutError,
    MemberConflict,
    PublishAborted,
    UnknownModel,
    VersionGone,
    WaitTimeout,
    WeightDepotError,
)
from weightdepot.store.index.records import Grant, Held, Part
from weightdepot.store.progress import Phase
from weightdepot.store.segments import Segment
from weightdepot.store.spans import carried, span, traceparent
from weightdepot.store.tiling import SourceTiling
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.select import Transports

Report = Callable[[Phase, int, int, int, str], None]


@dataclass(frozen=True)
class Sealed:
    """What became of this rank's part after `publish` had copied it. Times in seconds."""

    version: int
    digest: float
    seal: float
    """For the controller; with a publish that was aborted and tried again, for all of that."""


@dataclass(frozen=True)
class Packed:
    """A part that lies in its slot as a whole, and is not sealed yet."""

    grant: Grant
    session: str  # that it was granted to
    source: SourceTiling
    segment: Segment
    slot: torch.Tensor  # uint8, the segment's; keeps the memory, whatever becomes of that
    stats: Mapping[str, float] = field(default_factory=dict)


class Sealing:
    """`begin` with a part, and `settle` before the next: one version at a time."""

    def __init__(
        self,
        client: ControllerClient,
        membership: Membership,
        seat: Seat,
        opening: Opening,
        slots: Slots,
        transports: Transports,
        model: str,
        rank: int,
        timeouts: Timeouts,
        report: Report,
    ) -> None:
        self._client, self._membership, self._seat = client, membership, seat
        self._opening, self._slots, self._transports = opening, slots, transports
        self._model, self._rank, self._timeouts, self._report = model, rank, timeouts, report
        self._sealing: tuple[int, Future[Sealed]] | None = None

    def begin(self, packed: Packed, deadline: float) -> Future[Sealed]:
        """Take the digests and seal, in the background. A publish that is aborted is tried again until the
        deadline, from what was copied: the weights may be others by then."""
        future: Future[Sealed] = Future()
        self._sealing = packed.grant.version, future
        name = f"weightdepot-seal-{self._model}-{self._rank}"
        run = carried(self._run)
        threading.Thread(target=run, args=(packed, deadline, future), name=name, daemon=True).start()
        return future

    def settle(self, timeout: float, cancelled: Callable[[], bool] = never) -> None:
        """Wait for the version that is being sealed. What went wrong with it is raised, once.

        Raises WaitTimeout when it still goes on after `timeout` seconds.
        """
        sealing = self._sealing
        if sealing is None:
            return
        version, future = sealing
        deadline = time.monotonic() + timeout
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            wait([future], left if cancelled is never else min(left, LOOK))
            if future.done():
                self._sealing = None
                future.result()
                return
            if cancelled():
                raise Cancelled("the publish was cancelled")
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"waited {timeout:g} s for rank {self._rank} to seal version {version} of "
                    f"{self._model!r}: it is still on its way, and nothing else was begun",
                    model=self._model,
                    version=version,
                    rank=self._rank,
                )

    @property
    def under_way(self) -> int | None:
        """The version that is being sealed, or was; None where that failed."""
        sealing = self._sealing
        if sealing is None or (sealing[1].done() and sealing[1].exception() is not None):
            return None
        return sealing[0]

    # -- in the background -------------------------------------------------------------------------------

    def _run(self, packed: Packed, deadline: float, future: Future[Sealed]) -> None:
        try:
            with span("seal"):
                sealed = self._seal(packed, deadline)
        except BaseException as error:  # noqa: BLE001  whoever asks the future gets it
            future.set_exception(error)
            return
        future.set_result(sealed)
        # what spares the next ones time
        self._seat.keep_tiling(packed.grant.tiling)
        self._slots.tidy(packed.grant)
        self._slots.prepare(packed.source.slot_nbytes, len(packed.grant.slots) + 1)

    def _seal(self, packed: Packed, deadline: float) -> Sealed:
        version = packed.grant.version
        began = time.perf_counter()
        try:
            part, digests = self._digested(packed)
            digested = time.perf_counter()
            while True:
                try:
                    self._seal_once(packed, part, digests, deadline)
                    break
                except PublishAborted as error:
                    # A rank was replaced while this one was writing: its part, as it is, is offered to the
                    # new set of ranks, as long as there is time.
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(RETRY)
                    packed = self._again(packed, deadline, error)
                    part, digests = self._digested(packed)
        except BaseException as error:
            self._seat.drop(packed.grant.slot)
            self._opening.abort(version, packed.session, str(error))
            raise
        self._seat.published(version)
        return Sealed(version, digested - began, time.perf_counter() - digested)

    def _digested(self, packed: Packed) -> tuple[Part, bytes]:
        """The part, and the digests of its tiles, as they are sealed."""
        source = packed.source
        self._report("digest", packed.grant.version, source.payload, source.payload, "")
        began = time.perf_counter()
        with span("digest"):
            digests = digest_tiles(packed.slot, source.offset, source.nbytes)
        stats: dict[str, Any] = {**packed.stats, "digest": time.perf_counter() - began}
        trace = traceparent()
        if trace:  # for updates to this version to refer to
            stats["trace"] = trace
        part = Part(
            self._rank,
            packed.session,
            self._transports.serve(packed.segment),
            source.payload,
            combine(digests),
            stats,
        )
        return part, digests.astype("<u8").tobytes()

    def _seal_once(self, packed: Packed, part: Part, digests: bytes, deadline: float) -> None:
        """Raises PublishAborted where the version must be opened again."""
        grant = packed.grant
        # Before the seal: an index that is lost in mid-seal may have made the version ready already.
        self._seat.hold(Held(grant.version, grant.attempt, grant.slot, grant.tiling, part, digests))
        # a controller that is away for a while costs no version: nobody but the next publish waits for it
        timeout = max(deadline - time.monotonic(), self._timeouts.call)
        try:
            self._client.seal(self._model, grant.version, part, digests, timeout=timeout)
        except (UnknownModel, VersionGone, MemberConflict) as error:
            if not self._membership.renew(packed.session, deadline - time.monotonic()):
                raise
            # The controller had forgotten this rank. Where the other ranks had sealed theirs too, the version
            # came back with what they announced.
            self._seat.restored(self._membership.session, deadline)
            if not self._seat.came_back(grant.version):
                raise PublishAborted(
                    f"version {grant.version} of {self._model!r} was forgotten by the controller before it "
                    f"was ready",
                    model=self._model,
                    version=grant.version,
                ) from error

    def _again(self, packed: Packed, deadline: float, why: PublishAborted) -> Packed:
        """Open the version anew, and bring the part as it was copied into the slot that is granted now."""
        version, before = packed.grant.version, packed.grant
        self._seat.drop(before.slot)
        session, grant = self._opening.open(version, deadline)
        try:
            source = (
                packed.source if grant.tiling == before.tiling else self._opening.packing(grant.tiling).source
            )
            self._seat.drop(grant.slot)
            segment = self._slots.take(grant, source.slot_nbytes)
            if source is not packed.source:
                pack_again(packed.source, packed.slot, source, segment.tensor)
            elif segment.tensor.data_ptr() != packed.slot.data_ptr():
                segment.tensor[: source.slot_nbytes].copy_(packed.slot[: source.slot_nbytes])
        except LayoutError as error:
            self._opening.abort(version, session, str(error))
            raise PublishAborted(
                f"{why.message}; it was opened again, but is cut in another way now (ranks or readers have "
                f"come or gone), and the weights may have changed since: publish it again",
                **why.details,
            ) from error
        except BaseException as error:
            self._opening.abort(version, session, str(error))
            raise
        return replace(
            packed, grant=grant, session=session, source=source, segment=segment, slot=segment.tensor
        )


def said_later(error: WeightDepotError, version: int) -> WeightDepotError:
    """What went wrong in the background with an earlier version, for the call that publishes `version`."""
    if isinstance(error, LayoutError):
        return error
    return type(error)(
        f"the version published before this one failed in the background: {error.message}. Version {version} "
        f"was not begun: publish it again",
        **error.details,
    )
