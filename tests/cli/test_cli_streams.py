"""Output that nobody reads or that is closed; narrow terminals, and those without colour or Unicode."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zero2all.cli.overview import HELP, JOURNEY
from zero2all.cli.terminal import fitted, print_table, wrapped
from zero2all.common import progress

UNREAD = "| true; exit ${PIPESTATUS[0]}"


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", UNREAD])
def test_a_command_works_with_its_streams_closed_or_read_by_nobody(tmp_path, streams):
    command = f'"{sys.executable}" -m zero2all corpus rules en {streams}'
    finished = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, b"")


def test_what_is_written_at_once_to_a_pipe_still_is():
    script = "import os, sys; from zero2all.cli.main import outlive_readers; outlive_readers(); print('now'); "
    script += "print('said', file=sys.stderr); os._exit(0)"  # without the flush of an ordinary end
    finished = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True)
    assert (finished.stdout, finished.stderr) == (b"now\n", b"said\n")


def test_words_about_progress_that_nobody_reads_do_not_end_the_work(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(pipe, write_through=True))
        with progress.progress("work", total=1, unit="B") as bar:
            bar.advance(1)


CTRL_C_AT_AN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == os.environ["CTRL_C_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
MODULE, INSTALLED = ["-m", "zero2all"], [str(Path(sys.executable).with_name("z2a"))]


@pytest.mark.parametrize(
    ("program", "module"),
    [(MODULE, "cli.main"), (MODULE, "common.language"), (MODULE, "cli.corpus"), (INSTALLED, "cli.main")],
)
def test_ctrl_c_while_the_program_loads_leaves_no_traceback(tmp_path, program, module):
    (tmp_path / "sitecustomize.py").write_text(CTRL_C_AT_AN_IMPORT)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "CTRL_C_AT": f"zero2all.{module}"}
    command = [sys.executable, *program, "corpus", "rules", "en"]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - what runs in the background ignores it
    finished = subprocess.run(command, env=environment, capture_output=True, preexec_fn=heard)
    assert finished.returncode in (-signal.SIGINT, 130)
    assert (b"Traceback" in finished.stderr, finished.stdout) == (False, b"")


FIGURES = [["source", "records in", "kept", "share"], ["my-news", "1,234,567", "1,234,500", "99.99%"]]


def test_lines_are_broken_between_words_not_inside_a_command_and_chinese_between_characters_of_two_columns():
    text = "The rule dropped 1,234 records; see them with z2a corpus show --work my-workspace --dropped digits"
    lines = wrapped(text, 30)
    assert "z2a corpus show --work my-workspace --dropped digits" in lines
    assert all(len(line) <= 30 for line in lines if "z2a" not in line)
    assert " ".join(lines) == text
    lines = wrapped("词元的个数，默认为 64000，在一行里写不下的时候会换行。", 20)
    assert "".join(lines).replace(" ", "") == "词元的个数，默认为64000，在一行里写不下的时候会换行。"
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


@pytest.mark.parametrize("columns", [30, 100])
def test_a_table_never_breaks_a_figure_or_a_name(columns, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    print_table(FIGURES, "corpus")
    out = capsys.readouterr().out
    assert [word for word in ("my-news", "1,234,567", "1,234,500", "99.99%") if word not in out] == []
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
    assert done.stdout.startswith("== zh: training text ")
    assert "\n-- gid " in done.stdout
    assert "\\u" in done.stdout, "Chinese is written as escapes, and nothing is lost"


def test_an_encoding_without_chinese_gets_english():
    for words, environment in (([], {"LANG": "zh_CN.UTF-8"}), (["--lang", "zh"], {})):
        done = run(words, PYTHONIOENCODING="ascii", **environment)
        assert done.stdout.startswith("From raw text to a language model of your own.")
        assert "\\u" not in done.stdout


def test_help_in_a_narrow_terminal_breaks_no_flag_and_no_command(z2a, monkeypatch):
    flag = r"--[a-z][a-z.-]+[a-z]"
    for words in ([], ["corpus", "build", "--help"]):
        monkeypatch.setenv("COLUMNS", "40")
        narrow = z2a.done(*words)
        monkeypatch.setenv("COLUMNS", "200")
        whole = z2a.done(*words)
        assert set(re.findall(flag, whole)) <= set(re.findall(flag, narrow))
        assert set(re.findall(r"^  z2a .*$", whole, re.MULTILINE)) <= set(narrow.splitlines())
