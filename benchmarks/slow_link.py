"""Which axis belongs on a slow link: three layouts of two processes over one, measured and as the plan orders them.

    sudo python benchmarks/slow_link.py          a few minutes on 2 cores; needs root, ip and tc

Two network namespaces on this machine, joined by a virtual cable. First as fast as it is; then slowed by a token bucket
until sending what `replicate` sends takes half a step. Every layout trains the same small model on the same batch, over
gloo, one thread a process. The plan puts those first whose traffic can be hidden, and then
the one that sends least.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.machine import save_result
from benchmarks.two_machines import ADDRESSES, WIRE, Machines, two_machines, why_not
from zero2all.common.files import read_json, write_json
from zero2all.config import RunConfig, config_from_values
from zero2all.estimate.communication import by_axis, communication_per_step
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch, rank_rows
from zero2all.parallel.mesh import make_mesh
from zero2all.parallel.parameter_table import draw
from zero2all.parallel.world import World, join_world
from zero2all.train.build import empty_state, op_context
from zero2all.train.micro_batch import memory_settings
from zero2all.train.train_step import StepPlan, train_step

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "replicate": {"replicate": 2},
    "pipeline": {"pipeline": 2},
}
STEPS, ROWS, SEQ_LEN, MICRO, VOCABULARY = 7, 8, 128, 2, 1024
PORT = "29533"


def main() -> None:
    """Measure on the fast link, slow it down, measure again, compare with the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        measure(Path(arguments.out))
        return
    if problem := why_not():
        raise SystemExit(problem)
    with two_machines() as machines:
        fast = on_both(machines)
        # Half a step of the layout that sends gradients; what it sends, the other one receives.
        seconds = fast["replicate"]["seconds"] / 2
        bits = 8 * fast["replicate"]["bytes"] / seconds
        machines.limit(bits)
        slow = on_both(machines)
    by_plan = sorted(LAYOUTS, key=lambda name: (slow[name]["waited"], slow[name]["bytes"]))
    measured = sorted(LAYOUTS, key=lambda name: slow[name]["seconds"] - fast[name]["seconds"])
    print(f"link: {bits / 1e6:.0f} Mbit/s")
    for name in by_plan:
        sent, before, after = slow[name]["bytes"], fast[name]["seconds"], slow[name]["seconds"]
        print(f"{name:>10}: {sent / 1e6:6.1f} MB a step by the formula; {before:.2f} s fast, {after:.2f} s slow")
    print(f"by the plan, best on this link first: {', '.join(by_plan)}; measured: {', '.join(measured)}")
    save_result("slow_link", {"bits_per_second": bits, "fast": fast, "slow": slow, "agrees": by_plan == measured})


def on_both(machines: Machines) -> dict[str, Any]:
    """Run this program in both namespaces; what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": WIRE}
        program = [sys.executable, __file__, "--out", str(out)]
        processes = [
            subprocess.Popen(machines.command(rank, *program), env={**os.environ, **shared, "RANK": str(rank)})
            for rank in (0, 1)
        ]
        if any(process.wait() for process in processes):
            raise SystemExit("a process failed")
        return dict(read_json(out))


def measure(out: Path) -> None:
    """In each process: every layout, median seconds of a step, bytes by the formula."""
    torch.set_num_threads(1)
    config = _config()
    found = {}
    with join_world(torch.device("cpu"), config.parallel) as world:
        for name, fields in LAYOUTS.items():
            found[name] = pace(
                dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **fields)), world
            )
    if world.is_first:
        write_json(out, found)


def _config() -> RunConfig:
    model = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "layers": 4, "heads": 4}
    values = {
        "data": {"seq_len": SEQ_LEN, "document_mask": False},
        "model": {**model, "kv_heads": 4, "max_seq_len": SEQ_LEN},
        "train": {"name": "slow", "tokens_per_step": ROWS * SEQ_LEN, "micro_batch_samples": MICRO},
        "parallel": {"device": "cpu", "bucket_mb": 4},
    }
    return config_from_values(values, "benchmarks/slow_link.py")


def pace(config: RunConfig, world: World) -> dict[str, float]:
    """Train some steps under one layout."""
    world = dataclasses.replace(world, mesh=make_mesh(config.parallel.sizes(world.size)))
    ops = resolve(config.ops, op_context(config, "cpu", torch.float32))
    state = empty_state(config, world, ops)
    state.micro_batch_samples = MICRO
    with state.weights.masters_between_steps() as masters:
        draw(masters, state.model.config, 1)
    state.weights.publish_masters()
    seconds = []
    for step in range(STEPS):
        tokens = np.random.default_rng(step).integers(0, VOCABULARY, (ROWS, SEQ_LEN + 1))
        first, own, _ = rank_rows(ROWS, world.mesh.batch.rank, world.mesh.batch.size)
        channels = np.zeros(own, dtype=np.int64)
        rows = tokens[first : first + own]
        batch = Batch(rows, channels, channels, 0, step_samples=ROWS, samples=own, first_row=first)
        world.gather(step)  # all begin together
        started = time.perf_counter()
        train_step(state, batch, 1, config, world, StepPlan(1e-4)).result()
        state.weights.wait()
        seconds.append(time.perf_counter() - started)
    traffic = by_axis(communication_per_step(config.model, memory_settings(config, ops, world.mesh, MICRO)))
    return {
        "seconds": statistics.median(seconds[2:]),
        "bytes": sum(axis.sent for axis in traffic),
        "waited": sum(axis.waited for axis in traffic),
    }


if __name__ == "__main__":
    main()
