"""For vLLM built for GPUs, on a machine that has none: a shadow needs a platform, but never runs on it."""

from __future__ import annotations

import vllm.platforms


def take_cpu_where_there_is_no_device() -> None:
    """Let vLLM take the CPU where it finds no platform at all, for the rest of this process.

    To be called before other modules of vLLM are imported, since they keep the platform that they find.
    """
    if vllm.platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
