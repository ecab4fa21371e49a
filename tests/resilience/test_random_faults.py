"""Random faults at random moments of real runs; random_faults.py says what is drawn, and when the end is right."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.resilience.random_faults import INJECTED, SEED, Lab, draw, open_lab, try_pair

PAIRS = int(os.environ.get("RANDOM_FAULTS", "200"))
QUICK = (5, 10, 48, 50)
"""Pairs that are tried in `make slow` too."""


@pytest.fixture(scope="module")
def lab(shared_work, warm):
    """In memory, where there is some: thousands of files are fsynced here, and a kill leaves what was written."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder,
        open_lab(Path(folder), shared_work.root, warm) as opened,
    ):
        yield opened


def check(lab: Lab, numbers: range | tuple[int, ...]) -> None:
    with ThreadPoolExecutor(2) as pool:
        tried = list(pool.map(lambda number: try_pair(lab, draw(number)), numbers))
    failed = [
        f"{problem}\n  {pair}\n  python -m tests.resilience.random_faults {pair.number}  # seed {SEED}"
        for pair, problem, _ in tried
        if problem
    ]
    assert not failed, f"{len(failed)} of {len(tried)} pairs:\n" + "\n".join(failed)


def test_a_pair_follows_from_its_number_and_200_have_every_kind_of_fault_at_several_moments():
    pairs = [draw(number) for number in range(200)]
    assert list(map(repr, pairs)) == [repr(draw(number)) for number in range(200)]  # NaN is not equal to itself
    assert {pair.family for pair in pairs} == set(INJECTED)
    assert len({(pair.family, pair.fault, pair.moment) for pair in pairs}) > 80
    assert {pair.moment for pair in pairs} >= {"before", "between", "rollback", "read", "operation", "delete", "rename"}


@pytest.mark.slow
def test_some_faults_end_with_the_right_weights_and_lose_no_good_checkpoint(lab):
    check(lab, QUICK)


@pytest.mark.chaos
def test_random_faults_at_random_moments_end_with_the_right_weights_and_lose_no_good_checkpoint(lab):
    check(lab, range(PAIRS))
