"""A measurement in a process of its own: what it allocates, compiles or breaks ends with it.

    python -m zero2all.measure.child z2all-1b --batch 16x2048x16 --row fp8 -- --ops.strict false
    python -m zero2all.measure.child z2all-1b --batch 16x2048x2 -- --train.recompute full

With --row a row of the ablation (`zero2all.measure.step_timer`), else steps of the trainer itself
(`zero2all.measure.short_run`). A config that does not fit in memory, or cannot run here, is a result too.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run does

from zero2all.common.errors import UserError, is_out_of_memory
from zero2all.common.files import read_json_object, write_json
from zero2all.config import RunConfig
from zero2all.estimate.run.batch import BatchShape, load_measured_config, parse_batch
from zero2all.measure.short_run import measure_steps, shaped
from zero2all.measure.step_timer import WARM_UP_SECONDS, Timing, measure, without_padding
from zero2all.measure.variants import BY_NAME, Variant, vary
from zero2all.parallel.device import pick_device, set_cpu_threads

MEASURED, OUT_OF_MEMORY, CANNOT_RUN, FAILED = "measured", "out of memory", "cannot run here", "failed"
TAIL_LINES = 8


def run_child(
    words: Sequence[object],
    overrides: Sequence[str],
    timeout: float,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a process of this module finds, or how it ended."""
    with tempfile.TemporaryDirectory(prefix="z2a-child-") as folder:
        result, log = Path(folder) / "result.json", log or Path(folder) / "log"
        command = [sys.executable, "-m", "zero2all.measure.child", *map(str, words), "--result", str(result)]
        try:
            with open(log, "wb") as output:
                code = subprocess.run(
                    [*command, "--", *overrides],
                    env={**os.environ, **(variables or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=timeout,
                ).returncode
        except subprocess.TimeoutExpired:
            return {"status": FAILED, "reason": f"not finished after {timeout:g} s"}
        if result.is_file():
            return read_json_object(result)
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    if code == -9:
        return {"status": OUT_OF_MEMORY, "reason": "the system killed the process (signal 9)"}
    return {"status": FAILED, "reason": f"exit code {code}: {' | '.join(tail)}"}


# ---- in the process --------------------------------------------------------------------------------------------------


def measure_row(config: RunConfig, variant: Variant, batch: BatchShape, timing: Timing) -> dict[str, Any]:
    """Status and figures of one row; of one that cannot be measured, status and reason."""

    def measured() -> dict[str, Any]:
        set_cpu_threads(config.parallel.cpu_threads, None)
        device, varied = pick_device(config.parallel.device), vary(config, variant)
        with without_padding(variant.unpadded):
            return measure(varied, batch, device, timing, variant.tensor_path)

    return with_status(measured)


def short_run(config: RunConfig, batch: BatchShape, seconds: float, anatomy: bool) -> dict[str, Any]:
    """Status and figures of steps of the trainer; of steps that cannot be measured, status and reason."""
    return with_status(lambda: measure_steps(shaped(config, batch), batch, seconds, anatomy))


def with_status(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a measurement finds, with its status; of one that fails, status and reason."""
    try:
        return {"status": MEASURED, **measured()}
    except UserError as error:
        return {"status": CANNOT_RUN, "reason": str(error)}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip()
        if is_out_of_memory(error):
            return {"status": OUT_OF_MEMORY, "reason": reason.splitlines()[0]}
        traceback.print_exc()
        return {"status": FAILED, "reason": reason}


@contextmanager
def beside_others(turns: Path | None) -> Iterator[Callable[[], None]]:
    """Rows in this block compile beside each other. The function that it gives waits until no other row compiles or
    measures; from then on the others wait."""
    if turns is None:
        yield lambda: None
        return
    with open(turns, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield lambda: fcntl.flock(file, fcntl.LOCK_EX)


def main(words: list[str] | None = None) -> int:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a preset or the path of a YAML file")
    parser.add_argument("--batch", required=True, help="SAMPLESxSEQUENCExACCUMULATION")
    parser.add_argument("--row", choices=sorted(BY_NAME), help="a row of the ablation (default: steps of the trainer)")
    parser.add_argument("--seconds", type=float, default=8.0, help="measure at least this long")
    parser.add_argument("--warm-up-seconds", type=float, default=WARM_UP_SECONDS, help="warm up a row this long")
    parser.add_argument("--turns", type=Path, default=None, help="rows that share this file are measured in turn")
    parser.add_argument("--no-anatomy", action="store_true", help="do not profile a step of the trainer")
    parser.add_argument("--result", type=Path, default=None, help="file for the result (default: standard output)")
    parser.epilog = "Settings of the config follow after --, for example -- --ops.linear plain"
    words = sys.argv[1:] if words is None else words
    border = words.index("--") if "--" in words else len(words)
    arguments, overrides = parser.parse_args(words[:border]), words[border + 1 :]
    started = time.perf_counter()
    config, _ = load_measured_config(arguments.config, overrides)
    batch = parse_batch(arguments.batch)
    if arguments.row is None:
        found = short_run(config, batch, arguments.seconds, not arguments.no_anatomy)
    else:
        with beside_others(arguments.turns) as alone:
            timing = Timing(arguments.seconds, arguments.warm_up_seconds, alone)
            found = measure_row(config, BY_NAME[arguments.row], batch, timing)
    found["process_seconds"] = time.perf_counter() - started
    if arguments.result is None:
        print(json.dumps(found, indent=2))
    else:
        write_json(arguments.result, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
