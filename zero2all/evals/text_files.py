"""Text files that a person names, to be scored one by one. No torch here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zero2all.common.errors import BadInputError


def text_files(places: Sequence[Path]) -> dict[str, Path]:
    """The files in these places by name: files themselves, and all files below folders but hidden ones."""
    found: dict[str, Path] = {}
    for place in places:
        if place.is_file():
            found[place.name if place.name not in found else str(place)] = place
            continue
        if not place.is_dir():
            raise BadInputError(
                f"There is no text file or folder {place}. Give --text a file or a folder of text files."
            )
        inside = [path for path in sorted(place.rglob("*")) if path.is_file() and not _is_hidden(path, place)]
        if not inside:
            raise BadInputError(
                f"The folder {place} has no files to score. Give --text a file or a folder of text files."
            )
        found |= {os.path.join(place.name, path.relative_to(place)): path for path in inside}  # noqa: PTH118
    return found


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def read_text(path: Path, max_bytes: int) -> tuple[str, bool] | str:
    """The first max_bytes of a file as text, and whether that is all of it; or, in words, why it is no text."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    is_whole = len(data) <= max_bytes
    if not data:
        return "is empty"
    if b"\0" in data:
        return "is not text (it has zero bytes)"
    try:
        text = data[:max_bytes].decode("utf-8")
    except UnicodeDecodeError as error:
        if is_whole or error.start < max_bytes - 3:  # else the cut fell into a character
            return "is not UTF-8"
        text = data[: error.start].decode("utf-8")
    return (text, is_whole) if text else "is not UTF-8"
