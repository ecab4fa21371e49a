"""One row of the ablation, in its own process (`zero2all.measure.child`).

    python -m zero2all.measure.row z2all-1b --row fp8 --batch 16x2048x16 --result row.json -- --ops.strict false

A row that does not fit in memory, or whose operators cannot run here, is a result too.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from zero2all.common.errors import UserError, is_out_of_memory
from zero2all.common.files import write_json
from zero2all.config import RunConfig
from zero2all.estimate.run.batch import BatchShape, load_measured_config, parse_batch
from zero2all.measure.child import CANNOT_RUN, FAILED, MEASURED, OUT_OF_MEMORY
from zero2all.measure.step_timer import WARM_UP_SECONDS, measure, without_padding
from zero2all.measure.variants import BY_NAME, Variant, vary
from zero2all.parallel.device import pick_device, set_cpu_threads


def main(words: list[str] | None = None) -> int:
    """Measure the row that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a preset or the path of a YAML file")
    parser.add_argument("--row", required=True, choices=sorted(BY_NAME), help="the row to measure")
    parser.add_argument("--batch", required=True, help="SAMPLESxSEQUENCExACCUMULATION")
    parser.add_argument("--seconds", type=float, default=8.0, help="measure at least this long")
    parser.add_argument("--warm-up-seconds", type=float, default=WARM_UP_SECONDS, help="warm up at least this long")
    parser.add_argument("--turns", type=Path, default=None, help="rows that share this file are measured in turn")
    parser.add_argument("--result", type=Path, default=None, help="file for the result (default: standard output)")
    parser.epilog = "Settings of the config follow after --, for example -- --ops.linear plain"
    words = sys.argv[1:] if words is None else words
    border = words.index("--") if "--" in words else len(words)
    arguments, overrides = parser.parse_args(words[:border]), words[border + 1 :]
    started = time.perf_counter()
    config, _ = load_measured_config(arguments.config, overrides)
    row, batch = BY_NAME[arguments.row], parse_batch(arguments.batch)
    with beside_others(arguments.turns) as alone:
        result = measure_row(config, row, batch, arguments.seconds, arguments.warm_up_seconds, alone)
    result["process_seconds"] = time.perf_counter() - started
    if arguments.result is None:
        print(json.dumps(result, indent=2))
    else:
        write_json(arguments.result, result)
    return 0


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


def measure_row(
    config: RunConfig,
    variant: Variant,
    batch: BatchShape,
    seconds: float,
    warm_up_seconds: float = WARM_UP_SECONDS,
    after_first_step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Status and figures of one row; of one that cannot be measured, status and reason."""

    def measured() -> dict[str, Any]:
        set_cpu_threads(config.parallel.cpu_threads, None)
        device, varied = pick_device(config.parallel.device), vary(config, variant)
        with without_padding(variant.unpadded):
            return measure(varied, batch, device, seconds, warm_up_seconds, variant.tensor_path, after_first_step)

    return with_status(measured)


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


if __name__ == "__main__":
    sys.exit(main())
