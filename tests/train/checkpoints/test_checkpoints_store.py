"""Saving beside training: what is saved is the moment of the call, a failure is a report, and the loop goes on."""

import shutil
import subprocess
import threading

import pytest
import torch
from safetensors.torch import load_file

from zero2all.common.errors import AnomalyError, BadInputError, DiskError, LostRunError
from zero2all.parallel.parts import TensorPart
from zero2all.train.checkpoints import commit, tensor_file
from zero2all.train.checkpoints import store as store_module
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.retention import Retention, sweep
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore, SaveRules, write_checkpoint

MB = 1 << 20


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


# ---- saving and loading ----


def test_what_is_loaded_equals_what_was_saved_bit_for_bit(open_store, tensors_of):
    store = open_store()
    document = {"step": 2, "loss": float("nan"), "seed": 1 << 90, "window": [0.1, float("-inf")], "text": "字"}
    folder = store.save(2, Snapshot.of_tensors(tensors_of(1), document), {"inputs": "i", "data": None}).folder()
    assert folder.name == "step-00000002"
    found = store.newest()
    assert (found.step, found.manifest["inputs"], found.manifest["world_size"]) == (2, "i", 1)
    assert found.record == {"step": 2, "loss": "nan", "seed": 1 << 90, "window": [0.1, "-inf"], "text": "字"}
    target = tensors_of(2)
    found.load_into(Snapshot.of_tensors(target).parts)
    for name, value in tensors_of(1).items():
        assert torch.equal(target[name], value)
        assert target[name].dtype == value.dtype
    assert found.tensors("optimizer/").keys() == {"exp_avg/blocks.0.weight", "step/blocks.0.weight"}


def test_a_checkpoint_is_safetensors_and_json_that_anybody_can_read(run, tensors_of):
    folder = run / "checkpoints/step-00000020"
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.json",
        "manifest.json",
        "model-00000-00000.safetensors",
        "optimizer-00000-00000.safetensors",
        "state.json",
    ]
    tensors = load_file(folder / "model-00000-00000.safetensors")
    assert torch.equal(tensors["blocks.0.weight"], tensors_of(20)["model/blocks.0.weight"])
    assert not list(run.rglob("*.partial-*"))


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


def test_large_tensors_are_read_in_stretches(open_store, monkeypatch):
    value = torch.randn(50, 3)
    store = open_store()
    store.save(1, Snapshot.of_tensors({"model/a": value}), {}, wait=True)
    monkeypatch.setattr("zero2all.train.checkpoints.load.READ_BYTES", 7 * 12)
    assert torch.equal(store.newest().tensors("model/")["a"], value)


def test_files_are_cut_between_tensors_at_the_size_asked_for(open_store):
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
    text = str(refusal.value)
    assert "model/mask: BOOL instead of F32" in text
    assert "model/other: missing" in text
    assert "model/blocks.0.bias: not expected" in text
    assert torch.equal(target["model/blocks.0.weight"], torch.ones(5, 3))
    with pytest.raises(BadInputError, match=r"\(5, 3\) instead of \(3, 5\)"):
        found.load_into({"model/blocks.0.weight": TensorPart.whole(torch.zeros(3, 5))}, strict=False)


@pytest.mark.parametrize(
    "tensors",
    [
        {"no_group": torch.zeros(1)},
        {"model/../../x": torch.zeros(1)},
        {"model/a": torch.zeros(1, dtype=torch.complex64)},
        {"model/a": torch.empty(3, device="meta")},
    ],
)
def test_tensors_that_cannot_be_kept_are_found_before_the_first_step(open_store, tensors):
    with pytest.raises(ValueError, match=r"cannot be called|holds plain tensors|meta device"):
        open_store().prepare(Snapshot.of_tensors(tensors).parts)


# ---- beside training ----


def test_a_save_does_not_see_later_changes(open_store, tensors_of):
    gate = Gate()
    store = open_store(before_commit=gate)
    tensors, document, details = tensors_of(1), {"list": [1]}, {"order": {"stages": [1]}}
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
    assert torch.equal(found.tensors("model/")["blocks.0.weight"], tensors_of(1)["model/blocks.0.weight"])
    assert found.record == {"list": [1]}
    assert found.manifest["order"] == {"stages": [1]}
    assert [result.step for result in store.poll()] == [1]


def test_the_next_save_waits_for_the_one_before(open_store, tensors_of):
    gate = Gate()
    store = open_store(before_commit=gate)
    first = store.save(1, Snapshot.of_tensors(tensors_of(1)), {})
    assert gate.reached.wait(120)
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    second = store.save(2, Snapshot.of_tensors(tensors_of(2)), {})
    assert first.result is not None  # it was finished while the second save waited
    assert second.folder().name == "step-00000002"
    assert second.result.stall_seconds > 0.1
    assert torch.equal(store.at(1).tensors("model/")["blocks.0.weight"], tensors_of(1)["model/blocks.0.weight"])


def test_or_is_left_out_and_says_so(open_store, tensors_of):
    gate = Gate()
    store = open_store(before_commit=gate, rules=SaveRules(when_busy="skip"))
    first = store.save(1, Snapshot.of_tensors(tensors_of(1)), {})
    assert gate.reached.wait(120)
    second = store.save(2, Snapshot.of_tensors(tensors_of(2)), {})
    assert second.result.was_skipped
    assert second.result.problem == "the save before is still being written"
    threading.Timer(0.1, gate.opened.set).start()
    assert (
        store.save(3, Snapshot.of_tensors(tensors_of(3)), {}, wait=True).folder().is_dir()
    )  # who waits is not left out
    assert first.folder().is_dir()


def test_host_memory_is_taken_once_and_again_only_for_other_tensors(open_store, tensors_of):
    store = open_store()
    tensors = tensors_of(1)
    model = {name: value for name, value in tensors.items() if name.startswith("model/")}
    store.prepare(Snapshot.of_tensors(model).parts)
    buffers = store._buffers
    store.save(1, Snapshot.of_tensors(model), {}, wait=True)
    store.save(2, Snapshot.of_tensors(model), {}, wait=True)
    assert store._buffers is buffers
    store.save(3, Snapshot.of_tensors(tensors), {}, wait=True)  # the optimizer has state by now
    assert store._buffers is not buffers
    assert store.newest().tensors("optimizer/")


# ---- what a save never does ----


def test_a_committed_step_is_never_written_again(run, open_store, tensors_of):
    store = open_store(run=run)
    before = {path: path.stat() for path in (run / "checkpoints/step-00000020").iterdir()}
    result = store.save(20, Snapshot.of_tensors(tensors_of(1)), {}, wait=True).result
    assert result.folder == run / "checkpoints/step-00000020"
    assert {path: path.stat() for path in (run / "checkpoints/step-00000020").iterdir()} == before


def test_a_process_that_lost_the_run_commits_nothing(run, open_store, tensors_of):
    def fence():
        raise LostRunError("The run was taken over.")

    store = open_store(run=run, fence=fence)
    ticket = store.save(30, Snapshot.of_tensors(tensors_of(1)), {}, wait=True)
    assert ticket.result.problem == "The run was taken over."
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "latest.json",
        "step-00000010",
        "step-00000020",
    ]
    with pytest.raises(DiskError, match=r"step 30 was not saved: The run was taken over"):
        ticket.folder()


def test_a_save_whose_folder_the_new_holder_has_swept_makes_it_not_anew(run, open_store, tensors_of, monkeypatch):
    """A process stopped in the middle of a save, taken over, and continued before it asks the next time."""
    real = commit.manifest_bytes

    def swept(*arguments):
        sweep(run)
        return real(*arguments)

    monkeypatch.setattr(commit, "manifest_bytes", swept)
    result = open_store(run=run).save(30, Snapshot.of_tensors(tensors_of(1)), {}, wait=True).result
    assert "FileNotFoundError" in result.problem
    assert not list((run / "checkpoints").glob("*.partial-*"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["model/blocks.0.weight", "model/blocks.0.bias", "optimizer/step/blocks.0.weight"])
def test_a_state_that_is_not_finite_is_not_saved_and_the_tensor_is_named(run, open_store, tensors_of, name, value):
    store, tensors = open_store(run=run, retention=Retention()), tensors_of(1)
    tensors[name].view(-1)[-1] = value
    ticket = store.save(30, Snapshot.of_tensors(tensors), {}, wait=True)
    assert ticket.result.problem == f"{name} contains NaN or infinite values"
    with pytest.raises(AnomalyError, match="step 30 was not saved"):
        ticket.folder()
    with pytest.raises(BadInputError, match="NaN or infinite"):
        write_checkpoint(run, 30, Snapshot.of_tensors(tensors), {})
    assert [folder.name for folder in list_checkpoints(run)] == ["step-00000020", "step-00000010"]
    assert store.save(40, Snapshot.of_tensors(tensors_of(2)), {}, wait=True).result.folder is not None


def test_a_large_number_is_a_number(open_store):
    huge = {"model/a": torch.full((3,), 1e300, dtype=torch.float64), "model/b": torch.tensor([True]).view(1)}
    assert open_store().save(1, Snapshot.of_tensors(huge), {}, wait=True).result.problem is None


def test_a_document_that_is_no_json_is_a_failed_save_and_the_next_one_works(open_store, tensors_of):
    store = open_store()
    result = store.save(1, Snapshot.of_tensors(tensors_of(1), {"x": object()}), {}, wait=True).result
    assert "not JSON serializable" in result.problem
    assert list_checkpoints(store.run) == []
    assert store.save(2, Snapshot.of_tensors(tensors_of(1)), {}).folder().is_dir()


def test_too_little_space_is_found_before_the_first_byte(open_store, monkeypatch):
    store = open_store()
    size = store.prepare({"model/a": TensorPart.whole(torch.zeros(MB))})
    assert 4 * MB < size < 9 * MB
    usage = shutil.disk_usage(store.run.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=6 * MB))
    result = store.save(1, Snapshot.of_tensors({"model/a": torch.zeros(MB)}), {}, wait=True).result
    assert "not enough disk space for a checkpoint" in result.problem
    monkeypatch.undo()
    assert store.save(1, Snapshot.of_tensors({"model/a": torch.zeros(MB)}), {}).folder().is_dir()


def test_a_tool_saves_one_checkpoint_and_deletes_nothing(run, tensors_of):
    for step in (30, 40):
        assert write_checkpoint(
            run, step, Snapshot.of_tensors(tensors_of(step)), {"imported_dtype": "bfloat16"}
        ).is_dir()
    assert len(list_checkpoints(run)) == 4
    assert newest_checkpoint(run).manifest["imported_dtype"] == "bfloat16"


# ---- a full disk ----


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


class Filler:
    """Takes the room away after the save has looked how much there is."""

    def __init__(self, path):
        self.path, self.is_on = path, False

    def __call__(self):
        if self.is_on:
            self.path.write_bytes(bytes(12 * MB))


def test_a_disk_that_fills_up_in_the_middle_of_a_save_costs_that_save_only(small_disk, open_store):
    filler = Filler(small_disk / "filler")
    store = open_store(run=small_disk / "run", before_commit=filler, retention=Retention())
    weight = torch.zeros(2 * MB)  # 8 MB of 24
    assert store.save(1, Snapshot.of_tensors({"model/a": weight}), {}).folder().is_dir()
    filler.is_on = True
    ticket = store.save(2, Snapshot.of_tensors({"model/a": weight}), {})
    weight += 1  # training goes on
    failed = ticket.wait()
    assert failed.folder is None
    assert failed.problem.startswith("the disk is full (OSError: [Errno 28]")
    assert [path.name for path in list_checkpoints(store.run)] == ["step-00000001"]
    assert not list(small_disk.rglob("*.partial-*"))
    assert verified_checkpoint(store.run / "checkpoints/step-00000001").step == 1
    filler.is_on = False
    filler.path.unlink()
    assert store.save(3, Snapshot.of_tensors({"model/a": weight}), {}).folder().is_dir()
    assert torch.equal(store.newest().tensors("model/")["a"], weight)
    assert [(result.step, result.problem is None) for result in store.poll()] == [(1, True), (2, False), (3, True)]


LIMITED = """
import resource, sys, torch
from pathlib import Path
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
tensors = {f"model/{n}": torch.zeros(1 << 16) for n in range(4)}
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for step, limit in ((1, hard), (2, 1 << 19), (3, hard)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    print(store.save(step, Snapshot.of_tensors(tensors), {}, wait=True).result.problem, flush=True)
store.close()
"""


def test_a_file_larger_than_the_system_allows_costs_that_save_only(start, tmp_path):
    process = start(tmp_path / "run", code=LIMITED)
    assert process.wait() == 0, process.text()
    first, second, third = process.text().splitlines()
    assert (first, third) == ("None", "None")
    assert second.startswith("this process may write files of at most 524,288 bytes")
    assert [verified_checkpoint(path).step for path in list_checkpoints(tmp_path / "run")] == [3, 1]
    assert not list((tmp_path / "run/checkpoints").glob("*.partial-*"))
