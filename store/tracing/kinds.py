"""Kinds of operations, by name: what the tracer passes on, or refuses."""

from __future__ import annotations

from typing import Any, Final

import torch

# data types of weights; tensors of others (indices, masks) are made for real, so that loaders may count
REAL_DTYPES: Final = frozenset({torch.bool, torch.int16, torch.int32, torch.int64})

# change a tensor's geometry, not the data
_METADATA = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "squeeze_",
        "unsqueeze_",
        "t_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "as_strided_",
        "detach_",
        "set_",
    )
)
# views that their schema does not declare, and questions about metadata
_TRANSPARENT = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "_reshape_alias",
                 "is_pinned", "is_same_size", "_has_compatible_shallow_copy_type")
    if hasattr(torch.ops.aten, name)
)  # fmt: skip
# draw new values without looking at those that are there
OVERWRITES: Final = frozenset(
    ("normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "bernoulli_")
)
# operations that answer with a value, not with a tensor
ASKS: Final = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "allclose", "item"))


def is_view(func: Any) -> bool:
    """Whether an operation only makes another view of its argument, or only changes a tensor's geometry."""
    packet = func.overloadpacket
    if packet in _METADATA or packet in _TRANSPARENT:
        return True
    infos = [r.alias_info for r in func._schema.returns]
    return bool(infos) and all(i is not None and not i.is_write for i in infos)
