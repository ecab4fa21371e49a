"""Scaling by a number that only the device knows."""

import pytest
import torch

from tests.ops.agreement import assert_close, dtypes, random
from zero2all.ops.kernels.scaled import add_scaled_, scaled


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (130, 70)])
def test_scaled_keeps_the_dtype_and_leaves_what_was_given_and_sums_are_in_float32(device, dtype, shape):
    given = random(*shape).to(device, dtype)
    before = given.clone()
    found = scaled(given, torch.tensor(0.3, device=device))
    assert found.dtype == dtype
    assert torch.equal(given, before)
    assert_close(found, random(*shape) * 0.3, 4e-3 if dtype == torch.bfloat16 else 1e-6)
    total = random(*shape, seed=1).float().to(device)
    add_scaled_(total, random(*shape).float().to(device), torch.tensor(-2.5, device=device))
    assert_close(total, random(*shape, seed=1) - 2.5 * random(*shape), 1e-6)
