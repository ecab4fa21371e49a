"""What a state holds, for tests that compare two of them."""

from torch import Tensor

from zero2all.train.state import TrainState


def copies(state: TrainState) -> dict[str, Tensor]:
    """Every tensor a checkpoint would hold, by name."""
    with state.tensors() as tensors:
        return {name: part.values.clone() for name, part in tensors.items()}
