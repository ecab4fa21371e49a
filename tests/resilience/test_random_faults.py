"""Random faults at random moments of real runs; random_faults.py says what is drawn, and when the end is right.

RANDOM_FAULTS=200 tries so many pairs, RANDOM_FAULTS=17,18 these two, and prints what their runs printed.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.resilience.random_faults import FAMILIES, SEED, Lab, draw, try_pair

CHOSEN = os.environ.get("RANDOM_FAULTS", "200")
QUICK = [5, 12, 41, 48]  # pairs that are tried in `make slow` too


@pytest.fixture(scope="module")
def lab(shared_work, warm):
    """In memory, where there is some: thousands of files are fsynced here, and a kill leaves what was written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        opened = Lab(warm, shared_work.root, Path(folder))
        opened.undisturbed()
        yield opened


def check(lab: Lab, numbers: list[int]) -> None:
    with ThreadPoolExecutor(2) as pool:
        tried = list(pool.map(lambda number: try_pair(lab, draw(number)), numbers))
    if "," in CHOSEN:
        print(*(text for _, _, text in tried))
    hint = f"RANDOM_FAULTS={{}}, make chaos  # seed {SEED}"
    failed = [f"{problem}\n  {pair}\n  {hint.format(pair.number)}" for pair, problem, _ in tried if problem]
    assert not failed, f"{len(failed)} of {len(tried)} pairs:\n" + "\n".join(failed)


def test_a_pair_follows_from_its_number_and_200_have_every_kind_of_fault_at_several_moments():
    pairs = [draw(number) for number in range(200)]
    assert list(map(repr, pairs)) == [repr(draw(number)) for number in range(200)]  # NaN is not equal to itself
    assert {pair.family for pair in pairs} == set(FAMILIES)
    assert len({(pair.family, pair.fault, pair.moment) for pair in pairs}) > 60
    assert {pair.moment for pair in pairs} >= {"before", "between", "operation", "delete", "rename"}


@pytest.mark.slow
def test_some_faults_end_with_the_right_weights_and_lose_no_good_checkpoint(lab):
    check(lab, QUICK)


@pytest.mark.chaos
def test_random_faults_at_random_moments_end_with_the_right_weights_and_lose_no_good_checkpoint(lab):
    check(lab, [int(each) for each in CHOSEN.split(",") if each] if "," in CHOSEN else list(range(int(CHOSEN))))
