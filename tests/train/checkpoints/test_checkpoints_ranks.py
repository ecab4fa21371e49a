"""Many ranks: FSDP2 states saved by two come back bit for bit at one, two and three, and nobody commits alone."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from zero2all.common.errors import BadInputError
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint

STATE = """
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

mesh = init_device_mesh("cpu", (world,))

def state(seed):
    # Sizes that two and three ranks divide unevenly, one with fewer rows than ranks, and all ways to be spread.
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
    fully_shard(model[1])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.arange(11)).square().sum().backward()
        optimizer.step()
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"optimizer/{key}/{name}": value for key, value in optimizer.state[parameter].items()}
    matrix = torch.randn(6, 7, generator=torch.Generator().manual_seed(seed))
    columns = Shard(0 if world == 3 else 1)  # saved by columns, loaded at three ranks by rows
    tensors["extra/columns"] = distribute_tensor(matrix, mesh, [columns])
    tensors["extra/copies"] = distribute_tensor(matrix + 1, mesh, [Replicate()])
    tensors["extra/plain"] = matrix + 2
    return tensors

def whole(tensors):
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().contiguous()
            for name, value in tensors.items()}
"""

SAVE = (
    STATE
    + """
from zero2all.train.checkpoints.store import SaveRules
store = CheckpointStore(run, dist.group.WORLD, rules=SaveRules(largest_file_bytes=400))
tensors = state(seed=1)
store.prepare(parts(tensors))
truth = whole(tensors)
ticket = store.save(7, Snapshot(parts(tensors), {"rank": rank}), {"inputs": "i"})
for value in tensors.values():
    with torch.no_grad():
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
result = ticket.wait()
assert result.problem is None, result.problem
if rank == 0:
    save_file(truth, run / "truth.safetensors")
"""
)

LOAD = (
    STATE
    + """
store = CheckpointStore(run, dist.group.WORLD)
tensors = state(seed=2)
truth = load_file(run / "truth.safetensors")
assert not torch.equal(whole(tensors)["extra/plain"], truth["extra/plain"])
found = store.newest()
found.load_into(parts(tensors))
loaded = whole(tensors)
assert loaded.keys() == truth.keys()
assert all(torch.equal(loaded[name], truth[name]) for name in truth)
print("equal", len(truth), found.record)
"""
)


@pytest.fixture
def saved_by_two(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    ranks(2, tmp_path / "run", SAVE)
    return tmp_path / "run"


def test_what_two_ranks_saved_comes_back_bit_for_bit_at_one_two_and_three(saved_by_two, ranks):
    folder = verified_checkpoint(saved_by_two / "checkpoints/step-00000007").folder
    names = sorted(path.name for path in folder.iterdir())
    assert {"model-00000-00000.safetensors", "model-00001-00000.safetensors"} <= set(names)
    assert "optimizer-00000-00001.safetensors" in names  # cut by size
    for world in (1, 2, 3):
        for text in ranks(world, saved_by_two, LOAD):
            assert text.split() == ["equal", "23", "{'rank':", "0}"]
    # and in one process that knows nothing of ranks
    truth = load_file(saved_by_two / "truth.safetensors")
    found = newest_checkpoint(saved_by_two)
    for prefix in ("model/", "optimizer/", "extra/"):
        tensors = found.tensors(prefix)
        assert tensors.keys() == {name.removeprefix(prefix) for name in truth if name.startswith(prefix)}
        assert all(torch.equal(tensors[name], truth[prefix + name]) for name in tensors)


COPIES = """
tensors = {f"model/{n}": torch.full((50,), float(n)) for n in range(8)}
own = {f"rng/rank{rank}": torch.tensor([rank])}
store = CheckpointStore(run, dist.group.WORLD)
assert store.save(1, Snapshot(parts({**tensors, **own})), {}, wait=True).result.problem is None
found = store.at(1)
found.load_into(parts(own))  # the other rank has the rest of the group
print(sorted(path.name for path in found.folder.iterdir()))
print(sum(path.stat().st_size for path in found.folder.glob("model-*")))
"""


def test_equal_copies_are_written_once_and_the_work_is_shared(ranks, tmp_path):
    names, size = ranks(2, tmp_path / "run", COPIES)[0].splitlines()
    for name in ("model-00000-00000", "model-00001-00000", "rng-00000-00000", "rng-00001-00000"):
        assert f"{name}.safetensors" in names
    assert 8 * 50 * 4 < int(size) < 2 * 8 * 50 * 4


FAILING = """
import errno
from zero2all.train.checkpoints import commit
write, told = commit.write_durably, []
def write_until_full(path, infos, buffer):
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")
store = CheckpointStore(run, dist.group.WORLD)
tensors = {f"model/{n}": torch.full((50,), float(n)) for n in range(8)}
assert store.save(1, Snapshot(parts(tensors)), {}, wait=True).result.problem is None
if rank == 1:
    commit.write_durably = write_until_full
result = store.save(2, Snapshot(parts(tensors)), {}, wait=True).result
print(result.folder, result.problem)
print(sorted(path.name for path in (run / "checkpoints").glob("step-*") if path.name != "step-00000001"))
dist.barrier()
commit.write_durably = write
assert store.save(3, Snapshot(parts(tensors)), {}, wait=True).result.problem is None
print([result.step for result in store.poll()])
"""


def test_when_one_rank_cannot_write_all_learn_it_and_nothing_is_committed(ranks, tmp_path):
    for text in ranks(2, tmp_path / "run", FAILING):
        problem, left, steps = text.splitlines()
        assert problem.startswith("None rank 1: the disk is full (OSError: [Errno 28]")
        assert left == "[]"
        assert json.loads(steps) == [1, 2, 3]
    assert [verified_checkpoint(folder).step for folder in list_checkpoints(tmp_path / "run")] == [3, 1]


DYING = """
import signal
from zero2all.train.checkpoints import commit
write = commit.write_durably
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


def test_a_rank_that_dies_while_writing_leaves_no_half_checkpoint(ranks, tmp_path):
    text = ranks(2, tmp_path / "run", DYING, exits=(0, -signal.SIGKILL))[0]
    assert text.startswith("a rank has died, or did not finish its part of the save in time")
    assert [verified_checkpoint(folder).step for folder in list_checkpoints(tmp_path / "run")] == [1]


WRONG = """
store = CheckpointStore(run, dist.group.WORLD)
result = store.save(5, Snapshot(parts({"model/a": torch.zeros(2 + rank)})), {}, wait=True).result
print(result.problem)
result = store.save(5 + rank, Snapshot(parts({"model/a": torch.zeros(2)})), {}, wait=True).result
print(result.problem)
"""


def test_ranks_that_disagree_are_told_so_instead_of_writing_nonsense(ranks, tmp_path):
    for text in ranks(2, tmp_path / "run", WRONG):
        shapes, steps = text.splitlines()
        assert "model/a is ('F32', (3,)) on rank 1, but ('F32', (2,)) on rank 0" in shapes
        assert "the ranks do not save the same step: [5, 6]" in steps
    assert list_checkpoints(tmp_path / "run") == []


TOGETHER = """
store = CheckpointStore(run, dist.group.WORLD)
print(store.newest(set_aside=True).step)
print(store.go_back_to(5, "rolled back"))
try:
    store.newest()
except Exception as error:
    print(type(error).__name__)
"""


def test_all_ranks_fall_back_to_the_same_checkpoint_whoever_finds_the_damage(run, ranks):
    for name in sorted(json.loads((run / "checkpoints/step-00000020/manifest.json").read_text())["files"])[1::2]:
        path = run / "checkpoints/step-00000020" / name  # every second file is rank 1's to check
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    first, second = ranks(2, run, TOGETHER)
    assert second.splitlines() == ["10", "[10]", "BadInputError"]
    assert first.splitlines()[1:] == second.splitlines()
    assert "Moved a damaged checkpoint to checkpoints/damaged" in first
    assert (run / "checkpoints/withdrawn/step-00000010.txt").read_text() == "rolled back\n"
    with pytest.raises(BadInputError, match="damaged and moved away before"):
        newest_checkpoint(run)


TWO_WAYS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 2))
matrix = torch.arange(35.0).view(5, 7)
tensors = {
    "model/replicated_and_sharded": distribute_tensor(matrix, mesh, [Replicate(), Shard(0)]),
    "model/rows_and_columns": distribute_tensor(matrix, mesh, [Shard(0), Shard(1)]),
}
store = CheckpointStore(run, dist.group.WORLD)
assert store.save(1, Snapshot(parts(tensors)), {}, wait=True).result.problem is None
"""


def test_tensors_spread_over_a_mesh_of_two_dimensions_come_back_whole(ranks, tmp_path):
    ranks(4, tmp_path / "run", TWO_WAYS)
    found = newest_checkpoint(tmp_path / "run")
    assert {name: len(entry.boxes) for name, entry in found.index.items()} == {
        "model/replicated_and_sharded": 2,
        "model/rows_and_columns": 4,
    }
    for tensor in found.tensors("model/").values():
        assert torch.equal(tensor, torch.arange(35.0).view(5, 7))


DIFFERENT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from zero2all.train.checkpoints.checks import ReplicasDifferError
store = CheckpointStore(run, dist.group.WORLD)
own = torch.arange(9000.0)
mesh = init_device_mesh("cpu", (3,))
tensors = {
    "model/plain": own.clone(),
    "model/shard": DTensor.from_local(own[:10] + rank, mesh, [Shard(0)], run_check=False),
    "model/copies": DTensor.from_local(own.clone(), mesh, [Replicate()], run_check=False),
    f"rng/rank{rank}": torch.tensor([rank]),
}
def save(step):
    try:
        print(store.save(step, Snapshot(parts(tensors)), {}, wait=True).result.problem)
    except ReplicasDifferError as error:
        print(str(error).split(".")[0])
save(1)
for step, name in ((2, "model/plain"), (3, "model/copies")):
    local = tensors[name].to_local() if isinstance(tensors[name], DTensor) else tensors[name]
    if rank == 1:
        local[8999] = -local[8999]
    save(step)
    local[8999] = 8999.0
if rank == 2:
    tensors["model/plain"][[5, 6]] = tensors["model/plain"][[6, 5]]
save(4)
"""


def test_a_copy_that_differs_in_one_bit_or_in_its_order_is_not_saved_and_its_rank_is_named(ranks, tmp_path):
    for text in ranks(3, tmp_path / "run", DIFFERENT):
        assert text.splitlines() == [
            "None",
            "The replicas differ: the values of rank 1 of 3 are not those of the rest, in model/plain",
            "The replicas differ: the values of rank 1 of 3 are not those of the rest, in model/copies",
            "The replicas differ: the values of rank 2 of 3 are not those of the rest, in model/plain",
        ]
    assert [folder.name for folder in list_checkpoints(tmp_path / "run")] == ["step-00000001"]


LOST = """
from zero2all.common.errors import LostRunError
def fence():
    raise LostRunError("taken over")
store = CheckpointStore(run, dist.group.WORLD, fence=fence if rank == 0 else lambda: None)
try:
    store.go_back_to(10, "spikes")
except LostRunError as error:
    print(error)
print(store.save(30, Snapshot(parts({"model/a": torch.zeros(3)})), {}, wait=True).result.problem)
"""


def test_ranks_whose_run_was_lost_all_learn_it_and_move_nothing(run, ranks):
    for text in ranks(2, run, LOST):
        assert text.splitlines() == ["taken over", "rank 0: taken over"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if "partial" not in path.name) == [
        "latest.json",
        "step-00000010",
        "step-00000020",
    ]
