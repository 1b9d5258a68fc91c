"""The page as a person sees it, while the demo runs behind it."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from weightdepot.api.access import entry_of, new_token
from weightdepot.api.client import ControllerClient
from weightdepot.api.roles import Role

from ..api.helpers import Trainer, join_group, serving
from .conftest import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 4
DEMO = Path(__file__).parents[2] / "examples" / "demo"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def opened(browser: Browser, url: str, **options: Any) -> Page:
    """The page, in a window of its own. Whatever goes wrong in it fails the test in `at_the_end`."""
    page = browser.new_context(**{"viewport": WIDE, **options}).new_page()
    page.set_default_timeout(PATIENCE)
    faults: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.faults, page.asked = faults, asked  # type: ignore[attr-defined]
    page.goto(url)
    return page


def expect(found: Any) -> Any:
    from playwright.sync_api import expect as of_playwright

    of_playwright.set_options(timeout=PATIENCE)
    return of_playwright(found)


def row(page: Page, model: str, first: str) -> Any:
    """A table's row by what its first cell says."""
    cell = re.compile(rf"^{re.escape(first)}$")
    return page.locator(f"[data-model='{model}'] tbody tr").filter(
        has=page.locator("td:first-child", has_text=cell)
    )


def cells(page: Page, model: str, first: str) -> list[str]:
    return [str(text) for text in row(page, model, first).locator("td").all_inner_texts()]


# -- while the demo runs ---------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(DEMO))
    options = argparse.Namespace(size="tiny", steps=STEPS, transport="auto")
    demo = importlib.import_module("demo").Demo(options, tmp_path)
    try:
        yield demo
    finally:
        for child in demo.children:  # one of them may be stopped
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGCONT)
        demo.stop()


def test_it_shows_what_the_demo_does_while_it_does_it(browser: Browser, demo: Any) -> None:
    page: Page | None = None
    for version in demo.run():
        step = version.version
        if page is None:
            page = opened(browser, demo.url)
        expect(page.locator("#live")).to_have_text("live")
        expect(page.locator("[data-model=policy] .facts b")).to_have_text(str(step))
        expect(page.locator("[data-model=policy] .facts")).to_contain_text("2 of 2 producers")
        for group, ranks in (("fused-tp2", 2), ("plain", 1)):
            expect(row(page, "policy", group).locator(".state")).to_have_text("whole")
            expect(row(page, "policy", group).locator("td").nth(2)).to_have_text(str(step))
            assert cells(page, "policy", group)[3:5] == ["0", f"{ranks}/{ranks}"], "lag, ranks alive"
        expect(row(page, "policy", str(step)).locator(".state")).to_have_text("ready")
        assert "current" in cells(page, "policy", str(step))[-1]

    # what it shows is what the controller knows
    assert page is not None
    report = httpx.get(f"{demo.url}/v1/overview").json()["models"][0]
    shown = {v["version"]: v["state"] for v in report["model"]["versions"]}
    for number, state in shown.items():
        assert cells(page, "policy", str(number))[1] == state
    published = page.locator("figure", has_text="published").locator("rect")
    assert published.count() == sum(v["ready"] is not None for v in report["model"]["versions"])
    for group in ("fused-tp2", "plain"):
        assert page.locator("figure", has_text=f"pulled by {group}").locator("rect").count() >= 1

    # a rank that stops is told, and that it is back; what is stuck is said in words
    rollout = next(child for child in demo.children if child.name == "fused-tp2-1")
    rollout.process.send_signal(signal.SIGSTOP)
    silent = page.locator(".troubles li", has_text="group fused-tp2: rank 1 sent no heartbeat")
    expect(silent).to_be_visible(timeout=60_000)
    assert cells(page, "policy", "fused-tp2")[4] == "1/2"
    rollout.process.send_signal(signal.SIGCONT)
    expect(silent).to_have_count(0, timeout=60_000)

    # and so is a controller that goes away
    demo.controller.process.send_signal(signal.SIGSTOP)
    expect(page.locator("#live")).to_have_text("the controller does not answer", timeout=60_000)
    demo.controller.process.send_signal(signal.SIGCONT)
    expect(page.locator("#live")).to_have_text("live")
    at_the_end(page, demo.url)


def at_the_end(page: Page, url: str) -> None:
    assert page.faults == []  # type: ignore[attr-defined]
    asked = page.asked  # type: ignore[attr-defined]
    assert asked, "the page was loaded"
    assert [a for a in asked if not a.startswith((url, "data:"))] == [], "no host but the controller is asked"
    page.context.close()


# -- with a controller alone -----------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def stuck(client: ControllerClient, model: str) -> None:
    """A group left half-way, with an error that would like to be HTML."""
    trainer = Trainer(client, model).join_all()
    sessions = join_group(client, model, "torn", 2)
    trainer.publish(1)
    client.tag(model, "reference", 1)
    client.pin(model, 1)
    for rank, session in enumerate(sessions):
        given = client.begin_round(model, "torn", rank=rank, session=session, timeout=5)
        client.finish_round(
            model, "torn", rank=rank, session=session, round=given.round, timeout=5, barrier=False,
            error=HOSTILE if rank else "",
        )  # fmt: skip


def test_it_is_readable_in_every_window_and_takes_nothing_for_html(browser: Browser) -> None:
    with serving() as (url, _), ControllerClient(url) as client:
        empty = opened(browser, url)
        expect(empty.locator("#empty")).to_contain_text("Nobody has joined yet")
        stuck(client, "policy")
        # the same window, without a reload
        expect(empty.locator("#empty")).to_be_hidden()
        expect(row(empty, "policy", "torn").locator(".state")).to_have_text("half")
        at_the_end(empty, url)
        for viewport in (WIDE, NARROW):
            for scheme in ("light", "dark"):
                page = opened(browser, url, viewport=viewport, color_scheme=scheme)
                trouble = page.locator(".troubles li", has_text="group torn is half-way and must not serve")
                expect(trouble).to_contain_text(HOSTILE)
                assert page.locator("img, #models script").count() == 0
                too_wide = page.evaluate(
                    "[document.documentElement, ...document.querySelectorAll('.scroll')]"
                    ".filter(part => part.scrollWidth > part.clientWidth).length"
                )
                assert too_wide == 0, "nothing is cut off, or has to be scrolled to"
                shades = page.evaluate(
                    "['backgroundColor', 'color'].map(k => getComputedStyle(document.body)[k])"
                )
                ground, ink = (sum(map(int, re.findall(r"\d+", shade)[:3])) for shade in shades)
                assert (ground > ink) == (scheme == "light")
                at_the_end(page, url)


def test_where_reading_is_not_open_it_asks_for_a_token(browser: Browser, tmp_path: Path) -> None:
    reader, stranger = new_token(), new_token()
    tokens = tmp_path / "tokens.json"
    elsewhere = entry_of("elsewhere", stranger, [Role.READ], run="another")
    tokens.write_text(json.dumps([entry_of("reader", reader, [Role.READ]), elsewhere]))
    tokens.chmod(0o600)
    with serving("--tokens", str(tokens)) as (url, _):
        page = opened(browser, url)
        expect(page.locator("#login")).to_be_visible()
        expect(page.locator("#live")).to_have_text("a token is wanted")
        for wrong, said in (("wd_nobodys", "token"), (stranger, "run")):
            page.fill("#token", wrong)
            page.click("#login button")
            expect(page.locator("#refused")).to_contain_text(said)
        page.fill("#token", reader)
        page.click("#login button")
        expect(page.locator("#empty")).to_be_visible()
        expect(page.locator("#login")).to_be_hidden()
        page.reload()  # the window remembers it, the address does not show it
        expect(page.locator("#live")).to_have_text("live")
        assert reader not in page.url
        at_the_end(page, url)
