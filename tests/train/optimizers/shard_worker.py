"""One process of a group that trains the same parameters, cut by rows, with every optimizer, and what to compare with.

python shard_worker.py RANK WORLD STORE_FILE OUT_FILE
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from zero2all.config.training import OptimConfig
from zero2all.parallel.shards import box, local
from zero2all.train.optimizers.factory import build_optimizer
from zero2all.train.optimizers.roles import Role

# Rows that do not divide evenly, fewer rows than processes, more columns than a block of the 8-bit codes.
SHAPES = {
    "qkv": (9, 300),
    "pairs": (10, 6),
    "out": (7, 5),
    "thin": (1, 6),
    "experts": (3, 4, 5),
    "table": (11, 4),
    "norm": (5,),
}
ROLES = {
    "qkv": Role("matrix", (5, 2, 2)),
    "pairs": Role("matrix", alternating=2),
    "out": Role("matrix"),
    "thin": Role("matrix"),
    "experts": Role("matrix"),
    "table": Role("embedding"),
    "norm": Role("norm"),
}
CONFIGS = {
    "adamw": OptimConfig(),
    "muon": OptimConfig("muon"),
    "lion": OptimConfig("lion"),
    "adafactor": OptimConfig("adafactor", adafactor_beta1=0.5),
    "sgd": OptimConfig("sgd"),
    "adamw_8bit": OptimConfig("adamw_8bit"),
    "adamw_bf16": OptimConfig("adamw_bf16"),
    "adamw_bf16, kahan": OptimConfig("adamw_bf16", bf16_rounding="kahan"),
}
STEPS, SKIPPED, RELOADED = 5, 2, 3


def values(name, step, dtype):
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def train(config, spread):
    """Weights and state, whole, after a few steps, one of them cancelled and one after a reload."""
    dtype = torch.bfloat16 if config.kind == "adamw_bf16" else torch.float32
    parameters = {name: spread(values(name, 999, dtype)) for name in SHAPES}
    optimizer = build_optimizer(parameters.items(), config, ROLES, seed=3)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = spread(values(name, step, dtype))
        if step == SKIPPED:
            parameters["out"].grad = spread(torch.full(SHAPES["out"], torch.nan, dtype=dtype))
        if step == RELOADED:  # from whole tensors, as a checkpoint of another number of processes gives them
            saved = {name: whole(tensor).clone() for name, tensor in optimizer.state_tensors().items()}
            optimizer = build_optimizer(parameters.items(), config, ROLES, seed=3)
            for name, tensor in optimizer.state_tensors().items():
                local(tensor).copy_(saved[name][box(tensor)])
        optimizer.set_learning_rate(0.02)
        optimizer.step(torch.tensor(0.5), torch.tensor(float(step == SKIPPED)))
    tensors = {f"weight/{name}": parameter for name, parameter in parameters.items()} | optimizer.state_tensors()
    return {name: whole(tensor) for name, tensor in tensors.items()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main():
    rank, world, store, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    mesh = init_device_mesh("cpu", (int(world),))
    found = {name: train(config, lambda t: distribute_tensor(t, mesh, [Shard(0)])) for name, config in CONFIGS.items()}
    if rank == "0":
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()
