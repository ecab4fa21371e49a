"""The contract of every optimizer here, and what they share.

An optimizer updates *masters*: of each logical parameter the part in this process (`zero2all.parallel.parts`), in
float32 (bfloat16 for `adamw_bf16`, float64 in tests), with its gradient. A parameter without a gradient is not changed.
How a parameter may be cut depends on the optimizer (`factory.cut_of`); the result does not depend on the cut.

    optimizer.set_learning_rate(rate)
    optimizer.step(grads_scale=clip_coefficient, found_nonfinite=flag)

`found_nonfinite` (a tensor on the device, 0 or 1) cancels a step that is already queued, without the host reading it:
every new value goes through `torch.where(flag, old, new)`, and the count of updates is a tensor on the device too. A
cancelled step changes no bit of weights and state.

State is a flat dict of parts, complete from construction on: `<moment>/<logical name>`, and the count of updates as
`step/all`. They hold the live tensors, so a checkpoint is loaded directly into them. There is no random state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.model.config import ParameterKind
from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.parallel.parts import TensorPart

STEP_NAME = "step/all"
CHUNK_VALUES = 1 << 25
"""Values updated at once, so that the intermediate results of a large table take little beside the model."""
Formula = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Master:
    """The values of a logical parameter that this process updates, and their gradient."""

    part: TensorPart
    """With a group, its processes may communicate to update the parameter, and each has a Master for it, if only an
    empty one. Without a group this process needs no other; an empty part then says that another one is the owner."""
    gradient: Callable[[], Tensor | None]
    """In the shape of `part.values`; None: there is none in this step."""


@dataclass
class ParamState:
    """A logical parameter with its master and its state."""

    parameter: LogicalParameter
    master: Master
    state: dict[str, TensorPart] = field(default_factory=dict)

    @property
    def part(self) -> TensorPart:
        """What this process holds of the parameter."""
        return self.master.part

    @property
    def weight(self) -> Tensor:
        """The values of `part`."""
        return self.master.part.values

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of `weight`; None where this process has nothing to do with the parameter."""
        return None if self.is_elsewhere else self.master.gradient()

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process owns the parameter."""
        return self.part.group is None and self.weight.numel() == 0

    def moment(self, name: str) -> Tensor:
        """The values of a moment in this process."""
        return self.state[name].values


@dataclass
class ParameterGroup:
    """Parameters of one kind, which share a rate and a decay."""

    kind: ParameterKind
    params: list[ParamState]  # in the model's order
    weight_decay: float
    lr_multiplier: float = 1.0
    lr: float = 0.0  # rate of the next step, the multiplier in it
    decay: float = 0.0  # the share of the weight decay that the next step has


def decay_of(kind: ParameterKind, config: OptimConfig) -> float:
    """Matrices decay (those of experts and routers too), embedding and head by option, norms and biases never."""
    is_matrix, is_table = kind in ("matrix", "expert", "router"), kind in ("embedding", "head")
    return config.weight_decay if is_matrix or (is_table and config.decay_embeddings) else 0.0


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step, all on the device."""

    count: Tensor  # number of this update, from 1, if it is not cancelled (float32)
    scale: Tensor | None  # factor on every gradient
    skip: Tensor | None  # whether to change nothing (bool)


class Optimizer(ABC):
    """The interface of every optimizer here; see the module docstring."""

    writes_weights = False
    """Whether a step also writes low-precision copies of the weights."""
    clears_gradients = False
    """Whether it also sets the gradients to zero."""
    momentum: float | None = None
    """Of the next step, where the optimizer has one that follows a schedule; None: that of the config."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self.param_groups = list(groups)
        for group in self.param_groups:
            for param in group.params:
                param.state = {} if param.is_elsewhere else self.initial_state(param)
        devices = [param.weight.device for group in self.param_groups for param in group.params]
        self.updates = torch.zeros((), dtype=torch.float32, device=devices[0] if devices else None)

    @abstractmethod
    def initial_state(self, param: ParamState) -> dict[str, TensorPart]:
        """The moments of a parameter before the first update."""

    @abstractmethod
    def update(self, inputs: StepInputs) -> None:
        """Change weights and moments of every parameter that has a gradient."""

    @torch.no_grad()
    def step(self, grads_scale: Tensor | None = None, found_nonfinite: Tensor | None = None) -> None:
        """One update with gradients times `grads_scale`, or none where `found_nonfinite` is set."""
        device = self.updates.device
        scale = None if grads_scale is None else grads_scale.detach().to(device).reshape(())
        skip = None if found_nonfinite is None else found_nonfinite.detach().to(device, torch.bool).reshape(())
        count = self.updates + 1
        self.update(StepInputs(count, scale, skip))
        replace(self.updates, count, skip)

    def set_learning_rate(self, rate: float, weight_decay_share: float = 1.0, momentum: float | None = None) -> None:
        """The rate of the next steps, of which groups with a multiplier take their share, the share of the weight decay
        and the momentum."""
        self.momentum = momentum
        for group in self.param_groups:
            group.lr, group.decay = rate * group.lr_multiplier, weight_decay_share * group.weight_decay

    def state_tensors(self) -> dict[str, TensorPart]:
        """Everything of this process that a checkpoint must hold, by name."""
        parts = {STEP_NAME: TensorPart.whole(self.updates)}
        for group in self.param_groups:
            for param in group.params:
                parts |= {f"{moment}/{param.parameter.name}": part for moment, part in param.state.items()}
        return parts


class ElementwiseOptimizer(Optimizer):
    """An optimizer whose update is elementwise, by a formula: scaled gradient, weight, moments in the order of
    `moments` and the scalars of `numbers` -> new weight and moments. `compiled` makes one kernel of it, the scaling and
    the skip."""

    moments: tuple[str, ...] = ()

    def __init__(self, groups: Sequence[ParameterGroup], formula: Formula, compiled: bool) -> None:
        super().__init__(groups)
        self.formula = formula
        self.apply = compiled_for_all(apply_formula) if compiled else apply_formula

    def numbers(self, group: ParameterGroup, count: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        """What the formula needs beside tensors, as scalars: the rate, what the decay leaves, corrections."""
        return scalar(group.lr), scalar(1 - group.lr * group.decay)

    def initial_state(self, param: ParamState) -> dict[str, TensorPart]:
        """Zeros, in float32 or better."""
        return {moment: zeros_like_master(param) for moment in self.moments}

    def update(self, inputs: StepInputs) -> None:
        """Run the formula over every parameter."""
        for group in self.param_groups:
            numbers = self.numbers(group, inputs.count)
            for param in group.params:
                self.update_one(param, numbers, inputs)

    def update_one(self, param: ParamState, numbers: tuple[Tensor, ...], inputs: StepInputs) -> None:
        """Run the formula over one parameter; flat, so that a compiled one serves all shapes."""
        gradient = param.gradient
        if gradient is None or not gradient.numel():
            return
        targets = [param.weight, *(param.moment(name) for name in self.moments)]
        for rows in row_chunks(param.weight):
            flat = [target[rows].view(-1) for target in targets]
            self.apply(self.formula, gradient[rows].reshape(-1), flat, numbers, inputs.scale, inputs.skip)


def apply_formula(
    formula: Formula,
    gradient: Tensor,
    targets: list[Tensor],
    numbers: tuple[Tensor, ...],
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Replace `targets` by the results of the formula."""
    values = formula(scaled(gradient, scale), *targets, *numbers)
    for target, value in zip(targets, values, strict=True):
        replace(target, value, skip)


def compiled_for_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """It compiled, with room for the shapes of all parameters: beyond 8 torch would go on without compiling. No kernel
    is chosen by timing it, so that a resumed run has the same ones, and the same bits."""
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    return torch.compile(function, dynamic=True, options={"deterministic": True})


def row_chunks(weight: Tensor) -> Iterator[slice | EllipsisType]:
    """Indices that cut a tensor by rows (a vector by values) into chunks of at most CHUNK_VALUES, where a row is not
    longer."""
    if weight.numel() <= CHUNK_VALUES:
        yield ...
        return
    at_once = max(1, CHUNK_VALUES * len(weight) // weight.numel())
    for first in range(0, len(weight), at_once):
        yield slice(first, min(first + at_once, len(weight)))


def replace(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Write `value` into `target` unless `skip` is set, which the host does not read."""
    target.copy_(value if skip is None else torch.where(skip, target, value.to(target.dtype)))


def scaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient in the precision of the arithmetic, times `scale`."""
    gradient = gradient.to(master_dtype(gradient))
    return gradient if scale is None else gradient * scale


def master_dtype(tensor: Tensor) -> torch.dtype:
    """float32, or float64 for tensors that are."""
    return torch.promote_types(tensor.dtype, torch.float32)


def zeros_like_master(param: ParamState) -> TensorPart:
    """A moment of zeros in the precision of the arithmetic, cut like the parameter."""
    return param.part.like(torch.zeros_like(param.weight, dtype=master_dtype(param.weight)))


def scalar(value: float) -> Tensor:
    """A number as a tensor on the host: a compiled formula is not compiled again when it changes."""
    return torch.tensor(value, dtype=torch.float64)


def bias_correction(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count in float64: in float32 the first steps of a beta near 1 would lose digits."""
    return 1 - beta ** count.double()
