"""`z2a perf memory`."""

from __future__ import annotations

import json

import pytest

from zero2all.cli.main import main

ONE_BILLION = ["perf", "memory", "z2all-1b", "--model.vocab_size", "64320", "--train.micro_batch_samples", "16"]


def test_prints_parts_phases_and_whether_it_fits(capsys):
    assert main([*ONE_BILLION, "--gpu", "h200"]) == 0
    said = capsys.readouterr().out
    for words in ("optimizer step", "checkpoint", "peak allocated", "53.71", "It fits"):
        assert words in said
    assert "what would need less memory" not in said


def test_where_it_does_not_fit_the_changes_that_help_are_listed(capsys):
    assert main([*ONE_BILLION, "--memory-gib", "40"]) == 0
    said = capsys.readouterr().out
    for words in ("what would need less memory", "--train.recompute full"):
        assert words in said


def test_json_has_the_same_figures_in_bytes(capsys):
    assert main([*ONE_BILLION, "--memory-gib", "40", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["peak_allocated"] == sum(part["bytes"] for part in found["parts"] if part["place"] == "device")
    assert found["peak_allocated"] == max(phase["total"] for phase in found["phases"])
    assert found["peak_allocated"] < found["reserved"] < found["process"]
    assert any(change["fits"] for change in found["changes"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "gtx-9000"], "Known are a100"),
        (["--gpu", "gtx-9000"], "`z2a perf memory --memory-gib N` computes for any other"),
        (["--gpu", "h200", "--memory-gib", "80"], "Give one of them"),
        (["--gpu", "h200", "--ranks", "3", "--parallel.tensor", "2"], "parallel"),
    ],
)
def test_bad_input_is_refused(flags, said, capsys):
    assert main([*ONE_BILLION, *flags]) != 0
    assert said in capsys.readouterr().err
