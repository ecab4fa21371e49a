"""`z2a train --plan-only`: how a run will be spread, by arithmetic alone: no GPU, no data, no other process.

The mesh and who talks to whom, who holds what of the model, memory and bytes of a process, how long a pipeline waits,
and which axis tolerates a slow link best. A run that cannot be spread so is refused here with the same words as at its
start (`zero2all.parallel.check`).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero2all.common.errors import AnomalyError, DiskError, UsageError
from zero2all.common.files import human_bytes
from zero2all.common.language import translate as t
from zero2all.common.manifest import read_manifest
from zero2all.common.progress import counted
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.config.schedule import learning_rate
from zero2all.diloco.compress import payload_bytes
from zero2all.estimate.communication import AxisTraffic, Transfer, by_axis, bytes_sent, communication_per_step
from zero2all.estimate.fit import process_bytes
from zero2all.estimate.gpus import HOPPER, Card
from zero2all.estimate.memory import GIB, MemoryEstimate, binary_size, estimate_memory
from zero2all.model.config import parameter_counts
from zero2all.ops.registry import Ops, assume_gpu, resolve
from zero2all.packed.loader import LoaderOptions, read_batch
from zero2all.packed.mixture import TrainingData
from zero2all.parallel.check import arithmetic, check_spread, idle_settings
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.device import pick_device, set_memory_settings
from zero2all.parallel.mesh import DENSE, GRADIENT_AXES, Mesh, axis_length, coordinates
from zero2all.parallel.parameter_table import LogicalParameter, held_table, layout_table, trained_table
from zero2all.parallel.pipeline import make_stages, model_costs
from zero2all.parallel.schedule import predicted_bubble
from zero2all.parallel.world import World, asked_processes
from zero2all.train.build import lora_notes, op_context
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.guards.documents import Decode
from zero2all.train.micro_batch import least_samples, memory_settings, stage_settings
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

USUAL_PER_MACHINE = 8
"""Processes per machine, if neither the config nor this machine determines it."""
AXES = {
    "pipeline": "the blocks",
    "replicate": "the rows; each has a whole copy",
    "shard": "the rows and the states",
    "context": "every sequence",
    "tensor": "every matrix",
    "expert": "the experts",
}

Rows = list[list[str]]
"""A table; the first row is its heading."""


@dataclass(frozen=True)
class AxisPlan:
    """One axis of the mesh."""

    name: str
    size: int
    ranks: list[int]  # those along it that include rank 0: a ring, or a line of stages
    between_machines: bool


@dataclass(frozen=True)
class Held:
    """Parameters that are alike: what a process holds of each."""

    name: str  # with * for the numbers of blocks
    count: int
    shape: tuple[int, ...]
    cut: str
    local: tuple[int, ...]
    copies: int  # processes that compute with the same values
    summed_over: str


@dataclass(frozen=True)
class Plan:
    """How a run is spread."""

    config: RunConfig
    sizes: MeshSizes
    per_machine: int
    samples: int  # of a pass
    axes: list[AxisPlan]
    layout: list[Held]
    memory: list[MemoryEstimate]  # of a process of each stage
    transfers: list[Transfer]  # of the process that sends most
    bubble: float | None  # share of a step that stages wait for each other, predicted; None: no pipeline
    device: str  # whose operators the memory is estimated for
    card: Card | None  # the GPU that was named
    needed: float  # bytes that the fullest process takes of a GPU

    @property
    def traffic(self) -> list[AxisTraffic]:
        """The axes, the one that tolerates a slow link best first."""
        return by_axis(self.transfers)


def make_plan(
    config: RunConfig, processes: int, ops: Ops | None = None, samples: int | None = None, card: Card | None = None
) -> Plan:
    """The plan for a config whose vocabulary is known; UsageError where it cannot be spread so. `card`: the GPU to plan
    for. None: that of this machine; where it has none, a run that is meant for GPUs is planned for one of them."""
    sizes = check_spread(config, processes, machine_problems(config.parallel, processes))
    device = pick_device("cpu" if config.parallel.device == "cpu" else "auto")
    meant_for_gpu = config.parallel.device != "cpu" and config.train.precision in ("bfloat16", "float16")
    is_assumed = card is not None or (device.type == "cpu" and meant_for_gpu and ops is None)
    if is_assumed:
        device, ops = torch.device("cuda"), assume_gpu(config.ops, config.data.document_mask)
    if ops is None:
        sharded = config.parallel.zero == 3 and sizes.shard > 1
        ops = resolve(config.ops, op_context(config, device.type, DTYPES[config.train.precision], sharded))
    if samples is None:
        samples = least_samples(config, World(device=device, mesh=Mesh(sizes)))
    named = card or Card("a GPU", 0.0, HOPPER)
    settings = stage_settings(config, ops, sizes, samples, named.workspace_bytes if is_assumed else None)
    memory = [estimate_memory(config.model, each) for each in settings]
    transfers = [communication_per_step(config.model, each) for each in settings]
    per_machine = processes_per_machine(config.parallel, processes)
    return Plan(
        config,
        sizes,
        per_machine,
        samples,
        plan_axes(sizes, per_machine),
        plan_layout(config, sizes),
        memory,
        max(transfers, key=bytes_sent),
        predict_bubble(config, sizes, settings[0].passes),
        named.name if is_assumed else device.type,
        card,
        max(process_bytes(*pair) for pair in zip(memory, settings, strict=True)),
    )


def predict_bubble(config: RunConfig, sizes: MeshSizes, passes: int) -> float | None:
    """The share of a step that the stages of a pipeline wait for each other."""
    if sizes.pipeline == 1:
        return None
    parallel, costs = config.parallel, model_costs(config.model, config.data.seq_len)
    of_stages = [costs.of(stage) for stage in make_stages(costs, sizes.pipeline * parallel.chunks)]
    return predicted_bubble(parallel.schedule, sizes.pipeline, parallel.chunks, passes, of_stages)


def processes_of(config: ParallelConfig) -> int:
    """The processes that the run itself will have: those of this machine, or more where the sizes of the axes, or those
    who started this process, ask for more."""
    asked = math.prod(size for size in (config.replicate, config.shard) if size != "auto")
    asked *= config.pipeline * config.context * config.tensor
    here = torch.cuda.device_count() if config.device != "cpu" else 0
    return max(here if config.processes == "auto" else config.processes, asked, asked_processes())


def machine_problems(config: ParallelConfig, processes: int) -> list[str]:
    """Why a run of several machines cannot have this many processes: each machine has parallel.processes of them."""
    own = config.processes
    if own == "auto" or processes <= own or processes % own == 0:
        return []
    return [
        f"parallel.processes {own} is the number of processes on one machine, and the axes make {processes}, which is "
        f"not a multiple of it. Change the axes, or set parallel.processes to a divisor of {processes}."
    ]


def processes_per_machine(config: ParallelConfig, processes: int) -> int:
    """As configured, else the usual number."""
    return min(processes, USUAL_PER_MACHINE if config.processes == "auto" else config.processes)


def with_planned_vocabulary(config: RunConfig, workspace: Workspace) -> tuple[RunConfig, list[str]]:
    """The config with the size of the vocabulary: its own, or that of the workspace's tokenizer; and a note where it
    has more ids than the tokenizer. One with fewer is refused, as the run would be."""
    rows = config.model.vocab_size
    try:
        size = int(read_manifest(workspace.tokenizer, "tokenizer", "z2a tokenizer train")["vocab_size"])
    except Exception as error:
        if rows is not None:
            return config, []
        raise UsageError(
            f"A plan needs the size of the vocabulary. Give --model.vocab_size N, or --work with a workspace that has "
            f"a tokenizer. ({error})"
        ) from error
    note = (
        f"vocabulary: {rows} ids (model.vocab_size); the tokenizer of the workspace has {size}. For its size add "
        f"--model.vocab_size null."
    )
    return with_vocabulary(config, size), [] if rows in (None, size) else [t(note)]


# ---- the mesh and the layout -----------------------------------------------------------------------------------------


def plan_axes(sizes: MeshSizes, per_machine: int) -> list[AxisPlan]:
    """The axes with more than one process, from the outermost to the innermost."""
    found = []
    for name in (*DENSE, "expert"):
        ranks = _ranks_along(sizes, name)
        if len(ranks) > 1:
            crosses = len({rank // per_machine for rank in ranks}) > 1
            found.append(AxisPlan(name, len(ranks), ranks, crosses))
    return found


def _ranks_along(sizes: MeshSizes, name: str) -> list[int]:
    """The ranks that differ from rank 0 on this axis alone."""
    others = ("pipeline", "replicate", "expert_shard") if name == "expert" else [axis for axis in DENSE if axis != name]
    places = ((rank, coordinates(sizes, rank)) for rank in range(sizes.processes))
    return [rank for rank, place in places if not any(place[other] for other in others)]


def plan_layout(config: RunConfig, sizes: MeshSizes) -> list[Held]:
    """Every kind of parameter, as rank 0 would hold it if it had all blocks."""
    table = trained_table(config.model, config.finetune.lora)
    held = held_table(table, {one.holder for one in table}, Mesh(sizes))
    alike: dict[tuple[str, tuple[int, ...]], list[LogicalParameter]] = {}
    for one in held:
        alike.setdefault((re.sub(r"\.\d+\.", ".*.", one.name), one.held.lengths), []).append(one)
    return [_held(name, members, config.parallel.zero, sizes) for (name, _), members in alike.items()]


def _held(name: str, members: Sequence[LogicalParameter], zero: int, sizes: MeshSizes) -> Held:
    one = members[0]
    cuts = []
    for dimension, (whole, local) in enumerate(zip(one.shape, one.held.lengths, strict=True)):
        if whole != local:
            what = ("rows", "columns")[dimension] if one.spread != "expert" else "experts"
            cuts.append(f"{what}/{whole // local}")
    if zero == 3 and sizes.shard > 1:
        cuts.append(f"shard/{sizes.shard}")
    axes = GRADIENT_AXES[one.spread][0]
    summed = [axis for axis in axes if axis_length(sizes, axis) > 1]
    pieces = math.prod(one.shape) // max(1, one.numel)
    copies = sizes.processes // sizes.pipeline // pieces // (sizes.shard if zero == 3 else 1)
    over = " x ".join(summed) or "-"
    return Held(name, len(members), one.shape, ", ".join(cuts) or "-", one.held.lengths, copies, over)


# ---- as tables and as JSON -------------------------------------------------------------------------------------------


def plan_tables(plan: Plan) -> list[tuple[str, Rows]]:
    """The plan as tables with titles."""
    tables = [
        (_mesh_title(plan), _mesh_rows(plan)),
        ("layout of the parameters (*: every block; batch: replicate x shard)", _layout_rows(plan)),
        (f"memory of a process, by stage, in GiB (operators of {plan.device})", _memory_rows(plan)),
        (f"communication: a process sends {human_bytes(bytes_sent(plan.transfers))} per step", _transfer_rows(plan)),
    ]
    return [(t(title), rows) for title, rows in tables]


def plan_notes(plan: Plan) -> list[str]:
    """What the tables mean for the choice of links, and the arithmetic of the batch."""
    lines = [
        *_device_notes(plan),
        *lora_notes(plan.config),
        *_bubble_notes(plan),
        *_link_notes(plan),
        *_group_notes(plan),
        *idle_settings(plan.config, plan.sizes.processes),
        "arithmetic:",
        *arithmetic(plan.config, plan.sizes).splitlines(),
    ]
    return [t(line) for line in lines]


def _mesh_title(plan: Plan) -> str:
    total = parameter_counts(plan.config.model)["total"]
    machines = -(-plan.sizes.processes // plan.per_machine)
    ranks, model = counted(plan.sizes.processes, "rank"), f"{total / 1e6:,.1f} M parameters"
    if machines > 1:
        return (
            f"mesh: {ranks} on {machines} machines, up to {plan.per_machine} on each (parallel.processes), {model}, "
            f"zero {plan.config.parallel.zero}"
        )
    return f"mesh: {ranks} on {counted(machines, 'machine')}, {model}, zero {plan.config.parallel.zero}"


def _mesh_rows(plan: Plan) -> Rows:
    sent = {axis.axis: axis.sent for axis in plan.traffic}
    rows = [["axis", "size", "what it divides", "ranks with rank 0", "link", "sent"]]
    for axis in plan.axes:
        link = "between machines" if axis.between_machines else "within a machine"
        own = human_bytes(sent.get(axis.name, 0.0))
        rows.append([axis.name, str(axis.size), t(AXES[axis.name]), _ranks(axis.ranks), t(link), own])
    return rows if len(rows) > 1 else [*rows, ["-", "1", t("nothing: one process"), "0", "-", "-"]]


def _ranks(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} {ranks[1]} … {ranks[-1]}"


def _layout_rows(plan: Plan) -> Rows:
    rows = [["parameter", "whole", "cut", "local shape", "copies", "summed over"]]
    for one in plan.layout:
        whole, here = ("x".join(map(str, shape)) for shape in (one.shape, one.local))
        name = one.name.removeprefix("blocks.").removesuffix(".weight")
        over = one.summed_over.replace("replicate x shard", "batch")
        rows.append([name, whole, one.cut, here, str(one.copies), over])
    return rows


def _memory_rows(plan: Plan) -> Rows:
    names = list(dict.fromkeys(part.name for estimate in plan.memory for part in estimate.parts))
    stages = [f"stage {number}" for number in range(len(plan.memory))] if len(plan.memory) > 1 else ["per process"]
    rows = [["", *stages]]
    for name in names:
        sizes = [sum(part.bytes for part in each.parts if part.name == name) for each in plan.memory]
        if max(sizes) >= GIB / 1e5:
            rows.append([t(name), *(f"{size / GIB:.3f}" for size in sizes)])
    return [*rows, [t("total on the device"), *(f"{each.total / GIB:.3f}" for each in plan.memory)]]


def _transfer_rows(plan: Plan) -> Rows:
    rows = [["collective", "what", "over", "whole", "sent", "hidden by"]]
    for one in plan.transfers:
        over = one.axis.replace("replicate x shard", "batch")
        sizes = [human_bytes(one.whole), human_bytes(one.sent)]
        rows.append([one.collective, t(one.what), over, *sizes, t(one.hidden_by)])
    return rows if len(rows) > 1 else [*rows, ["-", t("nothing: one process"), "-", "0 B", "0 B", ""]]


def _device_notes(plan: Plan) -> list[str]:
    """Plans for a GPU that is not here."""
    if plan.device in ("cpu", "cuda"):
        return []
    needed = binary_size(plan.needed)
    notes = ["memory: the operators are those of a GPU with Triton, without FlashAttention 4 and QuACK"]
    if plan.card is None:
        said = f"memory: a process takes {needed} of the GPU, with context, NCCL and gaps (--gpu names one)"
        return [*notes, said]
    name, there = plan.card.name, binary_size(plan.card.memory_bytes)
    if plan.needed <= plan.card.memory_bytes:
        return [*notes, f"memory: it fits: a process takes {needed} of the {there} of {name}"]
    return [
        *notes,
        f"memory: it does not fit: a process takes {needed}, and {name} has {there}; `z2a perf memory` says what helps",
    ]


def _bubble_notes(plan: Plan) -> list[str]:
    if plan.bubble is None:
        return []
    parallel = plan.config.parallel
    schedule = f"{parallel.schedule}, {parallel.chunks} chunks" if parallel.chunks > 1 else parallel.schedule
    return [f"bubble: each stage waits {plan.bubble:.1%} of a step for the others (predicted, schedule {schedule})"]


def _link_notes(plan: Plan) -> list[str]:
    if not plan.traffic:
        return []
    lines = ["axes that tolerate a slow link, best first:"]
    for number, axis in enumerate(plan.traffic, 1):
        sent = human_bytes(axis.sent)
        if axis.waited:
            waited = human_bytes(axis.waited)
            lines.append(f"  {number}. {axis.axis}: {sent} per step; the processes wait for {waited} of it")
        else:
            lines.append(f"  {number}. {axis.axis}: {sent} per step; computation can hide all of it")
    return lines


def _group_notes(plan: Plan) -> list[str]:
    """What a DiLoCo group sends to the others."""
    diloco = plan.config.diloco
    if not diloco.groups:
        return []
    own = sum(payload_bytes(math.prod(one.shape), diloco.compress) for one in layout_table(plan.config.model))
    sent = (diloco.count - 1) * own
    return [
        f"DiLoCo: {diloco.count} groups, {diloco.scheme}, every {diloco.every} steps, {diloco.compress}: a group sends "
        f"{human_bytes(sent)} in a round, {human_bytes(sent / diloco.every)} per step"
    ]


def plan_values(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "sizes": dataclasses.asdict(plan.sizes),
        "processes": plan.sizes.processes,
        "processes_per_machine": plan.per_machine,
        "micro_batch_samples": plan.samples,
        "operators_of": plan.device,
        "process_bytes": plan.needed,
        "axes": [dataclasses.asdict(axis) for axis in plan.axes],
        "layout": [dataclasses.asdict(one) for one in plan.layout],
        "memory": [
            {"total": each.total, "host": each.host, "parts": {part.name: part.bytes for part in each.parts}}
            for each in plan.memory
        ],
        "transfers": [{**dataclasses.asdict(one), "sent": one.sent, "given": one.given} for one in plan.transfers],
        "bubble": plan.bubble,
        "slow_link_order": [axis.axis for axis in plan.traffic],
    }


# ---- the dry run ----------------------------------------------------------------------------------------------------


def dry_run(
    config: RunConfig,
    workspace: Workspace,
    make_decode: Callable[[], Decode] | None = None,
    say: Callable[[str], None] = print,
) -> Overfit:
    """Print what a run of `config` would start with, and overfit one batch: a model that cannot (AnomalyError) learns
    nothing. One process; no checkpoint is read, and nothing is written to the folder of the run."""

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
