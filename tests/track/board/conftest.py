"""Runs to look at, a board that serves them, and pages of the browser in both languages."""

import functools
import subprocess
import sys
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

HOSTILE = "<img src=x onerror=alert(1)>"
"""A run may have any name that a folder may have."""
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
    (torn / "train-1.jsonl").write_text(
        good % (1, 3) + "garbage\n[1, 2]\n" + good % (2, '"NaN"') + good % (3, 2) + '{"step":'
    )
    return root


class ServedBoard:
    """A board that answers on a real port."""

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
    """Root 1 of the board `served`."""
    return runs.parent / "live"


class SmallTraining:
    """small_training.py in a process of its own."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("small_training.py")
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )

    def train(self, steps: int) -> int:
        """Do so many steps; returns the step it has come to."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture
def training() -> Iterator[Callable[[Path], SmallTraining]]:
    """Start small trainings; those still there at the end are killed."""
    started: list[SmallTraining] = []

    def start(folder: Path) -> SmallTraining:
        started.append(SmallTraining(folder))
        return started[-1]

    yield start
    for each in started:
        with each.process:  # closes its pipes
            each.process.kill()


# ---- the browser ----


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
