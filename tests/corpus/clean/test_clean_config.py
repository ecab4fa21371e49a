"""The config: built from mappings, checked, documented."""

import dataclasses
import pickle

import numpy as np
import pytest

from zero2all.common.schema import Problem, build, field_docs
from zero2all.corpus.clean.config import EDITS, RULES, CleanConfig, build_config, default_config


def problems_of(values: object, channel: str = "zh") -> list[Problem]:
    problems: list[Problem] = []
    build_config(channel, values, "clean", problems)  # type: ignore[arg-type]
    return problems


def test_channels_have_their_own_defaults() -> None:
    zh, en, code = (default_config(channel) for channel in ("zh", "en", "code"))
    assert (zh.wrong_script.script, en.wrong_script.script, code.wrong_script.script) == ("han", "latin", "ascii")
    assert code.licence_headers.on
    assert not zh.licence_headers.on
    assert code.long_lines.on
    assert not default_config("klingon").wrong_script.on


@pytest.mark.parametrize("channel", ["zh", "en", "code", "other"])
def test_defaults_survive_the_way_through_a_mapping(channel: str) -> None:
    problems: list[Problem] = []
    default = default_config(channel)
    assert build_config(channel, None, "clean", problems) == default
    assert build(CleanConfig, dataclasses.asdict(default), "clean", problems) == default
    assert problems == []
    assert pickle.loads(pickle.dumps(default)) == default


def test_values_go_on_top_of_the_defaults_of_the_channel() -> None:
    problems: list[Problem] = []
    config = build_config("zh", {"digits": {"max_share": "0.5"}, "mask": {"phones": True}}, "clean.zh", problems)
    assert problems == []
    assert config is not None
    assert config.digits == dataclasses.replace(default_config("zh").digits, max_share=0.5)
    assert config.mask.phones
    assert config.wrong_script == default_config("zh").wrong_script


def test_every_problem_is_found_at_once() -> None:
    problems = problems_of({"digit": {"on": False}, "symbols": {"max_share": 2}, "urls": {"max_shar": 1}, "emails": 3})
    names = ["digit", "symbols.max_share", "urls.max_shar", "emails"]
    assert [problem.field for problem in problems] == [f"clean.{name}" for name in names]
    assert "Did you mean `digits`?" in str(problems[0])


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"empty": {"on": False}}, "clean.empty.on"),
        ({"too_long": {"on": True, "max_chars": 5}}, "clean.too_long.max_chars"),
        ({"boilerplate_lines": {"phrases": ["ok phrase", "x"]}}, "clean.boilerplate_lines.phrases[1]"),
        ([], "clean"),
    ],
)
def test_values_that_make_no_sense_are_named(values: object, field: str) -> None:
    assert [problem.field for problem in problems_of(values)] == [field]


def test_every_rule_and_setting_is_documented() -> None:
    assert list(RULES) == [field.name for field in dataclasses.fields(CleanConfig)]
    assert all(RULES.values())
    assert set(EDITS) < set(RULES)
    for name in RULES:
        section = type(getattr(default_config("en"), name))
        assert {field.name for field in dataclasses.fields(section)} == set(field_docs(section))


def test_measures_of_a_rule_are_those_that_judge_it() -> None:
    """What `z2a corpus show --dropped` prints beside a sample."""
    from zero2all.corpus.clean.rules import JUDGES, measures_of

    known = measures_of(np.zeros((1, 100)), default_config("zh"))
    assert [name for name, rule in JUDGES.items() if not rule.compared] == ["empty"]
    assert {measure for rule in JUDGES.values() for measure in rule.compared.split()} <= set(known)
