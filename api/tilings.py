"""Whether a tiling that somebody sends holds together, before plans are made with it."""

from __future__ import annotations

import math

import numpy as np

from weightdepot.api.names import MAX_INTEGER
from weightdepot.api.schemas.fields import MAX_WORLD
from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.tiling import Tiling

MAX_DIMENSIONS = 32


def checked_tiling(data: bytes) -> Tiling:
    """Raises InvalidRequest for bytes that are no tiling, or one whose tiles lie outside of its tensors,
    ranks or slots, or over each other in a slot."""
    tiling = Tiling.from_bytes(data)
    _check_tensors(tiling)
    boxes, n = tiling.boxes, len(tiling.boxes)
    if boxes.offset.shape != boxes.shape.shape or not len(boxes.offset) == len(tiling.source) == n:
        raise _broken("its columns differ in length")
    if len(tiling.offset) != n:
        raise _broken("its columns differ in length")
    if n == 0:
        return tiling
    if boxes.tensor.min() < 0 or boxes.tensor.max() >= len(tiling.tensors):
        raise _broken("a tile is of a tensor that is not listed")
    dims = boxes.offset.shape[1]
    if max(len(t.shape) for t in tiling.tensors) > dims:
        raise _broken(f"a tensor has more than the {dims} dimensions of the tiles")
    # unused dimensions count as 1 long
    shapes = np.array([(*t.shape, *(1,) * (dims - len(t.shape))) for t in tiling.tensors], dtype=np.int64)
    shapes = shapes.reshape(len(tiling.tensors), dims)
    inside = (boxes.offset >= 0) & (boxes.shape >= 0) & (boxes.shape <= shapes[boxes.tensor] - boxes.offset)
    if not inside.all():
        raise _broken("a tile lies outside of its tensor")
    if tiling.source.min() < 0 or tiling.source.max() >= tiling.world_size:
        raise _broken("a tile belongs to a rank that there is not")
    if tiling.offset.min() < 0 or tiling.offset.max() > MAX_INTEGER:
        raise _broken("a tile lies outside of any slot")
    same = tiling.source[1:] == tiling.source[:-1]
    ends = (tiling.offset + tiling.nbytes)[:-1]
    if (np.diff(tiling.source) < 0).any() or (same & (tiling.offset[1:] < ends)).any():
        raise _broken("tiles lie over each other, or are not in the order of rank and place")
    return tiling


def _check_tensors(tiling: Tiling) -> None:
    if not 0 < tiling.world_size <= MAX_WORLD:
        raise _broken(f"{tiling.world_size} ranks; between 1 and {MAX_WORLD} are taken")
    for tensor in tiling.tensors:
        if tensor.dtype not in ITEMSIZE:
            raise _broken(f"tensor {tensor.name[:200]!r} has the unknown data type {tensor.dtype[:40]!r}")
        shape = tensor.shape
        size = math.prod(shape) * ITEMSIZE[tensor.dtype]
        if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or size > MAX_INTEGER:
            raise _broken(f"tensor {tensor.name[:200]!r} has an impossible shape")


def _broken(why: str) -> InvalidRequest:
    return InvalidRequest(f"the tiling does not hold together: {why}")
