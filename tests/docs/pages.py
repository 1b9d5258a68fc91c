"""Runs the code of a page of the documentation, from top to bottom, as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(page: str, controller: str, **given: object) -> dict[str, object]:
    """The names that stand when the page's code has run, one block after the other."""
    text = (ROOT / page).read_text()
    namespace: dict[str, object] = {"__name__": "guide", **given}
    for found in BLOCK.finditer(text):
        line = text[: found.start()].count("\n") + 1
        code = "\n" * line + found.group(1).replace("http://localhost:8300", controller)
        exec(compile(code, page, "exec"), namespace)
    return namespace
