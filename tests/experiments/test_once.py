"""R17: questions that are read once, a control that reads other text, and the same end after a kill."""

import json
import shutil
import signal
from dataclasses import replace

import pytest

from tests.conftest import CAPITALS
from zero2all.common.workspace import Workspace
from zero2all.evals.items import Item
from zero2all.evals.rewrites.measure import mean_gap
from zero2all.evals.tasks.list import read_task
from zero2all.experiments.once import unanswered
from zero2all.infer.load import load_run
from zero2all.packed.shard_format import open_split
from zero2all.tokenizer import load_tokenizer


@pytest.fixture
def asked(trained_workspace, tmp_path):
    """Words of the command, a workspace to be changed, and questions on the capitals of its text."""
    work, data = tmp_path / "work", tmp_path / "data/capitals"
    shutil.copytree(trained_workspace.root, work)
    data.mkdir(parents=True)
    names = list(CAPITALS["en"].values())
    rows = [
        {"question": f"{wording} {country}?", "choices": names, "answer": capital}
        for wording in ("The capital of", "Where is")
        for country, capital in CAPITALS["en"].items()
    ]
    rows.append({"question": "2 + 2 =", "answer": "4"})  # without options: not read, not asked
    (data / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("eval", "once", "tiny", "--work", work, "--tasks", "capitals", "--data", data.parent, "--shots", 0)
    return words, work, data.parent


def test_what_is_read_tells_no_answer():
    item = Item("1", "Which is it?", ("Rome", "Oslo"), 1, "Oslo", context="A passage.")
    assert unanswered(item) == "A passage.\nWhich is it?\nA. Rome\nB. Oslo"
    assert unanswered(replace(item, context="", gold=0)) == "Which is it?\nA. Rome\nB. Oslo"


def test_each_item_is_asked_before_and_after_and_the_gain_is_paired_with_that_of_other_text(asked, z2a):
    words, work, data = asked
    out = z2a.done(*words, "--forms", "cloze", "--lr", 0.001)
    report = json.loads((work / "runs/tiny/eval/once-step-00000030.json").read_bytes())
    row, by_pmi = report["results"]
    assert (row["task"], row["form"], row["items"], by_pmi["form"]) == ("capitals", "cloze", 10, "cloze_pmi")
    assert row["gain"] == pytest.approx(row["after"] - row["before"])
    assert row["over_control"] == pytest.approx(row["after"] - row["control"])
    assert row["gain_interval"][0] < row["gain"] < row["gain_interval"][1]
    assert f"{row['gain']:+.1%}" in out

    # Read were all questions with options, whole, and none of the answers; by both runs from the same weights.
    split = open_split(work / "studies/tiny-read/packed", "once", "train")
    text = load_tokenizer(work / "tokenizer").decode(list(map(int, split.read(0, split.tokens))))
    for item in read_task(data, "capitals").items[:10]:
        assert item.question in text
    assert "2 + 2" not in text
    assert "answer" not in text.lower()
    tiny, read, other = (load_run(Workspace(work), name) for name in ("tiny", "tiny-read-once", "tiny-read-control"))
    assert read.step == other.step == report["steps"]
    assert report["trained_tokens"] >= split.tokens
    for one, other_one in ((tiny, read), (tiny, other), (read, other)):
        assert any((a != b).any() for a, b in zip(one.weights().values(), other_one.weights().values(), strict=True))


def test_a_killed_command_goes_on_and_another_question_or_rate_is_refused(asked, z2a, start):
    words, work, data = asked
    (work / "packed").rename(work / "away")
    assert "no report.json" in z2a.refused(3, *words, "--lr", 0.003)  # the control has no text: nothing is begun
    (work / "away").rename(work / "packed")
    program = start(*map(str, words), "--forms", "cloze", "--lr", "0.001")
    program.wait_until(lambda: (work / "runs/tiny-read-once/checkpoints/step-00000000").exists())
    program.signal(signal.SIGKILL)
    program.wait()
    first = z2a.done(*words, "--forms", "cloze", "--lr", 0.001)
    ledger = (work / "studies/tiny-read/ledger.jsonl").read_text()
    assert ledger.count("\n") == 2
    assert z2a.done(*words, "--forms", "cloze", "--lr", 0.001) == first
    assert (work / "studies/tiny-read/ledger.jsonl").read_text() == ledger
    assert "begun with other values of: lr" in z2a.refused(2, *words, "--lr", 0.002)
    (data / "capitals/test.jsonl").write_text('{"question": "2 + 2 =", "answer": "4"}\n')
    assert "none of these items is a question with options" in z2a.refused(3, *words)


def test_the_gain_is_that_of_pairs():
    gain, (low, high), p = mean_gap([1, 1, 1, 0, 0, 1, 1, 1])
    assert (gain, low > 0, high <= 1, p < 0.05) == (0.75, True, True, True)
