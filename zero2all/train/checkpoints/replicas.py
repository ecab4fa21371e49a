"""Whether what should be the same on several ranks is the same, to the last bit.

With `parallel.data: replicate` every rank has all weights and moments and makes the same updates. A bit that flips on
one of them is noticed by nobody: gradients are summed over ranks whose weights differ, and a checkpoint takes a tensor
here and a tensor there. So before a save every rank adds up the bits of its copies, and the ranks compare 8 bytes.

The sum is over integers, so that no order of adding changes it: the bits of a tensor as a matrix of WIDTH columns, its
row sums and its column sums, each weighted by its place. Any one changed value changes it, and so do two that were
swapped. It reads a tensor twice on its device and takes no memory beside it. Parts that only one rank has (FSDP2) have
nothing to be compared with and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero2all.common.errors import AnomalyError
from zero2all.train.checkpoints.peers import Peers
from zero2all.train.checkpoints.planning import local_part

WIDTH = 4096
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that a multiplication modulo 2^64 loses nothing; its bits are spread."""


class ReplicasDifferError(AnomalyError):
    """Ranks that should hold the same weights do not."""


@torch.no_grad()
def compare_replicas(tensors: Mapping[str, Tensor], peers: Peers) -> None:
    """Raise ReplicasDifferError, on every rank, when copies differ; it names the ranks. Every rank calls it."""
    if peers.size == 1:
        return
    sums = _sums({name: tensor for name, tensor in tensors.items() if _has_copies(tensor)})
    groups: dict[str, dict[str, int]] = {}
    for name, value in sums.items():
        groups.setdefault(_group(tensors[name]), {})[name] = value
    said = peers.gather({group: _mixed(list(values.values())) for group, values in groups.items()})
    if not _odd_ranks(said):
        return
    details = [_flat(each) for each in peers.gather(groups)]
    odd = _odd_ranks(details)
    if not odd:  # each rank has tensors of its own beside the shared ones
        return
    names = sorted({key.partition("|")[2] for keys in odd.values() for key in keys})
    who = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, sorted(odd)))}"
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    unsure = " (of two ranks nobody can tell which one is right; the second is named)" if peers.size == 2 else ""
    raise ReplicasDifferError(
        f"The replicas differ: {who} of {peers.size} does not hold what the others hold in {', '.join(names[:3])}{more}"
        f"{unsure}. This state was not saved; earlier checkpoints were compared too, and stand. Run the same command "
        f"again to continue from the newest: all ranks then start from the same bits. If the same rank is named again, "
        f"its memory or its GPU is to blame (look for ECC errors): leave that machine out."
    )


def _has_copies(tensor: Tensor) -> bool:
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        return any(placement.is_replicate() and size > 1 for placement, size in sizes)
    return True  # a plain tensor is taken to be the same everywhere


def _group(tensor: Tensor) -> str:
    """What ranks with the same part of a tensor have in common."""
    if not isinstance(tensor, DTensor):
        return "all"
    coordinates = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=False)
    own = [f"{place}" for placement, place in coordinates if not placement.is_replicate()]
    return f"{tensor.placements} {own}"


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The weighted sum of the bits of each tensor; the host waits once."""
    sums = [_sum_of_bits(local_part(tensor)) for tensor in tensors.values()]
    if not sums:
        return {}
    home = next((each.device for each in sums if each.device.type != "cpu"), sums[0].device)
    values = torch.stack([each.to(home, non_blocking=True) for each in sums]).tolist()
    return dict(zip(tensors, values, strict=True))


def _sum_of_bits(part: Tensor) -> Tensor:
    """One int64 on the tensor's device, whatever the order in which a device adds."""
    flat = part.contiguous().view(-1)
    bits = flat.view(WORDS[flat.element_size()])
    whole = bits.numel() // WIDTH * WIDTH
    table, rest = bits[:whole].view(-1, WIDTH), bits[whole:]
    rows, columns = table.sum(dim=1, dtype=torch.int64), table.sum(dim=0, dtype=torch.int64)
    return _weighted(rows) + 3 * _weighted(columns) + 5 * _weighted(rest.to(torch.int64))


def _weighted(values: Tensor) -> Tensor:
    places = torch.arange(1, values.numel() + 1, device=values.device)
    spread = places * FACTOR
    return (values * (spread ^ (spread >> 29) | 1)).sum()


def _mixed(values: Sequence[int]) -> int:
    """Several sums as one, in order."""
    total = 0
    for value in values:
        total = (total * 1_000_003 + value) % (1 << 61)
    return total


def _flat(groups: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {f"{group}|{name}": value for group, values in groups.items() for name, value in values.items()}


def _odd_ranks(said: Sequence[Mapping[str, int]]) -> dict[int, list[str]]:
    """By rank, the keys for which it says something else than most do; of a tie the first that spoke is believed."""
    odd: dict[int, list[str]] = {}
    for key in dict.fromkeys(key for each in said for key in each):
        values = {rank: each[key] for rank, each in enumerate(said) if key in each}
        usual = Counter(values.values()).most_common(1)[0][0]
        for rank, value in values.items():
            if value != usual:
                odd.setdefault(rank, []).append(key)
    return odd
