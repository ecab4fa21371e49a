"""Training steps with one thing changed at a time: speed and memory of each beside `all-fused`, the config as it is.

    python benchmarks/ablate.py --list
    python benchmarks/ablate.py --batch 2x2048x16,16x2048x4 --out ablation   z2all-1b with AdamW
    python benchmarks/ablate.py --rows all-fused,fp8 --seconds 30 -- --train.precision bfloat16

A row is the same config with other fields. Each runs in its own process (`zero2all.measure.child`: steps of the trainer
on random tokens) and is in `results.jsonl` before the next begins; the same command measures what is missing. One that
does not fit or cannot run here is a row that says so. Every command measures `all-fused` again, its anchor, because a
GPU is not equally fast on two days: *x fused* compares a row with the anchor of its own sitting.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import BILLION, environment
from zero2all.cli.terminal import print_table
from zero2all.common.files import write_atomic
from zero2all.common.jsonio import append_line, whole_lines
from zero2all.common.manifest import fingerprint
from zero2all.common.progress import human_seconds, say, show_log
from zero2all.config import RunConfig, config_values
from zero2all.estimate.flops import CONVENTIONS, compute_mfu, flops_per_token
from zero2all.measure.child import MEASURED, OUT_OF_MEMORY, run_child
from zero2all.predict.batch import BatchShape, check_batch, load_measured_config, own_batch, parse_batch

ANCHOR = "all-fused"
NAIVE = {
    "ops.attention": "math",
    "ops.rope": "eager",
    "ops.rms_norm": "eager",
    "ops.swiglu": "eager",
    "ops.linear": "plain",
    "ops.embedding": "torch",
    "ops.linear_cross_entropy": "off",
    "ops.cross_entropy": "eager",
    "ops.optimizer": "eager",
    "ops.compile": "none",
    "train.cuda_graph": "off",
}
"""Every operator by its formula in plain torch."""
FLASH = {"ops.attention": "sdpa_flash"}
FLASH_CE_ADAMW = {
    **FLASH,
    **dict.fromkeys(("ops.linear_cross_entropy", "ops.cross_entropy", "ops.optimizer"), "auto"),
}
WITHOUT_CROSS_ENTROPY = {"ops.linear_cross_entropy": "off", "ops.cross_entropy": "eager"}
KERNELS = {
    **dict.fromkeys(("ops.rope", "ops.rms_norm", "ops.swiglu", "ops.embedding"), "triton"),
    "ops.linear": "fp32_wgrad",
}
"""For the rows in which compilation would choose otherwise."""
BLOCKS, TRUNK = {"ops.compile": "block"}, {"ops.compile": "trunk"}
GRAPH = {"train.cuda_graph": "auto"}

ROWS: dict[str, dict[str, Any]] = {
    ANCHOR: {},
    "naive": NAIVE,
    "without-attention": {"ops.attention": "math"},
    "attention-cudnn": {"ops.attention": "sdpa_cudnn"},
    "attention-flash": FLASH,
    "without-rope": {"ops.rope": "eager"},
    "without-cross-entropy": WITHOUT_CROSS_ENTROPY,
    "without-rms-norm": {"ops.rms_norm": "eager"},
    "without-swiglu": {"ops.swiglu": "eager"},
    "without-linear": {"ops.linear": "plain"},
    "without-embedding": {"ops.embedding": "torch"},
    "without-graph": {"train.cuda_graph": "off"},
    "optimizer-fused": {"ops.optimizer": "fused"},
    "optimizer-eager": {"ops.optimizer": "eager"},
    "only-flash": {**NAIVE, **FLASH},
    "flash-ce-adamw": {**NAIVE, **FLASH_CE_ADAMW},
    "fp8": {"ops.linear": "fp8"},
    "own-kernels": {
        "ops.attention": "sdpa_cudnn",
        **dict.fromkeys(("ops.rope", "ops.swiglu", "ops.linear_cross_entropy"), "triton"),
    },
    "lean-norm": {"ops.rms_norm": "triton_lean"},
    "fp32-residual": {"model.fp32_residual": "true"},
    "float32": {"train.precision": "float32"},
    "recompute-selective": {"train.recompute": "selective"},
    "recompute-full": {"train.recompute": "full"},
    "recompute-groups": {"train.recompute": "groups", "train.recompute_every": 4},
    "adamw-8bit": {"optim.kind": "adamw_8bit"},
    "adamw-bf16": {"optim.kind": "adamw_bf16"},
    "muon": {"optim.kind": "muon"},
    "odd-vocabulary": {"model.vocab_size": "one more"},
    "naive-compile-block": {**NAIVE, **GRAPH, **BLOCKS},
    "naive-compile-trunk": {**NAIVE, **GRAPH, **TRUNK},
    "fused-compile-block": BLOCKS,
    "fused-compile-trunk": TRUNK,
    "kernels-compile-block": {**KERNELS, **BLOCKS},
    "kernels-compile-trunk": {**KERNELS, **TRUNK},
    "compile-without-attention": {**KERNELS, **TRUNK, "ops.attention": "math"},
    "compile-attention-flash": {**KERNELS, **TRUNK, **FLASH},
    "compile-without-rope": {**KERNELS, **TRUNK, "ops.rope": "eager"},
    "compile-without-cross-entropy": {**KERNELS, **TRUNK, **WITHOUT_CROSS_ENTROPY},
    "compile-without-rms-norm": {**KERNELS, **TRUNK, "ops.rms_norm": "eager"},
    "compile-without-swiglu": {**KERNELS, **TRUNK, "ops.swiglu": "eager"},
    "compile-optimizer-eager": {**KERNELS, **TRUNK, "ops.optimizer": "eager"},
    "compile-only-flash": {**NAIVE, **GRAPH, **FLASH, **TRUNK},
    "compile-flash-ce-adamw": {**NAIVE, **GRAPH, **FLASH_CE_ADAMW, **TRUNK},
}
"""Row -> the fields that differ from the config's. Compiled rows take longest and come last."""
FINAL = (MEASURED, OUT_OF_MEMORY, "cannot run here")
"""A row that ended otherwise (failed, too slow) is tried again."""
FIRST_GUESS_SECONDS = 60.0


class Sitting:
    """The rows that one command measures."""

    def __init__(self, given: argparse.Namespace, overrides: list[str]) -> None:
        self.given, self.overrides, self.started = given, overrides, time.monotonic()
        self.config, _ = load_measured_config(given.config, overrides)
        self.path, self.environment = given.out / "results.jsonl", environment()
        self.lines = [line for line in whole_lines(self.path) if "key" in line]
        self.number = 1 + max((line["sitting"] for line in self.lines), default=0)

    def key(self, batch: BatchShape, row: str) -> str:
        """Equal for measurements that may replace each other."""
        return fingerprint([config_values(self.config), ROWS[row], str(batch), self.environment])

    def known(self, batch: BatchShape, row: str) -> list[dict[str, Any]]:
        """The lines of a row that need not be measured again."""
        key = self.key(batch, row)
        return [line for line in self.lines if line["key"] == key and line["status"] in FINAL]

    def measure(self, batch: BatchShape, rows: list[str]) -> None:
        """The anchor, then what is missing, while the budget lasts."""
        left = [row for row in rows if row != ANCHOR and not self.known(batch, row)]
        if not left and self.known(batch, ANCHOR):
            return
        for row in (ANCHOR, *left):
            spent = time.monotonic() - self.started
            needed = max((line["wall_seconds"] for line in self.lines), default=FIRST_GUESS_SECONDS)
            if spent + needed > self.given.budget_seconds:
                say(f"ablate: stopped before {batch} {row}: {human_seconds(spent)} of the budget are spent")
                return
            self._run(batch, row)

    def _run(self, batch: BatchShape, row: str) -> None:
        say(f"ablate: {batch} {row} …")
        began = time.monotonic()
        log = self.given.out / "logs" / f"{batch}-{row}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [self.given.config, "--batch", batch, "--seconds", self.given.seconds, "--no-anatomy"]
        with tempfile.TemporaryDirectory(prefix="z2a-compiled-") as cache:  # its own, so that compilation is measured
            variables = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
            compiled = ROWS[row].get("ops.compile", "none") != "none"
            found = run_child(
                words, self._fields(row), self.given.row_timeout_seconds, log, variables if compiled else None
            )
        line = {
            "key": self.key(batch, row),
            "row": row,
            "batch": str(batch),
            "sitting": self.number,
            "status": found.pop("status"),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_seconds": time.monotonic() - began,
            "environment": self.environment,
            "result": found,
        }
        append_line(self.path, line)
        self.lines.append(line)
        speed = f"{found['tokens_per_second']:,.0f} tokens/s" if line["status"] == MEASURED else found.get("reason", "")
        say(f"ablate: {batch} {row}: {line['status']}: {speed}")

    def _fields(self, row: str) -> list[str]:
        fields = dict(ROWS[row])
        if row == "odd-vocabulary":
            fields["model.vocab_size"] = self.config.model.vocab_rows + 1
        return [*self.overrides, *(word for name, value in fields.items() for word in (f"--{name}", str(value)))]


def table(sitting: Sitting, batch: BatchShape) -> list[list[str]]:
    """All rows of a batch that have a result."""
    anchors = {line["sitting"]: line["result"]["step_seconds"] for line in sitting.known(batch, ANCHOR)}
    heading = ["row", "s/iter", "x fused", "tokens/s", f"MFU % {'/'.join(CONVENTIONS)}", "peak GiB", "first s"]
    cells = [heading]
    for row in ROWS:
        lines = sitting.known(batch, row)
        if not lines:
            continue
        line = lines[0] if row == ANCHOR else lines[-1]
        cells.append([row, *_figures(sitting.config, batch, line, anchors.get(line["sitting"]))])
    return cells


def _figures(config: RunConfig, batch: BatchShape, line: dict[str, Any], anchor: float | None) -> list[str]:
    found = line["result"]
    if line["status"] != MEASURED:
        return [line["status"], *[""] * 5]
    flops = flops_per_token(config.model, batch.seq_len)
    mfu = compute_mfu(flops, found["tokens_per_second"], found["device"])
    return [
        f"{found['step_seconds']:.3f}",
        f"{found['step_seconds'] / anchor:.3f}" if anchor else "",
        f"{found['tokens_per_second']:,.0f}",
        " / ".join(f"{100 * mfu[name]:.1f}" for name in CONVENTIONS if name in mfu),
        f"{found['peak_bytes'] / 2**30:.1f}",
        f"{found['first_step_seconds']:.1f}",
    ]


def markdown(cells: list[list[str]], batch: BatchShape) -> str:
    """A table for a page."""
    lines = [f"**{batch}** ({batch.tokens:,} tokens an iteration)", "", f"| {' | '.join(cells[0])} |"]
    lines += [f"|---|{'---:|' * (len(cells[0]) - 1)}", *(f"| {' | '.join(row)} |" for row in cells[1:])]
    return "\n".join([*lines, "", ""])


def main() -> None:
    """Measure what is missing, print and write the tables."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run does
    words = sys.argv[1:]
    border = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=BILLION, help="a preset or the path of a YAML file")
    parser.add_argument("--list", action="store_true", help="show the rows and stop")
    parser.add_argument("--rows", help="only these, with commas between (default: all)")
    parser.add_argument("--batch", help="SAMPLESxSEQUENCExPASSES,… (default: the config's own)")
    parser.add_argument("--seconds", type=float, default=8.0, help="measure a row at least this long")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="begin no row that would end later")
    parser.add_argument("--row-timeout-seconds", type=float, default=900.0, help="end a row that takes longer")
    parser.add_argument("--out", type=Path, default=Path("ablation"), help="folder of the results")
    given, overrides = parser.parse_args(words[:border]), words[border + 1 :]
    if given.list:
        print_table([["row", "changes"], *([row, str(fields)] for row, fields in ROWS.items())])
        return
    rows = list(ROWS) if given.rows is None else given.rows.split(",")
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"there is no row {unknown[0]}; --list shows all")
    sitting = Sitting(given, overrides)
    batches = [parse_batch(text) for text in given.batch.split(",")] if given.batch else [own_batch(sitting.config)]
    pages = []
    for batch in batches:
        check_batch(batch, sitting.config)
        sitting.measure(batch, rows)
        cells = table(sitting, batch)
        print_table(cells, f"{batch}: {batch.tokens:,} tokens an iteration")
        pages.append(markdown(cells, batch))
    write_atomic(given.out / "ablation.md", "".join(pages).encode())


if __name__ == "__main__":
    show_log()
    main()
