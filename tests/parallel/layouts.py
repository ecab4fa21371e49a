"""One small training in float64 under every way of spreading it, in real processes that form one group for all cases.

`main` runs in each process; rank 0 writes what every case came to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.processes import Program, WarmProcess
from zero2all.config.training import OptimConfig, TrainConfig
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch, rank_rows
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.data import shard_model
from zero2all.parallel.layout import draw
from zero2all.parallel.mesh import make_mesh
from zero2all.parallel.world import World
from zero2all.train.state import TrainState, new_state
from zero2all.train.step import StepPlan, train_step

STEPS, SAMPLES, SEQ_LEN, MICRO, CHANNELS = 20, 8, 8, 2, 2
MODEL = ModelConfig(
    vocab_size=60, hidden_size=16, intermediate_size=24, layers=3, heads=4, kv_heads=2, max_seq_len=SEQ_LEN
)
SEED = 3
OPTIMIZERS = {
    "adamw": OptimConfig(),
    "lion": OptimConfig("lion"),
    "sgd": OptimConfig("sgd"),
    "muon": OptimConfig("muon"),
    "adafactor": OptimConfig("adafactor", adafactor_beta1=0.5),
}
"""Those that are exact in float64."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"zero": 0},
    "ZeRO-1": {"zero": 1},
    "ZeRO-2": {"zero": 2},
    "ZeRO-3": {"zero": 3},
    "hybrid ZeRO-1": {"zero": 1, "shard": 2},
    "hybrid ZeRO-2": {"zero": 2, "shard": 2},
    "hybrid ZeRO-3": {"zero": 3, "shard": 2},
}
CODE = "from tests.parallel import layouts; layouts.main()"


class _Data:
    seq_len, document_mask = SEQ_LEN, False


class Settings:
    """The fields of a RunConfig that a step reads."""

    def __init__(self, optim: OptimConfig) -> None:
        self.optim, self.data, self.train, self.model = optim, _Data(), TrainConfig(seed=SEED), MODEL


def make_state(world: World, optim: OptimConfig, parallel: ParallelConfig, tied: bool = False) -> TrainState:
    """The state of a run before its first step, as `zero2all.train.setup` builds it."""
    config = ModelConfig(**{**MODEL.__dict__, "tied_embeddings": tied})
    with torch.device("meta"):
        model = Z2all(config, resolve(OpsConfig(), "cpu")).double().train()
    if parallel.zero == 3 and world.size > 1:
        shard_model(model, world, torch.float64)
    whole = Z2all(config, resolve(OpsConfig(), "cpu"))
    model.cos, model.sin = whole.cos.double(), whole.sin.double()
    state = new_state(model, optim, torch.float64, MICRO, SEED, device=world.device, mesh=world.mesh, parallel=parallel)
    with state.weights.masters_between_steps() as masters:
        draw(masters, config, SEED)
    state.weights.updated()
    return state


def batch_of(step: int, rank: int, ranks: int) -> Batch:
    """This rank's rows of the global batch of a step, padded with rows that weigh nothing."""
    tokens = np.random.default_rng(step).integers(0, 60, (SAMPLES, SEQ_LEN + 1))
    first, own, per_rank = rank_rows(SAMPLES, rank, ranks)
    rows = np.zeros((per_rank, SEQ_LEN + 1), dtype=np.int64)
    rows[:own] = tokens[first : first + own]
    weights = np.zeros((per_rank, SEQ_LEN), dtype=np.float32)
    weights[:own] = 1
    channels = np.zeros(per_rank, dtype=np.int64)
    return Batch(rows, channels, channels, 0, weights=weights, step_samples=SAMPLES, samples=own)


class SentBytes(TorchDispatchMode):
    """Counts the bytes that are handed to collectives, by their kind; FSDP's are seen too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, operation, _types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        if operation.namespace == "c10d":
            kind = operation._opname.strip("_").removesuffix("_base")
            output_first = kind in ("reduce_scatter", "allgather")
            given = arguments[1] if output_first else arguments[0]
            self.bytes[kind] = self.bytes.get(kind, 0) + sum(tensor.nbytes for tensor in _flat(given))
        return operation(*arguments, **(keywords or {}))


def _flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _flat(value)]


def whole_tensors(state: TrainState, world: World) -> dict[str, torch.Tensor]:
    """Weights and moments, put together from the parts of all ranks."""
    with state.tensors() as tensors:
        own = {name: (part.shape, [(at, box.clone()) for at, box in part.boxes()]) for name, part in tensors.items()}
    found: dict[str, torch.Tensor] = {}
    for parts in world.gather(own):
        for name, (shape, boxes) in parts.items():
            for at, box in boxes:
                whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=box.dtype))
                whole[tuple(slice(o, o + n) for o, n in zip(at, box.shape, strict=True))] = box
    return found


def course(world: World, optimizer: str, tied: bool = False, steps: int = STEPS, **parallel: Any) -> dict[str, Any]:
    """Train: losses and gradient norms, the final tensors, bytes sent in the last step, bytes of states in a rank."""
    optim = OPTIMIZERS[optimizer]
    config = ParallelConfig(**{"bucket_mb": 0.002, **parallel})
    if world.size > 1:
        sizes = config.sizes(world.size)
        world = World(world.rank, world.size, world.device, make_mesh(world.device, *sizes), world.control)
    state = make_state(world, optim, config, tied)
    figures, sent = [], SentBytes()
    for step in range(steps):
        batch = batch_of(step, world.mesh.batch.rank, world.mesh.batch.size)
        with sent:
            sent.bytes.clear()
            result = train_step(state, batch, CHANNELS, Settings(optim), world, StepPlan(1e-2)).result()
            state.weights.wait()
        figures.append((result.loss, result.grad_norm))
    own_bytes = sum(part.values.nbytes for name, part in state.optimizer_tensors().items() if part.shape)
    return {
        "figures": figures,
        "sent": dict(sent.bytes),
        "own_bytes": own_bytes,
        "tensors": whole_tensors(state, world),
    }


def main() -> None:
    """RANK SIZE STORE OUT CASES (JSON: name -> arguments of `course`)."""
    rank, size, store, out, cases = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    world = World(rank, size, control=dist.group.WORLD)
    found = {name: course(world, **arguments) for name, arguments in json.loads(cases).items()}
    gathered = world.gather({name: (each["own_bytes"], each["sent"]) for name, each in found.items()})
    if rank == 0:
        for name, each in found.items():
            each["by_rank"] = [one[name] for one in gathered]
        torch.save(found, out)
    dist.destroy_process_group()


def run(warm: WarmProcess, folder: Path, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`course` for every case in `size` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    store, out = folder / "store", folder / "out.pt"
    words = [str(size), str(store), str(out), json.dumps(cases)]
    programs = [Program(warm, CODE, [str(rank), *words], folder / f"{rank}.txt") for rank in range(size)]
    codes = [program.wait() for program in programs]
    assert codes == [0] * size, "\n".join(program.text() for program in programs)
    return torch.load(out, weights_only=False)
