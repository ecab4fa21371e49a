"""Bytes that one process exchanges in a training step, by collective.

With G bytes of gradients (4 a parameter), W bytes of weights (2 in bfloat16), m micro-batches, n processes along the
shard axis and r along the replicate axis:

    zero 0   all-reduce G over r
    zero 1   reduce-scatter G over n                      all-gather W over n
    zero 2   reduce-scatter G over n, in each of m passes  all-gather W over n
    zero 3   reduce-scatter G over n                      all-gather W over n twice in each of m passes: FSDP2 frees the
                                                          weights between the forward and the backward pass
    hybrid   with r > 1, zero 1 to 3 also all-reduce the part of a process, G/n, over r; zero 2 in each pass

Three numbers each: the whole tensor; what a process hands to the collective, which a counter of inputs sees (the whole
tensor, but only its own part for an all-gather); and what it sends over its links in a ring, which is 2 (n - 1)/n of
the whole for an all-reduce and (n - 1)/n for the other two. It receives as much.

Buckets whose owners have ranges of different length (8-bit AdamW, Muon, Adafactor) are reduced and broadcast range by
range: the same whole, of which every process hands over all to each broadcast too.

Not counted: padding (pass `buffer_values` to count it), validation, saving, and what an optimizer exchanges by itself
(with zero 3, Muon gathers its matrices and Adafactor adds up rows and columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zero2all.limits.memory import WIDTHS, MemorySettings
from zero2all.model.config import ModelConfig, parameter_counts

FIGURE_BYTES = 8
"""The figures of a step are float64."""


@dataclass(frozen=True)
class Transfer:
    """One kind of tensor that crosses between processes, over a whole step."""

    collective: Literal["all-reduce", "reduce-scatter", "all-gather"]
    what: str
    axis: Literal["replicate", "shard", "batch"]
    ranks: int
    whole: float  # bytes of the whole tensor

    @property
    def given(self) -> float:
        """Bytes that a process hands to the collective."""
        return self.whole / self.ranks if self.collective == "all-gather" else self.whole

    @property
    def sent(self) -> float:
        """Bytes that a process sends in a ring; it receives as many."""
        rounds = 2 if self.collective == "all-reduce" else 1
        return rounds * (self.ranks - 1) / self.ranks * self.whole


def communication_per_step(
    model: ModelConfig, settings: MemorySettings, figures: int = 0, buffer_values: int | None = None
) -> list[Transfer]:
    """What one process exchanges in a step; empty for a single process. `figures`: how many numbers of the step
    (losses, counts, the norm) are summed over all processes. `buffer_values`: length of the flat buffers with padding;
    None: the parameters alone."""
    counts, width = parameter_counts(model), WIDTHS[settings.precision]
    values = counts["total"] if buffer_values is None else buffer_values
    shard, replicate, passes = settings.shard, settings.replicate, settings.passes
    gradients = float(settings.gradient_bytes * values)
    if settings.is_fsdp:  # reduces in float32 whatever the optimizer
        # After several passes the root is reduced twice: behind the head, and with embedding and last norm at the end.
        again = counts["embedding"] + model.hidden_size if passes > 1 else 0
        gradients = float(max(4, width) * (values + again))
    transfers = []
    if settings.zero == 2:
        gradients *= passes
    if settings.zero >= 1:
        transfers.append(Transfer("reduce-scatter", "gradients", "shard", shard, gradients))
    transfers.append(Transfer("all-reduce", "gradients", "replicate", replicate, gradients / settings.state_ranks))
    if settings.zero in (1, 2):
        transfers.append(Transfer("all-gather", "weights", "shard", shard, float(width * values)))
    if settings.zero == 3:
        transfers.append(Transfer("all-gather", "weights", "shard", shard, float(2 * passes * width * values)))
    transfers.append(Transfer("all-reduce", "figures", "batch", replicate * shard, float(FIGURE_BYTES * figures)))
    return [transfer for transfer in transfers if transfer.ranks > 1 and transfer.whole]


def bytes_sent(transfers: Sequence[Transfer]) -> float:
    """Bytes that a process sends in a step, in rings; it receives as many."""
    return sum(transfer.sent for transfer in transfers)
