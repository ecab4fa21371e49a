"""Predictions against measurements: configurations that the calibration never saw, each run for a few steps.

    z2a perf calibrate benchmarks/z2all-1b-adamw.yaml z2all-moe --seconds 170        once, on the same machine
    python benchmarks/predict.py --json predict.json --budget-seconds 280
    python benchmarks/predict.py --cpu                         small ones, on a CPU

From 100 M to 8 B parameters, dense and with experts: micro-batches, sequence lengths, recomputation, operators, float8,
offload. The most important come first, so that a time budget cuts the others. Each runs in its own process (its memory
is its own) and is on disk before the next begins; the same command continues where it ended. The tables at the end:
every configuration, then median, 95th percentile and worst error of time and memory, how many lie inside the 90 %
interval, and whether any that was predicted to fit ran out of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import BILLION, machine
from zero2all.cli.terminal import print_table
from zero2all.common.files import write_json
from zero2all.measure.child import MEASURED, OUT_OF_MEMORY
from zero2all.measure.verify import ShortRun, verify
from zero2all.predict.batch import parse_batch


@dataclass(frozen=True)
class Case:
    """One configuration."""

    name: str
    source: str
    batch: str
    settings: str = ""  # as on the command line, without the leading dashes: model.layers=24 train.recompute=full

    @property
    def overrides(self) -> list[str]:
        """As the command line takes them."""
        return [word for one in self.settings.split() for word in (f"--{one.partition('=')[0]}", one.partition("=")[2])]


M350 = "model.hidden_size=1024 model.intermediate_size=2816 model.layers=24 model.heads=16 model.kv_heads=4"
B3 = "model.hidden_size=3072 model.intermediate_size=8192 model.layers=28 model.heads=24 model.kv_heads=8"
B8 = "model.hidden_size=4096 model.intermediate_size=14336 model.layers=32 model.heads=32 model.kv_heads=8"
MOE = (
    "model.hidden_size=1536 model.heads=12 model.kv_heads=4 model.layers=12 model.moe.experts=16 "
    "model.moe.experts_per_token=2 model.moe.expert_size=1024"
)
LONG = "model.max_seq_len=8192"

CASES = (
    Case("1b, micro-batch 4", BILLION, "4x2048x6"),
    Case("1b, micro-batch 12", BILLION, "12x2048x2"),
    Case("100m", "z2all-100m", "32x2048x4"),
    Case("3b", BILLION, "6x2048x2", B3),
    Case("moe", "z2all-moe", "12x2048x3"),
    Case("1b, full recompute", BILLION, "24x2048x1", "train.recompute=full"),
    Case("1b, float8", BILLION, "12x2048x2", "ops.linear=fp8"),
    Case("8b, full recompute", BILLION, "2x2048x2", f"{B8} train.recompute=full"),
    Case("1b, selective recompute", BILLION, "20x2048x1", "train.recompute=selective"),
    Case("350m", BILLION, "24x2048x2", M350),
    Case("1b, sequences of 8192", BILLION, "3x8192x2", LONG),
    Case("1b, no FA4, no QuACK", BILLION, "12x2048x2",
         "ops.attention=sdpa_cudnn ops.swiglu=triton ops.linear_cross_entropy=triton ops.rope=triton"),
    Case("3b, optimizer offload", BILLION, "6x2048x4", f"{B3} parallel.offload=optimizer"),
    Case("larger moe", "z2all-moe", "12x2048x3", MOE),
    Case("100m, micro-batch 8 of 1024", "z2all-100m", "8x1024x16"),
    Case("3b, full recompute", BILLION, "16x2048x1", f"{B3} train.recompute=full"),
    Case("1b, every 2nd block recomputed", BILLION, "20x2048x1",
         "train.recompute=every_n train.recompute_every=2"),
    Case("moe, full recompute", "z2all-moe", "24x2048x2", "train.recompute=full"),
    Case("3b, float8", BILLION, "6x2048x2", f"{B3} ops.linear=fp8"),
    Case("1b, plain linear layers", BILLION, "12x2048x2", "ops.linear=plain"),
    Case("1b, no CUDA graph", BILLION, "1x2048x8", "train.cuda_graph=off"),
    Case("1b, CUDA graph", BILLION, "1x2048x8", "train.cuda_graph=on"),
)  # fmt: skip
CPU = "train.precision=float32"
CPU_CASES = (
    Case("quickstart", "quickstart", "8x128x2"),
    Case("quickstart, wider", "quickstart", "8x128x1",
         "model.hidden_size=256 model.intermediate_size=768 model.heads=8"),
    Case("quickstart, full recompute", "quickstart", "8x128x1", "train.recompute=full"),
    Case("100m, 2 blocks", "z2all-100m", "1x256x1", f"{CPU} model.layers=2 model.vocab_size=4096"),
)  # fmt: skip
FIRST_GUESS_SECONDS = 30.0
LONGER_THAN_SEEN = 1.5  # the next configuration may be larger than those already run


def main() -> None:
    """Run what is left, print the tables."""
    arguments = _arguments()
    started = time.monotonic()
    cases = [case for case in (CPU_CASES if arguments.cpu else CASES) if arguments.only in case.name]
    lines = json.loads(arguments.json.read_text())["cases"] if arguments.json and arguments.json.is_file() else []
    for case in cases:
        if any(line["name"] == case.name for line in lines):
            continue
        left = arguments.budget_seconds - (time.monotonic() - started)
        if left < reserved_seconds(lines):
            print(f"stopped before {case.name}: {left:.0f} s of the budget are left. Run it again to continue.")
            break
        line = _run(case, arguments, left)
        lines.append(line)
        print(f"{case.name}: {line['said']} ({line['wall_seconds']:.0f} s)", flush=True)
        if arguments.json:
            write_json(arguments.json, {"cases": lines, "summary": summary(lines), "machine": machine()})
    print_table(table(lines), "configurations the calibration never saw")
    print_table([["what", "value"], *([name, value] for name, value in summary(lines).items())], "errors")


def reserved_seconds(lines: list[dict[str, Any]]) -> float:
    """What must be left of the budget to begin another configuration, from those already run."""
    if not lines:
        return FIRST_GUESS_SECONDS
    return LONGER_THAN_SEEN * max(line["wall_seconds"] for line in lines)


def _run(case: Case, arguments: argparse.Namespace, left: float) -> dict[str, Any]:
    began = time.monotonic()
    overrides = [*case.overrides, *arguments.overrides]
    run = ShortRun(parse_batch(case.batch), arguments.seconds, min(left, 120.0), arguments.components)
    found = verify(case.source, overrides, run)
    line = {
        "name": case.name,
        "source": case.source,
        "batch": case.batch,
        "settings": case.settings,
        "status": found.measured["status"],
        "reason": found.measured.get("reason"),
        "fits": found.prediction.fits,
        **found.as_json(),
        "wall_seconds": time.monotonic() - began,
    }
    return {**line, "said": _said(line)}


def _said(line: dict[str, Any]) -> str:
    if line["status"] != MEASURED:
        return f"{line['status']}: {line['reason']}"
    step, memory = (100 * _error(line, name) for name in PREDICTED)
    return f"step {line['measured']['step_seconds']:.4f} s, error {step:+.1f} %; memory error {memory:+.1f} %"


def _error(line: dict[str, Any], name: str) -> float:
    return float(PREDICTED[name](line["prediction"]) / line["measured"][name] - 1.0)


PREDICTED = {
    "step_seconds": lambda found: found["seconds"]["estimate"],
    "peak_bytes": lambda found: found["peak_bytes"],
}
"""Measured figure -> the same of a prediction."""


def table(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Every configuration."""
    heading = ["configuration", "batch", "predicted s", "measured s", "error", "noise", "inside", "GiB", "measured GiB"]
    rows = [[*heading, "memory error", "reserved error"]]
    for line in lines:
        if line["status"] != MEASURED:
            rows.append([line["name"], line["batch"], line["status"], *[""] * 8])
            continue
        predicted, measured = line["prediction"], line["measured"]
        reserved = measured.get("reserved_bytes")
        rows.append(
            [
                *(line["name"], line["batch"], f"{predicted['seconds']['estimate']:.4f}"),
                *(f"{measured['step_seconds']:.4f}", f"{100 * _error(line, 'step_seconds'):+.1f} %"),
                *(f"{100 * measured['noise']:.1f} %", "yes" if _is_inside(line) else "no"),
                *(f"{predicted['peak_bytes'] / 2**30:.2f}", f"{measured['peak_bytes'] / 2**30:.2f}"),
                f"{100 * _error(line, 'peak_bytes'):+.1f} %",
                f"{100 * (predicted['reserved_bytes'] / reserved - 1):+.1f} %" if reserved else "",
            ]
        )
    return rows


def _is_inside(line: dict[str, Any]) -> bool:
    low, high = line["prediction"]["interval"]
    return bool(low <= line["measured"]["step_seconds"] <= high)


def summary(lines: list[dict[str, Any]]) -> dict[str, str]:
    """The figures of the targets."""
    measured = [line for line in lines if line["status"] == MEASURED]
    found = {"configurations measured": f"{len(measured)} of {len(lines)}"}
    if not measured:
        return found
    for name, title in (("step_seconds", "step time"), ("peak_bytes", "peak memory")):
        errors = np.abs([_error(line, name) for line in measured])
        values = ", ".join(f"{100 * value:.1f} %" for value in np.percentile(errors, (50, 95, 100)))
        found[f"{title}: median, 95th percentile, worst"] = values
    inside = sum(map(_is_inside, measured)) / len(measured)
    found["step time inside the 90 % interval"] = f"{100 * inside:.0f} %"
    ran_out = [line["name"] for line in lines if line["fits"] and line["status"] == OUT_OF_MEMORY]
    found["predicted to fit, ran out of memory"] = ", ".join(ran_out) or "none"
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the small configurations")
    parser.add_argument("--only", default="", help="only those whose name contains this")
    parser.add_argument("--seconds", type=float, default=2.5, help="measured per configuration")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="begin none that would end later")
    parser.add_argument("--components", action="store_true", help="also profile a step of each")
    parser.add_argument("--json", type=Path, help="results, written after each; read to continue")
    parser.add_argument("overrides", nargs="*", help="settings for all, after --: -- --parallel.cpu_threads 1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
