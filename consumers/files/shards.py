"""Which tensor lies in which file of a checkpoint, and where. Pure arithmetic, and the format's header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightdepot.store.checkpoint import SAFETENSORS_NAMES
from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.layout import TensorSpec

LARGEST_FILE = 5 * 10**9  # bytes of tensors in one file, as transformers has it
ALIGNMENT = 8  # bytes, of the header's end; then a tensor lies at a multiple of its element's size


@dataclass(frozen=True)
class Placed:
    spec: TensorSpec
    start: int  # bytes from the file's beginning

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * ITEMSIZE[self.spec.dtype]


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file: its header as it is written, and its tensors in the order of their data."""

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    nbytes: int


def shard_files(tensors: Iterable[TensorSpec], largest: int = LARGEST_FILE) -> tuple[ShardFile, ...]:
    """The files of a checkpoint, in the tensors' order; each takes as many as make up `largest` bytes, and
    one at least.

    Raises LayoutError naming tensors of data types that the format has not, InvalidRequest for no tensors.
    """
    specs = tuple(tensors)
    if not specs:
        raise InvalidRequest("a checkpoint of no tensors cannot be written")
    if largest < 1:
        raise InvalidRequest(f"the largest file is {largest} bytes: at least 1 is wanted")
    faults = [
        LayoutFault(s.name, f"safetensors has no {s.dtype}")
        for s in specs
        if s.dtype not in SAFETENSORS_NAMES
    ]
    if faults:
        raise LayoutError("tensors that cannot be written to a checkpoint", faults)
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        nbytes = math.prod(spec.shape) * ITEMSIZE[spec.dtype]
        if parts[-1] and size + nbytes > largest:
            parts.append([])
            size = 0
        parts[-1].append(spec)
        size += nbytes
    if len(parts) == 1:
        return (_file("model.safetensors", parts[0]),)
    return tuple(
        _file(f"model-{i:05d}-of-{len(parts):05d}.safetensors", part) for i, part in enumerate(parts, 1)
    )


def index_of(files: Sequence[ShardFile]) -> bytes:
    """`model.safetensors.index.json` of these files."""
    total = sum(placed.nbytes for file in files for placed in file.tensors)
    places: Mapping[str, str] = {placed.spec.name: file.name for file in files for placed in file.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _file(name: str, specs: Sequence[TensorSpec]) -> ShardFile:
    # The widest elements first: then each tensor is aligned, since the format allows no gaps.
    ordered = sorted(specs, key=lambda s: (-ITEMSIZE[s.dtype], s.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, places = 0, []
    for spec in ordered:
        nbytes = math.prod(spec.shape) * ITEMSIZE[spec.dtype]
        entries[spec.name] = {
            "dtype": SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + nbytes],
        }
        places.append((spec, at))
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    first = 8 + len(text)
    return ShardFile(
        name,
        len(text).to_bytes(8, "little") + text,
        tuple(Placed(spec, first + start) for spec, start in places),
        first + at,
    )
