"""Where a run computes, and how it is spread over processes."""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class ParallelConfig:
    """The devices of a run and the CPU threads it may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA when there is a card, else the CPU."""
    processes: PositiveInt | Literal["auto"] = "auto"
    """Processes on this machine; auto: one per GPU, or one without a GPU. Under torchrun its own number is used."""
    zero: Annotated[int, Range(minimum=0, maximum=3)] = 0
    """What is cut over the `shard` processes: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP2)."""
    replicate: PositiveInt | Literal["auto"] = "auto"
    """Copies of the model. auto: all processes with zero 0, else as many as `shard` leaves."""
    shard: PositiveInt | Literal["auto"] = "auto"
    """Processes that share one copy. auto: 1 with zero 0, else as many as `replicate` leaves."""
    pipeline: PositiveInt = 1
    """Stages: processes that each have some blocks of the model."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order of passes in a pipeline (`zero2all.parallel.schedule`)."""
    chunks: PositiveInt = 1
    """With schedule interleaved: stages per process, 2 or more."""
    context: PositiveInt = 1
    """Processes that share a sequence."""
    context_method: Literal["auto", "ulysses", "gather"] = "auto"
    """ulysses: for attention, each gets whole sequences of some heads; gather: keys and values of the whole sequence.
    auto: ulysses where `context` divides the heads."""
    tensor: PositiveInt = 1
    """Processes that share every matrix."""
    copy_kv_heads: bool = False
    """With more tensor processes than kv heads, let several of them have a copy of each; false: refuse that."""
    expert: PositiveInt = 1
    """Processes that share the experts; divides shard x context x tensor."""
    bucket_mb: PositiveFloat = 128.0
    """Megabytes of gradients that are sent at once, while the backward pass computes the next ones."""
    overlap: bool = True
    """Send gradients during the backward pass; false: after it, to see what the overlap saves."""
    offload: Literal["none", "optimizer", "optimizer_disk", "weights"] = "none"
    """optimizer: its states and the master weights are in host memory and updated there; optimizer_disk: in files on a
    fast disk; weights: also the weights, which come to the device block by block."""
    offload_one_step_late: bool = False
    """With offload: the update of a step overlaps the whole next step, which still computes with the old weights."""
    offload_folder: str | None = None
    """For optimizer_disk; None: the folder of the run."""
    expandable_segments: bool = True
    """Let segments of GPU memory grow instead of allocating new ones: less fragmentation with tensors of changing
    sizes. PYTORCH_ALLOC_CONF, where it is set, takes precedence."""
    join_seconds: PositiveFloat = 120.0
    """How long the processes wait for each other at the start; then those that did not come are named."""
    timeout_seconds: PositiveFloat = 1800.0
    """How long a process waits for the others in a collective before it gives up."""
    cpu_threads: PositiveInt | None = None
    """CPU threads for the arithmetic. None takes all cores when a run starts, and the same number again on resume:
    float sums depend on the number of threads, so an exact resume needs the same one."""

    def problems(self, place: str) -> list[Problem]:
        """Fields that are valid alone but do not fit together."""
        found = []
        if self.zero == 0 and self.shard not in (1, "auto"):
            found.append(Problem(f"{place}.shard", self.shard, f"1 or auto, because {place}.zero is 0: nothing is cut"))
        if self.offload != "none" and self.zero == 3:
            found.append(Problem(f"{place}.offload", self.offload, f"none with {place}.zero 3, or zero 0, 1 or 2"))
        if self.offload != "optimizer_disk" and self.offload_folder is not None:
            expected = f"null, because {place}.offload is {self.offload}: only optimizer_disk uses a folder"
            found.append(Problem(f"{place}.offload_folder", self.offload_folder, expected))
        if self.offload == "none" and self.offload_one_step_late:
            found.append(Problem(f"{place}.offload_one_step_late", True, f"false, because {place}.offload is none"))
        if self.schedule == "interleaved" and self.chunks == 1:
            found.append(Problem(f"{place}.chunks", 1, f"2 or more, because {place}.schedule is interleaved"))
        if self.schedule != "interleaved" and self.chunks > 1:
            found.append(
                Problem(
                    f"{place}.chunks",
                    self.chunks,
                    f"1 with {place}.schedule {self.schedule}; chunks are for schedule interleaved",
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
        """The same as far as they can be told: their product may be another number."""
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
            return f"Here: replicate {left} or auto."
        pairs = [f"{left // shard} x {shard}" for shard in range(1, left + 1) if left % shard == 0]
        return f"Here, as replicate x shard: {', '.join(pairs)}."

    def size_problems(self, sizes: MeshSizes, processes: int) -> list[str]:
        """Why this many processes cannot form a mesh of these sizes."""
        found = []
        if sizes.processes != processes:
            others = [name for name in ("pipeline", "context", "tensor") if getattr(self, name) > 1]
            lengths = (sizes.replicate, sizes.shard, *(getattr(self, name) for name in others))
            found.append(
                f"parallel.replicate {self.replicate} and parallel.shard {self.shard} with parallel.zero {self.zero}"
                f"{''.join(f', {name} {getattr(self, name)}' for name in others)} make "
                f"{' x '.join(map(str, lengths))} = {sizes.processes} processes, but the run has {processes}. Their "
                f"product must be the number of processes; auto takes what is left. {self._sizes_that_work(processes)}"
            )
        inner = sizes.shard * self.context * self.tensor
        if inner % self.expert:
            found.append(
                f"parallel.expert {self.expert} does not divide shard x context x tensor = {sizes.shard} x "
                f"{self.context} x {self.tensor} = {inner}, the processes that share the experts of a copy. "
                f"Choose a divisor, or parallel.zero 1, which makes shards of the processes."
            )
        return found
