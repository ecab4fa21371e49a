"""Benchmarks through the command line: the table, the report's file, the metrics, and what is refused early."""

import json
import re
import shutil

import pytest

from zero2all.cli import main
from zero2all.evals.report import figures, task_lines
from zero2all.evals.sandbox import protection
from zero2all.evals.tasks.list import TaskQuestions

NOTHING_ELSE = ("--probes", "none", "--pairs", "none")


@pytest.fixture
def data(tmp_path):
    rows = ["question,A,B,answer", "中国的首都是？,北京,巴黎,A", "法国的首都是？,巴黎,北京,A"]
    rows += ["日本的首都是？,东京,伦敦,C", f"{'长' * 300}？,东京,伦敦,A"]
    (tmp_path / "data/capitals").mkdir(parents=True)
    (tmp_path / "data/capitals/all.csv").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "data/cmmlu/test").mkdir(parents=True)
    (tmp_path / "data/cmmlu/test/law.csv").write_text(",Question,A,B,C,D,Answer\n0,首都？,北京,巴黎,东京,伦敦,A\n")
    return tmp_path / "data"


@pytest.fixture
def eval_run(trained_workspace, tmp_path, data, capsys):
    work = tmp_path / "work"
    shutil.copytree(trained_workspace.root, work)
    common = ["--work", str(work), "--data", str(data), "--max-bytes", "500", *NOTHING_ELSE]

    def ask(*words):
        return main(["eval", "tiny", *common, *words]), capsys.readouterr(), work / "runs/tiny"

    return ask


def newest_report(run):
    return json.loads(max((run / "eval").glob("step-*.json"), key=lambda path: path.stat().st_mtime_ns).read_bytes())


def test_a_run_is_asked_benchmarks(eval_run):
    code, said, run = eval_run("--tasks", "capitals,cmmlu", "--shots", "0", "--forms", "cloze,bits")
    assert code == 0
    lines = said.out.splitlines()
    (heading,) = (number for number, line in enumerate(lines) if line.startswith("benchmarks "))
    assert lines[heading + 1].split()[:4] == ["capitals", "cloze", "0", "2"]
    assert "1 skipped: gold outside the options; 1 skipped: longer than the context" in lines[heading + 2]
    assert any(re.match(r"  Chinese: .*cmmlu \(cloze(_pmi)?\)$", line) for line in lines)
    assert any("capitals all.csv row 3: the right answer is C; the options are A, B" in line for line in lines)
    report = newest_report(run)
    results = {(each["task"], each["form"]): each for each in report["tasks"]["results"]}
    assert results.keys() == {(task, form) for task in ("capitals", "cmmlu") for form in ("cloze", "cloze_pmi", "bits")}
    cloze = results["capitals", "cloze"]
    assert (cloze["items"], cloze["chance"], len(cloze["per_item"])) == (2, 0.5, 2)
    assert cloze["interval"][0] <= cloze["accuracy"] <= cloze["interval"][1]
    shown = figures(report)
    assert shown["eval/tasks/cloze/capitals"] == cloze["centred"]
    assert shown["eval/tasks/bits/cmmlu"] == results["cmmlu", "bits"]["bits_per_byte"] > 0
    assert shown["eval/tasks/summary/zh"] == report["tasks"]["summary"]["zh"]["score"]
    assert "eval/tasks/summary/en" not in shown


def test_without_held_out_text_programs_are_scored_and_the_report_says_what_kept_them_in(eval_run, data):
    (data / "humaneval").mkdir()
    item = {"task_id": "1", "prompt": "def f():\n", "canonical_solution": "    return 1\n", "entry_point": "f"}
    (data / "humaneval/test.jsonl").write_text(json.dumps({**item, "test": "def check(f):\n    assert f() == 1\n"}))
    for flags, expected in (([], None), (["--run-code"], protection())):
        code, said, run = eval_run("--tasks", "humaneval", "--forms", "generate", "--held-out", "none", *flags)
        assert code == 0, said.err
        report = newest_report(run)
        assert report["tasks"].get("protection") == expected
        assert (report["held_out"], report["documents"], "held-out loss" in said.out) == ({}, {}, False)
    assert eval_run("--held-out", "none")[0] == 3  # nothing is left to score


def test_neutral_texts_are_scored_by_domain_and_language(eval_run):
    code, said, run = eval_run("--text", "neutral", "--held-out", "none", "--max-bytes", "5000")
    assert code == 0, said.err
    texts = newest_report(run)["texts"]
    names = ["code", "encyclopaedic-en", "encyclopaedic-zh", "logic-en", "logic-zh"]
    assert list(texts) == [f"neutral/{name}" for name in names]
    for name, found in texts.items():
        assert 2000 < found["bytes"] < 3000
        assert found["is_whole"]
        assert f"  {name} " in said.out


def test_what_cannot_be_asked_is_refused_before_the_model_is_loaded(eval_run, monkeypatch):
    monkeypatch.setattr("zero2all.infer.load.load_run", None)  # would be called too early
    for words, code, expected in (
        (["--text", ""], 2, "got an empty path"),
        (["--tasks", "piqa"], 3, "z2a eval download piqa"),
        (["--tasks", "cmmlu", "--forms", "letters"], 2, "The forms are cloze, choice, bits, generate"),
    ):
        found, said, _ = eval_run(*words)
        assert (found, expected in said.err) == (code, True)


def test_programs_that_ran_without_isolation_are_said_once():
    empty = {"results": [], "summary": {}, "problems": []}
    kernel, hook = {"files": "landlock", "calls": "seccomp"}, "audit hook"
    for found, count in (({}, 0), (kernel, 0), ({**kernel, "files": hook}, 1), ({"files": hook, "calls": hook}, 1)):
        said = "\n".join(task_lines({**empty, "protection": found} if found else empty))
        assert said.count("NOT isolated") == count


def test_a_benchmark_with_a_bad_file_is_named_at_the_end_and_the_others_are_asked(eval_run, data):
    (data / "ceval/val").mkdir(parents=True)
    (data / "ceval/val/law_val.csv").write_bytes("题".encode("gb18030"))
    code, said, run = eval_run("--tasks", "ceval,cmmlu,,cmmlu", "--forms", "bits", "--shots", "0")
    assert code == 3
    assert sum(line.split()[:1] == ["cmmlu"] for line in said.out.splitlines()) == 1
    assert "files cannot be used: ceval.\n  ceval: " in said.err
    assert "is not UTF-8" in said.err
    assert list(newest_report(run)["tasks_unread"]) == ["ceval"]


def test_a_report_is_that_of_the_files_it_was_made_from(data):
    questions = TaskQuestions(("cmmlu",), data)
    before = questions.record()
    (data / "capitals/all.csv").write_text("another set")
    assert questions.record() == before
    (data / "cmmlu/test/law.csv").write_text("changed")
    assert questions.record() != before
