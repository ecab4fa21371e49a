"""Draws follow the distribution, depend on nothing but seed and number, and respect every limit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from zero2all.common.errors import UsageError
from zero2all.infer.sampling import Picker, Sampling, penalised, uniform

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))
CPU = torch.device("cpu")


def frequencies(sampling: Sampling, draws: int = 4000) -> list[float]:
    picker = Picker([sampling] * draws, CPU)
    found = Counter(picker.pick(LOGITS.repeat(draws, 1), range(draws)).tolist())
    return [found[token] / draws for token in range(4)]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(temperature=0.5), [0.25, 0.0625, 0.0225, 0.01]),
        (Sampling(temperature=1, top_k=2), [0.5, 0.25, 0, 0]),
        (Sampling(temperature=1, top_p=0.7), [0.5, 0.25, 0, 0]),
        (Sampling(temperature=1, top_p=0.76), [0.5, 0.25, 0.15, 0]),
        (Sampling(temperature=1, top_p=0.01), [1, 0, 0, 0]),
        (Sampling(temperature=1, min_p=0.3), [0.5, 0.25, 0.15, 0]),
        (Sampling(temperature=1, top_k=3, top_p=0.8), [0.5, 0.25, 0, 0]),
        (Sampling(), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_is_left(sampling, expected):
    wanted = [share / sum(expected) for share in expected]
    found = frequencies(sampling)
    assert all(abs(have - want) < 0.03 for have, want in zip(found, wanted, strict=True))
    assert all(have == 0 for have, want in zip(found, wanted, strict=True) if want == 0)


def test_a_draw_does_not_depend_on_its_neighbours():
    rows = [
        Sampling(temperature=1, seed=3),
        Sampling(temperature=0.7, top_k=2, seed=4),
        Sampling(),
        Sampling(temperature=1.5, top_p=0.6, min_p=0.1, seed=3),
    ]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 2
    for number in range(50):
        together = Picker(rows, CPU).pick(logits.clone(), [number] * 4).tolist()
        alone = [
            int(Picker([row], CPU).pick(logits[place : place + 1].clone(), [number])) for place, row in enumerate(rows)
        ]
        assert together == alone


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_number():
    numbers = [uniform(seed, number) for seed in range(50) for number in range(50)]
    assert all(0 <= each < 1 for each in numbers)
    assert len(set(numbers)) == 2500
    shares = Counter(int(each * 10) for each in numbers)
    assert all(200 <= shares[tenth] <= 300 for tenth in range(10))


def test_a_token_that_cannot_be_drawn_is_not():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    picker = Picker([Sampling(temperature=1)], CPU)
    assert {int(picker.pick(logits.clone(), [number])) for number in range(300)} == {1, 3}


def test_repetition_makes_known_tokens_less_likely_whatever_their_sign():
    logits, seen = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[True, True, False]])
    assert penalised(logits, seen, torch.tensor([[2.0]])).tolist() == [[1.0, -4.0, 2.0]]


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"repetition_penalty": 0}],
    ids=str,
)
def test_what_has_no_meaning_is_refused(values):
    (name,) = values
    with pytest.raises(UsageError, match=f"{name} is .*it must be"):
        Sampling(**values)
