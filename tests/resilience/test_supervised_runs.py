"""`z2a train` under its supervisor, with real ranks that compute together: faults, and the same bits at the end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.states import bits
from zero2all.common.fault import FAULTS
from zero2all.track.goodput import run_goodput
from zero2all.track.reader import RunReader, read_run

STEPS = 12
SECTIONS = {
    "model": {"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0},
    "train": {"steps": STEPS},
    "checkpoint": {"every_steps": 3},
    "validation": {"every_steps": 0, "tokens_per_source": 128},
    "parallel": {"device": "cpu", "cpu_threads": 1, "processes": 2},
    "resilience": {"supervise": True, "limits": {"step": 6.0}},
}


@pytest.fixture
def train(work, config_file, tmp_path):
    """Start `z2a train`, with faults; what is left at the end is killed."""
    path = config_file(**SECTIONS)
    started: list[subprocess.Popen] = []

    def start(*words: str, faults: list[dict] | None = None, encoding: str = "utf-8") -> subprocess.Popen:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "Z2A_LANG": "en", "PYTHONIOENCODING": encoding}
        if faults is not None:
            plan = tmp_path / f"plan-{len(started)}.json"
            plan.write_text(json.dumps([{"point": "step", **fault} for fault in faults]))
            env[FAULTS] = str(plan)
        command = [sys.executable, "-m", "zero2all", "train", str(path), "--work", str(work.root), *words]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "encoding": encoding}
        started.append(subprocess.Popen(command, env=env, **output))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def finished(process: subprocess.Popen, code: int = 0) -> str:
    text = process.communicate(timeout=200)[0]
    assert process.returncode == code, text
    return text


def incidents(run: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((run / "incidents").glob("*-*.json"))]


def test_a_rank_that_skips_a_collective_is_named_and_the_run_ends_with_the_same_bits(train, work):
    text = finished(train("--train.name", "hung", faults=[{"fault": "sleep", "rank": 1, "step": 8}]))
    run = work.run("hung")
    (incident,) = incidents(run)
    assert (incident["kind"], incident["rank"], incident["step"]) == ("hang", 1, 7)
    assert "It has not begun collective" in incident["text"]
    assert incident["text"] in text
    page = (run / "incidents/7-hang.md").read_text()
    assert [words for words in ("Stack of rank 1, the odd one", "Collectives") if words not in page] == []
    finished(train("--train.name", "whole", encoding="gbk"))  # as where errors go to a file in an old encoding
    losses = [read_run(each).series["loss"].value.tolist() for each in (run, work.run("whole"))]
    assert (losses[0], bits(run, STEPS)) == (losses[1], bits(work.run("whole"), STEPS))
    found = run_goodput(RunReader(run))
    assert (found.starts, found.incidents, found.steps, found.lost_steps) == (2, 1, STEPS, 1)
    assert found.seconds["hang wait"] > 2.0


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "zero"), [(4, 0), (8, 1)])
def test_a_layout_that_loses_a_rank_continues_from_memory(train, work, tmp_path, processes, zero):
    (tmp_path / "ram").mkdir()
    options = {
        **{"parallel.processes": processes, "parallel.tensor": 2, "parallel.pipeline": 2, "parallel.zero": zero},
        **{"model.layers": 2, "model.kv_heads": 2, "train.tokens_per_step": 256, "checkpoint.every_steps": 0},
        **{"resilience.memory_folder": tmp_path / "ram", "resilience.limits": {}},
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    finished(train(*words, "--train.name", "whole"))
    fault = {"fault": "kill", "rank": processes - 1, "step": 8}
    text = finished(train(*words, "--resilience.memory_every_steps", "2", faults=[fault]))
    assert re.search("resumed run at step [46] from memory", text)
    assert bits(work.run("run"), STEPS) == bits(work.run("whole"), STEPS)
    assert list(next((tmp_path / "ram").iterdir()).iterdir()) == []


@pytest.mark.slow
def test_fresh_starts_over_once_and_not_again_after_a_failure(train, work):
    finished(train())
    finished(train("--fresh", faults=[{"fault": "kill", "rank": 0, "step": 8}]))
    assert read_run(work.run("run")).series["loss"].step.tolist() == list(range(1, STEPS + 1))
    second = json.loads((work.run("run") / "metrics/train-2.jsonl").open().readline())
    assert second["data"]["resumed_from"] in (3, 6)  # 6, if that save had ended


CLOCK_JUMPS = """
import time
real, begun = time.time, time.monotonic()
age = lambda: time.monotonic() - begun
time.time = lambda: real() + (3600 if age() > 4 else 0) - (7200 if age() > 6 else 0)
"""


@pytest.mark.slow
def test_a_clock_that_jumps_is_no_hang(train, work, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(CLOCK_JUMPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    finished(train())
    assert incidents(work.run("run")) == []
