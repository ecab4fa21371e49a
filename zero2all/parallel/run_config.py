"""What the rules of this package read of `zero2all.config.RunConfig`. That is built on this package, so it cannot be
imported here.

A RunConfig is a `SpreadConfig` as it is; mypy checks that.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from zero2all.common.errors import UsageError
from zero2all.common.language import message
from zero2all.common.progress import counted
from zero2all.model.config import ModelConfig
from zero2all.parallel.config import ParallelConfig


class SpreadConfig(Protocol):
    """A config, as far as it decides whether a model can be spread over a mesh."""

    @property
    def model(self) -> ModelConfig:
        """The shape of the model."""

    @property
    def parallel(self) -> ParallelConfig:
        """The axes."""

    @property
    def diloco(self) -> Any:
        """`groups`, `scheme`, `every`, `tau`, `fragments`."""

    @property
    def groups(self) -> int:
        """How many groups train together."""

    @property
    def data(self) -> Any:
        """`seq_len`, `document_mask`."""

    @property
    def stages(self) -> Sequence[Any]:
        """Each with `seq_len`, which may be None."""

    @property
    def optim(self) -> Any:
        """`kind`."""

    @property
    def ops(self) -> Any:
        """`compile`."""

    @property
    def train(self) -> Any:
        """`tokens_per_step`, `micro_batch_samples`, `precision`, `recompute`, `cuda_graph`."""


def sequence_lengths(config: SpreadConfig) -> list[tuple[str, int]]:
    """Every sequence length of the run, by the field that sets it."""
    found = [("data.seq_len", int(config.data.seq_len))]
    for number, stage in enumerate(config.stages):
        if stage.seq_len is not None:
            found.append((f"stages[{number}].seq_len", stage.seq_len))
    return found


def why_not_spread(config: SpreadConfig, processes: int) -> str:
    """Why this many processes cannot share the run, by their number alone; empty: they can. For the supervisor, which
    has no torch; the processes themselves check every rule (`zero2all.parallel.check`)."""
    try:
        sizes = config.parallel.sizes(processes)
    except UsageError as error:
        return str(error)
    rows = min(config.train.tokens_per_step // length for _, length in sequence_lengths(config))
    batch = sizes.replicate * sizes.shard
    return "" if batch <= rows else message(f"{batch} batch ranks are more than the {counted(rows, 'row')} of a step.")
