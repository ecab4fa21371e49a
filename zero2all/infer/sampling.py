"""How the next token is chosen.

A draw depends on the seed, the number of the token and the distribution, not on the other rows of the batch: one
uniform number u in [0, 1) for each, and the first token, in the order of ids, at which the cumulative probability
passes u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.common.errors import UsageError

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: int = 0
    """Draw only among this many likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw only among the likeliest tokens that together hold this probability."""
    min_p: float = 0.0
    """Draw only among tokens at least this times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that occur already, in the prompt too, become less likely. Positive logits are divided by it,
    negative ones multiplied."""
    seed: int = 0
    """Key of the draws."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token for each time that it was written."""
    presence_penalty: float = 0.0
    """Taken from the logit of a token that was written."""
    logit_bias: Sequence[tuple[int, float]] = ()
    """Ids and what is added to their logits."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        bounds = {
            "temperature": (0 <= self.temperature <= 100, "from 0 to 100"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100"),
        }
        for name, (is_good, expected) in bounds.items():
            if not is_good:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be {expected}.")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Whether more than the model decides how likely a token is."""
        penalties = self.frequency_penalty or self.presence_penalty or self.logit_bias
        return self.repetition_penalty != 1 or bool(penalties)


def uniform(seed: int, number: int) -> float:
    """A number in [0, 1) for the draw of token `number` (splitmix64 of both)."""
    mixed = _scrambled((_scrambled(seed & MASK) + number) & MASK)
    return (mixed >> 11) / (1 << 53)


def _scrambled(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def penalised(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits (B, V) with those of the tokens in `seen` (B, V) made smaller by `penalty` (B, 1)."""
    smaller = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, smaller, logits)


class Picker:
    """The sampling of the rows of a batch as tensors on its device: made when the batch changes."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device, end_ids: Sequence[frozenset[int]] = ()) -> None:
        """`end_ids`: of each row, the ids that may end its text."""
        self.rows = rows
        self.is_greedy = all(row.is_greedy for row in rows)
        self._device = device
        ends = [(row, each) for row, ids in enumerate(end_ids) for each in sorted(ids)]
        self.end_rows, self.end_ids = torch.tensor(ends, dtype=torch.long, device=device).view(-1, 2).unbind(1)
        """Row and id of each of them."""
        if self.is_greedy:
            return

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        self._greedy = torch.tensor([row.is_greedy for row in rows], device=device)
        self._temperature = column([row.temperature or 1.0 for row in rows])
        self._top_p, self._min_p = column([row.top_p for row in rows]), column([row.min_p for row in rows])
        self._top_k = torch.tensor([row.top_k for row in rows], device=device).unsqueeze(1)
        self._has_top_k = any(row.top_k for row in rows)
        self._has_top_p = any(row.top_p < 1 for row in rows)
        self._has_min_p = any(row.min_p > 0 for row in rows)

    def pick(self, logits: Tensor, numbers: Sequence[int]) -> Tensor:
        """The tokens (B,) drawn from logits (B, V); `numbers` are those of the tokens in their texts."""
        likeliest = logits.argmax(dim=-1)
        if self.is_greedy:
            return likeliest
        draws = [uniform(row.seed, number) for row, number in zip(self.rows, numbers, strict=True)]
        probabilities = self._filtered((logits / self._temperature).softmax(dim=-1))
        # In float64: in float32 the sum over a large vocabulary stops growing before its end.
        reached = probabilities.double().cumsum(dim=-1)
        shares = torch.tensor(draws, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        wanted = shares.to(self._device, non_blocking=True).unsqueeze(1) * reached[:, -1:]
        drawn = torch.searchsorted(reached, wanted, right=True).squeeze(1).clamp_max(logits.shape[-1] - 1)
        return torch.where(self._greedy, likeliest, drawn)

    def _filtered(self, probabilities: Tensor) -> Tensor:
        """Zero for what top-k, top-p and min-p rule out. Tokens as likely as the last one that is kept are kept."""
        if not (self._has_top_k or self._has_top_p or self._has_min_p):
            return probabilities
        least = probabilities.max(dim=-1, keepdim=True).values * self._min_p
        if self._has_top_k or self._has_top_p:
            ordered = probabilities.sort(dim=-1, descending=True).values
            last = torch.where(self._top_k > 0, self._top_k, ordered.shape[-1]).clamp_max(ordered.shape[-1]) - 1
            kth = ordered.gather(1, last)
            least = torch.maximum(least, kth)
            ordered = torch.where(ordered >= kth, ordered, 0.0)
            before = ordered.cumsum(dim=-1) - ordered
            needed = (before < self._top_p * ordered.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True).clamp_min(1)
            least = torch.maximum(least, ordered.gather(1, needed - 1))
        return torch.where(probabilities >= least, probabilities, 0.0)
