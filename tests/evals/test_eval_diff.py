"""Two reports on the same items: each difference is paired."""

import json
import shutil

import pytest

from zero2all.cli import main
from zero2all.common.errors import BadInputError
from zero2all.evals.diff import changed_data, compare


def report(form, rights, bits=()):
    items = [{"id": str(n), "correct": right, "bits": None, "credit": None} for n, right in enumerate(rights)]
    items += [{"id": str(n), "correct": None, "bits": each, "bytes": 10, "credit": None} for n, each in enumerate(bits)]
    return {"tasks": {"results": [{"task": "exam", "form": form, "per_item": items}]}}


def test_items_that_both_get_right_or_wrong_alike_do_not_widen_the_interval():
    same = [True] * 300 + [False] * 300
    (clear,) = compare(report("choice", [*same, *[False] * 20]), report("choice", [*same, *[True] * 20]))
    assert (clear["items"], clear["difference"]) == (620, pytest.approx(20 / 620))
    assert clear["interval"][0] > 0.015
    assert clear["p"] < 0.001
    (even,) = compare(report("choice", [True, False] * 10), report("choice", [False, True] * 10))
    assert even["interval"][0] < 0 < even["interval"][1]
    assert even["p"] == 1.0


def test_bits_are_compared_per_byte_and_only_items_of_both():
    (row,) = compare(report("bits", [], [20.0, 30.0, 40.0, 9.0]), report("bits", [], [18.0, 29.0, 37.0]))
    assert (row["form"], row["items"]) == ("bits", 3)
    assert (row["one"], row["other"], row["difference"]) == pytest.approx((3.0, 2.8, -0.2))
    assert row["interval"] == pytest.approx((-0.2 - 1.959964 * 0.1 / 3**0.5, -0.2 + 1.959964 * 0.1 / 3**0.5))
    assert compare(report("bits", [], [1.0]), report("cloze", [True])) == []


def test_other_questions_under_the_same_ids_are_not_compared_and_what_is_no_report_is_refused():
    exam = {"settings": {"tasks": {"data": {"exam/test.jsonl": "1"}}, "suites": None}, **report("cloze", [True, False])}
    other = {**exam, "settings": {"tasks": {"data": {"exam/test.jsonl": "2", "more/test.jsonl": "3"}}}}
    assert [row["items"] for row in compare(exam, exam)] == [2]
    assert (compare(exam, other), changed_data(exam, other)) == ([], {"exam"})
    for bad in ({"tasks": None}, {"tasks": {"results": [{"task": "exam", "form": "cloze"}]}}):
        with pytest.raises(BadInputError, match="is no report of `z2a eval RUN`"):
            compare(exam, bad)


def test_two_checkpoints_of_a_run_are_compared(trained_workspace, tmp_path, capsys):
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    work = ["--work", str(tmp_path / "work")]
    assert main(["eval", "diff", "tiny", "tiny", *work]) == 3
    assert "has no report of an evaluation; there are: none" in capsys.readouterr().err
    assert main(["eval", "tiny", *work, "--pairs", "none", "--held-out", "none"]) == 0
    (path,) = (tmp_path / "work/runs/tiny/eval").glob("step-*.json")
    better = json.loads(path.read_bytes())
    for each in better["probe_results"]:
        each["correct"] = True
    (tmp_path / "better.json").write_text(json.dumps(better))
    capsys.readouterr()
    assert main(["eval", "diff", f"tiny@{better['step']}", str(tmp_path / "better.json"), *work]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("better against tiny@")
    (probes,) = (line.split() for line in lines if line.startswith("  probes"))
    assert (probes[1], probes[4]) == ("accuracy", "100.0%")
    assert main(["eval", "diff", "tiny@x", "tiny", *work]) == 2
