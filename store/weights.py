"""The layout of weights that already bear the checkpoint's names: plain tensors, DTensors, shards, modules.

A `DTensor`'s shape is the global one; its placements say which box of it this rank holds. No tracing is
needed for these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from weightdepot.store.dtypes import dtype_name, torch_dtype
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.geometry import Box
from weightdepot.store.layout import Layout, LayoutBuilder


@dataclass(frozen=True)
class Shard:
    """A piece of a checkpoint tensor held by this rank, stated by hand.

    local: the piece, of any strides. offset: its first element in the checkpoint tensor of shape
    `global_shape`. The piece must have as many dimensions as the checkpoint tensor.
    """

    local: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Mapped:
    """Weights whose layout is known already: traced from a loader, or made by an adapter.

    buffers: gives the tensors that the layout speaks of, as they are now, since frameworks may replace a
    parameter's storage between two calls.
    finish: called when a version's elements are in the buffers, before it counts as applied: for what no copy
    can do.
    """

    layout: Layout
    buffers: Callable[[], Mapping[str, torch.Tensor]]
    finish: Callable[[], None] = lambda: None


# Narrower floats mean something only with their scales: they are published as they are.
_CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Named = nn.Module | Mapping[str, "torch.Tensor | Shard"]
Weights = Named | Mapped


def published_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What weights held as `own` are published as, when `wanted` is asked for."""
    return wanted if wanted is not None and own in _CASTABLE else own


def stated_as(layout: Layout, dtype: torch.dtype) -> Layout:
    """The same layout with its floating-point tensors in another data type: elements are cast on the way."""
    tensors = tuple(
        replace(t, dtype=dtype_name(published_dtype(torch_dtype(t.dtype), dtype))) for t in layout.tensors
    )
    return replace(layout, tensors=tensors)


# what wrappers put into the names of parameters, and checkpoints never have
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_weights(weights: Named) -> dict[str, torch.Tensor | Shard]:
    """Name to tensor. Of a module: its parameters (tied ones once, under their first name) and its persistent
    buffers, without what `torch.compile` and checkpointing wrappers add to the names."""
    if not isinstance(weights, nn.Module):
        if not isinstance(weights, Mapping) or not weights:
            raise InvalidRequest("weights must be an nn.Module or a non-empty mapping of names to tensors")
        return dict(weights)
    _reshard(weights)
    found: dict[str, torch.Tensor | Shard] = {
        clean_name(name): p for name, p in weights.named_parameters(remove_duplicate=True)
    }
    for module_name, module in weights.named_modules(remove_duplicate=True):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[clean_name(f"{module_name}.{name}" if module_name else name)] = buffer
    if not found:
        raise InvalidRequest(f"{type(weights).__name__} has no parameters")
    return found


def _reshard(module: nn.Module) -> None:
    """FSDP2 leaves its outermost parameters gathered after a forward pass without a backward one (evaluation,
    log-probabilities). Resharding changes no values, and does nothing where they are sharded already."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@dataclass(frozen=True)
class _Local:
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    box: Box


def _of_dtensor(tensor: torch.distributed.tensor.DTensor) -> _Local:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(p.is_partial() for p in tensor.placements):
        raise ValueError(
            f"has placements {tensor.placements}: a partial sum is not a weight; reduce it first"
        )
    local = tensor.to_local()
    shape = tuple(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:  # this rank has no part in the mesh
        return _Local(local, shape, Box((0,) * len(shape), (0,) * len(shape)))
    local_shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(local_shape) != tuple(local.shape):
        raise ValueError(
            f"holds {list(local.shape)} where its placements {tensor.placements} say {local_shape}"
        )
    return _Local(local, shape, Box(tuple(offset), tuple(local_shape)))


def _local(weight: torch.Tensor | Shard) -> _Local:
    """Raises ValueError with the reason for a weight that has no box."""
    if isinstance(weight, Shard):
        box = Box(tuple(weight.offset), tuple(weight.local.shape))
        return _Local(weight.local, tuple(weight.global_shape), box)
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(weight, DTensor):
            return _of_dtensor(weight)
    if not isinstance(weight, torch.Tensor):
        raise ValueError(f"is a {type(weight).__name__}, not a tensor")
    if weight.layout != torch.strided:
        raise ValueError(f"has layout {weight.layout}; only strided tensors are carried")
    return _Local(weight, tuple(weight.shape), Box.whole(weight.shape))


def local_buffers(weights: Weights) -> dict[str, torch.Tensor]:
    """This rank's own tensors, by name, as they are now (a DTensor's local shard)."""
    if isinstance(weights, Mapped):
        return dict(weights.buffers())
    return {name: _local(w).tensor.detach() for name, w in named_weights(weights).items()}


def place_weight(
    builder: LayoutBuilder, name: str, weight: torch.Tensor | Shard, dtype: torch.dtype | None = None
) -> None:
    """Place what this rank holds of a weight, in a buffer of the same name.

    Raises ValueError with the reason for a weight that has no box.
    """
    held = _local(weight)
    own = held.tensor.dtype
    builder.tensor(name, held.global_shape, dtype_name(published_dtype(own, dtype)))
    builder.buffer(name, held.tensor.shape, held.tensor.stride(), dtype_name(own))
    builder.place(name, held.box, name, 0, held.tensor.stride())


def layout_of(weights: Weights, dtype: torch.dtype | None = None) -> Layout:
    """The layout of weights that bear the checkpoint's names, or that come with their layout.

    dtype: the checkpoint's, where it differs from that of the weights of 16 bits or more (they are cast).
    Raises LayoutError naming every weight that cannot be placed.
    """
    if isinstance(weights, Mapped):
        return weights.layout if dtype is None else stated_as(weights.layout, dtype)
    builder, faults = LayoutBuilder(), []
    for name, weight in named_weights(weights).items():
        try:
            place_weight(builder, name, weight, dtype)
        except ValueError as error:
            faults.append(LayoutFault(name, str(error)))
    if faults:
        raise LayoutError("these weights have no layout", faults)
    return builder.build()
