"""Checkpoints in memory: what a killed run continues from, and what it never takes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.train.ranks import RankStarter
from zero2all.common.workspace import Workspace
from zero2all.resilience import slots
from zero2all.train.checkpoints.layout import list_checkpoints, step_of

STEPS = 14


@pytest.fixture
def lab(shared_work, tmp_path) -> Workspace:
    shutil.copytree(shared_work.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


@pytest.fixture
def ranks(warm, lab, tmp_path):
    (tmp_path / "ranks").mkdir()
    starter = RankStarter(warm, lab.root, tmp_path / "ranks")
    yield starter
    starter.stop()


@pytest.fixture
def ram(tmp_path) -> Path:
    """A RAM file system of the test's own; an ordinary folder serves as well."""
    folder = tmp_path / "ram"
    folder.mkdir()
    return folder


def settings(config, ram: Path, name: str, every: int = 1, resilience=None, **parallel):
    return config(
        train={"name": name, "steps": STEPS, "tokens_per_step": 160},
        checkpoint={"every_steps": 5},
        eval={"every_steps": 0, "valid_tokens_per_source": 128},
        resilience={"memory_every_steps": every, "memory_folder": str(ram), **(resilience or {})},
        parallel=parallel,
    )


def buffers(ram: Path) -> dict[str, int]:
    """The steps of the whole buffers, by name."""
    folders = list(next(ram.iterdir()).iterdir())
    assert len(folders) == 1
    return {found.path.name: found.step for found in slots.whole_slots(folders[0])}


def losses(launch) -> dict[int, float]:
    return {record.step: record.loss for record in launch.steps()}


def last_bits(run: Path) -> dict[str, bytes]:
    folder = run / f"checkpoints/step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize(("processes", "spread"), [(1, {}), (2, {"zero": 1})])
def test_a_run_whose_processes_were_all_killed_continues_from_memory_with_the_same_bits(
    ranks, lab, config, ram, processes, spread
):
    whole = ranks.finished(settings(config, ram, "whole", every=0, **spread), processes)
    broken = settings(config, ram, "broken", **spread)
    killed = ranks(broken, processes, signals=dict.fromkeys(range(processes), (9, signal.SIGKILL, 0.0)))
    assert set(killed.wait()) <= {-signal.SIGKILL, 1}, killed.text()
    assert max(map(step_of, list_checkpoints(lab.run("broken")))) == 5
    newest = max(buffers(ram).values())
    assert newest in (7, 8), "killed in step 9, or before the save of step 8 was finished"
    resumed = ranks.finished(broken, processes)
    assert "from memory" in resumed.text()
    first = resumed.steps()[0].step
    assert first in (newest, newest + 1)
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step >= first}
    assert last_bits(lab.run("broken")) == last_bits(lab.run("whole"))
    assert list(next(ram.iterdir()).iterdir()) == [], "a finished run leaves nothing in memory"
