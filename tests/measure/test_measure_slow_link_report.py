"""`z2a perf link`: the shapes are those of the model, and the report names a scheme with its settings."""

from __future__ import annotations

import pytest

from zero2all.cli.main import main
from zero2all.common.errors import BadInputError
from zero2all.common.manifest import write_manifest
from zero2all.estimate.run.batch import load_measured_config
from zero2all.measure.slow_link_report import link_notes, link_report, link_rows
from zero2all.measure.verify import Asked
from zero2all.model.config import parameter_counts

SETTING = " --parallel.slow_link.{} {}"
SETTINGS = "--parallel.slow_link.scheme {} --parallel.slow_link.every {}"


def test_a_report_of_a_preset():
    config, _ = load_measured_config("z2all-1b", [])
    report = link_report("z2all-1b", [], 1.0, 2, 3.4)
    assert report.parameters == parameter_counts(config.model)["total"]
    assert report.fragments == -(-config.model.layers // 3) + 1
    assert [row[0] for row in link_rows(report)[1:]] == [cost.scheme.name for cost in report.costs]
    assert report.best.scheme.name == "streaming, int4, H=100"
    assert link_notes(report)[-1] == SETTINGS.format("streaming", 100) + SETTING.format("tau", 1) + SETTING.format(
        "compress", "int4"
    )


@pytest.fixture
def size_said(tmp_path, capsys):
    """What `z2a perf link` prints for a config without model.vocab_size in the workspace `tmp_path`."""

    def link():
        words = ["link", "quickstart", "--gbit", "1", "--step-seconds", "1", "--work", str(tmp_path)]
        assert main(["perf", *words]) == 0
        return capsys.readouterr().out

    return link


def test_the_vocabulary_is_that_of_the_workspace_as_in_a_run(size_said, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    write_manifest(tmp_path / "tokenizer", "tokenizer", "by-hand", {"fingerprint": "x", "vocab_size": 2048})
    config, _ = load_measured_config("quickstart", ["--model.vocab_size", "2048"])
    said = size_said()
    assert f"{parameter_counts(config.model)['total']:,} parameters" in said
    assert "vocab_size" not in said


def test_without_a_tokenizer_it_says_which_vocabulary_is_assumed(size_said, tmp_path):
    config, _ = load_measured_config("quickstart", [])
    said = size_said()
    assert f"{parameter_counts(config.model)['total']:,} parameters" in said
    assert f"{tmp_path} has no tokenizer: using tokenizer.vocab_size, {config.model.vocab_size}." in said


@pytest.mark.parametrize(("gbit", "groups"), [(0.01, 2), (0.1, 8)])
def test_below_what_any_scheme_can_use_it_takes_one_that_was_measured(gbit, groups):
    report = link_report("z2all-1b", [], gbit, groups, 3.4)
    assert link_notes(report)[-1] == SETTINGS.format("sparse", 30)


def test_an_exchange_longer_than_the_wait_is_said_with_the_value_to_set():
    report = link_report("z2all-1b", [], 0.001, 2, 3.4)
    assert link_notes(report)[-1].endswith(SETTING.format("wait_seconds", 724))
    assert "longer than parallel.slow_link.wait_seconds (60 s)" in link_notes(report)[-2]


def test_in_chinese_nothing_but_names_is_left_in_english(monkeypatch, capsys):
    monkeypatch.setenv("Z2A_LANG", "zh")
    assert main(["perf", "link", "z2all-1b", "--gbit", "1", "--cluster", "h200", "--parallel.device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "个参数，2 组，1 Gbit/s" in said
    assert "（按 h200 预测，每组的批次为 " in said
    assert "（arXiv 2501.18512，1000M 参数，2 组）" in said


def test_without_a_profile_it_names_the_flag_that_needs_none(tmp_path, monkeypatch):
    monkeypatch.setenv("Z2A_PROFILES", str(tmp_path))
    with pytest.raises(BadInputError, match=r"z2a perf calibrate.*--cluster h200\..*--step-seconds N\."):
        link_report("quickstart", ["--parallel.device", "cpu"], 1.0, 2)


def test_a_step_is_predicted_for_a_cluster_by_name():
    assert "h200" in link_report("z2all-1b", ["--parallel.device", "cpu"], 1.0, 2, Asked("h200")).how.lower()
