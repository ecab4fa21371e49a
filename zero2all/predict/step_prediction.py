"""`z2a perf predict`: time, memory, energy and cost of a run before it runs, from a profile.

The formulas are in `estimate` (`step`, `memory`); here a config, a batch and a machine become their inputs.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from zero2all.common.errors import UsageError
from zero2all.config import RunConfig
from zero2all.estimate.flops import WHOLE_FORWARD, peak_flops
from zero2all.estimate.gpus import device_of
from zero2all.estimate.kernel_groups import ATTENTION, COMMUNICATION, COPIES, ELEMENTWISE, GEMM, LOSS, OPTIMIZER
from zero2all.estimate.machine import Machine
from zero2all.estimate.memory import MemoryEstimate, MemorySettings, estimate_memory
from zero2all.estimate.step import PassOrder, StepTime, pass_costs, predict_step
from zero2all.ops.registry import Ops, assume_gpu, resolve
from zero2all.parallel.check import spread_problems
from zero2all.parallel.config import MeshSizes
from zero2all.predict.batch import BatchShape, own_batch
from zero2all.train.build import op_context
from zero2all.train.cuda_graph import is_worth_it, why_no_cuda_graph
from zero2all.train.micro_batch import stage_settings
from zero2all.train.state import DTYPES

IDLE = "idle"


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to need."""

    batch: BatchShape
    machine: Machine
    settings: MemorySettings
    step: StepTime
    memory: MemoryEstimate  # of the fullest process
    components: dict[str, float]  # seconds of a step by what the device does, as an anatomy measures them
    budget_tokens: int  # of the whole run; of one group of several

    @property
    def peak_bytes(self) -> float:
        """Allocated at the peak of a step, per process; saving a checkpoint may need more."""
        return self.memory.step_peak

    @property
    def reserved_bytes(self) -> float:
        """What the allocator takes from the driver."""
        return self.memory.reserved

    @property
    def needed_bytes(self) -> float:
        """Of the device, with the CUDA context and NCCL."""
        extra = ("cuda_context", "nccl") if self.settings.processes > 1 else ("cuda_context",)
        return self.reserved_bytes + sum(self.machine.overhead.get(name, 0.0) for name in extra)

    @property
    def fits(self) -> bool:
        """Whether the device has that much."""
        return self.needed_bytes <= self.machine.memory_bytes

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return -(-self.budget_tokens // self.step.tokens)

    @property
    def mfu(self) -> dict[str, float]:
        """By convention; empty where the peak of the device is not known."""
        is_known = self.machine.source != "measured" or peak_flops(self.machine.name) is not None
        return self.step.mfu if is_known else {}

    @property
    def run_seconds(self) -> float:
        """All steps of the run, without failures, checkpoints and evaluations."""
        return self.steps * self.step.estimate

    @property
    def joules(self) -> float:
        """Energy of all devices, at the power that was measured, or that the data sheet allows."""
        return self.run_seconds * self.machine.watts * self.settings.processes

    @property
    def cost(self) -> float | None:
        """Of all devices; None: no price is known."""
        if self.machine.price_per_hour is None:
            return None
        return self.run_seconds / 3600 * self.machine.price_per_hour * self.settings.processes

    def as_json(self) -> dict[str, Any]:
        """As JSON values, in seconds, bytes and joules."""
        names = ("components", "fits", "peak_bytes", "reserved_bytes", "needed_bytes", "run_seconds", "joules", "cost")
        return {
            "machine": self.machine.name,
            "source": self.machine.source,
            "batch": str(self.batch),
            "precision": self.settings.precision,
            "processes": self.settings.processes,
            "seconds": {"lower": self.step.lower, "estimate": self.step.estimate, "upper": self.step.upper},
            "tokens_per_step": self.step.tokens,
            "interval": self.step.interval,
            "tokens_per_second": self.step.tokens_per_second,
            "mfu": self.mfu,
            "steps": self.steps,
            "parts": [dataclasses.asdict(part) for part in self.step.parts],
            "memory_parts": [dataclasses.asdict(part) for part in self.memory.parts],
            **{name: getattr(self, name) for name in names},
        }


def predict(config: RunConfig, batch: BatchShape | None, machine: Machine, ops: Ops, sizes: MeshSizes) -> Prediction:
    """The prediction of a config; `batch` is that of one process of the batch axes, None: its share of the config's."""
    placed, batch = shaped(config, batch, sizes)
    # A measured machine is this one, whose libraries are known.
    workspace = None if machine.source == "measured" else machine.overhead.get("workspace", 0.0)
    settings, *others = stage_settings(placed, ops, sizes, batch.samples, workspace)
    device = torch.device("cuda" if machine.multiprocessors else "cpu")
    captured = why_no_cuda_graph(placed, device, sizes.processes, ops) is None and placed.train.cuda_graph != "off"
    if captured and placed.train.cuda_graph == "auto":
        captured = is_worth_it(placed, device_of(machine.name), settings.tokens, ops)
    captured = captured and (sizes.processes == 1 or batch.accumulation > 1)
    parallel = config.parallel
    tokens = placed.train.tokens_per_step // config.groups
    order = PassOrder(parallel.schedule, parallel.chunks, captured)
    step = predict_step(config.model, settings, machine, order, tokens)
    return Prediction(
        batch=batch,
        machine=machine,
        settings=settings,
        step=step,
        memory=max((estimate_memory(config.model, each) for each in (settings, *others)), key=lambda one: one.total),
        components=components_of(step, config, settings, machine),
        budget_tokens=config.train.steps * config.train.tokens_per_step // config.groups,
    )


def shaped(config: RunConfig, batch: BatchShape | None, sizes: MeshSizes) -> tuple[RunConfig, BatchShape]:
    """The config with this batch in each process of the batch axes: one step is `batch` in all of them. None: they
    share the tokens of the config's step."""
    replicas = sizes.replicate * sizes.shard * config.groups
    tokens = config.train.tokens_per_step if batch is None else batch.tokens * replicas
    batch = batch or own_batch(config, replicas)
    train = dataclasses.replace(config.train, tokens_per_step=tokens, micro_batch_samples=batch.samples)
    data = dataclasses.replace(config.data, seq_len=batch.seq_len)
    return dataclasses.replace(config, train=train, data=data), batch


def components_of(step: StepTime, config: RunConfig, settings: MemorySettings, machine: Machine) -> dict[str, float]:
    """The parts of a step in the groups that an anatomy measures: the products of the head are products, and what is
    recomputed belongs to what it computes."""
    width = DTYPES[config.train.precision].itemsize
    logits = float(settings.tokens * settings.held(config.model).vocab_rows * width)
    loss = min(step.seconds("loss"), settings.passes * machine.operator_seconds("linear_cross_entropy", logits))
    found = {
        GEMM: step.seconds("matmuls") + step.seconds("loss") - loss,
        ATTENTION: step.seconds("attention"),
        ELEMENTWISE: step.seconds("element-wise"),
        LOSS: loss,
        OPTIMIZER: step.seconds("optimizer"),
    }
    again = step.seconds("recompute")
    if again:
        forward = pass_costs(config.model, settings, machine).forward
        whole = settings.recompute in WHOLE_FORWARD
        shares = {name: cost.seconds for name, cost in forward.items() if whole or name == "element-wise"}
        for name, seconds in shares.items():
            found[GEMM if name == "matmuls" else name] += again * seconds / sum(shares.values())
    found[COMMUNICATION] = sum(part.estimate for part in step.parts if part.name.startswith("communication"))
    found[COPIES] = sum(part.estimate for part in step.parts if part.name.startswith("offload"))
    found[IDLE] = step.seconds("host") + step.seconds("bubble")
    return found


def operators_for(config: RunConfig, machine: Machine, seq_len: int) -> Ops:
    """The operators on this machine; on a cluster that is not at hand, those that a GPU with torch and Triton has."""
    has_gpu = torch.cuda.is_available()
    if has_gpu or not machine.multiprocessors:
        kind = "cuda" if machine.multiprocessors else "cpu"
        context = op_context(config, kind, DTYPES[config.train.precision])
        return resolve(config.ops, dataclasses.replace(context, seq_len=seq_len))
    return assume_gpu(config.ops, config.data.document_mask)


def check_asked(config: RunConfig, batch: BatchShape | None, machine: Machine | None, gpus: int) -> MeshSizes:
    """The layout of the processes; UsageError with everything that is wrong at once."""
    problems: list[str] = []
    sizes = config.parallel.asked_sizes(gpus)
    placed, batch = shaped(config, batch, sizes)
    if batch.seq_len > config.model.max_seq_len:
        problems.append(
            f"sequences of {batch.seq_len} tokens are longer than model.max_seq_len ({config.model.max_seq_len})"
        )
    if batch.seq_len < 1 or batch.tokens > 1 << 40:
        problems.append(f"a batch of {batch.tokens} tokens is not a batch")
    if machine is not None and gpus > machine.most_ranks:
        problems.append(f"{machine.name} joins at most {machine.most_ranks} processes, and --gpus is {gpus}")
    problems += config.parallel.size_problems(sizes, gpus)
    problems += spread_problems(placed, sizes)
    if problems:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise UsageError(f"This cannot be predicted; problems: {len(problems)}.\n{lines}")
    return sizes
