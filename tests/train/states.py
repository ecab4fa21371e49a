"""What a state holds, for tests that compare two of them."""

from torch import Tensor

from zero2all.parallel.layout import layout_table
from zero2all.parallel.shards import logical_parts
from zero2all.train.state import TrainState


def copies(state: TrainState) -> dict[str, Tensor]:
    """Every tensor a checkpoint would hold, by name."""
    with state.tensors() as tensors:
        return {name: part.values.clone() for name, part in tensors.items()}


def model_weights(state: TrainState) -> dict[str, Tensor]:
    """The weights that the forward pass reads, by logical name."""
    parts = logical_parts(layout_table(state.model.config), dict(state.model.named_parameters()))
    return {name: part.values for name, part in parts.items()}
