"""Calibration: figures are kept one by one, a profile is made of them, and a stale one is refused with what changed."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.limits.machine import named_cluster, read_machine, write_machine
from zero2all.perf import calibrate as module
from zero2all.perf import profiles
from zero2all.perf.batch import BatchShape, load_measured_config
from zero2all.perf.calibrate import FigureStore, calibrate, curve, machine_for
from zero2all.perf.calibration.stopwatch import Stopwatch, timed
from zero2all.perf.predict import operators_for, predict

TINY = [
    *("--model.hidden_size", "32", "--model.intermediate_size", "64", "--model.heads", "4", "--model.kv_heads", "2"),
    *("--model.vocab_size", "128", "--parallel.device", "cpu", "--parallel.cpu_threads", "1"),
]
BATCH = BatchShape(2, 32, 2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    monkeypatch.setattr("zero2all.perf.calibration.stopwatch.CPU_SECONDS", 1e-4)
    monkeypatch.setattr("zero2all.perf.calibration.figures.CPU_GRID_WIDTHS", (64,))
    monkeypatch.setattr("zero2all.perf.calibration.figures.CPU_GRID_TOKENS", (64,))
    monkeypatch.setattr(module, "other_settings", lambda _setting: iter(()))


@pytest.fixture
def config():
    return load_measured_config("quickstart", TINY)[0]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_calibration_is_a_profile_that_predicts(config, threads):
    found = calibrate([(config, BATCH)], most_seconds=60.0)
    assert found.failed == {}
    assert found.left == []
    machine = read_machine(found.path)
    assert machine == found.machine
    sizes = {(one.kind, one.m, one.n, one.k) for one in machine.matmuls}
    assert {("forward", 64, 64, 32), ("dgrad", 64, 32, 64), ("wgrad", 64, 32, 64)} <= sizes  # qkv on 64 tokens
    assert {"rms_norm", "rms_norm/backward", "swiglu", "linear_cross_entropy", "adamw"} <= machine.operators.keys()
    assert calibrate([(config, BATCH)], most_seconds=60.0).measured == 0  # everything is known

    ops = operators_for(config, machine, BATCH.seq_len)
    own = machine_for(machine, found.path, ops.taken, CPU)
    assert own.operators == machine.operators
    seen = predict(config, BATCH, own, ops, config.parallel.asked_sizes(1))
    assert seen.step.lower <= seen.interval[0] <= seen.step.estimate <= seen.interval[1] <= seen.step.upper
    assert sum(seen.components.values()) == pytest.approx(seen.step.estimate)
    assert seen.fits
    assert seen.cost is None
    assert json.dumps(seen.as_json())


def test_a_figure_that_cannot_be_measured_does_not_cost_the_others(config, threads, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr("zero2all.perf.calibration.figures._stream", lambda *_: {"bytes_per_second": 1e9, "spread": 0})
    monkeypatch.setattr("zero2all.perf.calibration.figures._over_gradients", broken)
    found = calibrate([(config, BATCH)], most_seconds=60.0)
    assert {name.split("/")[1] for name in found.failed} == {"grad_norm", "zero"}
    assert set(found.failed.values()) == {"RuntimeError: no such kernel"}
    assert "rms_norm" in found.machine.operators


def test_figures_of_a_calibration_that_was_cut_off_are_kept(tmp_path):
    store = FigureStore(tmp_path / "x.figures.jsonl", {})
    store.add("stream", {"bytes_per_second": 1.0})
    with open(store.path, "a") as file:
        file.write('{"name": "laun')
    assert FigureStore(store.path, {}).figures == {"stream": {"bytes_per_second": 1.0}}
    assert FigureStore(store.path, {}, again=True).figures == {}


def test_points_of_one_size_are_one():
    assert curve([(200.0, 3.0), (100.0, 1.0), (100.5, 2.0)]).points == ((100.0, 1.5), (200.0, 3.0))


def test_a_stale_profile_is_refused_with_everything_that_changed():
    key = profiles.profile_key(CPU)
    with pytest.raises(BadInputError, match="There is no profile of"):
        profiles.profile_here(CPU)
    path = profiles.profile_path({**key, "torch": "1.0", "threads": "99"})
    write_machine(path, dataclasses.replace(named_cluster("h200"), key={**key, "torch": "1.0", "threads": "99"}))
    with pytest.raises(BadInputError, match=r"stale: threads was 99 and is .* now; torch was 1\.0 and is"):
        profiles.profile_here(CPU)
    with pytest.raises(BadInputError, match="is not of this machine: threads was 99"):
        profiles.profile_from(path, CPU)
    assert profiles.profile_from(path, None).key["torch"] == "1.0"


def test_the_spread_is_the_interquartile_range():
    assert timed([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 3)
    assert timed([2.0]).spread == 0.0
    assert Stopwatch(CPU).warm_up(1.0) == (1.0, 1.0)
