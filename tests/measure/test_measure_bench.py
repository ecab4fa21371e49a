"""`z2a perf bench`: figures from real work, and advice only where they differ beyond the noise."""

from __future__ import annotations

import json

import pytest
import torch
from zero2all.measure.bench import copies, samples
from zero2all.measure.bench.allreduce import allreduce_advice, bench_allreduce
from zero2all.measure.bench.copies import loader_advice, numa_advice, numa_nodes, pin_advice
from zero2all.measure.bench.samples import WITHIN_NOISE, Row, in_turn, is_faster

from zero2all.cli.main import main
from zero2all.estimate.run.batch import BatchShape

CPU = torch.device("cpu")
BATCH = BatchShape(2, 32, 1)


def row(what: str, seconds: float, noise: float = 0.01, amount: float = 1.0, **more: str) -> Row:
    """Five times around `seconds`."""
    times = [seconds * (1 + noise * step) for step in (-2, -1, 0, 1, 2)]
    return Row(what, times, amount, "GB/s", more)


# ---- what a difference is ----


def test_a_difference_counts_only_beyond_the_quartiles_of_both_and_three_percent():
    assert is_faster(row("a", 1.0), row("b", 1.5))
    assert not is_faster(row("b", 1.5), row("a", 1.0))
    assert not is_faster(row("a", 1.0, noise=0.2), row("b", 1.2, noise=0.2))
    assert not is_faster(row("a", 1.0, noise=0.0), row("b", 1.02, noise=0.0))
    assert not is_faster(Row("a", [1.0, 1.0]), Row("b", [9.0, 9.0])), "two times prove nothing"


def test_median_spread_and_rate():
    one = Row("a", [1.0, 2.0, 3.0, 4.0, 50.0], amount=6.0)
    assert (one.median, one.quartiles, one.rate) == (3.0, (2.0, 4.0), 2.0)
    assert one.spread == pytest.approx(2 / 3)


def test_cases_take_turns_until_the_time_is_over(monkeypatch):
    calls = []
    times = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0, CPU, least=1)
    assert calls[:2] == ["a", "b"], "warm-up"
    assert "".join(calls[2:]) == "ab" * len(times["a"])
    monkeypatch.setattr(samples, "MOST_ROUNDS", 7)
    assert len(in_turn({"a": lambda: None}, 60.0, CPU)["a"]) == 7


# ---- advice follows from figures ----


def test_readers_are_advised_only_where_they_read_more():
    alike = [row("1 thread", 1.0, 0.1), row("2 threads", 0.97, 0.1), row("2 processes", 3.0)]
    assert loader_advice(alike)[-1] == WITHIN_NOISE
    better = [row("1 thread", 1.0), row("2 processes", 0.5)]
    assert "`--data.readers 2 --data.reader_kind process`: 2.00 times" in loader_advice(better)[-1]


def test_pinning_is_judged_by_the_largest_copies():
    names = ("pageable to GPU", "pinned to GPU", "GPU to pageable", "GPU to pinned", "locking new memory")
    small = [row(name, 1.0) for name in names]
    large = [row(name, seconds) for name, seconds in zip(names, (3.0, 1.0, 3.0, 1.0, 20.0), strict=True)]
    first, second = pin_advice([*small, *large])
    assert "3.00 times as fast" in first
    assert "20.0 copies" in second
    assert "gains nothing" in pin_advice([*large, *small])[0]


def test_binding_is_advised_only_where_nodes_differ(tmp_path, monkeypatch):
    far = [row("node0 reads node0", 1.0), row("node0 reads node1", 1.8)]
    assert "numactl --cpunodebind=0 --membind=0" in numa_advice(far, "A thread")[0]
    assert "no binding" in numa_advice([row("node0 to GPU", 1.0), row("node1 to GPU", 1.01)], "The GPU")[0]
    for name, cpus in (("node0", "0-1"), ("node1", "2-3"), ("node2", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(copies.os, "sched_getaffinity", lambda _: {0, 2, 3})
    assert numa_nodes(tmp_path) == {"node0": {0}, "node1": {2, 3}}


def test_messages_are_joined_above_half_of_the_best_bandwidth():
    rows = [
        row(name, 1.0, amount=rate, bytes=size)
        for name, rate, size in (("1 KiB", 0.1, "1,024"), ("1 MiB", 6, "1"), ("16 MiB", 10, "2"))
    ]
    best, half = allreduce_advice(rows)
    assert "10.00 GB/s, at 16 MiB" in best
    assert "from 1 MiB on" in half
    assert allreduce_advice(rows[:2]) == []


# ---- the real work ----


def test_two_processes_reduce_messages_of_several_sizes():
    bench = bench_allreduce(2, "cpu", 5.0)
    assert [each.what for each in bench.rows][:2] == ["1 KiB", "8 KiB"], bench.left_out
    first = bench.rows[0]
    assert first.rate == pytest.approx(1024 / first.median / 1e9), "2 (n - 1) / n is 1 for two ranks"
    assert all(len(each.seconds) >= 5 for each in bench.rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it can run here")
def test_what_cannot_run_here_is_said(capsys):
    assert main(["perf", "bench", "pin", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == []
    assert "no GPU" in found["left_out"][0]
    assert main(["perf", "bench", "allreduce", "--device", "cuda"]) == 2
