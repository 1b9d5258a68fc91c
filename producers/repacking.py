"""A part that was packed under one tiling, packed under another: from its slot, not from the weights."""

from __future__ import annotations

import numpy as np
import torch

from weightdepot.store.dtypes import ITEMSIZE, torch_dtype
from weightdepot.store.layout import BufferSpec, Layout, Table
from weightdepot.store.moving import pack
from weightdepot.store.planning import make_packing
from weightdepot.store.tiling import SourceTiling


def slot_layout(source: SourceTiling) -> Layout:
    """A filled slot as a layout: a buffer for each data type, over all of it, and each tile placed there."""
    dtypes = sorted({t.dtype for t in source.tensors})
    numbers = {dtype: i for i, dtype in enumerate(dtypes)}
    kind = np.array([numbers[t.dtype] for t in source.tensors] or [0], dtype=np.int64)
    size = np.array([ITEMSIZE[t.dtype] for t in source.tensors] or [1], dtype=np.int64)
    tensor, shape = source.boxes.tensor, source.boxes.shape
    strides = np.ones_like(shape)
    for dim in range(shape.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * shape[:, dim + 1]
    buffers = tuple(
        BufferSpec(dtype, (source.slot_nbytes // ITEMSIZE[dtype],), (1,), dtype) for dtype in dtypes
    )
    start = source.offset // size[tensor]
    return Layout(
        source.tensors, buffers, Table(tensor, source.boxes.offset, shape, kind[tensor], start, strides)
    )


def pack_again(before: SourceTiling, filled: torch.Tensor, source: SourceTiling, slot: torch.Tensor) -> None:
    """Write every tile of `source` to its place in `slot`, from a slot that was filled for `before`.

    filled, slot: uint8; they may be the same memory.
    Raises LayoutError naming the tensors of which a tile does not lie within one of the former ones: tiles
    became larger, or this rank stores what another one did.
    """
    layout = slot_layout(before)
    packing = make_packing(source, layout)
    if filled.data_ptr() == slot.data_ptr():
        filled = filled.clone()
    buffers = {
        b.name: filled[: b.shape[0] * ITEMSIZE[b.dtype]].view(torch_dtype(b.dtype)) for b in layout.buffers
    }
    pack(source, packing, layout, buffers, slot)
