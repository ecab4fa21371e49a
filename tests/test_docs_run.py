"""Commands of the pages that are fast and harmless are run: they print something, read a workspace, or are refused.

A command that begins with `$ ` and is answered by `z2a: …` must be refused with these words.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, Command, Page, pages
from tests.test_docs import report
from tests.test_docs_commands import LEFT_OUT, is_refused_on_the_page, the_parser, unknown_messages
from zero2all.cli.main import main, parse
from zero2all.common.language import LANGUAGE_VARIABLE
from zero2all.common.workspace import Workspace

PRINTS_ONLY = (
    *("--help", "--version", "--print-config", "--print-schedule", "--plan-only", "--list"),
    *("corpus rules", "perf ops"),
)
"""Words by which a command is known to print something and change nothing."""
READS = (
    *("corpus report", "tokenizer show", "tokenizer encode", "data show", "data stats", "data verify", "data export"),
    *("runs", "generate", "export"),
)
"""Verbs that read a workspace, in seconds."""
MADE_BY_OTHERS = ("--prompts", "--source", "--config", "--adapter")
"""Flags with which a command needs files that the small workspace does not have."""
SMALL_RUN = "tiny"
NEEDS_WORKSPACE = "is not a workspace"


@pytest.fixture(autouse=True)
def one_parser(monkeypatch):
    """Building it takes longer than parsing."""
    monkeypatch.setattr(sys.modules[parse.__module__], "build_parser", the_parser)


def z2a_commands() -> list[Command]:
    return [
        command for page in pages() for command in page.commands if command.words[0] == "z2a" and len(command.words) > 1
    ]


def run(words: tuple[str, ...]) -> int:
    try:
        return main(list(words)) or 0
    except SystemExit as end:
        return int(end.code or 0)


# ---- commands that print --------------------------------------------------------------------------------------


def commands_that_print() -> dict[tuple[str, ...], Command]:
    """Each of them once."""
    return {
        command.words[1:]: command
        for command in z2a_commands()
        if LEFT_OUT not in command.words
        and any(f" {part} " in f"{shlex.join(command.words)} " for part in PRINTS_ONLY)  # whole words: not --listen
        and not is_refused_on_the_page(command)
        and names_no_file(command.words)
    }


def names_no_file(words: tuple[str, ...]) -> bool:
    return not any("/" in word or word.endswith((".yaml", ".json")) for word in words)


@pytest.mark.parametrize("command", commands_that_print().values(), ids=str)
def test_commands_that_only_print_are_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = run(command.words[1:])
    said = capsys.readouterr()
    assert not code, f"{command}\nended with {code}: {said.err}"
    assert said.out


# ---- commands that read a workspace ---------------------------------------------------------------------------


def test_commands_that_read_a_workspace_are_run(trained_workspace, tmp_path, monkeypatch, capsys):
    """Every workspace that a page names is the small one of the tests, and every run its run."""
    monkeypatch.chdir(tmp_path)
    problems = []
    for words, command in commands_that_read().items():
        stand_in(trained_workspace, Path(words[words.index("--work") + 1]), words)
        code = run(words)
        said = capsys.readouterr()
        if code or not said.out:
            problems.append(f"{command}\n    ended with {code}: {said.err}")
    report(problems)


def commands_that_read() -> dict[tuple[str, ...], Command]:
    return {
        words: command
        for command in z2a_commands()
        if shlex.join(words := command.words[1:]).startswith(READS)
        and "--work" in words
        and "$i" not in words
        and not set(words) & set(MADE_BY_OTHERS)
    }


def stand_in(workspace: Workspace, work: Path, words: tuple[str, ...]) -> None:
    """A workspace of this name with a run of the name that the command gives."""
    if not work.exists():
        (work / "runs").mkdir(parents=True)
        for path in workspace.root.iterdir():
            if path.name != "runs":
                (work / path.name).symlink_to(path)
    run_folder = work / "runs" / words[1]
    if words[0] in ("generate", "export") and not run_folder.exists():
        run_folder.symlink_to(workspace.runs / SMALL_RUN)


# ---- commands that are refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [each for each in z2a_commands() if is_refused_on_the_page(each)], ids=str)
def test_refusals_are_shown_as_printed(command, tmp_path, monkeypatch, capsys):
    """Config files that the page shows are there, in its own words."""
    (page,) = [page for page in pages() if command.place.startswith(f"{page}:")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(LANGUAGE_VARIABLE, "zh" if str(page).endswith(".zh.md") else "en")
    for name in (word for word in command.words if word.endswith(".yaml")):
        (tmp_path / name).write_text(block_behind(page, name), encoding="utf-8")
    code = run(command.words[1:])
    said = capsys.readouterr().err
    if NEEDS_WORKSPACE in said:
        report(unknown_messages(command.place, command.answer))
        return
    shown = re.escape(" ".join(" ".join(command.answer).split())).replace(LEFT_OUT, ".*")
    assert code, f"{command}\nis refused on the page, and was not"
    assert re.fullmatch(shown, plain_words(said)), f"{command}\nprinted:\n{said}"


def plain_words(text: str) -> str:
    return " ".join(text.replace(f"{ROOT}/", "").split())


def block_behind(page: Page, name: str) -> str:
    """The YAML block before which the page names the file."""
    for block in page.blocks:
        before = " ".join(page.prose[max(0, block.number - 4) : block.number])
        if block.language == "yaml" and name in before:
            return "\n".join(block.lines)
    raise AssertionError(f"{page}: no YAML block is introduced as `{name}`")
