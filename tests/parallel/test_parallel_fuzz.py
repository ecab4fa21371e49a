"""Layout fuzz: 200 random combinations of model, mesh, schedule and micro-batch (`make layouts`)."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.parallel import fuzz

COUNT = 200


def test_cases_are_the_same_for_a_seed_and_reach_every_axis():
    cases = fuzz.draw_cases(COUNT)
    assert cases == fuzz.draw_cases(COUNT)
    for axis in ("pipeline", "context", "tensor", "expert"):
        sizes = {case["values"]["parallel"][axis] for case in cases.values()}
        assert sizes >= {1, 2, 4}, axis


@pytest.mark.slow
def test_every_random_combination_is_equal_to_one_process_or_refused_by_a_rule(warm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.processes.LONG_SECONDS", 1800.0)
    cases = fuzz.draw_cases(COUNT)
    counts: Counter[str] = Counter()
    worst = 0.0
    for size in sorted(set(fuzz.PROCESSES)):
        of_size = {name: case for name, case in cases.items() if case["processes"] == size}
        found = fuzz.run(warm, tmp_path / str(size), size, of_size)
        assert found.keys() == of_size.keys()
        for name, outcome in found.items():
            if "refused" in outcome:
                assert "1. " in outcome["refused"], f"no rule: {outcome['refused']}"
                counts["refused"] += 1
                continue
            counts["equal"] += 1
            exact = fuzz.alone(of_size[name])
            for mine, theirs in zip(itertools.chain(*outcome["figures"]), itertools.chain(*exact), strict=True):
                assert mine == pytest.approx(theirs, rel=1e-9), (name, of_size[name])
                worst = max(worst, abs(mine - theirs) / abs(theirs))
    with capsys.disabled():
        print(f"\n{COUNT} random layouts: {dict(counts)}, largest relative difference {worst:.1e}")
    assert counts["equal"] >= COUNT // 4
