"""Two faults of vLLM 0.32 in mixtures of experts on CPU, gone round."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.platforms import current_platform


def mend() -> None:
    """Once in each worker, before it generates or updates."""
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for owner, name, make in (
        (UnquantizedFusedMoEMethod, "_setup_kernel", _packing_again),
        (CPUUnquantizedExperts, "apply", _of_present_experts),
    ):
        method = getattr(owner, name)
        if not hasattr(method, "_weightdepot"):
            mended = functools.wraps(method)(make(method))
            setattr(mended, "_weightdepot", True)  # noqa: B010  a function's attribute
            setattr(owner, name, mended)


def _packing_again(method: Any) -> Any:
    """`_setup_kernel` packs the experts' weights at the first load only: after a reload the kernels would
    read unpacked weights as if they were packed."""

    def _setup_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        first = self.moe_kernel is None
        if first:
            method(self, *args, **kwargs)
            return
        experts = self.moe_kernel.fused_experts
        pack, packed = experts.process_weights_after_loading, []

        def noted(layer: torch.nn.Module) -> None:
            packed.append(layer)
            pack(layer)

        experts.process_weights_after_loading = noted
        try:
            method(self, *args, **kwargs)
        finally:
            del experts.process_weights_after_loading
        if not packed:  # a vLLM that does it itself is not doubled
            pack(kwargs["layer"] if "layer" in kwargs else args[0])

    return _setup_kernel


def _of_present_experts(method: Any) -> Any:
    """`apply` takes the ids of all experts for rows of the weights that this rank has, which crashes under
    expert parallelism. Ids become rows; experts of other ranks get the weight 0 (those ranks add theirs)."""

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if expert_map is not None:
            rows = expert_map.to(topk_ids.device)[topk_ids.long()]
            topk_weights = torch.where(rows < 0, 0.0, topk_weights).to(topk_weights.dtype)
            topk_ids = rows.clamp(min=0).to(topk_ids.dtype)
            expert_map = None
        method(
            self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
            expert_map, *args, **kwargs,
        )  # fmt: skip

    return apply
