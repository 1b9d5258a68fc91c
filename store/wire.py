"""The one form in which layouts, tilings and plans cross a process boundary: a typed header and int64 arrays.

MessagePack inside zstd. Nothing in it can run code; every length and shape is checked when it is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec
import numpy as np
import zstandard

from weightdepot.store.errors import InvalidRequest

FORMAT = 1
MAX_NBYTES = 4 << 30  # of a decompressed frame

H = TypeVar("H", bound=msgspec.Struct)
Ints = np.typing.NDArray[np.int64]


class _Frame(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    format: int
    header: msgspec.Raw
    arrays: dict[str, tuple[tuple[int, ...], bytes]]


def encode(kind: str, header: msgspec.Struct, arrays: Mapping[str, Ints]) -> bytes:
    """The uncompressed frame: equal values give equal bytes, so digests are taken of it."""
    return msgspec.msgpack.encode(
        _Frame(
            kind,
            FORMAT,
            msgspec.Raw(msgspec.msgpack.encode(header)),
            {name: (a.shape, np.ascontiguousarray(a, dtype="<i8").tobytes()) for name, a in arrays.items()},
        )
    )


def compress(frame: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(frame)


def decompress(data: bytes, what: str) -> bytes:
    """Refuses frames that do not state a size within `MAX_NBYTES`. Raises InvalidRequest."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_NBYTES:
            raise InvalidRequest(f"a {what} of {size} bytes uncompressed; at most {MAX_NBYTES} are taken")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_NBYTES)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"not a compressed {what}: {error}") from error


def decode(kind: str, frame: bytes, header: type[H], dims: Mapping[str, int]) -> tuple[H, dict[str, Ints]]:
    """Header and arrays of a frame. `dims` states the arrays and how many dimensions each has.

    Raises InvalidRequest for bytes that are not such a frame.
    """
    try:
        read = msgspec.msgpack.decode(frame, type=_Frame)
        head = msgspec.msgpack.decode(read.header, type=header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"not a {kind}: {error}") from error
    if read.kind != kind or read.format != FORMAT:
        raise InvalidRequest(
            f"a {read.kind[:20]!r} of format {read.format}; expected a {kind!r} of format {FORMAT}"
        )
    if read.arrays.keys() != dims.keys():
        raise InvalidRequest(f"a {kind} with arrays {sorted(read.arrays)}; expected {sorted(dims)}")
    arrays: dict[str, Ints] = {}
    for name, (shape, blob) in read.arrays.items():
        if len(shape) != dims[name] or min(shape, default=0) < 0 or math.prod(shape) * 8 != len(blob):
            raise InvalidRequest(f"a {kind} whose array {name!r} has shape {shape} and {len(blob)} bytes")
        arrays[name] = np.frombuffer(blob, dtype="<i8").astype(np.int64, copy=False).reshape(shape)
    return head, arrays
