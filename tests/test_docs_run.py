"""Commands of the pages that are fast and harmless are run: they print something, read a workspace, or are refused."""

import re
import shlex
from pathlib import Path

import pytest

from tests.pages import ROOT, Command, Page, pages, report
from tests.test_docs_commands import LEFT_OUT, is_refused_on_the_page, one_parser, unknown_messages  # noqa: F401
from zero2all.cli.main import main
from zero2all.common.language import LANGUAGE_VARIABLE
from zero2all.common.workspace import Workspace

PRINTS_ONLY = ("--help", "--version", "--print-config", "--print-schedule", "--plan-only", "--list", "corpus rules")
PRINTS_ONLY += ("perf ops",)
"""Words by which a command is known to print something and change nothing."""
READS = ("corpus report", "tokenizer show", "tokenizer encode", "runs", "generate", "export")
READS += ("data show", "data stats", "data verify", "data export")
"""Verbs that read a workspace, in seconds."""
MADE_BY_OTHERS = ("--prompts", "--source", "--config", "--adapter")
"""Flags with which a command needs files that the small workspace does not have."""
SMALL_RUN = "tiny"
NEEDS_WORKSPACE = "is not a workspace"


def z2a_commands() -> list[Command]:
    every = (command for page in pages() for command in page.commands)
    return [command for command in every if command.words[0] == "z2a" and len(command.words) > 1]


def run(words: tuple[str, ...]) -> int:
    try:
        return main(list(words)) or 0
    except SystemExit as end:
        return int(end.code or 0)


def commands_that_print() -> dict[tuple[str, ...], Command]:
    """Each of them once."""
    return {
        command.words[1:]: command
        for command in z2a_commands()
        if LEFT_OUT not in command.words
        and any(f" {part} " in f"{shlex.join(command.words)} " for part in PRINTS_ONLY)  # whole words: not --listen
        and not is_refused_on_the_page(command)
        and not any("/" in word or word.endswith((".yaml", ".json")) for word in command.words)
    }


@pytest.mark.parametrize("command", commands_that_print().values(), ids=str)
def test_commands_that_only_print_are_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = run(command.words[1:])
    said = capsys.readouterr()
    assert not code, f"{command}\nended with {code}: {said.err}"
    assert said.out


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
    found = {
        command.words[1:]: command for command in z2a_commands() if shlex.join(command.words[1:]).startswith(READS)
    }
    left_out = {"$i", *MADE_BY_OTHERS}
    return {words: found[words] for words in found if "--work" in words and not left_out.intersection(words)}


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
    assert re.fullmatch(shown, " ".join(said.replace(f"{ROOT}/", "").split())), f"{command}\nprinted:\n{said}"


def block_behind(page: Page, name: str) -> str:
    """The YAML block before which the page names the file."""
    for block in page.blocks:
        before = " ".join(page.prose[max(0, block.number - 4) : block.number])
        if block.language == "yaml" and name in before:
            return "\n".join(block.lines)
    raise AssertionError(f"{page}: no YAML block is introduced as `{name}`")
