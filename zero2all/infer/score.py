"""What a model says of the tokens of many texts that begin alike (see `tree`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero2all.infer.forward import Forward
from zero2all.infer.job import Scores
from zero2all.infer.tree import Stretch, TreeReader

LOGITS_AT_ONCE = 1 << 26
"""Logits that scoring holds at once: 256 MB in float32."""
MOST_IN_A_PASS = 2048
"""New tokens of a pass: its mask grows with their square."""


class RowScorer:
    """Scores rows of ids, each from its start on, given the tokens before it."""

    def __init__(
        self, forward: Forward, rows: Sequence[Sequence[int]], starts: Sequence[int], tokens_at_once: int
    ) -> None:
        self._forward, self._rows, self._starts = forward, rows, starts
        inputs = [row[:-1] for row in rows]  # nothing is predicted from the last token
        wanted_from = [start - 1 for start in starts]
        self._tree = TreeReader(forward, inputs, wanted_from, min(tokens_at_once, MOST_IN_A_PASS))
        self._found = [Scores([], []) for _ in rows]
        self._unread: list[tuple[list[Stretch], NDArray[np.int64], list[Tensor]]] = []

    @property
    def share_computed(self) -> float:
        """Tokens that must be computed, as a share of all."""
        return self._tree.distinct_tokens / max(1, sum(len(row) - 1 for row in self._rows))

    def score(self, when_done: Callable[[int], None] | None = None) -> list[Scores]:
        """`when_done` gets the number of each row when it is scored."""
        self._when_done = when_done
        self._tree.read(self._visit)
        self._collect()
        return self._found

    @torch.inference_mode()
    def _visit(self, hidden: Tensor, stretches: list[Stretch]) -> None:
        if not stretches:
            return
        places = np.concatenate([np.asarray(each.places) for each in stretches])
        targets = np.concatenate(
            [self._rows[each.row][each.first + 1 : each.first + 1 + len(each.places)] for each in stretches]
        )
        order = np.argsort(places, kind="stable")
        at_once = max(1, LOGITS_AT_ONCE // len(self._forward.weights.head))
        chunks = [order[first : first + at_once] for first in range(0, len(order), at_once)]
        values = [self._of_chunk(hidden, places[chunk], targets[chunk]) for chunk in chunks]
        self._collect()  # the pass before this one: on a GPU, this one is being computed meanwhile
        self._unread.append((stretches, order, values))

    def _of_chunk(self, hidden: Tensor, places: NDArray[np.int64], targets: NDArray[np.int64]) -> Tensor:
        """Log probabilities and ranks (2, count) of `targets` after the tokens at `places`."""
        once, which = np.unique(places, return_inverse=True)  # options of a question follow the same token
        device = hidden.device
        logits = self._forward.logits(hidden[torch.from_numpy(once).to(device)])
        totals = logits.logsumexp(dim=-1)
        rows, ids = torch.from_numpy(which).to(device), torch.from_numpy(targets).to(device)
        chosen = logits[rows, ids]
        ranks = (logits[rows] > chosen.unsqueeze(1)).sum(dim=-1)
        return torch.stack((chosen.double() - totals[rows].double(), ranks.double()))

    def _collect(self) -> None:
        for stretches, order, values in self._unread:
            table = np.empty((2, len(order)))
            table[:, order] = torch.cat(values, dim=1).cpu().numpy()
            logprobs, ranks = table[0].tolist(), table[1].astype(np.int64).tolist()
            first = 0
            for each in stretches:
                end = first + len(each.places)
                found = self._found[each.row]
                found.logprobs.extend(logprobs[first:end])
                found.ranks.extend(ranks[first:end])
                first = end
                if self._when_done and len(found.ranks) == len(self._rows[each.row]) - self._starts[each.row]:
                    self._when_done(each.row)
        self._unread.clear()


@torch.inference_mode()
def distributions_after(forward: Forward, rows: Sequence[Sequence[int]], tokens_at_once: int) -> list[Tensor]:
    """Log probabilities of all ids (V,) after each row."""
    found: dict[int, Tensor] = {}

    def visit(hidden: Tensor, stretches: list[Stretch]) -> None:
        last = [each.places[-1] for each in stretches]
        if last:
            logprobs = forward.logits(hidden[torch.tensor(last, device=hidden.device)]).log_softmax(dim=-1).cpu()
            found.update(zip((each.row for each in stretches), logprobs, strict=True))

    wanted_from = [len(row) - 1 for row in rows]
    TreeReader(forward, rows, wanted_from, min(tokens_at_once, MOST_IN_A_PASS)).read(visit)
    return [found[number] for number in range(len(rows))]
