"""The code in the documentation runs, from top to bottom, as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["docs/connect.md", "docs/loaders.md"])
def test_the_code_on_the_page_runs(page: str, controller: str) -> None:
    text = (ROOT / page).read_text()
    namespace: dict[str, object] = {"__name__": "guide"}
    for found in BLOCK.finditer(text):
        line = text[: found.start()].count("\n") + 1
        code = "\n" * line + found.group(1).replace("http://localhost:8300", controller)
        exec(compile(code, page, "exec"), namespace)


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
