"""Lets somebody else's kernels compute a little, forward and backward, before a run depends on them.

Packages that compile their kernels on first use need compiler, driver and package to fit together, and whether they do
shows only then. Better in a probe, which passes them over with the reason, than in the first step of a run of days. The
seconds it takes are those of the compiling, which the first step would take otherwise. A kernel that reads where it may
not takes the process's GPU down with it here as everywhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = "cuda"
TOLERANCE = 2e-2
"""Largest relative error of a result or gradient; bfloat16 makes about 3e-3."""


def is_there(module: str) -> bool:
    """Whether a module can be found; looking for one inside a package imports the package, which may be broken."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:
        return False


def problem_of(
    function: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
) -> str | None:
    """What is wrong with `function` on random tensors of these shapes, by the formula in float32; None: nothing."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes]
    wanted = _with_gradients(formula, inputs, torch.float32)
    try:
        found = _with_gradients(function, inputs, dtype)
        with torch.no_grad():
            found.append(function(*inputs))  # validation may take another kernel
        pairs = zip(found, [*wanted, wanted[0]], strict=True)
        errors = [(ours.float() - exact).norm() / exact.norm() for ours, exact in pairs]
        error = float(torch.stack(errors).max())  # where one is not a number, so is the largest
    except Exception as failure:
        first = next(iter(str(failure).splitlines()), "")
        return f"it failed when it was tried: {type(failure).__name__}: {first}"[:300].rstrip(".")
    if not error <= TOLERANCE:
        return f"its results were wrong by {error:.1%} when it was tried"
    return None


def _with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [value.to(dtype, copy=True).requires_grad_() for value in inputs]
    with torch.enable_grad():
        result = function(*leaves)
        generator = torch.Generator(result.device).manual_seed(1)
        direction = torch.randn(result.shape, generator=generator, device=result.device)
        # Rounded the same way for both.
        direction = direction.bfloat16().to(dtype)
        return [result.detach(), *torch.autograd.grad(result, leaves, direction)]
