"""The ablation: rows one after the other, each in its own process, resumable, within a time budget.

This process does not use the device, so that a row has all of it. Each result is on disk before the next row begins:
`results.jsonl` has one JSON line per finished row. A row has a key: what it changes, the batch, the model, and the
environment. The same command run again skips the rows that have a result. A *sitting* is one such command; the anchor
it measured first says how fast the GPU was that day.
"""

from __future__ import annotations

import os
import platform
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.jsonio import append_line, whole_lines
from zero2all.common.manifest import fingerprint
from zero2all.common.progress import human_seconds, say
from zero2all.config import RunConfig, config_values
from zero2all.estimate.run.batch import BatchShape, check_batch, default_batches, load_measured_config
from zero2all.measure.child import run_child
from zero2all.measure.doctor.finding import output_of
from zero2all.measure.variants import ANCHOR, BY_NAME, VARIANTS, Variant, vary

FIRST_GUESS_SECONDS = {False: 45.0, True: 150.0}
"""First estimate of the seconds a row takes in addition to its measurement: without and with compilation."""


@dataclass(frozen=True)
class AblateOptions:
    """What to measure, for how long, and where to store the results."""

    source: str  # preset or path of the config
    output: Path
    overrides: list[str] = field(default_factory=list)
    batches: list[BatchShape] | None = None  # None: the reference project's and the config's own
    variants: list[Variant] = field(default_factory=lambda: list(VARIANTS))
    seconds: float = 8.0  # seconds of measurement per row, at least
    warm_up_seconds: float = 3.0
    budget_seconds: float | None = None  # no row is started that would exceed it. None: no limit.
    row_timeout_seconds: float = 900.0  # a row that takes longer is ended and counts as failed
    compile_jobs: int = 1  # rows that are compiled beside each other; they are measured one at a time
    again: bool = False  # measure rows again that have a result
    report_only: bool = False  # measure nothing; report the results in the folder, from whatever machine


@dataclass(frozen=True)
class Ablation:
    """The results so far."""

    config: RunConfig
    batches: list[BatchShape]
    environment: dict[str, str | None]
    lines: list[Line]
    pending: list[tuple[BatchShape, Variant]]  # rows still to be measured, including those that failed


def ablate(options: AblateOptions) -> Ablation:
    """Measure the rows that have no result yet."""
    started = time.monotonic()
    config, notes = load_measured_config(options.source, options.overrides)
    for note in notes:
        say(f"ablate: {note}")
    batches = options.batches or default_batches(config)
    for batch in batches:
        check_batch(batch, config)
    results = Results(options.output)
    if options.report_only:
        if not results.lines:
            raise BadInputError(f"{results.path} has no results yet. Measure first: run the command without --report.")
        here = results.lines[-1]["environment"]
    else:
        here = environment()
    sitting = _Sitting(options, config, here, results, started)
    pending = sitting.pending(batches)
    if options.report_only:
        return Ablation(config, batches, here, results.lines, pending)
    done = len(batches) * len(options.variants) - len(pending)
    say(f"ablate: {done} rows done, {len(pending)} to measure; results go to {options.output}")
    for batch in batches:
        if not sitting.measure_batch(batch, [variant for of, variant in pending if of == batch]):
            break
    return Ablation(config, batches, here, results.lines, sitting.pending(batches))


class _Sitting:
    """The rows that one command measures."""

    def __init__(
        self, options: AblateOptions, config: RunConfig, here: dict[str, str | None], results: Results, started: float
    ) -> None:
        self.options, self.config, self.here, self.results, self.started = options, config, here, results, started
        self.number = results.next_sitting
        self.code = code_fingerprint()
        self._writing = threading.Lock()

    def pending(self, batches: list[BatchShape]) -> list[tuple[BatchShape, Variant]]:
        """Rows without a final result; with `again`, also those that this sitting has not measured."""
        return [
            (batch, variant)
            for batch in batches
            for variant in self.options.variants
            if not self._is_finished(batch, variant)
        ]

    def _is_finished(self, batch: BatchShape, variant: Variant) -> bool:
        line = self.results.finished(row_key(self.config, variant, batch, self.here))
        return line is not None and (not self.options.again or line["sitting"] == self.number)

    def measure_batch(self, batch: BatchShape, variants: list[Variant]) -> bool:
        """The anchor, then the rows; False where the budget is spent."""
        anchor = BY_NAME[ANCHOR]
        others = [variant for variant in variants if variant.name != ANCHOR]
        if not variants:
            return True
        needed = self._estimate(anchor) + (self._estimate(others[0]) if others else 0.0)
        if not self._fits(needed, f"{batch} {variants[0].name}"):
            return False
        self._run(batch, anchor, f"anchor of session {self.number}")
        with tempfile.TemporaryDirectory(prefix="z2a-compiled-") as caches:

            def measured(numbered: tuple[int, Variant]) -> bool:
                number, variant = numbered
                if not self._fits(self._estimate(variant), f"{batch} {variant.name}"):
                    return False
                self._run(batch, variant, f"{number}/{len(others)}", Path(caches))
                return True

            numbered = list(enumerate(others, 1))
            if not all(measured(one) for one in numbered if not one[1].is_compiled):
                return False
            with ThreadPoolExecutor(self.options.compile_jobs) as threads:
                return all(list(threads.map(measured, [one for one in numbered if one[1].is_compiled])))

    def _fits(self, needed: float, name: str) -> bool:
        budget = self.options.budget_seconds
        if budget is None:
            return True
        left = budget - (time.monotonic() - self.started)
        if needed <= left:
            return True
        say(
            f"ablate: stopped before {name}, which would take about {human_seconds(needed)}; {human_seconds(left)} of "
            f"the budget are left. Run the same command again to continue."
        )
        return False

    def _estimate(self, variant: Variant) -> float:
        """The longest that a row of this kind (compiled or not) took, else a guess."""
        walls = [
            line["wall_seconds"]
            for line in self.results.lines
            if BY_NAME[line["row"]].is_compiled == variant.is_compiled and line["status"] == "measured"
        ]
        guess = FIRST_GUESS_SECONDS[variant.is_compiled] + self.options.seconds + self.options.warm_up_seconds
        return max(walls, default=guess)

    def _run(self, batch: BatchShape, variant: Variant, place: str, caches: Path | None = None) -> None:
        say(f"ablate: {batch} {variant.name} ({place}) …")
        began = time.monotonic()
        result = self._child(batch, variant, caches)
        wall = time.monotonic() - began
        line = {
            "key": row_key(self.config, variant, batch, self.here),
            "row": variant.name,
            "batch": str(batch),
            "sitting": self.number,
            "status": result.pop("status"),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_seconds": wall,
            "seconds_asked": self.options.seconds,
            "environment": self.here,
            "code": self.code,
            "result": result,
        }
        with self._writing:
            self.results.append(line)
        say(f"ablate: {batch} {variant.name}: {_in_short(line)} (took {human_seconds(wall)})")

    def _child(self, batch: BatchShape, variant: Variant, caches: Path | None) -> dict[str, Any]:
        """Run the row in its own process: its result, or how it ended."""
        options, log = self.options, self.options.output / "logs" / f"{batch}-{variant.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {"PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")}
        words = [options.source, "--row", variant.name, "--batch", batch, "--seconds", options.seconds]
        words += ["--warm-up-seconds", options.warm_up_seconds]
        if variant.is_compiled and caches is not None:
            cache = caches / variant.name  # of its own, so that compilation is measured
            variables |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
            words += ["--turns", caches / "turns"]
        return run_child(words, options.overrides, options.row_timeout_seconds, log, variables)


def _in_short(line: Line) -> str:
    result = line["result"]
    if line["status"] != "measured":
        return f"{line['status']}: {result.get('reason', '')}"
    utilisation = result["mfu"].get("seed")
    speed = f"{result['seconds_per_iteration']:.3f} s, {result['tokens_per_second']:,.0f} tokens/s"
    if utilisation is None:
        return f"{speed}, peak {result['peak_gib']:.1f} GiB"
    return f"{speed}, {100 * utilisation:.1f} % MFU (seed), peak {result['peak_gib']:.1f} GiB"


# ---- the file of results ---------------------------------------------------------------------------------------------

PACKAGES = ("torch", "triton", "flash-attn-4", "quack-kernels")
MEASURED_PARTS = ("model", "ops", "parallel", "train")
RESULTS_FILE = "results.jsonl"
FINAL_STATUSES = ("measured", "out of memory", "cannot run here")
"""A row that ended otherwise (failed, too slow) is tried again."""

Line = dict[str, Any]


def environment() -> dict[str, str | None]:
    """What a result depends on besides our code. Not asked of torch, whose CUDA context takes GPU memory."""
    gpu, driver = _gpu()
    found: dict[str, str | None] = {
        "gpu": gpu,
        "driver": driver,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def code_fingerprint() -> str:
    """A fingerprint of the measured source, to notice when a table mixes two versions of it."""
    root = Path(__file__).resolve().parent.parent
    digest = sha256()
    for part in MEASURED_PARTS:
        for path in sorted((root / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _gpu() -> tuple[str | None, str | None]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    command += [f"--id={visible}"] if visible else []
    name, _, driver = (output_of(command, 30)[0] or "").partition("\n")[0].partition(",")
    return name.strip() or None, driver.strip() or None


def row_key(config: RunConfig, variant: Variant, batch: BatchShape, environment: dict[str, str | None]) -> str:
    """Equal for measurements that may replace each other."""
    values = config_values(vary(config, variant))
    decisive = {name: values[name] for name in ("model", "ops", "optim", "parallel")}
    decisive |= {name: values["train"][name] for name in ("precision", "z_loss", "cuda_graph")}
    if values["train"]["recompute"] != "none":
        decisive |= {name: values["train"][name] for name in ("recompute", "recompute_every")}
    return fingerprint([variant.name, variant.unpadded, str(batch), decisive, environment])


class Results:
    """The file of one ablation."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS_FILE
        self.lines = [line for line in whole_lines(self.path) if "key" in line]

    def append(self, line: Line) -> None:
        """Append a line and flush it to disk."""
        append_line(self.path, line)
        self.lines.append(line)

    @property
    def next_sitting(self) -> int:
        """Sittings are counted from 1."""
        return 1 + max((line["sitting"] for line in self.lines), default=0)

    def finished(self, key: str) -> Line | None:
        """The newest line of a row that need not be tried again."""
        lines = [line for line in self.lines if line["key"] == key and line["status"] in FINAL_STATUSES]
        return lines[-1] if lines else None


def anchors(batch: str, environment: dict[str, Any], lines: list[Line]) -> dict[int, float]:
    """Sitting -> seconds per iteration of its anchor."""
    wanted = {"row": ANCHOR, "batch": batch, "status": "measured", "environment": environment}
    found = [line for line in lines if all(line[name] == value for name, value in wanted.items())]
    return {line["sitting"]: line["result"]["seconds_per_iteration"] for line in found}
