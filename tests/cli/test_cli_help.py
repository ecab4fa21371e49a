"""`z2a --help` answers at once, and every verb explains itself with an example."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import parsers
from zero2all import __version__
from zero2all.cli.main import WHOLE_SECTIONS, build_parser, split_overrides, with_verb
from zero2all.config import RunConfig, load_config

Z2A = Path(sys.executable).with_name("z2a")
HEAVY = ("torch", "numpy", "rich", "yaml", "tokenizers", "pyarrow", "matplotlib", "orjson", "safetensors")


PARSER = build_parser()
TREE = {tuple(parser.prog.split()[1:]): parser for parser in parsers(PARSER) if parser is not PARSER}
VERBS = {words: parser for words, parser in TREE.items() if parser.get_default("handler")}


@pytest.mark.parametrize("words", TREE, ids=" ".join)
def test_every_verb_has_a_help_with_an_example_that_parses_and_explains_each_argument(words, z2a):
    example = re.search(r"example:\n  z2a (.+)\n", z2a.done(*words, "--help"))
    assert example, "no example"
    plain, overrides = split_overrides(shlex.split(example[1]))
    arguments, unknown = PARSER.parse_known_args(with_verb(plain))
    assert (unknown, tuple(plain[: len(words)])) == ([], words)
    assert not overrides or arguments.takes_overrides
    assert [action.dest for action in TREE[words]._actions if not action.help and action.metavar != "VERB"] == []


def test_verb_flags_are_in_kebab_case_and_never_abbreviated():
    for parser in VERBS.values():
        flags = [flag for action in parser._actions for flag in action.option_strings]
        words = [flag for flag in flags if flag not in ("--parallel.tensor", "--parallel.pipeline")]  # as the fields
        assert all(re.fullmatch(r"-h|--[a-z][a-z0-9]*(-[a-z0-9]+)*", flag) for flag in words)
        assert not parser.allow_abbrev, "a script that says --wo must not break when a second flag begins that way"


def test_the_first_help_lists_every_verb_on_one_line_with_what_it_does(z2a):
    out = z2a.done("--help")
    for word in {words[0] for words in TREE}:
        assert re.search(rf"^    {word} +\w.+", out, re.MULTILINE)
    assert "start here:\n  z2a quickstart" in out
    assert z2a.done("--version") == f"z2a {__version__}\n"


def test_the_presets_and_the_sections_set_as_a_whole_that_the_command_line_names_exist(z2a):
    named = re.search(r"a preset \(([^)]+)\)", " ".join(z2a.done("train", "--help").split()))
    assert named
    for name in named[1].split(", "):
        load_config(name)
    assert list(WHOLE_SECTIONS) == [name for name, value in vars(RunConfig()).items() if isinstance(value, list)]


def test_neither_help_nor_a_usage_error_imports_anything_heavy(tmp_path):
    script = """
import json, sys
from zero2all.cli import main
for words in ([], ["help"], ["--help"], ["train", "--help"], ["pack", "--nonsense"], ["train"]):
    try:
        main(words)
    except SystemExit:
        pass
print("\\n" + json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not set(json.loads(done.stdout.splitlines()[-1])) & set(HEAVY)
