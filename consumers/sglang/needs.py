"""What the adapter uses of SGLang beyond its documented interfaces, so that a version that lacks it is
refused by name instead of failing in mid-update."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from weightdepot.consumers.vllm.needs import missing
from weightdepot.store.errors import InvalidRequest

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"

NAMES = (
    "sglang.srt.runtime_context:get_parallel",
    "sglang.srt.model_loader.loader:_initialize_model",
    "sglang.srt.model_loader.loader:_get_quantization_config",
    "sglang.srt.layers.quantization.base_config:QuantizeMethodBase.restore_weights_before_loading",
    "sglang.srt.layers.rotary_embedding.factory:_ROPE_DICT",
    f"{_UPDATER}:_unsupported_derived_weight_cache_error",
    f"{_UPDATER}:WeightUpdater._assert_weight_cache_inactive",
    f"{_UPDATER}:WeightUpdater.begin_weight_update",
    f"{_UPDATER}:WeightUpdater.end_weight_update",
    f"{_SCHEDULER}.handle_rpc_request",
    f"{_SCHEDULER}.flush_cache",
    f"{_SCHEDULER}.is_fully_idle",
    f"{_SCHEDULER}.pause_generation",
    f"{_SCHEDULER}.continue_generation",
    f"{_SCHEDULER}.record_weight_version_change",
)


def check(names: Iterable[str] = NAMES) -> None:
    """Raises InvalidRequest naming everything that the installed SGLang lacks."""
    absent = missing(names)
    if absent:
        raise InvalidRequest(
            f"weightdepot cannot update the weights of SGLang {version()}: it has no {', '.join(absent)}; "
            f"weightdepot was written for SGLang 0.5.23",
            missing=absent,
        )


def version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "(unknown)"
