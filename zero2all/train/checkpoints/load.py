"""A checkpoint on disk: checked before any of it is used, then read whole (tools) or each rank its parts (training).

First what is cheap: regular files with the right names and sizes, a manifest with a valid seal, an index whose boxes
fill their tensors, file headers that agree with the index. Nothing is allocated for a tensor, nothing is
executed, no name from a file becomes a path. Then the bytes: the crc32c of every file, or, for a tool that only needs
the weights, that of their files.
"""

import functools
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero2all.common.errors import BadInputError, for_all_ranks
from zero2all.common.files import as_written
from zero2all.common.manifest import is_count
from zero2all.common.peers import Peers
from zero2all.parallel.parts import TensorPart
from zero2all.train.checkpoints import tensor_file
from zero2all.train.checkpoints.index import Index, boxes_by_file, parse_index
from zero2all.train.checkpoints.layout import INDEX_NAME, STATE_NAME, read_exact, split_name, step_of
from zero2all.train.checkpoints.manifest import read_manifest
from zero2all.train.checkpoints.planning import Read, plan_reads


class OtherModelError(BadInputError):
    """An intact checkpoint, but of another model than asked for."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, checked in form by `read_checkpoint` and byte by byte by `check_bytes`."""

    folder: Path
    manifest: dict[str, Any]  # step, world size, files, and the details given when it was saved
    index: Index  # name -> dtype, shape and boxes of every tensor
    headers: dict[str, tensor_file.Header]
    record: dict[str, Any]  # the snapshot's record: counters and the like
    peers: Peers = field(default_factory=Peers, repr=False)  # the ranks that opened it together
    in_memory: bool = False  # it lies in a RAM file system; see `memory`

    @property
    def name(self) -> str:
        """For messages."""
        return "memory" if self.in_memory else self.folder.name

    @property
    def files(self) -> list[str]:
        """Every file except the manifest."""
        return list(self.manifest["files"])

    @property
    def step(self) -> int:
        """Updates made before it was saved."""
        return int(self.manifest["step"])

    @property
    def model_group(self) -> str:
        """The group of names with the weights to use: of groups of DiLoCo, what they have in common."""
        return "outer" if any(name.startswith("outer/") for name in self.index) else "model"

    def load_into(self, parts: Mapping[str, TensorPart], strict: bool = True, any_dtype: bool = False) -> None:
        """Fill parts in place, however the tensors were cut when they were saved. Called by all ranks that opened the
        checkpoint together; all of them raise, before anything is changed, when a name, a shape or (without
        `any_dtype`) a dtype differs on one of them. With `strict`, the ranks together must have every tensor of their
        groups ('model', 'optimizer', …); one rank may have a few of them only."""
        self._check_names(parts, strict, any_dtype)
        self._read(parts)

    def load_checked(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill whole tensors of any dtype, on any device, after a check of the bytes of their files; for a checkpoint
        of which only the form was checked. They must be all tensors of their groups."""
        parts = {name: TensorPart.whole(tensor) for name, tensor in tensors.items()}
        self._check_names(parts, strict=True, any_dtype=True)
        check_bytes(self, sorted({box.file for name in tensors for box in self.index[name].boxes}))
        self._read(parts)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Whole tensors on the CPU, by what follows the prefix ('model/', 'optimizer/exp_avg/') in their names."""
        names = [name for name in self.index if name.startswith(prefix)]
        found = {
            name: torch.empty(self.index[name].shape, dtype=tensor_file.DTYPES[self.index[name].dtype])
            for name in sorted(names)
        }
        self.load_into({name: TensorPart.whole(tensor) for name, tensor in found.items()}, strict=False)
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def _check_names(self, parts: Mapping[str, TensorPart], strict: bool, any_dtype: bool = False) -> None:
        said = self.peers.gather([list(parts), self._differences(parts, any_dtype)])
        differences = list(dict.fromkeys(each for _, of_rank in said for each in of_rank))
        if strict:
            names = {name for of_rank, _ in said for name in of_rank}
            groups = {split_name(name)[0] for name in names}
            unknown = (name for name in self.index if split_name(name)[0] in groups and name not in names)
            differences += [f"{name}: not expected" for name in unknown]
        if differences:
            found = "; ".join(differences[:4] + ["…"] * (len(differences) > 4))
            remedy = "Use the config it was trained with (config.yaml in its run folder), or another --train.name."
            if all(each.startswith("optimizer/") for each in differences):
                problem = f"The checkpoint {self.folder} is of another optimizer: {found}."
                remedy += (
                    " An optimizer that this version does not have (lion, sgd, adafactor) cannot be continued: run "
                    "`z2a export`, then `z2a import`, for a run at step 0 with these weights."
                )
            else:
                problem = f"The checkpoint {self.folder} is of another model: {found}."
            raise for_all_ranks(OtherModelError(f"{problem} {remedy}"))

    def _differences(self, parts: Mapping[str, TensorPart], any_dtype: bool) -> list[str]:
        """How this rank's parts differ from what is stored, in words."""
        differences = []
        for name, part in parts.items():
            entry = self.index.get(name)
            dtype = tensor_file.DTYPE_NAMES.get(part.values.dtype, str(part.values.dtype))
            if entry is None:
                differences.append(f"{name}: missing instead of {part.shape}")
            elif entry.shape != part.shape:
                differences.append(f"{name}: {entry.shape} instead of {part.shape}")
            elif entry.dtype != dtype and not any_dtype:
                differences.append(f"{name}: {entry.dtype} instead of {dtype}")
        return differences

    def _read(self, parts: Mapping[str, TensorPart]) -> None:
        reads = list(plan_reads(parts, self.index))
        for file in sorted({read.box.file for read in reads}):
            of_file = [read for read in reads if read.box.file == file]
            with _opened(self.folder / file) as handle, ThreadPoolExecutor(tensor_file.READERS) as readers:
                list(readers.map(functools.partial(_fill, handle, self.headers[file]), of_file))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A handle for reading; what the system reports becomes BadInputError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            yield handle
        finally:
            os.close(handle)
    except OSError as error:
        raise BadInputError(f"{path} cannot be read ({error})") from error


@contextmanager
def reading_record(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn errors in reading the record (guards, data, stages), which may be forged, into BadInputError."""
    remedy = "Move the folder away to continue from an older checkpoint, or start over with --fresh."
    with as_written(f"The record of the run in {checkpoint.folder}", remedy):
        yield


def verified_checkpoint(folder: Path) -> Checkpoint:
    """Open one checkpoint after checking every byte of it; BadInputError says what is wrong with it."""
    checkpoint = read_checkpoint(folder)
    check_bytes(checkpoint, checkpoint.files)
    return checkpoint


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check the form of a checkpoint; BadInputError says what is wrong with it."""
    try:
        return _read_checkpoint(folder)
    except OSError as error:
        raise BadInputError(f"{folder} cannot be read ({error})") from error


def check_bytes(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Compare the bytes of these files with the manifest."""
    for name in names:
        path = checkpoint.folder / name
        try:
            crc = tensor_file.file_crc32c(path)
        except OSError as error:
            raise BadInputError(f"{path} cannot be read ({error})") from error
        if crc != checkpoint.manifest["files"][name]["crc32c"]:
            raise _changed(path)


def _changed(path: Path) -> BadInputError:
    return BadInputError(f"{path} has changed since it was written (crc32c differs)")


def _read_checkpoint(folder: Path) -> Checkpoint:
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise BadInputError(f"{folder} is not a folder")
    manifest = read_manifest(folder)
    if manifest["step"] != step_of(folder):
        raise BadInputError(f"{folder} contains step {manifest['step']}: it was renamed after it was written")
    for name, facts in manifest["files"].items():
        _check_file(folder / name, facts["bytes"])
    index = parse_index(read_exact(folder / INDEX_NAME), str(folder / INDEX_NAME))
    record = read_exact(folder / STATE_NAME)
    _check_state(folder / STATE_NAME, record, manifest["step"])
    return Checkpoint(folder, manifest, index, _check_headers(folder, manifest, index), record)


def _check_state(path: Path, record: Any, step: int) -> None:
    """Check the fields that a resumed run needs; the guards check their own."""
    if not isinstance(record, dict):
        raise BadInputError(f"{path} is not a JSON object")
    for name, value in record.items():
        known = {
            "step": value == step and is_count(value),
            "tokens": is_count(value),
            "guards": value is None or isinstance(value, dict),
            "stage": value is None or isinstance(value, str),
        }
        if not known.get(name, True):
            raise BadInputError(f"{path}: the value of `{name}` is {str(value)[:80]!r}, which is not valid")


def _check_file(path: Path, expected_bytes: int) -> None:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        raise BadInputError(f"{path} is missing") from None
    if not stat.S_ISREG(facts.st_mode):
        raise BadInputError(f"{path} is not a regular file (a link, a device or a folder)")
    if facts.st_size != expected_bytes:
        raise BadInputError(f"{path} has {facts.st_size} bytes, but the manifest says {expected_bytes}")


def _check_headers(folder: Path, manifest: dict[str, Any], index: Index) -> dict[str, tensor_file.Header]:
    """Every file of tensors holds exactly the boxes that the index puts there."""
    listed = set(manifest["files"]) - {INDEX_NAME, STATE_NAME}
    expected = boxes_by_file(index)
    if listed != set(expected):
        raise BadInputError(f"{folder}: index and manifest differ in {', '.join(sorted(listed ^ set(expected)))}")
    headers = {}
    for name in sorted(listed):
        headers[name] = tensor_file.read_header(folder / name)
        found = {key: (info.dtype, info.shape) for key, info in headers[name].infos.items()}
        wrong = sorted(key for key in found.keys() | expected[name].keys() if found.get(key) != expected[name].get(key))
        if wrong:
            raise BadInputError(
                f"{folder / name}: its header and the index differ in {wrong[0][:80]!r} "
                f"({found.get(wrong[0])} instead of {expected[name].get(wrong[0])})"
            )
    return headers


@torch.no_grad()
def _fill(handle: int, header: tensor_file.Header, read: Read) -> None:
    """Read rows, some MB at a time, and keep the wanted columns."""
    info = header.infos[read.box.key]
    if not info.shape:
        read.target.copy_(tensor_file.read_rows(handle, header, info, 0, 1))
        return
    first, count = read.offsets[0], read.lengths[0]
    at_once = max(1, tensor_file.READ_BYTES // max(1, tensor_file.byte_count(info.dtype, info.shape[1:])))
    columns = tuple(slice(o, o + n) for o, n in zip(read.offsets[1:], read.lengths[1:], strict=True))
    for start in range(0, count, at_once):
        rows = tensor_file.read_rows(handle, header, info, first + start, min(at_once, count - start))
        read.target[start : start + len(rows)].copy_(rows[(slice(None), *columns)])
