"""Every byte counts: whatever is flipped, cut, lost or renamed is noticed, set aside, and never restarts a run."""

import json
import random
import shutil

import pytest
import torch

from tests.train.checkpoints.conftest import MODEL, make_tensors, reseal, snapshot
from tests.train.states import flip, steps_of
from zero2all.common.errors import BadInputError
from zero2all.common.manifest import fingerprint
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.manifest import OtherVersionError
from zero2all.train.checkpoints.retention import withdraw_after
from zero2all.train.checkpoints.store import write_checkpoint

FILES = ("index.json", "manifest.json", MODEL, "optimizer-00000-00000.safetensors", "state.json")


def flipped(data, rng):
    data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    return data


def shortened(data, rng):
    return data[: rng.randrange(len(data))]


def put(path, data):
    """Give an existing file this content (in place, which is several times faster than emptying it first)."""
    with open(path, "r+b", buffering=0) as file:
        file.write(data)
        file.truncate()


@pytest.mark.parametrize(("damage", "cases"), [(flipped, 1000), (shortened, 200)])
def test_no_flipped_byte_and_no_cut_loads_in_silence(run, damage, cases):
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
    flip(path, len(path.read_bytes()) // 2)
    assert newest_checkpoint(run).step == 10
    assert steps_of(run) == [20, 10]  # who only reads moves nothing
    assert "Skipped a damaged checkpoint" in capsys.readouterr().out
    path.unlink()
    assert newest_checkpoint(run, set_aside=True).step == 10
    assert steps_of(run) == [10]
    assert "Moved a damaged checkpoint to checkpoints/damaged" in capsys.readouterr().out
    assert f"{name} is missing" in (run / "checkpoints/damaged/step-00000020.txt").read_text()


def test_when_every_checkpoint_is_damaged_the_run_stops_now_and_later(run):
    for step in (10, 20):
        flip(run / f"checkpoints/step-000000{step}" / MODEL)
    for _ in range(2):  # also when it is tried again: never step 0 in silence
        with pytest.raises(BadInputError, match=r"No checkpoint of .* is intact.*--fresh"):
            newest_checkpoint(run, set_aside=True)


def test_a_checkpoint_that_was_renamed_or_is_gone_is_missed_and_when_all_are_gone_the_run_stops(run, capsys):
    (run / "checkpoints/step-00000020").rename(run / "checkpoints/step-00000025")
    with pytest.raises(BadInputError, match="contains step 20: it was renamed"):
        verified_checkpoint(run / "checkpoints/step-00000025")
    shutil.rmtree(run / "checkpoints/step-00000025")
    assert newest_checkpoint(run).step == 10
    assert "The checkpoint of step 20 was saved, but is missing now" in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints/step-00000010")
    with pytest.raises(BadInputError, match=r"step 20 was saved, but .* no longer contains it.*--fresh"):
        newest_checkpoint(run)


@pytest.mark.parametrize("hint", [b"", b"[]", b'{"step": "x"}'])
def test_a_spoilt_hint_changes_nothing(run, hint):
    (run / "checkpoints/latest.json").write_bytes(hint)
    assert newest_checkpoint(run).step == 20


def test_a_rollback_withdraws_the_newer_ones_so_that_their_steps_can_be_saved_again(run, capsys):
    assert withdraw_after(run, 10, "the loss rose at step 15") == [20]
    assert newest_checkpoint(run).step == 10
    assert capsys.readouterr().out == ""
    assert (run / "checkpoints/withdrawn/step-00000020.txt").read_text() == "the loss rose at step 15\n"
    write_checkpoint(run, 20, snapshot(3), {})
    found = newest_checkpoint(run)
    assert torch.equal(found.tensors("model/")["blocks.0.weight"], make_tensors(3)["model/blocks.0.weight"])


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_whole_checkpoint_of_another_version_stops_the_run_and_is_left_where_it_is(run, number):
    path = run / "checkpoints/step-00000020/manifest.json"
    if number == 1:
        old = {"kind": "checkpoint", "format": 1, "zero2all": "0.1.0", "inputs": "i", "step": 20, "files": {}}
        path.write_text(json.dumps({**old, "digest": fingerprint(old)}, indent=2))
    else:
        reseal(path.parent, format=number)
    said = rf"in checkpoint format {number}\. .* reads format 4\. Nothing was changed.*--fresh"
    with pytest.raises(OtherVersionError, match=said):
        newest_checkpoint(run, set_aside=True)
    assert steps_of(run) == [20, 10]
    assert not (run / "checkpoints/damaged").exists()
