"""A branch: the same bits as the run itself gives when it anneals there, and its trunk goes on untouched."""

import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.config import load_config
from zero2all.config.rules import with_value
from zero2all.experiments.study import Branch, begin_branch
from zero2all.infer.load import load_run
from zero2all.train.anneal import request_anneal
from zero2all.train.run import train
from zero2all.train.saved_config import load_run_config


def trained(work, name, until=None):
    """The run, from tiny.yaml or from what is there."""
    run, words = work.run(name), [f"--train.name={name}"]
    config = load_run_config(run) if run.exists() else load_config(work.root / "tiny.yaml", words)
    return train(config, work, until=until, say=lambda _: None, brief=True)


@pytest.mark.parametrize("mixture", [None, {"en": 0.2, "zh": 0.8}])
def test_a_branch_has_the_bits_of_the_run_that_anneals_there_and_its_trunk_those_without(work, mixture):
    trained(work, "trunk", until=6)
    begin_branch(work, "branch", Branch("trunk", 6, 4, "linear", 0.1, mixture))
    trunk = trained(work, "trunk")  # goes on before its branch does
    trained(work, "own", until=6)
    request_anneal(work.run("own"), 4, "linear", 0.1, mixture)
    own, found = trained(work, "own"), trained(work, "branch")
    assert (found.step, found.tokens, found.held_out_scores) == (10, 10 * 256, own.held_out_scores)
    branch, expected = (load_run(work, name).model.state_dict() for name in ("branch", "own"))
    assert all(torch.equal(value, expected[name]) for name, value in branch.items())
    assert trunk.held_out_scores == trained(work, "whole").held_out_scores
    of_trunk = load_run_config(work.run("trunk"))
    assert load_run_config(work.run("branch")) == with_value(of_trunk, "train.name", "branch")


def test_a_branch_that_is_there_stays_and_one_without_a_checkpoint_is_refused(work):
    trained(work, "trunk", until=6)
    begin_branch(work, "branch", Branch("trunk", 6, 3, "linear", 0.0))
    before = trained(work, "branch").held_out_scores
    begin_branch(work, "branch", Branch("trunk", 6, 9, "linear", 0.0))
    assert trained(work, "branch").held_out_scores == before
    with pytest.raises(BadInputError, match=r"trunk has no checkpoint at step 7; it has \[6\]"):
        begin_branch(work, "other", Branch("trunk", 7, 3, "linear", 0.0))


def test_mixture_anneal_shows_what_each_mixture_is_worth_to_each_channel(work, z2a):
    trained(work, "tiny", until=6)
    words = ["mixture", "anneal", "tiny", "--steps", 4, "--work", work.root]
    assert "`fr`, which is neither a packed source nor a channel" in z2a.refused(2, *words, "--try", "{fr: 1}")
    assert "expected a mapping" in z2a.refused(2, *words, "--try", "{en: 1")
    assert "no checkpoint at step 5; it has [6]" in z2a.refused(3, *words, "--step", 5)
    said = z2a.done(*words, "--try", "{en: 1, zh: 9}").splitlines()
    own, tried = (next(line for line in said if name in line) for name in ("the run's own  ", "zh: 9"))
    assert float(tried.split()[5]) < float(own.split()[4])  # zh has gained
