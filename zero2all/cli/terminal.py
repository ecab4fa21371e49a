"""What a terminal can show: its width, colours, and characters beyond ASCII."""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from zero2all.common.language import columns as columns_of
from zero2all.common.language import padded, translate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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


WIDTH_IN_FILES = 160  # columns where no terminal says how many there are: rich would assume 80 and break figures in two


def print_table(rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print rows, the first of which is the heading; title and heading are translated, figures are set flush right.

    Where the terminal is too narrow for the longest words and figures beside each other, every row becomes a block of
    lines, a cell each.
    """
    from rich.console import Console

    heading, *body = rows
    title, heading = title and translate(title), [translate(name) for name in heading]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_IN_FILES
    console = Console(highlight=False, markup=False, width=width, height=25)  # rich obeys a width only with a height
    table = _table(heading, body, title, space=1)
    if _widths(table, console)[1] > console.width:
        table = _table(heading, body, title, space=0)  # rather closer together than with words cut in two
    if _widths(table, console)[0] > console.width:
        print("\n".join(_blocks(heading, body, title)))
        return
    with console.capture() as printed:  # rich itself would end the program when nobody reads (`| head`)
        console.print(table)
    print("\n".join(line.rstrip() for line in printed.get().split("\n")), end="")


def _table(heading: Sequence[str], body: Sequence[Sequence[str]], title: str | None, space: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, space))
    for column, name in enumerate(heading):
        cells = [row[column] for row in body]
        is_figures = bool(cells) and all(_is_figure(cell) for cell in cells)
        words = [word for cell in (*cells, name) for word in cell.split()] or [""]
        longest = max(Text(word).cell_len for word in words)
        table.add_column(
            name, justify="right" if is_figures else "left", overflow="fold", no_wrap=is_figures, min_width=longest
        )
    for row in body:
        table.add_row(*row)
    return table


def _widths(table: Table, console: Console) -> tuple[int, int]:
    """The columns that a table takes at least, with no word cut in two, and at most."""
    from rich.measure import Measurement

    found = Measurement.get(console, console.options.update_width(1000), table)
    return found.minimum, found.maximum


def _blocks(heading: Sequence[str], body: Sequence[Sequence[str]], title: str | None) -> list[str]:
    width = max(map(columns_of, heading))
    lines = [title] if title else []
    for row in body:
        lines += ["", *(f"{padded(name, width)}  {cell}".rstrip() for name, cell in zip(heading, row, strict=True))]
    return lines


def _is_figure(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-+–"
