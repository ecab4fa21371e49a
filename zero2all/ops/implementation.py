"""What the registry knows about one way to compute an operator."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def runs_anywhere(device: str) -> str | None:
    """The probe of an implementation that needs nothing but torch."""
    del device
    return None


@dataclass(frozen=True)
class Implementation:
    """One implementation of one operator."""

    name: str
    function: Callable[..., Any]
    probe: Callable[[str], str | None] = runs_anywhere
    """Given the device type ('cpu', 'cuda'): None when it can run there, else the reason why not."""


def needs_triton(device: str) -> str | None:
    """The probe of our kernels."""
    if device != "cuda":
        return "it needs a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def needs_hopper(device: str) -> str | None:
    """The probe of float8 matmuls."""
    problem = needs_triton(device)
    if problem is None and torch.cuda.get_device_capability() < (8, 9):
        problem = "this GPU has no float8 tensor cores"
    return problem
