"""The board's page, measured in a real browser: how soon a curve is on the screen, and what an idle page costs.

    python benchmarks/track_page.py

A board is started as a process of its own, and Chromium opens its page without a window. Measured are

- a run of 1 M rows with 6 values each: opened for the first time, and again; from the moment the server had read the
  run to the painted chart; whether its one-step spike is visible;
- write to pixel: from the time in a row that a live run wrote to the frame that shows it;
- bytes and requests of a page on which nothing happens;
- 200 runs in the list;
- the size of everything the page is made of.

Without a Chromium, or without the chart library, it says so and measures nothing. Takes about a minute and a half.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import save_result
from benchmarks.track_run import write_long_run
from zero2all.track import MetricsWriter
from zero2all.track.api import HEARTBEAT, HEARTBEAT_SECONDS, page_files
from zero2all.track.chart_library import CHART_LIBRARY

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ROUNDS = 5
IDLE_SECONDS = 10
LIVE_ROWS = 25
LIVE_SECONDS_BETWEEN_ROWS = 0.4
RUNS = 200

PAINT_TIMES = """() => {
    const answered = (name) => performance.getEntriesByType('resource').find((each) => each.name.includes(name));
    return {
        painted: performance.getEntriesByName('painted loss')[0].startTime,
        ready: answered('/api/run?').responseEnd,
        asked: answered('/api/curves').startTime,
    };
}"""
SPIKE = """() => {
    const {chart} = document.querySelector('[data-chart="loss"]').card;
    const highest = Math.max(...chart.lines[0].curve.high);
    return highest >= 9.5 && chart.plot.scales.y.max >= highest;
}"""
FOLLOW = """() => {
    window.seen = [];
    const card = document.querySelector('[data-chart="loss"]');
    const note = () => requestAnimationFrame(() => seen.push([Number(card.dataset.end), Date.now()]));
    new MutationObserver(note).observe(card, {attributeFilter: ['data-end']});
}"""


def measure() -> dict[str, Any]:
    """All figures, or why there are none."""
    browser_path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    missing = None
    if browser_path is None:
        missing = "there is no Chromium on the PATH; scripts/install_browser.sh installs one"
    elif not CHART_LIBRARY.is_file():
        missing = "the chart library is missing; z2a board --fetch-charts fetches it"
    else:
        try:
            from playwright.sync_api import sync_playwright
        except ImportError:
            missing = "playwright is not installed (extra `dev`)"
    if missing is not None:
        print(f"page: left out, {missing}")
        return {"left_out": missing}
    with (
        tempfile.TemporaryDirectory(prefix="z2a-page-", ignore_cleanup_errors=True) as name,
        sync_playwright() as driver,
    ):
        folder = Path(name)
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        results = {
            "browser": browser.version,
            "front_end_bytes": front_end_bytes(),
            "long_run": long_run(browser, folder / "long"),
            "live": live(browser, folder / "live"),
            "list": many_runs(browser, folder / "many"),
        }
        browser.close()
    return results


def front_end_bytes() -> int:
    """Every file the page is made of, uncompressed."""
    size = sum(path.stat().st_size for path in set(page_files().values()))
    print(f"front end: {size / 1e3:.1f} KB in {len(set(page_files().values()))} files")
    return size


@contextmanager
def board(root: Path) -> Iterator[str]:
    """The address of a board over `root`, in a process of its own with a cache of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(root.parent / f"cache-{root.name}")}
    command = [sys.executable, "-m", "zero2all", "board", str(root), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stdout is not None, "it was asked for"
        try:
            for line in process.stdout:
                if found := re.search(r"http://\S+", line):
                    yield found[0]
                    break
        finally:
            process.terminate()


@contextmanager
def page_of(browser: Any, url: str) -> Iterator[Any]:
    """A fresh page: nothing is in its cache."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-US")
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(url)
    page.wait_for_selector('[data-chart="loss"][data-state="painted"]')
    yield page
    context.close()


def long_run(browser: Any, root: Path) -> dict[str, Any]:
    """A run of a million rows."""
    write_long_run(root / "run", 5)
    rounds = []
    with board(root) as url:
        for number in range(ROUNDS + 1):
            with page_of(browser, f"{url}#runs=0/run") as page:
                rounds.append(page.evaluate(PAINT_TIMES))
                if number == 0:
                    spike = page.evaluate(SPIKE)
                if number == ROUNDS:
                    idle = idle_bytes(page)
    cold, *warm = rounds
    figures = {
        "cold_navigation_to_paint_ms": cold["painted"],
        "cold_data_ready_to_paint_ms": cold["painted"] - cold["ready"],
        "warm_navigation_to_paint_ms": statistics.median(each["painted"] for each in warm),
        "warm_data_ready_to_paint_ms": statistics.median(each["painted"] - each["ready"] for each in warm),
        "warm_request_to_paint_ms": statistics.median(each["painted"] - each["asked"] for each in warm),
        "spike_visible": spike,
        "idle": idle,
    }
    print(
        f"1 M rows x 6 values: first time {figures['cold_navigation_to_paint_ms']:.0f} ms from the address to the "
        f"painted chart, of which {figures['cold_data_ready_to_paint_ms']:.0f} ms after the data was ready; again "
        f"{figures['warm_navigation_to_paint_ms']:.0f} ms, {figures['warm_data_ready_to_paint_ms']:.0f} ms after; "
        f"spike visible: {spike}"
    )
    return figures


def idle_bytes(page: Any) -> dict[str, Any]:
    """What moves while nothing happens; heartbeats are known to come, so they are also told by themselves."""
    page.wait_for_selector('[data-group="config"]')
    page.wait_for_timeout(2500)
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    moved: list[int] = []
    requests: list[str] = []
    session.on("Network.dataReceived", lambda event: moved.append(int(event["dataLength"])))
    session.on("Network.requestWillBeSent", lambda event: requests.append(event["request"]["url"]))
    page.wait_for_timeout(1000 * IDLE_SECONDS)
    beat = f"{len(HEARTBEAT)} bytes every {HEARTBEAT_SECONDS:.0f} s"
    print(f"idle for {IDLE_SECONDS} s: {sum(moved)} bytes, {len(requests)} requests (heartbeat: {beat})")
    return {"seconds": IDLE_SECONDS, "bytes": sum(moved), "requests": len(requests), "heartbeat": beat}


def live(browser: Any, root: Path) -> dict[str, Any]:
    """From a row's own time to the frame that shows it."""
    run = MetricsWriter(root / "run")
    run.log({"loss": 3.0, "lr": 1e-3}, step=1)
    with board(root) as url, page_of(browser, f"{url}#runs=0/run") as page:
        page.evaluate(FOLLOW)
        for step in range(2, 2 + LIVE_ROWS):
            run.log({"loss": 3.0 / step, "lr": 1e-3}, step=step)
            page.wait_for_timeout(1000 * LIVE_SECONDS_BETWEEN_ROWS)
        page.wait_for_selector(f'[data-chart="loss"][data-end="{1 + LIVE_ROWS}"]')
        seen = page.evaluate("() => seen")
        run.close()
    written = {
        row["step"]: row["time"]
        for row in map(json.loads, run.path.read_text().splitlines())
        if "values" in row and row["step"] > 1
    }
    delays = []
    for step, at in written.items():
        shown = min(when for end, when in seen if end >= step) / 1000
        delays.append(shown - at)
    figures = {"rows": len(delays), "median_seconds": statistics.median(delays), "worst_seconds": max(delays)}
    print(f"write to pixel: median {statistics.median(delays):.3f} s, worst of {len(delays)} {max(delays):.3f} s")
    return figures


def many_runs(browser: Any, root: Path) -> dict[str, Any]:
    """200 runs in the list."""
    for number in range(RUNS):
        with MetricsWriter(root / f"run-{number:03}") as run:
            for step in range(200):
                run.log({"loss": 2.0, "lr": 1e-3}, step=step)
    with board(root) as url:
        context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-US")
        page = context.new_page()
        page.goto("about:blank")
        started = time.monotonic()
        page.goto(url, wait_until="commit")
        page.wait_for_selector(f".run-list > .run:nth-child({RUNS})", state="attached")
        seconds = time.monotonic() - started
        answer = page.evaluate(
            "() => performance.getEntriesByType('resource').find((r) => r.name.includes('/api/runs')).duration"
        )
        context.close()
    print(f"{RUNS} runs: answered in {answer / 1e3:.2f} s, in the list {seconds:.2f} s after the address was opened")
    return {"runs": RUNS, "answer_seconds": answer / 1e3, "listed_seconds": seconds}


def main() -> None:
    """Measure and save."""
    figures = measure()
    if "left_out" not in figures:
        save_result("track_page", figures)


if __name__ == "__main__":
    main()
