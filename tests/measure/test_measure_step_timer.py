"""What a measurement computes, and what it is called with."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zero2all.measure.step_timer import Pace, Timing, figures, gpu_summary, measure, pace_of, without_padding
from zero2all.measure.summary import GROUPS
from zero2all.measure.variants import ANCHOR, BY_NAME, NAIVE, VARIANTS, named_variants, title_of, vary

from zero2all.cli import main
from zero2all.common.errors import UsageError
from zero2all.estimate.run.batch import (
    SEED_BATCH,
    BatchShape,
    check_batch,
    default_batches,
    load_measured_config,
    parse_batch,
)
from zero2all.measure.child import measure_row
from zero2all.model import config as model_config
from zero2all.ops import cut_vocabulary
from zero2all.parallel import tensor

CPU = torch.device("cpu")
AT_ONCE = Timing(seconds=0.0, warm_up_seconds=0.0)


def test_a_batch_is_samples_by_sequence_by_accumulation():
    batch = parse_batch("2x2048x16")
    assert batch == SEED_BATCH
    assert batch.tokens == 65536
    assert str(batch) == "2x2048x16"


@pytest.mark.parametrize("text", ["", "2x2048", "0x2048x1", "2x2048x16x1", "axbxc", "2x-1x3"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="2x2048x16"):
        parse_batch(text)


def test_the_seeds_batch_is_left_out_where_the_model_is_too_short_for_it(tiny):
    assert default_batches(tiny) == [BatchShape(2, 32, 2)]
    long = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, max_seq_len=4096))
    assert default_batches(long) == [SEED_BATCH, BatchShape(2, 32, 2)]
    with pytest.raises(UsageError, match="max_seq_len"):
        check_batch(SEED_BATCH, tiny)


def test_a_measurement_has_every_figure_and_a_loss_near_that_of_a_guess(tiny):
    found = measure(tiny, BatchShape(2, 32, 2), CPU, AT_ONCE)
    assert found["tokens_per_second"] == pytest.approx(128 / found["seconds_per_iteration"])
    assert found["loss"] == pytest.approx(math.log(200), rel=0.05)
    assert found["iterations"] == len(found["iteration_seconds"]) == 1
    assert found["state_gib"] * 2**30 > 4 * 4 * 200 * 32  # weights, gradient and two moments of the embedding alone
    assert found["peak_gib"] > found["state_gib"]
    assert found["ops"]["attention"] == {"asked": "auto", "got": "sdpa", "reason": "the first that runs on cpu"}
    assert found["ops"]["compile"]["got"] == "none"


def test_an_unknown_device_has_no_mfu_and_the_result_says_so(tiny):
    found = figures(tiny, BatchShape(2, 32, 2), Pace(0.1, [1.0], [0.5], 5.0, 100, {}), CPU)
    assert found["mfu"] == {}
    assert "are unknown" in found["mfu_note"]


def test_a_known_device_has_mfu_in_three_conventions(tiny, monkeypatch):
    monkeypatch.setattr("zero2all.measure.step_timer.device_name", lambda _: "NVIDIA H200")
    found = figures(tiny, BatchShape(2, 32, 2), Pace(0.1, [1.0, 3.0], [0.5, 0.7], 5.0, 100, {}), CPU)
    assert found["seconds_per_iteration"] == 2.0
    assert set(found["mfu"]) == {"seed", "palm", "causal"}
    assert found["mfu_note"] is None


def test_iterations_go_on_until_the_time_is_full_and_short_ones_warm_up_first():
    calls = []

    def iterate(micro_batches):
        calls.append(micro_batches)
        return torch.tensor(1.0)

    pace = pace_of(iterate, 16, CPU, Timing(0.001, 0.0))
    assert calls[:2] == [1, 2]
    assert set(calls[2:]) == {16}
    assert sum(pace.iteration_seconds) >= 0.001 or len(pace.iteration_seconds) == 1


def test_a_loss_that_is_no_number_is_kept_as_text_so_that_the_result_stays_json(tiny):
    found = figures(tiny, BatchShape(2, 32, 2), Pace(0.1, [1.0], [0.5], math.nan, 100, {}), CPU)
    assert found["loss"] == "nan"


def test_without_padding_the_head_has_exactly_the_vocabularys_rows(tiny):
    odd = vary(tiny, BY_NAME["odd-vocabulary"])
    assert odd.model.vocab_ids == 257  # 200 pads to 256
    assert odd.model.vocab_rows == 320
    with without_padding():
        assert odd.model.vocab_rows == 257
    assert model_config.VOCAB_MULTIPLE == 64
    found = measure_row(tiny, BY_NAME["odd-vocabulary-unpadded"], BatchShape(1, 16, 1), AT_ONCE)
    assert found["status"] == "measured"
    assert found["loss"] == pytest.approx(math.log(257), rel=0.05)


def test_the_rows_of_the_tensor_path_compute_the_anchors_loss_by_the_code_of_a_tensor_rank(tiny, monkeypatch):
    calls: Counter[str] = Counter()

    def count(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def counted(*given: Any, **named: Any) -> Any:
            calls[name] += 1
            return function(*given, **named)

        monkeypatch.setattr(module, name, counted)

    count(cut_vocabulary, "_sums")
    count(tensor, "gather_into")
    count(tensor, "scatter_sum_into")
    # A pass of one block gathers for attention, feed-forward and loss, and sums after the embedding, attention and
    # feed-forward; its backward does the reverse.
    of_a_pass = {
        ANCHOR: {},
        "cut-loss": {"_sums": 1},
        "tensor-path": {"_sums": 1, "gather_into": 6, "scatter_sum_into": 6},
    }
    passes = 3  # the first step, the warm-up, the measurement
    found = {}
    for row, expected in of_a_pass.items():
        calls.clear()
        found[row] = measure_row(tiny, BY_NAME[row], BatchShape(2, 32, 1), AT_ONCE)
        assert calls == {name: passes * times for name, times in expected.items()}
    for row in ("cut-loss", "tensor-path"):
        assert found[row]["loss"] == pytest.approx(found[ANCHOR]["loss"], rel=1e-6)
        assert found[row]["state_gib"] == found[ANCHOR]["state_gib"]
    assert not dist.is_initialized()


def test_a_loss_that_needs_the_whole_head_has_no_row_of_the_tensor_path(tiny):
    whole = dataclasses.replace(tiny, ops=dataclasses.replace(tiny.ops, linear_cross_entropy="off"))
    found = measure_row(whole, BY_NAME["cut-loss"], BatchShape(1, 16, 1), AT_ONCE)
    assert found["status"] == "cannot run here"
    assert "whole head" in found["reason"]


def test_a_row_whose_operator_cannot_run_here_is_a_result_with_the_reason(tiny):
    found = measure_row(tiny, BY_NAME["fp8"], BatchShape(1, 16, 1), AT_ONCE)
    assert found["status"] == "cannot run here"
    assert "CUDA" in found["reason"]


def test_a_batch_that_no_memory_holds_is_a_result_too(tiny):
    found = measure_row(tiny, BY_NAME[ANCHOR], BatchShape(10**13, 32, 1), AT_ONCE)
    assert found["status"] == "out of memory"


def test_a_config_without_vocabulary_takes_the_size_asked_of_the_tokenizer():
    config, notes = load_measured_config("quickstart", ["--data.document_mask", "true"])
    assert config.model.vocab_size == config.tokenizer.vocab_size
    assert not config.data.document_mask
    assert len(notes) == 2


# ---- the rows --------------------------------------------------------------------------------------------------------


def test_every_row_is_a_valid_config_and_differs_from_every_other(tiny):
    tiny = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, precision="bfloat16"))
    varied = [(vary(tiny, variant), variant.unpadded, variant.tensor_path) for variant in VARIANTS]
    assert len({repr(each) for each in varied}) == len(VARIANTS) == len(BY_NAME)
    assert varied[0][0] == tiny
    for variant in VARIANTS:
        allowed = {field.name for field in dataclasses.fields(tiny.ops)}
        assert set(variant.ops) <= allowed
        assert "{" not in title_of(variant, tiny)
        assert variant.group in GROUPS  # it has a colour in the picture


def test_naive_leaves_no_operator_to_choice():
    operators = {field.name for field in dataclasses.fields(load_measured_config("quickstart", [])[0].ops)} - {"strict"}
    assert set(NAIVE) == operators


def test_compiled_rows_come_last_because_they_take_long():
    compiled = [variant.is_compiled for variant in VARIANTS]
    assert compiled == sorted(compiled)


def test_rows_are_asked_for_by_name_and_a_wrong_name_gets_a_hint():
    assert [variant.name for variant in named_variants(["fp8", "naive"])] == ["naive", "fp8"]
    with pytest.raises(UsageError, match="without-rope"):
        named_variants(["without-ropes"])


def test_power_and_clocks_are_medians_without_the_sample_from_before():
    text = "80, 300, 1000, 30\n690.5, 1500, 3201, 60\n700, 1520, 3201, 62\n[N/A], 1, 1, 1\n680, 1510, 3201, 61\n"
    found = gpu_summary(text)
    assert (found["watts"], found["sm_mhz"], found["celsius"]) == (690.5, 1510, 61)
    assert found["samples"]["watts"] == [690.5, 700, 680]
    assert gpu_summary("") == {}


def test_every_row_of_the_ablation_is_listed_without_a_config_and_stands_in_the_docs(capsys):
    assert main(["perf", "bench", "ablate", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {variant.name} " in shown for variant in VARIANTS)
    assert main(["perf", "bench", "ablate"]) == 2
    assert "needs CONFIG" in capsys.readouterr().err
    docs = Path(__file__).parents[2] / "docs/perf.md"
    rows = docs.read_text(encoding="utf-8").partition("| rows | what they are |")[2].partition("\n\n")[0]
    named = [name.replace("…", "*") for name in re.findall(r"`([\w…-]+)`", rows)]
    missing = [each.name for each in VARIANTS if not any(fnmatch.fnmatch(each.name, name) for name in named)]
    assert missing == []
