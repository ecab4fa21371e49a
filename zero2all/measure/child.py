"""Steps of the trainer in a process of their own: what it allocates, compiles or breaks ends with it.

    python -m zero2all.measure.child z2all-1b --batch 16x2048x2 -- --train.recompute full

A config that does not fit in memory, or cannot run here, is a result too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run does

from zero2all.common.errors import UserError, is_out_of_memory
from zero2all.common.files import read_json_object, write_json
from zero2all.measure.short_run import WARM_UP_SECONDS, measure_steps
from zero2all.predict.batch import load_measured_config, parse_batch

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


def main(words: list[str] | None = None) -> int:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a preset or the path of a YAML file")
    parser.add_argument("--batch", required=True, help="SAMPLESxSEQUENCExACCUMULATION")
    parser.add_argument("--seconds", type=float, default=8.0, help="measure at least this long")
    parser.add_argument("--warm-up-seconds", type=float, default=WARM_UP_SECONDS, help="warm up this long before")
    parser.add_argument("--no-anatomy", action="store_true", help="do not profile a step")
    parser.add_argument("--result", type=Path, default=None, help="file for the result (default: standard output)")
    parser.epilog = "Settings of the config follow after --, for example -- --ops.linear plain"
    words = sys.argv[1:] if words is None else words
    border = words.index("--") if "--" in words else len(words)
    arguments, overrides = parser.parse_args(words[:border]), words[border + 1 :]
    started = time.perf_counter()
    config, _ = load_measured_config(arguments.config, overrides)
    batch = parse_batch(arguments.batch)
    anatomy, warm_up = not arguments.no_anatomy, arguments.warm_up_seconds
    found = with_status(lambda: measure_steps(config, batch, arguments.seconds, anatomy, warm_up))
    found["process_seconds"] = time.perf_counter() - started
    if arguments.result is None:
        print(json.dumps(found, indent=2))
    else:
        write_json(arguments.result, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
