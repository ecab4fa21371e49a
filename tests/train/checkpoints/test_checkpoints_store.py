"""Saving beside training: what is saved is the moment of the call, a failure is a report, and the loop goes on."""

import math
import resource
import shutil
import subprocess
import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.train.checkpoints.conftest import make_tensors, snapshot
from tests.train.states import steps_of
from zero2all.common.errors import AnomalyError, BadInputError, DiskError, LostRunError
from zero2all.parallel.parts import TensorPart
from zero2all.train.checkpoints import commit, tensor_file
from zero2all.train.checkpoints import store as store_module
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.memory import MemoryStore
from zero2all.train.checkpoints.retention import Retention, sweep
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore, SaveRules, write_checkpoint

MB = 1 << 20
BAD = {"model/blocks.0.weight": math.nan, "model/blocks.0.bias": math.inf, "optimizer/step/blocks.0.weight": -math.inf}


@pytest.fixture
def open_store(tmp_path, monkeypatch):
    stores = []

    def build(before_commit=None, **options):
        if before_commit is not None:  # called in the writing thread
            monkeypatch.setattr(store_module, "commit", lambda *a: (before_commit(), commit.commit(*a))[1])
        stores.append(CheckpointStore(options.pop("run", tmp_path / "run"), **options))
        return stores[-1]

    yield build
    for store in stores:
        store.close()


class Gate:
    """Holds the writing thread until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.opened.wait(120)


def test_what_is_loaded_equals_what_was_saved_bit_for_bit(open_store):
    store = open_store()
    document = {"step": 2, "loss": float("nan"), "seed": 1 << 90, "window": [0.1, float("-inf")], "text": "字"}
    folder = store.save(2, snapshot(1, document), {"inputs": "i", "data": None}).folder()
    assert folder.name == "step-00000002"
    found = store.newest()
    assert (found.step, found.manifest["inputs"], found.manifest["world_size"]) == (2, "i", 1)
    assert found.record == {"step": 2, "loss": "nan", "seed": 1 << 90, "window": [0.1, "-inf"], "text": "字"}
    target = make_tensors(2)
    found.load_into(Snapshot.of_tensors(target).parts)
    for name, value in make_tensors(1).items():
        assert torch.equal(target[name], value)
        assert target[name].dtype == value.dtype
    assert found.tensors("optimizer/").keys() == {"exp_avg/blocks.0.weight", "step/blocks.0.weight"}
    names = ["model-00000-00000.safetensors", "optimizer-00000-00000.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "manifest.json", *names, "state.json"]
    assert torch.equal(load_file(folder / names[0])["blocks.0.weight"], make_tensors(1)["model/blocks.0.weight"])
    assert not list(store.run.rglob("*.partial-*"))


def test_parameters_that_learn_are_filled_in_place_and_any_layout_is_saved(open_store):
    store = open_store()
    turned = torch.arange(12.0).view(3, 4).t()
    store.save(1, Snapshot.of_tensors({"model/a": turned}), {}, wait=True)
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    store.newest().load_into({"model/a": TensorPart.whole(parameter)})
    assert torch.equal(parameter.detach(), turned)
    assert parameter.requires_grad
    other = torch.zeros(3, 4).t()
    store.newest().load_into({"model/a": TensorPart.whole(other)})
    assert torch.equal(other, turned)


def test_files_are_cut_between_tensors_at_the_size_asked_for_and_read_in_stretches(open_store, monkeypatch):
    monkeypatch.setattr("zero2all.train.checkpoints.tensor_file.READ_BYTES", 7 * 12)
    store = open_store(rules=SaveRules(largest_file_bytes=1000))
    tensors = {f"model/{n}": torch.full((n * 40,), float(n)) for n in range(1, 8)}
    folder = store.save(1, Snapshot.of_tensors(tensors), {}).folder()
    sizes = [tensor_file.read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    assert len(sizes) > 3
    assert all(len(header.infos) == 1 or max(s.end for s in header.infos.values()) <= 1000 for header in sizes)
    assert all(torch.equal(value, tensors[f"model/{name}"]) for name, value in store.newest().tensors("model/").items())


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_touched(run):
    found = newest_checkpoint(run)
    target = {"model/blocks.0.weight": torch.ones(5, 3), "model/mask": torch.zeros(7), "model/other": torch.zeros(1)}
    with pytest.raises(BadInputError) as refusal:
        found.load_into(Snapshot.of_tensors(target).parts)
    for said in ("model/mask: BOOL instead of F32", "model/other: missing", "model/blocks.0.bias: not expected"):
        assert said in str(refusal.value)
    assert torch.equal(target["model/blocks.0.weight"], torch.ones(5, 3))
    with pytest.raises(BadInputError, match=r"\(5, 3\) instead of \(3, 5\)"):
        found.load_into({"model/blocks.0.weight": TensorPart.whole(torch.zeros(3, 5))}, strict=False)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("no_group", torch.zeros(1), "cannot be called"),
        ("model/../../x", torch.zeros(1), "cannot be called"),
        ("model/a", torch.zeros(1, dtype=torch.complex64), "holds plain tensors"),
        ("model/a", torch.empty(3, device="meta"), "meta device"),
    ],
)
def test_tensors_that_cannot_be_kept_are_found_before_the_first_step(open_store, name, tensor, said):
    with pytest.raises(ValueError, match=said):
        open_store().prepare(Snapshot.of_tensors({name: tensor}).parts)


def test_a_save_does_not_see_later_changes(open_store):
    gate = Gate()
    store = open_store(before_commit=gate)
    tensors, document, details = make_tensors(1), {"list": [1]}, {"order": {"stages": [1]}}
    ticket = store.save(1, Snapshot.of_tensors(tensors, document), details)
    assert gate.reached.wait(120)
    assert ticket.result is None
    assert store.poll() == []
    for value in tensors.values():
        value.zero_()
    document["list"].append(2)
    details["order"]["stages"].append(2)
    gate.opened.set()
    found = verified_checkpoint(ticket.folder())
    assert torch.equal(found.tensors("model/")["blocks.0.weight"], make_tensors(1)["model/blocks.0.weight"])
    assert found.record == {"list": [1]}
    assert found.manifest["order"] == {"stages": [1]}
    assert [result.step for result in store.poll()] == [1]


def test_the_next_save_waits_for_the_one_before(open_store):
    gate = Gate()
    store = open_store(before_commit=gate)
    first = store.save(1, snapshot(1), {})
    assert gate.reached.wait(120)
    threading.Timer(0.2, gate.opened.set).start()
    second = store.save(2, snapshot(2), {})
    assert first.result is not None  # it was finished while the second save waited
    assert second.folder().name == "step-00000002"
    assert second.result.stall_seconds > 0.1
    assert torch.equal(store.at(1).tensors("model/")["blocks.0.weight"], make_tensors(1)["model/blocks.0.weight"])


def test_or_is_left_out_and_says_so(open_store):
    gate = Gate()
    store = open_store(before_commit=gate, rules=SaveRules(when_busy="skip"))
    first = store.save(1, snapshot(1), {})
    assert gate.reached.wait(120)
    second = store.save(2, snapshot(2), {})
    assert second.result.was_skipped
    assert second.result.problem == "the save before is still being written"
    threading.Timer(0.1, gate.opened.set).start()
    assert store.save(3, snapshot(3), {}, wait=True).folder().is_dir()  # who waits is not left out
    assert first.folder().is_dir()


def test_host_memory_is_taken_once_and_again_only_for_other_tensors(open_store):
    store = open_store()
    tensors = make_tensors(1)
    model = {name: value for name, value in tensors.items() if name.startswith("model/")}
    store.prepare(Snapshot.of_tensors(model).parts)
    buffers = store._buffers
    store.save(1, Snapshot.of_tensors(model), {}, wait=True)
    store.save(2, Snapshot.of_tensors(model), {}, wait=True)
    assert store._buffers is buffers
    store.save(3, Snapshot.of_tensors(tensors), {}, wait=True)  # the optimizer has state by now
    assert store._buffers is not buffers
    assert store.newest().tensors("optimizer/")


def test_a_committed_step_is_never_written_again(run, open_store):
    store = open_store(run=run)
    folder = run / "checkpoints/step-00000020"
    before = {path: path.stat() for path in folder.iterdir()}
    assert store.save(20, snapshot(1), {}, wait=True).result.folder == folder
    assert {path: path.stat() for path in folder.iterdir()} == before


def test_a_process_that_lost_the_run_commits_nothing(run, open_store):
    def fence():
        raise LostRunError("The run was taken over.")

    ticket = open_store(run=run, fence=fence).save(30, snapshot(1), {}, wait=True)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["latest.json", "step-00000010", "step-00000020"]
    with pytest.raises(DiskError, match=r"step 30 was not saved: The run was taken over"):
        ticket.folder()


def test_one_whose_folder_the_new_holder_has_swept_makes_it_not_anew(run, open_store, monkeypatch):
    """A process stopped in the middle of a save, taken over, and continued before it asks the next time."""
    monkeypatch.setattr(commit, "manifest_bytes", lambda *_: sweep(run) and b"")
    assert "FileNotFoundError" in open_store(run=run).save(30, snapshot(1), {}, wait=True).result.problem
    assert not list((run / "checkpoints").glob("*.partial-*"))


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_a_state_that_is_not_finite_is_not_saved_and_the_tensor_is_named(run, open_store, name, value):
    store, tensors = open_store(run=run, retention=Retention()), make_tensors(1)
    tensors[name].view(-1)[-1] = value
    ticket = store.save(30, Snapshot.of_tensors(tensors), {}, wait=True)
    assert ticket.result.problem == f"{name} contains NaN or infinite values"
    with pytest.raises(AnomalyError, match="step 30 was not saved"):
        ticket.folder()
    with pytest.raises(BadInputError, match="NaN or infinite"):
        write_checkpoint(run, 30, Snapshot.of_tensors(tensors), {})
    assert steps_of(run) == [20, 10]
    large = {"model/a": torch.full((3,), 1e300, dtype=torch.float64), "model/b": torch.tensor([True])}
    assert store.save(40, Snapshot.of_tensors(large), {}, wait=True).result.folder is not None


def test_a_document_that_is_no_json_is_a_failed_save_and_the_next_one_works(open_store):
    store = open_store()
    assert "not JSON serializable" in store.save(1, snapshot(1, {"x": object()}), {}, wait=True).result.problem
    assert list_checkpoints(store.run) == []
    assert store.save(2, snapshot(1), {}).folder().is_dir()


def test_too_little_space_is_found_before_the_first_byte(open_store, monkeypatch):
    store, large = open_store(), Snapshot.of_tensors({"model/a": torch.zeros(MB)})
    assert 4 * MB < store.prepare(large.parts) < 9 * MB
    usage = shutil.disk_usage(store.run.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=6 * MB))
    assert "not enough disk space for a checkpoint" in store.save(1, large, {}, wait=True).result.problem
    monkeypatch.undo()
    assert store.save(1, large, {}).folder().is_dir()


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("no right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_in_the_middle_of_a_save_costs_that_save_only(small_disk, open_store):
    filler, is_on = small_disk / "filler", threading.Event()

    def fill():
        """Take the room away after the save has looked how much there is."""
        if is_on.is_set():
            filler.write_bytes(bytes(12 * MB))

    store = open_store(run=small_disk / "run", before_commit=fill, retention=Retention())
    weight = torch.zeros(2 * MB)  # 8 MB of 24
    state = Snapshot.of_tensors({"model/a": weight})
    assert store.save(1, state, {}).folder().is_dir()
    is_on.set()
    ticket = store.save(2, state, {})
    weight += 1  # training goes on
    failed = ticket.wait()
    assert failed.folder is None
    assert failed.problem.startswith("the disk is full (OSError: [Errno 28]")
    assert [verified_checkpoint(path).step for path in list_checkpoints(store.run)] == [1]
    assert not list(small_disk.rglob("*.partial-*"))
    is_on.clear()
    filler.unlink()
    assert store.save(3, state, {}).folder().is_dir()
    assert torch.equal(store.newest().tensors("model/")["a"], weight)
    assert [(result.step, result.problem is None) for result in store.poll()] == [(1, True), (2, False), (3, True)]


def test_a_file_larger_than_the_system_allows_costs_that_save_only(open_store):
    store, state = open_store(), Snapshot.of_tensors({f"model/{n}": torch.zeros(1 << 16) for n in range(4)})
    usual, problems = resource.getrlimit(resource.RLIMIT_FSIZE), []
    try:
        for step, limit in ((1, usual[0]), (2, 1 << 19), (3, usual[0])):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
            problems.append(store.save(step, state, {}, wait=True).result.problem)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert (problems[0], problems[2]) == (None, None)
    assert problems[1].startswith("this process may write files of at most 524,288 bytes")
    assert [verified_checkpoint(path).step for path in list_checkpoints(store.run)] == [3, 1]
    assert not list((store.run / "checkpoints").glob("*.partial-*"))


@pytest.mark.gpu
def test_a_save_from_a_gpu_is_the_moment_of_the_call_and_memory_and_disk_share_one_pinned_block(open_store, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tensors = {f"optimizer/{n}": torch.randn(4096, 4096, device="cuda") for n in range(4)}
    tensors |= {"model/turned": torch.randn(300, 200, device="cuda").t(), "optimizer/step": torch.tensor(3.0)}
    store, parts = open_store(), Snapshot.of_tensors(tensors).parts
    store.memory = MemoryStore(store.run, store.peers, tmp_path, "key", pytest.fail)
    store.prepare(parts)
    assert all(buffer.is_pinned() for buffer in store._buffers.buffers)
    store.run.mkdir(exist_ok=True)
    assert store.prepare_memory(parts) is None
    for step in (1, 2, 3):
        truth = {name: value * 2 for name, value in tensors.items()}
        for value in tensors.values():
            value.mul_(2)  # still under way on the device when the save begins
        copied, bad = store.save_to_memory(step, Snapshot(parts), {})
        assert bad is None
        assert isinstance(copied, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(copied)
        ticket = store.save(10 * step, Snapshot(parts), {})
        for value in tensors.values():
            value.zero_()
        assert ticket.folder().is_dir(), "it waits for the block"
        in_memory = store.memory.newest(-1)
        assert (in_memory.step, in_memory.in_memory) == (step, True)
        for found in (in_memory, store.at(10 * step)):
            found.load_into(parts)
            assert all(torch.equal(value, truth[name]) for name, value in tensors.items())
