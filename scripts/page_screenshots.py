"""Takes the pictures of docs/images/: the live page of a server on virtual GPUs, under a burst, with switches.

Needs Chromium (`apt install chromium`) and the test extra (playwright). About a minute:

    python scripts/page_screenshots.py
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))

from server import Server  # noqa: E402

TIERS = """\
default: standard
tiers:
  - {name: chat, ttft_ms: 1500, tpot_ms: 60, when_infeasible: reject, queue_limit: 16, service_tiers: [priority]}
  - {name: standard, ttft_ms: 5000, tpot_ms: 150}
  - {name: night, background: true, service_tiers: [flex]}
"""
PICTURES = {
    "page-light": (1180, 1080, "light"),
    "page-dark": (1180, 1080, "dark"),
    "page-phone": (390, 844, "light"),
}
"""By file name: width and height in CSS pixels, and colour scheme."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", help="folder (default: docs/images)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of load before the pictures (default: 45)")
    args = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        parser.error("there is no chromium here; apt install chromium")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tiers.yaml"
        config.write_text(TIERS)
        flags = [
            "--adapt-virtual-gpus",
            "4",
            "--adapt-tp-sizes",
            "1,2",
            "--adapt-slo-config",
            str(config),
        ]
        with Server("page", "sglang_adapt.launch_server", flags, Path(folder) / "log") as server:
            _run(server.url, browser, args.output, args.seconds)


def _run(url: str, browser: str, output: Path, seconds: float) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(40) as clients:
        running = clients.submit(load, url, stop, clients)
        began = time.monotonic()
        for layout, strategy in (("tp2@0-1,tp2@2-3", "auto"), ("tp1@0,tp1@1,tp2@2-3", "keep")):
            time.sleep(seconds / 3)
            httpx.post(
                f"{url}/adapt/layout",
                json={"layout": layout, "strategy": strategy, "reason": "evening traffic"},
                timeout=60,
            )
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        _pictures(url, browser, output)
        stop.set()
        running.result()
        # What the last switch keeps paused ends when its engine is back.
        httpx.post(f"{url}/adapt/layout", json={"layout": "tp2@0-1,tp2@2-3"}, timeout=60)
        clients.shutdown(cancel_futures=True)


def load(url: str, stop: threading.Event, clients: ThreadPoolExecutor) -> None:
    """Poisson arrivals of three tiers, with a burst in each ten seconds."""
    rng = random.Random(7)
    while not stop.is_set():
        burst = time.monotonic() % 10 < 4
        tier = rng.choices(("priority", "default", "flex"), (5, 4, 1))[0]
        clients.submit(_ask, url, tier, rng.randint(16, 96))
        stop.wait(rng.expovariate(14.0 if burst else 4.0))


def _ask(url: str, tier: str, tokens: int) -> None:
    body = {
        "model": "demo",
        "prompt": "Once upon a time",
        "max_tokens": tokens,
        "ignore_eos": True,
        "service_tier": tier,
    }
    # A refusal is part of the picture.
    httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def _pictures(url: str, browser: str, output: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for name, (width, height, scheme) in PICTURES.items():
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"{url}/adapt")
            page.wait_for_selector(".engine")
            page.screenshot(path=output / f"{name}.png", full_page=True)
            page.close()
        chromium.close()


if __name__ == "__main__":
    main()
