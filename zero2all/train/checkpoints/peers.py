"""What ranks tell each other about a save: small JSON values (`common.ranks`), gathered on all ranks.

They have their own gloo groups, because a collective on the training group from another thread could be matched with
the gradients of another rank: one group for the caller's thread, one for the writing thread.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from zero2all.common import ranks


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
        return ranks.gather(value, self._group)


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
