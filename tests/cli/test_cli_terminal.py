"""Narrow terminals, terminals without colour or Unicode, and output into pipes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zero2all.cli.overview import HELP, JOURNEY
from zero2all.cli.table import print_table
from zero2all.cli.terminal import fitted, wrapped

FIGURES = [["source", "records in", "kept", "share"], ["my-news", "1,234,567", "1,234,500", "99.99%"]]


def test_lines_are_broken_between_words_and_never_inside_a_command():
    text = "The rule dropped 1,234 records; see them with z2a corpus show --work my-workspace --dropped digits"
    lines = wrapped(text, 30)
    assert "z2a corpus show --work my-workspace --dropped digits" in lines
    assert all(len(line) <= 30 for line in lines if "z2a" not in line)
    assert " ".join(lines) == text


def test_chinese_is_broken_between_characters_and_counts_two_columns():
    lines = wrapped("词元的个数，默认为 64000，在一行里写不下的时候会换行。", 20)
    assert "".join(lines).replace(" ", "") == "词元的个数，默认为64000，在一行里写不下的时候会换行。"
    assert len(lines) > 1
    assert not any(line.startswith(("，", "。")) for line in lines)
    assert any("64000" in line for line in lines)


def test_the_overview_and_errors_fit_a_narrow_terminal():
    error = "z2a: The config my.yaml has 1 problem:\n  1. train.steps: got 1,234,567, expected a smaller number here."
    lines = fitted(f"{JOURNEY}\n{HELP}\n{error}", 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert "  z2a tokenizer train" in "\n".join(lines)
    assert "  z2a corpus build\n      clean raw files, drop duplicates,\n      hold out text\n" in "\n".join(lines)
    assert any("1,234,567" in line for line in lines)
    assert fitted(JOURNEY, 80) == JOURNEY
    command = "  z2a corpus build NAME=PATH --work my-workspace --workers 2"
    assert fitted(command, 40) == command


@pytest.mark.parametrize("columns", [30, 40, 60, 100])
def test_a_table_never_breaks_a_figure_or_a_name(columns, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    print_table(FIGURES, "corpus")
    out = capsys.readouterr().out
    for word in ("my-news", "1,234,567", "1,234,500", "99.99%"):
        assert word in out
    assert max(map(len, out.splitlines())) <= columns
    assert "\x1b" not in out


def run(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "Z2A"))}
    command = [sys.executable, "-m", "zero2all", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**kept, **environment})


def test_an_encoding_without_unicode_gets_plain_characters(journey: Path):
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run(["runs", "--work", str(journey)], **plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"tiny *\| finished *\| +4\| +4\|", done.stdout)
    assert done.stdout.isascii()
    done = run(["corpus", "show", "zh", "--count", "1", "--work", str(journey)], **plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("== zh: training text ")
    assert "\n-- gid " in done.stdout
    assert "\\u" in done.stdout, "Chinese is written as escapes, and nothing is lost"


def test_an_encoding_without_chinese_gets_english():
    for words, environment in (([], {"LANG": "zh_CN.UTF-8"}), (["--lang", "zh"], {})):
        done = run(words, PYTHONIOENCODING="ascii", **environment)
        assert done.stdout.startswith("From raw text to a language model of your own.")
        assert "\\u" not in done.stdout


def test_output_into_a_pipe_has_no_escape_sequences(journey: Path):
    done = run(["tokenizer", "encode", "kalo", "--work", str(journey)], FORCE_COLOR="")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("words", [[], ["--help"], ["train", "--help"], ["corpus", "build", "--help"]], ids=" ".join)
def test_help_in_a_narrow_terminal_breaks_no_flag_and_no_command(words):
    done = run(words, COLUMNS="40")
    assert done.returncode == 0
    whole = run(words, COLUMNS="200")
    flags = set(re.findall(r"--[a-z][a-z.-]+[a-z]", whole.stdout))
    assert flags <= set(re.findall(r"--[a-z][a-z.-]+[a-z]", done.stdout))
    assert set(re.findall(r"^  z2a .*$", whole.stdout, re.MULTILINE)) <= set(done.stdout.splitlines())
