"""Pictures of the page for README.md, taken of the demo while it runs: `python docs/screenshots.py`.

Needs Chromium (Debian: apt-get install chromium) and Playwright.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
IMAGES = Path(__file__).parent / "images"
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from demo import Demo  # noqa: E402

from weightdepot.api.client import ControllerClient  # noqa: E402

STEPS = 9
WINDOWS = {
    "wide": {"viewport": {"width": 1280, "height": 760}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 760}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


def windows(browser: Browser, url: str) -> dict[str, Any]:
    opened = {}
    for name, options in WINDOWS.items():
        opened[name] = browser.new_context(**options).new_page()  # type: ignore[arg-type]
        opened[name].goto(url)
    return opened


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        demo = Demo(argparse.Namespace(size="100m", steps=STEPS, transport="auto"), Path(folder))
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        pages: dict[str, Any] = {}
        try:
            for version in demo.run():
                if demo.url and not pages:
                    pages = windows(browser, demo.url)
                with ControllerClient(demo.url) as client:
                    if version.version == 3:
                        client.tag("policy", "best", 3)
                    if version.version == STEPS - 1:
                        client.pin("policy", version.version)
            stopped = next(child for child in demo.children if child.name == "fused-tp2-1")
            stopped.process.send_signal(signal.SIGSTOP)
            for name, page in pages.items():
                page.locator(".troubles li").wait_for(timeout=60_000)
                page.screenshot(path=IMAGES / f"page-{name}.png", full_page=name == "narrow")
            stopped.process.send_signal(signal.SIGCONT)
        finally:
            demo.stop()


if __name__ == "__main__":
    main()
