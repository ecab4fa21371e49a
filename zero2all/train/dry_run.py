"""`z2a train --dry-run`: everything a run does before its first step, then overfitting one batch.

A model that cannot learn one batch learns nothing: the rate is wrong, the targets are masked, or there is a bug. The
run itself is left alone: no checkpoint is read, and nothing is written to its folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from zero2all.common.errors import AnomalyError, DiskError
from zero2all.common.language import translate as t
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.config.schedule import learning_rate
from zero2all.ops.registry import Ops, resolve
from zero2all.packed.loader import LoaderOptions, read_batch
from zero2all.packed.mixture import TrainingData
from zero2all.parallel.check import check_spread
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.device import pick_device, set_memory_settings
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.world import World
from zero2all.train.build import op_context
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.guards.documents import Decode
from zero2all.train.micro_batch import least_samples, memory_settings
from zero2all.train.plan import make_plan, plan_notes, processes_of
from zero2all.train.run_data import open_run_data
from zero2all.train.sanity import (
    Overfit,
    check_first_loss,
    communication_notes,
    dry_run_config,
    memory_notes,
    overfit_one_batch,
    preview,
)
from zero2all.train.saved_config import with_vocabulary
from zero2all.train.setup import prepare
from zero2all.train.state import DTYPES
from zero2all.train.train_step import StepPlan, train_step


def dry_run(
    config: RunConfig,
    workspace: Workspace,
    make_decode: Callable[[], Decode] | None = None,
    say: Callable[[str], None] = print,
) -> Overfit:
    """Print what a run of `config` would start with; AnomalyError if it cannot overfit one batch. One process."""

    def speak(line: str) -> None:
        say(t(line))

    set_memory_settings(config.parallel.expandable_segments)
    sizes = check_spread(config, processes_of(config.parallel))
    world = World(device=pick_device(config.parallel.device))
    data, end = open_run_data(config, workspace, resumed=False)  # of the whole run, with its limits
    short = dry_run_config(config)
    store = CheckpointStore(workspace.run(config.train.name))
    try:
        context, state = prepare(short, workspace, world, store, fresh=True)
    except DiskError as error:
        notes = _notes_without_a_model(config, data, sizes, world)
        if not notes:
            raise
        for line in notes:
            speak(line)
        raise DiskError(
            f"{error}\nThis is what the dry run needs, which has one process. The table above shows what each process "
            f"of the run needs."
        ) from error
    finally:
        store.close()
    of_short_run = state.data.notes(short.train.steps * short.train.tokens_per_step)
    for note in [*data.notes(end), *(note for note in context.notes if note not in of_short_run)]:
        speak(note)
    short = context.config
    options = LoaderOptions(documents=short.data.document_mask)
    batch = read_batch(state.data, 0, short.samples_per_step, options)
    decode = make_decode() if make_decode is not None and workspace.tokenizer.is_dir() else None
    for line in preview(batch, state.data.channels, decode):
        say(line)  # text of the corpus is not translated

    def update() -> float:
        lr = learning_rate(state.step, short.train.steps, short.optim.lr_max, short.schedule)
        pending = train_step(state, batch, len(state.data.channels), short, world, StepPlan(lr))
        return pending.result().loss

    result = overfit_one_batch(update)
    settings = memory_settings(short, state.model.ops, world.mesh, state.micro_batch_samples)
    total = torch.cuda.mem_get_info(world.device)[1] if world.device.type == "cuda" else None
    notes = [*check_first_loss(result.losses[0], short.model), *memory_notes(short.model, settings, total)]
    model = dataclasses.replace(config.model, vocab_size=short.model.vocab_size)
    of_run = dataclasses.replace(config, model=model)
    notes += parallel_notes(of_run, sizes, state.model.ops, state.micro_batch_samples, total)
    for line in [*notes, *result.lines()]:
        speak(line)
    if not result.learns:
        raise AnomalyError("The dry run could not overfit one batch: see the warning above. Nothing was started.")
    return result


def _notes_without_a_model(config: RunConfig, data: TrainingData, sizes: MeshSizes, world: World) -> list[str]:
    """`parallel_notes` where no model could be built."""
    config = with_vocabulary(config, int(data.splits[0].manifest["vocab_size"]))
    sharded = config.parallel.zero == 3 and sizes.shard > 1
    ops = resolve(config.ops, op_context(config, world.device.type, DTYPES[config.train.precision], sharded))
    samples = least_samples(config, World(device=world.device, mesh=Mesh(sizes)))
    total = torch.cuda.mem_get_info(world.device)[1] if world.device.type == "cuda" else None
    return parallel_notes(config, sizes, ops, samples, total)


def parallel_notes(config: RunConfig, sizes: MeshSizes, ops: Ops, samples: int, device_bytes: int | None) -> list[str]:
    """Memory and communication of one process of the run itself, where it will have several."""
    if sizes.processes == 1:
        return []
    plan = make_plan(config, sizes.processes, ops, samples)
    settings = memory_settings(config, ops, Mesh(sizes), samples)
    named = ", ".join(f"{name} {size}" for name, size in dataclasses.asdict(sizes).items() if size > 1)
    return [
        f"the run has {sizes.processes} processes ({named}, zero {settings.zero}). Each of them:",
        *memory_notes(config.model, settings, device_bytes),
        *communication_notes(config.model, settings),
        *plan_notes(plan),
    ]
