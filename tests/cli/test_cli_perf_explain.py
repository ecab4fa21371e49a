"""`z2a perf explain` as typed."""

from __future__ import annotations

import json

import pytest

from tests.measure.made_run import MadeRun


def test_explain_prints_findings_and_writes_json(z2a, tmp_path):
    run = MadeRun(tmp_path / "run", evaluate_every=5).write(1, 60).folder
    file = tmp_path / "run.json"
    ended = z2a("perf", "explain", run, "--json", file)
    assert ended.code == 0, ended.err
    for expected in ("The run is limited by", "1. validation", "validate half as often", "MFU"):
        assert expected in ended.out
    assert json.loads(file.read_text())["findings"][0]["what"] == "validation"


def test_explain_gives_the_account_of_a_run_that_was_stopped(z2a, tmp_path):
    made = MadeRun(tmp_path / "run").write(1, 40, "preempted")
    made.now += 1000.0
    run = made.write(41, 60, resumed_from=40).folder
    said = z2a("perf", "explain", run).out
    assert "not counted: 1,000.0 s between an end and the next start" in said
    assert "goodput 85.7%: 60.0 s of surviving steps in 70.0 s" in said
    found = json.loads(z2a("perf", "explain", run, "--json", "-").out)
    assert found["goodput"] == pytest.approx(60 / 70, rel=0.02)
    assert (found["starts"], found["stopped_seconds"]) == (2, pytest.approx(1000))
    assert "`z2a goodput` is now `z2a perf explain`" in z2a("goodput", run).err
