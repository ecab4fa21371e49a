"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print rows, the first of which is the heading; columns of figures are set flush right."""
    from rich.console import Console
    from rich.table import Table

    heading, *body = rows
    table = Table(title=title, title_justify="left")
    for column, name in enumerate(heading):
        cells = [row[column] for row in body]
        table.add_column(name, justify="right" if cells and all(_is_figure(cell) for cell in cells) else "left")
    for row in body:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _is_figure(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-+–"
