"""DiLoCo over an office network: data parallel against streaming, in the reference project's case.

    sudo python benchmarks/diloco_two_machines.py --work WORKSPACE      needs root, ip, tc and packed data (quickstart)

Two network namespaces on this machine are two machines with one process each. Data parallel is timed on the fast cable
first; its step is the compute. Then a token bucket slows the cable until what data parallel sends (4 bytes a parameter)
takes 19/7 times as long as that; a short run on the slow cable corrects the rate. Every run has the same steps and
tokens, and is timed from its first to its last step by the clock in its metrics:

    data parallel, fast      data parallel, slow      streaming, fast and slow in turn, medians

Wanted: streaming on the slow cable at least 3 times as fast as data parallel on it, and at least 90 % as fast as
streaming on the fast one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from benchmarks.two_machines import ADDRESSES, Machines, two_machines, why_not
from zero2all.config import load_config
from zero2all.model.config import parameter_counts
from zero2all.track.reader import read_run

RATIO = 19 / 7
LEAST_OVER_DATA_PARALLEL, LEAST_OF_UNLIMITED = 3.0, 0.9
SKIPPED_STEPS = 5  # connections, caches, and what the bucket lets through at once
TRIED_STEPS = 25
RUN_SECONDS = 1800
PORTS = {"rendezvous": 29541, "link": 29642}


def main() -> int:
    """Time all runs and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a workspace with packed data")
    parser.add_argument("--config", default="quickstart", help="preset or YAML file (default quickstart)")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--every", type=int, default=30, help="H of streaming (default 30)")
    parser.add_argument("--turns", type=int, default=3, help="streaming on the fast and on the slow cable (default 3)")
    parser.add_argument("--only-data-parallel", action="store_true", help="leave the streaming runs out")
    asked = parser.parse_args()
    if problem := why_not():
        raise SystemExit(problem)
    with two_machines() as machines, tempfile.TemporaryDirectory(prefix="z2a-office-") as folder:
        places = [workspace_beside(asked.work.resolve(), Path(folder) / f"machine{number}") for number in (0, 1)]
        fast = {"data parallel": [_pace(machines, "data parallel", "fast", places, asked)]}
        compute = fast["data parallel"][0]
        trained = load_config(str(places[0] / "runs/data-parallel-fast/config.yaml"), [])  # with its vocabulary
        sent = 4 * parameter_counts(trained.model)["total"]
        bits = 8 * sent / (RATIO * compute)
        machines.limit(bits)
        tried = _pace(machines, "data parallel", "tried", places, asked, TRIED_STEPS)
        bits *= (tried / compute - 1) / RATIO  # headers, acknowledgements and turns of the ring take time too
        machines.limit(bits)
        slow = {"data parallel": [_pace(machines, "data parallel", "slow", places, asked)]}
        for turn in range(0 if asked.only_data_parallel else asked.turns):  # in turn: others may use the machine too
            machines.limit(None)
            fast.setdefault("streaming", []).append(_pace(machines, "streaming", f"fast-{turn}", places, asked))
            machines.limit(bits)
            slow.setdefault("streaming", []).append(_pace(machines, "streaming", f"slow-{turn}", places, asked))
    print(f"link: {bits / 1e6:.1f} Mbit/s; data parallel sends {sent / 1e6:.1f} MB a step")
    for kind in slow:
        for one, other in zip(fast[kind], slow[kind], strict=True):
            print(f"{kind:>14}: {one:.3f} s a step on the fast cable, {other:.3f} s on the slow one")
    found: dict[str, Any] = {"bits_per_second": bits, "sent_bytes": sent, "steps": asked.steps, "every": asked.every}
    found |= {"fast": fast, "slow": slow}
    waited = slow["data parallel"][0] / compute - 1
    print(f"data parallel communicates {waited:.2f} times as long as it computes (wanted {RATIO:.2f})")
    is_good = True
    if "streaming" in slow:
        paces = [statistics.median(cable["streaming"]) for cable in (fast, slow)]
        faster, share = slow["data parallel"][0] / paces[1], paces[0] / paces[1]
        is_good = faster >= LEAST_OVER_DATA_PARALLEL and share >= LEAST_OF_UNLIMITED
        print(
            f"streaming is {faster:.2f} times as fast as data parallel, and {100 * share:.1f} % of its unlimited speed"
        )
        found |= {"times_faster": faster, "share_of_unlimited": share, "is_good": is_good}
    save_result("diloco_two_machines", found)
    return 0 if is_good else 1


def workspace_beside(source: Path, place: Path) -> Path:
    """A workspace of its own for each machine, with the same data."""
    place.mkdir()
    for entry in source.iterdir():
        if entry.name != "runs":
            (place / entry.name).symlink_to(entry)
    return place


def wait_for_all(started: list[subprocess.Popen[bytes]], name: str) -> None:
    """Wait until all processes have ended well; kills them all when one has not."""
    try:
        if max(process.wait(RUN_SECONDS) for process in started):
            raise SystemExit(f"{name}: a process failed")
    finally:
        for process in started:
            process.kill()


def _pace(
    machines: Machines, kind: str, cable_name: str, places: list[Path], asked: argparse.Namespace, steps: int = 0
) -> float:
    """Train on both machines; seconds of a step."""
    name = f"{kind}-{cable_name}".replace(" ", "-")
    words = [sys.executable, "-m", "zero2all", "train", asked.config, "--train.name", name, "--train.steps"]
    words += [str(steps or asked.steps), "--parallel.device", "cpu", "--parallel.cpu_threads", "1"]
    words += ["--parallel.processes", "1", "--validation.every_steps", "1000000", "--checkpoint.every_steps", "1000000"]
    started = []
    for rank in (0, 1):
        env = {**os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "Z2A_SECRET": "of this benchmark"}
        if kind == "data parallel":
            more, work = [], places[0]  # one run, one folder
            env |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": ADDRESSES[0]}
            env["MASTER_PORT"] = str(PORTS["rendezvous"])
        else:
            work = places[rank]
            fields = {
                "groups": str([f"{address}:{PORTS['link']}" for address in ADDRESSES]),
                "group": rank,
                "scheme": "streaming",
                "every": asked.every,
                "tau": 1,
                "compress": "int4",
            }
            more = [word for key, value in fields.items() for word in (f"--diloco.{key}", str(value))]
        command = machines.command(rank, *words, "--work", str(work), *more)
        started.append(subprocess.Popen(command, env=env))
    wait_for_all(started, name)
    points = read_run(places[0] / "runs" / name).series["loss"]
    first = SKIPPED_STEPS
    return float((points.time[-1] - points.time[first]) / (points.step[-1] - points.step[first]))


if __name__ == "__main__":
    sys.exit(main())
