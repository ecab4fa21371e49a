"""`parallel.compress` in real processes: sums of known gradients, and a run that is stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.parallel import layouts
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.world import World
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.resume import load_checkpoint
from zero2all.train.state import TrainState

WIDE = {"hidden_size": 32, "intermediate_size": 48, "layers": 2}
"""A model with matrices that have factors of rank 2."""
RANK, ROUNDS = 2, 60


def compressed(world: World, kind: str, folder: str = "") -> dict[str, Any]:
    """One of the cases below."""
    return {"sums": sums, "errors": errors, "resume": resume}[kind](world, folder)


def make(world: World, **parallel: Any) -> tuple[World, Any, TrainState]:
    spread = ParallelConfig(bucket_mb=0.01, powersgd_rank=RANK, **parallel)
    config = layouts.run_config(parallel=spread, dtype="float32", **WIDE)
    here = layouts.world_of(world, spread)
    return here, config, layouts.make_state(here, config)


def gradients(state: TrainState, rank: int, low: bool) -> Tensor:
    """The gradients of a process, which every process can compute; with `low` its matrices are of rank 1."""
    weights, generator = state.weights, torch.Generator().manual_seed(rank)
    flat = torch.zeros(weights.plan.length)
    for one in weights.table:
        first = weights.plan.places[one.holder].start + one.start
        values = torch.randn(one.shape, generator=generator)
        if low and len(one.shape) == 2:
            values = torch.outer(values[:, 0], values[0])
        flat[first : first + one.numel] = values.view(-1)
    return flat


def summed(state: TrainState, own: Tensor) -> Tensor:
    """The sum over the processes, as the last pass of a step leaves it."""
    state.weights.zero_gradients()
    state.weights.begin_pass(True)
    state.weights.gradients.copy_(own)
    state.weights.end_pass()
    return state.weights.gradients.clone()


def sums(world: World, _folder: str) -> dict[str, Any]:
    """Differences between what arrives and the formula."""
    found = {}
    for name, zero in (("bf16", 0), ("bf16, ZeRO-1", 1)):
        here, _, state = make(world, compress="bf16", zero=zero)
        each = [gradients(state, rank, low=False) for rank in range(2)]
        arrived, cast = summed(state, each[here.rank]), (each[0].bfloat16() + each[1].bfloat16()).float()
        ranges = state.weights.own
        found[name] = max(float((arrived[own] - cast[own]).abs().max()) for own in ranges)
    for name, more in (("rank 2 of 2", {}), ("ZeRO-1", {"zero": 1}), ("offload", {"offload": "optimizer"})):
        here, _, state = make(world, compress="powersgd", **more)
        assert state.weights.powersgd is not None
        low = [part for part in state.weights.powersgd.tensors() if "/error/" in part]
        assert 0 < len(low) < len(state.weights.table), "some tensors are compressed, some are not"
        each = [gradients(state, rank, low=True) for rank in range(2)]
        arrived, plain = summed(state, each[here.rank]), each[0] + each[1]
        found[name] = float((arrived - plain).abs().max() / plain.abs().max())
    return found


def errors(world: World, _folder: str) -> dict[str, Any]:
    """The same gradients of full rank again and again; then one that is not finite."""
    here, _, state = make(world, compress="powersgd")
    powersgd = state.weights.powersgd
    assert powersgd is not None
    each = [gradients(state, rank, low=False) for rank in range(2)]
    plain, total, distances = each[0] + each[1], torch.zeros_like(each[0]), []
    for count in range(1, ROUNDS + 1):
        total += summed(state, each[here.rank])
        distances.append(float((total / count - plain).norm() / plain.norm()))
    kept = {name: part.values.clone() for name, part in powersgd.tensors().items()}
    powersgd.is_rerun = True
    rehearsed = summed(state, each[here.rank])
    unchanged = all(torch.equal(kept[name], part.values) for name, part in powersgd.tensors().items())
    powersgd.is_rerun = False
    same = torch.equal(rehearsed, summed(state, each[here.rank]))
    bad = each[here.rank].clone()
    if here.rank == 1:
        bad[state.weights.plan.places["embedding.weight"].start + 5] = torch.nan
    broken = summed(state, bad)
    powersgd.forget_errors(torch.tensor(True))
    after = summed(state, each[here.rank])
    return {
        "distances": distances,
        "rehearsal": unchanged and same,
        "seen": not bool(torch.isfinite(broken).all()),
        "healed": bool(torch.isfinite(after).all()),
    }


def resume(world: World, folder: str) -> dict[str, Any]:
    """Four steps at once, and with a stop after two: which tensors differ, and the bytes of a step."""
    here, config, state = make(world, compress="powersgd")
    store = CheckpointStore(Path(folder) / "run", here.control)
    for step in range(2):
        layouts.step_on(state, here, config, step)
    with state.tensors() as tensors:
        store.save(2, Snapshot(tensors, state.counters()), {}, wait=True).folder()
    _, _, other = make(world, compress="powersgd")
    notes, sent = load_checkpoint(other, store.at(2)), layouts.SentBytes()
    for step in (2, 3):
        layouts.step_on(state, here, config, step)
        with sent:
            layouts.step_on(other, here, config, step)
    whole, resumed = layouts.whole_tensors(state, here), layouts.whole_tensors(other, here)
    store.close()
    return {
        "notes": notes,
        "names": sorted(whole),
        "differ": [name for name, value in whole.items() if not torch.equal(value, resumed[name])],
        "sent": {kind: count // 2 for kind, count in sent.bytes.items()},
    }
