"""Gradients sent during the backward pass over a slow link: a step against computing and sending one after the other.

    python benchmarks/overlap.py                 2 processes over gloo, four buckets: a minute

The link is gloo with a delay: a collective takes at least its bytes over the link's speed, and the link sends one after
the other. Its speed is chosen so that sending all gradients takes somewhat less than the backward pass. A step that
overlaps should take about the larger of both plus one bucket, not their sum: the first blocks of the model are in the
last large bucket, which is complete only when the backward pass ends. Embedding, head and two buckets of
matrices make four buckets, beside a tiny one of norms.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.machine import save_result
from zero2all.common.files import read_json, write_json
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel import reduce
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.mesh import make_mesh
from zero2all.parallel.parameter_table import init_weights
from zero2all.train.weights import FlatWeights

MODEL = ModelConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=768, layers=8, heads=4, kv_heads=4, max_seq_len=256
)
STEPS, ROWS, MATRIX_BUCKETS = 7, 4, 2
LINK_SHARE = 0.5
"""Of the time of a pass; its backward part, under which buckets are sent, takes about two thirds."""


class SlowLink:
    """all_reduce over a link of `seconds_per_byte`; 0: as it is."""

    def __init__(self) -> None:
        self.seconds_per_byte, self.free_at = 0.0, 0.0
        self._real = dist.all_reduce

    def all_reduce(self, values: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """As torch's; what it returns is done when the link is."""
        work = self._real(values, group=group, async_op=True)
        self.free_at = max(self.free_at, time.monotonic()) + self.seconds_per_byte * values.nbytes
        sending = _Sending(work, self.free_at)
        return sending if async_op else sending.wait()


class _Sending:
    def __init__(self, work: Any, done_at: float) -> None:
        self._work, self._done_at = work, done_at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._done_at - time.monotonic()))


def main() -> None:
    """Start two processes, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        measure(Path(arguments.out))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "--out", str(out)]
        processes = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(2)]
        if any(process.wait() for process in processes):
            raise SystemExit("a process failed")
        found = dict(read_json(out))
    ideal = max(found["compute"], found["link"]) + found["largest_bucket"]
    print(f"compute {found['compute']:.3f} s, link {found['link']:.3f} s, {found['buckets']} buckets")
    print(f"one after the other {found['in_sequence']:.3f} s; overlapped {found['overlapped']:.3f} s")
    print(f"larger of both + the largest bucket {ideal:.3f} s; overlapped is {found['overlapped'] / ideal:.2f} of it")
    save_result("overlap", {**found, "ideal": ideal})


def measure(out: Path) -> None:
    """In each process: seconds of a pass of compute alone, with the link after it, and with the link under it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link = SlowLink()
    reduce.dist.all_reduce = link.all_reduce  # type: ignore[assignment]
    mesh = make_mesh(ParallelConfig().sizes(2))
    seconds: dict[str, Any] = {}
    model, weights = build(mesh, overlaps=False)
    seconds["compute"] = pace(model, weights, is_last=False)
    bytes_sent = weights.gradients.nbytes
    link.seconds_per_byte = _agreed(LINK_SHARE * seconds["compute"]) / bytes_sent
    seconds["link"], seconds["buckets"] = link.seconds_per_byte * bytes_sent, len(weights.plan.buckets)
    largest = max(bucket.span.stop - bucket.span.start for bucket in weights.plan.buckets)
    seconds["largest_bucket"] = seconds["link"] * largest / weights.plan.length
    seconds["in_sequence"] = pace(model, weights, is_last=True)
    seconds["overlapped"] = pace(*build(mesh, overlaps=True), is_last=True)
    if dist.get_rank() == 0:
        write_json(out, seconds)
    dist.destroy_process_group()


def _agreed(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(tensor, 0)
    return float(tensor)


def build(mesh: Any, overlaps: bool) -> tuple[Z2all, FlatWeights]:
    """A model whose matrices make MATRIX_BUCKETS buckets."""
    model = Z2all(MODEL, resolve(OpsConfig(), "cpu")).train()
    init_weights(model, 0)
    matrices = sum(parameter.nbytes for parameter in model.blocks.parameters())
    bucket_bytes = matrices / MATRIX_BUCKETS - 1e6
    return model, FlatWeights(
        model, torch.float32, mesh=mesh, parallel=ParallelConfig(bucket_mb=bucket_bytes / 1e6, overlap=overlaps)
    )


def pace(model: Z2all, weights: FlatWeights, is_last: bool) -> float:
    """The median time of a pass; all processes begin together."""
    ids = torch.randint(0, 2048, (ROWS, 257), generator=torch.Generator().manual_seed(1))
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        started = time.perf_counter()
        weights.begin_pass(is_last)
        model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
        weights.end_pass()
        seconds.append(time.perf_counter() - started)
        weights.zero_gradients()
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
