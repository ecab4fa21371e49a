"""Parts of any layout: holes and overlaps are found before a byte is written, and any layout loads any other.

The ranks are threads of this process."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.peers import Peers
from zero2all.parallel.parts import Box, TensorPart
from zero2all.train.checkpoints import store as store_module
from zero2all.train.checkpoints.checks import ReplicasDifferError
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.index import Place, first_hole, first_overlap
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore

Parts = dict[str, TensorPart]


class Meeting:
    """Where threads gather their values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)


class ThreadPeers(Peers):
    """Peers that are threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, len(meeting.values), meeting

    def gather(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = jsonio.loads_exact(jsonio.dumps_exact(value), "what a thread said")
        self._meeting.barrier.wait()
        said = list(self._meeting.values)
        self._meeting.barrier.wait()
        return said


@pytest.fixture
def together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Call work(rank, store) in `world` ranks that share a run; returns what each returned."""
    monkeypatch.setattr(store_module, "open_peers", lambda peers, _timeout: next(peers))

    def call(world: int, work: Callable[[int, CheckpointStore], Any]) -> list[Any]:
        meetings = [Meeting(world), Meeting(world)]

        def one_rank(rank: int) -> Any:
            peers = iter([ThreadPeers(rank, meeting) for meeting in meetings])
            store = CheckpointStore(tmp_path / "run", peers, say=lambda _text: None)  # type: ignore[arg-type]
            try:
                return work(rank, store)
            finally:
                store.close()

        with ThreadPoolExecutor(world) as threads:
            return list(threads.map(one_rank, range(world)))

    return call


def save(parts_of: Callable[[int], Parts], step: int = 1) -> Callable[[int, CheckpointStore], str | None]:
    """Save what each rank holds; returns the problem."""

    def work(rank: int, store: CheckpointStore) -> str | None:
        result = store.save(step, Snapshot(parts_of(rank)), {}, wait=True).result
        assert result is not None
        return result.problem

    return work


# ---- layouts ----

WORLD = 4
TENSORS = {
    "model/table": torch.arange(77.0).view(11, 7),
    "model/cube": torch.arange(60, dtype=torch.int32).view(3, 4, 5),
    "model/norm": torch.arange(6.0) + 0.5,
    "optimizer/exp_avg/table": torch.arange(77.0, dtype=torch.float64).view(11, 7) / 3,
    "optimizer/step/all": torch.tensor(3.0),
}


def ranged(tensor: Tensor, rank: int, ranks: int) -> TensorPart:
    """Of equal ranges of the flattened tensor, without regard to rows; the last ones may be empty."""
    each = -(-tensor.numel() // ranks) if tensor.dim() else 1
    start, stop = (min(at * each, tensor.numel()) for at in (rank, rank + 1))
    if not tensor.dim():
        return TensorPart.whole(tensor.clone())
    return TensorPart.of_range(tensor.reshape(-1)[start:stop].clone(), tuple(tensor.shape), start, None)


def by_rows(tensor: Tensor, rank: int) -> TensorPart:
    """As FSDP cuts it."""
    if not tensor.dim():
        return TensorPart.whole(tensor.clone())
    each, row = -(-len(tensor) // WORLD), math.prod(tensor.shape[1:])
    start, stop = (min(at * each, len(tensor)) for at in (rank, rank + 1))
    return TensorPart.of_range(tensor[start:stop].clone(), tuple(tensor.shape), start * row, None)


def by_columns(tensor: Tensor, rank: int) -> TensorPart:
    """Two tensor ranks cut columns, two others ranges of each half."""
    if tensor.dim() < 2:
        return TensorPart.whole(tensor.clone())
    middle = tensor.shape[-1] // 2
    half, first = (tensor[..., :middle], 0) if rank < 2 else (tensor[..., middle:], middle)
    inner = ranged(half, rank % 2, 2)
    box = Box((*(0 for _ in tensor.shape[1:]), first), tuple(half.shape))
    return TensorPart(inner.values, tuple(tensor.shape), box, inner.start)


def owned(tensor: Tensor, rank: int, number: int) -> TensorPart:
    """One rank has all of it, the others nothing."""
    return TensorPart.whole(tensor.clone()) if rank == number % WORLD else ranged(tensor, WORLD, WORLD)


LAYOUTS: dict[str, Callable[[int], Parts]] = {
    "copies": lambda _: {name: TensorPart.whole(tensor.clone()) for name, tensor in TENSORS.items()},
    "ranges": lambda rank: {name: ranged(tensor, rank, WORLD) for name, tensor in TENSORS.items()},
    "hybrid": lambda rank: {name: ranged(tensor, rank % 2, 2) for name, tensor in TENSORS.items()},
    "rows": lambda rank: {name: by_rows(tensor, rank) for name, tensor in TENSORS.items()},
    "columns": lambda rank: {name: by_columns(tensor, rank) for name, tensor in TENSORS.items()},
    "owners": lambda rank: {
        name: owned(tensor, rank, at) if tensor.dim() else TensorPart.whole(tensor.clone())
        for at, (name, tensor) in enumerate(TENSORS.items())
    },
    "stages": lambda rank: {
        name: TensorPart.whole(tensor.clone())
        for at, (name, tensor) in enumerate(TENSORS.items())
        if at % WORLD == rank
    },
}


@pytest.mark.parametrize("saved", LAYOUTS)
def test_what_any_layout_saved_every_other_loads(together, tmp_path, saved):
    assert together(WORLD, save(LAYOUTS[saved])) == [None] * WORLD
    found = newest_checkpoint(tmp_path / "run")
    assert found is not None
    for name, tensor in {**found.tensors("model/"), **found.tensors("optimizer/")}.items():
        known = TENSORS.get(f"model/{name}", TENSORS.get(f"optimizer/{name}"))
        assert torch.equal(tensor, known), name
    wide = {name: torch.empty(tensor.shape, dtype=torch.float64) for name, tensor in TENSORS.items()}
    found.load_checked(wide)
    assert all(torch.equal(tensor, TENSORS[name].double()) for name, tensor in wide.items())
    same = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    found.load_checked(same)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in same.items())

    def load(rank: int, store: CheckpointStore) -> None:
        checkpoint = store.at(1)
        for layout, parts_of in LAYOUTS.items():
            wanted, target = parts_of(rank), parts_of(rank)
            for part in target.values():
                part.values.zero_()
            checkpoint.load_into(target)
            for name, part in target.items():
                assert torch.equal(part.values, wanted[name].values), (layout, name, rank)

    together(WORLD, load)


def test_a_rank_writes_and_keeps_only_its_own_boxes(together):
    def held(_rank: int, store: CheckpointStore, layout: str) -> int:
        store.prepare(LAYOUTS[layout](_rank))
        assert store._buffers is not None
        return sum(buffer.numel() for buffer in store._buffers.buffers)

    total = sum(tensor.nbytes for tensor in TENSORS.values())
    for layout in ("copies", "ranges", "hybrid"):
        sizes = together(WORLD, lambda rank, store, layout=layout: held(rank, store, layout))
        assert sum(sizes) == total, "every value is written once"
        assert max(sizes) < 0.6 * total, layout


# ---- holes and overlaps ----


def table_part(rows: slice) -> TensorPart:
    table = TENSORS["model/table"]
    return TensorPart.of_range(table[rows].clone(), tuple(table.shape), rows.start * 7, None)


def refused(together: Callable[..., list[Any]], tmp_path: Path, parts_of: Callable[[int], Parts]) -> str:
    """All ranks learn the same problem, before the first step and at a save, and nothing is written."""

    def work(rank: int, store: CheckpointStore) -> tuple[str, str | None]:
        with pytest.raises(ValueError) as problem:  # noqa: PT011  (its words are what the caller looks at)
            store.prepare(parts_of(rank))
        return str(problem.value), save(parts_of)(rank, store)

    answers = together(2, work)
    assert answers[0] == answers[1]
    assert answers[0][0] in str(answers[0][1])
    assert list_checkpoints(tmp_path / "run") == []
    assert not list(tmp_path.rglob("*.partial-*"))
    return answers[0][0]


def test_a_hole_is_named_with_its_place_and_the_ranks_that_hold_the_rest(together, tmp_path):
    pieces = [slice(0, 4), slice(6, 11)]
    said = refused(together, tmp_path, lambda rank: {"model/table": table_part(pieces[rank])})
    assert said == (
        "model/table (11, 7): no rank holds [4:6, 0:7]; 14 values are missing, the other values are on ranks 0, 1"
    )


def test_boxes_that_overlap_without_being_equal_are_refused_and_their_ranks_named(together, tmp_path):
    pieces = [slice(0, 7), slice(6, 11)]
    said = refused(together, tmp_path, lambda rank: {"model/table": table_part(pieces[rank])})
    assert said == (
        "model/table (11, 7): the box [0:7, 0:7] of rank 0 and the box [6:11, 0:7] of rank 1 overlap and are not "
        "copies of each other"
    )


def test_a_box_beyond_its_tensor_is_refused(together, tmp_path):
    beyond = TensorPart(torch.zeros(3), (4,), Box((2,), (3,)))
    said = refused(together, tmp_path, lambda _: {"model/a": beyond})
    assert said == "model/a: the box [2:5] of ranks 0, 1 reaches beyond the tensor's shape (4,)"


def test_holes_and_overlaps_in_two_dimensions():
    corner, right, below = Place((0, 0), (2, 2)), Place((0, 2), (3, 1)), Place((2, 0), (1, 1))
    assert first_hole([corner, right, below], (3, 3)) == Place((2, 1), (1, 1))
    assert first_hole([corner, right, Place((2, 0), (1, 2))], (3, 3)) is None
    assert first_hole([], ()) == Place((), ())
    assert first_overlap([corner, right, below], 2) is None
    assert first_overlap([corner, right, Place((1, 1), (2, 2))], 2) is not None


# ---- copies ----


def test_exactly_the_boxes_that_several_ranks_hold_are_compared(together):
    """Ranks 0 and 2, and 1 and 3, are replicas of each other; each two have ranges of their own."""

    def work(rank: int, store: CheckpointStore) -> str | None:
        parts = LAYOUTS["hybrid"](rank)
        if rank == 3:
            parts["optimizer/exp_avg/table"].values.view(-1)[-1] += 1e-9
        try:
            return save(lambda _: parts)(rank, store)
        except ReplicasDifferError as error:
            return str(error).split(" (", maxsplit=1)[0].split(". ", maxsplit=1)[0]

    said = together(WORLD, work)
    expected = "The replicas differ: the values of rank 3 of 4 are not those of the rest, in optimizer/exp_avg/table"
    assert said == [expected] * WORLD


# ---- subsets ----


def test_a_stage_loads_its_tensors_and_what_no_rank_asks_for_is_named_on_every_rank(together):
    assert together(WORLD, save(LAYOUTS["copies"])) == [None] * WORLD

    def load(rank: int, store: CheckpointStore) -> str:
        parts = LAYOUTS["stages"](rank)
        parts.pop("model/cube", None)
        before = {name: part.values.zero_().clone() for name, part in parts.items()}
        with pytest.raises(BadInputError) as problem:
            store.at(1).load_into(parts)
        assert all(torch.equal(part.values, before[name]) for name, part in parts.items()), "nothing was changed"
        store.at(1).load_into(parts, strict=False)
        assert all(torch.equal(part.values, TENSORS[name]) for name, part in parts.items())
        return str(problem.value)

    said = together(WORLD, load)
    assert set(said) == {said[0]}
    assert "is of another model: model/cube: not expected." in said[0]


def test_what_one_rank_cannot_load_stops_all_of_them(together):
    assert together(2, save(lambda _: {"model/a": TensorPart.whole(torch.ones(3))})) == [None, None]

    def load(rank: int, store: CheckpointStore) -> float:
        target = TensorPart.whole(torch.zeros(3 + rank))
        with pytest.raises(BadInputError, match=r"model/a: \(3,\) instead of \(4,\)"):
            store.at(1).load_into({"model/a": target})
        return float(target.values.sum())

    assert together(2, load) == [0.0, 0.0]
