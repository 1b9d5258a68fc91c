"""What travels between a reader and a server. Numbers are little-endian, unsigned.

reader -> server   hello: MAGIC (8 bytes), key (16), token (32), then any number of requests
                   request: count (4), then for each range offset (8) and nbytes (8)
server -> reader   one byte: WELCOME or REFUSED; then the bytes of all ranges, in the order asked for
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from weightdepot.store.transports.base import Range

MAGIC = b"wdepot1\n"
KEY_BYTES, TOKEN_BYTES = 16, 32
HELLO = struct.Struct(f"<{len(MAGIC)}s{KEY_BYTES}s{TOKEN_BYTES}s")
COUNT = struct.Struct("<I")
PAIR = struct.Struct("<QQ")
WELCOME, REFUSED = b"\x01", b"\x00"
MAX_RANGES = 1000
"""In one request; a longer one is refused."""


def hello(key: bytes, token: bytes) -> bytes:
    return HELLO.pack(MAGIC, key, token)


def request(ranges: Sequence[Range]) -> bytes:
    return COUNT.pack(len(ranges)) + b"".join(PAIR.pack(r.offset, r.nbytes) for r in ranges)


def parse_request(data: bytes | bytearray) -> tuple[list[Range], int] | None:
    """The ranges at the beginning of what has arrived, and the bytes that they took; None when some are due.

    Raises ValueError for what is no request.
    """
    if len(data) < COUNT.size:
        return None
    (count,) = COUNT.unpack_from(data)
    if not 0 < count <= MAX_RANGES:
        raise ValueError(f"a request of {count} ranges")
    size = COUNT.size + count * PAIR.size
    if len(data) < size:
        return None
    return [Range(*pair) for pair in PAIR.iter_unpack(bytes(data[COUNT.size : size]))], size
