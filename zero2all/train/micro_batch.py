"""`train.micro_batch_samples: auto`: the most samples of one pass that fit into the device's memory.

On a GPU it is found by trying: forward and backward over random tokens, beginning with what `zero2all.estimate.memory`
expects to fit, doubling while it fits, then halving the gap, with a little less than the whole card. For every number
of passes one size is tried, the smallest that needs no more passes: of 64 rows also 7, nine times, and then 1. Larger
sizes of as many passes would only take memory. The result is kept in <run>/micro_batch.json with everything that
decides it, because another micro-batch adds up in another order.

Processes that exchange something in every pass (`ParallelConfig.every_pass_communicates`) take what the estimate says,
the smallest of all processes, because pipeline stages differ: one that ran out of memory would leave the others waiting
in the next collective, and FSDP cannot recover from an error in the middle of a pass. On a CPU memory does not limit a
pass, and a fixed rule is used.
"""

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zero2all.common.errors import BadInputError, UsageError, is_out_of_memory
from zero2all.common.files import read_json, write_json
from zero2all.common.progress import counted
from zero2all.config import RunConfig, with_new_names
from zero2all.estimate.gpus import cublas_workspace
from zero2all.estimate.memory import ALLOWANCE, KINDS_APART, MemorySettings, estimate_memory
from zero2all.estimate.memory_settings import HeldStage
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.registry import Ops, footprints
from zero2all.packed.loader import rank_rows
from zero2all.parallel.buckets import plan_buffers
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.context import method_of
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import layout_table
from zero2all.parallel.pipeline import make_stages, model_costs
from zero2all.parallel.schedule import make_order
from zero2all.parallel.world import World
from zero2all.train.checkpoints.run_lock import Fence, behind, no_fence
from zero2all.train.optimizers.factory import cut_of

FILE_NAME = "micro_batch.json"
MARGIN = 0.05
"""Share of the device's memory that torch may not use during the search."""
MOST_ON_CPU = 8
"""A few rows fill a CPU's caches; more only take memory."""
PASSES = 2
"""Passes of one try: the second runs in the memory that the first has fragmented."""


def choose_micro_batch(
    config: RunConfig,
    model: Z2all,
    world: World,
    run: Path | None,
    zero_gradients: Callable[[], None],
    fence: Fence = no_fence,
) -> tuple[int, list[str]]:
    """Rows of one pass, the same in every process, and notes for the user. `run`: the folder to save it in, if any;
    `fence` is checked before that."""
    asked = config.train.micro_batch_samples
    if asked != "auto":
        return int(asked), []
    rows = rows_of_rank(config, world.mesh)
    candidates = pass_sizes(rows)
    if world.device.type != "cuda":
        taken = least_samples(config, world)
        return taken, [
            f"micro-batch: {counted(taken, 'sample')} (auto on a CPU: the largest divisor of the rows up to "
            f"{MOST_ON_CPU})"
        ]
    decided_by = deciding(config, model.ops, world)
    known = world.broadcast(recall(run, decided_by) if run is not None and world.is_first else None)
    if known in candidates:
        return known, [
            f"micro-batch: {counted(known, 'sample')}, found in an earlier attempt (to search again, delete "
            f"{FILE_NAME} in the run)"
        ]
    guess = largest_by_estimate(config, model.ops, world, candidates)
    if world.size > 1 and config.parallel.every_pass_communicates:
        taken = min(world.gather(guess))
        note = (
            f"micro-batch: {taken} of {counted(rows, 'sample')}, from the memory estimate. Every pass communicates, so "
            f"larger sizes cannot be tried. If memory stays free, set train.micro_batch_samples."
        )
    else:
        own = _find_on_device(config, model, world.device, candidates, guess, zero_gradients)
        taken = min(world.gather(own))
        note = (
            f"micro-batch: {taken} of {counted(rows, 'sample')}, the most that fits with {MARGIN:.0%} of the memory "
            f"left free"
        )
    if run is not None:
        folder = run
        world.run_on_rank0(lambda: behind(fence, lambda: remember(folder, decided_by, taken)))
    return taken, [note]


def rows_of_rank(config: RunConfig, mesh: Mesh) -> int:
    """Rows that every process gets of a global batch; the last ones may fill up with rows that weigh nothing."""
    return rank_rows(config.samples_per_step, *config.batch_place(0, mesh.batch.size))[2]


def least_samples(config: RunConfig, world: World) -> int:
    """The fewest rows a pass may have: as configured, or with `auto` the fixed rule of a CPU, or 1 on a GPU."""
    rows = rows_of_rank(config, world.mesh)
    asked = config.train.micro_batch_samples
    if asked != "auto":
        return min(int(asked), rows)
    if world.device.type == "cuda":
        return 1
    return max(number for number in range(1, MOST_ON_CPU + 1) if rows % number == 0)


def pass_sizes(rows: int) -> list[int]:
    """For every number of passes the rows of one, smallest first; the last pass of a step may have fewer."""
    return sorted({-(-rows // passes) for passes in range(1, rows + 1)})


def find_micro_batch(
    try_pass: Callable[[int], None], candidates: Sequence[int], free: Callable[[], None], first_guess: int | None = None
) -> int:
    """The largest of the ascending `candidates` whose pass does not run out of memory. Doubles from `first_guess` (else
    from the smallest), then halves the gap. `free` is called after every try."""
    fits, too_many = -1, len(candidates)
    at = candidates.index(first_guess) if first_guess is not None else 0
    while fits < at < too_many:
        if _is_enough(try_pass, candidates[at], free):
            fits = at
            at = next((n for n in range(at + 1, too_many) if candidates[n] >= 2 * candidates[fits]), too_many - 1)
        else:
            too_many = at
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _is_enough(try_pass, candidates[middle], free):
            fits = middle
        else:
            too_many = middle
    if fits < 0:
        raise UsageError(
            f"Even a micro-batch of {candidates[0]} does not fit into the memory of this device. Make the model or "
            f"data.seq_len smaller, keep fewer activations (train.recompute; `z2a perf memory` computes which kind "
            f"needs less), choose an optimizer with less state (optim.kind adamw_8bit or adamw_bf16), shard the "
            f"optimizer states over several GPUs (parallel.zero 1; 2 also shards gradients, 3 also weights), or move "
            f"them to host memory (parallel.offload optimizer)."
        )
    return candidates[fits]


def _is_enough(try_pass: Callable[[int], None], samples: int, free: Callable[[], None]) -> bool:
    """Whether the memory is enough. The error and the tensors its traceback holds are gone before `free` is called."""
    try:
        try_pass(samples)
        enough = True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        enough = False
    free()
    return enough


def model_pass(model: Z2all, config: RunConfig, device: torch.device) -> Callable[[int], None]:
    """Forward and backward of `samples` rows of random tokens, as a run would do them."""
    seq_len = config.data.seq_len

    def run_passes(samples: int) -> None:
        tokens = torch.randint(model.config.vocab_ids, (samples, seq_len + 1), device=device)
        # Documents of different lengths, because some kernels allocate lists of them.
        document_ids = (torch.arange(seq_len, device=device) // 97).expand(samples, -1).contiguous()
        wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        shares = torch.full((samples, seq_len), 1.0 / (samples * seq_len), dtype=wide, device=device)
        for _ in range(PASSES):
            documents = document_ids if config.data.document_mask else None
            total, _losses = model.loss(tokens[:, :-1], tokens[:, 1:], shares, documents, config.train.z_loss)
            total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run_passes


def _find_on_device(
    config: RunConfig,
    model: Z2all,
    device: torch.device,
    candidates: Sequence[int],
    guess: int,
    zero_gradients: Callable[[], None],
) -> int:
    def free() -> None:
        zero_gradients()
        gc.collect()
        torch.cuda.empty_cache()

    before = torch.cuda.get_rng_state(device)
    torch.cuda.set_per_process_memory_fraction(1.0 - MARGIN, device)
    try:
        return find_micro_batch(model_pass(model, config, device), candidates, free, guess)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.set_rng_state(before, device)


def memory_settings(
    config: RunConfig, ops: Ops, mesh: Mesh, samples: int, workspace_bytes: float | None = None
) -> MemorySettings:
    """The inputs of the memory estimate for a run on `mesh` with micro-batches of `samples` samples. `workspace_bytes`
    of cuBLAS on a GPU that is not here; None: on this machine."""
    rows, lora = rows_of_rank(config, mesh), config.finetune.lora
    # Adapters take the feed-forward apart. What they spare of a pass, gradients of frozen matrices, is counted still.
    is_apart = lora.rank and ops.taken["linear"] != "fp8"
    settings = MemorySettings(
        seq_len=config.data.seq_len,
        micro_batch_samples=samples,
        precision=config.train.precision,
        optimizer=config.optim.kind,
        kahan=config.optim.bf16_rounding == "kahan" and config.train.precision == "bfloat16",
        operators=footprints(ops.taken | {"linear": "plain"}) if is_apart else ops.footprints,
        lora=lora,
        recompute=config.train.recompute,
        recompute_every=config.train.recompute_every,
        documents=config.data.document_mask,
        passes=-(-rows // samples),
        zero=config.parallel.zero if mesh.shard.size > 1 else 0,  # else nothing is cut
        replicate=mesh.replicate.size,
        shard=mesh.shard.size,
        context=mesh.context.size,
        context_method=method_of(config.model, config.parallel, mesh.sizes),
        tensor=mesh.tensor.size,
        expert=mesh.expert.size,
        pipeline=mesh.pipeline.size,
        stage=stage_of(config, mesh, -(-rows // samples)),
        overlap=config.parallel.overlap,
        compress=config.parallel.compress if mesh.loss.size * mesh.tensor.size > 1 else "none",  # else nothing is sent
        offload=config.parallel.offload,
        bucket_bytes=config.parallel.bucket_mb * 1e6,
        workspace_bytes=workspace_here() if workspace_bytes is None else workspace_bytes,
    )
    cuts_model = settings.tensor * settings.pipeline * settings.expert > 1
    if settings.zero not in (1, 2) or settings.shard == 1 or cuts_model or lora.rank:
        return settings
    bucket_values = int(settings.bucket_bytes) // settings.gradient_bytes
    return dataclasses.replace(
        settings, owned=owned_values(config.model, settings.optimizer, settings.shard, bucket_values)
    )


def stage_settings(
    config: RunConfig, ops: Ops, sizes: MeshSizes, samples: int, workspace_bytes: float | None = None
) -> list[MemorySettings]:
    """`memory_settings` of a process of each stage of the pipeline."""
    first_of_stage = [Mesh(sizes, stage * sizes.processes // sizes.pipeline) for stage in range(sizes.pipeline)]
    return [memory_settings(config, ops, mesh, samples, workspace_bytes) for mesh in first_of_stage]


def workspace_here() -> float:
    """Bytes that cuBLAS takes of torch's memory on this machine; 0 without a GPU."""
    return cublas_workspace(torch.cuda.get_device_capability()[0]) if torch.cuda.is_available() else 0.0


def stage_of(config: RunConfig, mesh: Mesh, passes: int) -> HeldStage | None:
    """What a process of a pipeline has of the model, and how much of it is under way at most; None: no pipeline."""
    if mesh.pipeline.size == 1:
        return None
    order = (config.parallel.schedule, mesh.pipeline.rank, mesh.pipeline.size, config.parallel.chunks, passes)
    return _held_stage(config.model, config.data.seq_len, order)


@functools.lru_cache(maxsize=4096)  # a search of layouts asks for the same ones again and again
def _held_stage(model: ModelConfig, seq_len: int, order: tuple[str, int, int, int, int]) -> HeldStage:
    """`order`: what `make_order` takes."""
    schedule, rank, processes, chunks, _ = order
    stages = make_stages(model_costs(model, seq_len), processes * chunks)
    own = {number: stages[number] for number in range(rank, len(stages), processes)}
    layers = sum(len(stage.blocks) for stage in own.values())
    waiting, heads, deferred = [0], [0], [0]
    for action in make_order(*order):
        stage = own[action.stage]
        sign = {"forward": 1, "backward": -1, "weights": 0}[action.kind]
        waiting.append(waiting[-1] + sign * len(stage.blocks))
        heads.append(heads[-1] + sign * stage.is_last)
        deferred.append(deferred[-1] + {"forward": 0, "backward": 1, "weights": -1}[action.kind])
    return HeldStage(
        layers,
        has_embedding=any(stage.is_first for stage in own.values()),
        has_head=any(stage.is_last for stage in own.values()),
        in_flight=max(waiting) / layers,
        heads=max(heads),
        deferred=max(deferred) if schedule == "zero_bubble" else 0,
        sends=sum(not stage.is_first for stage in own.values()) + sum(not stage.is_last for stage in own.values()),
    )


@functools.lru_cache
def owned_values(model: ModelConfig, optimizer: str, shard: int, bucket_values: int) -> tuple[float, float]:
    """What the fullest process owns of the flat buffers (`MemorySettings.owned`), as the buffers are really cut."""
    plan = plan_buffers(layout_table(model), shard, max(1, bucket_values), functools.partial(cut_of, optimizer))
    apart = KINDS_APART.get(optimizer, ())

    def owned(rank: int, is_apart: bool) -> float:
        ranges = [bucket.owned_by(rank) for bucket in plan.buckets if (bucket.kind in apart) == is_apart]
        return float(sum(own.stop - own.start for own in ranges))

    return max(((owned(rank, True), owned(rank, False)) for rank in range(shard)), key=sum)


def largest_by_estimate(config: RunConfig, ops: Ops, world: World, candidates: Sequence[int]) -> int:
    """The largest candidate that the estimate expects to fit; the smallest where it expects none to."""
    room = torch.cuda.get_device_properties(world.device).total_memory * (1.0 - ALLOWANCE)
    fitting = [
        samples
        for samples in candidates
        if estimate_memory(config.model, memory_settings(config, ops, world.mesh, samples)).total <= room
    ]
    return fitting[-1] if fitting else candidates[0]


def deciding(config: RunConfig, ops: Ops, world: World) -> dict[str, Any]:
    """Everything that decides how much fits, as JSON values."""
    on_cuda = world.device.type == "cuda"
    properties = torch.cuda.get_device_properties(world.device) if on_cuda else None
    return {
        "model": dataclasses.asdict(config.model),
        "seq_len": config.data.seq_len,
        "documents": config.data.document_mask,
        "rows": rows_of_rank(config, world.mesh),
        "precision": config.train.precision,
        "recompute": [config.train.recompute, config.train.recompute_every],
        "z_loss": config.train.z_loss > 0,
        **({"lora": dataclasses.asdict(config.finetune.lora)} if config.finetune.lora.rank else {}),
        "optimizer": [config.optim.kind, config.optim.bf16_rounding],
        "ops": {**ops.taken, "compile": ops.compile},
        "processes": list(dataclasses.astuple(world.mesh.sizes)),
        "parallel": [
            *(config.parallel.zero, config.parallel.offload, config.parallel.bucket_mb),
            *([] if config.parallel.compress == "none" else [config.parallel.compress]),
        ],
        "passes": [config.parallel.schedule, config.parallel.chunks, config.parallel.context_method],
        "device": properties.name if properties else "cpu",
        "device_bytes": properties.total_memory if properties else 0,
        "torch": str(torch.__version__),
    }


def remember(run: Path, decided_by: Mapping[str, Any], samples: int) -> None:
    """Save the result in the run's folder."""
    write_json(run / FILE_NAME, {"micro_batch_samples": samples, "decided_by": dict(decided_by)})


def recall(run: Path, decided_by: Mapping[str, Any]) -> int | None:
    """The saved result, if everything that decides it is unchanged."""
    path = run / FILE_NAME
    if not path.is_file():
        return None
    try:
        known = read_json(path)
    except (BadInputError, ValueError):  # cut off by a crash: search again
        return None
    if not isinstance(known, dict) or with_new_names(known.get("decided_by")) != dict(decided_by):
        return None
    samples = known.get("micro_batch_samples")
    return samples if isinstance(samples, int) else None
