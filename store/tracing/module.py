"""Tracing a module's own loader, and leaving the module as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn

from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing.recording import Loading, LoadWeights
from weightdepot.store.tracing.report import Trace
from weightdepot.store.tracing.trace import OnFault, trace_loading

T = TypeVar("T")


def trace_module_load(
    module: nn.Module,
    tensors: Sequence[TensorSpec],
    *,
    load_weights: LoadWeights | None = None,
    optional: Collection[str] = (),
    on_fault: OnFault = "raise",
    whole: bool = True,
) -> Trace:
    """`trace_load` for a module: its parameters must be filled, its buffers may be.

    `load_weights` is `module.load_weights` where not given. The module may be live or on meta. The same
    Parameter objects, with the same data, are in place afterwards, even if the loader puts others there.
    What else the loader sets on the module in Python stays: trace a twin on meta where that matters.

    Raises what `trace_load` raises, and InvalidRequest for a module without a loader.
    """
    loader = load_weights or getattr(module, "load_weights", None)
    if not callable(loader):
        raise InvalidRequest(f"{type(module).__name__} has no load_weights; give one")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))

    def after() -> Mapping[str, Tensor]:
        return {
            **dict(module.named_buffers(remove_duplicate=False)),
            **dict(module.named_parameters(remove_duplicate=False)),
        }

    made: dict[str, None] = {}

    def noticing(weights: Iterable[tuple[str, Tensor]]) -> object:
        loaded = loader(weights)
        made.update((name, None) for name, _ in module.named_parameters() if name not in parameters)
        return loaded

    loading = Loading(noticing, tensors, parameters, buffers, after, lambda: _kept(module))
    trace = trace_loading(loading, optional, on_fault, whole)
    if made and on_fault == "raise":
        raise LayoutError(
            "the loader makes parameters that the module does not have yet",
            [
                LayoutFault(name, "is made by the loader: load any weights once, then give the module")
                for name in made
            ],
        )
    return trace


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Puts back which Parameter and buffer objects each submodule holds, and under which names."""
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    try:
        yield
    finally:
        for m, parameters, buffers in before:
            _restore(m._parameters, parameters)
            _restore(m._buffers, buffers)


def _restore(held: MutableMapping[str, T], kept: dict[str, T]) -> None:
    if held.keys() != kept.keys() or any(held[name] is not kept[name] for name in kept):
        held.clear()
        held.update(kept)
