"""Holding an operator against a formula in float64: its values, and the gradient of a random projection of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}
"""Largest error of a tensor as a share of it, both by their L2 norm. One rounding to bfloat16 costs about 2e-3."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtypes(*some: torch.dtype) -> pytest.MarkDecorator:
    """The test runs once per dtype, all three unless told."""
    return pytest.mark.parametrize("dtype", some or tuple(TOLERANCE), ids=name_of)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Float64 values that bfloat16 holds exactly, so that all dtypes see the same input."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.bfloat16().double()


def random_ids(below: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    """The L2 norm of the difference over that of what is expected (over 1 where nothing is)."""
    wanted = expected.detach().double().cpu()
    difference = (found.detach().double().cpu() - wanted).norm()
    return float(difference / (wanted.norm() if wanted.any() else 1.0))


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    assert found.shape == expected.shape, what
    assert error(found, expected) <= tolerance, f"{what}: off by {error(found, expected):.1e} of it"


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def values_and_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor], *others: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """All outputs, and d(random projection of all outputs) / d(each input)."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    # What may overwrite its input gets one that is not a leaf.
    outputs = outputs_of(function(*(leaf * 1 for leaf in leaves), *others))
    kept = [output.detach().clone() for output in outputs]
    total: Any = 0.0
    for number, output in enumerate(outputs):
        if output.requires_grad:
            total = total + (output.double() * random(*output.shape, seed=99 + number).to(output.device)).sum()
    return kept, list(torch.autograd.grad(total, leaves))


def assert_agrees(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    given_as: torch.dtype | Sequence[torch.dtype],
    *others: Any,
    tolerance: float | None = None,
    device: str = "cpu",
) -> None:
    """Same outputs and gradients as `reference` in float64, each input given in a dtype of its own or all in one;
    every gradient has the dtype of its input."""
    each = [given_as] * len(inputs) if isinstance(given_as, torch.dtype) else list(given_as)
    tolerance = tolerance or max(TOLERANCE[dtype] for dtype in each)
    there = [other.to(device) if isinstance(other, Tensor) else other for other in others]
    given = [value.to(device, dtype) for value, dtype in zip(inputs, each, strict=True)]
    expected, wanted = values_and_gradients(reference, inputs, *others)
    found, gradients = values_and_gradients(function, given, *there)
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_close(ours, theirs, tolerance, f"output {number}")
    for number, (ours, theirs) in enumerate(zip(gradients, wanted, strict=True)):
        assert ours.dtype == each[number]
        assert_close(ours, theirs, tolerance, f"gradient of input {number}")


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == theirs.dtype, f"tensor {number} is {ours.dtype}, not {theirs.dtype}"
        assert torch.equal(ours, theirs), f"tensor {number} differs"
