"""Holding an operator against a formula in float64: its values, and the gradient of a random projection of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import formulas
from zero2all.ops.gradient_sink import GradientSink

Op, Tensors = Callable[..., Any], Sequence[Tensor]
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


def random_projection(result: Any) -> Any:
    """Of all outputs that have a gradient."""
    total: Any = 0.0
    for number, output in enumerate(outputs_of(result)):
        if output.requires_grad:
            total = total + (output.double() * random(*output.shape, seed=99 + number).to(output.device)).sum()
    return total


def values_and_gradients(function: Op, inputs: Tensors, *others: Any) -> tuple[list[Tensor], list[Tensor]]:
    """All outputs, and d(random projection of all outputs) / d(each input)."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    # What may overwrite its input gets one that is not a leaf.
    outputs = outputs_of(function(*(leaf * 1 for leaf in leaves), *others))
    kept = [output.detach().clone() for output in outputs]
    return kept, list(torch.autograd.grad(random_projection(outputs), leaves))


def assert_agrees(
    function: Op, reference: Op, inputs: Tensors, given_as: Any, *others: Any, tolerance: float = 0, device: str = "cpu"
) -> None:
    """Same outputs and gradients as `reference` in float64; every gradient has the dtype of its input."""
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


def assert_sinks_gather(
    function: Op, reference: Op, inputs: Tensors, weights: Tensors, *others: Any, tolerance: float = 1e-2, device="cpu"
) -> None:
    """Of bfloat16 weights that have sinks, gradients are added to these in float32, one micro-batch after the other,
    and are left nowhere else."""
    there = [other.to(device) if isinstance(other, Tensor) else other for other in others]
    ours = [weight.to(device, torch.bfloat16).requires_grad_() for weight in weights]
    exact = [weight.clone().requires_grad_() for weight in weights]
    for weight in ours:
        weight.gradient_sink = GradientSink(torch.ones(weight.shape, device=device))
    for number, factor in enumerate((1.0, 0.3, 0.3)):
        given = [value.roll(number, dims=0) for value in inputs]
        found = function(*(value.to(device, torch.bfloat16) for value in given), *ours, *there)
        (factor * random_projection(found)).backward()
        (factor * random_projection(reference(*given, *exact, *others))).backward()
    for weight, gathered in zip(ours, exact, strict=True):
        assert weight.grad is None
        assert weight.gradient_sink.buffer.dtype == torch.float32
        assert_close(weight.gradient_sink.buffer, 1.0 + gathered.grad, tolerance)


def assert_float32_residual_stays(add_rms_norm: Op, weight: Tensor, device: str = "cpu") -> None:
    """Under bfloat16 weights: what a branch of 1 adds to 1000 is lost in bfloat16."""
    low, wide = torch.bfloat16, torch.float32
    x, ones = torch.full((2, 8), 1000.0, device=device), torch.ones(2, 8, dtype=low, device=device)
    normed, total = add_rms_norm(x, ones, ones[0], 1e-5)
    assert (normed.dtype, total.dtype) == (low, wide)
    assert torch.equal(total, torch.full_like(total, 1001.0))
    inputs, given_as = [random(5, len(weight)), random(5, len(weight), seed=1), weight], [wide, low, low]
    found, wanted = (lambda *given, of=function: of(*given, 1e-5) for function in (add_rms_norm, formulas.rms_norm))
    assert_agrees(found, wanted, inputs, given_as, device=device)


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == theirs.dtype, f"tensor {number} is {ours.dtype}, not {theirs.dtype}"
        assert torch.equal(ours, theirs), f"tensor {number} differs"
