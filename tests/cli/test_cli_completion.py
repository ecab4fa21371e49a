"""The completion scripts, run by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from zero2all.cli.completion import SHELLS, script_for, words_of
from zero2all.cli.main import build_parser

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_z2a; printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
compdef() { :; }
compadd() { shift; for word; do case "$word" in "$words[CURRENT]"*) print -r -- "$word" ;; esac; done }
_files() { print -r -- "files $*"; }
source "$1"; shift
words=("$@"); CURRENT=$#
_z2a
"""
FISH = 'source "$argv[1]"; complete -C (string join " " -- (string escape -- $argv[2..-2]) $argv[-1])'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scripts of all shells, and a workspace with two runs."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(script_for(shell, build_parser()))
    for name in ("first", "my run"):
        (folder / "work/runs" / name).mkdir(parents=True)
    (folder / "mine.yaml").write_text("")
    return folder


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("typed", "some", "none"),
    [
        ("tr", {"train", "track"}, {"corpus"}),
        ("corpus ", {"build", "show", "download"}, {"train"}),
        ("corpus build --for", {"--format"}, {"--work"}),
        ("train qui", {"quickstart"}, {"z2all-1b"}),
        ("train quickstart --optim.lr", {"--optim.lr_max"}, {"--fresh"}),
        ("train quickstart --fr", {"--fresh"}, set()),
        ("generate --dtype b", {"bfloat16"}, {"float32"}),
        ("watch --work work ", {"first", "my run"}, {"--once"}),
        ("eval --work work f", {"first"}, {"my run"}),
        ("eval --work work ", {"first", "download"}, {"train"}),
        ("eval --work work --all", {"--all-steps"}, set()),
        ("pack --workers ", set(), {"--work", "first"}),
        ("help qui", {"quickstart"}, {"train"}),
        ("pack --la", {"--lang"}, set()),
    ],
)
def test_a_shell_offers_what_may_be_typed_next(shell, typed, some, none, folder):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = {"bash": ["bash", "-c", BASH, "-"], "zsh": ["zsh", "-fc", ZSH, "-"], "fish": ["fish", "-Nc", FISH]}[shell]
    done = subprocess.run(
        [*command, str(folder / shell), "z2a", *typed.split(" ")], capture_output=True, text=True, cwd=folder
    )
    offered = {line.replace("\\", "") for line in done.stdout.splitlines()}
    assert some <= offered, done
    assert not none & offered, done
    assert done.stderr == ""


def test_runs_come_from_the_workspace_of_the_environment_too(folder):
    done = subprocess.run(
        ["bash", "-c", BASH, "-", str(folder / "bash"), "z2a", "chat", ""],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "Z2A_WORK": str(folder / "work")},
    )
    assert {"first", "my run"} <= set(done.stdout.splitlines())


def test_no_word_could_break_out_of_its_quotes():
    words = words_of(build_parser())
    for table in (words.verbs, words.flags, words.values, words.positionals):
        for key, found in table.items():
            assert not set("'\\ \n") & set("".join(found)), key


def test_the_verb_prints_the_script(z2a, folder):
    assert z2a("completion", "fish").out == (folder / "fish").read_text()
    assert "expected one of bash, zsh, fish" in z2a("completion", "tcsh").err
