"""Weights partitioned by DeepSpeed's ZeRO-3: flat ranges as boxes.

ZeRO-3 flattens each parameter, pads it to a multiple of the ranks that share it, and gives each an equal
range, `ds_tensor`; the last ones end in padding. Parameters below a threshold stay gathered on every rank
("persistent"), and are partitioned all the same: the partition is what the optimizer steps.

Read of each parameter: `ds_tensor`, `ds_shape`, `ds_zero_partition_rank` and `ds_zero_partition_world_size`
(where an older release has none, they are asked of `ds_process_group`). DeepSpeed itself is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.layout import LayoutBuilder
from weightdepot.store.weights import Mapped, local_buffers, named_weights, place_weight


def is_zero3(module: nn.Module) -> bool:
    """Whether some parameter is partitioned by ZeRO-3."""
    return any(_is_partitioned(p) for p in module.parameters())


def zero3_weights(module: nn.Module) -> Mapped:
    """The weights of a model that ZeRO-3 has partitioned, under its own names.

    module: the model, or the engine that `deepspeed.initialize` returned.

    Nothing is gathered, neither here nor by a publish. Parameters that are not partitioned, and buffers, are
    published as every rank has them. Parameters offloaded to host memory are read there.

    Raises InvalidRequest where nothing is partitioned, LayoutError naming every parameter that cannot be
    placed (quantized, offloaded to a disk, experts of other ranks under the same name, partitioned in another
    way).
    """
    model = unwrapped_engine(module)
    if not is_zero3(model):
        raise InvalidRequest(f"no parameter of this {type(model).__name__} is partitioned by ZeRO-3")
    builder, faults = LayoutBuilder(), []
    for name, weight in named_weights(model).items():
        try:
            if _is_partitioned(weight):
                _place(builder, name, weight)
            else:
                place_weight(builder, name, weight)
        except ValueError as error:
            faults.append(LayoutFault(name, str(error)))
    if faults:
        raise LayoutError("these ZeRO-3 weights have no layout", faults)
    return Mapped(builder.build(), lambda: _live(model))


def unwrapped_engine(module: nn.Module) -> nn.Module:
    """The model inside a DeepSpeed engine; a model as it is."""
    inner = getattr(module, "module", None)
    is_engine = type(module).__module__.partition(".")[0] == "deepspeed" and isinstance(inner, nn.Module)
    return inner if is_engine and inner is not None else module


def _is_partitioned(weight: Any) -> bool:
    return isinstance(getattr(weight, "ds_tensor", None), torch.Tensor)


def _live(model: nn.Module) -> dict[str, torch.Tensor]:
    weights: Mapping[str, Any] = named_weights(model)
    found = {n: w.ds_tensor.detach() for n, w in weights.items() if _is_partitioned(w)}
    rest = {n: w for n, w in weights.items() if n not in found}
    return {**found, **(local_buffers(rest) if rest else {})}


def _place(builder: LayoutBuilder, name: str, weight: Any) -> None:
    """Raises ValueError with the reason for a partition that is no flat range of the parameter."""
    part: torch.Tensor = weight.ds_tensor
    shape, numel = tuple(weight.ds_shape), math.prod(weight.ds_shape)
    rank, world = _partition(weight)
    if hasattr(part, "ds_quant_scale"):
        raise ValueError("is quantized: publish a model without zero_quantized_nontrainable_weights")
    if getattr(getattr(part, "status", None), "name", "AVAILABLE") != "AVAILABLE":
        raise ValueError("is offloaded to a disk (nvme): use offload_param to cpu")
    if getattr(weight, "allreduce", True) is False:
        raise ValueError(
            "belongs to DeepSpeed's expert parallelism: other ranks have other experts by this name"
        )
    if part.dim() != 1 or not part.is_contiguous() or part.numel() * world < numel:
        raise ValueError(
            f"is partitioned in a way that is not known here: {list(part.shape)} on each of {world} ranks "
            f"for {list(shape)}"
        )
    start = min(rank * part.numel(), numel)
    stop = min(start + part.numel(), numel)
    builder.tensor(name, shape, dtype_name(part.dtype))
    builder.buffer(name, part.shape, part.stride(), dtype_name(part.dtype))
    builder.place_flat(name, start, stop, name, 0)


def _partition(weight: Any) -> tuple[int, int]:
    """This rank's place among those that share the parameter, and how many they are."""
    if hasattr(weight, "ds_zero_partition_rank"):
        return int(weight.ds_zero_partition_rank), int(weight.ds_zero_partition_world_size)
    group = getattr(weight, "ds_process_group", None)
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
