"""A live model of SGLang's as a consumer: traced on a twin, and written between SGLang's own begin and end of
an update.

Those two calls exist for engines whose parameters are written from outside, without a loader: the first
undoes what SGLang did to the parameters after loading (the layouts of kernels), the second does it again.
CUDA graphs go on using the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    _unsupported_derived_weight_cache_error,
)
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import get_parallel
from torch import nn

from weightdepot.consumers.consumer import Consumer
from weightdepot.consumers.hooks import Hook, nothing
from weightdepot.consumers.sglang import needs
from weightdepot.consumers.sglang.offline import trace_model
from weightdepot.consumers.sglang.shadow import shadow_of
from weightdepot.consumers.staging import Placing
from weightdepot.consumers.whole import given, with_whole
from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.layout import BufferSpec, Layout, TensorSpec
from weightdepot.store.progress import OnProgress, ignore
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.tracing import Trace
from weightdepot.store.weights import Mapped


class LiveModel:
    """The model of one model runner. `runner` is SGLang's `ModelRunner`, of which `model`, `model_config`,
    `weight_updater` and `device` are used."""

    def __init__(self, runner: Any, optional: Collection[str] = ()) -> None:
        self._runner, self._optional = runner, tuple(optional)
        self._trace: Trace | None = None
        self._placing: Placing | None = None
        self.torn = ""
        """Why the weights are not whole; "" when they are."""

    def trace(self, tensors: Sequence[TensorSpec]) -> Mapped:
        """Where SGLang's loader puts a checkpoint of `tensors`, found on a twin on the meta device.

        Raises LayoutError naming everything that does not map, and what the live model has in another form.
        """
        # schedulers work in inference mode, whose tensors a tracer cannot follow
        with torch.inference_mode(False), torch.no_grad():
            trace = trace_model(shadow_of(self._runner.model_config), tensors, optional=self._optional)
        _check_live(self._runner.model, trace.layout)
        self._trace, self._placing = trace, Placing(trace.layout)
        return Mapped(with_whole(trace), dict)

    @torch.no_grad()
    def install(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Put a whole staged version in place. Where it raises, the weights are torn until another one is in.

        Raises LayoutError before the first byte when the live model changed its form, and with the loader's
        reason when it fails on tensors that it must load itself.
        """
        assert self._trace is not None
        assert self._placing is not None
        runner, updater = self._runner, self._runner.weight_updater
        device = torch.get_device_module(torch.device(runner.device))
        self.torn = "new weights are being written"
        device.synchronize()  # a forward pass of the last batch may still read the old ones
        updater.begin_weight_update()
        try:
            self._placing(staged, tensors_of(runner.model))
            if self._trace.needs_loader:
                self._load(given(self._trace.whole, staged))
        finally:
            updater.end_weight_update(run_post_load=True)
        device.synchronize()

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            with set_default_torch_dtype(self._runner.model_config.dtype):
                self._runner.model.load_weights(weights)
        except Exception as error:
            raise LayoutError(
                "SGLang's loader failed on the tensors that it must load itself",
                [LayoutFault("(loader)", f"{type(error).__name__}: {error}")],
            ) from error


class EngineRank:
    """One rank of an SGLang engine in its group. `update` is for a safe point: no forward pass computes.

    runner: SGLang's ModelRunner. controller: its URL. model: the name under which versions are published.
    group: the name of this engine among those that follow the model: one for each engine.
    optional: parameters that the loader may leave alone (names, or patterns with `*`).
    before_write, before_serve, after_serve, token, ca: as in `Consumer`.
    The rank and the number of ranks are those of SGLang's context. A context manager.

    Raises InvalidRequest where this SGLang, or the way in which it was started, does not do; what `Consumer`
    raises.
    """

    def __init__(
        self,
        runner: Any,
        controller: str,
        *,
        model: str,
        group: str = "sglang",
        transport: Literal["auto", "shm", "tcp", "mooncake"] = "auto",
        run: str = "default",
        verify: bool = True,
        optional: Collection[str] = (),
        before_write: Hook = nothing,
        before_serve: Hook = nothing,
        after_serve: Hook = nothing,
        token: str | None = None,
        ca: str | None = None,
        timeouts: Timeouts | None = None,
        on_progress: OnProgress = ignore,
    ) -> None:
        needs.check()
        rank, size = _place()
        _check_updatable(runner)
        self._model = LiveModel(runner, optional)
        self.consumer = Consumer(
            controller,
            model=model,
            weights=self._model.trace,
            group=group,
            rank=rank,
            world_size=size,
            transport=transport,
            verify=verify,
            install=self._model.install,
            before_write=before_write,
            before_serve=before_serve,
            after_serve=after_serve,
            run=run,
            token=token,
            ca=ca,
            timeouts=timeouts,
            on_progress=on_progress,
        )

    @property
    def version(self) -> int | None:
        """What the weights are. None: those that the engine was started with, or torn ones."""
        return self.consumer.version

    @property
    def torn(self) -> str:
        """Why the weights of this rank are not whole; "" when they are."""
        return self._model.torn

    def prepare(self, timeout: float | None = None) -> Layout:
        """Trace the loader; `update` does it when it was not done before. In the thread that runs the model:
        the twin is built in SGLang's context."""
        return self.consumer.prepare(timeout)

    def prefetch(self, min_version: int | None = None) -> Future[int] | None:
        """Read the next version in the background, while the engine generates; `update` puts it in place.
        None where the checkpoint is not known yet."""
        return None if self.consumer.layout is None else self.consumer.prefetch(min_version)

    def update(
        self,
        *,
        version: int | str | None = None,
        min_version: int | None = None,
        max_lag: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """What `Consumer.update` does, and raises; `torn` then says whether the weights are whole."""
        try:
            held = self.consumer.update(min_version, timeout, version=version, max_lag=max_lag)
        except BaseException as error:
            if self.consumer.version is None and self._model.torn:
                self._model.torn = f"{type(error).__name__}: {error}"
            elif self.consumer.version is not None:
                self._model.torn = ""
            raise
        self._model.torn = ""
        return held

    def close(self) -> None:
        """Leave the group. The weights stay as they are."""
        self.consumer.close()

    def __enter__(self) -> EngineRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    named: Callable[..., Any] = module.named_parameters
    return {n: t.detach() for n, t in (*module.named_buffers(), *named(remove_duplicate=False))}


def _place() -> tuple[int, int]:
    """This process's rank, of how many."""
    parallel = get_parallel()
    if parallel.pp_size > 1:
        raise InvalidRequest(
            "pipeline parallelism is not supported: SGLang hands a call to a later stage when the earlier "
            "one is through with it, and an update waits for all ranks"
        )
    if parallel.num_dp_ranks > 1:
        raise InvalidRequest(
            "data parallelism inside an SGLang engine is not supported: start its replicas as engines of "
            "their own, each with its own group"
        )
    return parallel.tp_rank, parallel.tp_size


def _check_updatable(runner: Any) -> None:
    try:
        runner.weight_updater._assert_weight_cache_inactive("an update by weightdepot")
    except RuntimeError as error:
        raise InvalidRequest(str(error)) from error
    reason = _unsupported_derived_weight_cache_error(runner.model)
    if reason is not None:
        raise InvalidRequest(reason)


def _check_live(model: nn.Module, layout: Layout) -> None:
    """Raises LayoutError for parameters that are not what the loader was traced with, and will not be when
    SGLang has undone its processing."""
    live = tensors_of(model)
    faults = []
    for spec in layout.buffers:
        tensor = live.get(spec.name)
        if tensor is None:
            faults.append(LayoutFault(spec.name, "is not in the live model"))
        elif (form := _form(tensor)) != _stated(spec) and not _restores(model, spec.name):
            faults.append(
                LayoutFault(spec.name, f"is {form} in the live model, {_stated(spec)} where it was traced")
            )
    if faults:
        raise LayoutError("the live model is not the one that was traced", faults)


def _form(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} with strides {list(tensor.stride())}"


def _stated(spec: BufferSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)} with strides {list(spec.strides)}"


def _restores(model: nn.Module, name: str) -> bool:
    method = getattr(model.get_submodule(name.rpartition(".")[0]), "quant_method", None)
    undo = getattr(type(method), "restore_weights_before_loading", None)
    return undo is not None and undo is not QuantizeMethodBase.restore_weights_before_loading
