"""HumanEval answers from a file: what passes, pass@k against its definition, and files that are none."""

import itertools
import json

import pytest

from zero2all.evals.completions import pass_at_k

TESTS = "def check(f):\n    assert f(2) == 4\n"


@pytest.fixture
def data(tmp_path):
    rows = [
        {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}(x):\n", "entry_point": f"f{n}", "test": TESTS,
         "canonical_solution": "    return x * x\n"}
        for n in range(3)
    ]  # fmt: skip
    (tmp_path / "data/humaneval").mkdir(parents=True)
    (tmp_path / "data/humaneval/test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data"


def written(tmp_path, *rows):
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join(json.dumps({"task_id": f"HumanEval/{n}", "completion": text}) for n, text in rows))
    return path


def test_samples_are_run_and_counted_by_task(z2a, data, tmp_path):
    right, wrong, endless = "    return x + x\n", "    return x\n", "    while True: pass\n"
    path = written(tmp_path, (0, right), (0, wrong), (1, wrong), (1, endless), (1, right), (2, right), (2, right))
    found = json.loads(z2a.done("eval", "completions", path, "--data", data, "--run-code", "--json", "-"))
    assert found["outcomes"]["HumanEval/1"] == ["failed: AssertionError", "out of time", "passed"]
    assert found["pass@1"] == pytest.approx((1 / 2 + 1 / 3 + 1) / 3)
    assert found["pass@2"] == pytest.approx((1 + 2 / 3 + 1) / 3)  # of 1 right among 3, one pair of three has none
    assert (found["tasks"], found["of"], found["completions"]) == (3, 3, 7)


def test_nothing_is_run_unasked_and_a_part_is_called_so(z2a, data, tmp_path):
    path = written(tmp_path, (0, "    open('/nowhere', 'w')\n    return x + x\n"))
    assert "1 completions can be run, and were not: add --run-code" in z2a.done(
        "eval", "completions", path, "--data", data
    )
    said = z2a.done("eval", "completions", path, "--data", data, "--run-code")
    assert "pass@1 0.0%: 1 completions of 1 of 3 tasks" in said
    assert "PARTIAL" in said


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    for samples, right, k in ((5, 2, 1), (5, 2, 3), (6, 0, 4), (6, 6, 2), (4, 1, 4)):
        draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_every_line_that_cannot_be_used_is_named(z2a, data, tmp_path):
    path = tmp_path / "samples.jsonl"
    lines = [b"[1]", b"{", b'{"task_id": "HumanEval/9", "completion": "x"}', b'{"task_id": ["a"], "completion": "x"}',
             b'{"task_id": "HumanEval/0", "completion": 1}', b"\xff\xfe", b"[" * 100_000]  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    said = z2a.refused(3, "eval", "completions", path, "--data", data, "--run-code")
    assert [f"line {n}" in said for n in range(1, 8)] == [True] * 7
    path.write_bytes(b"\n\n")
    assert "is empty" in z2a.refused(3, "eval", "completions", path, "--data", data)
    assert "cannot be read" in z2a.refused(3, "eval", "completions", tmp_path / "none", "--data", data)
    assert "There is no folder" in z2a.refused(3, "eval", "completions", path, "--data", tmp_path / "none")
