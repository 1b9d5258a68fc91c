"""The data types that cross the wire: torch's names without `torch.`, and their sizes in bytes."""

from __future__ import annotations

import torch

_NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)  # fmt: skip

# older torch releases lack the newest ones
_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
_NAME_OF: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}
ITEMSIZE: dict[str, int] = {name: dtype.itemsize for name, dtype in _BY_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Raises ValueError for a type that no layout carries (quantized and sub-byte types of old torch)."""
    try:
        return _NAME_OF[dtype]
    except KeyError:
        raise ValueError(f"{dtype} is not a data type that weightdepot carries") from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of that name. Raises ValueError for an unknown one."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"{name!r} is not a data type that weightdepot carries") from None
