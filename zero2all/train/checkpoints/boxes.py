"""Where boxes lie in a tensor: what two have in common, which ones overlap, what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

Sizes = tuple[int, ...]


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
