"""Continuing a run: which checkpoint is its newest, whether the config and the data still fit it, and loading it."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from zero2all.common.errors import BadInputError, UsageError, for_all_ranks
from zero2all.common.progress import counted
from zero2all.config import RunConfig, config_values, with_new_names
from zero2all.config.training import AnnealConfig
from zero2all.packed.config import FREE_ON_RESUME
from zero2all.packed.mixture import TrainingData
from zero2all.parallel.world import World
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.load import Checkpoint, reading_record
from zero2all.train.checkpoints.manifest import NOT_GOOD
from zero2all.train.checkpoints.retention import note_proven
from zero2all.train.checkpoints.run_lock import behind
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.guards.ledger import LEDGER_FILE, DamagedLedgerError, SkipLedger, keep_damaged, rebuilt_ledger
from zero2all.train.guards.watch import INCIDENTS_FOLDER
from zero2all.train.saved_config import load_run_config
from zero2all.train.state import TrainState

SECTIONS_FREE_ON_RESUME = (
    "ops",
    "parallel",
    "diloco",
    "tokenizer",
    "checkpoint",
    "resilience",
    "track",
    "validation",
    "guards",
)
"""Changing these never changes which samples are seen or which learning rate is used."""
FIELDS_FREE_ON_RESUME = (
    *(f"data.{name}" for name in FREE_ON_RESUME),
    "train.micro_batch_samples",
    "train.recompute",
    "train.recompute_every",
    "train.cuda_graph",
)


def newest_on_this_branch(run: Path, store: CheckpointStore, world: World) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint, and notes if the record of skipped data had to be rebuilt. Checkpoints that a rollback
    abandoned are withdrawn first, because the run may have crashed in the rollback."""
    ledger, notes = _read_ledger(run, store, world)
    while True:
        checkpoint = store.newest(set_aside=True)
        if checkpoint is None or not checkpoint.step:
            return checkpoint, notes
        _check_record(checkpoint)
        with reading_record(checkpoint):
            then = SkipLedger.from_state(_recorded(checkpoint))
        if not ledger.abandons(checkpoint.step, then):
            note = functools.partial(note_proven, run, at_most=checkpoint.step)
            world.run_on_rank0(functools.partial(behind, store.fence, note))
            return checkpoint, notes
        back = min(entry.to_step for entry in ledger.entries if entry.to_step is not None and entry not in then.entries)
        steps = world.run_on_rank0(lambda: [step_of(folder) for folder in list_checkpoints(run)])
        target = next((step for step in steps if step <= back and store.opens(step)), None)
        if target is None:
            raise for_all_ranks(
                BadInputError(
                    f"{run.name} was going back to the checkpoint of step {back}, which is damaged or missing, and "
                    f"there is no older one. Nothing was changed. Restore that checkpoint, or start over with --fresh."
                )
            )
        store.go_back_to(target, "a rollback went back behind it")


def _recorded(checkpoint: Checkpoint | None) -> Sequence[Mapping[str, Any]]:
    """The skipped data, as recorded in a checkpoint."""
    guards = checkpoint.record.get("guards") if checkpoint is not None else None
    return list((guards or {}).get("ledger", ()))


def _read_ledger(run: Path, store: CheckpointStore, world: World) -> tuple[SkipLedger, list[str]]:
    """The record of skipped data; a damaged one is rebuilt, because without it the run would read that data."""
    folder = run / INCIDENTS_FOLDER

    def read() -> tuple[list[dict[str, Any]] | None, str]:
        try:
            return SkipLedger.load(folder).state(), ""
        except DamagedLedgerError as error:
            return None, str(error)

    def rebuild() -> list[dict[str, Any]]:
        ledger = rebuilt_ledger(folder, known)
        store.fence()
        keep_damaged(folder / LEDGER_FILE)
        ledger.save(folder)
        return ledger.state()

    state, problem = world.run_on_rank0(read)
    if state is not None:
        return SkipLedger.from_state(state), []
    newest = store.newest(set_aside=True)
    known = _recorded(newest)
    ledger = SkipLedger.from_state(world.run_on_rank0(rebuild))
    decisions, tokens = counted(len(ledger.entries), "decision"), counted(ledger.tokens(), "token")
    if newest is None:
        rebuilt = f"It was rebuilt from the incident pages: {decisions}, {tokens} skipped."
    else:
        rebuilt = f"It was rebuilt from {newest.name} and the incident pages: {decisions}, {tokens} skipped."
    return ledger, [f"{problem} {rebuilt} The damaged file is kept beside it."]


RECORDED: dict[str, tuple[type, ...]] = {
    "data": (str, NoneType),
    "environment": (dict,),
    "order": (dict, NoneType),
    "tokenizer": (str, NoneType),
    "ops": (dict, NoneType),
}
"""The fields of a checkpoint's manifest that a run needs, and their types."""


def _check_record(checkpoint: Checkpoint) -> None:
    with reading_record(checkpoint):
        wrong = [name for name in ("step", "tokens") if name not in checkpoint.record]
        wrong += [name for name, kinds in RECORDED.items() if not isinstance(checkpoint.manifest.get(name), kinds)]
        if wrong:
            raise ValueError(f"these fields are missing or wrong: {', '.join(wrong)}")


def resume(state: TrainState, checkpoint: Checkpoint, config: RunConfig, here: Mapping[str, Any]) -> list[str]:
    """Load `checkpoint` and say what differs from the attempt that saved it; `here`: the environment of this one."""
    load_checkpoint(state, checkpoint)
    notes = [f"resumed {config.train.name} at step {state.step} from {checkpoint.name}"]
    if NOT_GOOD in checkpoint.manifest:
        notes.append(f"{checkpoint.name} is not marked as good ({checkpoint.manifest[NOT_GOOD]})")
    if checkpoint.step:
        with reading_record(checkpoint):
            changed = changed_operators(checkpoint.manifest.get("ops") or {}, state.model.ops.taken)
            notes += _environment_notes(checkpoint.manifest["environment"], here, changed)
    return notes


def load_checkpoint(state: TrainState, checkpoint: Checkpoint) -> None:
    """Load `checkpoint` into the state. Imported weights have no moments: those of the state stay."""
    has_moments = any(name.startswith("optimizer/") for name in checkpoint.index)
    if state.outer is not None:
        state.outer.settle()  # its thread writes to the outer weights
    with state.tensors() if has_moments else state.model_tensors() as tensors:
        # The outer state may be new to the run, or have other parts than before.
        stored = {name: part for name, part in tensors.items() if name in checkpoint.index or name[:5] != "outer"}
        # The weights that a run begins with may be wider than its frozen ones.
        checkpoint.load_into(stored, any_dtype=not checkpoint.step and state.model.lora.rank is not None)
    state.resume_from(checkpoint.record)
    if state.outer is not None:
        record = checkpoint.record.get("outer")
        if record is None:
            state.outer.reset()
        else:
            state.outer.loaded(record)


def check_resume(
    config: RunConfig,
    run: Path,
    checkpoint: Checkpoint,
    data: TrainingData,
    accept_changes: bool,
    anneal: AnnealConfig | None,
) -> list[str]:
    """Refuse a config or data that would make the resumed run another run, unless `accept_changes`."""
    before, now = config_values(load_run_config(run)), config_values(config)
    changed = {name: f"{name}: {old!r} -> {new!r}" for name, old, new in _differences(before, now)}
    strict = [
        text
        for name, text in changed.items()
        if name.split(".")[0] not in SECTIONS_FREE_ON_RESUME and name not in FIELDS_FREE_ON_RESUME
    ]
    notes = [f"changed since the last attempt: {text}" for text in changed.values()]
    if checkpoint.step and "optim.kind" in changed:
        raise UsageError(
            f"The run {run.name} was started with another optimizer ({changed['optim.kind']}). Its checkpoints hold "
            f"the state of that optimizer, so the run cannot continue with the new one, even with --accept-changes. "
            f"Set optim.kind back, start over with --fresh, or start a new run with another --train.name."
        )
    if "model.qk_norm" in changed:
        raise UsageError(
            f"The weights of the run {run.name} were made with another setting ({changed['model.qk_norm']}). Norms of "
            f"queries and keys can be neither added to trained weights nor taken away. Set model.qk_norm back, start "
            f"over with --fresh, or start a new run with another --train.name."
        )
    trained_on = checkpoint.manifest["data"]  # None for imported weights
    theirs, ours = checkpoint.manifest.get("tokenizer"), data.splits[0].manifest["tokenizer"]
    if theirs not in (None, ours) and not accept_changes:
        raise BadInputError(
            f"{checkpoint.folder} was trained with the tokenizer {theirs[:8]}, but the packed data was made with the "
            f"tokenizer {ours[:8]} (`tokenizer` in {data.splits[0].folder / 'manifest.json'}), whose ids have other "
            f"meanings. Pack the data with the tokenizer of the run, or start over with --fresh."
        )
    if trained_on is not None and trained_on != data.fingerprint:
        if _reads_on(checkpoint.manifest.get("order"), data.record):
            if anneal is None or anneal.mixture is None:  # the mixture of an anneal was asked for
                strict.append("the mixture or the sequence length has changed")
            tokens = checkpoint.record["tokens"]
            notes.append(f"the mixture changes at token {tokens:,}; every source continues where it stopped")
        else:
            strict.append("the packed data, or the order in which it is read, has changed since this run was started")
            notes.append("the order of the data has changed: from here on samples may be repeated or left out")
    if strict and checkpoint.step and not accept_changes:
        lines = "\n".join(f"  - {text}" for text in strict)
        raise UsageError(
            f"The run {run.name} was started with other settings:\n{lines}\nUse --accept-changes to continue with the "
            f"new ones, --fresh to start over, or another --train.name to keep both."
        )
    return notes


def _reads_on(before: dict[str, Any] | None, now: dict[str, Any]) -> bool:
    """Whether the text that was read so far is the same, in the same order: only what comes next has changed."""
    if before is None or any(before[name] != now[name] for name in ("seed", "packing")):
        return False
    return all(now["sources"].get(name, files) == files for name, files in before["sources"].items())


def _differences(before: Any, now: Any, place: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        return [
            difference
            for name in names
            for difference in _differences(before.get(name), now.get(name), f"{place}.{name}" if place else name)
        ]
    return [] if before == now else [(place, before, now)]


def _environment_notes(before: Mapping[str, Any], now: Mapping[str, Any], operators: list[str]) -> list[str]:
    # Checkpoints keep the layout under a name from the time when processes only split the batch.
    words = {name: "layout" if name == "data_parallel" else name for name in now}
    changed = [f"{words[name]} {before.get(name)} -> {new}" for name, new in now.items() if before.get(name) != new]
    changed += operators
    if not changed:
        return []
    return [f"not bit-exact with the earlier attempt, because of: {', '.join(changed)}"]


def changed_operators(before: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Differences to the operators recorded in a checkpoint (`hooks.checkpointing`), as text."""
    known = with_new_names({operator: choice.get("got") for operator, choice in before.items()}, "ops")
    return [f"{name} {known[name]} -> {got}" for name, got in now.items() if known.get(name) not in (None, got)]
