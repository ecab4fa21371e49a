"""`z2a inspect RUN STEP` as a person types it."""

import json
import shutil

import pytest

from zero2all.common.files import write_json
from zero2all.packed.loader import read_batch
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.load import Tokenizer
from zero2all.train.run_data import open_run_data
from zero2all.train.saved_config import load_run_config

STEP_TOKENS = 128


@pytest.fixture
def inspect(z2a, sharded, run_folder):
    del run_folder
    return lambda *words: json.loads(z2a.done("inspect", "r", *words, "--json", "--work", sharded.root))


@pytest.mark.parametrize("step", [6, 9])
def test_the_documents_of_a_step_are_those_the_run_reads(inspect, sharded, run_folder, step):
    shown = inspect(step, "--full")
    data, _ = open_run_data(load_run_config(run_folder), sharded, True)
    seq_len = 32 if step <= 8 else 16
    batch = read_batch(data, (step - 1) * STEP_TOKENS, STEP_TOKENS // seq_len)
    tokenizer = load_tokenizer(sharded.tokenizer)
    assert shown["tokens"] == [(step - 1) * STEP_TOKENS, step * STEP_TOKENS]
    texts = ["".join(document["text"] for document in sample["documents"]) for sample in shown["samples"]]
    assert texts == [tokenizer.decode(row.tolist(), skip_control=False) for row in batch.tokens]
    assert {sample["stage"] for sample in shown["samples"]} == ({"main"} if step <= 8 else {"late"})
    assert shown["trained"] == (step <= 6)
    assert shown["loss"] == (pytest.approx(5.0 - step / 10) if step <= 6 else None)


def test_a_person_sees_the_documents_of_a_step_which_cannot_command_the_terminal(z2a, sharded, run_folder, monkeypatch):
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: "\x1b[2Jgone\nline")
    write_json(run_folder / "incidents" / "3-loss_spike.json", {"row_losses": [2.0, None, 9.25, 2.5]})
    out = z2a.done("inspect", "r", "3", "--work", sharded.root)
    assert out.startswith("r, step 3: 4 samples, tokens 256 to 383, loss 4.7000\n")
    assert out.count("── sample ") == 4
    assert "loss 9.2500" in out
    assert "gid " in out
    assert "shard " in out
    assert "epoch 0, stage main" in out
    assert "\x1b" not in out
    assert "gone\nline" in out


def test_a_run_a_step_or_a_sample_that_does_not_exist(z2a, inspect, sharded):
    (sample,) = inspect(2, "--sample", 3)["samples"]
    assert sample["row"] == 3
    for code, words, said in (
        (2, ("r", 2, "--sample", 4), "has 4 samples, so there is no sample 4"),
        (3, ("q", 2), "has no run `q`"),
        (2, ("r", 13), "r ends with step 12; there is no step 13"),
    ):
        assert said in z2a.refused(code, "inspect", *words, "--work", sharded.root)


def test_data_that_was_moved_or_changed_is_an_error_that_says_so(z2a, sharded, run_folder):
    del run_folder
    shard = next((sharded.packed / "en" / "train").glob("tokens-*"))
    shard.write_bytes(shard.read_bytes()[:-2])
    assert "has 3176 bytes, expected 3178" in z2a.refused(3, "inspect", "r", 2, "--work", sharded.root)
    shutil.move(sharded.packed, sharded.root / "elsewhere")
    assert "no finished packed data" in z2a.refused(3, "inspect", "r", 2, "--work", sharded.root)
