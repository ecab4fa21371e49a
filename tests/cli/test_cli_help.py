"""`z2a --help` answers at once, and every verb explains itself with an example."""

import argparse
import json
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero2all import __version__
from zero2all.cli.main import WHOLE_SECTIONS, build_parser, split_overrides, with_verb
from zero2all.cli.perf_calculators import VERBS as CALCULATORS
from zero2all.config import RunConfig, load_config

Z2A = Path(sys.executable).with_name("z2a")
HEAVY = ("torch", "numpy", "rich", "yaml", "tokenizers", "pyarrow", "matplotlib", "orjson", "safetensors")


def parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every word below `parser` that takes arguments, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield (*words, name), inner
                yield from parsers(inner, (*words, name))


PARSER = build_parser()
TREE = dict(parsers(PARSER))
VERBS = {words: parser for words, parser in TREE.items() if parser.get_default("handler")}


def test_the_verbs_of_the_issue_are_all_there():
    expected = (
        "help",
        *("quickstart", "corpus build", "corpus show", "corpus report", "corpus rules", "corpus download"),
        *(f"tokenizer {verb}" for verb in ("train", "import", "extend", "eval", "show", "encode", "decode")),
        "pack",
        *(f"data {verb}" for verb in ("show", "stats", "verify", "export", "import")),
        *("train", "launch slurm", "launch kubernetes", "launch ssh", "launch secret"),
        *("anneal", "runs", "chaos", "inspect", "board", "watch", "plot"),
        "track export",
        *("eval run", "eval watch", "eval download", "eval contamination", "eval harness"),
        *("generate", "chat", "serve", "export", "import", "sft", "dpo", "rl"),
        *(f"perf {verb}" for verb in CALCULATORS),
        *(f"perf {verb}" for verb in ("explain", "memory", "plan", "calibrate", "predict")),
        *(f"perf {verb}" for verb in ("ops", "profile", "allreduce", "shapes")),
        "doctor",
    )
    assert [" ".join(words) for words in VERBS] == list(expected)


@pytest.mark.parametrize("words", TREE, ids=" ".join)
def test_every_verb_has_a_help_with_an_example_that_parses_and_explains_each_argument(words, z2a):
    example = re.search(r"example:\n  z2a (.+)\n", z2a.done(*words, "--help"))
    assert example, "no example"
    plain, overrides = split_overrides(shlex.split(example[1]))
    arguments, unknown = PARSER.parse_known_args(with_verb(plain))
    assert unknown == []
    assert tuple(plain[: len(words)]) == words
    assert not overrides or arguments.takes_overrides
    assert [action.dest for action in TREE[words]._actions if not action.help and action.metavar != "VERB"] == []


def test_verb_flags_are_in_kebab_case_and_never_abbreviated():
    for parser in VERBS.values():
        flags = [flag for action in parser._actions for flag in action.option_strings]
        assert all(re.fullmatch(r"-h|--[a-z][a-z0-9]*(-[a-z0-9]+)*", flag) for flag in flags)
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


def test_the_installed_command_answers_help_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([Z2A, "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: z2a")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 1.0, "of CPU; 0.3 s is the aim"


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
