"""A rank of a Qwen3-30B-A3B, as vLLM would load it: traced in seconds, with next to no memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import coverage, trace_load

LAYERS, EXPERTS, HIDDEN, INNER, HEADS, KV, DIM, VOCAB = 48, 128, 2048, 768, 32, 4, 128, 151_936
TP, RANK = 4, 3


def checkpoint() -> list[TensorSpec]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": (KV * DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": (KV * DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            layer + "self_attn.q_norm.weight": (DIM,),
            layer + "self_attn.k_norm.weight": (DIM,),
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "mlp.gate.weight": (EXPERTS, HIDDEN),
        }
        for e in range(EXPERTS):
            expert = f"{layer}mlp.experts.{e}."
            shapes[expert + "gate_proj.weight"] = shapes[expert + "up_proj.weight"] = (INNER, HIDDEN)
            shapes[expert + "down_proj.weight"] = (HIDDEN, INNER)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return [TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()]


def rows(p: Any, w: Tensor) -> None:
    mine = w.narrow(0, RANK * p.shape[0], p.shape[0])
    assert p.shape == mine.shape
    p.data.copy_(mine)


def columns(p: Any, w: Tensor) -> None:
    p.data.copy_(w.narrow(1, RANK * p.shape[1], p.shape[1]))


def whole(p: Any, w: Tensor) -> None:
    assert p.size() == w.size()
    p.data.copy_(w)


def qkv(p: Any, w: Tensor, shard: str) -> None:
    q, kv = HEADS * DIM // TP, KV * DIM // TP
    offset, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[shard]
    p.data.narrow(0, offset, size).copy_(w.narrow(0, RANK * size, size))


def expert(p: Any, w: Tensor, shard: str, number: int) -> None:
    data = p.data[number]
    if shard == "w2":
        data.copy_(w.narrow(1, data.shape[1] * RANK, data.shape[1]))
    else:
        size = data.shape[0] // 2
        data.narrow(0, 0 if shard == "w1" else size, size).copy_(w.narrow(0, size * RANK, size))


def parameters() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def add(name: str, loader: Callable[..., None], *shape: int) -> None:
        p = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
        setattr(p, "weight_loader", loader)  # noqa: B010 - as frameworks do
        found[name] = p

    add("model.embed_tokens.weight", rows, VOCAB // TP, HIDDEN)
    add("lm_head.weight", rows, VOCAB // TP, HIDDEN)
    add("model.norm.weight", whole, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        add(layer + "self_attn.qkv_proj.weight", qkv, (HEADS + 2 * KV) * DIM // TP, HIDDEN)
        add(layer + "self_attn.o_proj.weight", columns, HIDDEN, HEADS * DIM // TP)
        add(layer + "self_attn.q_norm.weight", whole, DIM)
        add(layer + "self_attn.k_norm.weight", whole, DIM)
        add(layer + "input_layernorm.weight", whole, HIDDEN)
        add(layer + "post_attention_layernorm.weight", whole, HIDDEN)
        add(layer + "mlp.gate.weight", whole, EXPERTS, HIDDEN)
        add(layer + "mlp.experts.w13_weight", expert, EXPERTS, 2 * INNER // TP, HIDDEN)
        add(layer + "mlp.experts.w2_weight", expert, EXPERTS, HIDDEN, INNER // TP)
    return found


FUSED = [("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v")]
MAPPING = [
    ("experts.w2_" if name == "down_proj" else "experts.w13_", f"experts.{e}.{name}.", e, shard)
    for e in range(EXPERTS)
    for shard, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
]


def loader(params: dict[str, Any]) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, w in weights:
            for fused, part, shard in FUSED:
                if part in name:
                    p = params[name.replace(part, fused)]
                    p.weight_loader(p, w, shard)
                    break
            else:
                for fused, part, number, shard in MAPPING:
                    if part in name:
                        p = params[name.replace(part, fused)]
                        p.weight_loader(p, w, shard, number)
                        break
                else:
                    params[name].weight_loader(params[name], w)

    return load_weights


@pytest.mark.slow
def test_a_rank_of_qwen3_30b_a3b_is_traced_in_seconds(record_property: Callable[[str, object], None]) -> None:
    """18,867 tensors. 1.6 s and 60 MB on an idle core; the bounds leave room for a busy one."""
    tensors, params = checkpoint(), parameters()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    trace = trace_load(loader(params), tensors, params)
    seconds = time.process_time() - start
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    record_property("seconds", seconds)
    record_property("megabytes", megabytes)
    print(f"{len(tensors)} tensors in {seconds:.2f} s, {megabytes:.0f} MB\n{trace.report()}")
    assert len(trace.layout.table) == len(tensors)
    assert not trace.unused
    assert not trace.left
    assert not coverage(trace.layout)
    assert seconds < 15
    assert megabytes < 500
