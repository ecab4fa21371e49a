"""All checkpoints of a run: each once, at its step, and those that are gone are said."""

import shutil

import pytest

from zero2all.cli import main
from zero2all.common.workspace import Workspace
from zero2all.evals.options import EvalOptions, kept_report
from zero2all.track.reader import RunReader


@pytest.fixture
def copied(trained_workspace, tmp_path):
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


def steps_of(printed):
    """The first column of the table, which comes first and ends with an empty line."""
    title, *rows = printed.split("\n\n")[0].splitlines()
    assert title.split()[0] == "step"
    return [row.split()[0] for row in rows]


def test_all_steps_are_evaluated_once_and_again_only_with_other_settings(copied, tmp_path, capfd):
    pairs, text = tmp_path / "pairs.yaml", tmp_path / "mine.txt"
    pairs.write_text("- {kind: capital, language: zh, pairs: ['中国的首都是{北京|巴黎}。']}", encoding="utf-8")
    text.write_text("The capital of France is Paris.")
    asked = ["--max-bytes", "200", "--probes", "none", "--pairs", str(pairs), "--text", str(text), "--stride", "32"]
    words = ["eval", "tiny", "--all-steps", "--work", str(copied.root), *asked]
    assert main(words) == 0
    assert steps_of(capfd.readouterr().out) == ["15", "30"]
    options = EvalOptions(max_bytes=200, stride=32, pairs=pairs, texts=(text,))
    report = kept_report(copied.run("tiny"), 15, options)
    assert report["texts"]["mine.txt"]["bytes"] == 31
    for metric in ("eval/pairs/accuracy/zh", "eval/texts/bpb/mine.txt", "eval/by_position/en/loss/0001"):
        assert RunReader(copied.run("tiny")).series(metric).step.tolist() == [15, 30], metric

    shutil.rmtree(copied.run("tiny") / "checkpoints" / "step-00000015")
    assert main(words) == 0
    said = capfd.readouterr()
    assert "evaluated in" not in said.out + said.err
    assert steps_of(said.out) == ["30"]
    text.write_text("Another text.")
    assert kept_report(copied.run("tiny"), 30, options) is None


def test_a_damaged_checkpoint_is_said_and_the_others_are_evaluated(copied, capfd):
    for weights in (copied.run("tiny") / "checkpoints" / "step-00000015").glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    words = ["--max-bytes", "200", "--probes", "none", "--pairs", "none", "--work", str(copied.root)]
    assert main(["eval", "tiny", "--all-steps", *words]) == 0
    said = capfd.readouterr()
    assert "step 15 is left out" in said.out + said.err
    assert steps_of(said.out) == ["30"]
