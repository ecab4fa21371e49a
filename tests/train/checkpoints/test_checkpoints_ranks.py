"""Many ranks: what they saved together any other layout and number of them loads, holes and overlaps are found before a
byte is written, and nobody commits alone.

Where no process has to die and no tensor is a DTensor, the ranks are threads of this one."""

import errno
import json
import math
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.train.states import flip
from zero2all.common.errors import BadInputError, LostRunError
from zero2all.parallel.parts import Box, TensorPart
from zero2all.train.checkpoints import commit
from zero2all.train.checkpoints.checks import ReplicasDifferError
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.index import Place, first_hole, first_overlap
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.run_lock import no_fence
from zero2all.train.checkpoints.snapshot import Snapshot

# Sizes that two and three ranks divide unevenly, one with fewer rows than ranks, and all ways to be spread.
STATE = """
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from zero2all.train.checkpoints.store import SaveRules
mesh = init_device_mesh("cpu", (world,))
columns = Shard(0 if world == 3 else 1)  # saved by columns, loaded at three ranks by rows
spread = {
    "model/table": ((11, 6), Shard(0)), "model/thin": ((1, 5), Shard(0)), "optimizer/table": ((11, 6), Shard(0)),
    "optimizer/columns": ((6, 7), columns), "optimizer/copies": ((6, 7), Replicate()), "extra/plain": ((6, 7), None),
}
def whole(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, (shape, _) in spread.items()}
def state(seed):
    placed = {name: (values, spread[name][1]) for name, values in whole(seed).items()}
    return {name: values if how is None else distribute_tensor(values, mesh, [how])
            for name, (values, how) in placed.items()}
"""
SAVE = """
store = CheckpointStore(run, dist.group.WORLD, rules=SaveRules(largest_file_bytes=200))
tensors = state(1)
store.prepare(parts(tensors))
ticket = store.save(7, Snapshot(parts(tensors), {"rank": rank}), {"inputs": "i"})
for value in tensors.values():
    local_part(value).zero_()
assert ticket.wait().problem is None, ticket.result.problem
if rank == 0:
    save_file(whole(1), run / "truth.safetensors")
"""
LOAD = """
tensors = state(2)
found = CheckpointStore(run, dist.group.WORLD).newest()
found.load_into(parts(tensors))
for name, wanted in whole(1).items():
    assert torch.equal(tensors[name].full_tensor() if isinstance(tensors[name], DTensor) else tensors[name], wanted)
print("equal", found.record)
"""
DYING = """
import signal
from zero2all.train.checkpoints import commit
def die(path, infos, buffer):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
store = CheckpointStore(run, dist.group.WORLD)
tensors = {f"model/{n}": torch.full((50,), float(n)) for n in range(8)}
assert store.save(1, Snapshot(parts(tensors)), {}, wait=True).result.problem is None
if rank == 1:
    commit.write_durably = die
print(store.save(2, Snapshot(parts(tensors)), {}, wait=True).result.problem)
"""
WORLD = 4
TENSORS = {
    "model/table": torch.arange(77.0).view(11, 7),
    "model/cube": torch.arange(60, dtype=torch.int32).view(3, 4, 5),
    "model/norm": torch.arange(6.0) + 0.5,
    "optimizer/exp_avg/table": torch.arange(77.0, dtype=torch.float64).view(11, 7) / 3,
    "optimizer/step/all": torch.tensor(3.0),
}


def test_what_two_ranks_saved_comes_back_bit_for_bit_at_one_two_and_three(ranks, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    ranks(2, run, STATE + SAVE)
    names = {path.name for path in verified_checkpoint(run / "checkpoints/step-00000007").folder.iterdir()}
    assert {"model-00000-00000.safetensors", "model-00001-00000.safetensors"} <= names
    assert "optimizer-00000-00001.safetensors" in names  # cut by size
    for world in (1, 2, 3):
        for text in ranks(world, run, STATE + LOAD):
            assert text.split() == ["equal", "{'rank':", "0}"]
    # and in one process that knows nothing of ranks
    found, truth = newest_checkpoint(run).tensors(""), load_file(run / "truth.safetensors")
    assert found.keys() == truth.keys()
    assert all(torch.equal(values, truth[name]) for name, values in found.items())


def test_a_rank_that_dies_while_writing_leaves_no_half_checkpoint(ranks, tmp_path):
    text = ranks(2, tmp_path / "run", DYING, exits=(0, -signal.SIGKILL))[0]
    assert text.startswith("a rank has died, or did not finish its part of the save in time")
    assert [verified_checkpoint(folder).step for folder in list_checkpoints(tmp_path / "run")] == [1]


# ---- ranks that are threads ----


def save(store, step, tensors):
    return store.save(step, Snapshot.of_tensors(tensors), {}, wait=True).result


def test_when_one_rank_cannot_write_all_learn_it_and_nothing_is_committed(together, tmp_path, monkeypatch):
    write, tensors = commit.write_durably, {f"model/{n}": torch.full((50,), float(n)) for n in range(8)}

    def write_until_full(path, *arguments):
        if "step-00000002" in str(path) and path.name.startswith("model-00001"):  # of rank 1
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments)

    monkeypatch.setattr(commit, "write_durably", write_until_full)
    for results in together(2, lambda _rank, store: [save(store, step, tensors) for step in (1, 2, 3)]):
        assert [(result.step, result.problem is None) for result in results] == [(1, True), (2, False), (3, True)]
        assert results[1].problem.startswith("rank 1: the disk is full (OSError: [Errno 28]")
    assert [verified_checkpoint(folder).step for folder in list_checkpoints(tmp_path / "run")] == [3, 1]
    assert not list((tmp_path / "run/checkpoints").glob("*.partial-*"))


def test_ranks_that_disagree_are_told_so_instead_of_writing_nonsense(together, tmp_path):
    def work(rank, store):
        shapes = save(store, 5, {"model/a": torch.zeros(2 + rank)})
        return shapes.problem, save(store, 5 + rank, {"model/a": torch.zeros(2)}).problem

    for shapes, steps in together(2, work):
        assert "model/a is ('F32', (3,)) on rank 1, but ('F32', (2,)) on rank 0" in shapes
        assert "the ranks do not save the same step: [5, 6]" in steps
    assert list_checkpoints(tmp_path / "run") == []


def test_all_ranks_fall_back_to_the_same_checkpoint_whoever_finds_the_damage(run, together):
    for name in sorted(json.loads((run / "checkpoints/step-00000020/manifest.json").read_text())["files"])[1::2]:
        flip(run / "checkpoints/step-00000020" / name)  # every second file is rank 1's to check

    def work(_rank, store):
        found = store.newest(set_aside=True).step
        moved = store.go_back_to(5, "rolled back")
        with pytest.raises(BadInputError, match="damaged and moved away before"):
            store.newest()
        return found, moved

    assert together(2, work) == [(10, [10])] * 2
    assert (run / "checkpoints/withdrawn/step-00000010.txt").read_text() == "rolled back\n"


def test_ranks_whose_run_was_lost_all_learn_it_and_move_nothing(run, together):
    def fence():
        raise LostRunError("taken over")

    def work(_rank, store):
        with pytest.raises(LostRunError, match="taken over"):
            store.go_back_to(10, "spikes")
        return save(store, 30, {"model/a": torch.zeros(3)}).problem

    assert together(2, work, fences=[fence, no_fence]) == ["rank 0: taken over"] * 2
    left = sorted(path.name for path in (run / "checkpoints").iterdir() if "partial" not in path.name)
    assert left == ["latest.json", "step-00000010", "step-00000020"]


def whole(tensor, _rank=0, _number=0):
    return TensorPart.whole(tensor.clone())


def of_rows(tensor, rows):
    first = rows.start * math.prod(tensor.shape[1:])
    return TensorPart.of_range(tensor[rows].clone(), tuple(tensor.shape), first, None)


def share(length, rank, ranks):
    """Equal shares of a length; the last ones may be empty."""
    each = -(-length // ranks)
    return slice(min(rank * each, length), min((rank + 1) * each, length))


def ranged(tensor, rank, ranks=WORLD):
    """Of equal ranges of the flattened tensor, without regard to rows."""
    at = share(tensor.numel(), rank, ranks)
    return TensorPart.of_range(tensor.reshape(-1)[at].clone(), tuple(tensor.shape), at.start, None)


def by_columns(tensor, rank, _number):
    """Two tensor ranks cut columns, two others ranges of each half."""
    if tensor.dim() < 2:
        return whole(tensor)
    middle = tensor.shape[-1] // 2
    half, first = (tensor[..., :middle], 0) if rank < 2 else (tensor[..., middle:], middle)
    inner = ranged(half, rank % 2, 2)
    box = Box((*(0 for _ in tensor.shape[1:]), first), tuple(half.shape))
    return TensorPart(inner.values, tuple(tensor.shape), box, inner.start)


def cut(part_of):
    """The parts of each rank, with scalars whole everywhere."""
    numbered = list(enumerate(TENSORS.items()))
    return lambda rank: {
        name: part_of(tensor, rank, number) if tensor.dim() else whole(tensor) for number, (name, tensor) in numbered
    }


LAYOUTS = {
    "copies": cut(whole),
    "ranges": cut(lambda tensor, rank, _: ranged(tensor, rank)),
    "hybrid": cut(lambda tensor, rank, _: ranged(tensor, rank % 2, 2)),
    "rows, as FSDP": cut(lambda tensor, rank, _: of_rows(tensor, share(len(tensor), rank, WORLD))),
    "columns": cut(by_columns),
    "owners": cut(lambda tensor, rank, number: whole(tensor) if rank == number % WORLD else ranged(tensor, WORLD)),
    "stages": lambda rank: {name: whole(tensor) for name, tensor in list(TENSORS.items())[rank::WORLD]},
}


def save_parts(parts_of):
    """Save what each rank holds; returns the problem."""
    return lambda rank, store: store.save(1, Snapshot(parts_of(rank)), {}, wait=True).result.problem


@pytest.mark.parametrize("saved", LAYOUTS)
def test_what_any_layout_saved_every_other_loads(together, tmp_path, saved):
    assert together(WORLD, save_parts(LAYOUTS[saved])) == [None] * WORLD
    found = newest_checkpoint(tmp_path / "run")
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in found.tensors("").items())
    for dtype in (torch.float64, None):
        tensors = {name: torch.empty_like(tensor, dtype=dtype) for name, tensor in TENSORS.items()}
        found.load_checked(tensors)
        assert all(torch.equal(tensor, TENSORS[name].to(tensor.dtype)) for name, tensor in tensors.items())

    def load(rank, store):
        checkpoint = store.at(1)
        for layout, parts_of in LAYOUTS.items():
            wanted, target = parts_of(rank), parts_of(rank)
            for part in target.values():
                part.values.zero_()
            checkpoint.load_into(target)
            for name, part in target.items():
                assert torch.equal(part.values, wanted[name].values), (layout, name, rank)

    together(WORLD, load)


@pytest.mark.parametrize("layout", ["copies", "ranges", "hybrid"])
def test_a_rank_writes_and_keeps_only_its_own_boxes(together, layout):
    def held(rank, store):
        store.prepare(LAYOUTS[layout](rank))
        return sum(buffer.numel() for buffer in store._buffers.buffers)

    total, sizes = sum(tensor.nbytes for tensor in TENSORS.values()), together(WORLD, held)
    assert sum(sizes) == total, "every value is written once"
    assert max(sizes) < 0.6 * total


def table_part(rows):
    return of_rows(TENSORS["model/table"], rows)


@pytest.mark.parametrize(
    ("part_of", "problem"),
    [
        (
            lambda rank: table_part([slice(0, 4), slice(6, 11)][rank]),
            "model/table (11, 7): no rank holds [4:6, 0:7]; 14 values are missing, the other values are on ranks 0, 1",
        ),
        (
            lambda rank: table_part([slice(0, 7), slice(6, 11)][rank]),
            "model/table (11, 7): the box [0:7, 0:7] of rank 0 and the box [6:11, 0:7] of rank 1 overlap and are not "
            "copies of each other",
        ),
        (
            lambda _: TensorPart(torch.zeros(3), (4,), Box((2,), (3,))),
            "model/table: the box [2:5] of ranks 0, 1 reaches beyond the tensor's shape (4,)",
        ),
    ],
    ids=["a hole", "an overlap", "beyond the tensor"],
)
def test_boxes_that_do_not_fill_their_tensor_are_named_before_anything_is_written(together, tmp_path, part_of, problem):
    def work(rank, store):
        with pytest.raises(ValueError) as found:  # noqa: PT011  (its words are looked at below)
            store.prepare({"model/table": part_of(rank)})
        return str(found.value), save_parts(lambda rank: {"model/table": part_of(rank)})(rank, store)

    for before, at_the_save in together(2, work):
        assert before == problem
        assert problem in at_the_save
    assert list_checkpoints(tmp_path / "run") == []
    assert not list(tmp_path.rglob("*.partial-*"))


def test_holes_and_overlaps_in_two_dimensions():
    corner, right, below = Place((0, 0), (2, 2)), Place((0, 2), (3, 1)), Place((2, 0), (1, 1))
    assert first_hole([corner, right, below], (3, 3)) == Place((2, 1), (1, 1))
    assert first_hole([corner, right, Place((2, 0), (1, 2))], (3, 3)) is None
    assert first_hole([], ()) == Place((), ())
    assert first_overlap([corner, right, below], 2) is None
    assert first_overlap([corner, right, Place((1, 1), (2, 2))], 2) is not None


def in_another_order(values):
    values[[5, 6]] = values[[6, 5]]


def changed_in_one_bit(values):
    values.view(-1)[-1] = -values.view(-1)[-1]


@pytest.mark.parametrize("layout", ["copies", "hybrid"])
@pytest.mark.parametrize("change", [changed_in_one_bit, in_another_order])
def test_exactly_the_boxes_that_several_ranks_hold_are_compared(together, tmp_path, layout, change):
    """All are replicas; or ranks 0 and 2, and 1 and 3, and each two have ranges of their own."""

    def work(rank, store):
        parts = LAYOUTS[layout](rank)
        if rank == 3:
            change(parts["optimizer/exp_avg/table"].values)
        with pytest.raises(ReplicasDifferError) as found:
            save_parts(lambda _: parts)(rank, store)
        return str(found.value).partition(". ")[0]

    expected = "The replicas differ: the values of rank 3 of 4 are not those of the rest, in optimizer/exp_avg/table"
    assert together(WORLD, work) == [expected] * WORLD
    assert list_checkpoints(tmp_path / "run") == []


def test_a_stage_loads_its_tensors_and_what_no_rank_asks_for_is_named_on_every_rank(together):
    assert together(WORLD, save_parts(LAYOUTS["copies"])) == [None] * WORLD

    def load(rank, store):
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
    assert together(2, save_parts(lambda _: {"model/a": TensorPart.whole(torch.ones(3))})) == [None, None]

    def load(rank, store):
        target = TensorPart.whole(torch.zeros(3 + rank))
        with pytest.raises(BadInputError, match=r"model/a: \(3,\) instead of \(4,\)"):
            store.at(1).load_into({"model/a": target})
        return float(target.values.sum())

    assert together(2, load) == [0.0, 0.0]
