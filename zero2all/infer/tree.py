"""Many texts read as one tree: what several of them begin with is computed once, to the token.

    The capital of France is ─┬─ Paris          rows    [The capital of France is Paris]
                              ├─ Lis ── bon             [The capital of France is Lis bon]
                              └─ Rome                   [The capital of France is Rome]

Sorted rows are a walk through this tree. A pass reads part of it: a context that all its tokens stand on, whose keys
and values are known from earlier passes, and new tokens, each of which sees the context and its own ancestors (a mask
says which these are). The cache in blocks of `cache` shares whole blocks only, and makes a call of attention for each
text: for options of two or three tokens that is most of the work.

Legend: N new tokens of a pass, P tokens of its context, Hq query heads, Hk key/value heads, D head width, C hidden
width.
"""

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

LEAST_SHARED = 16
"""Tokens that rows must have in common for a pass of their own; fewer are computed again in every pass."""

Context = tuple[tuple[Tensor, Tensor], ...]
"""Of each layer, keys and values (1, Hk, P, D)."""


@dataclass(frozen=True)
class Stretch:
    """Where tokens of one row stand in a pass."""

    row: int
    first: int
    """The position of the first one in its row."""
    places: Sequence[int]


Visit = Callable[[Tensor, list[Stretch]], None]
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

    def _stretch(self, number: int, depth: int, places: Sequence[int]) -> Stretch:
        row = self._order[number]
        skipped = max(0, self._wanted_from[row] - depth)
        return Stretch(row, depth + skipped, places[skipped:])

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
