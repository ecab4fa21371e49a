"""Half of a symmetric product, mirrored, against the whole one in float64."""

import pytest
import torch

from tests.ops.agreement import random
from zero2all.ops.kernels import symmetric
from zero2all.ops.kernels.symmetric import times_transposed


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """Several tiles; on a GPU as they are, because the matrices may be large there."""
    if device == "cpu":
        monkeypatch.setattr(symmetric, "TILE", 16)
        monkeypatch.setattr(symmetric, "DEPTH", 16)


@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize("shape", [(2, 40, 56), (1, 16, 24), (3, 5, 9)])
def test_half_of_a_product_is_mirrored(device, shape, is_tall):
    n, rows, columns = (shape[0], *(size * (1 if device == "cpu" else 24) for size in shape[1:]))
    x = random(n * rows * columns, seed=1).view(n, rows, columns).bfloat16().to(device)
    x = x.mT.contiguous().mT if is_tall else x
    exact = x.double() @ x.double().mT
    found = times_transposed(x)
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found.double(), exact, rtol=8e-3, atol=8e-3 * columns**0.5)
    product = (found / columns).contiguous()
    exact = 0.5 * product.double() @ product.double() - 1.25 * product.double() + 2.0 * torch.eye(rows, device=device)
    found = times_transposed(product, 0.5, product, -1.25, 2.0)
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found.double(), exact, rtol=8e-3, atol=8e-3)
