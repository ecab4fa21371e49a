"""`z2a perf ops` and how an operator is called alone."""

import dataclasses
import json

import pytest
import torch

from benchmarks.operators import EXACT, bench_cells, bench_operators
from zero2all.measure.operators import forward_and_both, listed_operators, make_case
from zero2all.ops.implementation import Implementation
from zero2all.ops.registry import OPERATORS


def test_every_implementation_is_listed_with_its_state_and_one_of_each_operator_is_autos(tiny):
    entries = listed_operators(tiny)
    assert len(entries) == sum(map(len, OPERATORS.values()))
    for operator in OPERATORS:
        taken = [entry for entry in entries if entry["operator"] == operator and entry["taken_by_auto"]]
        assert len(taken) == 1
        assert taken[0]["why_not"] is None
    fp8 = next(entry for entry in entries if entry["implementation"] == "fp8")
    assert fp8["why_not"] == "it needs a CUDA device"


def test_the_list_says_what_the_config_takes_instead(tiny_path, tmp_path, z2a):
    file = tmp_path / "ops.json"
    out = z2a.done("perf", "ops", tiny_path, "--ops.attention", "math", "--json", file)
    assert "config" in next(line for line in out.splitlines() if " math " in line)
    assert next(entry["implementation"] for entry in json.loads(file.read_text()) if entry["taken"]) == "math"
    z2a.refused(2, "perf", "ops", "--ops.linear", "plain")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so and goes on
@pytest.mark.parametrize(("operator", "gathered"), [("rms_norm", False), ("swiglu", False), ("linear/down", True)])
def test_only_weights_whose_gradients_are_summed_gather_them_in_the_timing(tiny, operator, gathered):
    case, seen = make_case(operator, tiny.model, 1, 8, torch.device("cpu")), []
    name = operator.partition("/")[0]
    function = next(one.function for one in OPERATORS[name] if one.name == EXACT[name])

    def watched(*given):
        for value in given:
            if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
                value.register_post_accumulate_grad_hook(lambda _: seen.append(operator))
        return function(*given)

    _, both = forward_and_both(watched, case, torch.bfloat16)
    both()
    assert bool(seen) == gathered


def test_the_benchmark_sees_an_error_and_goes_on_after_a_failure(tiny, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel\nand much more")

    right = next(one.function for one in OPERATORS["swiglu"] if one.name == "torch")
    wrong = Implementation("wrong", lambda gate_up: 1.01 * right(gate_up))
    monkeypatch.setitem(OPERATORS, "swiglu", (*OPERATORS["swiglu"], Implementation("broken", broken), wrong))
    bench = bench_operators(tiny, tokens=16, only="swiglu", least_seconds=0.0, each=lambda _: None)
    *_, failed, found = bench.rows
    assert (failed.problem, found.error) == ("RuntimeError: no such kernel", pytest.approx(0.01, rel=1e-3))
    floor = 8 * 16 * 64 * 4 / bench.ceilings.copy_bytes_per_second  # 3 F forward, 5 F backward, of float32
    assert found.floor_percent == pytest.approx(1e5 * floor / (found.forward_ms + found.backward_ms))
    assert dataclasses.asdict(bench)["rows"][-1]["operator"] == "swiglu"
    assert bench_cells(bench)[-2][-1] == "RuntimeError: no such kernel"
