"""How long it takes, and how much memory, to find out what a loader does: one rank of a Qwen3-30B-A3B.

    python benchmarks/layout.py [--json] [--check] [--samples N]

18,867 checkpoint tensors, every expert on its own, into stacked experts and fused projections, tensor
parallel 4, as vLLM loads them; on meta, without weights. Beside it, in the same run, the bare loader on meta.
Each sample is a process of its own, with one thread; seconds are of CPU time, so that a busy machine does not
count; the median of 5.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from common import measure, options, report, say
from torch import Tensor, nn

from weightdepot.store.dtypes import torch_dtype
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import coverage, trace_load

LAYERS, EXPERTS, HIDDEN, INNER, HEADS, KV, DIM, VOCAB = 48, 128, 2048, 768, 32, 4, 128, 151_936
TP, RANK = 4, 3

Loader = Callable[[Iterable[tuple[str, Tensor]]], None]


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


def parameters() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB // TP, HIDDEN),
        "lm_head.weight": (VOCAB // TP, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "self_attn.qkv_proj.weight": ((HEADS + 2 * KV) * DIM // TP, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM // TP),
            layer + "self_attn.q_norm.weight": (DIM,),
            layer + "self_attn.k_norm.weight": (DIM,),
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "mlp.gate.weight": (EXPERTS, HIDDEN),
            layer + "mlp.experts.w13_weight": (EXPERTS, 2 * INNER // TP, HIDDEN),
            layer + "mlp.experts.w2_weight": (EXPERTS, HIDDEN, INNER // TP),
        }
    return {
        n: nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="meta"), requires_grad=False)
        for n, s in shapes.items()
    }


def load_shard(param: Tensor, w: Tensor) -> None:
    """Along the one dimension, if any, of which the parameter has a part."""
    for dim, size in enumerate(param.shape):
        if size != w.shape[dim]:
            w = w.narrow(dim, RANK * size, size)
    param.data.copy_(w)


def load_qkv(param: Tensor, w: Tensor, shard: str) -> None:
    q, kv = HEADS * DIM // TP, KV * DIM // TP
    offset, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[shard]
    param.data.narrow(0, offset, size).copy_(w.narrow(0, RANK * size, size))


def load_expert(param: Tensor, w: Tensor, shard: str, number: int) -> None:
    data = param.data[number]
    if shard == "w2":
        data.copy_(w.narrow(1, data.shape[1] * RANK, data.shape[1]))
    else:
        size = data.shape[0] // 2
        data.narrow(0, 0 if shard == "w1" else size, size).copy_(w.narrow(0, size * RANK, size))


FUSED = [(f"{x}_proj", x) for x in "qkv"]
# vLLM looks through these for every tensor of an expert, too
MAPPING = [
    ("experts.w2_" if name == "down_proj" else "experts.w13_", f"experts.{e}.{name}.", e, shard)
    for e in range(EXPERTS)
    for shard, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
]


def loader(params: Mapping[str, Tensor]) -> Loader:
    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, w in weights:
            for part, shard in FUSED:
                if part in name:
                    load_qkv(params[name.replace(part, "qkv_proj")], w, shard)
                    break
            else:
                for fused, part, number, shard in MAPPING:
                    if part in name:
                        load_expert(params[name.replace(part, fused)], w, shard, number)
                        break
                else:
                    load_shard(params[name], w)

    return load_weights


def trace(tensors: list[TensorSpec]) -> None:
    params = parameters()
    found = trace_load(loader(params), tensors, params)
    assert len(found.layout.table) == len(tensors), found.report()
    assert set(found.tiers.values()) == {"traced"}, found.report()
    assert not [*found.unused, *found.left, *coverage(found.layout)], found.report()


def bare(tensors: list[TensorSpec]) -> None:
    load = loader(parameters())
    with torch.no_grad():
        load((t.name, torch.empty(t.shape, dtype=torch_dtype(t.dtype), device="meta")) for t in tensors)


def _sample(work: Callable[[list[TensorSpec]], None], answer: Any) -> None:
    torch.set_num_threads(1)
    tensors = checkpoint()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    work(tensors)
    seconds = time.process_time() - start
    answer.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024))


def median(work: Callable[[list[TensorSpec]], None], samples: int) -> tuple[float, float]:
    """CPU seconds, and megabytes (of 2^20 bytes) that the process grew by."""
    context = multiprocessing.get_context("spawn")
    found = []
    for _ in range(samples):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_sample, args=(work, there))
        process.start()
        there.close()
        try:
            found.append(here.recv())
        except EOFError:
            raise SystemExit(f"a sample of {work.__name__} failed (see above)") from None
        finally:
            process.join()
    return statistics.median(s for s, _ in found), statistics.median(m for _, m in found)


def main() -> int:
    chosen = options(__doc__, samples=5)
    say("the bare loader")
    base_seconds, base_memory = median(bare, chosen.samples)
    say("tracing")
    seconds, memory = median(trace, chosen.samples)
    found = [
        measure("trace one rank of Qwen3-30B-A3B", seconds, "s", limit=3.0),
        measure("additional memory while tracing", memory, "MB", limit=500.0),
        measure("beside the bare loader, time", seconds, "s", baseline=base_seconds),
        measure("beside the bare loader, memory", memory, "MB", baseline=base_memory),
    ]
    return report(found, chosen)


if __name__ == "__main__":
    sys.exit(main())
