"""Every worked example of the formulas, recomputed."""

from tests.estimate.worked_examples import TOLERANCE, Case, cases


def test_all_worked_examples_agree_within_a_percent_or_in_the_digits_given():
    found = cases()
    assert [case for case in found if not case.passes] == []
    assert len(found) == 194, "docs/limits.md says how many"
    rounded = [case.subject for case in found if abs(case.error) > TOLERANCE]
    assert rounded == ["7.5B on 1024, GB, zero 3"]  # 0.1172 GB was published as 0.12


def test_a_case_fails_that_is_more_than_a_percent_off():
    assert not Case("x", "100", 101.1).passes
    assert not Case("x", "0.12", 0.1251).passes
    assert Case("x", "0.12", 0.1249).passes
    assert not Case("x", "12", 12.4).passes, "whole numbers are not rounded"
