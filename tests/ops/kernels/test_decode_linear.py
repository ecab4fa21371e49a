"""Products of few rows of input with a matrix, with norm, SwiGLU and residual around them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.agreement import TOLERANCE, assert_close, dtypes, random
from zero2all.ops.kernels.decode_linear import Tiles, decode_linear, tiles_for

EPS = 1e-5
SMALL = {1: Tiles(rows=4, columns=32, warps=1), 3: Tiles(rows=16, columns=32, warps=1, stages=2)}
"""By the number of inputs: several tiles in each direction, the last ones not full."""
inputs_of_a_pass = pytest.mark.parametrize("count", SMALL, ids=["one", "few"])


def product(device, dtype, x, weight, residual=None, tiles=None, **details) -> Tensor:
    """The kernel's, of float64 tensors given in `dtype`."""
    given = [value.to(device, dtype) for value in (x, weight)]
    if details.get("gain") is not None:
        details["gain"] = details["gain"].to(device, dtype)
    rows = len(weight) // (2 if details.get("swiglu") else 1)
    y = torch.empty(len(x), rows, dtype=dtype, device=device)
    if residual is not None:
        y.copy_(residual)
    decode_linear(*given, None, y, add=residual is not None, tiles=tiles or SMALL[len(x)], **details)
    return y


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * gain


@dtypes(torch.float32, torch.bfloat16)
@inputs_of_a_pass
def test_swiglu_of_pairs_of_rows_behind_it(device, dtype, count):
    x, weight, gain = random(count, 72), random(38, 72, seed=1) / 8, 1.0 + random(72, seed=2) / 8
    pairs = norm(x, gain.to(dtype).double()) @ weight.T
    wanted = F.silu(pairs[:, 0::2]) * pairs[:, 1::2]
    assert_close(product(device, dtype, x, weight, gain=gain, eps=EPS, swiglu=True), wanted, TOLERANCE[dtype])


@dtypes(torch.float32, torch.bfloat16)
@inputs_of_a_pass
def test_product_is_that_of_the_matrix_alone_and_added_to_the_residual(device, dtype, count):
    x, weight, residual = random(count, 72), random(37, 72, seed=1), 10.0 * random(count, 37, seed=3)
    assert_close(product(device, dtype, x, weight), x @ weight.T, TOLERANCE[dtype])
    assert_close(product(device, dtype, x, weight, residual), residual + x @ weight.T, TOLERANCE[dtype])


@inputs_of_a_pass
def test_int8_rows_with_their_scales(device, count):
    x, scales = random(count, 72), 0.01 + random(38, seed=2).abs() / 100
    weight = torch.randint(-127, 128, (38, 72), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    pairs = x @ (weight.double() * scales.float().double()[:, None]).T
    for swiglu, wanted in ((False, pairs), (True, F.silu(pairs[:, 0::2]) * pairs[:, 1::2])):
        y = torch.empty(wanted.shape, dtype=torch.bfloat16, device=device)
        there = [x.to(device, torch.bfloat16), weight.to(device), scales.float().to(device)]
        decode_linear(*there, y, swiglu=swiglu, tiles=SMALL[count])
        assert_close(y, wanted, TOLERANCE[torch.bfloat16])


@inputs_of_a_pass
def test_float32_residual_beside_bfloat16_weights(device, count):
    low = torch.bfloat16
    residual = 1000.0 + random(count, 72).to(device, torch.float32)
    weight, gain = random(37, 72, seed=1).to(device, low), torch.ones(72, dtype=low, device=device)
    y = torch.empty(count, 37, dtype=low, device=device)
    decode_linear(residual, weight, None, y, gain=gain, eps=EPS, tiles=SMALL[count])
    wanted = norm(residual.double(), gain.double()) @ weight.double().T
    assert_close(y, wanted, TOLERANCE[low])
    back = torch.full((count, 72), 1000.0, device=device)
    inner = random(count, 37, seed=4).to(device, low)
    decode_linear(inner, weight.T.contiguous(), None, back, add=True, tiles=SMALL[count])
    assert_close(back - 1000.0, inner.double() @ weight.double(), 1e-3)  # not rounded to bfloat16, which has steps of 8


def test_more_inputs_than_a_program_takes(device):
    x, weight = random(70, 40), random(18, 40, seed=1)
    found = product(device, torch.float32, x, weight, tiles=Tiles(rows=16, columns=64, warps=1, stages=1))
    assert_close(found, x @ weight.T, TOLERANCE[torch.float32])


@inputs_of_a_pass
@pytest.mark.parametrize("weight_bytes", [1, 2, 4])
def test_default_tiles_fit_every_shape(device, weight_bytes, count):
    for rows, columns in ((6, 10), (48, 40), (64320, 2048), (2048, 5632)):
        tiles = tiles_for(count, rows, columns, weight_bytes, 4)
        assert all(size & (size - 1) == 0 for size in (tiles.rows, tiles.columns, tiles.warps))
        if rows * columns < 10_000 and weight_bytes == 4:
            x, weight = random(count, columns), random(rows, columns, seed=1)
            assert_close(product(device, torch.float32, x, weight, tiles=tiles), x @ weight.T, 3e-6)
