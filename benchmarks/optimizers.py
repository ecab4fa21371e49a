"""Optimizers: what does each cost, in bytes a parameter and in milliseconds a step?

    python benchmarks/optimizers.py                                  the table, for a model that suits this device
    python benchmarks/optimizers.py --config z2all-100m --compiled     another model, formulas as compiled kernels
    python benchmarks/optimizers.py --save                           also benchmarks/results/optimizers.json
    python benchmarks/optimizers.py --muon                           Muon's update, part by part, at two sizes

Bytes are counted over the memory behind the tensors that exist: weights as the optimizer keeps them, gradients in the
same precision, state. A bfloat16 copy of float32 weights for the forward pass is the trainer's and costs 2 bytes more.
A step takes a clip factor and a cancel flag from the device, as in training; milliseconds are the median of some after
a warmup (`--steps 0` counts bytes only). On CUDA, one more step runs with torch's check that raises where the host
waits for the device, and `peak` is what a step takes in between, beyond what stays.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import BILLION, machine, save_result
from zero2all.config import load_config
from zero2all.config.training import MuonConfig, OptimConfig
from zero2all.model.config import ModelConfig
from zero2all.parallel.parameter_table import layout_table
from zero2all.parallel.parts import TensorPart
from zero2all.train.optimizers.base import Master, Optimizer
from zero2all.train.optimizers.factory import Implementation, build_optimizer
from zero2all.train.optimizers.muon import orthogonalising_cost

SMALL = ModelConfig(vocab_size=4096, hidden_size=512, intermediate_size=1408, layers=2, heads=8, kv_heads=4)
"""10 M parameters: a few steps of each optimizer take about a minute on two slow cores."""
KINDS: dict[str, tuple[OptimConfig, Implementation]] = {
    "AdamW, torch's fused kernel": (OptimConfig("adamw"), "fused"),
    "AdamW, formula": (OptimConfig("adamw"), "eager"),
    "Muon + AdamW": (OptimConfig("muon"), "auto"),
    "AdamW, 8-bit moments": (OptimConfig("adamw_8bit"), "auto"),
    "AdamW, all bfloat16": (OptimConfig("adamw_bf16"), "auto"),
    "AdamW, all bfloat16, Kahan": (OptimConfig("adamw_bf16", bf16_rounding="kahan"), "auto"),
}

MUON_SIZES: dict[str, tuple[ModelConfig, float]] = {
    "1.26 B": (
        ModelConfig(vocab_size=64000, hidden_size=2048, intermediate_size=5632, layers=22, heads=32, kv_heads=8),
        1.97,
    ),
    "42.5 M": (
        ModelConfig(vocab_size=16384, hidden_size=512, intermediate_size=1408, layers=8, heads=8, kv_heads=8),
        0.0917,
    ),
}
"""Models, and the seconds of a step of 131,072 tokens on an H200 in November 2026, of which the share is taken."""


def measure(config: ModelConfig, kind: str, device: torch.device, steps: int, compiled: bool) -> dict[str, Any]:
    """Bytes and times of one optimizer over all parameters of a model of this config."""
    optim, implementation = KINDS[kind]
    if compiled and implementation != "fused" and optim.kind != "muon":
        implementation = "compiled"
    dtype = torch.bfloat16 if optim.kind == "adamw_bf16" else torch.float32
    table = {parameter.name: parameter for parameter in layout_table(config)}
    weights = {one.name: torch.randn(one.shape, device=device).mul_(0.02).to(dtype) for one in table.values()}
    gradients = {one.name: torch.randn(one.shape, device=device).to(dtype) for one in table.values()}
    masters = {name: Master(TensorPart.whole(weights[name]), partial(gradients.get, name)) for name in table}
    optimizer = build_optimizer(masters, optim, table, implementation)
    count = sum(parameter.numel for parameter in table.values())
    weight, gradient = _bytes(weights.values()) / count, _bytes(gradients.values()) / count
    state = _bytes(part.values for part in optimizer.state_tensors().values()) / count
    times, peak = _times(optimizer, device, steps)
    return {
        "optimizer": kind,
        "implementation": implementation,
        "parameters": count,
        "weight_bytes": round(weight, 3),
        "gradient_bytes": round(gradient, 3),
        "state_bytes": round(state, 3),
        "total_bytes": round(weight + gradient + state, 3),
        "peak_bytes": None if peak is None else round(peak / count, 3),
        "step_ms": round(statistics.median(times), 2) if times else None,
        "fastest_ms": round(min(times), 2) if times else None,
        "host_waits": _host_waits(optimizer, device) if times else None,
    }


def muon_rows(config: ModelConfig, device: torch.device, steps: int) -> list[tuple[str, float, float]]:
    """Seconds of the first update and milliseconds of a later one: with AdamW alone, and Muon's by torch's operators,
    with our kernels, and with fewer iterations."""
    table = {parameter.name: parameter for parameter in layout_table(config)}
    weights = {one.name: torch.randn(one.shape, device=device).mul_(0.02) for one in table.values()}
    gradients = {one.name: torch.randn(one.shape, device=device) for one in table.values()}
    masters = {name: Master(TensorPart.whole(weights[name]), partial(gradients.get, name)) for name in table}
    cases: list[tuple[str, OptimConfig, Implementation]] = [
        ("AdamW, torch's fused kernel", OptimConfig("adamw"), "fused"),
        ("Muon, eager", OptimConfig("muon"), "fused"),
        ("Muon, our kernels on a GPU", OptimConfig("muon"), "auto"),
    ]
    cases += [
        (f"the same, {count} iterations", OptimConfig("muon", muon=MuonConfig(iterations=count)), "auto")
        for count in (4, 3)
    ]
    rows = []
    for name, optim, implementation in cases:
        optimizer = build_optimizer(masters, optim, table, implementation)
        (first, *_), _ = _times(optimizer, device, 1, warmup=0)
        times, _ = _times(optimizer, device, steps)
        rows.append((name, first / 1000, statistics.median(times)))
    return rows


def print_muon(device: torch.device, steps: int) -> None:
    """A table for each size."""
    for name, (config, step_seconds) in MUON_SIZES.items():
        if device.type != "cuda" and name != "42.5 M":
            continue  # minutes
        matrices = [one for one in layout_table(config) if one.kind == "matrix"]
        flops = 5 * sum(orthogonalising_cost(one) for one in matrices)
        print(f"{name}: {flops / 1e12:.1f} TFLOP in five iterations; share of a step of {step_seconds} s")
        for case, first, took in muon_rows(config, device, steps):
            print(f"| {case} | first {first:.1f} s | {took:.1f} ms | {took / 10 / step_seconds:.1f} % |", flush=True)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _times(optimizer: Optimizer, device: torch.device, steps: int, warmup: int = 2) -> tuple[list[float], int | None]:
    """Milliseconds of each step after some unmeasured ones, and the memory a step takes in between."""
    scale, flag = torch.tensor(0.9, device=device), torch.tensor(0.0, device=device)
    cuda = device.type == "cuda"
    times = []
    for step in range(steps + warmup if steps else 0):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        optimizer.step(scale, flag)
        if cuda:
            torch.cuda.synchronize()
        if step >= warmup:
            times.append(1000 * (time.perf_counter() - started))
    return times, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if cuda else None


def _host_waits(optimizer: Optimizer, device: torch.device) -> bool | None:
    """Whether a step makes the host wait for the device; None where that cannot be asked."""
    if device.type != "cuda":
        return None
    scale, flag = torch.tensor(0.9, device=device), torch.tensor(1.0, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(scale, flag)
    except RuntimeError as error:
        print(f"  waits: {error}")
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="preset or YAML whose model is taken; else one that suits the device")
    parser.add_argument("--steps", type=int, default=7, help="measured steps")
    parser.add_argument("--compiled", action="store_true", help="formulas as compiled kernels")
    parser.add_argument("--muon", action="store_true", help="only Muon's update, part by part")
    parser.add_argument("--save", action="store_true", help="write the results file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = arguments.config or (BILLION if device.type == "cuda" else None)
    config = SMALL if name is None else load_config(name).model
    if config.vocab_size is None:
        config = dataclasses.replace(config, vocab_size=SMALL.vocab_size)
    where = machine()
    print(f"{where['gpu'] or where['cpu']}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    if arguments.muon:
        print_muon(device, arguments.steps)
        return
    print("| optimizer | weight | gradient | state | total | peak | ms a step | host waits |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for kind in KINDS:
        row = measure(config, kind, device, arguments.steps, arguments.compiled)
        rows.append(row)
        waits = {None: "–", True: "yes", False: "no"}[row["host_waits"]]
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes']:.2f}"
        took = "–" if row["step_ms"] is None else f"{row['step_ms']:.1f}"
        print(
            f"| {kind} ({row['implementation']}) | {row['weight_bytes']:.2f} | {row['gradient_bytes']:.2f} | "
            f"{row['state_bytes']:.3f} | {row['total_bytes']:.2f} | {peak} | {took} | {waits} |",
            flush=True,
        )
    print(f"bytes are per parameter, of {rows[0]['parameters'] / 1e6:.1f} M")
    if arguments.save:
        save_result("optimizers", {"device": device.type, "config": name or "small", "rows": rows})


if __name__ == "__main__":
    main()
