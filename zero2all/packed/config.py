"""Which data a run reads, and in which proportion."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.common.schema import NaturalFloat, PositiveInt, Problem


@dataclass(frozen=True)
class DataConfig:
    """The packed sources of a run, mixed by tokens."""

    seq_len: PositiveInt = 2048
    """Tokens per training sample."""
    mixture: dict[str, NaturalFloat] | None = None
    """Weight of each source (or, for a name that is no source, of a channel, shared among its sources by tokens).
    None weighs sources by their tokens. Weights are rounded to n/65536 and need not sum to one."""
    seed: int = 1234
    """Key of the shuffle: which sample stands where is a pure function of this, the mixture and the position."""

    def problems(self, place: str) -> list[Problem]:
        """A mixture must leave something to read."""
        return mixture_problems(self.mixture, f"{place}.mixture")


def mixture_problems(mixture: dict[str, float] | None, place: str) -> list[Problem]:
    """What is wrong with a table of weights."""
    if mixture is None or any(weight for weight in mixture.values() if weight):
        return []
    return [Problem(place, mixture, "at least one weight above 0")]
