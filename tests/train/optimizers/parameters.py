"""Small logical parameters of every kind, their masters, and parts of them put together again."""

import math
from functools import partial

import torch

from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.parallel.parts import TensorPart
from zero2all.train.optimizers.base import Master


def logical(name, shape, kind="matrix", alternating=1):
    return LogicalParameter(name, tuple(shape), kind, name, alternating=alternating)


# Rows that do not divide evenly, fewer rows than processes, more columns than a block of the 8-bit codes.
PARAMETERS = (
    *(logical("table", (11, 4), "embedding"), logical("norm", (5,), "norm"), logical("q", (9, 300))),
    *(logical("thin", (1, 6)), logical("pairs", (10, 6), alternating=2), logical("experts", (3, 4, 5))),
    *(logical("out", (7, 5)), logical("out2", (7, 5)), logical("bias", (7,), "bias"), logical("head", (11, 4), "head")),
)
TABLE = {one.name: one for one in PARAMETERS}


def drawn(step, dtype=torch.float32, table=TABLE):
    """Random values for every parameter, others for every step."""
    generator = torch.Generator().manual_seed(step)
    return {one.name: torch.randn(one.shape, generator=generator).to(dtype) for one in table.values()}


def whole_masters(weights, gradients):
    """A master for each whole weight; its gradient is what `gradients` has under its name."""
    return {name: Master(TensorPart.whole(weight), partial(gradients.get, name)) for name, weight in weights.items()}


def put_together(parts_of_ranks):
    """Whole tensors from the parts of all ranks, by name; every value is held by one rank, or alike by all."""
    wholes = {}
    for name in dict.fromkeys(name for parts in parts_of_ranks for name in parts):
        held = [parts[name] for parts in parts_of_ranks if name in parts]
        whole = torch.zeros(held[0].shape, dtype=held[0].values.dtype)
        if len(held) > 1 and all(part.values.numel() == math.prod(part.shape) for part in held):
            assert all(torch.equal(part.values, held[0].values) for part in held), name
            held = held[:1]
        times = torch.zeros(whole.shape, dtype=torch.int32)
        for part in held:
            for offsets, values in part.boxes():
                at = tuple(slice(first, first + size) for first, size in zip(offsets, values.shape, strict=True))
                whole[at] = values
                times[at] += 1
        assert (times == 1).all(), f"{name}: each value lies in one rank"
        wholes[name] = whole
    return wholes


def load_into(parts, wholes):
    """Fill parts from whole tensors, as a checkpoint of another layout does."""
    for name, part in parts.items():
        for offsets, values in part.boxes():
            at = tuple(slice(first, first + size) for first, size in zip(offsets, values.shape, strict=True))
            values.copy_(wholes[name][at])
