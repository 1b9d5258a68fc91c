"""Weights in a device's memory: tiles are packed and taken apart there, and cross the bus as whole chunks.

Not verified on a device. What is tested is the same code with host memory in a device's place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightdepot.store.transports.base import ALIGNMENT

CHUNK = 64 << 20  # bytes that cross the bus at once; twice that is held on the device, and in pinned memory


def on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


@dataclass(frozen=True)
class Chunk:
    """Copies whose tiles lie side by side in a slot."""

    copies: tuple[int, ...]
    start: int  # byte in the slot
    nbytes: int


def chunks(copies: Sequence[int], at: Sequence[int], nbytes: Sequence[int]) -> Iterator[Chunk]:
    """`copies` in the order of the slot, cut where a tile does not follow the one before, and at `CHUNK`.

    at, nbytes: of the tile of each copy there is.
    """
    members: list[int] = []
    start = stop = 0
    for i in sorted(copies, key=lambda i: at[i]):
        if members and (at[i] != stop or stop + nbytes[i] - start > CHUNK):
            yield Chunk(tuple(members), start, stop - start)
            members = []
        if not members:
            start = at[i]
        members.append(i)
        stop = at[i] + nbytes[i]
    if members:
        yield Chunk(tuple(members), start, stop - start)


def pack_from(
    device: torch.device,
    wanted: Sequence[Chunk],
    stage: Callable[[Chunk, torch.Tensor], None],
    slot: torch.Tensor,
) -> None:
    """Bring the chunks into the slot (uint8, host memory).

    stage: writes a chunk's tiles into memory of the device whose first byte stands for the chunk's first one.
    It is called on the device's current stream. A second stream carries each chunk to pinned memory, while
    the next is staged, and the one before is copied from there into the slot. When this returns everything
    is in the slot, and the weights are not read any more.
    """
    if not wanted:
        return
    size = max(chunk.nbytes for chunk in wanted) + ALIGNMENT
    on_device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    is_cuda = device.type == "cuda"
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
    side: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
    arrived: list[Any] = [
        torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        for _ in range(2)
    ]

    def settle(number: int) -> None:
        chunk, half = wanted[number], number % 2
        if is_cuda:
            arrived[half].synchronize()
        slot[chunk.start : chunk.start + chunk.nbytes].copy_(pinned[half][: chunk.nbytes])

    with torch.cuda.device(device) if is_cuda else contextlib.nullcontext():
        for number, chunk in enumerate(wanted):
            half = number % 2
            # The tiles' offsets in the slot are aligned for their types: so are they here.
            lead = chunk.start % ALIGNMENT
            memory = on_device[half][lead : lead + chunk.nbytes]
            stage(chunk, memory)  # this half was settled two rounds ago, hence is free
            if is_cuda:
                side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side) if is_cuda else contextlib.nullcontext():
                pinned[half][: chunk.nbytes].copy_(memory, non_blocking=is_cuda)
                if is_cuda:
                    arrived[half].record(side)
            if number:
                settle(number - 1)
        settle(len(wanted) - 1)


def brought_to(device: torch.device, memory: torch.Tensor) -> torch.Tensor:
    """A copy of host memory (uint8) on the device, aligned as the original is.

    It has been read when this returns, so that what it lay in may be used again.
    """
    lead = memory.data_ptr() % ALIGNMENT
    there = torch.empty(lead + memory.numel(), dtype=torch.uint8, device=device)[lead:]
    return there.copy_(memory)
