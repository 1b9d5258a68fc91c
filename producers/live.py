"""Publishing without a copy: readers on the same machine read the trainer's own weights, while it waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from weightdepot.api.client import ControllerClient
from weightdepot.producers.opening import RETRY, Opening
from weightdepot.producers.publishing import Published
from weightdepot.producers.sealing import Sealed
from weightdepot.producers.waiting import wait_applied, wait_ready
from weightdepot.store.digests import combine
from weightdepot.store.dtypes import torch_dtype
from weightdepot.store.errors import (
    InvalidRequest,
    LayoutError,
    LayoutFault,
    PublishAborted,
    WeightDepotError,
)
from weightdepot.store.index.records import Part
from weightdepot.store.layout import Ints, Layout
from weightdepot.store.live import WORD_NBYTES, LiveEndpoint, TileTable, set_word
from weightdepot.store.segments import Segment
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.transports.shm import ShmTransport
from weightdepot.store.weights import Mapped, Shard, Weights, named_weights

ALIGNMENT = 64  # bytes; where a storage begins in the segment

log = logging.getLogger("weightdepot.producers")


def plain_tensors(weights: Weights, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors whose memory may be moved, by the names of the layout's buffers.

    Raises InvalidRequest for weights that are not plain tensors, LayoutError for those that are not in host
    memory or are published in another data type.
    """
    found = None if isinstance(weights, Mapped) else named_weights(weights)
    tensors = {n: w.local if isinstance(w, Shard) else w for n, w in (found or {}).items()}
    if found is None or any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors.values()):
        raise InvalidRequest(
            "zero_copy takes a module or mapping of plain tensors (and Shards of them): what FSDP, ZeRO-3 or "
            "Megatron-core hold has an owner that would not notice that its memory was moved; publish it "
            "with a copy"
        )
    stated = {t.name: t.dtype for t in layout.tensors}
    faults = []
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            faults.append(LayoutFault(name, f"is on {tensor.device}, not in host memory"))
        elif torch_dtype(stated[name]) != tensor.dtype:
            faults.append(LayoutFault(name, f"is {tensor.dtype}, and published as {stated[name]}"))
    if faults:
        raise LayoutError("these weights cannot be read in place; publish them with a copy", faults)
    return tensors


class LiveWeights:
    """Weights whose memory is a segment.

    Made once: each tensor's storage is copied into the segment, and the tensor bound to it there. The tensors
    stay the same objects, with the same values, shapes and strides; those that shared memory share it still.
    Other tensors that look at the old memory, and are not among the weights, keep it and see no changes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], layout: Layout, owner: str, session: str) -> None:
        """tensors: by the names of the layout's buffers. owner, session: see `Segment.create`.

        Raises StoreFull where there is no room.
        """
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
        place: dict[int, int] = {}
        nbytes = 0
        for pointer, storage in storages.items():
            place[pointer] = nbytes
            nbytes += -(-int(storage.nbytes()) // ALIGNMENT) * ALIGNMENT
        self.segment = Segment.create(nbytes, owner, session)
        memory = self.segment.tensor
        for pointer, storage in storages.items():
            old = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (int(storage.nbytes()),), (1,))
            memory[place[pointer] : place[pointer] + len(old)].copy_(old)
        first: dict[str, int] = {}
        moved = {}
        for name, tensor in tensors.items():
            within = int(tensor.storage_offset()) * tensor.itemsize
            at = place[tensor.untyped_storage().data_ptr()] + within
            first[name] = at
            moved[name] = torch.empty(0, dtype=tensor.dtype).set_(
                memory.untyped_storage(), at // tensor.itemsize, tensor.shape, tensor.stride()
            )
        for name, tensor in tensors.items():  # when all is copied
            tensor.data = moved[name]
        self.at: Ints = np.array([first[b.name] for b in layout.buffers], dtype=np.int64)
        """(b,) bytes from the start of the segment to the first element of each of the layout's buffers."""
        self._pointer = {name: t.data_ptr() for name, t in moved.items()}

    def check(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raises LayoutError naming the tensors that lie elsewhere by now."""
        faults = [
            LayoutFault(name, "was bound to other memory since the producer was made")
            for name, pointer in self._pointer.items()
            if buffers[name].data_ptr() != pointer
        ]
        if faults:
            raise LayoutError(
                "weights that are published without a copy must be changed in place: make a new producer",
                faults,
            )


@dataclass(frozen=True)
class _Table:
    tiling: str
    segment: Segment
    payload: int


class LivePublishing:
    """`publish` exposes the weights, waits for the readers, and takes the weights back, whatever happens."""

    def __init__(
        self,
        client: ControllerClient,
        opening: Opening,
        weights: LiveWeights,
        model: str,
        rank: int,
        timeouts: Timeouts,
        owner: str,
        session: str,
    ) -> None:
        self._client, self._opening, self._weights = client, opening, weights
        self._model, self._rank, self._timeouts = model, rank, timeouts
        self._owner, self._session = owner, session
        self._shm = ShmTransport()
        self._word = Segment.create(WORD_NBYTES, owner, session)
        self._number = 0
        self._table: _Table | None = None
        self._withdrawals: dict[int, str] = {}  # version -> session: the controller has yet to be told

    def publish(
        self,
        version: int,
        buffers: Mapping[str, torch.Tensor],
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> Published:
        """Raises what `Producer.publish` raises; the weights are not read any more then either: readers that
        come late, or are late, are told that what they have read is nothing."""
        self._weights.check(buffers)
        while True:
            try:
                return self._attempt(version, deadline, cancelled)
            except PublishAborted:
                # A rank was replaced: the weights are offered to the new set of ranks, as long as there is
                # time.
                if time.monotonic() >= deadline or cancelled():
                    raise
                time.sleep(RETRY)

    def _attempt(self, version: int, deadline: float, cancelled: Callable[[], bool]) -> Published:
        begun = time.perf_counter()
        self._withdraw_again()
        session, grant = self._opening.open(version, deadline, live=True, cancelled=cancelled)
        opened = time.perf_counter()
        try:
            table = self._table_of(grant.tiling)
            self._number += 1
            set_word(self._word.tensor, self._number)
            part = Part(
                self._rank,
                session,
                LiveEndpoint(
                    self._shm.serve(self._weights.segment),
                    self._shm.serve(table.segment),
                    self._shm.serve(self._word),
                    self._number,
                ).to_plain(),
                table.payload,
                combine(np.empty(0, np.uint64)),
                {"wait": opened - begun},
            )
            timeout = max(deadline - time.monotonic(), self._timeouts.call)
            self._client.seal(self._model, version, part, b"", timeout=timeout)
            sealed = time.perf_counter()
            wait_ready(self._client, self._model, version, deadline, self._timeouts.call, cancelled)
            applied, dropped = wait_applied(self._client, self._model, version, deadline, cancelled)
        except BaseException as error:
            self._take_back(version, session, str(error), ready=False)
            raise
        self._take_back(version, session, "it was read in place, and all have it", ready=True)
        future: Future[Sealed] = Future()
        future.set_result(Sealed(version, 0.0, sealed - opened))
        return Published(
            version,
            table.payload,
            wait=opened - begun,
            pack=0.0,
            sealed=future,
            settle=time.perf_counter() - opened,
            applied=applied,
            dropped=dropped,
        )

    def _table_of(self, tiling: str) -> _Table:
        if self._table is None or self._table.tiling != tiling:
            packing = self._opening.packing(tiling)
            content = TileTable.of(packing.source, packing.copies, self._weights.at).to_bytes()
            segment = Segment.create(len(content), self._owner, self._session)
            segment.tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            if self._table is not None:
                self._table.segment.close()
            self._table = _Table(tiling, segment, packing.source.payload)
        return self._table

    def _take_back(self, version: int, session: str, reason: str, ready: bool) -> None:
        """First where readers look themselves, then at the controller, which may be away."""
        set_word(self._word.tensor, 0)
        if not ready:
            self._opening.abort(version, session, reason)  # where it is open still
        self._withdrawals[version] = session
        self._withdraw_again(reason)

    def _withdraw_again(self, reason: str = "it was read in place, and taken back") -> None:
        """A version that cannot be read any more must not be offered, so it is tried until it is heard."""
        for version, session in tuple(self._withdrawals.items()):
            try:
                self._client.withdraw(
                    self._model, version, session=session, reason=reason, timeout=self._timeouts.call
                )
            except WeightDepotError as error:
                if error.retryable:
                    log.warning("model %s: version %d was taken back: %s", self._model, version, error)
                    continue
            del self._withdrawals[version]

    def close(self) -> None:
        """The weights stay where they are, and are the caller's alone."""
        set_word(self._word.tensor, 0)
        for segment in (self._weights.segment, self._word, *([self._table.segment] if self._table else [])):
            segment.close()
        self._shm.close()
