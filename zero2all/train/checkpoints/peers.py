"""What ranks tell each other about a save: small JSON values, gathered on all ranks.

torch's object collectives use pickle, and a pickle from a socket is code; these are bytes of JSON. They have their own
gloo groups, because a collective on the training group from another thread could be matched with the gradients of
another rank: one group for the caller's thread, one for the writing thread.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from zero2all.train.checkpoints import exact_json


class Peers:
    """The processes that save together; with `group` None, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """Whether this process decides and commits."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks. Raises when a peer has died or does not answer in time."""
        if self._group is None:
            return [value]
        own = torch.frombuffer(bytearray(exact_json.dump(value, None)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([own.numel()]), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self._group)
        return [
            exact_json.parse(text[: int(length)].numpy().tobytes(), f"what rank {rank} said")
            for rank, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]


def open_peers(group: dist.ProcessGroup | None, timeout_seconds: float) -> Peers:
    """Peers over a new gloo group with the ranks of `group`; all of them call this at the same point."""
    if group is None:
        return Peers()
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(
        ranks,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        backend="gloo",
        # A group of all ranks is created by all of them; one of some ranks only by those.
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    return Peers(own)
