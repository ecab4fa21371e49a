"""The comparison with other trainers, and of two orders of the residual's axes, on a model of a second."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.layout import BATCH_FIRST, SEQUENCE_FIRST, Layout, check_agreement, compare
from benchmarks.peers import EAGER, LIGER, OURS, PURE, Entry, entries, ratio_lines, ratios, run_entry
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.predict.batch import BatchShape, own_batch

CPU = torch.device("cpu")


def test_ratios_take_the_mean_of_ours_and_the_best_of_each_peer():
    def measured(kind, precision, speed):
        return {"kind": kind, "precision": precision, "tokens_per_second": speed}

    out_of_memory = {"kind": EAGER, "precision": PURE, "reason": "out of memory"}
    peers = {"b": measured(LIGER, PURE, 90.0), "c": measured(LIGER, PURE, 100.0), "d": out_of_memory}
    found = ratios({"a": measured(OURS, "auto", 110.0), **peers, "e": measured(OURS, "auto", 90.0)})
    assert found["over_peers"] == {"ours auto / liger pure bf16": 1.0}
    assert (found["ours"]["auto"]["last_over_first"], len(ratio_lines(found))) == (pytest.approx(90 / 110), 2)


class Peer(torch.nn.Linear):
    def forward(self, input_ids, **_):
        return SimpleNamespace(loss=super().forward(input_ids.float()).square().mean())


def test_a_peer_is_measured_on_the_same_batch_and_one_that_fails_is_an_entry_with_the_reason(tiny, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.llama", lambda *_: Peer(32, 1))
    entry = Entry(EAGER, PURE, own_batch(tiny))
    found = run_entry(entry, tiny, CPU, seconds=0.0, warm_up_seconds=0.0)
    assert found["tokens_per_second"] == pytest.approx(128 / found["step_seconds"])
    kinds = [entry.kind for entry in entries(tiny, own_batch(tiny))]
    assert kinds[0] == kinds[-1] == OURS
    assert kinds.index(LIGER) > max(kinds.index(EAGER), kinds.index("compiled")), "after what it would patch"
    monkeypatch.setattr("benchmarks.peers.llama", lambda *_: 1 / 0)
    found = run_entry(entry, tiny, CPU, seconds=0.0, warm_up_seconds=0.0)
    assert found == {"reason": "ZeroDivisionError: division by zero"}


def test_both_orders_of_the_axes_compute_the_same(tiny):
    ops = resolve(OpsConfig(), "cpu")
    orders = [Layout(name, tiny.model, ops, BatchShape(3, 16, 1), CPU) for name in (BATCH_FIRST, SEQUENCE_FIRST)]
    check_agreement(orders, CPU, torch.float32)
    orders[1].cos = orders[1].cos.roll(1, dims=1)
    with pytest.raises(AssertionError, match="differ"):
        check_agreement(orders, CPU, torch.float32)
    assert all(seconds > 0 for pair in compare(tiny, BatchShape(2, 16, 1), 0.0).values() for seconds in pair)
