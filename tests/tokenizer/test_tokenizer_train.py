"""Training: what comes out, what is refused, and that nothing half-done is ever taken for whole."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.manifest import is_current, read_manifest, verify_files
from zero2all.tokenizer import CONTROL_TOKENS, load_tokenizer, train_tokenizer
from zero2all.tokenizer.specials import SMALLEST_VOCAB_SIZE

TRAIN_IN_A_PROCESS = """
import json, os, signal, sys
from pathlib import Path
from zero2all.tokenizer import train_tokenizer

source, folder, kill_after = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def texts():
    for number, text in enumerate(json.loads(source.read_text())):
        if number == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield text

train_tokenizer(texts(), 700, folder, "inputs")
"""


def train_in_a_process(texts: list[str], work: Path, threads: int, kill_after: int = -1) -> tuple[int, Path]:
    work.mkdir(parents=True)
    (work / "texts.json").write_text(json.dumps(texts))
    folder = work / "tokenizer"
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_IN_A_PROCESS, str(work / "texts.json"), str(folder), str(kill_after)],
        env={**os.environ, "RAYON_NUM_THREADS": str(threads)},
        check=False,
    )
    return done.returncode, folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_text_gives_byte_identical_folder_in_any_process_with_any_thread_count(texts, tmp_path):
    results = []
    for threads in (1, 2, 5):
        code, folder = train_in_a_process(texts, tmp_path / str(threads), threads)
        assert code == 0
        results.append(contents(folder))
    assert results[0] == results[1] == results[2]


def test_same_text_of_nothing_but_ties_gives_the_same_tokenizer(tmp_path):
    ties = [f"{a}{b}{c} " * 3 for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    (code, alone), (_, together) = (train_in_a_process(ties, tmp_path / str(threads), threads) for threads in (1, 4))
    assert code == 0
    assert contents(alone) == contents(together)


def test_vocabulary_has_the_asked_size_controls_first_and_every_byte(tokenizer):
    assert tokenizer.vocab_size == 700
    assert tokenizer.control == {name: number for number, name in enumerate(CONTROL_TOKENS)}
    pieces = {tokenizer.token_bytes(number) for number in range(len(CONTROL_TOKENS), 700)}
    assert pieces >= {bytes([byte]) for byte in range(256)}
    assert len(pieces) == 700 - len(CONTROL_TOKENS)


def test_manifest_counts_the_text_and_covers_every_file(folder, tokenizer, texts):
    manifest = read_manifest(folder, "tokenizer", "z2a tokenizer train")
    assert manifest["vocab_size"] == 700
    assert manifest["tokenizer_kind"] == "hf-bbpe"
    assert manifest["fingerprint"] == tokenizer.fingerprint
    assert manifest["text"]["documents"] == len(texts)
    assert manifest["text"]["bytes"] == sum(len(text.encode()) for text in texts)
    assert set(manifest["files"]) == {"tokenizer.json", "tokenizer_config.json"}
    assert verify_files(folder, manifest) == []


def test_training_again_from_the_same_inputs_reads_no_text(folder):
    def untouchable() -> Iterator[str]:
        raise AssertionError("the text was read")
        yield ""

    before = contents(folder)
    manifest = train_tokenizer(untouchable(), 700, folder, "made in conftest")
    assert manifest["vocab_size"] == 700
    assert contents(folder) == before


def test_other_inputs_replace_the_old_tokenizer(texts, tmp_path):
    folder = tmp_path / "tokenizer"
    train_tokenizer(texts, 300, folder, "first")
    train_tokenizer(texts, 400, folder, "second")
    assert load_tokenizer(folder).vocab_size == 400
    assert is_current(folder, "tokenizer", "second")


def test_vocabulary_beyond_the_text_is_refused_with_the_largest_possible_size(tmp_path):
    folder = tmp_path / "tokenizer"
    text = ["the cat sat on the mat, the cat sat"]
    with pytest.raises(BadInputError, match=r"at most. Set --vocab-size to (\d+) or less") as refused:
        train_tokenizer(text, 5000, folder, "inputs")
    assert list(tmp_path.iterdir()) == []
    largest = int(str(refused.value).split("--vocab-size to ")[1].split()[0])
    assert train_tokenizer(text, largest, folder, "inputs")["vocab_size"] == largest
    with pytest.raises(BadInputError):
        train_tokenizer(text, largest + 1, folder, "other inputs")


def test_vocabulary_smaller_than_bytes_and_controls_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=str(SMALLEST_VOCAB_SIZE)):
        train_tokenizer(["text"], SMALLEST_VOCAB_SIZE - 1, tmp_path / "tokenizer", "inputs")
    smallest = train_tokenizer(["aa aa aa"], SMALLEST_VOCAB_SIZE, tmp_path / "tokenizer", "inputs")
    assert smallest["vocab_size"] == SMALLEST_VOCAB_SIZE


@pytest.mark.parametrize("nothing", [[], ["", ""]])
def test_no_text_is_refused_and_nothing_written(nothing, tmp_path):
    with pytest.raises(BadInputError, match="no text"):
        train_tokenizer(nothing, 700, tmp_path / "tokenizer", "inputs")
    assert list(tmp_path.iterdir()) == []


def test_train_bytes_stops_reading_and_cuts_at_a_whole_character(tmp_path):
    def endless() -> Iterator[str]:
        while True:
            yield "天地玄黄,宇宙洪荒。"

    manifest = train_tokenizer(endless(), 280, tmp_path / "tokenizer", "inputs", train_bytes=1000)
    assert manifest["text"]["stopped_at_train_bytes"]
    assert 998 <= manifest["text"]["bytes"] <= 1000


@pytest.mark.parametrize("limit", [2, 3, 6])
def test_max_piece_bytes_is_the_longest_learned_piece(limit, texts, tmp_path):
    train_tokenizer(texts, 400, tmp_path / "tokenizer", "inputs", max_piece_bytes=limit)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert max(len(tokenizer.token_bytes(number)) for number in range(len(CONTROL_TOKENS), 400)) == limit


def test_lone_surrogates_in_the_text_are_repaired_and_counted(texts, tmp_path):
    manifest = train_tokenizer(["broken \ud83d emoji", *texts], 300, tmp_path / "tokenizer", "inputs")
    assert manifest["text"]["documents_with_repaired_surrogates"] == 1


def test_control_strings_in_the_training_text_teach_no_control_token(tmp_path):
    train_tokenizer([" ".join(CONTROL_TOKENS) * 50, "".join(CONTROL_TOKENS) * 50], 312, tmp_path / "t", "inputs")
    tokenizer = load_tokenizer(tmp_path / "t")
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode_text("".join(CONTROL_TOKENS)))


def test_failing_text_leaves_the_old_tokenizer_untouched(folder):
    def failing() -> Iterator[str]:
        yield "some text"
        raise BadInputError("part-00000.jsonl is damaged")

    before = contents(folder)
    with pytest.raises(BadInputError, match="damaged"):
        train_tokenizer(failing(), 700, folder, "other inputs")
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]


def test_killed_training_leaves_nothing_to_load_and_the_next_run_finishes(texts, tmp_path):
    code, folder = train_in_a_process(texts, tmp_path / "work", threads=2, kill_after=100)
    assert code == -signal.SIGKILL
    assert not is_current(folder, "tokenizer", "inputs")
    with pytest.raises(BadInputError, match="z2a tokenizer train"):
        load_tokenizer(folder)
    train_tokenizer(texts, 700, folder, "inputs")
    assert load_tokenizer(folder).vocab_size == 700


def test_leftover_of_a_kill_while_writing_is_ignored_and_swept(texts, tmp_path):
    leftover = tmp_path / "tokenizer.partial-12345"
    leftover.mkdir()
    (leftover / "tokenizer.json").write_text("{")
    with pytest.raises(BadInputError, match="no tokenizer"):
        load_tokenizer(tmp_path / "tokenizer")
    train_tokenizer(texts, 300, tmp_path / "tokenizer", "inputs")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
