"""What a model says of the tokens of many texts that begin alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from zero2all.infer.forward import Forward
from zero2all.infer.job import Scores

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
        self._unread: list[tuple[list[TokenSpan], NDArray[np.int64], list[Tensor]]] = []

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
    def _visit(self, hidden: Tensor, stretches: list[TokenSpan]) -> None:
        if not stretches:
            return
        places = np.concatenate([np.asarray(each.places) for each in stretches])
        targets = np.concatenate(
            [self._rows[each.row][each.first + 1 : each.first + 1 + len(each.places)] for each in stretches]
        )
        order = np.argsort(places, kind="stable")
        at_once = max(1, LOGITS_AT_ONCE // self._forward.weights.config.vocab_ids)
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

    def visit(hidden: Tensor, stretches: list[TokenSpan]) -> None:
        last = [each.places[-1] for each in stretches]
        if last:
            logprobs = forward.logits(hidden[torch.tensor(last, device=hidden.device)]).log_softmax(dim=-1).cpu()
            found.update(zip((each.row for each in stretches), logprobs, strict=True))

    wanted_from = [len(row) - 1 for row in rows]
    TreeReader(forward, rows, wanted_from, min(tokens_at_once, MOST_IN_A_PASS)).read(visit)
    return [found[number] for number in range(len(rows))]


# Many texts read as one tree: what several of them begin with is computed once, to the token.
#
#     The capital of France is ─┬─ Paris          rows    [The capital of France is Paris]
#                               ├─ Lis ── bon             [The capital of France is Lis bon]
#                               └─ Rome                   [The capital of France is Rome]
#
# Sorted rows are a walk through this tree. A pass reads part of it: a context that all its tokens stand on, whose keys
# and values are known from earlier passes, and new tokens, each of which sees the context and its own ancestors (a mask
# says which these are). The cache in blocks of `cache` shares whole blocks only, and makes a call of attention for each
# text: for options of two or three tokens that is most of the work.
#
# Legend: N new tokens of a pass, P tokens of its context, Hq query heads, Hk key/value heads, D head width, C hidden
# width.


LEAST_SHARED = 16
"""Tokens that rows must have in common for a pass of their own; fewer are computed again in every pass."""

Context = tuple[tuple[Tensor, Tensor], ...]
"""Of each layer, keys and values (1, Hk, P, D)."""


@dataclass(frozen=True)
class TokenSpan:
    """Where tokens of one row stand in a pass."""

    row: int
    first: int
    """The position of the first one in its row."""
    places: Sequence[int]


Visit = Callable[[Tensor, list[TokenSpan]], None]
"""(hidden states of a pass (N, C), the wanted tokens of its rows)."""


class TreeReader:
    """Reads rows of ids, `tokens_at_once` new ones in a pass; `visit` gets every wanted hidden state once for each row:
    those from position `wanted_from` on."""

    def __init__(
        self, forward: Forward, rows: Sequence[Sequence[int]], wanted_from: Sequence[int], tokens_at_once: int
    ) -> None:
        self._forward, self._wanted_from, self._at_once = forward, wanted_from, tokens_at_once
        arrays = [np.array(row, dtype=">u4") for row in rows]
        self._order = sorted(range(len(rows)), key=lambda number: arrays[number].tobytes())
        self._rows = [arrays[number] for number in self._order]
        self._shared = [0, *map(_common_length, self._rows[:-1], self._rows[1:])][: len(rows)]
        """Of each row, tokens that it has in common with the one before it, in sorted order."""
        self._own_until = [0, *itertools.accumulate(map(int.__sub__, map(len, self._rows), self._shared))]
        """Tokens of the tree that the rows before each one bring."""

    @property
    def distinct_tokens(self) -> int:
        """Tokens of the tree."""
        return self._own_until[-1]

    @torch.inference_mode()
    def read(self, visit: Visit) -> None:
        """Read the whole tree."""
        self._visit = visit
        if self._rows:
            self._read(0, len(self._rows), 0, ())

    # Which passes ----------------------------------------------------------------------------------------------------

    def _read(self, first: int, end: int, depth: int, context: Context) -> None:
        """Rows `first` to `end`, whose first `depth` tokens are `context`."""
        if self._new_tokens(first, end, depth) <= self._at_once:
            self._read_branches(first, end, depth, context)
            return
        common = min([len(self._rows[first]), *self._shared[first + 1 : end]])
        if common >= depth + LEAST_SHARED or end - first == 1:
            reached = min(common, depth + self._at_once)
            context = self._read_stem(first, end, depth, reached, context)
            self._read(first, end, reached, context)
            return
        pack = first
        for start, stop in self._runs(first, end, depth):
            if self._new_tokens(pack, stop, depth) <= self._at_once:
                continue  # it goes into the same pass as the ones before it
            if pack < start:
                self._read_branches(pack, start, depth, context)
            pack = start
            if self._new_tokens(start, stop, depth) > self._at_once:
                self._read(start, stop, depth, context)
                pack = stop
        if pack < end:
            self._read_branches(pack, end, depth, context)

    def _runs(self, first: int, end: int, depth: int) -> list[tuple[int, int]]:
        """The rows in runs that have enough in common beyond `depth`."""
        cuts = [number for number in range(first + 1, end) if self._shared[number] < depth + LEAST_SHARED]
        return list(zip([first, *cuts], [*cuts, end], strict=True))

    def _new_tokens(self, first: int, end: int, depth: int) -> int:
        return self._own_until[end] - self._own_until[first] + self._shared[first] - depth

    # One pass --------------------------------------------------------------------------------------------------------

    def _read_stem(self, first: int, end: int, depth: int, reached: int, context: Context) -> Context:
        """The tokens from `depth` to `reached`, which all these rows have in common; returns the longer context."""
        count = reached - depth
        places = range(count)
        hidden, longer = self._pass(self._rows[first][depth:reached], np.arange(depth, reached), None, context)
        stretches = [self._stretch(number, depth, places) for number in range(first, end)]
        self._visit(hidden, [each for each in stretches if each.places])
        return longer

    def _read_branches(self, first: int, end: int, depth: int, context: Context) -> None:
        """All that these rows have beyond `depth`, in one pass."""
        tokens, positions, stretches = [], [], []
        count = self._new_tokens(first, end, depth)
        sees = np.zeros((count, count), dtype=bool)
        path: list[int] = []  # where the tokens of the row before stand
        filled = 0
        for number in range(first, end):
            row = self._rows[number]
            kept = self._shared[number] - depth if number > first else 0
            fresh = len(row) - depth - kept
            path = [*path[:kept], *range(filled, filled + fresh)]
            if kept and fresh:
                sees[filled : filled + fresh, :filled] = sees[path[kept - 1], :filled]
            sees[filled : filled + fresh, filled : filled + fresh] = np.tri(fresh, dtype=bool)
            tokens.append(row[depth + kept :])
            positions.append(np.arange(depth + kept, len(row)))
            filled += fresh
            stretches.append(self._stretch(number, depth, path))
        if filled:
            hidden, _ = self._pass(np.concatenate(tokens), np.concatenate(positions), sees, context)
            self._visit(hidden, [each for each in stretches if each.places])

    def _stretch(self, number: int, depth: int, places: Sequence[int]) -> TokenSpan:
        row = self._order[number]
        skipped = max(0, self._wanted_from[row] - depth)
        return TokenSpan(row, depth + skipped, places[skipped:])

    def _pass(
        self, tokens: NDArray[np.uint32], positions: NDArray[np.int64], sees: NDArray[np.bool_] | None, context: Context
    ) -> tuple[Tensor, Context]:
        """Hidden states (N, C) of new tokens; and the context with them. `sees` (N, N): which new tokens each sees;
        None: those before it."""
        device = self._forward.weights.embedding.device
        count, before = len(tokens), context[0][0].shape[2] if context else 0
        mask = None
        if sees is not None or before:
            among = torch.from_numpy(np.tri(count, dtype=bool) if sees is None else sees).to(device)
            mask = torch.cat((torch.ones(count, before, dtype=torch.bool, device=device), among), dim=1)
        longer: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if context:
                key, value = (torch.cat(pair, dim=2) for pair in zip(context[layer], (key, value), strict=True))
            longer.append((key, value))
            groups = query.shape[1] // key.shape[1]
            if groups > 1:  # with grouped heads and a mask, torch would compute the whole matrix of weights
                key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
            return mixed[0].transpose(0, 1).flatten(1)

        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        hidden = self._forward.trunk(ids, torch.from_numpy(positions).to(device), attend)
        return hidden, tuple(longer)


def _common_length(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
