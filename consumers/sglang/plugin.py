"""The entry point in SGLang's group `sglang.srt.plugins`: adds weightdepot's calls to its schedulers.

SGLang calls `register` in each of its processes, so that it does little, and never raises: what an SGLang
lacks is said when an engine joins.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Makes `Engine.collective_rpc("weightdepot_join", ...)` work. May be called again."""
    try:
        from sglang.srt.managers.scheduler import Scheduler

        from weightdepot.consumers.sglang import scheduler

        scheduler.install(Scheduler)
    except (ImportError, AttributeError) as error:
        logging.getLogger("sglang.weightdepot").warning(
            "this SGLang has no scheduler that weightdepot knows (written for 0.5.23): %s", error
        )
