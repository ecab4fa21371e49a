"""How an implementation is chosen, and what is said about it."""

import dataclasses
import typing

import pytest

from zero2all.common.errors import UsageError
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import Implementation
from zero2all.ops.registry import OPERATORS, Choice, _choose, resolve

PLAIN = Implementation("plain", lambda: "plain")
FAST = Implementation(
    "fast", lambda: "fast", probe=lambda device: None if device == "cuda" else f"no kernel for {device}"
)


def test_auto_takes_the_first_implementation_of_each_operator_on_the_cpu():
    ops = resolve(OpsConfig(), "cpu")
    for operator, implementations in OPERATORS.items():
        assert getattr(ops, operator) is implementations[0].function
    assert [choice.operator for choice in ops.choices] == list(OPERATORS)
    assert {choice.asked for choice in ops.choices} == {"auto"}
    assert all(choice.reason == "first that runs on cpu" for choice in ops.choices)


def test_named_implementation_is_taken_as_asked():
    for operator, implementations in OPERATORS.items():
        for implementation in implementations:
            ops = resolve(OpsConfig(**{operator: implementation.name}), "cpu")
            assert getattr(ops, operator) is implementation.function
            (choice,) = [choice for choice in ops.choices if choice.operator == operator]
            assert choice == Choice(operator, implementation.name, implementation.name, "as asked")


def test_config_offers_exactly_the_implementations_there_are():
    hints = typing.get_type_hints(OpsConfig)
    for operator, implementations in OPERATORS.items():
        offered = set(typing.get_args(hints[operator]))
        assert offered == {"auto", *(implementation.name for implementation in implementations)}
    assert {field.name for field in dataclasses.fields(OpsConfig)} == {*OPERATORS, "strict"}


def test_auto_passes_over_what_cannot_run_here():
    taken, choice = _choose("twist", "auto", (FAST, PLAIN), "cpu", strict=True)
    assert taken is PLAIN
    assert choice == Choice("twist", "auto", "plain", "first that runs on cpu")
    assert _choose("twist", "auto", (FAST, PLAIN), "cuda", strict=True)[0] is FAST


def test_fallback_records_what_was_asked_what_was_taken_and_why():
    taken, choice = _choose("twist", "fast", (FAST, PLAIN), "cpu", strict=False)
    assert taken is PLAIN
    assert (choice.asked, choice.got) == ("fast", "plain")
    assert choice.reason == "fast cannot run here (no kernel for cpu); first that runs on cpu"


def test_strict_makes_a_fallback_an_error_with_the_reason_of_the_probe():
    with pytest.raises(
        UsageError, match=r"ops.twist = fast cannot run .*: no kernel for cpu\. .*fast, plain.*ops.strict"
    ):
        _choose("twist", "fast", (FAST, PLAIN), "cpu", strict=True)


def test_operator_that_nothing_can_compute_is_an_error():
    with pytest.raises(UsageError, match="No implementation of twist runs on cpu"):
        _choose("twist", "auto", (FAST,), "cpu", strict=False)
