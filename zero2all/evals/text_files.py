"""Text files that a person names, to be scored one by one. No torch here."""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from pathlib import Path

from zero2all.common.errors import BadInputError

LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


def text_files(places: Sequence[Path]) -> dict[str, Path]:
    """The files in these places by name: files themselves, and all files below folders but hidden ones; each once."""
    found: dict[str, Path] = {}
    for place in places:
        given = {path.resolve() for path in found.values()}
        if place.is_file():
            if place.resolve() not in given:
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
        found |= {
            os.path.join(place.name, path.relative_to(place)): path  # noqa: PTH118
            for path in inside
            if path.resolve() not in given
        }
    return found


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def read_text(path: Path, max_bytes: int) -> tuple[str, bool] | str:
    """The first max_bytes of a file as text, and whether that is all of it; or, in words, why it is no text. A cut
    falls between characters, and there is at least one."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + LONGEST_CHARACTER)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    is_whole = len(data) <= max_bytes
    if not data:
        return "is empty"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    if b"\0" in data:
        return "is not text (it has zero bytes)"
    end = min(max_bytes, len(data))
    while end > 0 and not is_whole and _is_inside_character(data[end]):
        end -= 1
    if end == 0:  # the first character is longer than the limit
        end = next((n for n in range(1, len(data)) if not _is_inside_character(data[n])), len(data))
    try:
        return data[:end].decode("utf-8"), is_whole
    except UnicodeDecodeError:
        return "is not UTF-8"


def _is_inside_character(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with the character before it."""
    return byte & 0b1100_0000 == 0b1000_0000
