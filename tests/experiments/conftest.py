"""A workspace with packed text, and sweeps of runs that take a second."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import config_from_values, config_yaml
from zero2all.config.rules import with_value
from zero2all.experiments.sweep import Sweep, SweepPlan, parse_axis
from zero2all.packed.shard_format import open_split
from zero2all.train.run import train
from zero2all.train.validate import Scores

TINY: dict[str, Any] = {
    "model": {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "max_seq_len": 32},
    "data": {"seq_len": 32},
    "train": {"name": "tiny", "steps": 18, "tokens_per_step": 256, "micro_batch_samples": 8},
    "optim": {"lr_max": 0.01},
    "schedule": {"kind": "wsd", "warmup_steps": 1, "decay_share": 0.5},
    "validation": {"tokens_per_source": 256},
    "parallel": {"device": "cpu", "cpu_threads": 1},
    "resilience": {"supervise": False},
}


@pytest.fixture
def work(trained_workspace: Workspace, tmp_path: Path) -> Workspace:
    """Packed text of two channels, en and zh, and `tiny.yaml`."""
    unused = shutil.ignore_patterns("runs", "raw", "corpus")
    shutil.copytree(trained_workspace.root, tmp_path / "work", ignore=unused)
    (tmp_path / "work" / "tiny.yaml").write_text(config_yaml(config_from_values(TINY, "of the tests")))
    return open_workspace(tmp_path / "work")


@pytest.fixture
def sweep_of(work: Workspace) -> Callable[..., Sweep]:
    """A sweep of tiny.yaml over these axes; two workers."""

    def plan(*axes: str, name: str = "s", overrides: tuple[str, ...] = (), **values: Any) -> Sweep:
        parsed = tuple(map(parse_axis, axes))
        asked = SweepPlan(str(work.root / "tiny.yaml"), overrides, parsed, **{"at_once": 2, **values})
        return Sweep(asked, name, work, [open_split(work.packed, source, "train") for source in ("en", "zh")])

    return plan


def alone(sweep: Sweep, *runs: str) -> dict[str, Scores]:
    """The held-out scores of some of its trials as ordinary runs, trained in this process one after the other."""
    found = {}
    for trial in (each for each in sweep.trials if each.run in runs):
        config = with_value(trial.config, "train.name", f"own-{trial.run}")
        found[trial.run] = train(config, sweep.workspace, say=lambda _: None, brief=True).held_out_scores
    return found
