"""However a parameter is cut over processes, every optimizer makes of it what it makes of a whole one. What needs no
communication is simulated here; what communicates (matrices cut by rows under Muon) runs in three real processes."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from tests.processes import Program
from tests.train.optimizers.parameters import TABLE, drawn, load_into, logical, put_together, whole_masters
from zero2all.config.training import OptimConfig
from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.parallel.parts import TensorPart
from zero2all.parallel.shards import part_of
from zero2all.train.optimizers import muon
from zero2all.train.optimizers.base import Master
from zero2all.train.optimizers.factory import build_optimizer, cut_of
from zero2all.train.optimizers.muon import balanced_owners, orthogonalising_cost

RANKS, STEPS, SKIPPED, RELOADED = 3, 4, 1, 2
CONFIGS = {
    "adamw": (OptimConfig(), "eager"),
    "adamw, fused": (OptimConfig(), "fused"),
    "muon": (OptimConfig("muon"), "eager"),
    "adamw_8bit": (OptimConfig("adamw_8bit"), "auto"),
    "adamw_bf16": (OptimConfig("adamw_bf16"), "auto"),
    "adamw_bf16, kahan": (OptimConfig("adamw_bf16", bf16_rounding="kahan"), "auto"),
}
CLOSE = ("adamw, fused", "muon")
"""The fused kernel rounds the ends of tensors apart, and a stack of two matrices is another product than one matrix."""
# q, k, v in one tensor of 9 rows: a process has rows of one, two or three of them.
QKV = {
    f"qkv.{name}": LogicalParameter(f"qkv.{name}", (rows, 6), "matrix", "qkv", first)
    for name, rows, first in (("q", 5, 0), ("k", 2, 5), ("v", 2, 7))
}
TABLE_AND_QKV = {**TABLE, **QKV}


def part_of_rank(values, kind, parameter, rank):
    """The part of a simulated rank; the borders of ranges of values fall anywhere."""
    cut, flat = cut_of(kind, parameter), values.view(-1)
    if cut == "whole":
        owner = list(TABLE).index(parameter.name) % RANKS
        return TensorPart.whole(values) if rank == owner else TensorPart.of_range(flat[:0], parameter.shape, 0, None)
    unit = values[0].numel() if cut == "rows" else 1
    borders = [flat.numel() // unit * part // RANKS * unit for part in range(RANKS + 1)]
    return TensorPart.of_range(flat[borders[rank] : borders[rank + 1]], parameter.shape, borders[rank], None)


def train_cut(config, implementation, ranks):
    """Weights and state, whole, after some steps, one of them cancelled and one after a reload from whole tensors."""
    dtype = torch.bfloat16 if config.kind == "adamw_bf16" else torch.float32
    weights, gradients = drawn(99, dtype), drawn(0, dtype)

    def parts(values, rank):
        return {name: part_of_rank(values[name], config.kind, one, rank) for name, one in TABLE.items()}

    def optimizer_of(rank):
        if ranks == 1:
            masters = whole_masters(weights, gradients)
        else:
            slopes = parts(gradients, rank)
            masters = {
                name: Master(part, lambda name=name: slopes[name].values) for name, part in parts(weights, rank).items()
            }
        return build_optimizer(masters, config, TABLE, implementation, seed=3)

    optimizers = [optimizer_of(rank) for rank in range(ranks)]
    for step in range(STEPS):
        for name, values in drawn(step, dtype).items():
            gradients[name].copy_(values if step != SKIPPED else torch.full_like(values, torch.nan))
        if step == RELOADED:
            saved = put_together([optimizer.state_tensors() for optimizer in optimizers])
            optimizers = [optimizer_of(rank) for rank in range(ranks)]
            for optimizer in optimizers:
                load_into(optimizer.state_tensors(), saved)
        for optimizer in optimizers:
            optimizer.set_learning_rate(0.02)
            optimizer.step(torch.tensor(0.5), torch.tensor(float(step == SKIPPED)))
    state = put_together([optimizer.state_tensors() for optimizer in optimizers])
    return {**{f"weight/{name}": value for name, value in weights.items()}, **state}


@pytest.mark.parametrize("name", CONFIGS)
def test_ranges_rows_and_owners_give_what_whole_parameters_give(name):
    config, implementation = CONFIGS[name]
    alone, cut = train_cut(config, implementation, 1), train_cut(config, implementation, RANKS)
    assert cut.keys() == alone.keys()
    for key, tensor in alone.items():
        if name in CLOSE:
            torch.testing.assert_close(cut[key], tensor, rtol=1e-6, atol=1e-6, msg=key)
        else:
            assert torch.equal(cut[key], tensor), key


def test_how_each_optimizer_lets_parameters_be_cut():
    matrix, table, norm = TABLE["q"], TABLE["table"], TABLE["norm"]
    for kind in ("adamw", "adamw_bf16"):
        assert {cut_of(kind, one) for one in (matrix, table, norm)} == {"values"}
    assert [cut_of("adamw_8bit", one) for one in (matrix, table, norm)] == ["rows", "rows", "values"]
    assert [cut_of("muon", one) for one in (matrix, table, norm)] == ["whole", "values", "values"]


def test_a_layout_that_cuts_rows_is_named():
    part = TensorPart.of_range(torch.zeros(7), (3, 4), 2, None)
    with pytest.raises(AssertionError, match=r"q: .* the layout cuts rows"):
        build_optimizer({"q": Master(part, lambda: None)}, OptimConfig("adamw_8bit"), {"q": logical("q", (3, 4))})


def test_owners_have_about_the_same_cost():
    assert balanced_owners([1, 5, 3, 3, 1, 1], 2) == [0, 0, 1, 1, 0, 1]
    assert balanced_owners([4, 4], 3) == [0, 1]
    one = orthogonalising_cost(logical("w", (6, 10)))
    assert orthogonalising_cost(logical("w", (10, 6))) == one
    assert orthogonalising_cost(logical("w", (12, 10), alternating=2)) == 2 * one
    assert orthogonalising_cost(logical("w", (3, 6, 10))) == 3 * one


def holders(step, spread):
    """Random values of every tensor that holds parameters."""
    generator = torch.Generator().manual_seed(step)
    shapes = {one.holder: (one.first_row + one.shape[0], *one.shape[1:]) for one in TABLE_AND_QKV.values()}
    return {name: spread(torch.randn(shape, generator=generator).double()) for name, shape in shapes.items()}


def train_spread(spread):
    """Weights and state after some steps, one of them cancelled, and how many values this process orthogonalised."""
    counted, orthogonalise = [], muon.orthogonalise
    weights, gradients = holders(99, spread), holders(0, spread)
    masters = {
        name: Master(part_of(weights[one.holder], one), lambda one=one: part_of(gradients[one.holder], one).values)
        for name, one in TABLE_AND_QKV.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "orthogonalise", lambda x, *how: counted.append(x.numel()) or orthogonalise(x, *how))
        optimizer = build_optimizer(masters, OptimConfig("muon"), TABLE_AND_QKV)
        for step in range(STEPS):
            gradients |= holders(step, spread)
            optimizer.set_learning_rate(0.02)
            optimizer.step(torch.tensor(0.5), torch.tensor(float(step == SKIPPED)))
    weights = {f"weight/{name}": master.part for name, master in masters.items()}
    return {**weights, **optimizer.state_tensors()}, sum(counted)


def be_a_rank():
    """In a process of a group that trains parameters of which each process has some rows."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (1, RANKS))  # as with parallel.replicate: the group is that of the second dimension
    parts, orthogonalised = train_spread(
        lambda tensor: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    )
    parts = {name: TensorPart(part.values.clone(), part.shape, part.box, part.start) for name, part in parts.items()}
    torch.save((parts, orthogonalised), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_three_processes_with_rows_of_every_matrix_agree_with_one_and_each_orthogonalises_its_own(warm, tmp_path):
    code = "from tests.train.optimizers import test_optimizers_cuts as here; here.be_a_rank()"
    outputs = [tmp_path / f"output-{rank}.txt" for rank in range(RANKS)]
    started = [Program(warm, code, [str(rank), str(tmp_path)], output) for rank, output in enumerate(outputs)]
    for rank in started:
        assert rank.wait() == 0, rank.text()
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    alone, orthogonalised = train_spread(lambda tensor: tensor)
    alone, spread = put_together([alone]), put_together([parts for parts, _ in found])
    assert spread.keys() == alone.keys()
    for key, tensor in alone.items():
        torch.testing.assert_close(spread[key], tensor, rtol=1e-9, atol=1e-9, msg=key)
    assert sum(count for _, count in found) == orthogonalised
    assert max(count for _, count in found) < orthogonalised
