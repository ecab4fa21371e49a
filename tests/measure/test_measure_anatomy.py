"""Traces of a GPU, written by hand so that every figure is known, and of this CPU."""

import pytest

from zero2all.estimate.floors import Work
from zero2all.measure.anatomy import STEP, add_floors, anatomy_of, product_flops

NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"


def event(cat: str, name: str, start: float, end: float, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": 1e3 * start, "dur": 1e3 * (end - start), "tid": 1, "args": args}


def launch(number: int, at: float) -> dict:
    return event("cuda_runtime", "cudaLaunchKernel", at, at + 0.01, correlation=number)


GPU_STEP = [
    event("user_annotation", STEP, 0, 100),
    event("user_annotation", "z2a phase: loss", 1, 1.5),
    event("user_annotation", "z2a phase: update", 4, 6),
    event("cpu_op", "aten::mm", 0.1, 0.2, **{"External id": 7, "Input Dims": [[1000, 2000], [2000, 500]]}),
    *(launch(number, at) for number, at in ((1, 0.1), (2, 0.5), (3, 1.2), (4, 3), (5, 3.1), (6, 5), (7, 1.8))),
    event("kernel", NVJET, 10, 30, correlation=1, **{"External id": 7}),
    event("kernel", "void cublasLt::splitKreduce_kernel", 30, 30, correlation=1, **{"External id": 7}),
    event("kernel", "_forward", 28, 40, correlation=2),  # began before the product had ended
    event("kernel", "vectorized_elementwise_kernel", 40, 45, correlation=3),  # queued inside the loss
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 35, 55, correlation=4),  # 10 of 20 are hidden
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 50, 60, correlation=5),  # 5 behind communication
    event("kernel", "vectorized_elementwise_kernel", 70, 80, correlation=6),  # queued by the update
    event("kernel", "vectorized_elementwise_kernel", 80, 81, correlation=7),  # after the loss, still forward
    event("kernel", NVJET, 150, 160, correlation=99),  # after the step
]


def test_every_instant_of_a_step_on_a_gpu_belongs_to_one_group():
    found = anatomy_of(GPU_STEP)
    assert (found.kind, found.steps, found.seconds) == ("cuda", 1, pytest.approx(0.1))
    groups = {name: round(1e3 * seconds, 6) for name, seconds in found.groups.items() if seconds}
    busy = {"GEMM": 20, "element-wise": 11, "loss": 5, "communication": 10, "memory copies": 5, "optimizer": 10}
    assert groups == {**busy, "idle between kernels": 39}
    assert sum(found.groups.values()) == pytest.approx(found.seconds)


def test_floors_of_a_product_by_its_shapes_and_of_an_operator_by_its_bytes():
    found = anatomy_of(GPU_STEP)
    work = {"rms_norm": Work(forward_bytes=5e6, backward_bytes=1.0)}
    add_floors(found, work, passes=1, copy_bytes_per_second=1e9, flops_per_second=2e11)
    rows = {row.name: row for row in found.rows}
    assert rows[NVJET].floor_percent == pytest.approx(100 * (2 * 1000 * 2000 * 500 / 2e11) / 0.020)
    assert rows["void cublasLt::splitKreduce_kernel"].floor_percent is None  # its arithmetic is counted already
    assert rows["_forward"].floor_percent == pytest.approx(100 * 5e-3 / 0.010)
    assert rows["vectorized_elementwise_kernel"].floor_percent is None


def test_figures_are_those_of_one_of_several_steps():
    later = [{**one, "ts": one["ts"] + 1e6} for one in GPU_STEP]
    for one in later:
        if "correlation" in one["args"]:
            one["args"] = {**one["args"], "correlation": one["args"]["correlation"] + 100}
    found = anatomy_of([*GPU_STEP, *later])
    once = anatomy_of(GPU_STEP)
    assert (found.steps, found.groups) == (2, pytest.approx(once.groups))
    assert {row.name: row.calls for row in found.rows} == {row.name: row.calls for row in once.rows}


def test_on_a_cpu_an_operator_has_only_its_own_time():
    linear = event("cpu_op", "aten::mm", 10, 40, **{"Input Dims": [[8, 16], [16, 4]]})
    backward = event("cpu_op", "autograd::engine::evaluate_function: SiluBackward0", 50, 90)
    within = [event("cpu_op", "SiluBackward0", 51, 89), event("cpu_op", "aten::silu_backward", 60, 80)]
    step = [event("user_annotation", STEP, 0, 100), event("cpu_op", "aten::linear", 0, 40)]
    found = anatomy_of([*step, linear, backward, *within])
    assert found.kind == "cpu"
    groups = {name: round(1e3 * seconds) for name, seconds in found.groups.items() if seconds}
    assert groups == {"GEMM": 40, "element-wise": 20, "between operators": 40}
    assert found.rows[0].flops == 2 * 8 * 16 * 4


def test_flops_of_a_product():
    for name, shapes, flops in (
        ("aten::mm", [[2, 3], [3, 5]], 60),
        ("aten::addmm", [[2, 5], [2, 3], [3, 5], [], []], 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 420),
        ("aten::mul", [[2, 3], [2, 3]], None),
        ("aten::mm", None, None),
    ):
        args = {} if shapes is None else {"Input Dims": shapes}
        assert product_flops({"name": name, "args": args}) == flops
    with pytest.raises(ValueError, match="z2a step"):  # a trace without a step
        anatomy_of([event("cpu_op", "aten::mm", 0, 1)])
