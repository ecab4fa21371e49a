"""`z2a perf ops` and `z2a perf ops bench`."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from zero2all.measure.op_bench import Ceilings, bench_cells, bench_operators, listed_operators, operator_names
from zero2all.measure.variants import NAIVE

from zero2all.cli.main import main
from zero2all.common.errors import UsageError
from zero2all.measure import op_bench
from zero2all.ops.implementation import Implementation
from zero2all.ops.registry import OPERATORS


def nothing(_: object) -> None:
    pass


def test_every_implementation_is_listed_with_its_state_and_one_of_each_operator_is_autos(tiny):
    entries = listed_operators(tiny)
    assert len(entries) == sum(map(len, OPERATORS.values()))
    for operator in OPERATORS:
        taken = [entry for entry in entries if entry["operator"] == operator and entry["taken_by_auto"]]
        assert len(taken) == 1
        assert taken[0]["why_not"] is None
    fp8 = next(entry for entry in entries if entry["implementation"] == "fp8")
    assert fp8["why_not"] == "it needs a CUDA device"


def test_the_list_says_what_the_config_takes_instead(tiny_path, tmp_path, capsys):
    file = tmp_path / "ops.json"
    assert main(["perf", "ops", str(tiny_path), "--ops.attention", "math", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "config" in next(line for line in out.splitlines() if " math " in line)
    entries = json.loads(file.read_text())
    assert next(entry["implementation"] for entry in entries if entry["taken"]) == "math"


def test_without_a_config_the_list_is_for_this_device_and_settings_are_refused(capsys):
    assert main(["perf", "ops"]) == 0
    assert "rms_norm" in capsys.readouterr().out
    assert main(["perf", "ops", "--ops.linear", "plain"]) == 2
    assert main(["perf", "ops", "quickstart", "z2all-1b"]) == 2


@pytest.fixture(scope="module")
def bench(tiny):
    return bench_operators(tiny, tokens=None, only=None, least_seconds=0.0, each=nothing)


def test_the_bench_measures_whatever_runs_here_and_gives_a_reason_for_the_rest(bench, tiny):
    assert {row.operator for row in bench.rows} == set(operator_names(tiny))
    for row in bench.rows:
        if row.problem is None:
            assert row.forward_ms > 0
            assert row.floor_percent > 0
            assert row.error < 1e-5, f"{row.operator} {row.implementation} is float32"
        else:
            assert "CUDA" in row.problem
    measured = {(row.operator, row.implementation) for row in bench.rows if row.problem is None}
    assert {("attention", "math"), ("linear/gate_up", "plain"), ("optimizer", "fused")} <= measured


def test_percent_of_the_floor_is_the_floors_time_over_the_measured_one(bench):
    row = next(row for row in bench.rows if row.operator == "rms_norm" and row.problem is None)
    floor = 8 * 64 * 32 * 4 / bench.ceilings.copy_bytes_per_second  # 2 x 32 tokens of width 32 in float32
    assert row.floor_ms == pytest.approx(1e3 * floor)
    assert row.floor_percent == pytest.approx(100 * row.floor_ms / (row.forward_ms + row.backward_ms))


def test_an_operator_that_fails_is_one_row_and_not_the_end(tiny, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel\nand much more")

    own = OPERATORS["swiglu"]
    monkeypatch.setitem(OPERATORS, "swiglu", (*own, Implementation("broken", broken)))
    bench = bench_operators(tiny, tokens=16, only="swiglu", least_seconds=0.0, each=nothing)
    assert bench.rows[-1].problem == "RuntimeError: no such kernel"
    assert any(row.problem is None for row in bench.rows)
    assert bench_cells(bench)[-1][-1] == "RuntimeError: no such kernel"


def test_an_error_is_seen(tiny, monkeypatch):
    (right,) = [one.function for one in OPERATORS["swiglu"] if one.name == "torch"]
    wrong = Implementation("wrong", lambda gate_up: 1.01 * right(gate_up))
    monkeypatch.setitem(OPERATORS, "swiglu", (*OPERATORS["swiglu"], wrong))
    bench = bench_operators(tiny, tokens=16, only="swiglu", least_seconds=0.0, each=nothing)
    assert bench.rows[-1].error == pytest.approx(0.01, rel=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so and goes on
def test_only_weights_whose_gradients_are_summed_gather_them_in_the_timing(tiny, monkeypatch):
    gathered = []

    def watched(implementation):
        def function(*given):
            for number, value in enumerate(given):
                if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
                    value.register_post_accumulate_grad_hook(lambda _, number=number: gathered.append(number))
            return implementation.function(*given)

        return dataclasses.replace(implementation, function=function)

    for operator in ("rms_norm", "swiglu", "linear"):
        by_name = {one.name: one for one in OPERATORS[operator]}
        monkeypatch.setitem(OPERATORS, operator, (watched(by_name[NAIVE[operator]]),))
    # A large matmul takes seconds on a CPU without bfloat16, and is not what is looked at.
    monkeypatch.setattr(op_bench, "measured_ceilings", lambda *_: Ceilings(1e9, 1e9))
    low = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, precision="bfloat16"))
    for operator in ("rms_norm", "swiglu"):
        bench = bench_operators(low, tokens=8, only=operator, least_seconds=0.0, each=nothing)
        assert bench.rows[-1].problem is None
        assert not gathered
    bench_operators(low, tokens=8, only="linear/down", least_seconds=0.0, each=nothing)
    assert 1 in gathered


def test_one_matrix_or_all_of_them(tiny):
    bench = bench_operators(tiny, tokens=8, only="linear/down", least_seconds=0.0, each=nothing)
    assert {row.operator for row in bench.rows} == {"linear/down"}
    with pytest.raises(UsageError, match="rms_norm"):
        bench_operators(tiny, tokens=8, only="rms_nrm", least_seconds=0.0, each=nothing)


def test_the_verb_prints_the_ceilings_and_keeps_json(tiny_path, tmp_path, capsys):
    file = tmp_path / "bench.json"
    words = ["perf", "bench", "ops", str(tiny_path), "--only", "rope", "--rows", "16", "--seconds", "0"]
    assert main([*words, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "1 x 16 tokens" in out
    assert "GB/s" in out
    assert len(json.loads(file.read_text())["rows"]) == len(OPERATORS["rope"])
