"""Checks before a save: can training have made these values, and are the copies of a tensor on several ranks equal to
the last bit?

The largest absolute value of a tensor is NaN or infinite when one of its values is: a reduction on the device that
needs no memory, 24 ms for 14.6 GB: 1.26 B, AdamW (H200, November 2026). Means of squares are not negative either.

Replicas hold the same weights and moments and make the same updates. A bit that flips on one of them goes unnoticed:
gradients are summed over ranks whose weights differ, and a checkpoint takes boxes from different ranks. So before a
save every rank adds up the bits of the boxes that others hold too (see `SaveLayout.copies`), and they compare 8 bytes.

The sum is over integers, so it does not depend on the order: the bits of a tensor as a table of WIDTH columns, its row
sums and its column sums, each weighted by its place. Any one changed value changes it, and so do two swapped values.
It reads a tensor twice on its device: 36 ms for these 14.6 GB, with 160 MB beside them (H200,
November 2026). Boxes that only one rank has cannot be compared and are left out.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zero2all.common.errors import AnomalyError
from zero2all.common.peers import Peers
from zero2all.parallel.parts import TensorPart
from zero2all.train.checkpoints.planning import LocalBox, boxes_of

MEANS_OF_SQUARES = tuple(f"optimizer/{name}" for name in ("exp_avg_sq/", "exp_avg_sq_scales/", "row_means/", "column_"))
"""How the names of such moments begin."""
WIDTH = 4096
PIECES = 1024
"""Of a box in which a difference is looked for."""
TABLE_ROWS = 2048
"""64 MB at a time: for column sums a GPU takes memory with the size of the table."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that a multiplication modulo 2^64 loses no bits; its bits are well mixed."""


class ReplicasDifferError(AnomalyError):
    """Ranks that should hold the same weights do not."""

    digests: Sequence[Mapping[str, int]] = ()
    """Of each rank, by box: what they hold."""
    key = ""
    """The first box that differs."""
    at = 0
    """The place of a value in it that differs."""
    values: Sequence[float] = ()
    """That value on the ranks that hold it."""


@torch.no_grad()
def first_damaged(parts: Mapping[str, TensorPart]) -> str | None:
    """Which tensor of this rank's parts holds NaN, an infinity, or a negative mean of squares; None when none does."""
    floats = {name: part.values for name, part in parts.items() if part.values.is_floating_point()}
    checks = {
        f"{name} contains NaN or infinite values": torch.linalg.vector_norm(values, ord=math.inf).isfinite()
        for name, values in floats.items()
        if values.numel()
    }
    for name, values in floats.items():
        if values.numel() and name.startswith(MEANS_OF_SQUARES):
            checks[f"{name} contains negative values, which means of squares cannot be"] = values.min() >= 0
    if not checks:
        return None
    home = next((each.device for each in checks.values() if each.device.type != "cpu"), torch.device("cpu"))
    verdicts = torch.stack([each.to(home, non_blocking=True) for each in checks.values()]).tolist()
    return next((problem for problem, is_right in zip(checks, verdicts, strict=True) if not is_right), None)


@torch.no_grad()
def compare_replicas(parts: Mapping[str, TensorPart], copies: Mapping[str, list[LocalBox]], peers: Peers) -> None:
    """Raise ReplicasDifferError, on every rank, when copies differ; it names the ranks. Every rank calls it with the
    `copies` of its plan."""
    if peers.size == 1:
        return
    boxes = {name: boxes_of(parts[name]) for sources in copies.values() for name, _ in sources}
    said = peers.gather(
        {ranks: _digest([boxes[name][number][1] for name, number in sources]) for ranks, sources in copies.items()}
    )
    if not _odd_ranks(said):
        return
    digests = peers.gather(box_digests(parts, copies))
    odd = _odd_ranks(digests)
    keys = sorted({key for each in odd.values() for key in each})
    names = sorted({key.rpartition("|")[0] for key in keys})
    ranks, shown = ", ".join(map(str, sorted(odd))), ", ".join(names[:3] + ["…"] * (len(names) > 3))
    at, values = _first_difference(dict(_boxes(parts, copies)).get(keys[0]), peers)
    if peers.size == 2:
        found = (
            f"The replicas of ranks 0 and 1 differ, in {shown}: value {at} of {keys[0]} is {values[0]:g} on rank 0 and "
            f"{values[-1]:g} on rank 1. The next start computes this step again and says which of them was wrong."
        )
    else:
        found = (
            f"The replicas differ: the values of rank {ranks} of {peers.size} are not those of the rest, in {shown}."
        )
    error = ReplicasDifferError(
        f"{found} This state was not saved. Earlier checkpoints passed the same check. Run the same command again to "
        f"continue from the newest: all ranks then start from the same bits. If the same rank is named again, its "
        f"memory or GPU is faulty (look for ECC errors): exclude that machine. Devices of different kinds round "
        f"differently and cannot hold replicas of one run; use parallel.zero 3 for them."
    )
    error.digests = [{key: each[key] for key in keys if key in each} for each in digests]
    error.key, error.at, error.values = keys[0], at, values
    raise error


def value_at(parts: Mapping[str, TensorPart], copies: Mapping[str, list[LocalBox]], key: str, at: int) -> float | None:
    """The value at a place of a box; None where this rank does not hold it."""
    return next((float(values.reshape(-1)[at]) for one, values in _boxes(parts, copies) if one == key), None)


def _boxes(parts: Mapping[str, TensorPart], copies: Mapping[str, list[LocalBox]]) -> Iterator[tuple[str, Tensor]]:
    """The boxes that other ranks hold too, by name and place."""
    for name, number in (source for sources in copies.values() for source in sources):
        place, values = boxes_of(parts[name])[number]
        yield f"{name}|{place}", values


def _first_difference(box: Tensor | None, peers: Peers) -> tuple[int, list[float]]:
    """The place of the first value that differs among the ranks that have this box, and what they have there. A box may
    be large, so the ranks narrow it down by the bits of its pieces."""
    flat, at = None if box is None else box.reshape(-1), 0
    while True:
        pieces = [] if flat is None else list(flat.split(-(-flat.numel() // PIECES)))
        said = [each for each in peers.gather([_digest([piece]) for piece in pieces]) if each]
        first = next(number for number, found in enumerate(zip(*said, strict=True)) if len(set(found)) > 1)
        if flat is not None:
            at += first * len(pieces[0])
            flat = pieces[first]
        if all(each is None or each == 1 for each in peers.gather(None if flat is None else flat.numel())):
            found = peers.gather([] if flat is None else [at, float(flat[0])])
            return next(int(each[0]) for each in found if each), [float(each[1]) for each in found if each]


@torch.no_grad()
def box_digests(parts: Mapping[str, TensorPart], copies: Mapping[str, list[LocalBox]]) -> dict[str, int]:
    """A number for the bits of each box that other ranks hold too."""
    return {key: _digest([values]) for key, values in _boxes(parts, copies)}


def _digest(boxes: Sequence[Tensor]) -> int:
    """One number for the bits of all boxes. Their sums are weighted together: kernels cost more than bytes here."""
    sums = [one for box in boxes for one in _sums_of_bits(box)]
    home = next((one.device for one in sums if one.device.type != "cpu"), torch.device("cpu"))
    whole = torch.cat([torch.zeros(1, dtype=torch.int64, device=home), *(one.to(home) for one in sums)])
    places = torch.arange(whole.numel(), device=home) * FACTOR
    return int((whole * (places ^ (places >> 29) | 1)).sum())


def _sums_of_bits(box: Tensor) -> Iterator[Tensor]:
    """The row and column sums of a tensor, as int64 on its device, and the values after the last full row."""
    flat = box.contiguous().view(-1)
    size = flat.element_size()
    whole = flat.numel() * size // (8 * WIDTH) * (8 * WIDTH) // size
    # 8 bytes at a time: narrower integers would be copied to int64 before they are added up.
    for values in flat[:whole].split(TABLE_ROWS * WIDTH * 8 // size):
        # A box may begin anywhere in its buffer; memory of its own is aligned.
        aligned = values.clone() if values.storage_offset() * size % 8 else values
        rows = aligned.view(torch.int64).view(-1, WIDTH)
        yield rows.sum(dim=1)
        yield rows.sum(dim=0)
    if whole < flat.numel():
        yield flat[whole:].view(WORDS[size]).to(torch.int64)


def _odd_ranks(said: Sequence[Mapping[str, int]]) -> dict[int, list[str]]:
    """By rank, the keys for which its value differs from that of most ranks; in a tie the lowest rank is believed."""
    odd: dict[int, list[str]] = {}
    for key in dict.fromkeys(key for each in said for key in each):
        values = {rank: each[key] for rank, each in enumerate(said) if key in each}
        usual = Counter(values.values()).most_common(1)[0][0]
        for rank, value in values.items():
            if value != usual:
                odd.setdefault(rank, []).append(key)
    return odd
