"""Weights sharded by FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`): flat shards as boxes.

FSDP1 flattens the parameters of each wrapped module into one, pads it, and gives each rank a range of it.
What a rank holds of a parameter is therefore a flat range, which is a few boxes. Published is the shard that
the optimizer steps (in full precision, where mixed precision keeps a second one).

Read here, since there is no public way to it: `_handle`, and of its flat parameter `_param_infos`, `_shapes`,
`_strides`, `_shard_param_infos`, `_param_extensions` and `_local_shard`. Run with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.layout import LayoutBuilder
from weightdepot.store.weights import (
    Mapped,
    clean_name,
    local_buffers,
    named_weights,
    place_weight,
)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether some part of the module is wrapped by FSDP1."""
    return bool(_wrapped(module))


def fsdp1_weights(module: nn.Module) -> Mapped:
    """The weights of a module of which FSDP1 wraps all or parts, under the names they have without wrappers.

    Every strategy (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD), either `use_orig_params`, nested
    wrapping and ignored modules. Tied parameters are published once, under their first name, and buffers as
    every rank has them.

    The module is not gathered, neither here nor by a publish; a publish may come at any time outside
    `summon_full_params`, between forward and backward too.

    Raises InvalidRequest where nothing is wrapped, LayoutError naming every parameter that cannot be placed
    (flattened out of DTensors, or on meta).
    """
    handles = _wrapped(module)
    if not handles:
        raise InvalidRequest(
            f"no part of this {type(module).__name__} is wrapped by FullyShardedDataParallel"
        )
    modules = {id(m): name for name, m in module.named_modules()}
    builder, faults = LayoutBuilder(), []
    for name, handle in handles.items():
        shard = _shard(handle)
        builder.buffer(name, shard.shape, shard.stride(), dtype_name(shard.dtype))
        faults += _place(builder, name, handle, shard, modules)
    for name, weight in _others(module, handles).items():
        try:
            place_weight(builder, name, weight)
        except ValueError as error:
            faults.append(LayoutFault(name, str(error)))
    if faults:
        raise LayoutError("these FSDP1 weights have no layout", faults)

    def live() -> dict[str, torch.Tensor]:
        others = _others(module, handles)
        shards = {name: _shard(handle) for name, handle in handles.items()}
        return {**shards, **(local_buffers(others) if others else {})}

    return Mapped(builder.build(), live)


def _wrapped(module: nn.Module) -> dict[str, Any]:
    """The handles of the module's flat parameters, under names for their buffers."""
    if not torch.distributed.is_available():
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}
    for name, part in module.named_modules():
        handle = part._handle if isinstance(part, FullyShardedDataParallel) else None
        if handle is not None:  # None where all its parameters are wrapped further in
            found[f"{clean_name(name + '.') if name else ''}_flat_param"] = handle
    return found


def _shard(handle: Any) -> torch.Tensor:
    """What this rank has of the flat parameter, padding included, as the optimizer sees it."""
    flat = handle.flat_param
    sharded = handle.is_sharded(flat) and not handle._skipped_use_sharded_views
    if handle._use_orig_params and (sharded or not handle.uses_sharded_strategy):
        # parameters that were given other data (`p.data = ...`) are taken over, as the next forward would
        handle._writeback_orig_params()
    # not there before the first forward; until then the parameter is the shard
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard.detach()


def _place(
    builder: LayoutBuilder,
    buffer: str,
    handle: Any,
    shard: torch.Tensor,
    modules: Mapping[int, str],
) -> list[LayoutFault]:
    flat, faults = handle.flat_param, []
    stated = dtype_name(shard.dtype)
    for info, shape, stride, part, extension in zip(
        flat._param_infos,
        flat._shapes,
        flat._strides,
        flat._shard_param_infos,
        flat._param_extensions,
        strict=True,
    ):
        prefix = modules[id(info.module)]
        name = clean_name(f"{prefix}.{info.param_name}" if prefix else info.param_name)
        if extension is not None:
            faults.append(LayoutFault(name, "was flattened out of a DTensor: use FSDP2 for two dimensions"))
            continue
        if shard.is_meta:
            faults.append(LayoutFault(name, "is on meta: materialize it first"))
            continue
        builder.tensor(name, shape, stated)
        if part.in_shard:
            # flattened in the order of its memory, which need not be row-major (channels_last)
            order = sorted(range(len(shape)), key=lambda d: -stride[d])
            start, stop = part.intra_param_start_idx, part.intra_param_end_idx + 1
            builder.place_flat(name, start, stop, buffer, part.offset_in_shard, order)
    return faults


def _others(module: nn.Module, handles: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What no flat parameter holds: ignored parameters, and buffers."""
    managed: set[int] = set()
    for handle in handles.values():
        flat = handle.flat_param
        managed.add(id(flat))
        managed.update(map(id, flat._params or ()))
        managed.update(map(id, flat._shared_params or ()))
    found = named_weights(module)
    return {n: w for n, w in found.items() if isinstance(w, torch.Tensor) and id(w) not in managed}
