"""Putting staged weights into a live vLLM model: layer by layer, through vLLM's own processing.

For each layer: its parameters as they were before processing, in fresh memory; the staged elements; then
what vLLM does after loading (packing, quantization), and the result copied to where the kernels look. The
loader is not run, but for tensors that only it can carry out (`Whole`).

Layers are done one after the other, so that the additional memory is one layer, and a layer that fails leaves
the others whole, with the new or the old weights: the model as a whole is then torn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_size

from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.layout import BufferSpec, Layout

Staged = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Whole:
    """Checkpoint tensors that the loader computes with, so that it must run on them itself.

    parameters: the names of all that it writes when it is given `tensors`.
    tensors: of what is staged, the complete checkpoint tensors, by their names there.
    """

    parameters: frozenset[str] = frozenset()
    tensors: Callable[[Staged], Iterable[tuple[str, torch.Tensor]]] = field(default=lambda _: ())


@dataclass(frozen=True)
class _Layer:
    name: str
    module: nn.Module
    filled: tuple[tuple[str, str], ...]
    """Its own tensors that are filled: the name in the module, and in what is staged."""
    loaded: bool
    """Whether the loader itself must write some of them."""


class Applier:
    """Binds a traced layout to a live model. Raises LayoutError, naming each parameter, where they differ:
    what the layout has and the model does not, and what the model has and nothing would fill.

    aliases: tied parameters, and the name under which the layout has them.
    optional: parameters that the loader leaves alone (they keep their values).
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        layout: Layout,
        *,
        aliases: Mapping[str, str],
        left: Iterable[str] = (),
        whole: Whole | None = None,
    ) -> None:
        self._model, self._dtype, self._whole = model, dtype, whole or Whole()
        specs = {spec.name: spec for spec in layout.buffers}
        self._layers = _bind(model, specs, aliases, frozenset(left), self._whole)
        self._deferred = [m for m in model.modules() if is_deferred_attention_layer(m)]
        self._before: dict[int, Any] = {}

    @property
    def layers(self) -> Sequence[str]:
        """Those that an update writes, in the model's order."""
        return [layer.name for layer in self._layers]

    @torch.no_grad()
    def __call__(self, staged: Staged) -> None:
        """All layers. Under vLLM's current config. Raises LayoutError naming the layer that failed."""
        waiting = []
        for layer in self._layers:
            with _named(layer):
                self._fill(layer, staged)
                if layer.loaded:
                    waiting.append(layer)
                else:
                    self._process(layer)
        if waiting:
            self._load(waiting, staged)
        for module in self._deferred:
            module.process_weights_after_loading(self._dtype)  # type: ignore[operator]
        after: Any = getattr(self._model, "process_weights_after_loading", None)
        if callable(after):
            after()

    def _fill(self, layer: _Layer, staged: Staged) -> None:
        module = layer.module
        info = get_layerwise_info(module)
        if not info.can_load():  # else it failed half-way before, and what kernels use is remembered
            info.kernel_tensors = get_layer_params_buffers(module)
            info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
        restore_layer_on_meta(module, info)
        info.load_numel_total = get_layer_size(module)
        materialize_layer(module, info)
        for own, name in layer.filled:
            getattr(module, own).data.copy_(staged[name])

    def _process(self, layer: _Layer) -> None:
        module = layer.module
        info = get_layerwise_info(module)
        written = [own for own, _ in layer.filled if own in info.kernel_non_persistent_buffers]
        values = {own: getattr(module, own).clone() for own in written}
        _layerwise_process(module, info)
        for own, value in values.items():  # vLLM keeps the old values of these
            getattr(module, own).data.copy_(value)
        absent = [name for name, t in _own(module).items() if t.is_meta]
        if absent or info.can_load():
            raise RuntimeError(f"vLLM left {', '.join(absent) or 'it'} without data")

    def _load(self, layers: Sequence[_Layer], staged: Staged) -> None:
        """The tensors that only the loader can carry out, into parameters that have the others already."""
        names = ", ".join(layer.name for layer in layers)
        try:
            self._model.load_weights(self._whole.tensors(staged))  # type: ignore[operator]
        except Exception as error:
            raise LayoutError(
                "the loader failed on the tensors that it must load itself",
                [LayoutFault(names, f"{type(error).__name__}: {error}")],
            ) from error
        for layer in layers:
            with _named(layer):
                self._process(layer)


@contextlib.contextmanager
def _named(layer: _Layer) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise LayoutError(
            "vLLM could not take the new weights",
            [LayoutFault(layer.name, f"({type(layer.module).__name__}) {type(error).__name__}: {error}")],
        ) from error


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters, buffers = get_layer_params_buffers(module)
    return {**parameters, **buffers}


def _before_processing(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's own tensors as they are when a loader sees them (on meta, but for those that vLLM never
    moves, such as biases), and of those that are parameters."""
    parameters, buffers = get_layerwise_info(module).restore_metadata
    return {**_own(module), **parameters, **buffers}


def _bind(
    model: nn.Module,
    specs: Mapping[str, BufferSpec],
    aliases: Mapping[str, str],
    left: frozenset[str],
    whole: Whole,
) -> list[_Layer]:
    layers, faults, met = [], [], set()
    for prefix, module in model.named_modules():
        filled, loaded = [], False
        parameters = get_layerwise_info(module).restore_metadata[0]
        for own, tensor in _before_processing(module).items():
            full = f"{prefix}.{own}" if prefix else own
            name = aliases.get(full, full)
            met.add(name)
            if name in specs:
                filled.append((own, name))
                if fault := _differs(full, tensor, specs[name]):
                    faults.append(fault)
            elif full in whole.parameters:
                loaded = True
            elif own in parameters and full not in left and name not in left:
                faults.append(LayoutFault(full, "nothing fills it"))
            loaded = loaded or full in whole.parameters
        if not filled and not loaded:
            continue
        if is_deferred_attention_layer(module):
            faults.append(
                LayoutFault(
                    prefix,
                    f"has weights of its own ({', '.join(o for o, _ in filled)}): scales of a "
                    f"quantized KV cache cannot be updated yet",
                )
            )
        layers.append(_Layer(prefix, module, tuple(filled), loaded))
    faults += [LayoutFault(name, "is not in the live model") for name in specs if name not in met]
    if faults:
        raise LayoutError("the live model is not the one that was traced", faults)
    return layers


def _differs(name: str, tensor: torch.Tensor, spec: BufferSpec) -> LayoutFault | None:
    now = (tuple(tensor.shape), dtype_name(tensor.dtype))
    if now == (spec.shape, spec.dtype):
        return None
    return LayoutFault(
        name, f"is {now[1]} {list(now[0])} in the live model, {spec.dtype} {list(spec.shape)} where traced"
    )
