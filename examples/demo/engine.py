"""A rollout engine's model, one tensor-parallel rank of it: fused qkv and gate_up, padded vocabulary.

Its loader is written as vLLM writes them: parameters carry a `weight_loader`, stacked parameters are mapped
by name, each rank narrows to its own part. Nothing here knows weightdepot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from sizes import Size
from torch import nn

STACKED = (  # parameter, checkpoint name, shard
    (".qkv_proj", ".q_proj", "q"),
    (".qkv_proj", ".k_proj", "k"),
    (".qkv_proj", ".v_proj", "v"),
    (".gate_up_proj", ".gate_proj", 0),
    (".gate_up_proj", ".up_proj", 1),
)
VOCABULARY_PADDING = 64


def parameter(*shape: int, loader: Callable[..., None]) -> nn.Parameter:
    p = nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16), requires_grad=False)
    p.weight_loader = loader  # type: ignore[attr-defined]
    return p


class QKV(nn.Module):
    def __init__(self, size: Size, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.head_dim = rank, size.head_dim
        self.heads = size.heads // world
        self.kv_heads = max(size.kv_heads // world, 1)
        self.kv_replicas = max(world // size.kv_heads, 1)
        rows = (self.heads + 2 * self.kv_heads) * size.head_dim
        self.weight = parameter(rows, size.hidden, loader=self.load)

    def load(self, p: nn.Parameter, loaded: torch.Tensor, shard: str) -> None:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        offset, rows = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[shard]
        rank = self.rank if shard == "q" else self.rank // self.kv_replicas
        part = loaded.narrow(0, rank * rows, rows)
        target = p.data.narrow(0, offset, rows)
        if target.shape != part.shape:
            raise ValueError(f"{shard}: {tuple(part.shape)} does not fit {tuple(target.shape)}")
        target.copy_(part)


class GateUp(nn.Module):
    def __init__(self, size: Size, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.rows = rank, size.intermediate // world
        self.weight = parameter(2 * self.rows, size.hidden, loader=self.load)

    def load(self, p: nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
        p.data.narrow(0, shard * self.rows, self.rows).copy_(
            loaded.narrow(0, self.rank * self.rows, self.rows)
        )


class RowParallel(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.columns = rank, inputs // world
        self.weight = parameter(outputs, self.columns, loader=self.load)

    def load(self, p: nn.Parameter, loaded: torch.Tensor) -> None:
        p.data.copy_(loaded.narrow(1, self.rank * self.columns, self.columns))


class VocabParallel(nn.Module):
    """Rows padded to a multiple of VOCABULARY_PADDING times the ranks; the padding is zero."""

    def __init__(self, size: Size, rank: int, world: int) -> None:
        super().__init__()
        unit = VOCABULARY_PADDING * world
        self.rows = -(-size.vocab // unit) * unit // world
        self.first = rank * self.rows
        self.weight = parameter(self.rows, size.hidden, loader=self.load)

    def load(self, p: nn.Parameter, loaded: torch.Tensor) -> None:
        held = min(max(loaded.shape[0] - self.first, 0), self.rows)
        p.data[:held].copy_(loaded.narrow(0, self.first, held))
        p.data[held:].fill_(0)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = parameter(width, loader=lambda p, loaded: p.data.copy_(loaded))


class Layer(nn.Module):
    def __init__(self, size: Size, rank: int, world: int) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = QKV(size, rank, world)
        self.self_attn.o_proj = RowParallel(size.heads * size.head_dim, size.hidden, rank, world)
        self.self_attn.q_norm = Norm(size.head_dim)
        self.self_attn.k_norm = Norm(size.head_dim)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = GateUp(size, rank, world)
        self.mlp.down_proj = RowParallel(size.intermediate, size.hidden, rank, world)
        self.input_layernorm = Norm(size.hidden)
        self.post_attention_layernorm = Norm(size.hidden)


class FusedQwen3(nn.Module):
    def __init__(self, size: Size, rank: int, world: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallel(size, rank, world)
        self.model.layers = nn.ModuleList(Layer(size, rank, world) for _ in range(size.layers))
        self.model.norm = Norm(size.hidden)
        self.lm_head = VocabParallel(size, rank, world)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            for stacked, part, shard in STACKED:
                if part in name:
                    target = name.replace(part, stacked)
                    parameters[target].weight_loader(parameters[target], weight, shard)  # type: ignore[attr-defined]
                    break
            else:
                target = name
                parameters[target].weight_loader(parameters[target], weight)  # type: ignore[attr-defined]
            loaded.add(target)
        return loaded
