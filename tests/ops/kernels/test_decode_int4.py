"""Products with a matrix in 4 bits against float64: few rows of input with what is around them, and more rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.agreement import TOLERANCE, assert_close, random
from zero2all.infer import weights
from zero2all.infer.weights import Int4Weight, int4_weight
from zero2all.ops.kernels.decode_int4 import few_rows, many_rows

EPS = 1e-5
LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(weights, "_has_int4_cpu_kernel", lambda: False)


def stored(device: str, rows: int, columns: int, group: int) -> tuple[Int4Weight, Tensor]:
    """A matrix, and what it stands for in float64."""
    weight = int4_weight(random(rows, columns, seed=1).float().to(device), group)
    assert isinstance(weight, Int4Weight)
    return weight, weight.widened(torch.float64).cpu()


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize(
    ("count", "rows", "columns", "group", "sizes"),
    [
        (1, 38, 200, 64, {}),  # the last tiles are not full
        (3, 16, 640, 32, {"step": 4, "blocks": 4}),  # two steps
        (11, 40, 384, 128, {"warps": 8}),
    ],
)
def test_few_rows_with_norm_swiglu_and_residual(device, count, rows, columns, group, sizes):
    weight, matrix = stored(device, rows, columns, group)
    x, residual = random(count, columns), 10.0 * random(count, rows, seed=3)
    pairs = norm(x) @ matrix.T
    cases = (
        (x @ matrix.T, {}),
        (F.silu(pairs[:, 0::2]) * pairs[:, 1::2], {"norm": True, "eps": EPS, "swiglu": True}),
        (residual + x @ matrix.T, {"add": True}),
    )
    for wanted, around in cases:
        y = torch.empty(wanted.shape, dtype=LOW, device=device)
        y.copy_(residual if "add" in around else torch.zeros_like(wanted))
        few_rows(x.to(device, LOW), weight.values, weight.scales, y, **around, **sizes)
        assert_close(y, wanted, TOLERANCE[LOW], str(around))


@pytest.mark.parametrize(
    ("count", "rows", "columns", "group", "splits"), [(17, 70, 200, 64, 1), (66, 16, 600, 32, 3), (20, 64, 512, 128, 0)]
)
def test_many_rows_with_columns_that_programs_share(device, count, rows, columns, group, splits):
    weight, matrix = stored(device, rows, columns, group)
    x = random(count, columns)
    for _ in range(2):  # the counters are as they were
        y = torch.empty(count, rows, dtype=LOW, device=device)
        many_rows(x.to(device, LOW), weight.values, weight.scales, y, splits=splits)
        assert_close(y, x @ matrix.T, TOLERANCE[LOW])


def test_a_residual_in_float32_is_read_and_written(device):
    weight, matrix = stored(device, 40, 256, 64)
    x = random(2, 256)
    y = torch.full((2, 40), 1000.0, device=device)
    few_rows(x.float().to(device), weight.values, weight.scales, y, add=True)
    assert_close(y - 1000.0, x @ matrix.T, 1e-3)
