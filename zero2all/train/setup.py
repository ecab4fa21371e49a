"""From a config and a workspace to everything a run needs, with all checks before the first step."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from zero2all.common.errors import BadInputError, UsageError, for_all_ranks
from zero2all.common.files import MANIFEST_NAME, read_json
from zero2all.common.manifest import fingerprint
from zero2all.common.memory import available_memory
from zero2all.common.progress import counted
from zero2all.common.workspace import Workspace
from zero2all.config import (
    RunConfig,
    config_values,
)
from zero2all.config.schedule import steps_with_anneal
from zero2all.config.training import AnnealConfig, model_at
from zero2all.model.config import parameter_counts
from zero2all.model.empty import without_weights
from zero2all.model.recompute import apply_recompute
from zero2all.model.rope import rope_tables
from zero2all.model.z2all import Z2all, compile_model
from zero2all.ops.implementation import OpContext, compile_problem
from zero2all.ops.registry import Ops, with_deferrable_products
from zero2all.packed.config import FREE_ON_RESUME
from zero2all.packed.loader import rank_rows
from zero2all.packed.mixture import Progress, TrainingData, open_training_data
from zero2all.packed.remote import packed_root
from zero2all.packed.shard_format import PackedSplit
from zero2all.packed.stages import Stage, stages_from_records
from zero2all.parallel.check import check_spread, idle_settings
from zero2all.parallel.context import spread_attention
from zero2all.parallel.device import environment, local_processes, set_cpu_threads
from zero2all.parallel.expert import spread_experts
from zero2all.parallel.layout import draw
from zero2all.parallel.pipeline import Pipeline, keep_stages, make_stages, model_costs
from zero2all.parallel.shards import shard_model
from zero2all.parallel.tensor import cut_model, local_config
from zero2all.parallel.world import World
from zero2all.train.anneal import ANNEAL_STAGE, anneal_in_words, begun_anneal, read_anneal
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.load import Checkpoint, reading_record
from zero2all.train.checkpoints.manifest import NOT_GOOD
from zero2all.train.checkpoints.retention import note_proven
from zero2all.train.checkpoints.run_lock import Fence, behind
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.cuda_graph import check_cuda_graph, choose_cuda_graph
from zero2all.train.guards.ledger import LEDGER_FILE, DamagedLedgerError, SkipLedger, keep_damaged, rebuilt_ledger
from zero2all.train.guards.watch import INCIDENTS_FOLDER
from zero2all.train.micro_batch import choose_micro_batch, least_samples, memory_settings
from zero2all.train.operators import changed_operators, resolve_together
from zero2all.train.outer.optimizer import OuterOptimizer
from zero2all.train.sanity import nearest_folder, require_memory
from zero2all.train.saved_config import CONFIG_FILE, load_run_config, with_vocabulary
from zero2all.train.state import DTYPES, TrainState, new_state
from zero2all.train.validate import open_valid_splits, valid_sources

SECTIONS_FREE_ON_RESUME = ("ops", "parallel", "tokenizer", "checkpoint", "resilience", "track", "eval", "guards")
"""Changing these never changes which samples are seen or which learning rate is used."""
FIELDS_FREE_ON_RESUME = (
    *(f"data.{name}" for name in FREE_ON_RESUME),
    "train.micro_batch_samples",
    "train.recompute",
    "train.recompute_every",
    "train.cuda_graph",
)


@dataclass
class Prepared:
    """A run ready for its next step."""

    config: RunConfig
    workspace: Workspace
    run: Path
    world: World
    data: TrainingData
    valid: list[PackedSplit]
    state: TrainState
    environment: dict[str, Any]
    checkpoint: Checkpoint | None
    anneal: AnnealConfig | None
    notes: list[str]
    """What the user should know before the run starts: choices, fallbacks, differences to an earlier attempt."""

    @property
    def on_cpu(self) -> bool:
        """Whether a step is finished when `train_step` returns."""
        return self.world.device.type == "cpu"

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        return steps_with_anneal(self.config.train.steps, self.anneal)

    @property
    def details(self) -> dict[str, Any]:
        """What the manifest of a checkpoint holds in addition to the state."""
        choices = {choice.operator: dataclasses.asdict(choice) for choice in self.state.model.ops.choices}
        tokenizer = self.data.splits[0].manifest["tokenizer"]
        return {
            "inputs": fingerprint(config_values(self.config)),
            "data": self.data.fingerprint,
            "order": self.data.record,
            "tokenizer": tokenizer,
            "environment": self.environment,
            "ops": choices,
        }

    def reopen_data(self, checkpoint: Checkpoint | None) -> None:
        """Continue reading from `checkpoint`, after a rollback to it."""
        self.data, _ = _open_data(self.config, self.workspace, checkpoint, self.last_step, self.anneal)

    def data_with(self, anneal: AnnealConfig) -> TrainingData:
        """The data from here to the end of `anneal`; UsageError when data.max_epochs does not allow that much."""
        if not self.config.data.max_epochs and anneal.mixture is None:
            return self.data  # only limits depend on the end of the run
        place = (self.state.step, self.state.tokens, self.data.record["stages"])
        with _explained(anneal, self.config):
            return _plan_data(self.config, self.workspace, *place, anneal.from_step + anneal.steps, anneal)[0]


def prepare(
    asked: RunConfig,
    workspace: Workspace,
    world: World,
    store: CheckpointStore,
    accept_changes: bool = False,
    fresh: bool = False,
) -> Prepared:
    """Open the data, build the model, and load the newest checkpoint if the run has one and is not `fresh`."""
    run = workspace.run(asked.train.name)
    checkpoint, ledger_notes = (None, []) if fresh else _newest_on_this_branch(run, store, world)
    anneal = None
    if not fresh:
        step = checkpoint.step if checkpoint else 0
        check = functools.partial(check_anneal, asked, workspace, checkpoint)
        read = functools.partial(behind, store.fence, lambda: read_anneal(run, step, check))
        said = world.run_on_rank0(lambda: None if (found := read()) is None else dataclasses.asdict(found))
        anneal = None if said is None else AnnealConfig(**said)
    last_step = steps_with_anneal(asked.train.steps, anneal)
    together = world.run_together
    data, end = together(lambda: _open_data(asked, workspace, checkpoint, last_step, anneal))
    together(lambda: _check_tokenizer(workspace, data))
    _check_same_data(world, data)
    config = together(lambda: with_vocabulary(asked, int(data.splits[0].manifest["vocab_size"])))
    together(lambda: check_spread(config, world.size))
    notes = [*world.notes, *ledger_notes, *idle_settings(config, world.size), *data.notes(end)]
    if anneal is not None:
        notes.append(anneal_in_words(anneal))
    if checkpoint is not None:
        notes += together(lambda: _check_resume(config, run, checkpoint, data, accept_changes, anneal))
    elif not fresh and (run / CONFIG_FILE).is_file():
        notes.append(f"{run.name} was started before, but has no checkpoint yet. It begins at step 0")
    if anneal is not None:
        notes.append(f"annealing over {counted(anneal.steps, 'step')}, from step {anneal.from_step:,}")
    recorded = checkpoint.manifest["environment"].get("cpu_threads") if checkpoint and checkpoint.step else None
    set_cpu_threads(config.parallel.cpu_threads, recorded)
    here = {
        **environment(world.device),
        "processes": world.size,
        "data_parallel": spread_name(config, world),
    }
    state, model_notes = _build_state(config, run, world, checkpoint, store.fence)
    notes += model_notes
    if config.parallel.slow_link.groups:
        state.outer = OuterOptimizer(
            config.parallel.slow_link, state.model_tensors, state.weights, config.model.layers, last_step
        )
        notes += state.outer.notes()
    if checkpoint is not None:
        notes += load_checkpoint(state, checkpoint)
        notes.append(f"resumed {run.name} at step {state.step} from {checkpoint.name}")
        if NOT_GOOD in checkpoint.manifest:
            notes.append(f"{checkpoint.name} is not marked as good ({checkpoint.manifest[NOT_GOOD]})")
        if checkpoint.step:
            notes += _late_notes(config, checkpoint.step)
            with reading_record(checkpoint):
                changed = changed_operators(checkpoint.manifest.get("ops") or {}, state.model.ops.taken)
                notes += _environment_notes(checkpoint.manifest["environment"], here, changed)
    packed = packed_root(workspace.packed, config.data)
    valid = open_valid_splits(packed, valid_sources(packed, config))
    too_short = [split.name for split in valid if split.samples(config.data.seq_len) == 0]
    if too_short:
        notes.append(f"held-out loss: not measured for channels with less than one sample: {', '.join(too_short)}")
    return Prepared(config, workspace, run, world, data, valid, state, here, checkpoint, anneal, notes)


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


def _newest_on_this_branch(run: Path, store: CheckpointStore, world: World) -> tuple[Checkpoint | None, list[str]]:
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


def _build_state(
    config: RunConfig, run: Path, world: World, checkpoint: Checkpoint | None, fence: Fence
) -> tuple[TrainState, list[str]]:
    """The model on its device, sharded where the config says so, with its optimizer; and notes for the user."""
    dtype = DTYPES[config.train.precision]
    sharded = config.parallel.zero == 3 and world.mesh.shard.size > 1
    ops = resolve_together(config.ops, op_context(config, world.device.type, dtype, sharded), world)
    check_cuda_graph(config, world.device, world.size, ops)
    world.run_together(lambda: _check_compile(config.ops.compile, world.device.type))
    _require_memory(config, ops, world)
    if config.parallel.offload == "optimizer_disk" and config.parallel.offload_folder is None:
        folder = str(nearest_folder(run))  # a dry run has no folder of its own
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, offload_folder=folder))
    state = empty_state(config, world, ops, checkpoint.step if checkpoint else 0)
    model = state.model
    if checkpoint is None:
        with state.weights.masters_between_steps() as masters:
            draw(masters, model.config, config.train.seed)
        state.weights.updated()
    compile_model(model)
    state.micro_batch_samples, micro_notes = choose_micro_batch(
        config, model, world, run, state.weights.zero_gradients, fence
    )
    rows = rank_rows(config.samples_per_step, *config.parallel.batch_place(0, world.mesh.batch.size))[2]
    samples, left = state.micro_batch_samples, rows % state.micro_batch_samples
    if left and rows > samples:
        micro_notes.append(
            f"micro-batch: {samples} does not divide {rows} samples, so the last pass of a step has {left}"
        )
    state.cuda_graph = choose_cuda_graph(config, model, world.device, world.size, state.micro_batch_samples, rows)
    counts = parameter_counts(config.model)
    where = (
        f"{world.size} x {environment(world.device)['device']}"
        if world.size > 1
        else environment(world.device)["device"]
    )
    size = f"{counts['total'] / 1e6:.2f} M parameters"
    if config.model.moe.experts:
        size = f"{counts['total'] / 1e6:.2f} M parameters ({counts['active'] / 1e6:.2f} M active)"
    how = [spread_name(config, world)] if world.size > 1 else []
    how += [f"offload {config.parallel.offload}"] if config.parallel.offload != "none" else []
    notes = [
        f"model: {size} on {where}, {', '.join([*how, config.train.precision])}",
        *_unused_notes(config, world),
        *_half_precision_notes(world.device, dtype),
        *ops.notes(),
        *micro_notes,
    ]
    if state.cuda_graph is not None:
        if config.train.cuda_graph == "on":
            notes.append("CUDA graph: passes will be captured (train.cuda_graph is on)")
        else:
            notes.append("CUDA graph: passes will be captured, because the GPU would be faster than the host")
    return state, notes


def empty_state(
    config: RunConfig,
    world: World,
    ops: Ops,
    step: int = 0,
    before_allocating: Callable[[], object] = lambda: None,
) -> TrainState:
    """The model as it is at `step`, on its device and spread over the processes, and its optimizer; its weights are yet
    to be drawn or loaded."""
    dtype = DTYPES[config.train.precision]
    wide = torch.promote_types(dtype, torch.float32)
    ops = spread_attention(ops, config.model, config.parallel, world.mesh)
    if world.mesh.pipeline.size > 1 and config.parallel.schedule == "zero_bubble":
        ops = with_deferrable_products(ops)
    with without_weights():  # memory is allocated once it is known who holds what
        model = Z2all(model_at(step, config.model, config.stages), ops).to(wide).train()
    spread_experts(model, world.mesh)
    if world.mesh.tensor.size > 1:
        cut_model(model, world.mesh.tensor)
    apply_recompute(model, config.train.recompute, config.train.recompute_every)
    pipeline = _cut_into_stages(model, config, world) if world.mesh.pipeline.size > 1 else None
    before_allocating()
    if config.parallel.zero == 3 and world.mesh.shard.size > 1:
        shard_model(model, world, dtype, with_masters=config.optim.kind != "adamw_bf16")
    cos, sin = rope_tables(model.config, model.config.max_seq_len, world.device)
    model.cos, model.sin = cos.to(wide), sin.to(wide)
    build = functools.partial(new_state, model, config.optim, dtype, 1, config.train.seed)
    state = world.run_together(lambda: build(device=world.device, mesh=world.mesh, parallel=config.parallel))
    state.pipeline = pipeline
    return state


def _cut_into_stages(model: Z2all, config: RunConfig, world: World) -> Pipeline:
    """Leave in `model` what this process of a pipeline has."""
    mesh, dtype = world.mesh, DTYPES[config.train.precision]
    costs = model_costs(config.model, config.data.seq_len)
    stages = make_stages(costs, mesh.pipeline.size * config.parallel.chunks)
    pipeline = Pipeline(config.parallel, config.model, stages, mesh, dtype, world.device)
    keep_stages(model, list(pipeline.own.values()))
    return pipeline


def spread_name(config: RunConfig, world: World) -> str:
    """How a model is spread, in words."""
    if world.size == 1:
        return "none"
    sizes = world.mesh.sizes
    model = [f"{axis} {getattr(sizes, axis)}" for axis in ("pipeline", "context", "tensor", "expert")]
    found = [text for text in model if not text.endswith(" 1")]
    if config.parallel.zero and sizes.shard > 1:
        found.append(f"ZeRO-{config.parallel.zero} over {sizes.shard}")
        found += [f"{sizes.replicate} replicas"] if sizes.replicate > 1 else []
    elif sizes.replicate > 1:
        found.append("replicate")
    return " x ".join(found)


def _check_compile(asked: str, device: str) -> None:
    problem = None if asked == "none" else compile_problem(device)
    if problem is not None:
        raise UsageError(f"ops.compile {asked} cannot run on this machine: {problem}. Or set ops.compile to none.")


def _require_memory(config: RunConfig, ops: Ops, world: World) -> None:
    """Refuse a run if a process has too little memory; all processes then end with the same error."""
    settings = memory_settings(config, ops, world.mesh, least_samples(config, world))
    kind = world.device.type
    on_device = torch.cuda.mem_get_info(world.device)[0] if kind == "cuda" else 0
    check = functools.partial(require_memory, config.model, settings, kind, on_device)
    compiled = config.ops.compile != "none"
    world.run_together(lambda: check(available_memory(), local_processes(), compiled))


def _unused_notes(config: RunConfig, world: World) -> list[str]:
    """Settings of `parallel` that have no effect in a run of several processes."""
    asked, notes = config.parallel, []
    if asked.processes not in ("auto", local_processes()) and world.size > 1:
        notes.append(
            f"parallel.processes {asked.processes} has no effect: torchrun has started {local_processes()} on this "
            f"machine"
        )
    if asked.zero and world.mesh.shard.size == 1 and world.mesh.replicate.size > 1:
        notes.append(
            f"parallel.zero {asked.zero} has no effect: with parallel.replicate {asked.replicate} each process has a "
            f"whole copy. Set parallel.replicate to auto to share one copy among all processes"
        )
    return notes


def _half_precision_notes(device: torch.device, dtype: torch.dtype) -> list[str]:
    """16-bit numbers work on a CPU, but rarely fast. A line instead of torch's warning, a page of stack frames."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return []
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    name = str(dtype).removeprefix("torch.")
    return [
        f"train.precision {name} on a CPU can be a hundred times slower than float32, if the CPU has no instructions "
        f"for it. Use --train.precision float32 on CPUs"
    ]


def load_checkpoint(state: TrainState, checkpoint: Checkpoint) -> list[str]:
    """Load `checkpoint` into the state; notes for the user. Imported weights have no moments: those of the state
    stay."""
    has_moments = any(name.startswith("optimizer/") for name in checkpoint.index)
    powersgd, notes = state.weights.powersgd, []
    errors = {} if powersgd is None else powersgd.tensors()
    shapes = {name: checkpoint.index[name].shape for name in errors if name in checkpoint.index}
    has_errors = shapes == {name: part.shape for name, part in errors.items()}
    if powersgd is not None and not has_errors:
        powersgd.reset()
        notes.append("PowerSGD begins without errors: the checkpoint has none for these ranks and this rank of factors")
    if state.outer is not None:
        state.outer.settle()  # its thread writes to the outer weights
    with state.tensors() if has_moments else state.model_tensors() as tensors:
        # The outer state may be new to the run, or have other parts than before.
        stored = {name: part for name, part in tensors.items() if name in checkpoint.index or name[:5] != "outer"}
        for name in () if has_errors else errors:
            stored.pop(name, None)
        checkpoint.load_into(stored)
    state.loaded(checkpoint.record)
    if state.outer is not None:
        record = checkpoint.record.get("outer")
        if record is None:
            state.outer.reset()
        else:
            state.outer.loaded(record)
    return notes


def op_context(config: RunConfig, device: str, dtype: torch.dtype, sharded: bool = False) -> OpContext:
    """The context in which the operators of this config are chosen."""
    tensor_ranks = config.parallel.tensor
    model = local_config(config.model, tensor_ranks)
    return OpContext(
        device=device,
        dtype=dtype,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        head_size=model.head_size,
        heads=model.heads,
        kv_heads=model.kv_heads,
        vocab_size=model.vocab_rows // tensor_ranks,
        seq_len=config.data.seq_len,
        documents=config.data.document_mask,
        z_loss=config.train.z_loss > 0,
        dropout=model.attention_dropout > 0,
        compiled=config.ops.compile != "none",
        keeps_results=config.train.recompute == "selective",
        sharded=sharded,
        vocabulary_cut=tensor_ranks > 1,
    )


def _open_data(
    config: RunConfig,
    workspace: Workspace,
    checkpoint: Checkpoint | None,
    last_step: int,
    anneal: AnnealConfig | None = None,
) -> tuple[TrainingData, int]:
    """The data of the run, as recorded up to `checkpoint` and configured from there on, and the token where it ends."""
    if checkpoint is None:
        return _plan_data(config, workspace, 0, 0, (), last_step, anneal)
    counters, recorded = checkpoint.record, checkpoint.manifest.get("order")
    with reading_record(checkpoint):
        step, tokens = int(counters["step"]), int(counters["tokens"])
        stages = recorded["stages"] if recorded else ()
        stages_from_records(stages)
    return _plan_data(config, workspace, step, tokens, stages, last_step, anneal)


def _plan_data(
    config: RunConfig,
    workspace: Workspace,
    step: int,
    token: int,
    recorded: Sequence[Mapping[str, Any]],
    last_step: int,
    anneal: AnnealConfig | None = None,
) -> tuple[TrainingData, int]:
    """The same for a run at `step` and `token`, whose stages so far are `recorded`."""

    def token_of(a_step: int) -> int:
        return max(0, token + (a_step - step) * config.train.tokens_per_step)

    stages = [Stage("main", 0, config.data.mixture, config.data.seq_len)]
    for stage in config.stages:
        if stage.from_step == 0:
            stages.clear()
        mixture = config.data.mixture if stage.mixture is None else stage.mixture
        seq_len = stage.seq_len or config.data.seq_len
        stages.append(Stage(stage.name, token_of(stage.from_step), mixture, seq_len))
    if anneal is not None and anneal.mixture is not None:
        start = token_of(anneal.from_step)
        before = [stage for stage in stages if stage.from_token <= start]
        stages = [stage for stage in before if stage.from_token < start]
        stages.append(Stage(ANNEAL_STAGE, start, anneal.mixture, before[-1].seq_len))
    progress = Progress(token, recorded) if recorded else Progress()
    end = token_of(max(step, last_step))
    return open_training_data(packed_root(workspace.packed, config.data), config.data, stages, progress, end), end


def open_run_data(config: RunConfig, workspace: Workspace, resumed: bool) -> tuple[TrainingData, int]:
    """The data as a run of this config reads it (`resumed`: from its newest checkpoint on), and its last token."""
    run = workspace.run(config.train.name)
    checkpoint = newest_checkpoint(run) if resumed else None
    anneal = begun_anneal(run) if resumed else None
    return _open_data(config, workspace, checkpoint, steps_with_anneal(config.train.steps, anneal), anneal)


def check_anneal(config: RunConfig, workspace: Workspace, checkpoint: Checkpoint | None, anneal: AnnealConfig) -> None:
    """An error when a run from `checkpoint` to the end of `anneal` would exceed data.max_epochs, or its mixture has
    sources that are not packed."""
    if config.data.max_epochs or anneal.mixture is not None:
        with _explained(anneal, config) if config.data.max_epochs else nullcontext():
            _open_data(config, workspace, checkpoint, anneal.from_step + anneal.steps, anneal)


@contextmanager
def _explained(anneal: AnnealConfig, config: RunConfig) -> Iterator[None]:
    """Explain that an error about the data comes from the length of an anneal, and what to do."""
    try:
        yield
    except UsageError as error:
        name = config.train.name
        raise UsageError(
            f"{name} cannot anneal over {counted(anneal.steps, 'step')} from step {anneal.from_step:,}. {error}\n"
            f"For an anneal, ask for fewer steps (`z2a anneal {name} --steps N`). To change a setting instead, stop "
            f"the run and start it again with the new setting and --accept-changes."
        ) from error


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


def _check_resume(
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


def _late_notes(config: RunConfig, step: int) -> list[str]:
    """Where updates are one step late, a save that was not due changes the course of the run."""
    every = config.checkpoint.every_steps
    if not config.parallel.offload_one_step_late or (every and step % every == 0):
        return []
    return [
        f"not bit-exact with an uninterrupted run: with parallel.offload_one_step_late a save changes the next step, "
        f"and the save of step {step} was not due (checkpoint.every_steps {every})"
    ]


def _environment_notes(before: dict[str, Any], now: dict[str, Any], operators: list[str]) -> list[str]:
    # Checkpoints keep the layout under a name from the time when processes only split the batch.
    words = {name: "layout" if name == "data_parallel" else name for name in now}
    changed = [f"{words[name]} {before.get(name)} -> {new}" for name, new in now.items() if before.get(name) != new]
    changed += operators
    if not changed:
        return []
    return [f"not bit-exact with the earlier attempt, because of: {', '.join(changed)}"]
