"""The speed of a training step with the real model and optimizer on random tokens.

An iteration is what a run does between two updates: forward and backward over every micro-batch, norm, update. The
host waits for the device once, at the end of an iteration, and Python's garbage collector is off, as in a run. Weights
are drawn on the device: with the right standard deviation, but not those that a seed gives a run.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.config import RunConfig
from zero2all.estimate.flops import flops_per_token, flops_utilisation, peak_flops
from zero2all.estimate.run.batch import BatchShape
from zero2all.measure.variants import TensorPath
from zero2all.model import config as model_config
from zero2all.model.init import INTO_RESIDUAL, without_weights
from zero2all.model.recompute import apply_recompute
from zero2all.model.rope import rope_tables
from zero2all.model.z2all import Z2all, compile_model
from zero2all.ops.cut_vocabulary import Exchange, cut_linear_cross_entropy
from zero2all.ops.linear_cross_entropy import LinearCrossEntropyOp
from zero2all.ops.registry import Ops, resolve
from zero2all.parallel.mesh import Axis
from zero2all.parallel.tensor import cut_model
from zero2all.train.build import op_context
from zero2all.train.cuda_graph import choose_cuda_graph
from zero2all.train.state import DTYPES, TrainState, new_state
from zero2all.train.step_timer import scheduled_garbage_collection
from zero2all.train.train_step import StepPlan, update
from zero2all.train.weights import FlatWeights

CLIP_NORM = 1.0
LEARNING_RATE = 1e-4
WARM_UP_SECONDS = 3.0  # long enough for the clocks to settle at the power limit
SLOTS = 4  # different micro-batches of random tokens, used in turn
SEED = 1
GPU_FIELDS = ("power.draw", "clocks.sm", "clocks.mem", "temperature.gpu")
GPU_NAMES = ("watts", "sm_mhz", "memory_mhz", "celsius")
EVERY_MILLISECONDS = 500

Iterate = Callable[[int], Tensor]
"""(number of micro-batches) -> forward and backward over them, an update; returns the summed loss, on the device."""


@dataclass(frozen=True)
class Pace:
    """The times of the iterations of a measurement."""

    first_step_seconds: float  # one micro-batch and one update, including compilation
    iteration_seconds: list[float]  # each measured iteration
    queueing_seconds: list[float]  # how long the host took to queue each
    loss: float  # of the last iteration
    peak_bytes: int  # peak memory after the first step, of the device or the process
    gpu: dict[str, Any]  # power and clocks during the measurement

    @property
    def seconds(self) -> float:
        """Mean seconds of an iteration."""
        return sum(self.iteration_seconds) / len(self.iteration_seconds)


@dataclass(frozen=True)
class Timing:
    """How long to measure."""

    seconds: float
    """At least; one iteration is always measured."""
    warm_up_seconds: float = WARM_UP_SECONDS
    after_first_step: Callable[[], None] = lambda: None
    """Called once, when everything is compiled."""


def pace_of(iterate: Iterate, accumulation: int, device: torch.device, timing: Timing) -> Pace:
    """Make a first step, warm up, then iterate."""
    with scheduled_garbage_collection() as after_step:
        started = time.perf_counter()
        iterate(1)
        wait_for(device)
        first = time.perf_counter() - started
        timing.after_first_step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        warm_until = time.perf_counter() + timing.warm_up_seconds
        while True:
            iterate(min(2, accumulation))
            wait_for(device)
            if time.perf_counter() >= warm_until:
                break
        whole: list[float] = []
        queueing: list[float] = []
        with watched_gpu(device) as gpu:
            while not whole or sum(whole) < timing.seconds:
                started = time.perf_counter()
                loss = iterate(accumulation)
                queueing.append(time.perf_counter() - started)
                wait_for(device)
                whole.append(time.perf_counter() - started)
                after_step(len(whole))
    return Pace(first, whole, queueing, float(loss), peak_bytes(device), gpu)


def measure(
    config: RunConfig,
    batch: BatchShape,
    device: torch.device,
    timing: Timing,
    tensor_path: TensorPath = "none",
) -> dict[str, Any]:
    """The figures of one config on one batch, as JSON values."""
    context = op_context(config, device.type, DTYPES[config.train.precision])
    if tensor_path == "none":
        return _measure(config, resolve(config.ops, context), None, batch, device, timing)
    ops = resolve(config.ops, dataclasses.replace(context, vocabulary_cut=True))
    if tensor_path == "loss":
        ops = dataclasses.replace(ops, linear_cross_entropy=_loss_of_only_part(ops.taken["linear_cross_entropy"]))
        return _measure(config, ops, None, batch, device, timing)
    with group_of_one(device) as axis:
        return _measure(config, ops, axis, batch, device, timing)


def _measure(
    config: RunConfig,
    ops: Ops,
    tensor: Axis | None,
    batch: BatchShape,
    device: torch.device,
    timing: Timing,
) -> dict[str, Any]:
    before = _allocated_bytes(device)
    state = random_state(config, ops, device, tensor)
    state_bytes = _state_bytes(state, device, before)
    prepare(state, config, batch, device)
    iterate = iterations(state, batch, config.train.z_loss, device)
    pace = pace_of(iterate, batch.accumulation, device, timing)
    found = {**figures(config, batch, pace, device), "state_gib": state_bytes / 2**30, "ops": choices(ops)}
    return found | {"cuda_graph": state.cuda_graph is not None and state.cuda_graph.is_captured}


def prepare(state: TrainState, config: RunConfig, batch: BatchShape, device: torch.device) -> None:
    """Compile the model and choose whether its passes are captured, as a run does."""
    compile_model(state.model)
    shaped = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=batch.seq_len))
    whole = batch.samples * batch.accumulation
    state.cuda_graph = choose_cuda_graph(shaped, state.model, device, 1, batch.samples, whole)


def figures(config: RunConfig, batch: BatchShape, pace: Pace, device: torch.device) -> dict[str, Any]:
    """tokens/s, MFU and memory of a measurement."""
    name = device_name(device)
    tokens_per_second = batch.tokens / pace.seconds
    utilisation = flops_utilisation(flops_per_token(config.model, batch.seq_len), tokens_per_second, name)
    return {
        "device": name,
        "seconds_per_iteration": pace.seconds,
        "iterations": len(pace.iteration_seconds),
        "iteration_seconds": pace.iteration_seconds,
        "queueing_seconds": sum(pace.queueing_seconds) / len(pace.queueing_seconds),
        "tokens_per_second": tokens_per_second,
        "mfu": utilisation,
        "mfu_note": None if peak_flops(name) else f"no MFU: the peak FLOPS of {name!r} are unknown",
        "peak_gib": pace.peak_bytes / 2**30,
        "first_step_seconds": pace.first_step_seconds,
        "loss": pace.loss if math.isfinite(pace.loss) else str(pace.loss),
        "gpu": pace.gpu,
    }


def choices(ops: Ops) -> dict[str, dict[str, str]]:
    """What was asked and taken for every operator."""
    taken = {choice.operator: dataclasses.asdict(choice) for choice in ops.choices}
    for choice in taken.values():
        del choice["operator"]
    return taken | {"compile": {"asked": ops.compile, "got": ops.compile, "reason": "as asked"}}


def random_state(config: RunConfig, ops: Ops, device: torch.device, tensor: Axis | None = None) -> TrainState:
    """Model and optimizer of a config on `device`, with random weights; the model cut over `tensor` where given."""
    with without_weights():
        model = Z2all(config.model, ops)
    if tensor is not None:
        cut_model(model, tensor)
    apply_recompute(model, config.train.recompute, config.train.recompute_every)
    model.to(DTYPES[config.train.precision]).to_empty(device=device)
    model.cos, model.sin = rope_tables(config.model, config.model.max_seq_len, device)
    generator = torch.Generator(device).manual_seed(SEED)
    into_residual = config.model.matrix_std / math.sqrt(2 * config.model.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            small = name.endswith(INTO_RESIDUAL)
            parameter.normal_(0.0, into_residual if small else config.model.matrix_std, generator=generator)
    return new_state(model.train(), config.optim, DTYPES[config.train.precision])


def random_tokens(vocab_size: int, batch: BatchShape, device: torch.device) -> Tensor:
    """(slots, samples, seq_len + 1) ids."""
    generator = torch.Generator(device).manual_seed(SEED)
    shape = (min(SLOTS, batch.accumulation), batch.samples, batch.seq_len + 1)
    return torch.randint(0, vocab_size, shape, device=device, generator=generator)


def iterations(
    state: TrainState,
    batch: BatchShape,
    z_loss: float,
    device: torch.device,
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Iterate:
    """The iteration of a run, on random tokens; `phase` is entered around forward, backward and update (a CUDA graph is
    forward and backward in one)."""
    model = state.model
    tokens = random_tokens(model.config.vocab_ids, batch, device)
    # Each token has the same share of the mean over an iteration.
    shares = torch.full((batch.samples, batch.seq_len), 1.0 / batch.tokens, dtype=torch.float32, device=device)

    def iterate(micro_batches: int) -> Tensor:
        loss = torch.zeros((), device=device)
        for number in range(micro_batches):
            rows = tokens[number % len(tokens)]
            if state.cuda_graph is not None:
                with phase("forward and backward"):
                    losses = state.cuda_graph(rows, shares)
            else:
                with phase("forward"):
                    total, losses = model.loss(rows[:, :-1], rows[:, 1:], shares, None, z_loss)
                with phase("backward"):
                    total.backward()
            loss = loss + (losses * shares).sum()
        with phase("update"):
            norm = state.weights.squared_norm_share().sqrt()
            update(state, StepPlan(LEARNING_RATE), (CLIP_NORM / norm).clamp(max=1.0), ~torch.isfinite(norm))
        return loss

    return iterate


@contextmanager
def watched_gpu(device: torch.device) -> Iterator[dict[str, Any]]:
    """Power and clocks in the block, from nvidia-smi: a GPU at its power limit lowers its clock.

    The mapping is filled when the block ends; it stays empty without a GPU or nvidia-smi.
    """
    found: dict[str, Any] = {}
    if device.type != "cuda":
        yield found
        return
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = [
        *("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"),
        *(f"--loop-ms={EVERY_MILLISECONDS}", *([f"--id=GPU-{identity}"] if identity is not None else [])),
    ]
    with tempfile.TemporaryFile("w+") as lines:  # a pipe that nobody reads would fill up
        try:
            process = subprocess.Popen(command, stdout=lines, stderr=subprocess.DEVNULL)
        except OSError:
            yield found
            return
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            lines.seek(0)
            found.update(gpu_summary(lines.read()))


def gpu_summary(text: str) -> dict[str, Any]:
    """nvidia-smi's lines -> samples and their medians; the first sample is from before the block."""
    samples = []
    for line in text.splitlines()[1:]:
        try:
            values = [float(value) for value in line.split(",")]
        except ValueError:  # "[N/A]": not reported
            continue
        if len(values) == len(GPU_NAMES):
            samples.append(values)
    if not samples:
        return {}
    columns = dict(zip(GPU_NAMES, zip(*samples, strict=True), strict=True))
    medians = {name: statistics.median(column) for name, column in columns.items()}
    return {"every_milliseconds": EVERY_MILLISECONDS, **medians, "samples": {k: list(v) for k, v in columns.items()}}


@contextmanager
def without_padding(active: bool = True) -> Iterator[None]:
    """Heads and embeddings with exactly the vocabulary's rows: only to measure what padding saves."""
    before = model_config.VOCAB_MULTIPLE
    if active:
        model_config.VOCAB_MULTIPLE = 1
    try:
        yield
    finally:
        model_config.VOCAB_MULTIPLE = before


def _loss_of_only_part(kind: str) -> LinearCrossEntropyOp:
    """The loss of a cut vocabulary of which this process has the only part."""

    def unchanged(values: Tensor) -> Tensor:
        return values

    return cut_linear_cross_entropy(kind, Exchange(0, unchanged, unchanged))


@contextmanager
def group_of_one(device: torch.device) -> Iterator[Axis]:
    """An axis with a process group of this process alone: its collectives are called and copy, nothing is sent."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Axis(group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def wait_for(device: torch.device) -> None:
    """Wait until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The name under which `zero2all.estimate.flops` lists its peak."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _allocated_bytes(device: torch.device) -> int:
    """Memory in use; probes that ran kernels leave workspaces of the libraries behind."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _state_bytes(state: TrainState, device: torch.device, before: int) -> int:
    """Weights, masters, gradient and moments."""
    return _allocated_bytes(device) - before if device.type == "cuda" else state_bytes_of(state)


def state_bytes_of(state: TrainState) -> int:
    """The same by the sizes of the tensors."""
    flat = state.weights
    assert isinstance(flat, FlatWeights), "one process is not sharded"
    buffers = {buffer.data_ptr(): buffer.nbytes for buffer in (flat.weights, flat.masters, flat.gradients)}
    return sum(buffers.values()) + sum(part.values.nbytes for part in state.optimizer_tensors().values())


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
