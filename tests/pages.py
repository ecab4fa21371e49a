"""Reads the pages of the documentation for tests/test_docs*.py: blocks, code spans, headings, links, commands."""

import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^\s*```\s*(\S*)")
SPAN = re.compile(r"(?<!`)`((?:[^`\n]|\n(?!\n))+)`(?!`)")
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)|\b(?:src|srcset|href)=\"([^\"]+)\"")
SHELL = ("sh", "bash", "console", "shell")
"""Languages of blocks in which every line is a command, or follows a line that begins with `$ `."""
PROGRAMS = ("z2a", "make", "python", "torchrun", "docker", "pip")
"""Programs whose commands are checked."""
OTHER_PROGRAMS = (
    *("cd", "source", "mkdir", "printf", "head", "ls", "cat", "git", "curl", "ssh", "kill", "df", "du", "free", "rm"),
    *("tensorboard", "nvidia-smi", "export", "ulimit", "tail", "wc", "cp", "mv", "lsof", "ps", "echo", "scp", "rsync"),
    *("npm", "dd", "eval", "unset", "tar", "time", "watch", "dmesg", "open", "."),
    *("ollama", *(f"llama-{name}" for name in ("cli", "completion", "quantize", "server"))),
)
"""Programs that are not ours: their commands are not checked."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its lines, and the number of the first of them."""

    language: str
    number: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """One command of a block."""

    place: str
    """FILE:LINE."""
    words: tuple[str, ...]
    answer: tuple[str, ...] = ()
    """What the page shows below a command that begins with `$ `."""

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


@dataclass(frozen=True)
class Page:
    """One Markdown file of the repository."""

    path: Path

    def __str__(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the file."""
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def _parts(self) -> tuple[list[Block], list[str]]:
        blocks: list[Block] = []
        prose: list[str] = []
        inside: list[str] | None = None
        for number, line in enumerate(self.lines, 1):
            fence = FENCE.match(line)
            prose.append("" if fence or inside is not None else line)
            if inside is None and fence:
                inside, language, first = [], fence[1], number + 1
            elif inside is not None and fence:
                blocks.append(Block(language, first, tuple(inside)))
                inside = None
            elif inside is not None:
                inside.append(line)
        assert inside is None, f"{self}:{first}: the block is never closed"
        return blocks, prose

    blocks = property(lambda page: page._parts[0], doc="The fenced blocks.")
    prose = property(lambda page: page._parts[1], doc="The lines, with empty ones in the place of blocks.")

    @cached_property
    def spans(self) -> list[tuple[str, str]]:
        """FILE:LINE and text of every `code span` outside blocks."""
        text = "\n".join(self.prose)
        found = ((text.count("\n", 0, match.start()) + 1, match[1].split()) for match in SPAN.finditer(text))
        return [(f"{self}:{number}", " ".join(words)) for number, words in found]

    @cached_property
    def headings(self) -> list[tuple[int, int, str]]:
        """Line number, level and text of every heading."""
        matches = ((number, re.match(r"(#+)\s+(.*?)\s*#*$", line)) for number, line in enumerate(self.prose, 1))
        return [(number, len(match[1]), match[2]) for number, match in matches if match]

    @cached_property
    def anchors(self) -> set[str]:
        """The names that a link to a place of this page can have, as GitHub makes them."""
        names: set[str] = set()
        for _, _, text in self.headings:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower()
            name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            numbered = (f"{name}-{count}" for count in itertools.count(1))
            names.add(name if name not in names else next(each for each in numbered if each not in names))
        return names | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", "\n".join(self.prose)))

    @cached_property
    def links(self) -> list[tuple[str, str]]:
        """FILE:LINE and target of every link and image."""
        lines = ((number, LINK.finditer(re.sub(r"`[^`]*`", "", line))) for number, line in enumerate(self.prose, 1))
        return [(f"{self}:{number}", match[1] or match[2]) for number, matches in lines for match in matches]

    @cached_property
    def commands(self) -> list[Command]:
        """Every command in the blocks of this page."""
        blocks = (block for block in self.blocks if block.language in ("", "text", *SHELL))
        return [command for block in blocks for command in _commands_of(block, str(self))]


def _commands_of(block: Block, page: str) -> Iterator[Command]:
    has_answers = any(line.startswith("$ ") for line in block.lines)
    number = 0
    while number < len(block.lines):
        first = number
        text = block.lines[number].strip()
        number += 1
        while text.endswith("\\") and number < len(block.lines):
            text = f"{text[:-1]} {block.lines[number].strip()}"
            number += 1
        prompted = text.startswith("$ ")
        if (has_answers and not prompted) or not (prompted or block.language in SHELL or _is_command(text)):
            continue
        answer: list[str] = []
        while prompted and number < len(block.lines) and not block.lines[number].startswith("$ "):
            answer.append(block.lines[number])
            number += 1
        place = f"{page}:{block.number + first}"
        for words in split_shell(text.removeprefix("$ ")):
            yield Command(place, words, tuple(answer))


def _is_command(text: str) -> bool:
    """Whether a line of a block without a language is a command: it begins with a program of ours."""
    words = [word for word in text.partition(" # ")[0].split() if not re.match(r"[A-Z_0-9]+=", word)]
    if not words or words[0].rpartition("/")[2] not in PROGRAMS:
        return False
    if words[0] == "make":  # also a word of English
        return len(words) <= 2
    return words[0] != "python" or (len(words) > 1 and (words[1].startswith("-") or words[1].endswith(".py")))


UNREADABLE = "(unreadable)"
"""Instead of a program, for a line that the shell cannot read."""


def split_shell(text: str) -> list[tuple[str, ...]]:
    """The words of each command of a line of shell, without comments, variables and redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError as error:
        return [(UNREADABLE, str(error), text)]
    commands: list[list[str]] = [[]]
    redirected = False
    for token in tokens:
        if redirected:
            redirected = False
        elif set(token) <= set("<>"):
            redirected = True
        elif set(token) <= set("|&;"):
            commands.append([])
        elif commands[-1] or not re.match(r"[A-Za-z_]\w*=", token):
            commands[-1].append(token)
    without_keywords = [words[1:] if words[:1] in (["do"], ["then"]) else words for words in commands]
    return [tuple(words) for words in without_keywords if words and words[0] not in ("for", "done", "fi")]


@cache
def pages() -> list[Page]:
    """Every page that is checked: the front door, CONTRIBUTING and all of docs."""
    paths = [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return [Page(path) for path in sorted(paths)]


def of_each_page(find: Callable[[Page], Iterator[str]]) -> Callable[[Page], None]:
    """A test of every page, which finds no problem in it."""

    @pytest.mark.parametrize("page", pages(), ids=str)
    def test(page: Page) -> None:
        report(list(find(page)))

    return test


def report(problems: list[str]) -> None:
    assert not problems, f"{len(problems)} to fix:\n" + "\n".join(problems)
