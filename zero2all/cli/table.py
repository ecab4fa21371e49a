"""Tables on the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero2all.common.language import columns, padded, translate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
    width = max(map(columns, heading))
    lines = [title] if title else []
    for row in body:
        lines += ["", *(f"{padded(name, width)}  {cell}".rstrip() for name, cell in zip(heading, row, strict=True))]
    return lines


def _is_figure(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-+–"
