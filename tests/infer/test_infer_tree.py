"""Rows read as a tree: the scores of rows read alone, whatever fits into a pass, and no token twice."""

import random

import pytest

from tests.infer.tiny import log_probabilities, tiny_model
from zero2all.infer.engine import Engine
from zero2all.infer.score import RowScorer, distributions_after


def branching_rows(seed):
    """Texts that share long and short beginnings; one twice, one that begins another, one alone."""
    rng = random.Random(seed)

    def draw(count):
        return [rng.randrange(40) for _ in range(count)]

    rows = []
    for _ in range(2):
        examples = draw(25)
        for _ in range(3):
            question = examples + draw(rng.randrange(1, 20))
            rows += [question + draw(rng.randrange(1, 4)) for _ in range(3)]
    return [*rows, rows[0], rows[1][:30], draw(50)]


@pytest.mark.parametrize("tokens_at_once", [3, 20, 64, 4096])
def test_scores_are_those_of_each_row_alone(tokens_at_once):
    rows = branching_rows(tokens_at_once)
    starts = [1 + number * 7 % (len(row) - 1) for number, row in enumerate(rows)]
    done = []
    found = RowScorer(Engine(tiny_model()).forward, rows, starts, tokens_at_once).score(done.append)
    for row, start, scores in zip(rows, starts, found, strict=True):
        assert scores.logprobs == pytest.approx(log_probabilities(tiny_model(), row)[start - 1 :], abs=1e-5)
        assert len(scores.ranks) == len(row) - start
    assert sorted(done) == list(range(len(rows)))


def test_each_token_of_the_tree_is_computed_once_where_a_pass_has_room():
    forward, computed = Engine(tiny_model()).forward, []
    trunk = forward.trunk
    forward.trunk = lambda tokens, *rest: (computed.append(len(tokens)), trunk(tokens, *rest))[1]
    rows = branching_rows(0)
    RowScorer(forward, rows, [1] * len(rows), 4096).score()
    assert computed == [len({tuple(row[:end]) for row in rows for end in range(1, len(row))})]


def test_distributions_follow_the_last_token():
    rows, forward = branching_rows(1), Engine(tiny_model()).forward
    for row, found in zip(rows, distributions_after(forward, rows, 20), strict=True):
        assert float(found.exp().sum()) == pytest.approx(1, abs=1e-4)
        assert float(found[7]) == pytest.approx(log_probabilities(tiny_model(), [*row, 7])[-1], abs=1e-5)
