"""Where a run computes, and how it is spread over processes."""

import math
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Literal

from zero2all.common.errors import UsageError
from zero2all.common.schema import PositiveFloat, PositiveInt, Problem, Range


@dataclass(frozen=True)
class MeshSizes:
    """Processes along each axis of the mesh (`zero2all.parallel.mesh`)."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Divides shard x context x tensor."""

    @property
    def processes(self) -> int:
        """All processes."""
        return math.prod(astuple(self)) // self.expert


DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class ParallelConfig:
    """The devices of a run and the CPU threads it may use."""

    device: DeviceKind = "auto"
    """auto: CUDA if there is a GPU, else the CPU."""
    processes: PositiveInt | Literal["auto"] = "auto"
    """Processes on one machine; auto: one per GPU, or one without a GPU. torchrun's own number takes precedence."""
    zero: Annotated[int, Range(minimum=0, maximum=3)] = 0
    """What `shard` processes share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights (FSDP2)."""
    replicate: PositiveInt | Literal["auto"] = "auto"
    """Copies of the model. auto: all processes with zero 0, else processes / shard."""
    shard: PositiveInt | Literal["auto"] = "auto"
    """Processes that share one copy. auto: 1 with zero 0, else processes / replicate."""
    pipeline: PositiveInt = 1
    """Pipeline stages: each process has some blocks of the model."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order of forward and backward passes in a pipeline."""
    chunks: PositiveInt = 1
    """With schedule interleaved: stages per process, 2 or more."""
    context: PositiveInt = 1
    """Processes that split every sequence."""
    context_method: Literal["auto", "ulysses", "gather"] = "auto"
    """How attention sees the whole sequence. ulysses: each process gets all positions of some heads; gather: each
    gathers all keys and values; auto: ulysses if `context` divides the heads."""
    tensor: PositiveInt = 1
    """Processes that split every matrix."""
    copy_kv_heads: bool = False
    """Allow more tensor processes than kv heads: several processes then have a copy of each kv head."""
    expert: PositiveInt = 1
    """Processes that divide the experts among them; must divide shard x context x tensor."""
    bucket_mb: PositiveFloat = 128.0
    """Megabytes of gradients sent at once, while the backward pass computes the next ones."""
    overlap: bool = True
    """Send gradients during the backward pass; false: after it."""
    compress: Literal["none", "bf16"] = "none"
    """How gradients are summed in every step. none: in float32; bf16: rounded to bfloat16, half the bytes."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: keep and update optimizer states and master weights in host memory."""
    expandable_segments: bool = True
    """Let segments of GPU memory grow, which reduces fragmentation. PYTORCH_ALLOC_CONF takes precedence if it is
    set."""
    join_seconds: PositiveFloat = 300.0
    """How long the processes wait for each other at the start before the run fails. After 10 s they already say who is
    missing and why, so a mistake is seen at once, and a machine that is slow to start is still waited for."""
    ports: str = ""
    """Ports that other machines reach, for what listens besides --rendezvous (resilience.peers), such as 30000-30100;
    empty: any. gloo and NCCL take theirs from the system's range."""
    timeout_seconds: PositiveFloat = 1800.0
    """How long a process waits for the others in a collective before it gives up."""
    cpu_threads: PositiveInt | None = None
    """CPU threads of each process for computation. null takes OMP_NUM_THREADS, or the cores divided by the processes on
    this machine, and the same number again on resume, because the last bits of sums depend on it."""

    @property
    def free_ports(self) -> Sequence[int]:
        """`ports`, as numbers; 0 is any."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1) if self.ports else (0,)

    def problems(self, place: str) -> list[Problem]:
        """Fields that are valid alone but do not fit together."""
        found = []
        ends = re.fullmatch(r"(\d{1,5})-(\d{1,5})", self.ports, re.ASCII)
        if self.ports and not (ends and 0 < int(ends[1]) <= int(ends[2]) < 1 << 16):
            found.append(Problem(f"{place}.ports", self.ports, "FIRST-LAST, such as 30000-30100, or empty"))
        if self.zero == 0 and self.shard not in (1, "auto"):
            found.append(Problem(f"{place}.shard", self.shard, f"1 or auto, because {place}.zero is 0"))
        if self.offload != "none" and self.zero == 3:
            found.append(
                Problem(f"{place}.offload", self.offload, f"none, because {place}.zero is 3 (0, 1 or 2 can offload)")
            )
        if self.schedule == "interleaved" and self.chunks == 1:
            found.append(Problem(f"{place}.chunks", 1, f"2 or more, because {place}.schedule is interleaved"))
        if self.schedule != "interleaved" and self.chunks > 1:
            found.append(
                Problem(
                    f"{place}.chunks",
                    self.chunks,
                    f"1, because {place}.schedule is {self.schedule}: only interleaved uses chunks",
                )
            )
        return found

    @property
    def every_pass_communicates(self) -> bool:
        """Whether processes exchange something in every pass, not only the gradients in the last one of a step."""
        return self.zero >= 2 or max(self.pipeline, self.context, self.tensor, self.expert) > 1

    def sizes(self, processes: int) -> MeshSizes:
        """The sizes of all axes for this many processes; UsageError where they do not fit."""
        sizes = self.asked_sizes(processes)
        found = self.size_problems(sizes, processes)
        if found:
            raise UsageError(" ".join(found))
        return sizes

    def asked_sizes(self, processes: int) -> MeshSizes:
        """The sizes as asked for, without a check: their product may be another number."""
        of_model = self.pipeline * self.context * self.tensor
        asked_replicate = None if self.replicate == "auto" else self.replicate
        asked_shard = 1 if self.zero == 0 else None if self.shard == "auto" else self.shard
        left = processes // of_model
        shard = max(1, left // (asked_replicate or 1)) if asked_shard is None else asked_shard
        replicate = max(1, left // shard) if asked_replicate is None else asked_replicate
        return MeshSizes(self.pipeline, replicate, shard, self.context, self.tensor, self.expert)

    def _sizes_that_work(self, processes: int) -> str:
        """What replicate and shard could be with the other axes as they are."""
        of_model = self.pipeline * self.context * self.tensor
        if processes % of_model:
            return f"pipeline x context x tensor = {of_model} must divide {processes}."
        left = processes // of_model
        if self.zero == 0:
            return f"Set replicate to {left} or auto."
        pairs = [f"{left // shard} x {shard}" for shard in range(1, left + 1) if left % shard == 0]
        return f"Possible values of replicate x shard: {', '.join(pairs)}."

    def size_problems(self, sizes: MeshSizes, processes: int) -> list[str]:
        """Why this many processes cannot form a mesh of these sizes."""
        found = []
        if sizes.processes != processes:
            others = [name for name in ("pipeline", "context", "tensor") if getattr(self, name) > 1]
            lengths = (sizes.replicate, sizes.shard, *(getattr(self, name) for name in others))
            axes = ", ".join([f"zero {self.zero}", *(f"{name} {getattr(self, name)}" for name in others)])
            found.append(
                f"parallel.replicate {self.replicate} and parallel.shard {self.shard} (with {axes}) make "
                f"{' x '.join(map(str, lengths))} = {sizes.processes} processes, but the run has {processes}. Their "
                f"product must be the number of processes. {self._sizes_that_work(processes)}"
            )
        inner = sizes.shard * self.context * self.tensor
        if inner % self.expert:
            divisor = f"a divisor of {inner}" if self.zero else f"a divisor of {inner}, or set parallel.zero to 1"
            found.append(
                f"parallel.expert {self.expert} does not divide shard x context x tensor = {sizes.shard} x "
                f"{self.context} x {self.tensor} = {inner}, the number of processes that share the experts "
                f"of one copy. Choose {divisor}."
            )
        return found
