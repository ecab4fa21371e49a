"""Every byte counts: whatever is flipped, cut, lost or renamed is noticed, set aside, and never restarts a run."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.common.manifest import fingerprint
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.manifest import OtherVersionError
from zero2all.train.checkpoints.retention import withdraw_after
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import write_checkpoint

FILES = (
    "index.json",
    "manifest.json",
    "model-00000-00000.safetensors",
    "optimizer-00000-00000.safetensors",
    "state.json",
)


def steps_of(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(run)]


def flip(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    return data


def cut(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def put(path: Path, data: bytes | bytearray) -> None:
    """Give an existing file this content (in place, which is several times faster than emptying it first)."""
    with open(path, "r+b", buffering=0) as file:
        file.write(data)
        file.truncate()


@pytest.mark.parametrize(("damage", "cases"), [(flip, 1000), (cut, 200)])
def test_no_flipped_byte_and_no_cut_loads_in_silence(
    run: Path, damage: Callable[[bytearray, random.Random], bytearray], cases: int
) -> None:
    folder, rng = run / "checkpoints/step-00000020", random.Random(5)
    good = {name: (folder / name).read_bytes() for name in FILES}
    everything = [name for name in FILES for _ in good[name]]  # a byte of any file is as likely as another
    silent = []
    for case in range(cases):
        name = rng.choice(everything) if case % 2 else FILES[case % len(FILES)]
        bad = damage(bytearray(good[name]), rng)
        put(folder / name, bad)
        try:
            verified_checkpoint(folder)
        except BadInputError:
            pass
        else:
            silent.append((case, name, len(bad)))
        put(folder / name, good[name])
    assert silent == []
    assert verified_checkpoint(folder).step == 20


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_or_missing_file_makes_the_run_fall_back_and_is_set_aside_with_its_reason(run, capsys, name):
    path = run / "checkpoints/step-00000020" / name
    path.write_bytes(flip(bytearray(path.read_bytes()), random.Random(1)))
    assert newest_checkpoint(run).step == 10
    assert steps_of(run) == [20, 10]  # who only reads moves nothing
    assert "Skipped a damaged checkpoint" in capsys.readouterr().out
    path.unlink()
    assert newest_checkpoint(run, set_aside=True).step == 10
    assert steps_of(run) == [10]
    assert "Moved a damaged checkpoint to checkpoints/damaged" in capsys.readouterr().out
    reason = (run / "checkpoints/damaged/step-00000020.txt").read_text()
    assert f"{name} is missing" in reason


def test_a_renamed_checkpoint_is_noticed(run):
    (run / "checkpoints/step-00000020").rename(run / "checkpoints/step-00000025")
    with pytest.raises(BadInputError, match="contains step 20: it was renamed"):
        verified_checkpoint(run / "checkpoints/step-00000025")
    assert newest_checkpoint(run).step == 10


def test_when_every_checkpoint_is_damaged_the_run_stops_now_and_later(run):
    for step in (10, 20):
        path = run / f"checkpoints/step-000000{step}/model-00000-00000.safetensors"
        path.write_bytes(flip(bytearray(path.read_bytes()), random.Random(step)))
    for _ in range(2):  # also when it is tried again: never step 0 in silence
        with pytest.raises(BadInputError, match=r"No checkpoint of .* is intact.*--fresh"):
            newest_checkpoint(run, set_aside=True)


def test_when_every_checkpoint_is_gone_the_run_stops(run):
    for folder in list_checkpoints(run):
        shutil.rmtree(folder)
    with pytest.raises(BadInputError, match=r"step 20 was saved, but .* no longer contains it.*--fresh"):
        newest_checkpoint(run)


def test_when_the_newest_one_is_gone_that_is_said(run, capsys):
    shutil.rmtree(run / "checkpoints/step-00000020")
    assert newest_checkpoint(run).step == 10
    assert "The checkpoint of step 20 was saved, but is missing now" in capsys.readouterr().out


@pytest.mark.parametrize("hint", [b"", b"[]", b'{"step": "x"}', b"\x80\x04."])
def test_a_spoilt_hint_changes_nothing(run, hint):
    (run / "checkpoints/latest.json").write_bytes(hint)
    assert newest_checkpoint(run).step == 20


def test_a_rollback_withdraws_the_newer_ones_so_that_their_steps_can_be_saved_again(run, tensors_of, capsys):
    assert withdraw_after(run, 10, "the loss rose at step 15") == [20]
    assert newest_checkpoint(run).step == 10
    assert capsys.readouterr().out == ""
    assert (run / "checkpoints/withdrawn/step-00000020.txt").read_text() == "the loss rose at step 15\n"
    write_checkpoint(run, 20, Snapshot.of_tensors(tensors_of(3)), {})
    found = newest_checkpoint(run)
    assert torch.equal(found.tensors("model/")["blocks.0.weight"], tensors_of(3)["model/blocks.0.weight"])


# ---- other versions ----


@pytest.mark.parametrize("number", [3, 5], ids=["older", "newer"])
def test_a_whole_checkpoint_of_another_version_stops_the_run_and_is_left_where_it_is(run, reseal, number):
    reseal(run / "checkpoints/step-00000020", format=number)
    with pytest.raises(
        OtherVersionError, match=rf"in checkpoint format {number}\. .* reads format 4\. Nothing was changed.*--fresh"
    ):
        newest_checkpoint(run, set_aside=True)
    assert steps_of(run) == [20, 10]
    assert not (run / "checkpoints/damaged").exists()


def test_so_does_one_of_format_1(run):
    path = run / "checkpoints/step-00000020/manifest.json"
    old = {"kind": "checkpoint", "format": 1, "zero2all": "0.1.0", "inputs": "i", "step": 20, "files": {}}
    path.write_text(json.dumps({**old, "digest": fingerprint(old)}, indent=2))
    with pytest.raises(OtherVersionError, match="in checkpoint format 1"):
        newest_checkpoint(run, set_aside=True)
    assert steps_of(run) == [20, 10]
