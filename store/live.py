"""Parts that are read in place, from the trainer's own parameters: what they say to readers.

Three segments stand behind such a part: the weights, a table that says where in them each tile lies, and a
word that says whether they may be read. The word is not in the weights' segment: control words never share
memory with payload.

The trainer writes the number of the publish into the word before it seals, and 0 before `publish` returns:
from then on the weights change. A reader looks at it before and after it has copied, whatever the controller
says: what it copied in between is whole if and only if the number was there both times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from weightdepot.store import wire
from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.layout import Ints
from weightdepot.store.planning import Copies
from weightdepot.store.tiling import SourceTiling

ENDPOINT = "live"  # its name among the endpoints of a part
WORD_NBYTES = 8  # int64


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


@dataclass(frozen=True, eq=False)
class TileTable:
    """Where the tiles of one rank lie in its live weights, by row of its tile table."""

    start: Ints  # (n,) bytes from the start of the weights' segment
    strides: Ints  # (n, D) elements

    @classmethod
    def of(cls, source: SourceTiling, packing: Copies, at: Ints) -> TileTable:
        """packing: one copy for each tile, in their order. at: (b,) bytes from the start of the segment to
        the first element of each of the layout's buffers."""
        itemsize = np.array([ITEMSIZE[t.dtype] for t in source.tensors] or [1], dtype=np.int64)
        size = itemsize[source.boxes.tensor]
        return cls(at[packing.buffer] + packing.start * size, packing.strides)

    def to_bytes(self) -> bytes:
        return wire.compress(
            wire.encode("live-tiles", _Nothing(), {"start": self.start, "strides": self.strides})
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> TileTable:
        """Raises InvalidRequest for bytes that are none."""
        frame = wire.decompress(data, "table of live tiles")
        _, a = wire.decode("live-tiles", frame, _Nothing, {"start": 1, "strides": 2})
        return cls(a["start"], a["strides"])


@dataclass(frozen=True)
class LiveEndpoint:
    """How a reader of the same machine reaches such a part. The first three as the shared-memory transport's
    endpoints are."""

    weights: Mapping[str, Any]
    table: Mapping[str, Any]
    word: Mapping[str, Any]
    number: int  # what the word must be

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """The endpoints of the part: there is no other way to read it."""
        return {
            ENDPOINT: {
                "weights": dict(self.weights),
                "table": dict(self.table),
                "word": dict(self.word),
                "number": self.number,
            }
        }

    @classmethod
    def from_plain(cls, endpoint: Mapping[str, Any]) -> LiveEndpoint:
        """Raises InvalidRequest for what is none: it came from elsewhere."""
        weights, table, word = (endpoint.get(name) for name in ("weights", "table", "word"))
        number = endpoint.get("number")
        if (
            not isinstance(weights, Mapping)
            or not isinstance(table, Mapping)
            or not isinstance(word, Mapping)
            or not isinstance(number, int)
            or number < 1
        ):
            raise InvalidRequest("not an endpoint of live weights")
        return cls(weights, table, word, number)


def word_of(memory: torch.Tensor) -> int:
    """memory: uint8, at least WORD_NBYTES, aligned. Read in one access, so never half of it."""
    return int(memory[:WORD_NBYTES].view(torch.int64).item())


def set_word(memory: torch.Tensor, number: int) -> None:
    memory[:WORD_NBYTES].view(torch.int64).fill_(number)
