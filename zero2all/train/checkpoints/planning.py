"""Which rank writes which box of which tensor, and which parts of stored boxes a rank reads.

What a rank holds of a tensor is a `TensorPart`, which is a few boxes of it. Boxes that are equal on several ranks are
copies: of these ranks the one that has least to write so far writes it. All boxes of a tensor together must fill it: a
hole, or two boxes that overlap without being equal, is an error on every rank, before anything is copied or written.

The plan changes only when the parts do, so it is made once: a rank copies and holds in host memory only what it will
write itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero2all.common.peers import Peers
from zero2all.parallel.parts import TensorPart
from zero2all.train.checkpoints.index import (
    Index,
    Place,
    Sizes,
    StoredBox,
    TensorEntry,
    box_key,
    first_hole,
    first_overlap,
    index_json,
    intersection,
    parse_index,
)
from zero2all.train.checkpoints.layout import is_tensor_name, split_name, tensor_file_name
from zero2all.train.checkpoints.tensor_file import DTYPE_NAMES, DTYPES, TensorInfo, byte_count, header_bytes, lay_out


class LocalBox(NamedTuple):
    """A box of this rank: the name of the tensor, and the number of the box in its part."""

    name: str
    number: int


@dataclass(frozen=True)
class FilePlan:
    """One file of this rank: which box of which tensor goes where."""

    name: str
    infos: dict[str, TensorInfo]
    sources: dict[str, LocalBox]  # by key in the file

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return max((info.end for info in self.infos.values()), default=0)


@dataclass(frozen=True)
class SaveLayout:
    """The whole plan: what this rank writes, and what the finished checkpoint will hold."""

    files: list[FilePlan]
    index: Index
    file_bytes: dict[str, int]  # size of every file of tensors, of all ranks
    copies: dict[str, list[LocalBox]]
    """Boxes of this rank that others hold too, by the ranks that do ('0,2'); in the same order on each of these."""
    signature: dict[str, Any] = field(repr=False)  # what the plan was made for; see `signature_of`

    @property
    def total_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(self.file_bytes.values())


@dataclass(frozen=True)
class Read:
    """A part of a stored box, and where it goes."""

    box: StoredBox
    offsets: Sizes  # where the part begins within the box
    lengths: Sizes
    target: Tensor  # A view into the caller's tensor, of shape `lengths`


class _RankTensor(NamedTuple):
    """What one rank holds of a tensor."""

    dtype: str
    size: Sizes  # of the whole tensor
    places: tuple[Place, ...]


class _Written(NamedTuple):
    """A box that one rank writes."""

    source: LocalBox
    dtype: str
    size: Sizes  # of the whole tensor
    place: Place


Holders = dict[str, dict[Place, list[int]]]
"""Tensor -> box -> the ranks that hold it."""


def boxes_of(part: TensorPart) -> list[tuple[Place, Tensor]]:
    """The boxes of a part, with views of its values outside of autograd."""
    return [(Place(at, tuple(view.shape)), view) for at, view in part.like(part.values.detach()).boxes()]


def signature_of(parts: Mapping[str, TensorPart]) -> dict[str, Any]:
    """Everything a plan depends on, cheap to compute at every save."""
    return {
        name: (part.values.dtype, part.values.numel(), part.shape, part.offsets, part.lengths, part.start)
        for name, part in parts.items()
    }


def plan_save(
    parts: Mapping[str, TensorPart], peers: Peers, largest_file_bytes: int, hosts: Sequence[str] = ()
) -> SaveLayout:
    """Agree with the other ranks on who writes what. Every rank calls it; every rank gets the same index, or the same
    error. With the host of each rank, every host writes all that its ranks hold, and the plan is that of this host."""
    said = peers.gather(_own_boxes(parts))
    for rank, each in enumerate(said):
        if "problem" in each:  # raised on every rank, so that none waits for the others
            raise ValueError(f"rank {rank}: {each['problem']}")
    held = [{name: _parse_held(*values) for name, values in each["held"].items()} for each in said]
    sizes = _agreed_sizes(held)
    holders = _holders(held)
    for name, (_, size) in sizes.items():
        _check_filling(name, size, holders[name])
    copies = _copies(held[peers.rank], holders)
    is_whole = len(set(hosts)) <= 1
    if not is_whole:
        held = [own if host == hosts[peers.rank] else {} for own, host in zip(held, hosts, strict=True)]
        holders = _holders(held)
    written = _without_copies(held, holders)
    index: Index = {}
    files = [_files_of_rank(rank, own, largest_file_bytes, index) for rank, own in enumerate(written)]
    for name, (dtype, size) in sizes.items():  # a tensor without elements has no boxes
        index.setdefault(name, TensorEntry(dtype, size, ()))
    if is_whole:
        index = parse_index(index_json(index), "the plan of a checkpoint")  # it is one that we would read
    bytes_of = {file.name: len(header_bytes(file.infos)) + file.data_bytes for of_rank in files for file in of_rank}
    return SaveLayout(files[peers.rank], index, bytes_of, copies, signature_of(parts))


def plan_reads(parts: Mapping[str, TensorPart], index: Index) -> Iterator[Read]:
    """The reads that fill `parts`; names and shapes must be those of the index."""
    for name, part in parts.items():
        for place, target in boxes_of(part):
            for stored in index[name].boxes:
                common = intersection(place, stored.place)
                if common is not None:
                    begin = tuple(along.start for along in common.slices_from(stored.place.offsets))
                    yield Read(stored, begin, common.shape, target[common.slices_from(place.offsets)])


def _own_boxes(parts: Mapping[str, TensorPart]) -> dict[str, Any]:
    """What this rank could write, as JSON, or what is wrong with its parts."""
    try:
        _check_parts(parts)
        return {
            "held": {
                name: [DTYPE_NAMES[part.values.dtype], part.shape, [place for place, _ in boxes_of(part)]]
                for name, part in parts.items()
            }
        }
    except Exception as error:  # raised on every rank, by the caller
        return {"problem": str(error)}


def _parse_held(dtype: str, size: Sequence[int], places: Sequence[Any]) -> _RankTensor:
    return _RankTensor(dtype, tuple(size), tuple(Place(tuple(offsets), tuple(shape)) for offsets, shape in places))


def _holders(held: list[dict[str, _RankTensor]]) -> Holders:
    holders: Holders = {}
    for rank, own in enumerate(held):
        for name, each in own.items():
            places = holders.setdefault(name, {})
            for place in each.places:
                places.setdefault(place, []).append(rank)
    return holders


def _copies(own: Mapping[str, _RankTensor], holders: Holders) -> dict[str, list[LocalBox]]:
    copies: dict[str, list[LocalBox]] = {}
    for name, each in sorted(own.items()):
        for number, place in enumerate(each.places):
            ranks = holders[name][place]
            if len(ranks) > 1:
                copies.setdefault(",".join(map(str, ranks)), []).append(LocalBox(name, number))
    return copies


def _without_copies(held: list[dict[str, _RankTensor]], holders: Holders) -> list[list[_Written]]:
    """What each rank writes: every box once, by the rank that has least to write so far."""
    written: list[list[_Written]] = [[] for _ in held]
    planned = [0] * len(held)
    for name, places in holders.items():
        for place, ranks in places.items():
            writer = min(ranks, key=lambda rank: planned[rank])
            own = held[writer][name]
            planned[writer] += byte_count(own.dtype, place.shape)
            written[writer].append(_Written(LocalBox(name, own.places.index(place)), own.dtype, own.size, place))
    return written


def _files_of_rank(rank: int, boxes: list[_Written], largest_file_bytes: int, index: Index) -> list[FilePlan]:
    """Divide what a rank writes into files by group and size, and add the boxes to the index."""
    groups: dict[str, list[dict[str, _Written]]] = {}
    filled: dict[str, int] = {}
    for box in boxes:
        group, rest = split_name(box.source.name)
        size = byte_count(box.dtype, box.place.shape)
        contents = groups.setdefault(group, [])
        if not contents or filled[group] + size > largest_file_bytes:
            contents.append({})
            filled[group] = 0
        filled[group] += size
        contents[-1][box_key(rest, box.place.offsets, box.place.shape == box.size)] = box
    files = []
    for group, contents in groups.items():
        for number, keyed in enumerate(contents):
            file = tensor_file_name(group, rank, number)
            for key, box in keyed.items():
                before = index[box.source.name].boxes if box.source.name in index else ()
                index[box.source.name] = TensorEntry(box.dtype, box.size, (*before, StoredBox(box.place, file, key)))
            infos = lay_out({key: (box.dtype, box.place.shape) for key, box in keyed.items()})
            files.append(FilePlan(file, infos, {key: box.source for key, box in keyed.items()}))
    return files


def _check_parts(parts: Mapping[str, TensorPart]) -> None:
    """Check for bugs of the caller before anything is copied."""
    for name, part in parts.items():
        if not is_tensor_name(name):
            raise ValueError(f"a tensor of a checkpoint cannot be called {name!r}; expected 'group/name'")
        values = part.values
        if type(values) not in (Tensor, torch.nn.Parameter) or values.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} is a {type(values).__name__} of {values.dtype}; a checkpoint holds plain tensors of "
                f"{', '.join(DTYPES)}. Pass the plain tensors it consists of."
            )
        if values.is_meta:
            raise TypeError(f"{name} is on the meta device and holds no values")


def _agreed_sizes(held: list[dict[str, _RankTensor]]) -> dict[str, tuple[str, Sizes]]:
    """dtype and shape of every tensor; an error where the ranks disagree."""
    seen: dict[str, tuple[int, tuple[str, Sizes]]] = {}
    for rank, own in enumerate(held):
        for name, each in own.items():
            facts = (each.dtype, each.size)
            first, known = seen.setdefault(name, (rank, facts))
            if known != facts:
                raise ValueError(f"{name} is {facts} on rank {rank}, but {known} on rank {first}")
    return {name: facts for name, (_, facts) in seen.items()}


def _check_filling(name: str, size: Sizes, holders: Mapping[Place, list[int]]) -> None:
    """Check that the boxes of all ranks together hold every value of a tensor once, copies aside."""
    for place, ranks in holders.items():
        if not place.lies_in(size):
            raise ValueError(f"{name}: the box {place} of {_ranks(ranks)} reaches beyond the tensor's shape {size}")
    overlap = first_overlap(holders, len(size))
    if overlap is not None:
        one, other = overlap
        raise ValueError(
            f"{name} {size}: the box {one} of {_ranks(holders[one])} and the box {other} of {_ranks(holders[other])} "
            f"overlap and are not copies of each other"
        )
    missing = math.prod(size) - sum(place.numel for place in holders)
    if missing:
        who = sorted({rank for ranks in holders.values() for rank in ranks})
        rest = f"the other values are on {_ranks(who)}" if who else "every rank has an empty part"
        raise ValueError(
            f"{name} {size}: no rank holds {first_hole(holders, size)}; {missing} values are missing, {rest}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0, 2'; of many, some."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"
