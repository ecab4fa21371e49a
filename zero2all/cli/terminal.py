"""What a terminal can show: its width, colours, and characters beyond ASCII."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys

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
