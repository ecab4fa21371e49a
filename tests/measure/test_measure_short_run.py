"""Steps of the trainer on random tokens: what they are called with, their figures, and a profile of them."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.ablate import ANCHOR, NAIVE, ROWS, Sitting, markdown, table
from zero2all.common.errors import UsageError
from zero2all.config import config_values, load_config
from zero2all.estimate.kernel_groups import GROUPS
from zero2all.measure.child import with_status
from zero2all.measure.clock import gpu_medians
from zero2all.measure.profile import Profile, as_json, default_batch, profile_config, tables_of
from zero2all.measure.short_run import ReadyRun, measure_steps
from zero2all.predict.batch import BatchShape, check_batch, load_measured_config, parse_batch

CPU = torch.device("cpu")
BATCH = BatchShape(2, 32, 2)
BFLOAT16 = ["--train.precision", "bfloat16"]
STEPS = ["--train.steps", "10"]


def test_a_batch_is_samples_by_sequence_by_accumulation(tiny):
    batch = parse_batch("2x2048x16")
    assert (batch, batch.tokens, str(batch)) == (BatchShape(2, 2048, 16), 65536, "2x2048x16")
    assert default_batch(tiny, CPU) == BatchShape(2, 32, 2)
    with pytest.raises(UsageError, match="max_seq_len"):
        check_batch(batch, tiny)
    for text in ("", "2x2048", "0x2048x1", "2x2048x16x1", "axbxc", "2x-1x3"):
        with pytest.raises(UsageError, match="2x2048x16"):
            parse_batch(text)


def test_a_config_without_vocabulary_takes_the_size_asked_of_the_tokenizer():
    config, notes = load_measured_config("quickstart", ["--data.document_mask", "true"])
    assert config.model.vocab_size == config.tokenizer.vocab_size
    assert not config.data.document_mask
    assert len(notes) == 2


def test_a_measurement_has_every_figure_and_a_loss_near_that_of_a_guess(tiny):
    found = measure_steps(tiny, BATCH, 0.0, anatomy=True, warm_up_seconds=0.0)
    assert found["tokens_per_second"] == pytest.approx(128 / found["step_seconds"])
    assert found["loss"] == pytest.approx(math.log(200), rel=0.05)
    assert found["steps"] == len(found["all_seconds"]) >= 3
    assert found["peak_bytes"] > 4 * 4 * 200 * 32  # weights, gradient and two moments of the embedding alone
    assert found["ops"]["attention"] == "sdpa"
    assert found["parts"]["GEMM"] > 0
    assert found["parts"]["loss"] > 0
    assert found["parts"]["optimizer"] > 0


def test_late_steps_are_three_however_long_they_were_asked_to_last(tiny, monkeypatch):
    made, steps = [], ReadyRun._step
    monkeypatch.setattr(ReadyRun, "_step", lambda run: made.append(run) or steps(run))
    found = measure_steps(tiny, BATCH, 60.0, warm_up_seconds=60.0, most_seconds=0.0)
    assert (len(made), found["steps"]) == (3, 2)


def test_what_cannot_run_or_does_not_fit_is_a_result_with_the_reason(tiny):
    float8 = dataclasses.replace(tiny, ops=dataclasses.replace(tiny.ops, linear="fp8"))
    found = with_status(lambda: measure_steps(float8, BATCH, 0.0))
    assert (found["status"], "CUDA" in found["reason"]) == ("cannot run here", True)
    found = with_status(lambda: measure_steps(tiny, BatchShape(10**13, 32, 1), 0.0))
    assert found["status"] == "out of memory"


def test_power_and_clocks_are_medians_without_the_sample_from_before():
    text = "80, 300, 1000, 30\n690.5, 1500, 3201, 60\n700, 1520, 3201, 62\n[N/A], 1, 1, 1\n680, 1510, 3201, 61\n"
    assert gpu_medians(text) == {"watts": 690.5, "sm_mhz": 1510, "memory_mhz": 3201, "celsius": 61}
    assert gpu_medians("") == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def profile(tiny, folder) -> Profile:
    return profile_config("tiny", tiny, BATCH, 2, folder)


def test_the_groups_of_a_real_step_add_up_to_it(profile, folder):
    anatomy = profile.anatomy
    assert (anatomy.kind, anatomy.steps) == ("cpu", 2)
    assert sum(anatomy.groups.values()) == pytest.approx(anatomy.seconds)
    assert {name for name in GROUPS if anatomy.groups[name] > 0} == set(GROUPS) - {"communication"}
    assert {"forward", "loss", "backward", "optimizer"} <= set(profile.parts)
    assert json.loads(json.dumps(as_json(profile)))["anatomy"]["groups"]["GEMM"] > 0
    assert anatomy.rows[0].name in str(tables_of(profile))
    assert (folder / "trace.json.gz").stat().st_size > 1000


def test_products_have_the_floor_of_the_measured_matmul_rate(profile):
    product = next(row for row in profile.anatomy.rows if row.name == "aten::mm")
    # 4 matrices of a block, forward and twice backward, and the head, in two passes
    assert product.calls == 2 * 3 * 5
    assert product.flops == pytest.approx(6 * 128 * (32 * 64 + 32 * 32 + 3 * 32 * 64 + 32 * 256))
    assert product.floor_seconds == pytest.approx(product.flops / profile.ceilings.matmul_flops_per_second)
    assert product.floor_percent == pytest.approx(100 * product.floor_seconds / product.seconds)


def test_every_row_of_the_ablation_is_a_config_and_differs_from_every_other(tiny_path):
    found, operators = set(), set()
    for fields in ROWS.values():
        given = {name: 201 if value == "one more" else value for name, value in fields.items()}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        config = load_config(tiny_path, [*STEPS, *words, *([] if "train.precision" in given else BFLOAT16)])
        found.add(json.dumps(config_values(config), sort_keys=True))
        operators = set(config_values(config)["ops"]) - {"strict"}
    assert len(found) == len(ROWS)
    assert {name.removeprefix("ops.") for name in NAIVE if name.startswith("ops.")} == operators


def test_an_ablation_measures_what_is_missing_and_each_sitting_its_anchor(tiny_path, tmp_path, monkeypatch):
    asked = []

    def child(words, overrides, *_):
        asked.append(overrides)
        if "--ops.linear" in overrides:
            return {"status": "cannot run here", "reason": "it needs a CUDA device"}
        figures = {"step_seconds": 1.0, "tokens_per_second": 128, "device": "cpu", "peak_bytes": 2**30}
        return {"status": "measured", **figures, "first_step_seconds": 0.5}

    monkeypatch.setattr("benchmarks.ablate.run_child", child)
    given = SimpleNamespace(config=str(tiny_path), out=tmp_path, seconds=0.0, budget_seconds=1e9)
    given.row_timeout_seconds = 60.0
    Sitting(given, []).measure(BATCH, [ANCHOR, "without-rms-norm", "fp8"])
    again = Sitting(given, [])
    for rows, count in ((["fp8"], 3), (["fp8", "naive"], 5)):  # everything is known; the anchor, and what is new
        again.measure(BATCH, [ANCHOR, "without-rms-norm", *rows])
        assert len(asked) == count
    rows = {row[0]: row[1] for row in table(again, BATCH)[1:]}
    assert rows == {ANCHOR: "1.000", "naive": "cannot run here", "without-rms-norm": "1.000", "fp8": "cannot run here"}
    assert "| fp8 | cannot run here |" in markdown(table(again, BATCH), BATCH)
