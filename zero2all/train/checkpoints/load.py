"""A verified checkpoint, and how tensors are read from it: whole ones for tools, a rank's own parts for training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.common.files import as_written
from zero2all.train.checkpoints.index import Index
from zero2all.train.checkpoints.layout import split_name
from zero2all.train.checkpoints.reads import Read, whole_reads
from zero2all.train.checkpoints.tensor_file import DTYPE_NAMES, DTYPES, READ_BYTES, Header, byte_count, read_rows
from zero2all.train.checkpoints.verify import Contents, check_bytes, read_contents


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte has been compared with its manifest."""

    contents: Contents

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.contents.folder

    @property
    def manifest(self) -> dict[str, Any]:
        """Step, world size, files, and the details given when it was saved."""
        return self.contents.manifest

    @property
    def document(self) -> dict[str, Any]:
        """The snapshot's document: counters and the like."""
        return self.contents.document

    @property
    def index(self) -> Index:
        """Name -> dtype, shape and pieces of every tensor."""
        return self.contents.index

    @property
    def step(self) -> int:
        """Updates made before it was saved."""
        return int(self.manifest["step"])

    @property
    def total_bytes(self) -> int:
        """Bytes of all its files except the manifest."""
        return sum(int(facts["bytes"]) for facts in self.manifest["files"].values())

    def load_into(self, tensors: Mapping[str, Tensor], strict: bool = True) -> None:
        """Fill tensors in place, each rank its own part, however they were sharded when they were saved.

        Raises before changing anything when a name, a shape or a dtype differs. With `strict`, `tensors` must have
        every tensor of its groups ('model', 'optimizer', …).
        """
        self._check_names(tensors, strict)
        with torch.no_grad():
            reads = self._reads(tensors)
            for file in sorted({read.piece.file for read in reads}):
                self._read_file(file, [read for read in reads if read.piece.file == file])

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Whole tensors on the CPU, by what follows the prefix ('model/', 'optimizer/exp_avg/') in their names."""
        names = [name for name in self.index if name.startswith(prefix)]
        found = {
            name: torch.empty(self.index[name].shape, dtype=DTYPES[self.index[name].dtype]) for name in sorted(names)
        }
        self.load_into(found, strict=False)
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def _reads(self, tensors: Mapping[str, Tensor]) -> list[Read]:
        if all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors.values()):
            return list(whole_reads(tensors, self.index))
        # Here, because importing torch's planners takes more than a second, and tools read whole tensors.
        from zero2all.train.checkpoints.planning import plan_reads

        return plan_reads(tensors, self.index)

    def _check_names(self, tensors: Mapping[str, Tensor], strict: bool) -> None:
        differences = []
        for name, tensor in tensors.items():
            entry = self.index.get(name)
            wanted = (DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            if entry is None:
                differences.append(f"{name}: absent instead of {wanted[1]}")
            elif entry.shape != wanted[1]:
                differences.append(f"{name}: {entry.shape} instead of {wanted[1]}")
            elif entry.dtype != wanted[0]:
                differences.append(f"{name}: {entry.dtype} instead of {wanted[0]}")
        if strict:
            groups = {split_name(name)[0] for name in tensors}
            unknown = (name for name in self.index if split_name(name)[0] in groups and name not in tensors)
            differences += [f"{name}: unknown here" for name in unknown]
        if differences:
            more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
            raise BadInputError(
                f"The checkpoint {self.folder} is of another model: {'; '.join(differences[:4])}{more}. Use the config "
                f"it was trained with (config.yaml in its run folder), or choose another train.name."
            )

    def _read_file(self, file: str, reads: list[Read]) -> None:
        header = self.contents.headers[file]
        path = self.folder / file
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise BadInputError(f"{path} cannot be read ({error})") from error
        try:
            for read in reads:
                _fill(handle, header, read)
        except OSError as error:
            raise BadInputError(f"{path} cannot be read ({error})") from error
        finally:
            os.close(handle)


@contextmanager
def reading_record(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn errors while a part of the record is read (guards, data, stages) into BadInputError.

    The seal finds damage, but not a changed record with a new seal; that is found here.
    """
    remedy = "Move it away to continue from an older checkpoint, or start over with --fresh."
    with as_written(f"The record of the run in {checkpoint.folder}", remedy):
        yield


def verified_checkpoint(folder: Path) -> Checkpoint:
    """Open one checkpoint after checking every byte of it; BadInputError says what is wrong with it."""
    contents = read_contents(folder)
    check_bytes(contents, contents.files)
    return Checkpoint(contents)


def _fill(handle: int, header: Header, read: Read) -> None:
    """Read rows, some MB at a time, and keep the wanted columns."""
    info = header.infos[read.piece.key]
    if not info.shape:
        read.target.copy_(read_rows(handle, header, info, 0, 1))
        return
    first, count = read.offsets[0], read.lengths[0]
    at_once = max(1, READ_BYTES // max(1, byte_count(info.dtype, info.shape[1:])))
    columns = tuple(slice(o, o + n) for o, n in zip(read.offsets[1:], read.lengths[1:], strict=True))
    for start in range(0, count, at_once):
        rows = read_rows(handle, header, info, first + start, min(at_once, count - start))
        read.target[start : start + len(rows)].copy_(rows[(slice(None), *columns)])
