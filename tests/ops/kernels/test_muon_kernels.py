"""Muon's kernels around the products against its formulas in torch."""

from functools import partial

import pytest
import torch

from tests.ops.agreement import assert_same_bits, random
from tests.train.optimizers.parameters import TABLE, drawn, whole_masters
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


@pytest.mark.parametrize(("scale", "skip"), [(None, None), (2.0, False), (0.5, True)])
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
