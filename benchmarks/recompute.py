"""Training what does not fit: recompute by groups of blocks.

    python benchmarks/recompute.py [--save]        H200: 5.3 B parameters, some 80 s, one process for each case

With `none` the pass runs out of memory; of the others tokens/s and the peak that torch has allocated. Real steps of the
trainer on random tokens (`measure.short_run`), beside the estimate. On a CPU: `--tiny`, which shows only that it
runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import BILLION, save_result
from zero2all.measure.child import MEASURED
from zero2all.measure.verify import ShortRun, run_apart
from zero2all.predict.batch import parse_batch

LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "layers": 28, "heads": 32, "kv_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 512}
CASES = {
    "none": ["--train.recompute", "none"],
    "groups of 4 blocks": ["--train.recompute", "groups", "--train.recompute_every", "4"],
}


def main() -> None:
    """Measure every case, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", help="samples x tokens x passes of a step (12x2048x1)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps that are timed")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--save", action="store_true", help="also benchmarks/results/recompute.json")
    arguments = parser.parse_args()
    batch = parse_batch(arguments.batch or ("2x64x1" if arguments.tiny else "12x2048x1"))
    sizes = TINY if arguments.tiny else LARGE
    model = [word for name, value in sizes.items() for word in (f"--model.{name}", str(value))]
    if arguments.tiny:
        model += ["--train.precision", "float32", "--parallel.device", "cpu"]
    rows, started = {}, time.perf_counter()
    print(f"batch {batch}\n{'case':20} {'tokens/s':>10} {'peak GiB':>10} {'step s':>8}")
    for name, words in CASES.items():
        limit = 600.0 if arguments.tiny else 60.0
        found = run_apart(BILLION, [*model, *words], ShortRun(batch, arguments.seconds, limit, anatomy=False))
        kept = ("status", "reason", "step_seconds", "noise", "peak_bytes", "device")
        rows[name] = {key: found.get(key) for key in kept}
        if found["status"] != MEASURED:
            print(f"{name:20} {found['status']}: {str(found['reason'])[:120]}", flush=True)
            continue
        speed = rows[name]["tokens_per_second"] = batch.tokens / found["step_seconds"]
        print(f"{name:20} {speed:10,.0f} {found['peak_bytes'] / 2**30:10.1f} {found['step_seconds']:8.2f}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s in all")
    if arguments.save:
        save_result("recompute", {"batch": str(batch), "model": sizes, "cases": rows})


if __name__ == "__main__":
    main()
