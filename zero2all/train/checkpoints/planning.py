"""Which rank writes which box of which tensor, and which parts of stored boxes a rank reads.

What a rank holds of a tensor is a box of it: all of it, or the part of a DTensor that lies here. Of several ranks with
the same box, the one that has least to write so far writes it. The plan changes only when the tensors do, so it is made
once, before anything is copied: a rank copies and holds in host memory only what it will write itself.

A plain tensor is assumed to be the same on every rank that has it, and is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero2all.parallel.shards import box, has_part, local
from zero2all.train.checkpoints.index import Box, Index, TensorEntry, box_key, index_json, parse_index
from zero2all.train.checkpoints.layout import is_tensor_name, split_name, tensor_file_name
from zero2all.train.checkpoints.peers import Peers
from zero2all.train.checkpoints.tensor_file import DTYPE_NAMES, DTYPES, TensorInfo, byte_count, header_bytes, lay_out

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class FilePlan:
    """One file of this rank: which box of which tensor goes where."""

    name: str
    infos: dict[str, TensorInfo]
    sources: dict[str, str]  # key in the file -> name of the tensor whose local part it is

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
    signature: dict[str, Any] = field(repr=False)  # what the plan was made for; see `signature_of`

    @property
    def total_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(self.file_bytes.values())


@dataclass(frozen=True)
class Read:
    """A part of a stored box, and where it goes."""

    box: Box
    offsets: Sizes  # where the part begins within the box
    lengths: Sizes
    target: Tensor  # A view into the caller's tensor, of shape `lengths`


class _Part(NamedTuple):
    """What one rank holds of a tensor."""

    name: str
    dtype: str
    size: Sizes  # of the whole tensor
    offsets: Sizes
    shape: Sizes


def signature_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Everything a plan depends on, cheap to compute at every save."""
    return {
        name: (tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh)
        if isinstance(tensor, DTensor)
        else (tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
    }


def plan_save(tensors: Mapping[str, Tensor], peers: Peers, largest_file_bytes: int) -> SaveLayout:
    """Agree with the other ranks on who writes what. Every rank calls it; every rank gets the same index."""
    said = peers.gather(_own_parts(tensors))
    for rank, each in enumerate(said):
        if "problem" in each:  # raised on every rank, so that none waits for the others
            raise ValueError(f"rank {rank}: {each['problem']}")
    held = [[_Part(name, dtype, *map(tuple, sizes)) for name, dtype, *sizes in each["parts"]] for each in said]
    _check_agreement(held)
    index: Index = {}
    files = [_files_of_rank(rank, parts, largest_file_bytes, index) for rank, parts in enumerate(_without_copies(held))]
    for part in (part for parts in held for part in parts):  # a tensor without elements has no boxes
        index.setdefault(part.name, TensorEntry(part.dtype, part.size, ()))
    index = parse_index(index_json(index), "the plan of a checkpoint")  # checks that boxes fill their tensors
    sizes = {file.name: len(header_bytes(file.infos)) + file.data_bytes for own_files in files for file in own_files}
    return SaveLayout(files[peers.rank], index, sizes, signature_of(tensors))


def plan_reads(tensors: Mapping[str, Tensor], index: Index) -> Iterator[Read]:
    """The reads that fill this rank's part of `tensors`; names and shapes must be those of the index."""
    for name, tensor in tensors.items():
        if not has_part(tensor):
            continue
        target, place = local(tensor.detach()), box(tensor)
        for stored in index[name].boxes:
            ends = [o + n for o, n in zip(stored.offsets, stored.shape, strict=True)]
            first = [max(o, own.start) for o, own in zip(stored.offsets, place, strict=True)]
            lengths = tuple(min(e, own.stop) - f for e, own, f in zip(ends, place, first, strict=True))
            if all(length > 0 for length in lengths):
                offsets = tuple(f - o for f, o in zip(first, stored.offsets, strict=True))
                inside = tuple(
                    slice(f - own.start, f - own.start + n) for f, own, n in zip(first, place, lengths, strict=True)
                )
                yield Read(stored, offsets, lengths, target[inside])


def _own_parts(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What this rank could write, or what is wrong with its tensors."""
    try:
        _check_tensors(tensors)
        places = {name: box(tensor) for name, tensor in tensors.items() if has_part(tensor)}
    except Exception as error:  # raised on every rank, by the caller
        return {"problem": str(error)}
    return {
        "parts": [
            _Part(
                name,
                DTYPE_NAMES[tensors[name].dtype],
                tuple(tensors[name].shape),
                tuple(along.start for along in place),
                tuple(along.stop - along.start for along in place),
            )
            for name, place in places.items()
        ]
    }


def _without_copies(held: list[list[_Part]]) -> list[list[_Part]]:
    """What each rank writes: every box once, by the rank that has least to write so far."""
    holders: dict[tuple[str, Sizes], list[int]] = {}
    sizes: dict[tuple[str, Sizes], int] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            holders.setdefault((part.name, part.offsets), []).append(rank)
            sizes[part.name, part.offsets] = byte_count(part.dtype, part.size)
    writers, planned = {}, [0] * len(held)
    for key, ranks in holders.items():
        writers[key] = min(ranks, key=lambda rank: planned[rank])
        planned[writers[key]] += sizes[key] or 1
    return [[part for part in parts if writers[part.name, part.offsets] == rank] for rank, parts in enumerate(held)]


def _files_of_rank(rank: int, parts: list[_Part], largest_file_bytes: int, index: Index) -> list[FilePlan]:
    """Divide what a rank writes into files by group and size, and add the boxes to the index."""
    groups: dict[str, list[dict[str, _Part]]] = {}
    filled: dict[str, int] = {}
    for part in parts:
        if 0 in part.shape:
            continue
        group, rest = split_name(part.name)
        size = byte_count(part.dtype, part.shape)
        contents = groups.setdefault(group, [])
        if not contents or filled[group] + size > largest_file_bytes:
            contents.append({})
            filled[group] = 0
        filled[group] += size
        contents[-1][box_key(rest, part.offsets, part.shape == part.size)] = part
    files = []
    for group, contents in groups.items():
        for number, keyed in enumerate(contents):
            name = tensor_file_name(group, rank, number)
            for key, part in keyed.items():
                before = index[part.name].boxes if part.name in index else ()
                boxes = (*before, Box(part.offsets, part.shape, name, key))
                index[part.name] = TensorEntry(part.dtype, part.size, boxes)
            infos = lay_out({key: (part.dtype, part.shape) for key, part in keyed.items()})
            files.append(FilePlan(name, infos, {key: part.name for key, part in keyed.items()}))
    return files


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Check for bugs of the caller before anything is copied."""
    for name, tensor in tensors.items():
        if not is_tensor_name(name):
            raise ValueError(f"a tensor of a checkpoint cannot be called {name!r}; expected 'group/name'")
        part = local(tensor)
        if type(part) not in (Tensor, torch.nn.Parameter) or part.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} is a {type(part).__name__} of {part.dtype}; a checkpoint holds plain tensors of "
                f"{', '.join(DTYPES)}. Give the plain tensors it is made of."
            )
        if part.is_meta:
            raise TypeError(f"{name} is on the meta device and holds no values")


def _check_agreement(held: list[list[_Part]]) -> None:
    """Check that a tensor has one dtype and one shape on all ranks."""
    seen: dict[str, tuple[int, tuple[str, Sizes]]] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            facts = (part.dtype, part.size)
            first, known = seen.setdefault(part.name, (rank, facts))
            if known != facts:
                raise ValueError(f"{part.name} is {facts} on rank {rank}, but {known} on rank {first}")
