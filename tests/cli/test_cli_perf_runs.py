"""`z2a perf simulate` and `explain` as typed."""

from __future__ import annotations

import json

import pytest

from tests.measure.made_run import MadeRun

SMALL = ("perf", "simulate", "--nodes", "64", "--time", "3d", "--repetitions", "5")


def test_simulate_prints_bands_and_where_the_time_goes(z2a):
    words = ("--failures-per-gpu-hour", "3e-4", "--price", "2", "--slow-nodes", "0.01,1.5,6")
    ended = z2a(*SMALL, *words)
    assert ended.code == 0, ended.err
    for expected in ("goodput, %", "cost of all GPUs held", "lost work", "10 %"):
        assert expected in ended.out


def test_simulate_writes_only_json_to_standard_output(z2a):
    found = json.loads(z2a(*SMALL, "--json", "-").out)
    assert found["bands"]["days"]["p50"] >= 3.0
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["plan"]["failures_per_gpu_hour"] == pytest.approx(1.973e-5, rel=1e-3)


def test_a_run_without_failures_is_said_to_have_none(z2a):
    ended = z2a(*SMALL, "--failures-per-gpu-hour", "0")
    assert "no failures; a checkpoint every" in ended.out
    assert "inf" not in ended.out


def test_simulate_from_tokens_equals_simulate_from_days(z2a):
    tokens = ("--tokens", str(512 * 100.0 * 3 * 86400), "--tokens-per-gpu-second", "100", "--json", "-")
    by_days = json.loads(z2a(*SMALL, "--json", "-").out)
    by_tokens = json.loads(z2a(*SMALL[:4], *SMALL[6:], *tokens).out)
    assert by_tokens["bands"]["days"] == pytest.approx(by_days["bands"]["days"])


def test_simulate_reads_tokens_as_every_other_verb_does(z2a):
    speed = ("--tokens-per-gpu-second", "1.2k", "--json", "-")
    found = [json.loads(z2a(*SMALL[:4], *SMALL[6:], "--tokens", text, *speed).out) for text in ("1.5T", "1.5e12")]
    assert found[0] == found[1]
    ended = z2a(*SMALL[:4], "--tokens", "1.5 x", *speed)
    assert ended.code == 2
    assert "got '1.5 x', expected a whole number of at least 1, such as 8, 4096, 1.1e9 or 7.5B" in ended.err


def test_slow_links_slow_the_run_by_their_share_of_a_step(z2a):
    words = ("--communication-share", "0.2", "--link-speed", "0.5", "--json", "-")
    assert json.loads(z2a(*SMALL, *words).out)["plan"]["work_seconds"] == pytest.approx(1.2 * 3 * 86400)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--tokens", "1e9"), "--tokens with --tokens-per-gpu-second, or --time"),
        (("--shares", "fire=1"), "fire is not a kind"),
        (("--shares", "process"), "expected kinds and shares"),
        (("--shares", "process=nan"), "must be at least 0 and sum to 1"),
        (("--time", "1e30"), "got '1e30', expected a time"),
        (("--slow-nodes", "1,2"), "expected three numbers"),
        (("--slow-links", "0.1,0.5,3"), "--communication-share says"),
        (("--least-nodes", "70", "--stall", "99"), "at most 64 nodes; got 70; a save stalls"),
    ],
)
def test_simulate_refuses_what_cannot_be(z2a, words, expected):
    ended = z2a(*SMALL, *words)
    assert ended.code != 0
    assert expected in ended.err


def test_explain_prints_findings_and_writes_json(z2a, tmp_path):
    run = MadeRun(tmp_path / "run", evaluate_every=5).write(1, 60).folder
    file = tmp_path / "run.json"
    ended = z2a("perf", "explain", run, "--json", file)
    assert ended.code == 0, ended.err
    for expected in ("The run is limited by", "1. evaluation", "evaluate half as often", "validate", "MFU"):
        assert expected in ended.out
    assert json.loads(file.read_text())["findings"][0]["what"] == "evaluation"


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
