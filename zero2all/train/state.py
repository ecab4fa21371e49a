"""Everything that changes while a run trains, in one object that a test can build without a GPU.

There is no random state to save: dropout is seeded from (seed, step, rank), and the data order is a pure function of
the position. What a checkpoint must hold is therefore the master weights, the optimizer's moments, the loss scale of
float16, a few counters, and the state of the guards.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from zero2all.config.training import AnnealConfig, OptimConfig
from zero2all.diloco.outer_optimizer import OuterOptimizer
from zero2all.model.moe import routers
from zero2all.model.z2all import Z2all
from zero2all.packed.mixture import TrainingData
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.parameter_table import router_biases
from zero2all.parallel.parts import TensorPart
from zero2all.parallel.pipeline import Pipeline
from zero2all.parallel.world import World
from zero2all.train.cuda_graph import CudaGraphPasses
from zero2all.train.optimizers.base import Optimizer
from zero2all.train.optimizers.factory import build_optimizer, cut_of
from zero2all.train.optimizers.flat_adamw import FlatAdamW, HostAdamW
from zero2all.train.weights import FlatWeights, MasterLayout, ShardedWeights, Weights, frozen_parts

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
SMALLEST_SCALE = 2.0**-4
GROWTH_STEPS = 1000


class LossScale:
    """Dynamic loss scaling for float16, whose smallest number is 6e-8: most gradients would be zero without it.

    The loss is multiplied by the scale, the gradient divided by it. Where something overflowed the update is skipped
    and the scale halved; after GROWTH_STEPS good steps it is doubled. Both numbers live on the device and in the
    checkpoint.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """For the checkpoint; live."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    @torch.no_grad()
    def after(self, overflowed: Tensor, refused: Tensor) -> None:
        """Update the scale after a step, by bools on the device. A step refused without an overflow does not count."""
        good = torch.where(overflowed, 0, self.good_steps + (~refused).long())
        grows = good >= GROWTH_STEPS
        factor = torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0))
        self.scale.mul_(factor).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
        self.good_steps.copy_(torch.where(grows, 0, good))


@dataclass
class TrainState:
    """The run after `step` steps."""

    model: Z2all
    weights: Weights
    optimizer: Optimizer | FlatAdamW | HostAdamW
    micro_batch_samples: int = 1
    """Rows of one pass at data.seq_len."""
    loss_scale: LossScale | None = None
    cuda_graph: CudaGraphPasses | None = None
    """Runs the passes where they are captured; None: they run eagerly."""
    pipeline: Pipeline | None = None
    """Runs the passes where other processes have the other blocks of the model."""
    outer: OuterOptimizer | None = None
    """Exchanges weights with other groups."""
    step: int = 0
    tokens: int = 0
    data: TrainingData = field(init=False, repr=False)
    """Opened at `tokens` or before; opened again after a rollback and for an anneal."""
    anneal: AnnealConfig | None = None
    last_step: int = 0
    """The last step of the run, with those of an anneal."""
    stage: str = ""
    """The name of the stage that the last step belonged to; empty before the first step."""
    copied: torch.cuda.Event | None = None
    """When a GPU has copied the state to memory; it may not change before."""

    @contextmanager
    def tensors(self) -> Iterator[dict[str, TensorPart]]:
        """Between two steps, all tensors of a checkpoint as 'group/name'. A checkpoint can be loaded into them; call
        `resume_from` after the context then."""
        with self.model_tensors() as masters:
            found = {**masters, **self.optimizer_tensors()}
            yield found if self.outer is None else {**found, **self.outer.tensors()}

    @contextmanager
    def model_tensors(self) -> Iterator[dict[str, TensorPart]]:
        """The master weights, what is frozen and the biases of routers, likewise."""
        self.wait_for_copy()
        with self.weights.masters_between_steps() as masters:
            parts = {**masters, **frozen_parts(self.model, self.weights.mesh), **router_biases(self.model)}
            yield {f"model/{name}": value for name, value in parts.items()}

    def optimizer_tensors(self) -> dict[str, TensorPart]:
        """Moments, the number of updates, and the loss scale."""
        tensors = {f"optimizer/{name}": value for name, value in self.optimizer.state_tensors().items()}
        if self.loss_scale is not None:
            for name, value in self.loss_scale.tensors().items():
                tensors[f"optimizer/loss_scale/{name}"] = TensorPart.whole(value)
        return tensors

    def wait_for_copy(self) -> None:
        """Before a change: let the GPU wait for the end of a copy to memory. The host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def tokens_at_end(self, tokens_per_step: int) -> int:
        """Counted from here, because an earlier attempt may have had another train.tokens_per_step."""
        return self.tokens + (self.last_step - self.step) * tokens_per_step

    def counters(self) -> dict[str, int]:
        """How far the run is: steps and tokens."""
        return {"step": self.step, "tokens": self.tokens}

    def resume_from(self, counters: Mapping[str, Any]) -> None:
        """A checkpoint was loaded into the tensors: continue from its counters."""
        self.weights.publish_masters()
        self.weights.zero_gradients()
        self.step, self.tokens = int(counters["step"]), int(counters["tokens"])


def new_state(
    model: Z2all,
    optim: OptimConfig,
    dtype: torch.dtype,
    seed: int = 0,
    world: World | None = None,
    parallel: ParallelConfig | None = None,
) -> TrainState:
    """The state of a run before its first step, its weights on the device of `world` (else where the model is) and in
    `dtype` unless they are sharded (ZeRO-3). AdamW on flat weights takes the registry's fast path, or that on the
    host; every other optimizer works on the masters one by one."""
    parallel = parallel or ParallelConfig()
    world = world or World(device=next(model.parameters()).device)
    device, mesh = world.device, world.mesh
    offloads = parallel.offload != "none"
    assert optim.kind == "adamw" or not offloads, "see zero2all.parallel.check"
    is_sharded = parallel.zero == 3 and mesh.shard.size > 1
    # torch's kernels round the factor on the gradient to float32; a run in float64 must not.
    is_fast = optim.kind == "adamw" and dtype != torch.float64 and not is_sharded
    weights: Weights
    optimizer: Optimizer | FlatAdamW | HostAdamW
    if is_sharded:
        weights = ShardedWeights(model, dtype, mesh)
    else:
        splits = is_fast and dtype == torch.bfloat16 and model.ops.footprints["optimizer"].splits_masters
        kind: Literal["wide", "split", "none"] = "split" if splits and not offloads else "wide"
        layout = MasterLayout("none" if optim.kind == "adamw_bf16" else kind, partial(cut_of, optim.kind))
        weights = FlatWeights(model, dtype, layout, device=device, mesh=mesh, parallel=parallel)
    if isinstance(weights, FlatWeights) and offloads:
        optimizer = HostAdamW(weights, optim)
    elif isinstance(weights, FlatWeights) and is_fast:
        optimizer = FlatAdamW(weights, model.ops.optimizer, optim)
    else:
        table = {one.name: one for one in weights.table}
        holders = mesh.holders_of_matrix(is_sharded).group
        optimizer = build_optimizer(weights.masters_by_name(), optim, table, seed=seed, holders=holders)
    for _, router in routers(model):
        router.clear(device)
    scale = LossScale(device) if dtype == torch.float16 else None
    return TrainState(model, weights, optimizer, loss_scale=scale)
