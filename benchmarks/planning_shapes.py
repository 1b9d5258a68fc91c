"""The layouts of Kimi-K2's shape: how its trainer's and rollouts' ranks hold its checkpoint, without weights.

Trainer: an expert's tensors by rows over `rows` ranks, the experts over the others; all the rest by rows over
every rank. Rollouts: engines alike, their experts over their ranks, attention over `tp` and replicated over
the others; what such an engine does not split (norms, low-rank projections, routers) whole on each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightdepot.store.geometry import Box, contiguous_strides
from weightdepot.store.layout import Layout, LayoutBuilder

HIDDEN, INNER, DENSE_INNER, VOCAB = 7168, 2048, 18_432, 163_840
HEADS, NOPE, ROPE, VALUE, QUERY_RANK, KV_RANK = 64, 128, 64, 128, 1536, 512
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    split: int | None  # the dimension that tensor parallel rollouts split; None: they hold it whole
    expert: int | None = None


@dataclass(frozen=True)
class Shape:
    """How large the model is, and on how many ranks. `engines` are alike."""

    layers: int = 61
    experts: int = 384
    trainers: int = 256
    rows: int = 8
    engine: int = 32
    tp: int = 8
    engines: int = 4

    def tensors(self) -> list[Tensor]:
        found = [
            Tensor("model.embed_tokens.weight", (VOCAB, HIDDEN), 0),
            Tensor("model.norm.weight", (HIDDEN,), None),
            Tensor("lm_head.weight", (VOCAB, HIDDEN), 0),
        ]
        for i in range(self.layers):
            at = f"model.layers.{i}."
            found += [
                Tensor(at + "input_layernorm.weight", (HIDDEN,), None),
                Tensor(at + "post_attention_layernorm.weight", (HIDDEN,), None),
                Tensor(at + "self_attn.q_a_proj.weight", (QUERY_RANK, HIDDEN), None),
                Tensor(at + "self_attn.q_a_layernorm.weight", (QUERY_RANK,), None),
                Tensor(at + "self_attn.q_b_proj.weight", (HEADS * (NOPE + ROPE), QUERY_RANK), 0),
                Tensor(at + "self_attn.kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, HIDDEN), None),
                Tensor(at + "self_attn.kv_a_layernorm.weight", (KV_RANK,), None),
                Tensor(at + "self_attn.kv_b_proj.weight", (HEADS * (NOPE + VALUE), KV_RANK), 0),
                Tensor(at + "self_attn.o_proj.weight", (HIDDEN, HEADS * VALUE), 1),
            ]
            if i == 0:
                found += _mlp(at + "mlp.", DENSE_INNER, None)
                continue
            found += [
                Tensor(at + "mlp.gate.weight", (self.experts, HIDDEN), None),
                Tensor(at + "mlp.gate.e_score_correction_bias", (self.experts,), None),
                *_mlp(at + "mlp.shared_experts.", INNER, None),
            ]
            for e in range(self.experts):
                found += _mlp(f"{at}mlp.experts.{e}.", INNER, e)
        return found

    def trainer(self, tensors: list[Tensor], rank: int) -> Layout:
        group, row = divmod(rank, self.rows)
        groups = self.trainers // self.rows
        builder = LayoutBuilder()
        for t in tensors:
            if t.expert is None:
                _part(builder, t, 0, rank, self.trainers)
            elif t.expert * groups // self.experts == group:
                _part(builder, t, 0, row, self.rows)
        return builder.build()

    def rollout(self, tensors: list[Tensor], rank: int) -> Layout:
        """Of rank `rank` of each engine."""
        builder = LayoutBuilder()
        for t in tensors:
            if t.expert is None:
                _part(builder, t, t.split or 0, rank % self.tp, self.tp if t.split is not None else 1)
            elif t.expert * self.engine // self.experts == rank:
                _part(builder, t, 0, 0, 1)
        return builder.build()


def _mlp(at: str, inner: int, expert: int | None) -> list[Tensor]:
    return [
        Tensor(at + "gate_proj.weight", (inner, HIDDEN), 0, expert),
        Tensor(at + "up_proj.weight", (inner, HIDDEN), 0, expert),
        Tensor(at + "down_proj.weight", (HIDDEN, inner), 1, expert),
    ]


def _part(builder: LayoutBuilder, tensor: Tensor, dim: int, part: int, parts: int) -> None:
    """Place part `part % parts` of the tensor, cut in `parts` along `dim`, in a buffer of its own."""
    part %= parts
    size = tensor.shape[dim]
    first, stop = size * part // parts, size * (part + 1) // parts
    if first == stop:
        return
    offset = tuple(first if d == dim else 0 for d in range(len(tensor.shape)))
    shape = tuple(stop - first if d == dim else n for d, n in enumerate(tensor.shape))
    builder.tensor(tensor.name, tensor.shape, DTYPE)
    builder.buffer(tensor.name, shape, contiguous_strides(shape), DTYPE)
    builder.place(tensor.name, Box(offset, shape), tensor.name, 0, contiguous_strides(shape))
