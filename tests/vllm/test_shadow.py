"""Shadows: any rank in one process, from config.json alone, and nothing global is left changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

from weightdepot.consumers.hf import tensors_of_config
from weightdepot.consumers.vllm import groups
from weightdepot.consumers.vllm.groups import rank_groups
from weightdepot.consumers.vllm.offline import trace_model, trace_ranks
from weightdepot.consumers.vllm.shadow import Parallel, engine_config, shadow, shadow_of
from weightdepot.store.checkpoint import checkpoint_tensors
from weightdepot.store.errors import InvalidRequest

from .filling import both_ways
from .zoo import make


def _globals() -> tuple[Any, ...]:
    names = [n for n in vars(parallel_state) if n.startswith("_") and n.isupper()]
    return (
        {n: getattr(parallel_state, n) for n in names if n not in ("_groups",)},
        dist.is_initialized(),
        dist.new_group,
        parallel_state.in_the_same_node_as,
        get_current_vllm_config_or_none(),
        dict(rotary_embedding._ROPE_DICT),
        ExpertMapManager.__init__,
        torch.get_default_dtype(),
        torch.get_default_device(),
    )


def test_config_json_suffices_and_gives_the_layout_that_the_files_give(
    tmp_path: Path, model_of: Callable[[str], Path]
) -> None:
    make("qwen3_moe", tmp_path, weights=False)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    files = checkpoint_tensors(model_of("qwen3_moe"))
    described = {t.name: t for t in tensors_of_config(tmp_path)}
    spread = Parallel(2, expert=True)
    alone = dict(trace_ranks(tmp_path, [described[t.name] for t in files], spread))
    assert alone.keys() == {0, 1}
    for rank, trace in trace_ranks(model_of("qwen3_moe"), files, spread):
        assert alone[rank].layout == trace.layout
        assert trace.faults == ()
    assert alone[0].layout != alone[1].layout


def test_a_shadow_takes_no_memory_and_knows_its_experts(model_of: Callable[[str], Path]) -> None:
    with shadow(model_of("qwen3_moe"), 1, Parallel(2, expert=True)) as module:
        assert {p.device.type for p in module.parameters()} == {"meta"}
        tables = [b.tolist() for n, b in module.named_buffers() if n.endswith("_expert_map")]
    assert tables == [[-1, -1, -1, 0, 1, 2]] * 2


def test_a_constructor_that_reads_values_gets_its_shadow_on_cpu(model_of: Callable[[str], Path]) -> None:
    with shadow(model_of("bloom")) as module:
        assert {p.device.type for p in module.parameters()} == {"cpu"}
    with (
        pytest.raises(InvalidRequest, match=r"vLLM cannot build .* meta"),
        shadow(model_of("bloom"), device="meta"),
    ):
        pass


def test_nothing_global_stays_changed(config_of: Callable[..., Any]) -> None:
    config = config_of("qwen3_moe", 2, True)
    before = _globals()
    with rank_groups(config, 1):
        assert parallel_state.get_tensor_model_parallel_rank() == 1
        assert parallel_state.get_ep_group().world_size == 2
        shadow_of(config)
        assert dict(rotary_embedding._ROPE_DICT) == before[5]
    assert _globals() == before
    assert config.compilation_config.static_forward_context == {}
    with pytest.raises(ZeroDivisionError), rank_groups(config, 0):
        raise ZeroDivisionError
    assert _globals() == before


def test_groups_that_fail_to_come_up_leave_nothing_behind(config_of: Callable[..., Any]) -> None:
    before = _globals()
    with (
        patch.object(groups, "_COMMUNICATOR", "no.such.Communicator"),
        pytest.raises(ModuleNotFoundError),
        rank_groups(config_of("llama", 2, False), 0),
    ):
        pass
    assert _globals() == before


def test_inside_a_worker_the_twin_leaves_the_live_model_alone(config_of: Callable[..., Any]) -> None:
    """As in an engine: the groups are the worker's, and a model of the same config is live."""
    config = config_of("gemma2", 1, False)
    with rank_groups(config, 0):
        with set_current_vllm_config(config):
            from vllm.model_executor.model_loader.utils import initialize_model

            live = initialize_model(config)
        context = dict(config.compilation_config.static_forward_context)
        assert context  # attention layers are registered, and would be twice
        ropes = dict(rotary_embedding._ROPE_DICT)
        bits = {n: p.detach().clone() for n, p in live.named_parameters()}
        twin = shadow_of()
        trace = trace_model(twin, checkpoint_tensors(config.model_config.model))
        assert config.compilation_config.static_forward_context == context
        assert dict(rotary_embedding._ROPE_DICT) == ropes
        assert {n: tuple(p.shape) for n, p in live.named_parameters()} == {
            n: tuple(p.shape) for n, p in twin.named_parameters()
        }
        assert all(
            p.device.type == "cpu" and torch.equal(p.view(torch.int16), bits[n].view(torch.int16))
            for n, p in live.named_parameters()
        )
        assert {b.name for b in trace.layout.buffers} == bits.keys()
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()


def test_each_stage_of_a_pipeline_loads_its_own_layers(model_of: Callable[[str], Path]) -> None:
    tensors = checkpoint_tensors(model_of("qwen3"))
    first, last = (t for _, t in trace_ranks(model_of("qwen3"), tensors, Parallel(pipeline=2)))
    assert first.faults == last.faults == ()
    assert "lm_head.weight" in first.unused
    assert "model.embed_tokens.weight" in last.unused
    assert not set(first.unused) & set(last.unused)


def test_ranks_and_models_that_do_not_exist_are_refused_by_name(
    tmp_path: Path, config_of: Callable[..., Any], model_of: Callable[[str], Path]
) -> None:
    with (
        pytest.raises(InvalidRequest, match="no rank 2 among 2"),
        rank_groups(config_of("llama", 2, False), 2),
    ):
        pass
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        engine_config(tmp_path)
    with pytest.raises(
        InvalidRequest, match=r"(?s)does not serve .* \(tp 3\): Total number of attention heads"
    ):
        engine_config(model_of("llama"), Parallel(3))


def test_a_process_that_has_groups_is_told_what_to_do(config_of: Callable[..., Any]) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        with (
            pytest.raises(InvalidRequest, match="shadow_of"),
            rank_groups(config_of("llama", 1, False), 0),
        ):
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_fp8_weights_and_their_scales_pass_through(tmp_path: Path, model_of: Callable[[str], Path]) -> None:
    """Block-quantized, as published; on machines too that have no kernel to run it."""
    config = json.loads((model_of("qwen3_moe") / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": [f"model.layers.{i}.mlp.gate" for i in range(2)],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights, generator = {}, torch.Generator().manual_seed(3)
    for name, tensor in load_file(model_of("qwen3_moe") / "model.safetensors").items():
        if tensor.dim() == 2 and "proj" in name:
            blocks = [-(-n // 16) for n in tensor.shape]
            weights[name] = tensor.to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator)
        else:
            weights[name] = tensor
    save_file(weights, tmp_path / "model.safetensors")
    filled = both_ways(engine_config(tmp_path, Parallel(2)), 1)
    assert filled.trace.faults == ()
    assert filled.different == ()
    dtypes = {b.dtype for b in filled.trace.layout.buffers}
    assert {"float8_e4m3fn", "float32", "bfloat16"} <= dtypes
    assert filled.trace.unused == ()
    # which vLLM gives a value itself
    left = {x.parameter.rpartition(".")[2] for x in filled.trace.left}
    assert left == {"q_scale", "k_scale", "v_scale", "prob_scale"}
