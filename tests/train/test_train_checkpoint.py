"""A checkpoint is whole or absent: flipped, cut, killed and malicious ones are never taken for good."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json
from zero2all.common.manifest import write_manifest
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.train import checkpoint as checkpoints
from zero2all.train.checkpoint import (
    list_checkpoints,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    sweep_checkpoints,
    verified_checkpoint,
    write_checkpoint,
)
from zero2all.train.config import OptimConfig
from zero2all.train.state import new_state

DETAILS = {"data": "d", "environment": {"cpu_threads": 1, "machine": "机器"}, "ops": {}}


def make_state(hidden_size=8, updates=2, **options):
    shape = {"vocab_size": 16, "intermediate_size": 8, "layers": 1, "heads": 2, "kv_heads": 1, "max_seq_len": 8}
    model = Z2all(ModelConfig(hidden_size=hidden_size, **{**shape, **options}), resolve(OpsConfig(), "cpu"))
    model.init_weights(1)
    state = new_state(model, OptimConfig(), torch.float32)
    state.skips_in_a_row = 1
    generator = torch.Generator().manual_seed(3)
    for _ in range(updates):
        state.weights.gradients.normal_(generator=generator)
        state.optimizer.step(1e-3, state.optimizer.gradient_norm())
        state.step += 1
        state.tokens += 32
    return state


def save_at(run: Path, *steps: int) -> None:
    for step in steps:
        state = make_state()
        state.step = step
        save_checkpoint(run, state, "inputs", DETAILS)


def steps_of(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(run)]


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """A run with checkpoints at steps 10 and 20. Read only."""
    run = tmp_path_factory.mktemp("checkpoints") / "run"
    save_at(run, 10, 20)
    return run


@pytest.fixture
def run(good_run, tmp_path):
    shutil.copytree(good_run, tmp_path / "run")
    return tmp_path / "run"


# ---- saving and loading ----


def test_what_is_loaded_equals_what_was_saved_bit_for_bit(tmp_path):
    state = make_state()
    folder = save_checkpoint(tmp_path, state, "inputs", DETAILS)
    assert folder.name == "step-00000002"
    loaded = make_state(updates=0)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.manifest["data"], found.manifest["inputs"]) == (2, "d", "inputs")
    loaded.restore(found.model_tensors(), found.optimizer_tensors(), found.counters())
    assert loaded.counters() == {"step": 2, "tokens": 64, "skips_in_a_row": 1}
    for one, other in (
        (state.model_tensors(), loaded.model_tensors()),
        (state.optimizer_tensors(), loaded.optimizer_tensors()),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert {name.split("/")[0] for name in state.optimizer_tensors()} == {"exp_avg", "exp_avg_sq", "updates"}


def test_a_restored_state_goes_on_exactly_like_the_saved_one(tmp_path):
    save_checkpoint(tmp_path, make_state(updates=2), "inputs", DETAILS)
    resumed, alone = make_state(updates=0), make_state(updates=2)
    found = newest_checkpoint(tmp_path)
    resumed.restore(found.model_tensors(), found.optimizer_tensors(), found.counters())
    shutil.rmtree(tmp_path / "checkpoints")  # retention may delete what was loaded
    for state in (resumed, alone):
        state.weights.gradients.fill_(1.0)
        state.optimizer.step(1e-3, state.optimizer.gradient_norm())
    for one, other in zip(resumed.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_is_safetensors_and_json_and_nothing_else(run):
    folder = run / "checkpoints/step-00000020"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert not [path for path in run.rglob("*") if ".partial-" in path.name]


def test_a_committed_step_is_never_written_again(run):
    before = (run / "checkpoints/step-00000020/model.safetensors").stat()
    other = make_state(updates=5)
    other.step = 20
    save_checkpoint(run, other, "other inputs", DETAILS)
    assert (run / "checkpoints/step-00000020/model.safetensors").stat() == before


def test_weights_without_moments_are_a_checkpoint_too(tmp_path):
    state = make_state(updates=0)
    counters = {"step": 0, "tokens": 0, "skips_in_a_row": 0}
    write_checkpoint(tmp_path, 0, state.model_tensors(), {}, counters, "imported", {"data": None, "environment": {}})
    found = newest_checkpoint(tmp_path)
    assert found.optimizer_tensors() == {}
    state.restore(found.model_tensors(), found.optimizer_tensors(), found.counters())
    assert not any(moment.any() for moment in state.optimizer_tensors().values())


def test_a_run_that_never_saved_has_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert list_checkpoints(tmp_path) == []


def test_a_checkpoint_of_another_shape_is_refused_naming_the_tensors(run):
    found = newest_checkpoint(run)
    state = make_state(hidden_size=16, updates=1)
    before = {name: value.clone() for name, value in state.model_tensors().items()}
    with pytest.raises(BadInputError, match=r"embedding.weight: \(64, 8\) instead of \(64, 16\).*and \d+ more"):
        state.restore(found.model_tensors(), found.optimizer_tensors(), found.counters())
    assert all(torch.equal(value, before[name]) for name, value in state.model_tensors().items())
    deeper = make_state(layers=2)
    with pytest.raises(BadInputError, match=r"blocks.1.attention.qkv.weight: absent"):
        deeper.restore(found.model_tensors(), found.optimizer_tensors(), found.counters())
    tied = make_state(tied_embeddings=True)
    with pytest.raises(BadInputError, match=r"head.weight: unknown here"):
        tied.restore(found.model_tensors(), found.optimizer_tensors(), found.counters())


def test_moments_that_are_incomplete_are_refused(run):
    found = newest_checkpoint(run)
    moments = found.optimizer_tensors()
    del moments["exp_avg/norm.weight"]
    with pytest.raises(BadInputError, match=r"exp_avg/norm.weight: absent"):
        make_state().restore(found.model_tensors(), moments, found.counters())


# ---- retention ----


def test_retention_keeps_the_newest_and_the_pinned_ones(tmp_path):
    save_at(tmp_path, 10, 20, 30, 40, 50, 60)
    prune_checkpoints(tmp_path, keep_last=2, keep_every_steps=20)
    assert steps_of(tmp_path) == [60, 50, 40, 20]
    prune_checkpoints(tmp_path, keep_last=2, keep_every_steps=0)
    assert steps_of(tmp_path) == [60, 50]
    prune_checkpoints(tmp_path, keep_last=2, keep_every_steps=0)
    assert [verified_checkpoint(folder).step for folder in list_checkpoints(tmp_path)] == [60, 50]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000050", "step-00000060"]


def test_steps_are_ordered_as_numbers_and_other_folders_are_left_alone(tmp_path):
    save_at(tmp_path, 99_999_999, 100_000_000)
    (tmp_path / "checkpoints/step-00000007-my-copy").mkdir()
    assert steps_of(tmp_path) == [100_000_000, 99_999_999]
    prune_checkpoints(tmp_path, keep_last=2, keep_every_steps=0)
    assert newest_checkpoint(tmp_path).step == 100_000_000
    assert (tmp_path / "checkpoints/step-00000007-my-copy").is_dir()


def test_what_killed_saves_and_deletions_left_is_swept(run):
    folder = run / "checkpoints"
    shutil.copytree(folder / "step-00000010", folder / "step-00000030.partial-123")
    shutil.copytree(folder / "step-00000010", folder / "step-00000005.partial-trash")
    assert steps_of(run) == [20, 10]
    sweep_checkpoints(run)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000020"]


# ---- damage ----

FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")


def flip(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place, mask = rng.randrange(len(data)), rng.randint(1, 255)
    data[place] ^= mask
    path.write_bytes(data)
    return f"byte {place} of {path.name} ^ {mask}"


def cut(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    size = rng.randrange(len(data))
    path.write_bytes(data[:size])
    return f"{path.name} cut to {size} of {len(data)} bytes"


@pytest.mark.parametrize(("damage", "cases"), [(flip, 240), (cut, 48)])
def test_every_flipped_byte_and_every_cut_is_refused_and_the_older_checkpoint_taken(run, damage, cases):
    newest, aside = run / "checkpoints/step-00000020", run / "checkpoints/damaged/step-00000020"
    rng = random.Random(5)
    for case in range(cases):
        name = FILES[case % len(FILES)]
        good = (newest / name).read_bytes()
        what = damage(newest / name, rng)
        found = newest_checkpoint(run, set_aside=True)
        assert found is not None, what
        assert found.step == 10, what
        assert steps_of(run) == [10], what
        aside.rename(newest)
        (newest / name).write_bytes(good)
    aside.parent.rmdir()
    assert newest_checkpoint(run).step == 20


def test_even_a_changed_space_in_the_manifest_is_noticed(run):
    path = run / "checkpoints/step-00000020/manifest.json"
    path.write_text(path.read_text().replace('  "step"', '\t "step"'))
    with pytest.raises(BadInputError, match=r"manifest.json has changed"):
        verified_checkpoint(path.parent)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(run, name):
    (run / "checkpoints/step-00000020" / name).unlink()
    assert newest_checkpoint(run, set_aside=True).step == 10


def test_a_renamed_checkpoint_is_noticed(run):
    (run / "checkpoints/step-00000020").rename(run / "checkpoints/step-00000025")
    assert newest_checkpoint(run).step == 10


def test_when_every_checkpoint_is_damaged_the_run_stops_now_and_later(run):
    for step in (10, 20):
        flip(run / f"checkpoints/step-000000{step}/model.safetensors", random.Random(step))
    for _ in range(2):  # also when it is tried again: never step 0 in silence
        with pytest.raises(BadInputError, match=r"No checkpoint of .* is whole.*--fresh"):
            newest_checkpoint(run, set_aside=True)
    assert sorted(path.name for path in (run / "checkpoints/damaged").iterdir()) == ["step-00000010", "step-00000020"]


def test_the_same_step_can_be_set_aside_twice(run, capsys):
    for _ in range(2):
        flip(run / "checkpoints/step-00000020/model.safetensors", random.Random(1))
        assert newest_checkpoint(run, set_aside=True).step == 10
        save_at(run, 20)
    assert newest_checkpoint(run).step == 20
    names = sorted(path.name for path in (run / "checkpoints/damaged").iterdir())
    assert names == ["step-00000020", "step-00000020-2"]
    assert "Set aside a damaged checkpoint" in capsys.readouterr().out


def test_who_only_reads_a_run_moves_nothing(run, capsys):
    flip(run / "checkpoints/step-00000020/model.safetensors", random.Random(1))
    assert newest_checkpoint(run).step == 10
    assert steps_of(run) == [20, 10]
    assert "Left out a damaged checkpoint" in capsys.readouterr().out


# ---- malice ----


class Malice:
    """Unpickling this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.write_text, (self.target, "code was run"))


def forge(run: Path, name: str, data: bytes) -> Path:
    """A checkpoint at step 30 whose manifest is right about the content of `name`."""
    folder = run / "checkpoints/step-00000030"
    shutil.copytree(run / "checkpoints/step-00000020", folder)
    (folder / name).write_bytes(data)
    manifest = read_json(folder / "manifest.json")
    content = {key: manifest[key] for key in ("data", "environment", "ops")}
    write_manifest(folder, "checkpoint", "inputs", {"step": 30, **content})
    checkpoints._seal(folder / "manifest.json")
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_pickles_are_refused_and_their_code_does_not_run(run, tmp_path, name):
    trap = tmp_path / "trap"
    bomb = pickle.dumps(Malice(trap))
    (run / "checkpoints/step-00000020" / name).write_bytes(bomb)
    assert newest_checkpoint(run, set_aside=True).step == 10

    save_at(run, 20)
    forged = verified_checkpoint(forge(run, name, bomb))
    with pytest.raises(BadInputError, match=r"no readable safetensors|cannot be read as JSON"):
        make_state().restore(forged.model_tensors(), forged.optimizer_tensors(), forged.counters())
    assert not trap.exists()
    pickle.loads(bomb)
    assert trap.exists()  # the trap itself works


def test_a_checkpoint_with_files_of_other_names_is_refused(run):
    forge(run, "code.py", b"print('hello')")
    with pytest.raises(BadInputError, match=r"lists the files code.py"):
        verified_checkpoint(run / "checkpoints/step-00000030")


def test_a_header_that_promises_more_than_the_file_holds_is_refused(run, tmp_path):
    save_file({"embedding.weight": torch.zeros(4)}, tmp_path / "small")
    data = (tmp_path / "small").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["embedding.weight"] = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    text = json.dumps(header).encode()
    forged = verified_checkpoint(forge(run, "model.safetensors", len(text).to_bytes(8, "little") + text + data[-16:]))
    with pytest.raises(BadInputError, match="no readable safetensors"):
        forged.model_tensors()


# ---- processes that die while saving ----

SAVE_FOR_EVER = """
import sys
from pathlib import Path
import torch
from zero2all.train.checkpoint import prune_checkpoints, write_checkpoint
run = Path(sys.argv[1])
details = {"data": "d", "environment": {}, "ops": {}}
for step in range(1, 10_000):
    tensors = {f"weight{n}": torch.full((20_000,), float(step)) for n in range(8)}
    write_checkpoint(run, step, tensors, tensors, {"step": step}, "inputs", details)
    print(step, flush=True)
    prune_checkpoints(run, keep_last=2, keep_every_steps=0)
"""


def test_a_save_killed_at_any_moment_leaves_the_newest_checkpoint_whole(tmp_path, start):
    rng = random.Random(6)
    for kill in range(6):
        run = tmp_path / f"run{kill}"
        process = start(run, code=SAVE_FOR_EVER)
        process.wait_until(lambda process=process: process.text().count("\n") >= 3)
        time.sleep(rng.uniform(0, 0.05))
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        reported = int(process.text().split()[-1])
        found = newest_checkpoint(run)  # raises when anything under a final name is damaged
        assert found.step in (reported, reported + 1)
        assert [verified_checkpoint(folder).step for folder in list_checkpoints(run)[:2]] == [
            found.step,
            found.step - 1,
        ]
        assert torch.equal(load_file(found.folder / "model.safetensors")["weight7"], torch.full((20_000,), found.step))
        sweep_checkpoints(run)
        assert not list(run.rglob("*.partial-*"))
