"""From a config and a workspace to a run that is ready for its next step, with all checks before it."""

import functools
from dataclasses import asdict

from zero2all.common.errors import BadInputError
from zero2all.common.files import MANIFEST_NAME, read_json
from zero2all.common.progress import counted
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.config.schedule import steps_with_anneal
from zero2all.config.training import AnnealConfig
from zero2all.diloco.outer_optimizer import OuterOptimizer
from zero2all.packed.mixture import TrainingData
from zero2all.packed.remote import packed_root
from zero2all.parallel.check import check_spread, idle_settings
from zero2all.parallel.device import environment, set_cpu_threads
from zero2all.parallel.world import World
from zero2all.train.anneal import anneal_from, anneal_in_words, read_anneal
from zero2all.train.build import build_state, spread_name
from zero2all.train.checkpoints.load import Checkpoint
from zero2all.train.checkpoints.run_lock import behind
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.context import RunContext
from zero2all.train.resume import check_resume, newest_on_this_branch, resume
from zero2all.train.run_data import check_anneal, open_data
from zero2all.train.saved_config import CONFIG_FILE, with_vocabulary
from zero2all.train.state import TrainState
from zero2all.train.validate import open_valid_splits, valid_sources


def prepare(
    asked: RunConfig,
    workspace: Workspace,
    world: World,
    store: CheckpointStore,
    accept_changes: bool = False,
    fresh: bool = False,
) -> tuple[RunContext, TrainState]:
    """Open the data, build the model, and load the newest checkpoint if the run has one and is not `fresh`."""
    run, together = workspace.run(asked.train.name), world.run_together
    checkpoint, ledger_notes = (None, []) if fresh else newest_on_this_branch(run, store, world)
    anneal = None if fresh else _begun_anneal(asked, workspace, world, store, checkpoint)
    data, end = together(lambda: open_data(asked, workspace, checkpoint, anneal))
    together(lambda: _check_tokenizer(workspace, data))
    _check_same_data(world, data)
    config = together(lambda: with_vocabulary(asked, int(data.splits[0].manifest["vocab_size"])))
    together(lambda: check_spread(config, world.size))
    notes = [*world.notes, *ledger_notes, *idle_settings(config, world.size)]
    notes += [] if config.finetune.method == "grpo" else data.notes(end)  # it draws its rows itself
    if anneal is not None:
        notes.append(anneal_in_words(anneal))
    if checkpoint is not None:
        notes += together(lambda: check_resume(config, run, checkpoint, data, accept_changes, anneal))
    elif not fresh and (run / CONFIG_FILE).is_file():
        notes.append(f"{run.name} was started before, but has no checkpoint yet. It begins at step 0")
    if anneal is not None:
        notes.append(f"annealing over {counted(anneal.steps, 'step')}, from step {anneal.from_step:,}")
    recorded = checkpoint.manifest["environment"].get("cpu_threads") if checkpoint and checkpoint.step else None
    set_cpu_threads(config.parallel.cpu_threads, recorded)
    here = {**environment(world.device), "processes": world.size, "data_parallel": spread_name(config, world)}
    state, model_notes = build_state(config, run, world, checkpoint, store.fence)
    state.data, state.anneal = data, anneal
    state.last_step = steps_with_anneal(config.train.steps, anneal)
    notes += model_notes
    if config.diloco.groups:
        state.outer = OuterOptimizer(
            config.diloco, state.model_tensors, state.weights, config.model.layers, state.last_step
        )
        notes += state.outer.notes()
    if checkpoint is not None:
        notes += resume(state, checkpoint, config, here)
    packed = packed_root(workspace.packed, config.data)
    valid = open_valid_splits(packed, valid_sources(packed, config))
    too_short = [split.name for split in valid if split.samples(config.data.seq_len) == 0]
    if too_short:
        notes.append(f"held-out loss: not measured for channels with less than one sample: {', '.join(too_short)}")
    return RunContext(config, workspace, world, store, valid, here, checkpoint, notes), state


def _begun_anneal(
    config: RunConfig, workspace: Workspace, world: World, store: CheckpointStore, checkpoint: Checkpoint | None
) -> AnnealConfig | None:
    """The anneal of the run; one that was requested begins here."""
    step, run = checkpoint.step if checkpoint else 0, workspace.run(config.train.name)
    check = functools.partial(check_anneal, config, workspace, checkpoint)
    before = anneal_from(checkpoint.record.get("anneal")) if checkpoint else None
    read = functools.partial(behind, store.fence, lambda: read_anneal(run, step, check, before))
    said = world.run_on_rank0(lambda: None if (found := read()) is None else asdict(found))
    return anneal_from(said)


def _check_same_data(world: World, data: TrainingData) -> None:
    """Refuse processes that would read different data, such as old files on the disk of one machine."""
    first, *others = world.gather(data.fingerprint)
    differ = [f"rank {rank} has {theirs}" for rank, theirs in enumerate(others, 1) if theirs != first]
    if differ:
        raise BadInputError(
            f"The processes of this run read different data. Nothing was started. Rank 0 has the fingerprint {first}, "
            f"but {', '.join(differ)}. Copy the same packed data to every machine, or use a folder that all machines "
            f"share."
        )


def _check_tokenizer(workspace: Workspace, data: TrainingData) -> None:
    """Refuse data that was packed with another tokenizer than this workspace has. A workspace without one can train."""
    path = workspace.tokenizer / MANIFEST_NAME
    try:
        manifest = read_json(path)
    except FileNotFoundError:
        return
    if not isinstance(manifest, dict) or manifest.get("kind") != "tokenizer":
        return  # not one of ours
    here, theirs = str(manifest.get("fingerprint")), str(data.splits[0].manifest["tokenizer"])
    if here != theirs:
        raise BadInputError(
            f"The packed data was made with the tokenizer {theirs[:8]} (`tokenizer` in "
            f"{data.splits[0].folder / MANIFEST_NAME}), but {workspace.tokenizer} holds the tokenizer {here[:8]}, "
            f"whose ids have other meanings. Run `z2a pack` again, or restore the tokenizer that packed the data."
        )
