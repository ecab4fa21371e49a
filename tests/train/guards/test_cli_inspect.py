"""`z2a inspect RUN STEP` as a person types it."""

import json
import shutil

import pytest

from zero2all.cli import main
from zero2all.common.files import write_json
from zero2all.packed.loader import read_batch
from zero2all.tokenizer import load_tokenizer
from zero2all.train.run_data import open_run_data
from zero2all.train.saved_config import load_run_config

STEP_TOKENS = 128


@pytest.fixture
def z2a(capsys):
    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


def inspect_json(z2a, work, *words):
    code, out, err = z2a("inspect", "r", *words, "--json", "--work", work)
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize("step", [1, 6, 8, 9, 12])
def test_the_documents_of_a_step_are_those_the_run_reads(z2a, sharded, run_folder, step):
    shown = inspect_json(z2a, sharded.root, step, "--full")
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


def test_a_person_sees_source_shard_documents_and_text(z2a, sharded, run_folder):
    write_json(run_folder / "incidents" / "3-loss_spike.json", {"row_losses": [2.0, None, 9.25, 2.5]})
    code, out, _ = z2a("inspect", "r", "3", "--work", sharded.root)
    assert code == 0
    assert out.startswith("r, step 3: 4 samples, tokens 256 to 383, loss 4.7000\n")
    assert out.count("── sample ") == 4
    assert "loss 9.2500" in out
    assert "gid " in out
    assert "shard " in out
    assert "epoch 0, stage main" in out


def test_one_sample_of_a_step(z2a, sharded, run_folder):
    (sample,) = inspect_json(z2a, sharded.root, 2, "--sample", 3)["samples"]
    assert sample["row"] == 3
    code, _, err = z2a("inspect", "r", "2", "--sample", "4", "--work", sharded.root)
    assert code == 2
    assert "has 4 samples, so there is no sample 4" in err


def test_a_run_or_a_step_that_does_not_exist(z2a, sharded, run_folder):
    code, _, err = z2a("inspect", "q", "2", "--work", sharded.root)
    assert code == 3
    assert "has no run `q`" in err
    code, _, err = z2a("inspect", "r", "13", "--work", sharded.root)
    assert code == 2
    assert "r ends with step 12; there is no step 13" in err


def test_data_that_was_moved_or_changed_is_an_error_that_says_so(z2a, sharded, run_folder):
    shard = next((sharded.packed / "en" / "train").glob("tokens-*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    code, _, err = z2a("inspect", "r", "2", "--work", sharded.root)
    assert code == 3
    assert "has 3176 bytes, expected 3178" in err
    shutil.move(sharded.packed, sharded.root / "elsewhere")
    code, _, err = z2a("inspect", "r", "2", "--work", sharded.root)
    assert code == 3
    assert "no finished packed data" in err


def test_text_cannot_command_the_terminal(z2a, sharded, run_folder, monkeypatch):
    from zero2all.tokenizer.load import Tokenizer

    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: "\x1b[2Jgone\nline")
    _, out, _ = z2a("inspect", "r", "2", "--work", sharded.root)
    assert "\x1b" not in out
    assert "gone\nline" in out
