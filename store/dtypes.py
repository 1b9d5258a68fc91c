"""The data types that cross the wire: torch's names without `torch.`, and their sizes in bytes.

torch itself is imported when a tensor is at hand: the controller and the command line do without it, and
start in a fraction of the time.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4,
    "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip


@cache
def _by_name() -> dict[str, torch.dtype]:
    import torch

    # older torch releases lack the newest ones
    return {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}


@cache
def _names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _by_name().items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Raises ValueError for a type that no layout carries (quantized types of old torch)."""
    try:
        return _names()[dtype]
    except KeyError:
        raise ValueError(f"{dtype} is not a data type that weightdepot carries") from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of that name. Raises ValueError for an unknown one."""
    try:
        return _by_name()[name]
    except KeyError:
        raise ValueError(f"{name!r} is not a data type that weightdepot carries") from None
