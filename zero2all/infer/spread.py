"""A model spread over ranks: what does not fit into one device is generated from, served and evaluated.

    tensor     every rank has some heads and inner units of each block, and the cache of its heads; the parts of the sum
               after the second matrix of a pair are summed, logits are gathered
    pipeline   every rank has some of the blocks, and their cache; hidden states go from rank to rank, one after the
               other: that divides memory, not time

Rank 0 runs the command. What is asked of its engine is told to the other ranks as JSON, and each makes the same call of
an engine of its own: the same requests give the same passes, and all ranks see the same logits and draw the same
tokens. So only passes communicate tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zero2all.common.errors import UsageError, UserError, for_all_ranks
from zero2all.common.progress import say
from zero2all.infer.boundary import Vocabulary
from zero2all.infer.cache import KeyValueBlocks, block_bytes
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.forward import Forward
from zero2all.infer.job import Job, Request, Scores
from zero2all.infer.load import LoadedModel, stage_without_values
from zero2all.infer.sampling import Sampling
from zero2all.infer.weights import (
    KERNEL_BYTES,
    LEAST_PACKED,
    PackedWeight,
    Weight,
    Weights,
    bits_per_weight,
    matrices_of,
    project,
    weights_of,
)
from zero2all.ops.precision import widened
from zero2all.ops.rms_norm import RmsNormOp
from zero2all.parallel.config import DeviceKind, MeshSizes, ParallelConfig
from zero2all.parallel.device import pick_device, set_cpu_threads
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.reduce import gather_into
from zero2all.parallel.world import World, join_world

IDLE_SECONDS = 365 * 86400.0
"""How long a rank waits for the next call: a server may have nothing to do. A rank that dies is noticed at once."""


class SpreadForward(Forward):
    """The passes of one rank. Those of a pipeline that are not the last have no hidden states to give, only rows of the
    right number."""

    def __init__(self, weights: Weights, blocks: KeyValueBlocks, mesh: Mesh) -> None:
        super().__init__(weights, blocks)
        self._tensor, self._stages = mesh.tensor, mesh.pipeline
        self._stage_ranks = list(range(mesh.tensor.rank, mesh.sizes.processes, mesh.tensor.size))
        self._is_last = mesh.pipeline.rank == mesh.pipeline.size - 1

    def begin(self, tokens: Tensor) -> Tensor:
        """Rows of the own ids, summed; or what the stage before sent."""
        table, config = self.weights.embedding, self.weights.config
        if self._stages.rank:
            dtype = torch.promote_types(table.dtype, torch.float32) if config.fp32_residual else table.dtype
            x = table.new_empty(len(tokens), config.hidden_size, dtype=dtype)
            dist.recv(x, self._stage_ranks[self._stages.rank - 1], group=self._stages.group)
            return x
        place = tokens - self._tensor.rank * len(table)
        is_elsewhere = (place < 0) | (place >= len(table))
        x = F.embedding(place.clamp(0, len(table) - 1), table).masked_fill(is_elsewhere.unsqueeze(1), 0.0)
        x = self._tensor.sum(x)
        return widened(x) if config.fp32_residual else x

    def second(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """The parts of the ranks, summed; the bias once."""
        branch = self._tensor.sum(project(x, weight, None).contiguous())
        return branch if bias is None else branch + bias

    def end(self, x: Tensor, branch: Tensor | None, rms_norm: RmsNormOp) -> Tensor:
        """Hidden states, or what the next stage needs."""
        if self._is_last:
            return super().end(x, branch, rms_norm)
        x = x if branch is None else x + branch
        dist.send(x.contiguous(), self._stage_ranks[self._stages.rank + 1], group=self._stages.group)
        return x

    def on_all_ranks(self, values: Tensor) -> Tensor:
        """Those of the last stage."""
        if self._stages.group is not None:
            dist.broadcast(values, self._stage_ranks[-1], group=self._stages.group)
        return values

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, V) in float32, the same on every rank."""
        config, ranks = self.weights.config, self._tensor.size
        found = hidden.new_empty(len(hidden), config.vocab_ids, dtype=torch.float32)
        if self._is_last:
            own = super().logits(hidden)
            rows = config.vocab_rows // ranks
            own = F.pad(own, (0, rows - own.shape[1])) if ranks > 1 else own
            of_ranks = own.new_empty(ranks, *own.shape)
            if ranks > 1:
                gather_into(of_ranks.view(-1), own.contiguous().view(-1), group=self._tensor.group)
                own = of_ranks.transpose(0, 1).flatten(1)
            found = own[:, : config.vocab_ids].contiguous()
        return self.on_all_ranks(found)


def mirrored(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that all ranks call; what it calls itself is not told again."""

    @functools.wraps(method)
    def call(self: SpreadEngine, *values: Any) -> Any:
        if self._is_inside or not self._orders.is_first:
            return method(self, *values)
        self._orders.broadcast([method.__name__, self._number, *map(_told, values)])
        self._is_inside = True
        try:
            return method(self, *values)
        finally:
            self._is_inside = False

    return call


class SpreadEngine(Engine):
    """The engine of one rank."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: EngineSettings | None = None,
        vocabulary: Vocabulary | None = None,
        number: int = 0,
    ) -> None:
        assert loaded.world is not None, "a model on one device has a plain engine"
        settings = settings or EngineSettings()
        self._orders, self._number, self._is_inside = loaded.world, number, False
        self._jobs: dict[int, Job] = {}
        self._mesh = loaded.world.mesh
        super().__init__(loaded, settings, vocabulary)
        for stage in range(self._mesh.pipeline.size if self._orders.is_first else 0):
            found = rank_memory(self, self._mesh.sizes, stage)
            say(
                f"A rank of stage {stage + 1} needs {sum(found) / 1e9:.3f} GB: weights {found.weights / 1e9:.3f}, "
                f"keys and values {found.cache / 1e9:.3f}, working space up to {found.working / 1e9:.3f}"
            )

    def make_forward(self, weights: Weights) -> Forward:
        """Passes that communicate."""
        return SpreadForward(weights, self.blocks, self._mesh)

    def check(self, request: Request) -> None:
        """See `Engine.check`; each rank would ask a process of its own, and one of them may be late."""
        if request.grammar is not None:
            raise UsageError("A model that is spread over ranks follows no grammar. Leave it out, or use one device.")
        super().check(request)

    def submit(self, request: Request) -> Job:
        """Queue a request on all ranks."""
        self.check(request)
        return self._submit(request)

    @mirrored
    def _submit(self, request: Request) -> Job:
        job = super().submit(request)
        self._jobs = {number: each for number, each in self._jobs.items() if each.finish is None} | {job.number: job}
        return job

    def cancel(self, job: Job) -> None:
        """Take a request out on all ranks."""
        self._cancel(job.number)

    @mirrored
    def _cancel(self, number: int) -> None:
        if number in self._jobs:
            super().cancel(self._jobs[number])

    @mirrored
    def step(self) -> list[Job]:
        """One round of work of all ranks."""
        return super().step()

    @mirrored
    def reset(self) -> None:
        """Forget everything, on all ranks."""
        super().reset()

    def score(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], when_done: Callable[[int], None] | None = None
    ) -> list[Scores]:
        """See `Engine.score`."""
        for row, start in zip(rows, starts, strict=True):
            if len(row) > start:
                self.check(Request(row, 0, score_from=start))
        self._when_done = when_done
        return self._score_rows(rows, starts)

    @mirrored
    def _score_rows(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Scores]:
        return super().score(rows, starts, self._when_done if self._orders.is_first else None)

    def distributions(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """See `Engine.distributions`."""
        for row in rows:
            self.check(Request(row, 1))
        return self._distributions(rows)

    @mirrored
    def _distributions(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        return super().distributions(rows)


class RankMemory(NamedTuple):
    """Bytes that a rank needs of its device; CUDA's context and the buffers of NCCL come on top."""

    weights: int
    """With what the engine makes of them: 8 or 4 bits, second copies for a CPU."""
    cache: int
    working: int
    """Of the largest pass, and the compiled kernels of a CPU."""


def rank_memory(engine: Engine, sizes: MeshSizes, stage: int) -> RankMemory:
    """The estimate for each rank of a pipeline stage, from the shapes of the model."""
    own, dtype = engine.forward.weights, engine.blocks.keys.dtype
    model = stage_without_values(engine.model_config, dtype, sizes, stage)
    part = weights_of(model, sizes.tensor)
    matrices = [each for each in matrices_of(part) if isinstance(each, Tensor)]
    weights = sum(each.nbytes for each in (*model.parameters(), model.cos, model.sin))
    if engine.model_config.embedding_norm:
        weights += part.embedding.nbytes
    kernels = 0
    if bits := bits_per_weight(own):
        weights += sum(int(each.numel() * bits / 8) - each.nbytes for each in matrices)
    elif any(isinstance(each, PackedWeight) for each in matrices_of(own)):
        packed = [each for each in matrices if each.numel() >= LEAST_PACKED]
        weights += sum(each.nbytes for each in packed)
        sizes_of_pass = -(-min(engine.max_batch, 32) // 4) + 1  # of new tokens, and one of prompts
        kernels = KERNEL_BYTES * sizes_of_pass * len({each.shape for each in packed})
    config = part.config
    width = max((4 * config.heads + 6 * config.kv_heads) * config.head_size, 3 * config.intermediate_size)
    rows = engine.prefill_tokens * (width + 3 * config.hidden_size) * dtype.itemsize
    logits = 3 * 4 * engine.max_batch * config.vocab_rows
    return RankMemory(weights, (engine.pool.total + 1) * block_bytes(config, dtype), max(rows, logits) + kernels)


def make_engine(
    loaded: LoadedModel, settings: EngineSettings | None = None, vocabulary: Vocabulary | None = None
) -> Engine:
    """The engine of a model, on one device or on several ranks."""
    if loaded.world is None:
        return Engine(loaded, settings, vocabulary)
    number = next(_numbers)
    loaded.world.broadcast(["engine", number, asdict(settings or EngineSettings())])
    return SpreadEngine(loaded, settings, vocabulary, number)


_numbers = itertools.count()


def follow(loaded: LoadedModel) -> None:
    """On the other ranks: do what rank 0 says, until it says no more."""
    assert loaded.world is not None
    engines = dict[int, SpreadEngine]()
    while (order := loaded.world.broadcast(None)) is not None:
        name, number, *values = order
        if name == "engine":
            engines[number] = SpreadEngine(loaded, EngineSettings(**values[0]), None, number)
            continue
        call = getattr(engines[number], name)
        assert hasattr(call, "__wrapped__"), f"{name} is no call that all ranks make"
        try:
            call(*map(_request, values))
        except UsageError:  # rank 0 says it
            continue


def _told(value: Any) -> Any:
    return {**asdict(value), "end_ids": sorted(value.end_ids)} if isinstance(value, Request) else value


def _request(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    value = {**value, "sampling": Sampling(**value["sampling"]), "end_ids": frozenset(value["end_ids"])}
    return Request(**value)


def lead_or_follow(
    tensor: int,
    pipeline: int,
    device: DeviceKind,
    load: Callable[[World], LoadedModel],
    command: Callable[[World], int | None],
) -> int | None:
    """In a rank: run the command, or do what rank 0 does."""
    config = ParallelConfig(tensor=tensor, pipeline=pipeline, device=device, timeout_seconds=IDLE_SECONDS)
    set_cpu_threads(None, None)
    with join_world(pick_device(device, "--device"), config) as world:
        if not world.is_first:
            try:
                follow(load(world))
            except UserError as error:  # rank 0 says it
                raise for_all_ranks(error) from error
            return None
        code = command(world)
        world.broadcast(None)
        return code
