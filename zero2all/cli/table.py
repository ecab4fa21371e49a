"""Tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zero2all.common.language import translate

WIDTH_IN_FILES = 160  # columns where no terminal says how many there are: rich would assume 80 and break figures in two


def print_table(rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print rows, the first of which is the heading; title and heading are translated, figures are set flush right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    heading, *body = rows
    table = Table(
        title=title and translate(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1)
    )
    for column, name in enumerate(heading):
        cells = [row[column] for row in body]
        is_figures = bool(cells) and all(_is_figure(cell) for cell in cells)
        table.add_column(translate(name), justify="right" if is_figures else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_IN_FILES)
    if Measurement.get(console, console.options.update_width(1000), table).maximum > console.width:
        table.padding = (0, 0, 0, 0)  # rather closer together than with words cut in two
    with console.capture() as printed:  # rich itself would end the program when nobody reads (`| head`)
        console.print(table)
    print(printed.get(), end="")


def _is_figure(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-+–"
