"""The table of arguments above a verb: what each line means to the parser."""

from pathlib import Path

import pytest

from zero2all.cli.parser import Parser
from zero2all.cli.verb import add_table
from zero2all.common.errors import UsageError


def parsed(table: str, *words: str) -> dict[str, object]:
    parser = Parser(prog="z2a try")
    add_table(parser, table.strip().split("\n"))
    return vars(parser.parse_args(words))


def test_a_line_of_a_table_is_an_argument():
    for line, words, value in (
        ("--fresh  start over", ["--fresh"], True),
        ("--fresh =None  start over", [], None),
        ("--count N:int>=1 =3  how many", [], 3),
        ("--share X:float>0..1  of all", ["--share", "0.5"], 0.5),
        ("--split train|valid =train  which", ["--split", "valid"], "valid"),
        ("--from FILE:path  what", ["--from", "a/b"], Path("a/b")),
        ("--rule? RULE  which", ["--rule"], ""),
        ("--text* FILE  which", ["--text", "a", "--text", "b"], ["a", "b"]),
        ("--text* FILE  which", [], []),
        ("--text+* FILE  which", ["--text", "a", "b", "--text", "c"], ["a", "b", "c"]),
        ("--from/form KIND  which", ["--from", "x"], "x"),
        ("source? =en  which", [], "en"),
    ):
        assert next(iter(parsed(line, *words).values())) == value


def test_a_table_says_what_is_refused():
    for table, words, problem in (
        ("--count N:int>=1..9  how many", ["--count", "10"], "at most 9"),
        ("--share X:float>0..1  of all", ["--share", "0"], "above 0 and at most 1"),
        ("--split train|valid  which", ["--split", "vald"], "Did you mean `valid`?"),
        ("--out! DIR  where", [], "needs --out"),
        ("| --ids  one\n| --json  other", ["--ids", "--json"], "exclude each other"),
        ("|! --ids  one\n|! --json  other", [], "needs --ids or --json"),
    ):
        with pytest.raises(UsageError, match=problem):
            parsed(table, *words)


def test_an_optional_run_is_filled_in_later_and_outputs_are_checked_before():
    found = parsed("run? RUN  which\n--json FILE:out  where", "--json", "a.json")
    assert found["run_argument"] == "run"
    assert found["outputs"] == (("json", "--json", False),)
