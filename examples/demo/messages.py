"""How the demo's processes talk to the one that started them: one JSON object a line."""

from __future__ import annotations

import json
import sys
from typing import Any


def tell(kind: str, **values: Any) -> None:
    print(json.dumps({"kind": kind, **values}), flush=True)


def wait_for_word() -> bool:
    """Block until the parent says to go on; False when it has gone or says that this is the end."""
    return sys.stdin.readline().strip() == "go"
