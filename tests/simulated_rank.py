"""One step of rank 0 of N processes, in this process alone, to compare the formulas of the plan with. Collectives send
nothing, and tensors have shapes but no values (not with experts and ZeRO-3, which depend on values)."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zero2all.config import RunConfig
from zero2all.estimate.communication import communication_per_step
from zero2all.estimate.memory import estimate_memory
from zero2all.measure.short_run import LiveBytes
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch, rank_rows
from zero2all.parallel.check import check_spread
from zero2all.parallel.mesh import Mesh, axis_length, make_mesh
from zero2all.parallel.world import World
from zero2all.train import build
from zero2all.train.build import empty_state, op_context
from zero2all.train.micro_batch import least_samples, memory_settings
from zero2all.train.state import DTYPES, TrainState
from zero2all.train.step_stats import SCALARS
from zero2all.train.train_step import StepPlan, train_step
from zero2all.train.weights import FlatWeights

SCATTERS = ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
GATHERS = ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_")
GIVEN_AT = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), ("all-reduce", 0)),
    **dict.fromkeys(SCATTERS, ("reduce-scatter", 1)),
    **dict.fromkeys(GATHERS, ("all-gather", 1)),
    **dict.fromkeys(("alltoall_", "alltoall_base_"), ("all-to-all", 1)),
    **{"broadcast_": ("all-gather", 0), "reduce_": ("reduce-scatter", 0), "send": ("send", 0)},
}
"""torch's operator -> its kind, and which of its arguments this process hands over. A bucket whose owners have ranges
of different length is scattered by a reduce to each owner, and gathered by a broadcast from each."""


@dataclass(frozen=True)
class Simulated:
    """What rank 0 needed and handed over in a step, counted and by formula."""

    state_bytes: int  # between two steps
    expected_state_bytes: float
    peak_bytes: int
    expected_peak_bytes: float
    given: dict[tuple[str, str], tuple[int, float]]
    """By collective and axes: bytes that rank 0 hands to the collective, counted and by formula."""


def simulate_ranks(config: RunConfig, processes: int) -> Simulated:
    """Run rank 0's part of one step. Float8, offload, and Muon with matrices that are cut are not simulated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = check_spread(config, processes)
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        return _simulate(config, World(0, processes, torch.device("cpu"), make_mesh(sizes)))
    finally:
        dist.destroy_process_group()


def _simulate(config: RunConfig, world: World) -> Simulated:
    sharded = config.parallel.zero == 3 and world.mesh.shard.size > 1
    ops = resolve(config.ops, op_context(config, "cpu", DTYPES[config.train.precision], sharded))
    samples = least_samples(config, world)
    memory, sent = LiveBytes(resizes=sharded), CollectiveBytes(world.mesh)
    # Which tokens go to which expert depends on values, and FSDP reads some too: these compute with real ones.
    fake = [] if sharded or config.model.moe.experts else [FakeTensorMode(allow_non_fake_inputs=True)]
    modes: list[AbstractContextManager[Any]] = [*fake, memory]
    with ExitStack() as entered:  # whatever happens, none of them stays
        with _entering(modes, entered):
            state = empty_state(config, world, ops)
        state.micro_batch_samples = samples
        state.weights.publish_masters()
        state.weights.wait()
        batch = _batch(config, world)
        with sent:
            train_step(state, batch, 1, config, world, StepPlan(config.optim.lr_max))
            state.weights.wait()
        del batch
    settings = memory_settings(config, ops, world.mesh, samples)
    expected = estimate_memory(config.model, settings)
    experts = config.model.expert_layers * config.model.moe.experts
    figures = len(SCALARS) + 2 + 2 * config.samples_per_step + (2 * world.size if world.size > 1 else 0) + experts
    formula: Counter[tuple[str, str]] = Counter()
    for one in communication_per_step(config.model, settings, figures, *_buffers(state)):
        formula[one.collective, sent.same_as.get(one.axis, one.axis)] += one.given  # type: ignore[assignment]
    given = {key: (sent.by_axes[key], float(formula[key])) for key in sorted({*formula, *sent.by_axes})}
    return Simulated(memory.live, expected.state, memory.peak, expected.total, given)


@contextmanager
def _entering(modes: list[AbstractContextManager[Any]], entered: ExitStack) -> Iterator[None]:
    """Enter the modes once the model is cut, right before its memory is allocated."""

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def enter_and_call(*arguments: Any, **options: Any) -> Any:
            while modes:
                entered.enter_context(modes.pop(0))
            return function(*arguments, **options)

        return enter_and_call

    with patch.multiple(build, shard_model=before(build.shard_model), rope_tables=before(build.rope_tables)):
        yield


def _batch(config: RunConfig, world: World) -> Batch:
    """Rows of the shape that the process reads; under FakeTensorMode they have no values."""
    first, own, rows = rank_rows(config.samples_per_step, world.mesh.batch.rank, world.mesh.batch.size)
    length, channels = config.data.seq_len, torch.zeros(rows, dtype=torch.long)
    tokens = torch.zeros(rows, length + 1, dtype=torch.long)
    documents = torch.zeros(rows, length + 1, dtype=torch.long) if config.data.document_mask else None
    batch = Batch(tokens, channels, channels, 0, document_ids=documents, samples=own, first_row=first)
    return dataclasses.replace(batch, step_samples=config.samples_per_step)


def _buffers(state: TrainState) -> tuple[Counter[str], Counter[str]]:
    """The values of the flat buffers by spread, with their padding, and those of the own ranges; FSDP has none."""
    found: Counter[str] = Counter()
    owned: Counter[str] = Counter()
    if not isinstance(state.weights, FlatWeights):
        return found, owned
    for bucket, own in zip(state.weights.plan.buckets, state.weights.own, strict=True):
        found[bucket.spread] += bucket.span.stop - bucket.span.start
        owned[bucket.spread] += own.stop - own.start
    return found, owned


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes that this process hands to collectives, by kind and by the axes of the mesh they go over."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.by_axes: Counter[tuple[str, str]] = Counter()
        self._axes: dict[str, str] = {}
        self.same_as: dict[str, str] = {}
        """Products of axes with the same processes have one group: the name under which it is counted."""
        for axes, group in mesh.groups.items() if mesh is not None else ():
            assert mesh is not None
            name = self._axes.setdefault(group.group_name, axes_of(mesh, axes))  # dense axes come first
            self.same_as[axes_of(mesh, axes)] = name

    @property
    def bytes(self) -> dict[str, int]:
        """By kind alone."""
        found: Counter[str] = Counter()
        for (kind, _), count in self.by_axes.items():
            found[kind] += count
        return dict(found)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Count, and go on."""
        del types
        if operation.namespace == "c10d" and operation._opname in GIVEN_AT:
            kind, at = GIVEN_AT[operation._opname]
            size = sum(tensor.nbytes for tensor in _tensors(arguments[at]))
            if operation._opname == "broadcast_" and arguments[2] != 0:
                size = 0  # another process has the values; this one is rank 0 of every group
            # Stages send over groups of two, which are not those of the mesh.
            self.by_axes[kind, "pipeline" if kind == "send" else self._axes_of_group(arguments)] += size
        return operation(*arguments, **(keywords or {}))

    def _axes_of_group(self, arguments: Any) -> str:
        objects = (argument for argument in arguments if isinstance(argument, torch.ScriptObject))
        groups = (dist.ProcessGroup.unbox(each) for each in objects if "ProcessGroup" in str(each._type()))
        return next((self._axes.get(group.group_name, "") for group in groups), "")


def axes_of(mesh: Mesh, names: tuple[str, ...]) -> str:
    """A product of axes, by those that have more than one process."""
    return " x ".join(name for name in names if axis_length(mesh.sizes, name) > 1)


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors(value)]
