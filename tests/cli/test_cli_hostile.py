"""Odd words, damaged files and little memory: every command ends in words and with its code, never in a traceback."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Z2A
from zero2all.cli.main import build_parser

# ---- where results are to be put ----

OUTPUT_FLAGS = {"--out", "--json", "--html", "--png", "--svg", "--pdf"}


def verbs(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Every verb below a parser."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for below in dict.fromkeys(action.choices.values()):
            yield from verbs(below)


def test_every_flag_that_names_a_file_to_write_is_checked_before_the_work():
    for verb in verbs(build_parser()):
        checked = {flag for _, flag, _ in verb.get_default("outputs") or ()}
        named = {flag for action in verb._actions if action.type is Path for flag in action.option_strings}
        assert named & OUTPUT_FLAGS <= checked, verb.prog


@pytest.mark.parametrize(
    "words",
    [
        "data export --to numpy --out FILE",
        "data export --to megatron --out FILE/below",
        "data stats --json FILE/a/b.json",
        "data stats --json FOLDER",
        "tokenizer eval --json FILE/eval.json",
        "tokenizer eval --json FILE/figures.json",
        "tokenizer eval --json FOLDER",
        "tokenizer extend --pieces kalo --out FILE/below",
        "tokenizer extend --pieces kalo --out FILE",
        "export tiny --out FILE/below",
        "export tiny --out FILE",
        "plot tiny --png FILE/below.png",
        "track export tiny --to csv FILE/below.csv",
        "track export tiny --to tensorboard FILE",
        "perf profile quickstart --out FILE",
        "perf ops --json FILE/below.json",
    ],
)
def test_a_result_that_cannot_be_put_there_is_refused_at_once(words, journey, tmp_path, z2a):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    named = words.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path / "folder"))
    ended = z2a(*named.split(), *([] if words.startswith("perf") else ["--work", journey]))
    assert ended.code == 3, ended
    assert "Traceback" not in ended.err
    assert "Choose another" in ended.err
    assert ended.out == "", "it began to work before it looked"
    assert (tmp_path / "file").read_text() == "precious"


def test_a_place_that_may_not_be_written_to_is_refused_at_once(journey, tmp_path, z2a_without_rights):
    (tmp_path / "closed").mkdir(mode=0o500)
    ended = z2a_without_rights(
        *("data", "export", "--to", "numpy", "--out", tmp_path / "closed/below", "--work", journey)
    )
    assert ended.code == 3, ended
    assert "cannot be written to" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "tokenizer.json"])
def test_an_extended_tokenizer_replaces_no_folder_of_another_kind(journey, tmp_path, z2a, name):
    """It once did: everything in --out was deleted, be it a model or a home folder."""
    (tmp_path / name).write_text("precious")
    ended = z2a("tokenizer", "extend", "--pieces", "kalo", "--out", tmp_path, "--work", journey)
    assert ended.code == 2
    assert "is not a zero2all tokenizer folder, so it is not replaced" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_extended_tokenizer_replaces_an_older_one(journey, tmp_path, z2a):
    for pieces in (["kalo"], ["kalo", "tervun"]):
        ended = z2a("tokenizer", "extend", "--pieces", *pieces, "--out", tmp_path / "larger", "--work", journey)
        assert ended.code == 0, ended.err


# ---- odd numbers and names ----


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("data show --at 99999999999999999999999", 2),
        ("data show --at 4611686018427387903", 2),
        ("data show --at 1099511627776", 2),
        (f"data show --at {'9' * 5000}", 2),
        ("data show --source en --sample 99999999999999999999999", 2),
        ("data show --source en --sample 4611686018427387903", 2),
        ("data stats --tokens 99999999999999999999999", 2),
        ("inspect tiny 99999999999999999999999", 2),
        ("inspect tiny 4611686018427387903", 2),
        ("corpus show --gid 99999999999999999999999", 2),
        ("generate tiny --prompt ka --seed 99999999999999999999999", 2),
        ("tokenizer decode 99999999999999999999999", 2),
        ("plot tiny --smoothing gaussian:1e300", 2),
        ("train quickstart --train.steps 99999999999999999999999", 2),
        (f"train quickstart --train.steps {'9' * 5000}", 2),
        (f"train quickstart --optim.lr_max {'9' * 5000}", 2),
        ("train quickstart --model.layers 10000000", 2),
        ("train quickstart --data.mixture [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 2),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_number_that_cannot_be_is_answered_in_words(words, code, journey, z2a):
    ended = z2a(*words.split(), "--work", journey)
    assert ended.code == code, ended
    assert any(word in ended.err for word in ("expected", "Give", "Use ", "there is no step", "is not in"))
    assert len(ended.err) < 3000


def test_a_large_place_is_shown_but_not_beyond_the_end_of_a_run(journey, z2a):
    ended = z2a("data", "show", "--at", "1099511627775", "--work", journey)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("position 1,099,511,627,775 (stage main); source ")
    ended = z2a("data", "show", "--at", "1099511627775", "--config", "tiny", "--work", journey)
    assert ended.code == 2
    last = int(re.search(r"Give a number from 0 to ([\d,]+)", ended.err)[1].replace(",", ""))
    assert z2a("data", "show", "--at", last, "--config", "tiny", "--work", journey).code == 0
    assert z2a("data", "show", "--at", last + 1, "--config", "tiny", "--work", journey).code == 2


def test_a_board_of_a_folder_that_is_not_there_is_refused(journey, z2a):
    ended = z2a("board", journey, "mispelled", "ssh://host/x")
    assert ended.code == 3
    assert "no folder mispelled." in ended.err


NAMES = ["a\0b", "a/b", "..", ".hidden", "", "a\nb", "a\x1b[31m", "n" * 300, "run.partial-7"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_can_be_no_folder_is_a_problem_of_the_config(name, journey, tmp_path, z2a):
    config = tmp_path / "run.yaml"
    config.write_text(f"train: {{name: {json.dumps(name)}}}")
    ended = z2a("train", config, "--work", journey)
    assert ended.code == 2, ended
    assert "train.name: got" in ended.err
    assert "expected a plain folder name" in ended.err


def test_names_in_any_script_are_taken(tmp_path, z2a):
    config = tmp_path / "run.yaml"
    config.write_text("train: {name: 运行 α-1.5}", encoding="utf-8")
    assert z2a("train", config, "--print-config").code == 0


# ---- files that were damaged, or written by somebody else ----

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)
)


@pytest.mark.parametrize("text", [BOMB, "[" * 50_000, "a: " * 300, "train: &a {name: *a}", "\0", "train: 2024-99-99"])
def test_a_config_that_stands_for_endless_values_is_refused_at_once(text, tmp_path, z2a):
    (tmp_path / "run.yaml").write_text(text)
    ended = z2a("train", tmp_path / "run.yaml", "--work", tmp_path)
    assert ended.code == 2
    assert "cannot be read as YAML; nothing was started" in ended.err
    ended = z2a("corpus", "build", tmp_path / "run.yaml", "--work", tmp_path)
    assert ended.code == 2
    assert "cannot be read as YAML" in ended.err


@pytest.mark.parametrize(
    "text", ["", "5", "[]", "train: 5", "train: {steps: x}", "model: [", "a: 1\na: 2", BOMB, "\0\0", "odd: 1"]
)
def test_a_damaged_config_of_a_run_is_named(text, copy, z2a):
    path = copy / "runs/tiny/config.yaml"
    path.write_text(text)
    for words in (["inspect", "tiny", "1"], ["anneal", "tiny"], ["generate", "tiny", "--prompt", "ka"]):
        ended = z2a(*words, "--work", copy)
        assert ended.code == 3, ended
        assert f"{path}, the saved config of a run, was changed or is damaged" in ended.err
    assert z2a("watch", "tiny", "--once", "--work", copy).code == 0


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "[]",
        "{}",
        '{"from_step": "x", "steps": 2}',
        '{"from_step": 1, "steps": "2e9x"}',
        '{"from_step": -1, "steps": 2}',
        '{"from_step": 1, "steps": 0}',
        '{"from_step": 1e400, "steps": 2}',
        '{"from_step": 1, "steps": 2, "shape": 5}',
        '{"from_step": 1, "steps": 2, "shape": ["linear"]}',
        '{"from_step": 1, "steps": 2, "to_share": 7}',
        '{"from_step": 1, "steps": 2, "steps": 3}',
        '{"from_step": 1, "steps": 2, "odd": 3}',
        "[" * 5000,
    ],
)
def test_an_odd_record_of_an_anneal_is_refused_in_words(text, copy, z2a):
    (copy / "runs/tiny/anneal.json").write_text(text)
    for words in (["anneal", "tiny"], ["data", "show", "--at", "0", "--config", "tiny"]):
        ended = z2a(*words, "--work", copy)
        assert ended.code == 3, ended
        assert "Write it again with `z2a anneal`, or delete it" in ended.err
    assert z2a("watch", "tiny", "--once", "--work", copy).code == 0


ODD_VALUES = (None, 5, "x", [], {"a": 1}, {"../../up": {}}, {"a\0b": {}})


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("packed/report.json", "data show --at 0 --data.seq_len 32"),
        ("packed/report.json", "data verify"),
        ("corpus/report.json", "corpus show"),
        ("corpus/report.json", "corpus report"),
    ],
)
def test_a_report_of_odd_types_is_refused_in_words(file, words, copy, z2a):
    sound = json.loads((copy / file).read_text())
    for odd in (*ODD_VALUES, *({**sound, "sources": value} for value in ODD_VALUES)):
        (copy / file).write_text(json.dumps(odd))
        ended = z2a(*words.split(), "--work", copy)
        assert ended.code == 3, (odd, ended)
        assert "Traceback" not in ended.err


def test_odd_tokenizer_files_are_refused_in_words(copy, z2a):
    path = copy / "tokenizer/tokenizer.json"
    sound = json.loads(path.read_text())
    model, added = sound["model"], sound["added_tokens"]
    for odd in (
        {"model": 5},
        {"model": {**model, "vocab": 5}},
        {"model": {**model, "unk_token": []}},
        {"added_tokens": 5},
        {"added_tokens": [{"content": "x"}]},
        {"added_tokens": [*added, {"content": [], "id": "x", "special": 1}]},
        {"decoder": 5},
        {"normalizer": {"normalizers": 5}},
    ):
        path.write_text(json.dumps({**sound, **odd}))
        ended = z2a("tokenizer", "show", "--work", copy)
        assert ended.code == 3, (odd, ended)
    path.write_text(json.dumps(sound))
    config = copy / "tokenizer/tokenizer_config.json"
    sound = json.loads(config.read_text())
    for odd in ([], *({**sound, "added_tokens_decoder": value} for value in (5, {"x": True}, {"5": {}}))):
        config.write_text(json.dumps(odd))
        assert z2a("tokenizer", "show", "--work", copy).code == 3, odd


# ---- little memory ----


FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))
"""


def test_too_few_open_files_end_a_run_without_a_traceback(journey, tiny, start):
    words = ["train", "quickstart", *tiny, "--train.name", "files", "--work", journey]
    run = start(*words, "--resilience.supervise", "false", code=FEW_FILES + Z2A)
    assert run.wait() == 4, run.text()
    assert "Traceback" not in run.text()
    assert "z2a: Stopped: this process may have 10 files and connections open at a time" in run.text()
    shutil.rmtree(Path(journey) / "runs" / "files")  # other tests count the runs of this workspace


def test_an_empty_path_to_write_is_refused_and_does_not_mean_the_current_folder(journey, z2a):
    ended = z2a("data", "export", "--to", "numpy", "--out", "", "--work", journey)
    assert (ended.code, "--out: the path is empty." in ended.err) == (2, True), ended
