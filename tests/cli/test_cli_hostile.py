"""Odd words, damaged files and little memory: every command ends in words and with its code, never in a traceback."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import parsers
from tests.processes import Z2A
from zero2all.cli.main import build_parser

OUTPUT_FLAGS = {"--out", "--json", "--html", "--png", "--svg", "--pdf"}


def test_every_flag_that_names_a_file_to_write_is_checked_before_the_work():
    for verb in parsers(build_parser()):
        checked = {flag for _, flag, _ in verb.get_default("outputs") or ()}
        named = {flag for action in verb._actions if action.type is Path for flag in action.option_strings}
        assert named & OUTPUT_FLAGS <= checked, verb.prog


@pytest.mark.parametrize(
    "words",
    [
        "data export --to numpy --out FILE",
        "data stats --json FOLDER",
        "tokenizer extend --pieces kalo --out FILE/below",
        "track export tiny --to tensorboard FILE",
        "perf ops --json FILE/below.json",
    ],
)
def test_a_result_that_cannot_be_put_there_is_refused_at_once(words, journey, tmp_path, z2a):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    named = words.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path / "folder"))
    ended = z2a(*named.split(), *([] if words.startswith("perf") else ["--work", journey]))
    assert (ended.code, ended.out) == (3, ""), "it began to work before it looked"
    assert "Choose another" in ended.err
    assert (tmp_path / "file").read_text() == "precious"


def test_a_place_that_may_not_be_written_to_is_refused_at_once(journey, tmp_path, z2a_without_rights):
    (tmp_path / "closed").mkdir(mode=0o500)
    words = ("data", "export", "--to", "numpy", "--out", tmp_path / "closed/below", "--work", journey)
    assert "cannot be written to" in z2a_without_rights.refused(3, *words)


def test_an_extended_tokenizer_replaces_an_older_one_but_no_folder_of_another_kind(journey, tmp_path, z2a):
    """It once did: everything in --out was deleted, be it a model or a home folder."""
    for pieces in (["kalo"], ["kalo", "tervun"]):
        z2a.done("tokenizer", "extend", "--pieces", *pieces, "--out", tmp_path / "larger", "--work", journey)
    for name in ("notes.txt", "model.safetensors", "tokenizer.json"):
        other = tmp_path / name.replace(".", "-")
        other.mkdir()
        (other / name).write_text("precious")
        said = z2a.refused(2, "tokenizer", "extend", "--pieces", "kalo", "--out", other, "--work", journey)
        assert "is not a zero2all tokenizer folder, so it is not replaced" in said
        assert [path.name for path in other.iterdir()] == [name]


@pytest.mark.parametrize(
    "words",
    [
        "data show --at 99999999999999999999999",
        f"data show --at {'9' * 5000}",
        "data show --source en --sample 4611686018427387903",
        "data stats --tokens 99999999999999999999999",
        "inspect tiny 99999999999999999999999",
        "corpus show --gid 99999999999999999999999",
        "generate tiny --prompt ka --seed 99999999999999999999999",
        "tokenizer decode 99999999999999999999999",
        "plot tiny --smoothing gaussian:1e300",
        f"train quickstart --optim.lr_max {'9' * 5000}",
        "train quickstart --model.layers 10000000",
        f"train quickstart --data.mixture {'[' * 60}",
    ],
    ids=lambda words: words[:60],
)
def test_a_number_that_cannot_be_is_answered_in_words(words, journey, z2a):
    said = z2a.refused(2, *words.split(), "--work", journey)
    assert any(expected in said for expected in ("expected", "Give", "Use ", "there is no step", "is not in"))
    assert len(said) < 3000


def test_a_large_place_is_shown_but_not_beyond_the_end_of_a_run(journey, z2a):
    out = z2a.done("data", "show", "--at", "1099511627775", "--work", journey)
    assert out.startswith("position 1,099,511,627,775 (stage main); source ")
    said = z2a.refused(2, "data", "show", "--at", "1099511627775", "--config", "tiny", "--work", journey)
    last = int(re.search(r"Give a number from 0 to ([\d,]+)", said)[1].replace(",", ""))
    assert z2a("data", "show", "--at", last, "--config", "tiny", "--work", journey).code == 0
    assert z2a("data", "show", "--at", last + 1, "--config", "tiny", "--work", journey).code == 2


ENDLESS = "train: &a {name: *a}"  # more of them: tests/common/test_common_yamlio.py


def test_a_config_that_stands_for_endless_values_is_refused_at_once(tmp_path, z2a):
    (tmp_path / "run.yaml").write_text(ENDLESS)
    said = z2a.refused(2, "train", tmp_path / "run.yaml", "--work", tmp_path)
    assert "cannot be read as YAML; nothing was started" in said
    assert "cannot be read as YAML" in z2a.refused(2, "corpus", "build", tmp_path / "run.yaml", "--work", tmp_path)


def test_a_damaged_config_of_a_run_is_named(copy, z2a):
    path = copy / "runs/tiny/config.yaml"
    for text in ("", "5", "[]", "train: 5", "train: {steps: x}", "model: [", "a: 1\na: 2", ENDLESS, "\0\0", "odd: 1"):
        path.write_text(text)
        words = (["inspect", "tiny", "1"], ["anneal", "tiny"], ["generate", "tiny", "--prompt", "ka"])
        for each in words if text == "odd: 1" else words[:1]:
            said = z2a.refused(3, *each, "--work", copy)
            assert f"{path}, the saved config of a run, was changed or is damaged" in said, text
    z2a.done("watch", "tiny", "--once", "--work", copy)


ODD_ANNEALS = (
    *("5", "{}", "[" * 5000, '{"from_step": "x", "steps": 2}', '{"from_step": -1, "steps": 2}'),
    *('{"from_step": 1, "steps": 0}', '{"from_step": 1e400, "steps": 2}', '{"from_step": 1, "steps": 2, "shape": 5}'),
    *('{"from_step": 1, "steps": 2, "to_share": 7}', '{"from_step": 1, "steps": 2, "odd": 3}'),
)


def test_an_odd_record_of_an_anneal_is_refused_in_words(copy, z2a):
    for text in ODD_ANNEALS:
        (copy / "runs/tiny/anneal.json").write_text(text)
        said = z2a.refused(3, "anneal", "tiny", "--work", copy)
        assert "Write it again with `z2a anneal`, or delete it" in said, text
    z2a.refused(3, "data", "show", "--at", "0", "--config", "tiny", "--work", copy)
    z2a.done("watch", "tiny", "--once", "--work", copy)


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
        z2a.refused(3, *words.split(), "--work", copy)


def test_odd_tokenizer_files_are_refused_in_words(copy, z2a):
    path, config = copy / "tokenizer/tokenizer.json", copy / "tokenizer/tokenizer_config.json"
    sound = json.loads(path.read_text())
    model, added = sound["model"], sound["added_tokens"]
    odd = [{"model": value} for value in (5, {**model, "vocab": 5}, {**model, "unk_token": []})]
    odd += [{"added_tokens": 5}, {"added_tokens": [*added, {"content": [], "id": "x", "special": 1}]}]
    odd += [{"decoder": 5}, {"normalizer": {"normalizers": 5}}]
    of_config = [[], *({"added_tokens_decoder": value} for value in (5, {"x": True}, {"5": {}}))]
    for file, values in ((path, odd), (config, of_config)):
        text = file.read_text()
        for value in values:
            file.write_text(json.dumps({**json.loads(text), **value} if value else value))
            z2a.refused(3, "tokenizer", "show", "--work", copy)
        file.write_text(text)


def test_too_few_open_files_end_a_run_without_a_traceback(journey, tiny, start):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10)); "
    run = start("train", "quickstart", *tiny, "--train.name", "files", "--work", journey, code=limit + Z2A)
    assert run.wait() == 4, run.text()
    assert "Traceback" not in run.text()
    assert "z2a: Stopped: this process may have 10 files and connections open at a time" in run.text()
    shutil.rmtree(Path(journey) / "runs" / "files")  # other tests count the runs of this workspace


def test_an_empty_path_to_write_and_a_folder_that_is_not_there_are_refused(journey, z2a):
    said = z2a.refused(2, "data", "export", "--to", "numpy", "--out", "", "--work", journey)
    assert "--out: the path is empty." in said
    assert "no folder mispelled." in z2a.refused(3, "board", journey, "mispelled", "ssh://host/x")
