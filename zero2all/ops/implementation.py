"""One implementation of an operator, the context it is chosen in, and the checks that several of them share."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from zero2all.ops import trial
from zero2all.ops.footprint import Footprint

NO_FOOTPRINT = Footprint()
Op = TypeVar("Op", bound=Callable[..., Any])
"""The signature of an operator, from its own file."""


@dataclass(frozen=True)
class OpContext:
    """The device, the dtype and the model that operators are chosen for; a size of 0 is unknown."""

    device: str  # 'cpu' or 'cuda'
    dtype: torch.dtype = torch.float32  # the dtype of the weights the forward pass reads
    hidden_size: int = 0
    intermediate_size: int = 0
    head_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab_size: int = 0
    seq_len: int = 0
    documents: bool = False  # whether attention is masked at document boundaries
    z_loss: bool = False  # whether the loss has a z term
    dropout: bool = False  # whether attention has dropout
    compiled: bool = False  # whether the model is compiled with torch.compile
    keeps_results: bool = False
    """Whether activation checkpointing keeps the results of attention and matmuls (recompute: selective)."""
    linear: str = ""
    """The implementation of the linear layers; empty before it is chosen, which is before the other operators."""
    sharded: bool = False  # whether weights are sharded over the ranks (FSDP2)
    vocabulary_cut: bool = False  # whether each tensor rank has some rows of the head; sizes are those of one rank

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def queries_per_key(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads if self.kv_heads else 1


Check = Callable[[OpContext], str | None]
"""None when the implementation can run in this context, else the reason why not."""


def runs_anywhere(context: OpContext) -> str | None:
    """The check of an implementation that needs nothing but torch."""
    del context
    return None


@dataclass(frozen=True)
class Implementation(Generic[Op]):
    """One implementation of one operator."""

    name: str
    function: Op
    check: Check = runs_anywhere
    compile_safe: bool = True
    """Whether torch.compile can trace it; if not, it runs as it is, between two graph breaks."""
    deterministic: bool = True  # whether equal inputs give equal bits, forward and backward
    tolerance: float = 0.0
    """Largest relative error against float64 that its tests allow in bfloat16 (0: the operator's own default)."""
    footprint: Footprint = NO_FOOTPRINT  # what it needs in memory


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def compiler_problem() -> str | None:
    """Why Triton could not build a kernel's launcher, a C extension; None if it can. Tried once, without a GPU."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton looks for it
    if compiler is None:
        return "Triton needs a C compiler, and there is neither gcc nor clang on PATH nor CC (apt install gcc)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    include = sysconfig.get_paths(scheme)["include"]
    with tempfile.TemporaryDirectory(prefix="z2a-triton-") as folder:
        source = Path(folder) / "probe.c"
        source.write_text("#include <Python.h>\nlong probe(void) { return PY_VERSION_HEX; }\n")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o", f"{folder}/probe.so"]
        try:
            tried = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            return f"Triton needs a C compiler, and {compiler} cannot be started: {error.strerror}"
    if tried.returncode == 0:
        return None
    if "Python.h" in tried.stderr:
        return f"Triton needs Python's headers, and {include} has no Python.h (apt install python3-dev)"
    return f"Triton needs a C compiler, and {compiler} failed: {next(iter(tried.stderr.splitlines()), '')}"


def compile_problem(device: str) -> str | None:
    """Why torch.compile cannot run on a CPU, where it writes C++; None if it can, and for other devices."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    if device != "cpu" or shutil.which(compiler) is not None:
        return None
    return f"on a CPU it needs a C++ compiler, and {compiler} was not found (apt install g++, or set CXX)"


def needs_triton(context: OpContext) -> str | None:
    """The check of our own kernels."""
    if context.device != "cuda":
        return "it needs a CUDA device"
    if not has_triton():
        return "triton is not installed"
    if compiler_problem() is not None:
        return compiler_problem()
    if context.dtype == torch.float64:
        return "its sums are float32, and the model is float64"
    if not 0 <= context.hidden_size <= MAX_ROW:
        return f"it takes rows of at most {MAX_ROW} values, and model.hidden_size is {context.hidden_size}"
    return None


MAX_ROW = 16384


def needs_quack(context: OpContext) -> str | None:
    """What all of QuACK's kernels need; the operators that use them also run a trial of their own."""
    problem = needs_triton(context)
    if problem is not None:
        return problem
    if not trial.is_there("quack"):
        return "quack-kernels is not installed"
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "it needs a GPU of the Hopper or Blackwell generation"
    if context.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, and the model is {str(context.dtype).removeprefix('torch.')}"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(context, name) % 8:
            return f"it needs multiples of 8, and {name} is {getattr(context, name)}"
    return None


def needs_float8(context: OpContext) -> str | None:
    """The check of float8 matmuls."""
    problem = needs_triton(context)
    if problem is not None:
        return problem
    if torch.cuda.get_device_capability() < (8, 9):
        return "this GPU has no float8 tensor cores"
    if context.dtype != torch.bfloat16:
        return f"it needs a bfloat16 model, and the model is {str(context.dtype).removeprefix('torch.')}"
    if context.sharded:
        # FSDP gathers weights without changing their version counter, so the float8 copies would never be renewed.
        return "it keeps float8 copies of whole weights, and parallel.zero is 3"
    for name in ("hidden_size", "intermediate_size", "qkv_rows", "seq_len"):
        if getattr(context, name) % 16:
            return f"float8 matmuls need multiples of 16, and {name} is {getattr(context, name)}"
    return None
