"""What a checkpoint's files hold, from their headers alone: names, shapes and data types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.layout import TensorSpec

INDEX: Final = "model.safetensors.index.json"
LARGEST_HEADER: Final = 100 << 20  # bytes; the format's own limit

# safetensors' names for data types, and ours
_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
SAFETENSORS_NAMES: Final = {ours: theirs for theirs, ours in _DTYPES.items()}


def checkpoint_tensors(directory: str | Path) -> tuple[TensorSpec, ...]:
    """The tensors of all safetensors files of a checkpoint, in the order in which a loader meets them.

    With an index, those files that it names; every file must be there. No weights are read: some kilobytes
    of each file.

    Raises InvalidRequest naming everything that is wrong: a missing directory or file, a damaged header, a
    name that two files hold, a name that the index promises and its file does not hold.
    """
    path = Path(directory)
    if not path.is_dir():
        raise InvalidRequest(f"there is no directory {path}")
    index = checkpoint_index(path)
    files = sorted(set(index.values())) if index else sorted(p.name for p in path.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(f"{path} holds no safetensors files")
    found: dict[str, TensorSpec] = {}
    holder: dict[str, str] = {}
    wrong: list[str] = []
    for file in files:
        try:
            specs = _header(path / file)
        except InvalidRequest as error:
            wrong.append(error.message)
            continue
        for spec in specs:
            if index and index.get(spec.name, file) != file:
                continue  # the index says that another file's copy counts
            if spec.name in holder:
                wrong.append(f"{spec.name!r} is in {holder[spec.name]} and in {file}")
            found[spec.name], holder[spec.name] = spec, file
    if not wrong:
        wrong = [
            f"{name!r} should be in {file} and is not" for name, file in index.items() if name not in found
        ]
    if wrong:
        shown = "; ".join(wrong[:12]) + (f"; and {len(wrong) - 12} more" if len(wrong) > 12 else "")
        raise InvalidRequest(f"the checkpoint in {path} cannot be read: {shown}")
    return tuple(found.values())


def checkpoint_index(directory: str | Path) -> dict[str, str]:
    """Name to file, from the index; empty where there is none.

    Raises InvalidRequest for an index that is not one.
    """
    path = Path(directory) / INDEX
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())["weight_map"]
        index = {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path} is not an index of safetensors files: {error!r}") from error
    outside = [file for file in set(index.values()) if Path(file).name != file]
    if outside:
        raise InvalidRequest(f"{path} names files outside its directory: {', '.join(sorted(outside)[:4])}")
    return index


def has_weights(directory: str | Path) -> bool:
    """Whether a checkpoint's files are here, not only its description."""
    path = Path(directory)
    index = checkpoint_index(path)
    names = set(index.values()) if index else None
    return any(names is None or p.name in names for p in path.glob("*.safetensors"))


def _header(path: Path) -> list[TensorSpec]:
    """The tensors of one file, in the order of their data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, LARGEST_HEADER):
                raise InvalidRequest(f"{path.name} has no safetensors header ({size} bytes)")
            entries = json.loads(file.read(length))
    except OSError as error:
        raise InvalidRequest(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"the header of {path.name} is damaged: {error}") from error
    if not isinstance(entries, dict):
        raise InvalidRequest(f"the header of {path.name} is damaged: not a table")
    entries.pop("__metadata__", None)
    specs = [(_spec(path.name, name, entry), entry["data_offsets"]) for name, entry in entries.items()]
    last = max((stop for _, (_, stop) in specs), default=0)
    if size - 8 - length < last:
        raise InvalidRequest(f"{path.name} is cut short: {last - (size - 8 - length)} bytes are missing")
    return [spec for spec, _ in specs]


def _spec(file: str, name: str, entry: Mapping[str, Any]) -> TensorSpec:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, stop = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the header of {file} is damaged at {name!r}: {error!r}") from error
    known = _DTYPES.get(dtype)
    if known is None or known not in ITEMSIZE:
        raise InvalidRequest(f"{name!r} in {file} has data type {dtype}, which weightdepot does not carry")
    if min((0, *shape)) < 0 or math.prod(shape) * ITEMSIZE[known] != stop - start or start < 0:
        raise InvalidRequest(
            f"the header of {file} is damaged at {name!r}: {stop - start} bytes for {dtype} {list(shape)}"
        )
    return TensorSpec(name, shape, known)
