"""Debian's Chromium, driven by Playwright, looking at a real controller."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PATIENCE = 20_000  # ms in which the page must show what is expected of it


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Playwright runs an event loop in this thread until it ends: no asynchronous test may come meanwhile."""
    api = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        # its sandbox does not run as root
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments, timeout=60_000)
        yield browser
        browser.close()
