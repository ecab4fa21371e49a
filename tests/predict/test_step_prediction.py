"""Predictions: of clusters without a GPU at hand, checked input, and real steps beside what was predicted for them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.predict import summary
from zero2all.common.errors import BadInputError, UsageError
from zero2all.estimate.machine import named_cluster, write_machine
from zero2all.measure import machine_profiles as profiles
from zero2all.measure import verify
from zero2all.measure.short_run import measure_steps
from zero2all.measure.verify import PredictionTarget, prediction_for
from zero2all.predict.batch import BatchShape, load_measured_config
from zero2all.predict.step_prediction import check_asked, operators_for, predict

TINY = [
    *("--model.hidden_size", "32", "--model.intermediate_size", "64", "--model.heads", "4", "--model.kv_heads", "2"),
    *("--model.vocab_size", "128", "--parallel.device", "cpu", "--parallel.cpu_threads", "1"),
]
BATCH = BatchShape(2, 32, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(before)


def predicted(gpus: int = 1, batch: BatchShape | None = None, cluster: str = "h200", overrides: Sequence[str] = ()):
    config, _ = load_measured_config("z2all-1b", list(overrides))
    machine = dataclasses.replace(named_cluster(cluster), price_per_hour=2.0)
    batch = batch or BatchShape(16, 2048, 4)
    sizes = check_asked(config, batch, machine, gpus)
    return predict(config, batch, machine, operators_for(config, machine, batch.seq_len), sizes)


def test_more_gpus_have_more_tokens_a_second_and_less_memory_with_zero():
    one, eight = predicted(), predicted(8, overrides=["--parallel.zero", "1", "--parallel.shard", "8"])
    assert one.settings.operators["linear"].writes_weight_gradient is False  # the kernels of a GPU, though none is here
    assert eight.step.tokens == 8 * one.step.tokens
    assert 0.9 * one.step.estimate < eight.step.estimate < 1.5 * one.step.estimate  # its update is shared
    assert eight.peak_bytes < one.peak_bytes
    assert one.fits
    assert one.cost == pytest.approx(one.run_seconds / 3600 * 2.0)
    assert eight.joules == pytest.approx(8 * 700.0 * eight.run_seconds)
    assert 0.3 < one.as_json()["mfu"]["seed"] < 0.8
    for found in (eight, predicted(overrides=["--train.recompute", "full"])):
        assert sum(found.components.values()) == pytest.approx(found.step.estimate)
        assert all(seconds >= 0 for seconds in found.components.values())


def test_the_tokens_of_a_step_are_those_of_the_config_however_many_processes_share_them(z2a):
    for gpus, batch in ((1, "16x2048x32"), (7, "16x2048x5"), (64, "8x2048x1")):
        words = ["perf", "predict", "z2all-1b", "--cluster", "h100", "--gpus", gpus, "--parallel.zero", "3"]
        found = json.loads(z2a.done(*words, "--json", "-"))
        assert (found["tokens_per_step"], found["steps"], found["batch"]) == (1048576, 20027, batch)
    config, _ = load_measured_config("z2all-1b", [])
    of_batch = prediction_for(config, BatchShape(4, 2048, 1), PredictionTarget("h100", gpus=64))
    assert of_batch.step.tokens == 64 * 4 * 2048  # a batch that is given is that of each process


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(UsageError) as error:
        predicted(6, BatchShape(16, 4096, 1), overrides=["--parallel.tensor", "5"])
    for part in ("sequences of 4096 tokens are longer", "6", "  2. "):
        assert part in str(error.value)
    with pytest.raises(UsageError, match="There is no cluster h900; known: a100-80g"):
        predicted(cluster="h900")


def test_verify_prints_what_was_predicted_beside_what_was_measured(folder, monkeypatch, z2a):
    def in_this_process(source, overrides, run):
        config, _ = load_measured_config(source, overrides)
        return {"status": "measured", **measure_steps(config, run.batch, 0.0, run.anatomy, 0.0)}

    monkeypatch.setattr(verify, "run_apart", in_this_process)
    torch.set_num_threads(1)
    key = profiles.profile_key(torch.device("cpu"))
    machine = dataclasses.replace(named_cluster("h200"), key=key, multiprocessors=0, source="measured")
    write_machine(profiles.profile_path(key), machine)
    words = ["--batch", BATCH, "--json", "x.json", *TINY]
    printed = z2a.done("perf", "predict", "quickstart", "--verify", *words)
    assert [name for name in ("step, ms", "GEMM, ms", "peak allocated, GiB") if name not in printed] == []
    found = json.loads((folder / "x.json").read_text())
    assert found["measured"]["step_seconds"] > found["prediction"]["seconds"]["estimate"] > 0  # of an H200, on this CPU


def test_a_run_that_could_not_be_measured_says_whether_it_was_expected_to_fit():
    found = verify.VerifiedPrediction(predicted(), {"status": "out of memory", "reason": "CUDA out of memory"})
    with pytest.raises(BadInputError, match=r"out of memory: CUDA out of memory \(it was expected to fit\)"):
        verify.comparison(found)


def test_the_figures_of_the_documentation_follow_from_the_stored_measurements():
    stored = json.loads((Path(__file__).parents[2] / "benchmarks/results/predict.json").read_text())
    for sitting in stored.values():
        assert summary(sitting["cases"]) == sitting["summary"]
