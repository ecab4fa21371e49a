"""What an evaluation misses is said at once, and before the model is loaded."""

import shutil

import pytest

from zero2all.cli import main
from zero2all.common.errors import BadInputError
from zero2all.common.workspace import Workspace
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.evals.options import EvalOptions, check_inputs


@pytest.fixture
def copied(trained_workspace, tmp_path):
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


def test_nothing_is_said_of_a_run_that_can_be_evaluated(trained_workspace):
    check_inputs(trained_workspace, "tiny", None, EvalOptions())
    check_inputs(trained_workspace, "tiny", 15, EvalOptions())


def test_all_that_is_missing_is_listed_at_once_before_the_model_is_looked_at(copied, capsys):
    for weights in copied.runs.rglob("*.safetensors"):
        weights.write_bytes(b"loading this would be another error")
    shutil.rmtree(copied.corpus)
    shutil.rmtree(copied.tokenizer)
    words = ["eval", "tiny", "--step", "7", "--work", str(copied.root), "--probes", str(copied.root / "none.jsonl")]
    assert main(words) == 3
    said = capsys.readouterr().err
    assert "Problems found: 4." in said
    for part in ("no checkpoint at step 7; it has [15, 30]", "finished tokenizer", "finished corpus", "none.jsonl"):
        assert part in said


def test_one_missing_thing_is_said_without_a_list(copied):
    shutil.rmtree(copied.corpus)
    with pytest.raises(BadInputError, match=r"^There is no finished corpus .*Run `z2a corpus build` first"):
        check_inputs(copied, "tiny", None, EvalOptions())


def test_a_corpus_without_held_out_text_is_answered_unless_there_are_probes(copied, tmp_path):
    (tmp_path / "a.txt").write_text("One text alone is too little for a part to be held out of it.")
    build_corpus(copied.corpus, [Source("a", tmp_path / "a.txt", "en")], BuildOptions())
    with pytest.raises(BadInputError, match=r"has no held-out text"):
        check_inputs(copied, "tiny", None, EvalOptions())
    probes = tmp_path / "probes.jsonl"
    probes.write_text('{"id": "1", "channel": "en", "family": "f", "prompt": "p", "answer": "a"}\n')
    check_inputs(copied, "tiny", None, EvalOptions(probes=probes))
