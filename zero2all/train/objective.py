"""A loss of token log-probabilities other than their mean: what preference tuning and reinforcement learning train on.

Where a loss L depends on the model only through the losses nll_t of the tokens in the batch, its gradient is that of
the sum of w_t nll_t with w_t = dL/dnll_t, held constant. So a step of such a run first scores its rows (a forward pass
without gradient), the objective turns the scores into the weights, and the usual passes with these weights leave the
exact gradient. Layouts, accumulation, guards and checkpoints are those of every run. The price is one more forward
pass.

The two passes must see the same network: no dropout, and no z term (the config refuses both).
Legend: B rows, T targets of a row, S those in this process (context parallelism cuts rows).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from zero2all.packed.loader import Batch
from zero2all.train.state import TrainState


@dataclass(frozen=True)
class Scored:
    """The rows of this process, and what the model as it is gives for them."""

    nats: Tensor
    """(B, S) loss of each target, without gradient; zeros in a stage of a pipeline that is not the last. (B, S, 1 + K)
    where the objective names further targets: the target of the data comes first."""
    counts: Tensor
    """(B, S) the weights of the targets in the data: 1 in an answer, 0 elsewhere."""
    batch: Batch
    own: Callable[[Tensor], Tensor]
    """(B, T) -> (B, S), or (B, T, K) -> (B, S, K): of values per target those of this process."""
    sum_parts: Callable[[Tensor], Tensor]
    """Sum, in place, over the processes that have other parts of the same rows."""
    sum_rows: Callable[[Tensor], Tensor]
    """Sum, in place, over the processes that have other rows of the step."""


class Batches(Protocol):
    """What the loop reads, such as a `packed.loader.Loader`."""

    wait_seconds: float

    def __iter__(self) -> Iterator[Batch]: ...

    def close(self) -> None:
        """Stop reading ahead."""


class Objective(Protocol):
    """A loss and the data it needs. It keeps no state that changes: after a resume it is made anew."""

    metrics: tuple[str, ...]
    """Names of the numbers that `weights` returns."""
    shown: str
    """Which value of `report` the progress bar shows instead of the loss."""

    def begin(self, state: TrainState) -> None:
        """Once, before the first step of an attempt, in every process."""

    def batches(self, state: TrainState, /) -> Batches | None:
        """The batches from here to the last step, each a function of the seed, the step and the weights; None: those of
        the packed data. A batch may have more fields than `Batch`."""

    def weights(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """The weight of each loss, in the shape of `nats`, with its normaliser: the sum of weights x losses over all
        processes has the gradient. And a number for each of `metrics`, float64, that is then summed over processes with
        other rows; processes with parts of the same rows return the same numbers (`Scored.sum_parts`)."""

    def report(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Values for the metrics of a step, from the sums over all its rows."""

    def held_out(self, state: TrainState) -> dict[str, float]:
        """Values for the metrics of a validation."""


@runtime_checkable
class NamesTargets(Protocol):
    """An objective whose loss depends on the log-probabilities of more ids than the target of the data."""

    def further_targets(self, batch: Batch, /) -> Tensor:
        """(B, T, K) these ids."""
