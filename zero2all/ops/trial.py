"""Runs kernels of other packages once on small inputs, forward and backward, before a run depends on them.

Packages that compile their kernels on first use fail there if compiler, driver and package do not fit together. In a
check that is a reason to choose another implementation; in the first step of a run it would end the run. The trial
takes as long as compiling, which the first step would otherwise do. It cannot catch a kernel with an illegal memory
access: that breaks the CUDA context of the process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = "cuda"
TOLERANCE = 2e-2
"""Largest relative error of a result or gradient; the rounding of bfloat16 is about 3e-3."""


def is_there(module: str) -> bool:
    """Whether a module can be found. Looking inside a package imports the package, which may be broken."""
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
    """What is wrong with `function` on random tensors, compared with `formula` in float32; None: nothing."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes]
    wanted = _with_gradients(formula, inputs, torch.float32)
    try:
        found = _with_gradients(function, inputs, dtype)
        with torch.no_grad():
            found.append(function(*inputs))  # validation may use another kernel
        pairs = zip(found, [*wanted, wanted[0]], strict=True)
        errors = [(ours.float() - exact).norm() / exact.norm() for ours, exact in pairs]
        error = float(torch.stack(errors).max())  # NaN if any of them is NaN
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
