"""Which rank writes what: torch's planners decide, for tensors sharded in any way.

The planners of `torch.distributed.checkpoint` know how a DTensor is spread over a mesh, which of several equal copies
to write, and, at loading, which part of which stored piece belongs where; they are reused. Its driver is not: it
pickles plans and metadata, and it copies the state before it plans. Here the plan is made first (and once, because it
changes only when the tensors do), so that a rank copies and holds in host memory only what it will write itself.

A plain tensor is assumed to be the same on every rank that has it, and is written once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from zero2all.train.checkpoints.index import Index, Piece, TensorEntry, index_document, parse_index, piece_key
from zero2all.train.checkpoints.layout import is_tensor_name, split_name, tensor_file_name
from zero2all.train.checkpoints.peers import Peers
from zero2all.train.checkpoints.reads import Read
from zero2all.train.checkpoints.tensor_file import DTYPE_NAMES, DTYPES, TensorInfo, byte_count, header_bytes, lay_out


@dataclass(frozen=True)
class FilePlan:
    """One file of this rank: which piece of which tensor goes where."""

    name: str
    infos: dict[str, TensorInfo]
    sources: dict[str, str]
    """Key in the file -> name of the tensor whose local part it is."""

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return max((info.end for info in self.infos.values()), default=0)


@dataclass(frozen=True)
class SaveLayout:
    """The whole plan: what this rank writes, and what the finished checkpoint will hold."""

    files: list[FilePlan]
    index: Index
    file_bytes: dict[str, int]
    """Size of every file of tensors, of all ranks."""
    signature: dict[str, Any] = field(repr=False)
    """What the plan was made for; see `signature_of`."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(self.file_bytes.values())


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
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    said = peers.gather(_own_items(planner, tensors, peers.is_first))
    for rank, each in enumerate(said):
        if "problem" in each:  # raised on every rank, so that none waits for the others
            raise ValueError(f"rank {rank}: {each['problem']}")
    plans = [SavePlan([_item_of(document) for document in each["items"]]) for each in said]
    _check_agreement(plans)
    shared, _ = planner.create_global_plan(plans)  # keeps one of equal copies, checks that pieces fill their tensors
    index: Index = {}
    files: list[list[FilePlan]] = []
    for rank, plan in enumerate(shared):
        files.append(_files_of_rank(rank, plan, largest_file_bytes, index))
    for item in (item for plan in plans for item in plan.items):  # a tensor without elements has no pieces
        data = _data_of(item)
        index.setdefault(item.index.fqn, TensorEntry(DTYPE_NAMES[data.properties.dtype], tuple(data.size), ()))
    index = parse_index(index_document(index), "the plan of a checkpoint")
    sizes = {file.name: len(header_bytes(file.infos)) + file.data_bytes for own_files in files for file in own_files}
    return SaveLayout(files[peers.rank], index, sizes, signature_of(tensors))


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def plan_reads(tensors: Mapping[str, Tensor], index: Index) -> list[Read]:
    """The reads that fill this rank's part of `tensors`; names and shapes must be those of the index."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), _metadata({name: index[name] for name in tensors}), is_coordinator=False)
    return [_read_of(item, index, planner.resolve_tensor(item)) for item in planner.create_local_plan().items]


def _files_of_rank(rank: int, plan: SavePlan, largest_file_bytes: int, index: Index) -> list[FilePlan]:
    """Divide what a rank writes into files by group and size, and add the pieces to the index."""
    parts: dict[str, list[dict[str, WriteItem]]] = {}
    filled: dict[str, int] = {}
    for item in plan.items:
        data = _data_of(item)
        shape = tuple(data.chunk.sizes)
        if 0 in shape:
            continue
        group, rest = split_name(item.index.fqn)
        size = byte_count(DTYPE_NAMES[data.properties.dtype], shape)
        group_parts = parts.setdefault(group, [])
        if not group_parts or filled[group] + size > largest_file_bytes:
            group_parts.append({})
            filled[group] = 0
        filled[group] += size
        offsets = tuple(data.chunk.offsets)
        group_parts[-1][piece_key(rest, offsets, shape == tuple(data.size))] = item
    files = []
    for group, group_parts in parts.items():
        for number, items in enumerate(group_parts):
            name = tensor_file_name(group, rank, number)
            for key, item in items.items():
                _enter_piece(index, item, name, key)
            described = {key: (_dtype_of(item), tuple(_data_of(item).chunk.sizes)) for key, item in items.items()}
            files.append(FilePlan(name, lay_out(described), {key: item.index.fqn for key, item in items.items()}))
    return files


def _enter_piece(index: Index, item: WriteItem, file: str, key: str) -> None:
    data = _data_of(item)
    piece = Piece(tuple(data.chunk.offsets), tuple(data.chunk.sizes), file, key)
    before = index.get(item.index.fqn)
    pieces = (*before.pieces, piece) if before else (piece,)
    index[item.index.fqn] = TensorEntry(_dtype_of(item), tuple(data.size), pieces)


def _own_items(planner: DefaultSavePlanner, tensors: Mapping[str, Tensor], is_first: bool) -> dict[str, Any]:
    """What this rank could write, or what is wrong with its tensors."""
    try:
        _check_tensors(tensors)
        planner.set_up_planner(dict(tensors), is_coordinator=is_first)
        return {"items": [_item_document(item) for item in planner.create_local_plan().items]}
    except Exception as error:
        return {"problem": str(error)}


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Check for bugs of the caller before anything is copied."""
    for name, tensor in tensors.items():
        if not is_tensor_name(name):
            raise ValueError(f"a tensor of a checkpoint cannot be called {name!r}; expected 'group/name'")
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if type(local) not in (Tensor, torch.nn.Parameter) or local.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} is a {type(local).__name__} of {local.dtype}; a checkpoint holds plain tensors of "
                f"{', '.join(DTYPES)}. Give the plain tensors it is made of."
            )
        if local.is_meta:
            raise TypeError(f"{name} is on the meta device and holds no values")


def _check_agreement(plans: list[SavePlan]) -> None:
    """Check that a tensor has one dtype and one shape on all ranks."""
    seen: dict[str, tuple[int, tuple[str, tuple[int, ...]]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            facts = (_dtype_of(item), tuple(_data_of(item).size))
            first, known = seen.setdefault(item.index.fqn, (rank, facts))
            if known != facts:
                raise ValueError(f"{item.index.fqn} is {facts} on rank {rank}, but {known} on rank {first}")


def _item_document(item: WriteItem) -> list[Any]:
    data = _data_of(item)
    sizes = [list(data.size), list(data.chunk.offsets), list(data.chunk.sizes)]
    return [item.index.fqn, item.type is WriteItemType.SHARD, _dtype_of(item), *sizes]


def _item_of(document: list[Any]) -> WriteItem:
    name, is_shard, dtype, size, offsets, sizes = document
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=DTYPES[dtype]), torch.Size(size))
    kind = WriteItemType.SHARD if is_shard else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)


def _data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "a checkpoint holds tensors only; the document holds the rest"
    return item.tensor_data


def _dtype_of(item: WriteItem) -> str:
    return DTYPE_NAMES[_data_of(item).properties.dtype]


def _metadata(index: Index) -> Metadata:
    """An index as metadata of the planners."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[entry.dtype]),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in entry.pieces],
            )
            for name, entry in index.items()
        }
    )


def _read_of(item: ReadItem, index: Index, target: Tensor) -> Read:
    name, stored = item.storage_index.fqn, item.storage_index
    pieces = index[name].pieces
    number = stored.index
    if number is None or pieces[number].offsets != tuple(stored.offset or ()):
        number = [piece.offsets for piece in pieces].index(tuple(stored.offset or ()))
    assert math.prod(item.lengths) == target.numel(), f"the plan for {name} does not fit its target"
    return Read(pieces[number], tuple(item.storage_offsets), tuple(item.lengths), target)
