"""A model filled by weightdepot is, bit by bit, the one that SGLang's own loader fills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weightdepot.consumers.sglang.offline import trace_ranks
from weightdepot.consumers.sglang.shadow import engine_arguments, shadow
from weightdepot.store.checkpoint import checkpoint_tensors
from weightdepot.store.errors import InvalidRequest, LayoutError
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import trace_module_load

from ..filling import deliver
from ..vllm.zoo import make, spreads
from . import filling
from .architectures import DOCUMENT, PROMISED
from .filling import both_ways

CASES = [
    pytest.param(name, tensor, expert, rank, id=f"{name}-tp{tensor}{'-ep' if expert else ''}-rank{rank}")
    for name in PROMISED
    for tensor, expert, rank in spreads(name)
]


@pytest.mark.parametrize(("name", "tensor", "expert", "rank"), CASES)
def test_every_parameter_is_bit_equal(
    model_of: Callable[[str], Path], name: str, tensor: int, expert: bool, rank: int
) -> None:
    filled = both_ways(engine_arguments(model_of(name), tensor, tensor if expert else 1), rank)
    assert filled.trace.faults == ()
    assert filled.different == ()
    assert filled.trace.left == ()
    assert set(filled.trace.tiers.values()) == {"traced"}
    # with experts shared out whole, those of the other rank are not needed here; else everything is
    assert all(expert and ".experts." in n for n in filled.trace.unused)
    assert bool(filled.trace.unused) == expert


def test_a_wrong_tensor_is_noticed(model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of the test above can fail."""
    a, b = (f"model.layers.{i}.self_attn.v_proj.weight" for i in (0, 1))

    def swapped(weights: dict[str, torch.Tensor], *rest: Any) -> None:
        deliver({**weights, a: weights[b]}, *rest)

    monkeypatch.setattr(filling, "deliver", swapped)
    filled = both_ways(engine_arguments(model_of("llama"), 2), 1)
    assert filled.different == ("model.layers.0.self_attn.qkv_proj.weight",)


def test_a_rank_needs_a_config_and_no_weights(tmp_path: Path, model_of: Callable[[str], Path]) -> None:
    directory = make("qwen3_moe", tmp_path, weights=False)
    tensors = checkpoint_tensors(model_of("qwen3_moe"))
    traces = dict(trace_ranks(engine_arguments(directory, 2), tensors))
    assert list(traces) == [0, 1]
    assert all(not trace.faults for trace in traces.values())
    assert traces[0].layout.digest != traces[1].layout.digest


def test_a_shadow_takes_no_memory_and_leaves_sglang_as_it_was(model_of: Callable[[str], Path]) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.layers.rotary_embedding import factory

    before = runtime_context.get_context(), dict(factory._ROPE_DICT)
    with shadow(engine_arguments(model_of("glm4_moe"), 2), 1) as module:
        assert all(p.is_meta for p in module.parameters())
        assert runtime_context.get_parallel().tp_rank == 1
    assert (runtime_context.get_context(), dict(factory._ROPE_DICT)) == before


def test_a_checkpoint_that_lacks_tensors_is_refused_by_name(model_of: Callable[[str], Path]) -> None:
    tensors = [t for t in checkpoint_tensors(model_of("llama")) if "layers.1.mlp.down_proj" not in t.name]
    with (
        shadow(engine_arguments(model_of("llama"))) as module,
        pytest.raises(LayoutError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"),
    ):
        trace_module_load(module, tensors)


def test_a_tensor_of_another_shape_is_refused_by_name(model_of: Callable[[str], Path]) -> None:
    tensors = [
        TensorSpec(t.name, (t.shape[0] + 1,), t.dtype) if t.name == "model.norm.weight" else t
        for t in checkpoint_tensors(model_of("llama"))
    ]
    with (
        shadow(engine_arguments(model_of("llama"))) as module,
        pytest.raises(LayoutError, match=r"model\.norm\.weight"),
    ):
        trace_module_load(module, tensors)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_engine_is_refused(model_of: Callable[[str], Path], rank: int) -> None:
    with (
        pytest.raises(InvalidRequest, match=f"no rank {rank} among 2"),
        shadow(engine_arguments(model_of("llama"), 2), rank),
    ):
        pass


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        engine_arguments(tmp_path)


def test_the_table_in_the_documentation_lists_every_architecture_that_is_promised() -> None:
    rows = {line.split("|")[1].strip() for line in DOCUMENT.read_text().splitlines() if line.startswith("|")}
    assert set(PROMISED) <= rows
