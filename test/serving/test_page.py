"""The live page in a real browser, on a server that works."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server import Server

pytestmark = pytest.mark.engine

NARROW, WIDE = "tp1@0,tp1@1", "tp2@0-1"
LIMIT_MS = 30_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless browser."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("there is no Chromium here (apt install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the test extra)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


class Seen:
    """A page, where it went, and what it complained of."""

    def __init__(self, browser: Any, server: Server, layout: str = "", **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(LIMIT_MS)
        self.urls: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(f"{server.url}/adapt")
        self.page.wait_for_selector(".engine")
        # The first snapshot may be the last one of a viewer before.
        self.has("#layout", layout)

    def has(self, selector: str, words: str) -> None:
        """Wait until an element has these words."""
        self.page.locator(selector, has_text=words).first.wait_for()


@pytest.fixture
def narrow(shown: Server) -> Server:
    assert httpx.post(f"{shown.url}/adapt/layout", json={"layout": NARROW}, timeout=180).status_code == 200
    return shown


def test_the_layout_is_seen_and_switched_by_hand(chromium: Any, narrow: Server) -> None:
    seen = Seen(chromium, narrow, NARROW)
    page = seen.page
    assert page.locator(".engine").count() == 2
    assert page.locator("#layout").inner_text() == NARROW
    assert page.locator(".gpu").all_inner_texts() == ["virtual GPU 0", "virtual GPU 1"]
    assert page.locator("#idle").inner_text() == f"{WIDE}: ready"
    page.get_by_label("Layout", exact=True).fill(WIDE)
    page.get_by_label("What becomes of running requests").select_option("migrate")
    page.get_by_role("button", name="Switch").click()
    seen.has("#said", f"{WIDE} serves")
    seen.has("#layout", WIDE)
    assert page.locator(".engine").count() == 1
    first = page.locator("ol.switches > li").first
    assert f"{NARROW} → {WIDE}" in first.inner_text()
    assert "operator: asked for on the page" in first.inner_text()
    assert {"prepare", "export", "adopt", "release"} <= {
        words.split()[0] for words in first.locator(".phases li").all_inner_texts()
    }
    # Back to the planner, which this server has.
    page.get_by_role("button", name="Let the planner decide").click()
    seen.has("#said", "The planner decides again")
    seen.has("#why", "The planner decides.")
    assert seen.errors == []
    assert {url.split("/adapt")[0] for url in seen.urls if not url.startswith("data:")} == {narrow.url}
    page.close()


def test_roles_are_seen(chromium: Any, narrow: Server) -> None:
    roles = "tp1@0:prefill,tp1@1:decode"
    assert httpx.post(f"{narrow.url}/adapt/layout", json={"layout": roles}, timeout=180).status_code == 200
    seen = Seen(chromium, narrow, roles)
    assert seen.page.locator(".engine .state").all_inner_texts() == ["prefills", "decodes"]
    seen.page.close()


def test_a_bad_order_is_refused_on_the_page(chromium: Any, narrow: Server) -> None:
    seen = Seen(chromium, narrow, NARROW)
    seen.page.get_by_label("Layout", exact=True).fill("tp3@0")
    seen.page.get_by_role("button", name="Switch").click()
    seen.has("#said.bad", "TP size 3 is not among --adapt-tp-sizes 1, 2")
    assert seen.page.locator("#layout").inner_text() == NARROW
    seen.page.close()


def test_tiers_and_requests_are_counted(chromium: Any, narrow: Server) -> None:
    seen = Seen(chromium, narrow, NARROW)

    def chat_row() -> tuple[str, ...]:
        return tuple(seen.page.locator(".tiers tr", has_text="chat").locator("td").all_inner_texts())

    assert chat_row()[0] == "60 s / 60 s"
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "service_tier": "priority"}
    with httpx.stream("POST", f"{narrow.url}/v1/completions", json={**body, "stream": True}, timeout=180) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        next(lines)
        seen.has(".engine .chips", "chat 1")
        seen.has("#running", "1")
    body["max_tokens"] = 4
    assert httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=180).status_code == 200
    seen.has("#attainment", "%")
    assert "%" in chat_row()[3]
    seen.page.close()


def test_an_engine_that_was_given_up_is_said(chromium: Any, narrow: Server) -> None:
    seen = Seen(chromium, narrow, NARROW)
    alert, state = seen.page.evaluate(
        """() => {
          const engines = last.router.engines.map(e => e.name === "tp1@1" ? {...e, state: "failed", restarts: 1} : e);
          show({...last, router: {...last.router, engines}});
          return [$("alert").innerText, document.querySelector(".engine.down").innerText];
        }"""
    )
    assert alert.startswith("Given up, because it died too often: tp1@1.")
    assert "given up" in state and "started again once" in state
    assert seen.errors == []
    seen.page.close()


def test_a_lost_connection_is_said_and_found_again(chromium: Any, shown: Server) -> None:
    seen = Seen(chromium, shown)
    seen.page.route("**/adapt/events", lambda route: route.abort())
    seen.page.evaluate("control.abort()")
    seen.has("#alert", "Connection lost")
    seen.has("#alert", "What you see is of")
    seen.has("#link", "not connected")
    seen.page.unroute("**/adapt/events")
    seen.has("#link", "live")
    assert seen.page.locator("#alert").inner_text() == ""
    seen.page.route("**/adapt/events", lambda route: route.fulfill(status=401, body="{}"))
    seen.page.evaluate("control.abort()")
    seen.has("#alert", "wants its admin key")
    seen.page.close()


CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = name => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    const full = hex.length === 3 ? [...hex].map(digit => digit + digit).join("") : hex;
    const [r, g, b] = [0, 2, 4].map(at => parseInt(full.slice(at, at + 2), 16) / 255)
      .map(value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const pairs = [["text", "card"], ["text", "back"], ["text", "block"], ["soft", "card"], ["soft", "back"],
    ["soft", "block"], ["good", "block"], ["good", "back"], ["bad", "card"], ["bad", "badback"], ["warn", "warnback"],
    ["accent", "card"]];
  return pairs.map(([one, other]) => {
    const [low, high] = [light("--" + one), light("--" + other)].sort((a, b) => a - b);
    return [one + " on " + other, (high + .05) / (low + .05)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone(chromium: Any, shown: Server, scheme: str) -> None:
    seen = Seen(chromium, shown, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360
    contrasts = seen.page.evaluate(CONTRAST)
    assert len(contrasts) == 12
    assert [pair for pair in contrasts if pair[1] < 4.5] == []
    dark = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(16, 21, 27)" if scheme == "dark" else "rgb(244, 246, 248)")
    # Whatever can be filled in or pressed has a name.
    names = seen.page.evaluate(
        "[...document.querySelectorAll('input, select, button')]"
        ".map(one => one.labels[0]?.textContent || one.textContent)"
    )
    assert all(name.strip() for name in names) and len(names) == 5
    assert seen.errors == []
    seen.page.close()
