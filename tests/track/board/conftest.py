"""Runs to look at, a board that serves them, and pages of the browser in both languages."""

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import watched_page
from zero2all.track import MetricsWriter
from zero2all.track.api import Board, BoardOptions
from zero2all.track.chart_library import CHART_LIBRARY

HOSTILE = "<img src=x onerror=alert(1)>"  # a run may have any name that a folder may have
SPIKE_STEP = 300


def write_run(folder: Path, steps: int, seed: int, spike: int | None = None) -> None:
    """A finished run with the metrics a trainer writes."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"optim:\n  lr_max: 0.000{seed}\ntrain:\n  steps: {steps}\n")
    with MetricsWriter(folder) as run:
        for step in range(1, steps + 1):
            loss = 2 + 3 * 0.99**step + 0.02 * rng.normal() + (5 if step == spike else 0)
            values = {"loss": loss, "loss/en": loss - 0.2, "loss/zh": loss + 0.3, "lr": seed * 1e-4, "grad_norm": 1.0}
            values |= {"tokens_per_second": 1000.0, "time/step": 0.6, "time/forward": 0.2, "time/backward": 0.4}
            values["gpu/power"] = 300.0
            run.log(values, step=step, tokens=100 * step)
            if step % 100 == 0:
                run.log({"eval/wiki/bpb": 1 + 1 / step, "eval/code/bpb": 2 + 1 / step}, step=step, tokens=100 * step)
                run.event("checkpoint", step, {"path": f"step-{step}"})
                run.event("text", step, {"name": "capital", "text": f"step {step}: <script>alert(2)</script>"})
        if spike:
            channels = {"en": 6.5, "zh": 7.9}
            documents = [{"source": "web", "gid": 4242, "position": 17}]
            data = {"metric": "loss", "value": loss, "mean": 2.0, "sigma": 0.02}
            run.event("spike", spike, {**data, "channel_losses": channels, "documents": documents})


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that do not change while the tests look at them."""
    root = tmp_path_factory.mktemp("board") / "runs"
    write_run(root / "base", 400, seed=1, spike=SPIKE_STEP)
    write_run(root / "other", 300, seed=2)
    write_run(root / HOSTILE, 50, seed=3)
    torn = root / "torn" / "metrics"
    torn.mkdir(parents=True)
    good = '{"step":%d,"time":5.0,"tokens":1,"values":{"loss":%s}}\n'
    lines = good % (1, 3) + "garbage\n[1, 2]\n" + good % (2, '"NaN"') + good % (3, 2) + '{"step":'
    (torn / "train-1.jsonl").write_text(lines)
    return root


class ServedBoard:
    def __init__(self, places: list[Path], cache: Path, options: BoardOptions | None = None) -> None:
        self.board = Board([str(place) for place in places], options or BoardOptions(port=0), cache)
        self.thread = threading.Thread(target=self.board.serve, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return self.board.url

    def stop(self) -> None:
        self.board.stop()
        self.thread.join(60)


@pytest.fixture(scope="session")
def served(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBoard]:
    """A board over `runs`, and over an empty folder beside it that tests may write runs to."""
    live = runs.parent / "live"
    live.mkdir()
    served = ServedBoard([runs, live], tmp_path_factory.mktemp("cache"))
    yield served
    served.stop()


@pytest.fixture
def live_root(runs: Path) -> Path:
    return runs.parent / "live"


@pytest.fixture(scope="session")
def context_of(browser: Any, served: ServedBoard) -> Callable[[str], Any]:
    """A browser context for each language. Its pages share a process, which the first page keeps, and compiled code."""
    if not CHART_LIBRARY.is_file():
        pytest.skip("the chart library is missing; z2a board --fetch-charts fetches it")

    @functools.cache
    def context(language: str) -> Any:
        made = browser.new_context(viewport={"width": 1280, "height": 800}, locale=language, accept_downloads=True)
        made.new_page().goto(f"{served.url}before.js")
        return made

    return context


@pytest.fixture
def page(context_of: Callable[[str], Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh page, in the language of `locale` where a test asks for it. Any error in the page fails the test."""
    language = request.getfixturevalue("locale") if "locale" in request.fixturenames else "en-US"
    with watched_page(context_of(language)) as opened:
        yield opened


@pytest.fixture
def serve(page: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServedBoard]]:
    started: list[ServedBoard] = []

    def start(*places: Path, port: int = 0) -> ServedBoard:
        started.append(ServedBoard([*places], tmp_path_factory.mktemp("cache"), BoardOptions(port=port)))
        return started[-1]

    yield start
    page.goto("about:blank")
    for each in started:
        each.stop()
