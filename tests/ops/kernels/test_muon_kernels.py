"""Muon's kernels around the products against its formulas in torch."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.ops.agreement import assert_same_bits, random
from tests.train.optimizers.parameters import TABLE, drawn, logical, whole_masters

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.config.training import MuonConfig, OptimConfig
from zero2all.ops.kernels import muon as kernels
from zero2all.train.optimizers.factory import build_optimizer
from zero2all.train.optimizers.muon import Muon, Numbers, line_factors, prepare, take_step

STACKS = {  # shapes of tensors whose matrices are alike, and how many alternate in each
    "wide": ([(5, 37)], [1]),
    "tall": ([(41, 7), (41, 7)], [1, 1]),
    "gate and up": ([(10, 16), (5, 16)], [2, 1]),
    "experts": ([(3, 6, 9), (2, 6, 9)], [1, 1]),
    "experts of gate and up": ([(3, 10, 9), (4, 10, 9)], [2, 2]),
    "one row": ([(1, 50)], [1]),
    "one column": ([(50, 1)], [1]),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks for each row, several tiles for each matrix."""
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "TILE", 16)


def tensors(shapes, seed, device, dtype=torch.float32):
    return [random(*shape, seed=seed + place).to(device, dtype) for place, shape in enumerate(shapes)]


def numbers(device, scale=0.3, skip=False):
    on_device = partial(torch.tensor, device=device)
    return Numbers(0.9, 0.02, 0.1, scale and on_device(scale), None if skip is None else on_device(skip))


def both(shapes, turns, device, given, nesterov=True, gradient=torch.float32, wanted=torch.float32):
    """Momenta and the stack, by the formulas and by the kernel."""
    for use in (False, True):
        gradients, momenta = tensors(shapes, 1, device, gradient), tensors(shapes, 9, device)
        for values in (*gradients, *momenta):
            values[..., 2 : len(values) // 2 + 2, :] *= 1e-3
            values[..., :1, :] = 0
        yield momenta, prepare(gradients, momenta, turns, given._replace(nesterov=nesterov), wanted, use)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("stack", STACKS)
def test_momenta_and_rows_of_equal_length_are_those_of_the_formula(device, small_blocks, stack, nesterov):
    shapes, turns = STACKS[stack]
    (momenta, x), (by_kernel, found) = both(shapes, turns, device, numbers(device), nesterov)
    torch.testing.assert_close(by_kernel, momenta, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-7)
    rows = shapes[0][-2] // turns[0]
    lengths = found.norm(dim=-1) * 1.01 * rows**0.5
    assert ((lengths - 1).abs() < 1e-5).logical_or(lengths == 0).all()
    assert not found[0, 0].any(), "a row of zeros stays one"


@pytest.mark.parametrize(("scale", "skip"), [(None, None), (None, False), (2.0, None), (0.5, True)])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_and_results_in_bfloat16_with_and_without_a_factor(device, scale, skip, gradient):
    shapes, turns = STACKS["gate and up"]
    given = numbers(device, scale, skip)
    (momenta, x), (by_kernel, found) = both(shapes, turns, device, given, gradient=gradient, wanted=torch.bfloat16)
    torch.testing.assert_close(by_kernel, momenta, rtol=1e-6, atol=1e-7)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), x.float(), rtol=8e-3, atol=1e-6)  # a rounding that falls the other way


def test_rows_may_be_longer_than_a_block_and_values_have_no_momentum(device):
    values = tensors([(3, 9001)], 1, device, torch.bfloat16)
    x, found = (prepare(values, None, [1], numbers(device, 0.5), torch.float32, use) for use in (False, True))
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found.norm(dim=-1), torch.full((1, 3), 1 / (1.01 * 3**0.5), device=device))


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("stack", STACKS)
def test_the_step_is_that_of_the_formula(device, small_blocks, stack, cautious):
    shapes, turns = STACKS[stack]
    rows, columns = shapes[0][-2] // turns[0], shapes[0][-1]
    sizes = [weight.numel() // (rows * columns) for weight in tensors(shapes, 1, "cpu")]
    o = tensors([(sum(sizes), columns, rows)], 3, device, torch.bfloat16)[0].mT  # tall ones are stored by columns
    o = o if rows > columns else o.contiguous()
    squares = [torch.rand(size, max(rows, columns), device=device) + 0.5 for size in sizes]
    factors = line_factors(o, squares, 0.9, None)
    weights, given = ([], []), numbers(device)._replace(cautious=cautious)
    for use, made in zip((False, True), weights, strict=True):
        made += tensors(shapes, 5, device)
        for weight, turn, *pieces in zip(made, turns, o.split(sizes), factors.split(sizes), strict=True):
            take_step(weight, *pieces, turn, given, use)
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)
    part, step = tensors([(rows, columns)], 5, device)[0], o[:1]  # of a matrix that is cut: no factors
    expected = part.clone()
    take_step(expected, step, None, 1, given, False)
    take_step(part, step, None, 1, given, True)
    torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-6)


def test_a_skipped_step_leaves_every_bit_as_it_was(device):
    given, (weight, momentum) = numbers(device, torch.nan, True), tensors([(6, 9), (6, 9)], 1, device)
    before = [weight.clone(), momentum.clone()]
    x = prepare([torch.full_like(weight, torch.inf)], [momentum], [2], given, torch.bfloat16, True)
    take_step(weight, x, torch.full((2, 9), torch.nan, device=device), 2, given._replace(cautious=True), True)
    assert_same_bits([weight, momentum], before)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_muon_with_kernels_trains_as_with_the_formulas(device, precision):
    config = OptimConfig("muon", lr_max=0.02, muon=MuonConfig(precision=precision))
    runs = []
    for use in (False, True):
        weights = {name: one.to(device) for name, one in drawn(99).items()}
        gradients = {}
        optimizer = build_optimizer(whole_masters(weights, gradients), config, TABLE, "eager")
        assert isinstance(optimizer, Muon)
        optimizer.kernels = use
        for step in range(4):
            gradients |= {name: one.to(device) for name, one in drawn(step, torch.bfloat16).items()}
            optimizer.step(torch.tensor(0.5, device=device), torch.tensor(float(step == 2), device=device))
        runs.append({**weights, **{name: part.values for name, part in optimizer.state_tensors().items()}})
    close = {"float32": 1e-4, "bfloat16": 3e-3}[precision]
    for name, values in runs[0].items():
        torch.testing.assert_close(runs[1][name], values, rtol=close, atol=close, msg=name)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature
from zero2all.ops.kernels.muon import BLOCK, TILE, _momentum, _step

target = GPUTarget("cuda", 90, 32)
backend = CUDABackend(target)

def compile_once(kernel, constants, *calls):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    found = [bind(*call, **constants)[1] for call in calls]
    assert all(one == found[0] for one in found), found
    kinds = dict(zip(kernel.arg_names, found[0], strict=True))
    values = {name: how for name, (kind, how) in kinds.items() if kind == "constexpr"}
    aligned = {(place,): backend.parse_attr(how) for place, (kind, how) in enumerate(kinds.values())
               if kind != "constexpr" and how}
    source = ASTSource(kernel, {name: kind for name, (kind, _) in kinds.items()}, values, aligned)
    return triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"]

low, wide, flag = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64), torch.zeros((), dtype=torch.bool)
numbers, constants = (0.9, 0.1, 1e-15, 3.0), {"NESTEROV": True, "BLOCK": BLOCK}
shapes = [(2048, 1, 5632), (5632, 1, 2048), (1408, 2, 512), (1, 1, 64), (15, 3, 16)]
for tensors in [(wide, wide, low, wide[1], flag), (low, wide, wide, None, None), (low, None, low, None, flag)]:
    ptx = compile_once(_momentum, constants, *((*tensors, *shape, *numbers) for shape in shapes))
    assert "ld.global.v4" in ptx and ("st.global.v4" in ptx or "st.global.v2" in ptx), ptx
    odd = ((rows, turns, columns + 5) for rows, turns, columns in shapes)
    compile_once(_momentum, constants, *((*tensors, *shape, *numbers) for shape in odd))

constants = {"CAUTIOUS": True, "TILE": TILE}
tall, short = [(2048, 2, 512), (80, 1, 64), (64, 1, 64)], [(512, 2, 2048), (15, 3, 32), (1, 1, 64)]
for factors, skip in [(wide, flag), (None, None)]:
    first = (wide, low, factors, skip)
    for by_row, by_column, shapes in [(True, False, tall), (True, True, tall), (False, False, short)]:
        calls = ((*first, r, t, c, r * c, *((1, r) if by_column else (c, 1)), 0.1, 0.1) for r, t, c in shapes)
        ptx = compile_once(_step, {**constants, "BY_ROW": by_row}, *calls)
        assert "ld.global.v4" in ptx and "st.global.v4" in ptx, ptx
print("compiled")
"""


def test_one_compilation_for_a_hopper_gpu_serves_all_shapes(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_compiles_nothing_for_further_shapes():
    def train(shapes):
        table = {str(shape): logical(str(shape), shape, alternating=2) for shape in shapes}
        weights = {name: torch.randn(one.shape, device="cuda") for name, one in table.items()}
        gradients = {name: torch.randn_like(weight) for name, weight in weights.items()}
        build_optimizer(whole_masters(weights, gradients), OptimConfig("muon"), table).step()
        return [len(kernel.device_caches[0][0]) for kernel in (kernels._momentum, kernels._step)]

    found = train([(64, 64), (256, 64), (128, 64), (64, 256)])  # wide, tall, square
    assert train([(128, 1408), (2048, 512), (8, 32, 48), (1024, 512), (6, 16)]) == found
