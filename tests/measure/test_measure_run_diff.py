"""`z2a perf diff`: what differs between two runs, and whether it is more than noise."""

from __future__ import annotations

import math

import pytest

from tests.measure.made_run import GIB, PARTS, MadeRun
from zero2all.measure.run_diff import Compared, RunDiff, diff_runs
from zero2all.measure.run_record import read_record


def diff_of(first: MadeRun, second: MadeRun) -> RunDiff:
    return diff_runs(read_record(first.folder), read_record(second.folder))


def figures(diff: RunDiff) -> dict[str, Compared]:
    return {each.name: each for each in diff.figures}


def test_a_run_and_its_copy_are_equal(tmp_path):
    first, second = (MadeRun(tmp_path / name, evaluate_every=20).write(1, 100) for name in ("a", "b"))
    diff = diff_of(first, second)
    assert (diff.config, diff.machine) == ([], [])
    assert {each.verdict for each in diff.figures} == {"equal"}


def test_two_runs_with_the_same_speed_differ_within_noise(tmp_path):
    first, second = (MadeRun(tmp_path / str(seed), seed=seed).write(1, 200) for seed in (1, 2))
    assert figures(diff_of(first, second))["tokens/s"].verdict == "within noise"


def test_a_faster_run_is_better_by_the_part_that_became_faster(tmp_path):
    first = MadeRun(tmp_path / "a").write(1, 200)
    second = MadeRun(tmp_path / "b", parts=PARTS | {"backward": 0.4}, seed=1).write(1, 200)
    found = figures(diff_of(first, second))
    assert found["tokens/s"].verdict == found["backward, ms (median)"].verdict == "better"
    assert found["tokens/s"].change == pytest.approx(1 / 0.9 - 1, abs=0.01)
    assert found["MFU, % (palm)"].change == pytest.approx(found["tokens/s"].change)
    assert found["loss, ms (median)"].verdict == "within noise"


def test_config_machine_and_memory(tmp_path):
    first = MadeRun(tmp_path / "a", metrics={"memory/peak": 40.0 * GIB}).write(1, 20)
    second = MadeRun(tmp_path / "b", device="NVIDIA A100", metrics={"memory/peak": 44.0 * GIB}, config={"micro": 8})
    diff = diff_of(first, second.write(1, 20))
    assert diff.config == [("train.micro_batch_samples", 4, 8)]
    assert diff.machine == [("device", "NVIDIA H200", "NVIDIA A100")]
    assert figures(diff)["peak memory, GiB"].verdict == "worse"
    assert figures(diff)["peak memory, GiB"].change == pytest.approx(0.1)


def test_the_loss_is_compared_at_equal_tokens_and_paired(tmp_path):
    """Both curves fall and swing with the data by far more than they differ; only pairs of steps show it."""
    first = MadeRun(tmp_path / "a", evaluate_every=50).write(1, 200)
    second = MadeRun(tmp_path / "b", evaluate_every=50, seed=1, loss_shift=0.03).write(1, 300)
    diff = diff_of(first, second)
    loss = figures(diff)["loss (mean of the window)"]
    assert diff.loss_tokens == (int(0.9 * 200 * 512), 200 * 512)
    assert loss.second - loss.first == pytest.approx(0.03, abs=0.01)
    assert loss.verdict == "worse"
    held_out = figures(diff)["eval/valid/loss/en at 102,400 tokens"]
    assert (held_out.verdict, math.isnan(held_out.error)) == ("noise unknown", True)


def test_runs_without_a_common_metric_or_config(tmp_path):
    first, second = MadeRun(tmp_path / "a").write(1, 20), MadeRun(tmp_path / "b").write(1, 20)
    (second.folder / "config.yaml").unlink()
    diff = diff_of(first, second)
    assert diff.config == []
    assert any("no config.yaml" in each for each in diff.second.missing)
    assert "tokens/s" in figures(diff)
