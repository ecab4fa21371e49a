"""The table of arguments above a verb: what each line means to the parser."""

from pathlib import Path

import pytest

from zero2all.cli.parser import Parser
from zero2all.cli.verb import DECLARED, add_declared, add_table, group, verb
from zero2all.common.errors import UsageError


def parsed(table: str, *words: str) -> dict[str, object]:
    parser = Parser(prog="z2a try")
    add_table(parser, table.strip().split("\n"))
    return vars(parser.parse_args(words))


@pytest.mark.parametrize(
    ("line", "words", "value"),
    [
        ("--fresh  start over", [], False),
        ("--fresh  start over", ["--fresh"], True),
        ("--fresh =None  start over", [], None),
        ("--count N:int>=1 =3  how many", [], 3),
        ("--count N:int>=1 =3  how many", ["--count", "5"], 5),
        ("--count N:int>=1..9  how many", ["--count", "9"], 9),
        ("--share X:float>0..1  of all", ["--share", "0.5"], 0.5),
        ("--split train|valid =train  which", ["--split", "valid"], "valid"),
        ("--from FILE:path  what", ["--from", "a/b"], Path("a/b")),
        ("--at HOST:PORT  where", ["--at", "a:1"], "a:1"),
        ("--rule? RULE  which", ["--rule"], ""),
        ("--text+ FILE  which", ["--text", "a", "b"], ["a", "b"]),
        ("--text* FILE  which", ["--text", "a", "--text", "b"], ["a", "b"]),
        ("--text* FILE  which", [], []),
        ("--text+* FILE  which", ["--text", "a", "b", "--text", "c"], ["a", "b", "c"]),
        ("--from/form KIND  which", ["--from", "x"], "x"),
        ("source? =en  which", [], "en"),
        ("sources+ NAME  which", ["a", "b"], ["a", "b"]),
    ],
)
def test_a_line_of_a_table_is_an_argument(line, words, value):
    assert next(iter(parsed(line, *words).values())) == value


@pytest.mark.parametrize(
    ("table", "words", "problem"),
    [
        ("--count N:int>=1..9  how many", ["--count", "0"], "at least 1"),
        ("--count N:int>=1..9  how many", ["--count", "10"], "at most 9"),
        ("--share X:float>0..1  of all", ["--share", "0"], "above 0 and at most 1"),
        ("--split train|valid  which", ["--split", "vald"], "Did you mean `valid`?"),
        ("--out! DIR  where", [], "needs --out"),
        ("| --ids  one\n| --json  other", ["--ids", "--json"], "exclude each other"),
        ("|! --ids  one\n|! --json  other", [], "needs --ids or --json"),
    ],
)
def test_a_table_says_what_is_refused(table, words, problem):
    with pytest.raises(UsageError, match=problem):
        parsed(table, *words)


def test_an_optional_run_is_filled_in_later_and_outputs_are_checked_before():
    found = parsed("run? RUN  which\n--json FILE:out  where", "--json", "a.json")
    assert found["run_argument"] == "run"
    assert found["outputs"] == (("json", "--json", False),)


def test_a_verb_is_its_text(monkeypatch):
    """More of it: the help of every verb in test_cli_help.py."""
    monkeypatch.setitem(DECLARED, "try", [])
    group("\ntry: things to\ntry\n\nz2a try one\n")

    @verb("""
        try one: do it: at once

        what WHAT  the first
            of two lines
        --seed
        --section.field

        z2a try one a

        and again:
        z2a try one b
        """)
    def _one(arguments):
        return 7

    parser = Parser(prog="z2a")
    add_declared(parser.add_subparsers(), "try")
    inner = parser.verbs["try"].verbs["one"]
    assert (parser.verbs["try"].description, inner.description) == ("things to try", "do it: at once")
    assert inner.epilog.endswith("example:\n  z2a try one a\n\nand again:\n  z2a try one b")
    assert inner.positionals[0].help == "the first of two lines"
    arguments = parser.parse_args(["try", "one", "a", "--seed", "3"])
    assert (arguments.what, arguments.seed, arguments.takes_overrides) == ("a", 3, True)
    assert arguments.handler(arguments) == 7
