"""What DiLoCo costs between two synchronisations: two groups of two NCCL ranks on one GPU.

    python benchmarks/diloco_step.py --work quickstart                     z2all-1b with AdamW: minutes on an H200
    python benchmarks/diloco_step.py --work W --config quickstart --device cpu         a trial without a GPU

WORK is a workspace with packed data. The same four processes train twice in turn: as two runs that know nothing of each
other, and as two groups with streaming. Ranks of one card claim different hosts, so NCCL joins them by sockets.
Compared are inner steps: those in which no fragment is sent or comes back. Also printed: the others, and the most
memory of the device (the outer state is on the host). The processes are killed after the last measured step: four
final checkpoints of it would need 90 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.diloco_two_machines import workspace_beside
from benchmarks.machine import BILLION, save_result
from zero2all.config import load_config
from zero2all.diloco.config import Clock, DilocoConfig
from zero2all.track.reader import read_run

GROUPS, RANKS = 2, 2
EVERY, TAU, SKIPPED_STEPS = 30, 1, 4
PORTS = {"link": 29700, "rendezvous": 29710}
MOST_COST = 0.01


def main() -> int:
    """Measure in turn, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a workspace with packed data")
    parser.add_argument("--config", default=BILLION)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32768, help="of a step of one group (default 32768)")
    parser.add_argument("--turns", type=int, default=1, help="how often each of both is measured")
    parser.add_argument("words", nargs="*", help="more words for z2a train, after --")
    asked = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"alone": [], "streaming": []}
    with tempfile.TemporaryDirectory(prefix="z2a-groups-") as folder:
        places = [workspace_beside(asked.work.resolve(), Path(folder) / f"group{group}") for group in range(GROUPS)]
        for turn in range(asked.turns):
            for kind, results in found.items():
                results.append(measured(kind, f"{kind}-{turn}", places, asked))
                print(kind, json.dumps(results[-1]), flush=True)
    cost = report(found, load_config(asked.config, []).model.layers)
    if asked.device == "cuda":
        save_result("diloco_step", {"config": asked.config, "steps": asked.steps, "cost": cost, **found})
    return 0 if cost <= MOST_COST else 1


def report(found: dict[str, list[dict[str, Any]]], layers: int) -> float:
    """Print what steps take; the cost of an inner step."""
    alone = statistics.median(one for run in found["alone"] for one in run["steps"])
    print(f"alone: {alone:.4f} s a step")
    seconds: dict[str, list[float]] = {"inner": [], "a fragment is exchanged": [], "a fragment comes in": []}
    fragments = DilocoConfig(groups=["a:1", "b:1"], scheme="streaming", every=EVERY, tau=TAU).fragments(layers)
    clock = Clock(EVERY, fragments, TAU)
    for run in found["streaming"]:
        for step, value in enumerate(run["steps"], SKIPPED_STEPS + 1):
            kind = "a fragment comes in" if clock.due(step - 1 - TAU) else "inner"
            seconds["a fragment is exchanged" if clock.due(step - 1) else kind].append(value)
    for kind, values in seconds.items():
        middle = statistics.median(values)
        print(f"{kind:24} {middle:.4f} s, {100 * (middle / alone - 1):+.2f} % ({len(values)} steps)")
    mean = statistics.mean(value for values in seconds.values() for value in values)
    print(f"{'mean of all':24} {mean:.4f} s, {100 * (mean / alone - 1):+.2f} %")
    return statistics.median(seconds["inner"]) / alone - 1


def measured(kind: str, name: str, places: list[Path], asked: argparse.Namespace) -> dict[str, Any]:
    """Train with all processes; the steps of group 0."""
    words = [sys.executable, "-m", "zero2all", "train", asked.config, "--train.name", name, "--no-supervisor"]
    words += ["--train.steps", str(2 * asked.steps), "--validation.every_steps", "0", "--checkpoint.every_steps", "0"]
    words += ["--resilience.memory_every_steps", "0", "--track.log_every_steps", "1", *asked.words]
    words += ["--parallel.device", asked.device]
    # Groups share the rows of a step.
    words += ["--train.tokens_per_step", str(asked.tokens * (GROUPS if kind == "streaming" else 1))]
    words += ["--train.micro_batch_samples", "4"]
    links = str([f"127.0.0.1:{PORTS['link'] + group}" for group in range(GROUPS)])
    started = []
    for group, place in enumerate(places):
        fields: dict[str, Any] = {"groups": links, "group": group, "scheme": "streaming", "compress": "int4"}
        fields |= {"every": EVERY, "tau": TAU}
        more = [word for key, value in fields.items() for word in (f"--diloco.{key}", str(value))]
        for rank in range(RANKS):
            env = {
                **os.environ,
                "Z2A_SECRET": "of this benchmark",
                "WORLD_SIZE": str(RANKS),
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
            }
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORTS["rendezvous"] + group)}
            env |= {"NCCL_HOSTID": f"host-{group}-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
            command = [*words, "--work", str(place), *(more if kind == "streaming" else [])]
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
    wait_for_step(asked.steps, [place / "runs" / name for place in places], started)
    run = read_run(places[0] / "runs" / name)
    points = run.series["time/step"]
    steps = [float(value) for step, value in zip(points.step, points.value, strict=True) if step > SKIPPED_STEPS]
    peak = {"peak_gb": float(max(run.series["memory/peak"].value)) / 1e9} if "memory/peak" in run.series else {}
    stalls = run.series["diloco/stall_seconds"].value if "diloco/stall_seconds" in run.series else ()
    return {
        "step_seconds": statistics.median(steps),
        "mean_step_seconds": statistics.mean(steps),
        "steps": [round(one, 4) for one in steps],
        "stalls": [round(float(one), 3) for one in stalls],
        **peak,
    }


def wait_for_step(last: int, runs: list[Path], started: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all runs have made this step, then kill their processes."""
    try:
        while any(last_step(run) < last for run in runs):
            if any(process.poll() is not None for process in started):
                raise SystemExit(f"{runs[0].name}: a process ended before step {last}")
            time.sleep(0.5)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def last_step(folder: Path) -> int:
    """The newest step in a run's metrics; 0 while there are none."""
    if not folder.is_dir():
        return 0
    points = read_run(folder).series.get("time/step")
    return 0 if points is None else int(points.step[-1])


if __name__ == "__main__":
    sys.exit(main())
