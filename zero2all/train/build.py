"""The model of a run on its device, cut and spread over the processes, with its optimizer."""

import warnings
from pathlib import Path

import torch

from zero2all.common.errors import UsageError, for_all_ranks
from zero2all.common.memory import available_memory
from zero2all.config import RunConfig
from zero2all.config.training import model_at
from zero2all.model.config import parameter_counts
from zero2all.model.init import without_weights
from zero2all.model.lora import add_adapters
from zero2all.model.recompute import apply_recompute
from zero2all.model.rope import rope_tables
from zero2all.model.z2all import Z2all, compile_model
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext, compile_problem
from zero2all.ops.registry import Ops, resolve, with_deferrable_products
from zero2all.parallel.context import spread_attention
from zero2all.parallel.device import environment, local_processes
from zero2all.parallel.expert import spread_experts
from zero2all.parallel.parameter_table import draw
from zero2all.parallel.pipeline import Pipeline, keep_stages, make_stages, model_costs
from zero2all.parallel.shards import shard_model
from zero2all.parallel.tensor import cut_model, local_config
from zero2all.parallel.world import World
from zero2all.train.checkpoints.load import Checkpoint
from zero2all.train.checkpoints.run_lock import Fence
from zero2all.train.cuda_graph import check_cuda_graph, choose_cuda_graph
from zero2all.train.micro_batch import choose_micro_batch, least_samples, memory_settings, rows_of_rank
from zero2all.train.sanity import FreeMemory, require_memory
from zero2all.train.state import DTYPES, TrainState, new_state


def build_state(
    config: RunConfig, run: Path, world: World, checkpoint: Checkpoint | None, fence: Fence
) -> tuple[TrainState, list[str]]:
    """The model on its device, sharded where the config says so, with its optimizer; and notes for the user."""
    dtype = DTYPES[config.train.precision]
    sharded = config.parallel.zero == 3 and world.mesh.shard.size > 1
    ops = resolve_together(config.ops, op_context(config, world.device.type, dtype, sharded), world)
    check_cuda_graph(config, world.device, world.size, ops)
    world.run_together(lambda: _check_compile(config.ops.compile, world.device.type))
    _require_memory(config, ops, world)
    state = empty_state(config, world, ops, checkpoint.step if checkpoint else 0)
    model = state.model
    if checkpoint is None:
        if config.finetune.lora.rank:
            raise UsageError(
                f"finetune.lora trains adapters of weights that are there already, and {run} has no checkpoint. Start "
                f"it with z2a sft MODEL --lora {config.finetune.lora.rank}."
            )
        with state.weights.masters_between_steps() as masters:
            draw(masters, model.config, config.train.seed)
        state.weights.publish_masters()
    compile_model(model)
    state.micro_batch_samples, micro_notes = choose_micro_batch(
        config, model, world, run, state.weights.zero_gradients, fence
    )
    rows = rows_of_rank(config, world.mesh)
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
        *lora_notes(config),
        *_unused_notes(config, world),
        *_half_precision_notes(world.device, dtype),
        *ops.notes(),
        *micro_notes,
    ]
    if state.cuda_graph is not None:
        if config.train.cuda_graph == "on":
            notes.append("CUDA graph: passes will be captured (train.cuda_graph is on)")
        elif state.cuda_graph.needs_room:
            notes.append("CUDA graph: passes will be captured if they leave most of the GPU's memory free")
        else:
            notes.append("CUDA graph: passes will be captured, because the GPU would be faster than the host")
    return state, notes


def empty_state(config: RunConfig, world: World, ops: Ops, step: int = 0) -> TrainState:
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
    add_adapters(model, config.finetune.lora, local_config(model.config, world.mesh.tensor.size))
    apply_recompute(model, config.train.recompute, config.train.recompute_every)
    pipeline = _cut_into_stages(model, config, world) if world.mesh.pipeline.size > 1 else None
    if config.parallel.zero == 3 and world.mesh.shard.size > 1:
        shard_model(model, world, dtype, with_masters=config.optim.kind != "adamw_bf16")
    cos, sin = rope_tables(model.config, model.config.max_seq_len, world.device)
    model.cos, model.sin = cos.to(wide), sin.to(wide)
    seed, parallel = config.train.seed, config.parallel
    state = world.run_together(lambda: new_state(model, config.optim, dtype, seed, world, parallel))
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
    compiled = config.ops.compile != "none"

    def check() -> None:
        free = FreeMemory(kind, on_device, available_memory(), local_processes())
        require_memory(config.model, settings, free, compiled)

    world.run_together(check)


def lora_notes(config: RunConfig) -> list[str]:
    """What adapters train, and what they change."""
    lora, model = config.finetune.lora, config.model
    trained, total = (count / 1e6 for count in (lora.parameters(model), parameter_counts(model)["total"]))
    note = (
        f"LoRA: rank {lora.rank} on {', '.join(lora.targets_of(model))}: {trained:.2f} M parameters are trained, "
        f"{total:.2f} M are frozen. A feed-forward with adapters is computed step by step, not fused. The memory "
        f"estimate of a pass is an upper bound"
    )
    return [note] if lora.rank else []


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


def resolve_together(config: OpsConfig, context: OpContext, world: World) -> Ops:
    """`resolve` in all processes; if one fails or chooses something else, all end with the same error.

    Some operators are tried before they are chosen (`zero2all.ops.trial`), and a trial may fail in one process only:
    another GPU, a full disk, a broken install on one node. Processes with different operators would still train, at the
    pace of the slowest and with results that cannot be explained.
    """
    ops = world.run_together(lambda: resolve(config, context))
    first, *others = world.gather(ops.taken)
    for rank, taken in enumerate(others, 1):
        for operator, name in taken.items():
            if name != first[operator]:
                problem = UsageError(
                    f"The processes chose different operators: {operator} is {first[operator]} on rank 0 and {name} on "
                    f"rank {rank}. Run `z2a perf ops` on each machine to see why. Fix the difference, or choose one "
                    f"that runs on all of them: --ops.{operator} {name}."
                )
                raise for_all_ranks(problem)
    return ops
