"""A few real steps of a config on random tokens: their time, memory and anatomy. Every measurement of a step is this.

The step is the trainer's own (`train.train_step`): recomputation, offload, CUDA graphs and every optimizer are as in a
run. As there, the host is one step ahead and reads the figures of a step while the next one runs. One process.
"""

import dataclasses
import itertools
import math
import tempfile
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero2all.config import RunConfig
from zero2all.estimate.kernel_groups import COPIES, ELEMENTWISE, LOSS
from zero2all.measure.anatomy import STEP, UPDATE, Anatomy, anatomy_of, inside, read_trace
from zero2all.measure.clock import device_name, timed, wait_for, watched_gpu
from zero2all.model.init import INTO_RESIDUAL
from zero2all.model.z2all import compile_model
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch
from zero2all.parallel.device import pick_device, set_cpu_threads
from zero2all.parallel.world import World
from zero2all.predict.batch import BatchShape
from zero2all.train.build import empty_state, op_context
from zero2all.train.cuda_graph import choose_cuda_graph
from zero2all.train.state import DTYPES, TrainState
from zero2all.train.step_stats import PendingStep
from zero2all.train.step_timer import mark_now, scheduled_garbage_collection, seconds_between
from zero2all.train.train_step import StepPlan, train_step

FIRST_STEPS = 3  # kernels are compiled, states allocated, passes captured
WARM_UP_SECONDS = 1.5
LEAST_STEPS, LATE_STEPS, MOST_STEPS = 3, 2, 200
RATE = 1e-5
DRAWN = 1 << 22


def shaped(config: RunConfig, batch: BatchShape) -> RunConfig:
    """The config with this batch: one step is one `batch`."""
    train = dataclasses.replace(config.train, tokens_per_step=batch.tokens, micro_batch_samples=batch.samples)
    return dataclasses.replace(config, train=train, data=dataclasses.replace(config.data, seq_len=batch.seq_len))


def measure_steps(
    config: RunConfig,
    batch: BatchShape,
    seconds: float,
    anatomy: bool = False,
    warm_up_seconds: float = WARM_UP_SECONDS,
    most_seconds: float = math.inf,
) -> dict[str, Any]:
    """Time, memory and, if asked, the anatomy of steps in this process. After `most_seconds` no further step begins,
    except that two are timed after the first."""
    until = time.perf_counter() + most_seconds
    set_cpu_threads(config.parallel.cpu_threads, None)
    device = pick_device(config.parallel.device)
    live = LiveBytes() if device.type == "cpu" else None
    with live or nullcontext():
        run = ReadyRun(config, batch, device)
        started = time.perf_counter()
        run.steps(1)  # the second, with the states of the optimizer, has the peak
        first = time.perf_counter() - started
        if live is not None and time.perf_counter() < until:
            run.steps(1)
    with scheduled_garbage_collection():
        run.warm_up(warm_up_seconds, until)
        if device.type == "cuda" and not run.is_captured:  # a captured pass allocates only when it is captured
            torch.cuda.reset_peak_memory_stats(device)
        with watched_gpu(device) as gpu:
            found = run.timed_steps(seconds, until)
    peak = _memory(device) if live is None else {"peak_bytes": float(live.peak)}
    parts = _groups(run) if anatomy else {}
    run.state.weights.wait()
    at = timed(found)
    return {
        "device": device_name(device),
        "step_seconds": at.seconds,
        "tokens_per_second": batch.tokens / at.seconds,
        "noise": at.spread,
        "steps": len(found),
        "all_seconds": found,
        "first_step_seconds": first,
        "loss": run.loss,
        "cuda_graph": run.is_captured,
        "ops": run.ops.taken,
        "gpu": gpu,
        "parts": parts,
        **peak,
    }


class ReadyRun:
    """A run that has begun: a model with random weights, and steps on the same random batches."""

    def __init__(self, config: RunConfig, batch: BatchShape, device: torch.device) -> None:
        self.config, self.world = shaped(config, batch), World(device=device)
        self.ops = resolve(self.config.ops, op_context(self.config, device.type, DTYPES[config.train.precision]))
        self.state = _random_state(self.config, self.world, self.ops)
        self.state.micro_batch_samples = batch.samples
        rows = batch.samples * batch.accumulation
        self.state.cuda_graph = choose_cuda_graph(self.config, self.state.model, device, 1, batch.samples, rows)
        self._batches = itertools.cycle([_random_batch(self.config, rows, seed, device) for seed in range(2)])
        self.loss = math.nan
        self.parts: dict[str, float] = {}
        """Seconds of each part of the last step that `steps` made."""

    @property
    def is_captured(self) -> bool:
        """Whether the passes are a CUDA graph."""
        return self.state.cuda_graph is not None and self.state.cuda_graph.is_captured

    def steps(self, count: int) -> None:
        """Make some steps and wait for them."""
        for _ in range(count):
            pending = self._step()
            wait_for(self.world.device)
            ended = pending.result()
            self.loss, self.parts = ended.loss, ended.seconds

    def warm_up(self, seconds: float, until: float = math.inf) -> None:
        """Run until kernels are compiled, passes captured and clocks settled, or until a time (`perf_counter`)."""
        started, steps = time.perf_counter(), 0
        while (now := time.perf_counter()) < until and (steps < FIRST_STEPS or now - started < seconds):
            self.steps(1)
            steps += 1

    def timed_steps(self, seconds: float, until: float = math.inf) -> list[float]:
        """Seconds of each of the next steps, for about this long; of two at least, where it is late."""
        marks, pending, started = [mark_now(self.world.device)], None, time.perf_counter()
        while len(marks) <= MOST_STEPS:
            following = self._step()
            marks.append(mark_now(self.world.device))
            if pending is not None:
                self.loss = pending.result().loss
            pending = following
            now = time.perf_counter()
            if (len(marks) > LEAST_STEPS and now - started >= seconds) or (len(marks) > LATE_STEPS and now >= until):
                break
        assert pending is not None
        self.loss = pending.result().loss
        wait_for(self.world.device)
        return [seconds_between(*pair) for pair in itertools.pairwise(marks)]

    def profiled_steps(self, count: int, trace: Path) -> Anatomy:
        """Some steps under torch's profiler, and where their time went; `trace` opens in ui.perfetto.dev."""
        device, model, optimizer = self.world.device, self.state.model, self.state.optimizer
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        # Kernels of the loss and of the update are known by what the host was doing when it queued them.
        model.head_loss = inside(LOSS, model.head_loss)  # type: ignore[method-assign]
        optimizer.step = inside(UPDATE, optimizer.step)  # type: ignore[method-assign]
        try:
            with profile(activities=activities, record_shapes=True) as profiler:
                for _ in range(count):
                    with record_function(STEP):
                        self.steps(1)
        finally:
            del model.head_loss, optimizer.step
        profiler.export_chrome_trace(str(trace))
        return anatomy_of(read_trace(trace))

    def _step(self) -> PendingStep:
        return train_step(self.state, next(self._batches), 1, self.config, self.world, StepPlan(RATE))


def _random_state(config: RunConfig, world: World, ops: Any) -> TrainState:
    """A new run whose weights are drawn on the device, which is faster than those that a seed gives a run."""
    state = empty_state(config, world, ops)
    small = config.model.matrix_std / math.sqrt(2 * config.model.layers)
    with state.model_tensors() as tensors, torch.no_grad():
        for name, part in tensors.items():
            values = part.values
            if name.endswith("norm.weight"):
                values.fill_(1.0)
            elif name.endswith(".bias"):
                values.zero_()
            else:
                std = config.model.head_std if name == "model/head.weight" else config.model.matrix_std
                _fill(values, small if name.endswith(INTO_RESIDUAL) else std)
    state.weights.publish_masters()
    compile_model(state.model)
    return state


def _fill(values: torch.Tensor, std: float) -> None:
    """Normal values; of a large tensor the same ones again and again: drawing billions on the host takes minutes."""
    flat = values.view(-1)
    piece = torch.empty(min(len(flat), DRAWN), dtype=values.dtype, device=values.device).normal_(0.0, std)
    for start in range(0, len(flat), max(1, len(piece))):
        here = flat[start : start + len(piece)]
        here.copy_(piece[: len(here)])


def _random_batch(config: RunConfig, rows: int, seed: int, device: torch.device) -> Batch:
    """Pinned for a GPU, as the loader does: a copy from other memory would wait for all that is queued."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, config.data.seq_len + 1)
    tokens, channels = torch.randint(0, config.model.vocab_ids, shape, generator=generator), torch.zeros(rows).long()
    if device.type == "cuda":
        tokens, channels = tokens.pin_memory(), channels.pin_memory()
    return Batch(tokens, channels, channels, 0)


def _groups(run: ReadyRun) -> dict[str, float]:
    """Seconds of a step by what its kernels do; idle time included, they add up to the step."""
    with tempfile.TemporaryDirectory(prefix="z2a-trace-") as folder:
        groups = run.profiled_steps(1, Path(folder) / "trace.json").groups
    if run.config.parallel.offload == "none":  # then copies are part of operators
        groups[ELEMENTWISE] += groups.pop(COPIES)
    return groups


def _memory(device: torch.device) -> dict[str, float]:
    """Peak bytes of steps: allocated, reserved by torch, and what the device has in use."""
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_bytes": float(torch.cuda.max_memory_allocated(device)),
        "reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
        "device_bytes": float(total - free),
    }


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that were made while it was active and are alive, now and at most. `resizes`: FSDP
    empties storages instead of dropping them, so all are looked at again and again."""

    def __init__(self, resizes: bool = False) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._resizes = resizes
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live(self) -> int:
        """Bytes alive now."""
        if not self._resizes:
            return self._live
        return sum(storage.nbytes() for known in self._known.values() if (storage := known()) is not None)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Note the storages of the results."""
        del types
        result = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage)
            self._live += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self._live -= size
