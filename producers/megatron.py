"""Weights of Megatron-core's GPT models, in the names and forms of the checkpoint.

`model.sharded_state_dict()` says where each local tensor lies in a global one of Megatron's own form: layers
(and experts) stacked in leading axes, q, k and v interleaved by query group, gate above up, the vocabulary
padded. A table (`MEGATRON_NAMES`) says where the checkpoint's tensors lie in those. Both are layouts, and
composed they give this rank's: tensor, pipeline, expert and data parallelism need no code of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightdepot.producers.megatron_names import MEGATRON_NAMES, Names, Rule
from weightdepot.store.composing import compose
from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.geometry import Box, contiguous_strides, extent
from weightdepot.store.layout import Layout, LayoutBuilder
from weightdepot.store.weights import Mapped

_NUMBERED_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.*)$")

# Settings under which Megatron's weights are others than the table says: refused, and not published wrongly.
_UNKNOWN_FORMS: Mapping[str, str] = {
    "attention_output_gate": "linear_qkv holds gates beside the queries",
    "layernorm_zero_centered_gamma": "norms hold their weight minus one",
    "moe_mlp_glu_interleave_size": "gate and up of experts are interleaved in blocks",
    "moe_shared_expert_glu_interleave_size": "gate and up of shared experts are interleaved in blocks",
}


@dataclass(frozen=True)
class _Held:
    """A piece of one of Megatron's global tensors, and the parameter in whose memory it lies."""

    key: str
    buffer: str
    owner: torch.Tensor  # the parameter
    local: torch.Tensor  # a view of it
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    leading: int  # axes of the global tensor that the local one has not: layers, experts


def megatron_weights(
    model: nn.Module | Sequence[nn.Module], *, vocab_size: int, names: str | Names
) -> Mapped:
    """The weights of this rank's part of a Megatron-core `GPTModel`, in checkpoint coordinates.

    model: the model, wrapped (DDP, Float16Module) or not; a list of chunks where the pipeline is virtual.
    vocab_size: of the checkpoint, without the rows that Megatron adds. names: a family in `MEGATRON_NAMES`
    (`llama`, `mistral`, `qwen2`, `qwen2_moe`, `qwen3`, `qwen3_moe`, `mixtral`), or a table of one's own.

    All ranks publish, those of data parallelism too: what several hold is stored and sent once. With tied
    embeddings the checkpoint has no `lm_head.weight`.

    Raises InvalidRequest for an unknown family or a model without `sharded_state_dict`, LayoutError naming
    every key that has no name, every parameter that Megatron's own export leaves out, and every tensor whose
    form is not what the table takes it for.
    """
    table = _table(names)
    chunks = [_unwrapped(m) for m in ([model] if isinstance(model, nn.Module) else model)]
    if not chunks or vocab_size < 1:
        raise InvalidRequest("a Megatron model has at least one chunk, and a vocabulary of at least one")
    prefixes = [f"{i}." if len(chunks) > 1 else "" for i in range(len(chunks))]
    held: list[_Held] = []
    faults: list[LayoutFault] = []
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        found, missing = _held(chunk, prefix)
        held += found
        faults += missing
    faults += _settings(chunks[0])
    full, unnamed = _checkpoint(held, table, _Form.of(chunks[0].config, vocab_size))
    if faults or unnamed:
        raise LayoutError(
            "this Megatron model cannot be published so: extend the table of names, or the export",
            [*unnamed, *faults],
        )
    layout = compose(full, _shards(held))

    def live() -> dict[str, torch.Tensor]:
        return {
            prefix + name: tensor.detach()
            for prefix, chunk in zip(prefixes, chunks, strict=True)
            for name, tensor in _tensors(chunk).items()
        }

    return Mapped(layout, live)


def _table(names: str | Names) -> Names:
    if not isinstance(names, str):
        return names
    if names not in MEGATRON_NAMES:
        raise InvalidRequest(
            f"no table of names for {names!r}: there are {', '.join(sorted(MEGATRON_NAMES))}; "
            f"a table of your own may be given"
        )
    return MEGATRON_NAMES[names]


def _unwrapped(module: nn.Module) -> Any:
    """The model inside Megatron's wrappers."""
    inner: Any = module
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    if not hasattr(inner, "sharded_state_dict") or not hasattr(inner, "config"):
        raise InvalidRequest(
            f"{type(inner).__name__} is no Megatron-core model: it has no sharded_state_dict"
        )
    return inner


def _tensors(chunk: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, shared ones once."""
    return {**dict(chunk.named_buffers()), **dict(chunk.named_parameters())}


def _held(chunk: Any, prefix: str) -> tuple[list[_Held], list[LayoutFault]]:
    """What Megatron exports of this chunk, each piece in the memory of its parameter."""
    held: list[_Held] = []
    faults: list[LayoutFault] = []
    owners = _Owners(_tensors(chunk))
    for shard in _exported(chunk.sharded_state_dict()):
        owner = owners.of(shard.data)
        if owner is None:
            faults.append(
                LayoutFault(shard.key, "is exported as a copy of a parameter, or in a form of its own")
            )
            continue
        held.append(
            _Held(
                key=shard.key,
                buffer=prefix + owner,
                owner=owners.tensors[owner].detach(),
                local=shard.data.detach(),
                global_shape=tuple(shard.global_shape),
                global_offset=tuple(shard.global_offset),
                leading=int(shard.prepend_axis_num),
            )
        )
    used = {h.buffer for h in held}
    faults += [
        LayoutFault(name, "is a parameter that the model's sharded_state_dict leaves out")
        for name, _ in chunk.named_parameters()
        if prefix + name not in used and not any(f.tensor == name for f in faults)
    ]
    return held, faults


def _exported(state: Any) -> Iterator[Any]:
    """The sharded tensors, factories taken apart; objects (extra state) are no weights."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in state.values() if isinstance(state, Mapping) else state:
        if isinstance(value, (Mapping, list, tuple)):
            yield from _exported(value)
        elif isinstance(value, ShardedTensorFactory):
            yield from _exported(_as_parts(value.build()))
        elif isinstance(value, ShardedTensor):
            yield value


def _as_parts(built: Any) -> Any:
    return built if isinstance(built, (Mapping, list, tuple)) else [built]


class _Owners:
    """Finds the parameter or buffer in whose memory a tensor lies. Many may share one allocation."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._by_storage: dict[int, list[tuple[int, int, torch.dtype, str]]] = {}
        self.tensors = tensors
        for name, tensor in tensors.items():
            if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.numel():
                continue  # a subclass (quantized, DTensor) has no elements of its own at its address
            first = int(tensor.storage_offset())
            last = first + extent(tensor.shape, tensor.stride())
            place = (first, last, tensor.dtype, name)
            self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(place)

    def of(self, view: torch.Tensor) -> str | None:
        if type(view) not in (torch.Tensor, nn.Parameter):
            return None
        first = view.storage_offset()
        last = first + extent(view.shape, view.stride())
        for start, stop, dtype, name in self._by_storage.get(view.untyped_storage()._cdata, ()):
            if start <= first and last <= stop and dtype == view.dtype:
                return name
        return None


def _settings(chunk: Any) -> list[LayoutFault]:
    return [
        LayoutFault(setting, f"{why}, which is not supported")
        for setting, why in _UNKNOWN_FORMS.items()
        if getattr(chunk.config, setting, None)
    ]


def _shards(held: Iterable[_Held]) -> Layout:
    """Megatron's global tensors in this rank's parameters."""
    builder = LayoutBuilder()
    for h in held:
        builder.tensor(h.key, h.global_shape, dtype_name(h.local.dtype))
        owner = h.owner
        builder.buffer(h.buffer, owner.shape, owner.stride(), dtype_name(owner.dtype))
        box = Box(h.global_offset, (1,) * h.leading + tuple(h.local.shape))
        strides = (0,) * h.leading + tuple(h.local.stride())
        start = int(h.local.storage_offset() - owner.storage_offset())
        builder.place(h.key, box, h.buffer, start, strides)
    return builder.build()


@dataclass(frozen=True)
class _Form:
    """What cuts the checkpoint's tensors out of Megatron's."""

    vocab_size: int
    heads: int
    groups: int
    head_size: int
    gated: bool

    @classmethod
    def of(cls, config: Any, vocab_size: int) -> _Form:
        return cls(
            vocab_size,
            heads=int(config.num_attention_heads),
            groups=int(config.num_query_groups or config.num_attention_heads),
            head_size=int(config.kv_channels),
            gated=bool(config.gated_linear_unit),
        )

    def rows(self, rule: Rule, size: int) -> list[list[tuple[int, int, int]]]:
        """For each of the rule's tensors: runs of rows (first row there, first row here, how many).

        Raises ValueError with the reason for a first dimension of another `size` than the rule takes.
        """
        if rule.kind == "same":
            return [[(0, 0, size)]]
        if rule.kind == "vocabulary":
            if self.vocab_size > size:
                raise ValueError(f"has {size} rows, fewer than the vocabulary of {self.vocab_size}")
            return [[(0, 0, self.vocab_size)]]
        if rule.kind == "gate_up":
            if not self.gated or size % 2:
                raise ValueError(f"has {size} rows that are no gate and up projection (gated_linear_unit)")
            return [[(0, 0, size // 2)], [(0, size // 2, size // 2)]]
        queries, key = self.heads // self.groups * self.head_size, self.head_size
        group = queries + 2 * key
        if size != self.groups * group:
            raise ValueError(
                f"has {size} rows, not {self.groups} query groups of {group} ({self.heads} heads of {key})"
            )
        return [
            [(g * n, g * group + start, n) for g in range(self.groups)]
            for start, n in ((0, queries), (queries, key), (queries + key, key))
        ]


def _checkpoint(held: Iterable[_Held], table: Names, form: _Form) -> tuple[Layout, list[LayoutFault]]:
    """The checkpoint's tensors in Megatron's global ones, as far as this rank holds some of them."""
    builder = LayoutBuilder()
    faults: dict[str, LayoutFault] = {}  # one for each key, not for each layer
    done: set[tuple[str, tuple[int, ...]]] = set()
    origin: dict[str, str] = {}  # checkpoint name -> the key that it was cut out of
    for h in held:
        index = h.global_offset[: h.leading]
        key, layer, expert = _located(h.key, index)
        rule = table.get(key)
        if rule is None:
            faults.setdefault(key, LayoutFault(key, "has no name in the checkpoint"))
            continue
        if rule.kind == "skip" or (h.key, index) in done:
            continue
        done.add((h.key, index))
        shape, dtype = h.global_shape[h.leading :], dtype_name(h.local.dtype)
        steps = contiguous_strides(h.global_shape)
        base = sum(i * s for i, s in zip(index, steps, strict=False))
        steps = steps[h.leading :]
        builder.buffer(h.key, h.global_shape, contiguous_strides(h.global_shape), dtype)
        try:
            runs = form.rows(rule, shape[0] if shape else 1)
            named = [_named(template, layer, expert) for template in rule.names]
        except ValueError as error:
            faults.setdefault(key, LayoutFault(key, str(error)))
            continue
        for name, rows in zip(named, runs, strict=True):
            if origin.setdefault(name, h.key) != h.key:
                fault = LayoutFault(key, f"is {name!r} by the table, and so is {origin[name]!r}")
                faults.setdefault(key, fault)
                continue
            if not shape:
                builder.tensor(name, shape, dtype)
                builder.place(name, Box((), ()), h.key, base, ())
                continue
            builder.tensor(name, (sum(n for *_, n in rows), *shape[1:]), dtype)
            for there, here, n in rows:
                box = Box((there, *(0,) * (len(shape) - 1)), (n, *shape[1:]))
                builder.place(name, box, h.key, base + here * steps[0], steps)
    return builder.build(), list(faults.values())


def _located(key: str, index: tuple[int, ...]) -> tuple[str, int | None, int | None]:
    """The key without a layer's number, the layer, and the expert: numbers are leading axes, but a layer's
    is part of the key where layers differ from each other."""
    rest = list(index)
    layer: int | None = None
    numbered = _NUMBERED_LAYER.match(key)
    if numbered:
        key, layer = f"{numbered[1]}.{numbered[3]}", int(numbered[2])
    elif rest:
        layer = rest.pop(0)
    return key, layer, rest.pop(0) if rest else None


def _named(template: str, layer: int | None, expert: int | None) -> str:
    for what, value in (("layer", layer), ("expert", expert)):
        if (value is None) is (f"{{{what}}}" in template):
            does = "is not of one" if value is None else "is of one"
            raise ValueError(f"{does} {what}, other than its name {template!r} says")
    return template.format(layer=layer, expert=expert)
