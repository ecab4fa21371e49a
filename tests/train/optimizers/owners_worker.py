"""One process of a group that trains parameters of which each process has some rows, and what to compare with.

python owners_worker.py RANK WORLD FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from tests.train.optimizers.parameters import TABLE, logical
from zero2all.config.training import OptimConfig
from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.parallel.parts import TensorPart
from zero2all.parallel.shards import part_of
from zero2all.train.optimizers import muon
from zero2all.train.optimizers.base import Master
from zero2all.train.optimizers.factory import build_optimizer

# q, k, v in one tensor of 9 rows: a process has rows of one, two or three of them.
QKV = [
    LogicalParameter(f"qkv.{name}", (rows, 6), "matrix", "qkv", first)
    for name, rows, first in (("q", 5, 0), ("k", 2, 5), ("v", 2, 7))
]
EVERYTHING = {**TABLE, **{one.name: one for one in QKV}}
ONE = {one.name: one for one in (logical("out", (7, 5)), logical("norm", (5,), "norm"))}
CASES = {
    "muon": (OptimConfig("muon"), EVERYTHING),
    "muon, one matrix": (OptimConfig("muon", nesterov=False), ONE),
}
STEPS, SKIPPED = 4, 1


def holders(table, step):
    """Random values of every tensor that holds parameters."""
    generator = torch.Generator().manual_seed(step)
    shapes = {
        one.holder: (one.first_row + one.shape[0], *one.shape[1:]) for one in table.values()
    }  # the last one's end
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def whole(tensor):
    return tensor


def train(case, spread):
    """Weights and state after some steps, one of them cancelled, and how many values this process orthogonalised."""
    config, table = CASES[case]
    counted = []
    orthogonalise = muon.orthogonalise
    muon.orthogonalise = lambda x, *how: counted.append(x.numel()) or orthogonalise(x, *how)
    try:
        weights = {name: spread(values) for name, values in holders(table, 99).items()}
        gradients = {name: spread(values) for name, values in holders(table, 0).items()}
        masters = {
            name: Master(part_of(weights[one.holder], one), lambda one=one: part_of(gradients[one.holder], one).values)
            for name, one in table.items()
        }
        optimizer = build_optimizer(masters, config, table)
        for step in range(STEPS):
            gradients |= {name: spread(values) for name, values in holders(table, step).items()}
            optimizer.set_learning_rate(0.02)
            optimizer.step(torch.tensor(0.5), torch.tensor(float(step == SKIPPED)))
    finally:
        muon.orthogonalise = orthogonalise
    weights = {f"weight/{name}": master.part for name, master in masters.items()}
    return {**weights, **optimizer.state_tensors()}, sum(counted)


def main():
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (1, world))  # as with parallel.replicate: the group is that of the second dimension

    def spread(tensor):
        return distribute_tensor(tensor, mesh, [Replicate(), Shard(0)], src_data_rank=None)

    found = {}
    for case in CASES:
        parts, orthogonalised = train(case, spread)
        found[case] = {name: without_group(part) for name, part in parts.items()}, orthogonalised
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def without_group(part):
    return TensorPart(part.values.clone(), part.shape, part.box, part.start)
