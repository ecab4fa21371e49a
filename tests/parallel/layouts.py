"""One small training in float64 under every way of spreading it, in real processes that form one group for all cases.

`main` runs in each process; rank 0 writes what every case came to.
"""

import functools
import json
import resource
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.processes import Program, WarmProcess
from tests.simulated_rank import CollectiveBytes
from zero2all.common.errors import UsageError
from zero2all.config import RunConfig, config_from_values
from zero2all.config.training import OptimConfig
from zero2all.model.config import ModelConfig
from zero2all.model.init import generator_of
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch, rank_rows
from zero2all.parallel.check import check_spread
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.mesh import Mesh, make_mesh
from zero2all.parallel.parameter_table import draw, trained_table
from zero2all.parallel.world import World
from zero2all.train.build import empty_state, op_context
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.objective import Scored
from zero2all.train.state import DTYPES, TrainState
from zero2all.train.step_stats import StepResult
from zero2all.train.train_step import StepPlan, train_step

STEPS, SAMPLES, SEQ_LEN, MICRO, CHANNELS = 20, 8, 8, 2, 2
MODEL = ModelConfig(60, hidden_size=16, intermediate_size=24, layers=3, heads=4, kv_heads=2, max_seq_len=SEQ_LEN)
SEED = 3
OPTIMIZERS = {"adamw": OptimConfig(), "muon": OptimConfig("muon")}  # those that are exact in float64
MOE = {"experts": 12, "experts_per_token": 2, "expert_size": 8, "shared_experts": 1, "dense_layers": 1}
MOE["balance_rate"] = 0.01
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
GATHER = {"context_method": "gather"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {  # by the number of processes
    2: {
        "replicate": {},
        "ZeRO-1": {"zero": 1},
        "ZeRO-2": {"zero": 2},
        "ZeRO-3": {"zero": 3},
        "tensor": {"tensor": 2},
        "pipeline, gpipe": {"pipeline": 2, "schedule": "gpipe"},
        "pipeline, 1f1b": {"pipeline": 2},
        "pipeline, interleaved": {"pipeline": 2, **INTERLEAVED},
        "pipeline, zero bubble": {"pipeline": 2, "schedule": "zero_bubble"},
        "context, ulysses": {"context": 2},
        "context, gather": {"context": 2, **GATHER},
        "expert": {"expert": 2, "zero": 1},
    },
    4: {
        "hybrid ZeRO-1": {"zero": 1, "shard": 2},
        "hybrid ZeRO-2": {"zero": 2, "shard": 2},
        "hybrid ZeRO-3": {"zero": 3, "shard": 2},
        "tensor": {"tensor": 4, "copy_kv_heads": True},
        "pipeline, gpipe": {"pipeline": 4, "schedule": "gpipe"},
        "pipeline, 1f1b": {"pipeline": 4},
        "pipeline, zero bubble": {"pipeline": 4, "schedule": "zero_bubble"},
        "context, ulysses": {"context": 4},
        "context, gather": {"context": 4, **GATHER},
        "expert": {"expert": 4, "zero": 1},
        "shard x tensor, ZeRO-1": {"zero": 1, "tensor": 2},
        "shard x tensor, ZeRO-2": {"zero": 2, "tensor": 2},
        "shard x tensor, ZeRO-3": {"zero": 3, "tensor": 2},
        "tensor x pipeline": {"tensor": 2, "pipeline": 2},
        "shard x interleaved, ZeRO-1": {"zero": 1, "pipeline": 2, **INTERLEAVED},
        "shard x pipeline, ZeRO-3": {"zero": 3, "pipeline": 2},
        "shard x context, ZeRO-1": {"zero": 1, "context": 2, **GATHER},
        "shard x context, ZeRO-3": {"zero": 3, "context": 2},
        "tensor x context": {"tensor": 2, "context": 2},
        "shard x expert, ZeRO-1": {"zero": 1, "expert": 2},
        "hybrid x expert, ZeRO-1": {"zero": 1, "shard": 2, "expert": 2},
        "shard x expert, ZeRO-2": {"zero": 2, "expert": 2},
        "tensor x expert": {"zero": 1, "tensor": 2, "expert": 4},
        "context x expert": {"context": 2, "expert": 2},
        "pipeline x expert": {"zero": 1, "pipeline": 2, "expert": 2},
    },
    8: {
        "replicate x shard x tensor": {"zero": 1, "shard": 2, "tensor": 2},
        "ZeRO-1 x tensor x interleaved": {"zero": 1, "tensor": 2, "pipeline": 2, **INTERLEAVED},
        "pipeline x shard x context": {"zero": 1, "pipeline": 2, "context": 2},
        "pipeline x shard x tensor, ZeRO-1": {"zero": 1, "pipeline": 2, "tensor": 2},
        "pipeline x shard x tensor, ZeRO-3": {"zero": 3, "pipeline": 2, "tensor": 2},
        "pipeline x tensor x expert": {"zero": 1, "pipeline": 2, "tensor": 2, "expert": 4},
    },
    16: {
        "pipeline x shard x context x tensor": {"zero": 1, "pipeline": 2, "context": 2, "tensor": 2},
        "the same with experts": {"zero": 1, "pipeline": 2, "context": 2, "tensor": 2, "expert": 8},
    },
}
CODE = "from tests.parallel import layouts; layouts.main()"
OF_THE_RUN = ("recompute", "documents", "z_loss", "dtype", "lora")  # arguments of `run_config`


def run_config(
    optim: OptimConfig = OPTIMIZERS["adamw"],
    parallel: ParallelConfig | None = None,
    dtype: str = "float64",
    recompute: str = "none",
    documents: bool = False,
    z_loss: float = 0.0,
    lora: int | None = None,
    **model: Any,
) -> RunConfig:
    values = {
        "data": {"seq_len": SEQ_LEN, "document_mask": documents},
        "finetune": {"lora": {"rank": lora}},
        "model": {**MODEL.__dict__, "rope_scaling": {}, "moe": {}, **model},
        "train": {
            **{"name": "small", "seed": SEED, "tokens_per_step": SAMPLES * SEQ_LEN, "micro_batch_samples": MICRO},
            **{"precision": dtype, "recompute": recompute, "z_loss": z_loss},
        },
    }
    config = config_from_values(values, "of a test")
    return replace(config, optim=optim, parallel=parallel or ParallelConfig())


class Squares:
    """An objective: the mean over rows of the square of a row's summed log-probability."""

    metrics = ("rows", "squares")

    def weights(self, scored: Scored) -> tuple[torch.Tensor, torch.Tensor]:
        sums = scored.sum_parts((scored.nats * scored.counts).double().sum(dim=1))
        real = scored.sum_parts(scored.counts.double().sum(dim=1)) > 0
        numbers = torch.stack((real.double().sum(), sums.square().sum()))
        rows = scored.sum_rows(numbers[:1].clone())
        return 2 * sums[:, None] * scored.counts / rows, numbers


def make_state(world: World, config: RunConfig, seed: int = SEED) -> TrainState:
    """The state of a run before its first step, as `zero2all.train.build` builds it."""
    dtype = DTYPES[config.train.precision]
    state = empty_state(config, world, resolve(config.ops, op_context(config, "cpu", dtype)))
    state.micro_batch_samples = MICRO
    with state.model_tensors() as tensors, torch.no_grad():
        parts = {name.removeprefix("model/"): part for name, part in tensors.items()}
        draw(parts, state.model.config, seed)
        for one in trained_table(state.model.config, state.model.lora):
            if ".lora." in one.name and one.name in parts:  # B is not zero: A would learn nothing in the first step
                values = torch.randn(one.shape, generator=generator_of(seed, one.name), dtype=torch.float64) / 4
                part = parts[one.name]
                flat = values[part.box.slices].reshape(-1)[part.start : part.start + part.values.numel()]
                part.values.copy_(flat.view(part.values.shape))
    state.weights.publish_masters()
    return state


def batch_of(
    step: int, rank: int, ranks: int, vocabulary: int = 60, documents: bool = False, samples: int = SAMPLES
) -> Batch:
    """This rank's rows of the global batch of a step, padded with rows that weigh nothing. With `documents` each row
    has two, which end elsewhere in every row, and some tokens count half."""
    tokens = np.random.default_rng(step).integers(0, vocabulary, (samples, SEQ_LEN + 1))
    first, own, per_rank = rank_rows(samples, rank, ranks)
    rows = np.zeros((per_rank, SEQ_LEN + 1), dtype=np.int64)
    rows[:own] = tokens[first : first + own]
    weights = np.zeros((per_rank, SEQ_LEN), dtype=np.float32)
    weights[:own] = 1
    channels = np.zeros(per_rank, dtype=np.int64)
    ids = None
    if documents:
        borders = 1 + (first + np.arange(per_rank)[:, None] + step) % (SEQ_LEN - 1)
        ids = (np.arange(SEQ_LEN + 1) >= borders).astype(np.int32)
        weights[:, ::3] /= 2
    place = {"step_samples": samples, "samples": own, "first_row": first}
    return Batch(rows, channels, channels, 0, weights=weights, document_ids=ids, **place)


def whole_tensors(state: TrainState, world: World) -> dict[str, torch.Tensor]:
    """Weights and moments, put together on rank 0 from the parts of all ranks."""
    with state.tensors() as tensors:
        own = {}
        for name, part in tensors.items():
            boxes = [(at, box.clone().numpy()) for at, box in part.boxes()]
            own[name] = (part.shape, [(at, box.shape, box.dtype.str, box.tobytes().hex()) for at, box in boxes])
    found: dict[str, torch.Tensor] = {}
    for parts in world.gather(own):
        for name, (shape, boxes) in parts.items() if world.is_first else ():
            for at, cut, kind, values in boxes:
                box = torch.from_numpy(np.frombuffer(bytearray.fromhex(values), kind).reshape(cut))
                whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=box.dtype))
                whole[tuple(slice(o, o + n) for o, n in zip(at, box.shape, strict=True))] = box
    return found


def assert_same_course(found: dict[str, Any], alone: dict[str, Any]) -> None:
    """The losses and norms of every step, and all weights and moments after the last, to the last digits of float64."""
    figures = [torch.tensor(each["figures"], dtype=torch.float64) for each in (found, alone)]
    torch.testing.assert_close(*figures, rtol=1e-9, atol=0)
    assert found["tensors"].keys() == alone["tensors"].keys()
    for name, value in alone["tensors"].items():
        torch.testing.assert_close(found["tensors"][name], value, rtol=1e-9, atol=1e-9, msg=name)


def course(
    world: World,
    optimizer: str,
    tied: bool = False,
    steps: int = STEPS,
    model: dict[str, Any] | None = None,
    micro: int = MICRO,
    samples: int = SAMPLES,
    qk_norm: bool = False,
    with_tensors: bool = True,
    objective: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train: losses and gradient norms, the final tensors, bytes sent in the last step, bytes of states in a rank."""
    of_the_run = {name: options.pop(name) for name in OF_THE_RUN if name in options}
    spread = ParallelConfig(**{"bucket_mb": 0.002, **options})
    # Larger weights: with short steps in the direction of a head, a rounding would grow by 10^10 in 20 steps.
    normed = {"qk_norm": True, "init_qk_gain": 1.5, "init_std": None, "embedding_norm": True} if qk_norm else {}
    changed = {**of_the_run, "tied_embeddings": tied, **normed, **(model or {})}
    config = run_config(OPTIMIZERS[optimizer], spread, **changed)
    world = world_of(world, spread)
    state = make_state(world, config)
    state.micro_batch_samples = micro
    figures, loads, sent = [], [], CollectiveBytes()
    for step in range(steps):
        with sent if step == steps - 1 and world.size > 1 else nullcontext():  # it slows down every operation
            result = result_of(state, world, config, step, samples, Squares() if objective else None)
            figures.append((result.loss, result.grad_norm, *result.numbers))
            loads.append(None if result.expert_loads is None else result.expert_loads.tolist())
            if step >= steps - 2:  # so that the bytes of the last step are its own; the others overlap the next step
                state.weights.wait()
    own_bytes = sum(part.values.nbytes for name, part in state.optimizer_tensors().items() if part.shape)
    tensors = whole_tensors(state, world) if with_tensors else {}
    return {"figures": figures, "loads": loads, "sent": sent.bytes, "own_bytes": own_bytes, "tensors": tensors}


def pairs(
    world: World, folder: str, layouts: list[str], every: bool, model: dict[str, Any], optimizer: str
) -> dict[str, Any]:
    """Train and save under each layout; load under the next one, or under every other one. Which tensors differ from
    those that were saved, and how far the loss of the next step lies from the one that the saved run had."""
    known = LAYOUTS[2] | LAYOUTS[4]
    spreads = {name: ParallelConfig(**{"bucket_mb": 0.002, **known[name]}) for name in layouts}
    configs = {name: run_config(OPTIMIZERS[optimizer], spread, **model) for name, spread in spreads.items()}
    worlds = {name: world_of(world, config.parallel) for name, config in configs.items()}
    found: dict[str, Any] = {}
    for number, name in enumerate(layouts):
        one, run = worlds[name], Path(folder) / name.replace(" ", "-")
        state = make_state(one, configs[name])
        step_on(state, one, configs[name], 0)
        store = CheckpointStore(run, one.control)
        with state.tensors() as tensors:
            store.save(1, Snapshot(tensors, state.counters()), {}, wait=True).folder()
        saved, after = whole_tensors(state, one), step_on(state, one, configs[name], 1)
        for other in layouts if every else [layouts[(number + 1) % len(layouts)]]:
            resumed = make_state(worlds[other], configs[other], seed=99)
            checkpoint = store.at(1)
            with resumed.tensors() as tensors:
                checkpoint.load_into(tensors)
            resumed.resume_from(checkpoint.record)
            loaded = whole_tensors(resumed, worlds[other])
            differ = [name for name, value in saved.items() if not torch.equal(value, loaded[name])]
            loss = step_on(resumed, worlds[other], configs[other], 1)[0]
            found[f"{name} -> {other}"] = (differ, abs(loss - after[0]) / after[0])
        store.close()
    return found


def world_of(world: World, config: ParallelConfig) -> World:
    if world.size == 1:
        return world
    return World(world.rank, world.size, world.device, _mesh(config.sizes(world.size)), world.control)


@functools.cache
def _mesh(sizes: MeshSizes) -> Mesh:
    return make_mesh(sizes)


def outcome(world: World, values: dict[str, Any], processes: int) -> dict[str, Any]:
    """Why a random config was refused, or the losses and gradient norms of two steps."""
    try:
        config = config_from_values(values, "of a test")
        check_spread(config, processes)
    except UsageError as error:
        return {"refused": str(error)}
    return {"figures": figures_of(config, world)}


def figures_of(config: RunConfig, world: World) -> list[tuple[float, float]]:
    world = world_of(world, config.parallel)
    state = make_state(world, config)
    state.micro_batch_samples = int(config.train.micro_batch_samples)
    return [step_on(state, world, config, step) for step in range(2)]


def step_on(state: TrainState, world: World, config: RunConfig, step: int) -> tuple[float, float]:
    result = result_of(state, world, config, step)
    return result.loss, result.grad_norm


def result_of(
    state: TrainState, world: World, config: RunConfig, step: int, samples: int = SAMPLES, objective: Any = None
) -> StepResult:
    rows = world.mesh.batch
    batch = batch_of(step, rows.rank, rows.size, config.model.vocab_ids, config.data.document_mask, samples)
    return train_step(state, batch, CHANNELS, config, world, StepPlan(1e-2, objective=objective)).result()


def main() -> None:
    """RANK SIZE STORE OUT CASES (JSON: arguments of `course`, of `pairs` with a folder, or a random case, by name)."""
    rank, size, store, out, cases = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    torch.set_num_threads(1)
    # Every case makes groups, and DTensor keeps their names, so none is destroyed before the end.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    world = World(rank, size, control=dist.group.WORLD)
    found = {}
    for name, arguments in json.loads(cases).items():
        print(f"{name}: {arguments}", flush=True)  # the group may be broken by it
        kind = pairs if "folder" in arguments else outcome if "values" in arguments else course
        found[name] = kind(world, **arguments)
        found[name]["own_bytes_by_rank"] = world.gather(found[name].get("own_bytes"))
        if "sent" in found[name]:
            found[name]["sent_by_rank"] = world.gather(found[name]["sent"])
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def run(warm: WarmProcess, folder: Path, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    store, out = folder / "store", folder / "out.pt"
    words = [str(size), str(store), str(out), json.dumps(cases)]
    programs = [Program(warm, CODE, [str(rank), *words], folder / f"{rank}.txt") for rank in range(size)]
    codes = [program.wait() for program in programs]
    assert codes == [0] * size, "\n".join(program.text() for program in programs)
    return torch.load(out, weights_only=False)
