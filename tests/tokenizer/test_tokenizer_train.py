"""Training: what comes out, what is refused, and that nothing half-done is ever taken for whole."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from zero2all.common.errors import BadInputError, DiskError, RunLockedError, UsageError
from zero2all.common.manifest import is_current, read_manifest, verify_files
from zero2all.tokenizer import CONTROL_TOKENS, SpecialsConfig, load_tokenizer, train_tokenizer
from zero2all.tokenizer.parts import file_parts
from zero2all.tokenizer.save import tokenizer_json_of
from zero2all.tokenizer.train import scratch_folder

TRAIN_AND_DIE = """
import json, os, signal, sys
from pathlib import Path
from zero2all.tokenizer import train_tokenizer

def texts():
    yield from json.loads(Path(sys.argv[1]).read_text())
    os.kill(os.getpid(), signal.SIGKILL)

train_tokenizer(texts(), 700, Path(sys.argv[2]), "inputs", threads=2)
"""
SMALLEST_VOCAB_SIZE = len(CONTROL_TOKENS) + 256 + 1
both_kinds = pytest.mark.parametrize("kind", ["bpe", "hf-bbpe"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


TIES = [f"{a}{b}{c} " * 3 for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]


@pytest.mark.parametrize("ties", [False, True])
def test_same_text_gives_byte_identical_folder_with_any_thread_count(texts, tmp_path, ties):
    for threads in (1, 3):
        train_tokenizer(TIES if ties else texts, 600, tmp_path / str(threads), "inputs", threads=threads)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_vocabulary_has_the_asked_size_controls_first_and_every_byte(tokenizer):
    assert tokenizer.vocab_size == 700
    assert tokenizer.control == {name: number for number, name in enumerate(CONTROL_TOKENS)}
    pieces = {tokenizer.token_bytes(number) for number in range(len(CONTROL_TOKENS), 700)}
    assert pieces >= {bytes([byte]) for byte in range(256)}
    assert len(pieces) == 700 - len(CONTROL_TOKENS)


def test_manifest_counts_the_text_and_covers_every_file(folder, tokenizer, texts):
    manifest = read_manifest(folder, "tokenizer", "z2a tokenizer train")
    assert manifest["vocab_size"] == 700
    assert (manifest["tokenizer_kind"], manifest["normalise"]) == ("bpe", "none")
    assert manifest["training"]["exact"]
    assert manifest["settings"]["specials"]["begin"] == "<|begin_of_text|>"
    assert manifest["fingerprint"] == tokenizer.fingerprint
    assert manifest["text"]["documents"] == len(texts)
    assert manifest["text"]["bytes"] == sum(len(text.encode()) for text in texts)
    assert set(manifest["files"]) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert verify_files(folder, manifest) == []


def test_training_again_from_the_same_inputs_reads_no_text(folder):
    def untouchable() -> Iterator[str]:
        raise AssertionError("the text was read")
        yield ""

    before = contents(folder)
    assert train_tokenizer(untouchable(), 700, folder, "made in conftest")["vocab_size"] == 700
    assert contents(folder) == before


@both_kinds
def test_control_strings_and_surrogates_in_the_text_are_taken_out_and_counted(texts, tmp_path, kind):
    spelled = [" ".join(CONTROL_TOKENS) * 50, "".join(CONTROL_TOKENS) * 50, "broken \ud83d emoji"]
    manifest = train_tokenizer([*spelled, *texts], 520, tmp_path / "t", "first", kind=kind, max_piece_bytes=6)
    assert manifest["text"]["control_strings_removed"] == 100 * len(CONTROL_TOKENS)
    assert manifest["text"]["documents_with_repaired_surrogates"] == 1
    tokenizer = load_tokenizer(tmp_path / "t")
    learned = {tokenizer.token_bytes(number) for number in range(len(CONTROL_TOKENS) + 256, 520)}
    assert max(map(len, learned)) == 6, "max_piece_bytes is the longest learned piece"
    assert not any(b"<|" in piece or b"reserved" in piece for piece in learned)
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode_text("".join(CONTROL_TOKENS)))
    # Other inputs replace the old tokenizer.
    train_tokenizer(texts, 530, tmp_path / "t", "second", kind=kind, max_piece_bytes=3)
    tokenizer = load_tokenizer(tmp_path / "t")
    assert max(len(tokenizer.token_bytes(number)) for number in range(len(CONTROL_TOKENS), 530)) == 3
    assert tokenizer.vocab_size == 530
    assert is_current(tmp_path / "t", "tokenizer", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@both_kinds
def test_vocabulary_beyond_the_text_is_refused_with_the_largest_possible_size(tmp_path, kind):
    folder = tmp_path / "tokenizer"
    text = ["the cat sat on the mat, the cat sat"]
    with pytest.raises(BadInputError, match=r"for at most [\d,]+.*Set --vocab-size to (\d+) or less") as refused:
        train_tokenizer(text, 5000, folder, "inputs", kind=kind)
    assert list(tmp_path.iterdir()) == []
    largest = int(str(refused.value).split("--vocab-size to ")[1].split()[0])
    assert train_tokenizer(text, largest, folder, "inputs", kind=kind)["vocab_size"] == largest
    with pytest.raises(BadInputError):
        train_tokenizer(text, largest + 1, folder, "other inputs", kind=kind)


def test_vocabulary_smaller_than_bytes_and_controls_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=str(SMALLEST_VOCAB_SIZE)):
        train_tokenizer(["text"], SMALLEST_VOCAB_SIZE - 1, tmp_path / "tokenizer", "inputs")
    smallest = train_tokenizer(["aa aa aa"], SMALLEST_VOCAB_SIZE, tmp_path / "tokenizer", "inputs")
    assert smallest["vocab_size"] == SMALLEST_VOCAB_SIZE


@both_kinds
def test_no_text_is_refused_and_nothing_written(tmp_path, kind):
    for nothing in ([], ["", ""]):
        with pytest.raises(BadInputError, match="no text"):
            train_tokenizer(nothing, 700, tmp_path / "tokenizer", "inputs", kind=kind)
    assert list(tmp_path.iterdir()) == []


@both_kinds
def test_control_tokens_have_the_names_and_ids_that_the_config_gives_them(texts, tmp_path, kind):
    specials = SpecialsConfig(begin="[[BOS]]", end="[[EOS]]", reserved=2, extra=["<|图像|>", "<|tool|>"])
    train_tokenizer(texts, 520, tmp_path / "tokenizer", "inputs", kind=kind, specials=specials)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert list(tokenizer.control) == list(specials.names())
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id) == (0, 1, 5)
    assert tokenizer.encode_control("<|tool|>") == 9
    text = "".join(specials.names())
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode_text(text))
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_a_control_token_that_is_also_a_piece_is_refused_and_a_folder_given_as_text_named(tmp_path):
    with pytest.raises(BadInputError, match=r"'shan' is also a piece learned"):
        tokenizer_json_of([b"x", b"shan"], [], ["<|a|>", "shan"])
    with pytest.raises(BadInputError, match=r"is a folder\. --text takes files of plain text"):
        file_parts([tmp_path])


@pytest.mark.parametrize(
    ("kind", "normalise", "comes_back"), [("bpe", "nfc", "\u00e9 ＡＢ ﬁ"), ("hf-bbpe", "nfkc", "\u00e9 AB fi")]
)
def test_normalisation_is_saved_and_text_comes_back_in_its_form(texts, tmp_path, kind, normalise, comes_back):
    manifest = train_tokenizer(texts, 520, tmp_path / "t", "inputs", kind=kind, normalise=normalise)
    tokenizer = load_tokenizer(tmp_path / "t")
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    given = "e\u0301 ＡＢ ﬁ"
    assert tokenizer.decode(tokenizer.encode_text(given)) == comes_back
    assert raw.encode(given).ids == tokenizer.encode_text(given)
    assert (manifest["normalise"], tokenizer.normalisation) == (normalise, normalise)
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode_text("＜|pad|＞"))


def test_another_pattern_cuts_another_way(texts, tmp_path):
    train_tokenizer(texts, 520, tmp_path / "t", "inputs", kind="hf-bbpe", pattern="isolated-han")
    assert len(load_tokenizer(tmp_path / "t").backend.pre_tokenizer.pre_tokenize_str("，中国，ok")) == 3
    with pytest.raises(UsageError, match=r"neither a name \(qwen2, isolated-han\) nor a regular expression"):
        train_tokenizer(texts, 520, tmp_path / "t", "other", kind="hf-bbpe", pattern="(")


def test_training_that_another_process_is_doing_is_not_disturbed(texts, tmp_path):
    folder = tmp_path / "tokenizer"
    with scratch_folder(folder, "abc"):
        for inputs in ("abc", "def"):
            with pytest.raises(RunLockedError, match="Another process is training"):
                train_tokenizer(texts, 520, folder, inputs)
    train_tokenizer(texts, 520, folder, "def", kind="hf-bbpe")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_what_other_inputs_left_half_done_is_removed_and_ones_own_is_kept_by_a_full_disk(tmp_path):
    folder = tmp_path / "tokenizer"
    left = tmp_path / "tokenizer.training-old"
    left.mkdir()
    with pytest.raises(DiskError), scratch_folder(folder, "new") as scratch:
        raise DiskError("full")
    assert list(tmp_path.iterdir()) == [scratch]
    with pytest.raises(BadInputError), scratch_folder(folder, "new"):
        raise BadInputError("damaged")
    assert list(tmp_path.iterdir()) == []


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
    (tmp_path / "texts.json").write_text(json.dumps(texts[:100]))
    folder = tmp_path / "work/tokenizer"
    folder.parent.mkdir()
    words = [sys.executable, "-c", TRAIN_AND_DIE, str(tmp_path / "texts.json"), str(folder)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    leftover = folder.with_name("tokenizer.partial-99999999")  # of a kill while writing
    leftover.mkdir()
    (leftover / "tokenizer.json").write_text("{")
    assert not is_current(folder, "tokenizer", "inputs")
    with pytest.raises(BadInputError, match="z2a tokenizer train"):
        load_tokenizer(folder)
    train_tokenizer(texts, 700, folder, "inputs")
    assert load_tokenizer(folder).vocab_size == 700
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]
