"""What the registry knows about one way to compute an operator, and what an implementation may need to know first."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zero2all.ops import trial


@dataclass(frozen=True)
class Situation:
    """Where and on what the operators are to run; a size of 0 is one that nobody knows yet."""

    device: str
    """'cpu' or 'cuda'."""
    dtype: torch.dtype = torch.float32
    """The dtype of the weights the forward pass reads."""
    hidden_size: int = 0
    intermediate_size: int = 0
    head_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab_size: int = 0
    seq_len: int = 0
    documents: bool = False
    """Whether attention stops at the borders of documents."""
    z_loss: bool = False
    """Whether the loss has a z term."""
    dropout: bool = False
    """Whether attention weights are dropped out."""
    compiled: bool = False
    """Whether torch.compile is around the operators."""
    keeps_results: bool = False
    """Whether results of attention and matmuls are to be kept while the rest is recomputed (recompute: selective)."""
    linear: str = ""
    """The implementation of the linear layers, where it is known: it is chosen before the operators between them."""
    sharded: bool = False
    """Whether each process keeps a part of every weight and gathers the rest for each pass (FSDP2)."""

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def queries_per_key(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads if self.kv_heads else 1


Probe = Callable[[Situation], str | None]
"""None when the implementation can run there, else the reason why not."""


def runs_anywhere(situation: Situation) -> str | None:
    """The probe of an implementation that needs nothing but torch."""
    del situation
    return None


@dataclass(frozen=True)
class Implementation:
    """One implementation of one operator."""

    name: str
    function: Callable[..., Any]
    probe: Probe = runs_anywhere
    compile_safe: bool = True
    """Whether torch.compile can look inside; what it cannot is left as it is, with a break in the graph around it."""
    deterministic: bool = True
    """Whether equal inputs give equal bits, forward and backward."""
    tolerance: float = 0.0
    """Largest relative error against float64 that its tests allow in bfloat16 (0: the operator's own default)."""


def has_triton() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("triton") is not None


def needs_triton(situation: Situation) -> str | None:
    """The probe of our kernels."""
    if situation.device != "cuda":
        return "it needs a CUDA device"
    if not has_triton():
        return "triton is not installed"
    if situation.dtype == torch.float64:
        return "its sums are float32, and the model is float64"
    if not 0 <= situation.hidden_size <= MAX_ROW:
        return f"a row of {situation.hidden_size} values is wider than the {MAX_ROW} one program takes"
    return None


MAX_ROW = 16384


def needs_liger(situation: Situation) -> str | None:
    """The probe of the kernels of liger-kernel."""
    if situation.device != "cuda":
        return "it needs a CUDA device"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    return None


def needs_quack(situation: Situation) -> str | None:
    """The probe of matmuls with more in their epilogue, by QuACK; each operator tries its own out besides."""
    problem = needs_triton(situation)
    if problem is not None:
        return problem
    if not trial.is_there("quack"):
        return "quack-kernels is not installed"
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "it needs a GPU of the Hopper or Blackwell generation"
    if situation.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, and the model is {str(situation.dtype).removeprefix('torch.')}"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(situation, name) % 8:
            return f"it wants multiples of 8, and {name} is {getattr(situation, name)}"
    return None


def needs_float8(situation: Situation) -> str | None:
    """The probe of float8 matmuls."""
    problem = needs_triton(situation)
    if problem is not None:
        return problem
    if torch.cuda.get_device_capability() < (8, 9):
        return "this GPU has no float8 tensor cores"
    if situation.dtype != torch.bfloat16:
        return f"it makes float8 from bfloat16, and the model is {str(situation.dtype).removeprefix('torch.')}"
    if situation.sharded:
        # FSDP hides from a weight's version that it was gathered anew, so the float8 copy would never be made again.
        return "it keeps float8 copies of whole weights, and parallel.data is shard"
    for name in ("hidden_size", "intermediate_size", "qkv_rows", "seq_len"):
        if getattr(situation, name) % 16:
            return f"float8 matmuls want multiples of 16, and {name} is {getattr(situation, name)}"
    return None
