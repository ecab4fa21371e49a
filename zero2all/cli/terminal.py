"""What a terminal can show: its width, colours, and characters beyond ASCII."""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
from typing import TextIO

from zero2all.common.language import columns as columns_of

PLAIN = {"→": "->", "←": "<-", "…": "...", "─": "-", "═": "=", "–": "-", "—": "-", "×": "x", "·": "-", "’": "'"}
"""What stands for a character that the terminal's encoding lacks."""
UNBREAKABLE = re.compile(r"`[^`]*`|z2a [^;)`\u2e80-\uffef]*")
"""Commands: broken over two lines they could not be pasted."""
OPENING, CLOSING = "（《「『【“", "、。，：；！？）》」』】”"
"""Chinese punctuation that must not end a line, or begin one."""


def show_what_the_encoding_lacks() -> None:
    """Write a plain form of characters that the encoding of the output lacks, instead of ending with an error."""
    codecs.register_error("z2a", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="z2a")


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    if not all(char in PLAIN for char in lacking):
        return codecs.backslashreplace_errors(error)
    return "".join(PLAIN[char] for char in lacking), error.end


def has_colour() -> bool:
    """Whether standard output is a terminal with colours, and they are wanted."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_fitted(text: str, stream: TextIO | None = None) -> None:
    """Print; in a terminal, with long lines broken where `fitted` allows it."""
    stream = sys.stdout if stream is None else stream
    print(fitted(text, shutil.get_terminal_size().columns) if stream.isatty() else text, file=stream)


def fitted(text: str, columns: int) -> str:
    """The text with long lines broken like `wrapped` and indented as before; a line that is a command stays whole."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        entry = re.fullmatch(r"\s*(z2a \S.*?)\s{2,}(\S.*)", line)  # a command, and what it does
        if columns_of(line) <= columns:
            lines.append(line)
        elif entry:
            deeper = indent + "    "
            lines += [indent + entry[1], *(deeper + part for part in wrapped(entry[2], columns - len(deeper)))]
        elif line.startswith(("  z2a ", "  --")):
            lines.append(line)
        else:
            lines += [indent + part for part in wrapped(line, columns - len(indent))]
    return "\n".join(lines)


def can_show_chinese() -> bool:
    """Whether standard output and error have an encoding with Chinese characters."""
    try:
        for stream in (sys.stdout, sys.stderr):
            "\u4e2d".encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def wrapped(text: str, columns: int) -> list[str]:
    """Lines of at most `columns`, broken at blanks and between Chinese characters, never inside a word or command."""
    lines: list[str] = []
    line, width = "", 0
    for piece in _pieces(" ".join(text.split())):
        size = columns_of(piece.rstrip())
        if line and width + size > columns:
            lines.append(line.rstrip())
            line, width = "", 0
        line += piece
        width += columns_of(piece)
    return [*lines, line.rstrip()]


def _pieces(text: str) -> list[str]:
    """What is kept together: a command, a word with the blank behind it, a Chinese character with its punctuation."""
    pieces: list[str] = []
    at = 0
    for command in UNBREAKABLE.finditer(text):
        pieces += _words(text[at : command.start()])
        pieces.append(command[0])
        at = command.end()
    return pieces + _words(text[at:])


def _words(text: str) -> list[str]:
    chinese = r"\u2e80-\u2fff\u3040-\u9fff\uf900-\ufaff"
    word = rf"[{chinese}]|[^\s{chinese}{OPENING}{CLOSING}]+"
    return re.findall(rf"[{OPENING}]*(?:{word})[{CLOSING}]*\s*|\s+|.", text)
