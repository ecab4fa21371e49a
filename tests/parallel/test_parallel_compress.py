"""Gradients that are compressed in every step: two real processes, and the rules."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.parallel import compressed, layouts
from tests.parallel.test_parallel_check import config
from zero2all.common.errors import UsageError
from zero2all.estimate.communication import communication_per_step
from zero2all.estimate.memory import MemorySettings
from zero2all.ops.footprint import Footprint
from zero2all.parallel.check import check_spread
from zero2all.train.step_stats import SCALARS


@pytest.fixture(scope="module")
def of_two(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compress")
    cases = {kind: {"kind": kind, "folder": str(folder)} for kind in ("sums", "errors", "resume")}
    return layouts.run(warm, folder, 2, cases)


def test_bf16_is_the_sum_of_rounded_values_and_a_gradient_of_the_rank_arrives_whole(of_two):
    found = of_two["sums"]
    assert found["bf16"] == found["bf16, ZeRO-1"] == 0.0
    assert max(found["rank 2 of 2"], found["ZeRO-1"], found["offload"]) < 1e-5


def test_what_powersgd_does_not_send_now_it_sends_later(of_two):
    distances = of_two["errors"]["distances"]
    assert distances[0] > 0.5, "a gradient of full rank does not arrive at once"
    assert distances[-1] < distances[0] / 5
    # The errors stay bounded, so the mean comes closer as 1 / steps once all directions have had their turn.
    assert distances[59] < 0.6 * distances[29]


def test_a_rehearsal_keeps_nothing_and_a_value_that_is_not_finite_is_seen_once(of_two):
    assert of_two["errors"]["rehearsal"]
    assert of_two["errors"]["seen"]
    assert of_two["errors"]["healed"]


def test_a_resumed_run_is_bit_equal_and_sends_the_bytes_of_the_formula(of_two):
    found = of_two["resume"]
    assert found["notes"] == found["differ"] == []
    assert "powersgd/error/blocks.0.attention.q.weight" in found["names"]
    settings = MemorySettings(
        layouts.SEQ_LEN, layouts.MICRO, {"optimizer": Footprint()}, precision="float32", replicate=2, passes=2,
        compress="powersgd", powersgd_rank=compressed.RANK,
    )  # fmt: skip
    figures = len(SCALARS) + 2 * layouts.CHANNELS + 2 * layouts.SAMPLES + 2 * 2  # two per rank
    model = replace(layouts.MODEL, **compressed.WIDE)
    transfers = communication_per_step(model, settings, figures)
    assert found["sent"] == {"allreduce": sum(one.given for one in transfers)}
    plain = communication_per_step(model, replace(settings, compress="none"), figures)
    assert sum(one.given for one in transfers) < 0.5 * sum(one.given for one in plain)


@pytest.mark.parametrize(
    ("parallel", "sections", "said"),
    [
        ({"compress": "bf16", "zero": 3}, {}, "zero 3 (FSDP sums its own parts)"),
        ({"compress": "powersgd", "zero": 2}, {}, "zero 2 (each rank gets a part of the sum, in every pass)"),
        ({"compress": "powersgd", "tensor": 2}, {}, "tensor 2 (matrices or blocks are cut)"),
        ({"compress": "powersgd", "pipeline": 2}, {"train": {"precision": "float16"}},
         "pipeline 2 (matrices or blocks are cut), train.precision float16"),
    ],
)  # fmt: skip
def test_where_gradients_cannot_be_compressed_all_reasons_are_given(parallel, sections, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        check_spread(config(parallel, **sections), 4)
