"""The index of a checkpoint: in which files the boxes of each tensor are, and which of them overlap or are missing.

Ranks write the boxes they hold, so a tensor may be spread over several files. The index is what torch's distributed
checkpoint keeps in a pickle, as JSON: for every tensor its dtype and shape, and for every box the offset and shape
within the tensor, the file, and the key in that file. A tensor's boxes must fill it exactly, without gaps or overlaps,
and every box is exactly as long as its place in the file; so loading a checkpoint never takes more memory than it has
bytes on disk.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from zero2all.common.errors import BadInputError
from zero2all.common.manifest import is_count
from zero2all.train.checkpoints.layout import TENSOR_FILE_NAME, is_tensor_name
from zero2all.train.checkpoints.tensor_file import DTYPES, is_shape

Sizes = tuple[int, ...]
LARGEST_DIMENSIONS = 16


class Place(NamedTuple):
    """Where a box lies in its tensor."""

    offsets: Sizes
    shape: Sizes

    def __str__(self) -> str:
        return f"[{', '.join(f'{first}:{first + n}' for first, n in zip(self.offsets, self.shape, strict=True))}]"

    @property
    def numel(self) -> int:
        """Its number of values."""
        return math.prod(self.shape)

    def lies_in(self, size: Sizes) -> bool:
        """Whether it lies in a tensor of this size."""
        return all(first + n <= whole for first, n, whole in zip(self.offsets, self.shape, size, strict=True))

    def slices_from(self, origin: Sizes) -> tuple[slice, ...]:
        """It as an index into a box that begins at `origin`."""
        places = zip(self.offsets, self.shape, origin, strict=True)
        return tuple(slice(first - begin, first - begin + n) for first, n, begin in places)


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor, and where it is stored."""

    place: Place
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    dtype: str  # as safetensors spells it: F32, BF16, …
    shape: Sizes
    boxes: tuple[StoredBox, ...]


Index = dict[str, TensorEntry]
"""Tensor name -> where it is."""


def box_key(name: str, offsets: Sizes, is_whole: bool) -> str:
    """A box's key in its file: the plain name for a whole tensor, name@offsets for a part of one."""
    return name if is_whole else f"{name}@{','.join(map(str, offsets))}"


def index_json(index: Index) -> dict[str, Any]:
    """The index as JSON."""
    return {
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "boxes": [
                    {
                        "offsets": list(box.place.offsets),
                        "shape": list(box.place.shape),
                        "file": box.file,
                        "key": box.key,
                    }
                    for box in entry.boxes
                ],
            }
            for name, entry in sorted(index.items())
        }
    }


def parse_index(values: Any, where: str) -> Index:
    """The index of a JSON value; BadInputError when a name, a size or a box is not what we would write."""
    tensors = values.get("tensors") if isinstance(values, dict) else None
    if not isinstance(tensors, dict):
        raise BadInputError(f"{where} is not an index of tensors")
    index = {}
    for name, entry in tensors.items():
        if not is_tensor_name(name):
            raise BadInputError(f"{where} names a tensor {name[:80]!r}; expected a name such as 'model/norm.weight'")
        index[name] = _parse_entry(name, entry, where)
        check_filling(name, index[name], where)
    return index


def boxes_by_file(index: Index) -> dict[str, dict[str, tuple[str, Sizes]]]:
    """File -> key -> (dtype, shape): what each file's header must say."""
    files: dict[str, dict[str, tuple[str, Sizes]]] = {}
    for name, entry in index.items():
        for box in entry.boxes:
            keys = files.setdefault(box.file, {})
            if box.key in keys:
                raise BadInputError(f"two boxes (one of {name}) have the same key {box.key!r} of {box.file}")
            keys[box.key] = (entry.dtype, box.place.shape)
    return files


def _parse_entry(name: str, entry: Any, where: str) -> TensorEntry:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadInputError(f"{where}: {name} has the unknown dtype {str(dtype)[:40]!r}")
    shape = _sizes(entry.get("shape"), name, where)
    boxes = entry.get("boxes")
    if not isinstance(boxes, list):
        raise BadInputError(f"{where}: {name} has no list of boxes")
    return TensorEntry(dtype, shape, tuple(_parse_box(box, len(shape), name, where) for box in boxes))


def _parse_box(box: Any, dimensions: int, name: str, where: str) -> StoredBox:
    if not isinstance(box, dict) or not isinstance(box.get("key"), str):
        raise BadInputError(f"{where}: a box of {name} has no key")
    file = box.get("file")
    if not isinstance(file, str) or not TENSOR_FILE_NAME.fullmatch(file):
        raise BadInputError(f"{where}: {name} is listed in {str(file)[:80]!r}, which is not a file of a checkpoint")
    offsets = _sizes(box.get("offsets"), name, where)
    shape = _sizes(box.get("shape"), name, where)
    if not len(offsets) == len(shape) == dimensions:
        raise BadInputError(f"{where}: a box of {name} has another number of dimensions than the tensor")
    return StoredBox(Place(offsets, shape), file, box["key"])


def _sizes(value: Any, name: str, where: str) -> Sizes:
    if not isinstance(value, list) or len(value) > LARGEST_DIMENSIONS or not all(is_count(size) for size in value):
        raise BadInputError(f"{where}: {name} has an impossible shape or offset {str(value)[:80]}")
    if not is_shape(tuple(value)):
        raise BadInputError(f"{where}: {name} has the shape {str(value)[:80]}, which is too large")
    return tuple(value)


def check_filling(name: str, entry: TensorEntry, where: str) -> None:
    """Check that the boxes lie inside the tensor, do not overlap, and together have its volume: then they fill it."""
    places = [box.place for box in entry.boxes]
    for place in places:
        if not place.lies_in(entry.shape):
            raise BadInputError(f"{where}: a box of {name} reaches beyond the tensor's shape {entry.shape}")
        if 0 in place.shape:
            raise BadInputError(f"{where}: a box of {name} is empty")
    if sum(place.numel for place in places) != math.prod(entry.shape):
        raise BadInputError(f"{where}: the boxes of {name} do not fill its shape {entry.shape}")
    if first_overlap(places, len(entry.shape)) is not None:
        raise BadInputError(f"{where}: two boxes of {name} overlap")


def intersection(one: Place, other: Place) -> Place | None:
    """What two boxes have in common; None where that is nothing."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    shape = tuple(min(a + n, b + m) - first for (a, n, b, m), first in zip(ends, offsets, strict=True))
    return Place(offsets, shape) if all(length > 0 for length in shape) else None


def first_overlap(places: Iterable[Place], dimensions: int) -> tuple[Place, Place] | None:
    """Two boxes that share a value; None where no two do."""
    return next((pair for pair in _neighbours(list(places), dimensions) if intersection(*pair) is not None), None)


def first_hole(places: Iterable[Place], size: Sizes) -> Place | None:
    """A box of the tensor of which no value lies in any of these; None where they fill the tensor."""
    known = list(places)
    if not size:
        return None if known else Place((), ())
    borders = {0, size[0]} | {place.offsets[0] for place in known}
    borders |= {place.offsets[0] + place.shape[0] for place in known}
    for first, after in pairwise(sorted(borders)):
        over = [place for place in known if place.offsets[0] <= first and after <= place.offsets[0] + place.shape[0]]
        hole = first_hole([Place(place.offsets[1:], place.shape[1:]) for place in over], size[1:])
        if hole is not None:
            return Place((first, *hole.offsets), (after - first, *hole.shape))
    return None


def _neighbours(places: list[Place], dimensions: int) -> Iterator[tuple[Place, Place]]:
    """Every pair that meets in the dimension cut into the most parts; the others cannot overlap."""
    if dimensions == 0:  # one value: any two boxes hold it
        yield from pairwise(places)
        return
    cut = max(range(dimensions), key=lambda d: len({place.offsets[d] for place in places}))
    active: list[Place] = []
    for place in sorted(places, key=lambda place: place.offsets[cut]):
        active = [other for other in active if other.offsets[cut] + other.shape[cut] > place.offsets[cut]]
        for other in active:
            yield other, place
        active.append(place)
