"""Reading the corpus contract: what every later stage needs of it and nothing more.

`corpus/report.json` lists the sources of the corpus; each source has `<name>/{train,valid}/part-*.jsonl` with one
record a line (see `zero2all.corpus`, which writes them).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json
from zero2all.common.manifest import read_manifest

REPORT_NAME = "report.json"
SPLITS = ("train", "valid")


def corpus_sources(corpus: Path) -> dict[str, dict[str, Any]]:
    """The sources of a finished corpus by name, each with its manifest."""
    try:
        report = read_json(corpus / REPORT_NAME)
    except FileNotFoundError:
        raise BadInputError(
            f"There is no finished corpus in {corpus} (no {REPORT_NAME}). Run `z2a corpus build` first; "
            f"if it was interrupted, running it again continues."
        ) from None
    return {name: read_manifest(corpus / name, "corpus", "z2a corpus build") for name in report["sources"]}


def iter_records(corpus: Path, source: str, split: str) -> Iterator[dict[str, Any]]:
    """The records of one split of one source, in order."""
    for part in sorted((corpus / source / split).glob("part-*.jsonl")):
        with open(part, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield jsonio.loads(line)
                except ValueError as error:
                    raise BadInputError(
                        f"{part}, line {number}, is not JSON ({error}): the shard was changed or damaged after it was "
                        f"written. Delete {corpus / source} and run `z2a corpus build` again."
                    ) from error


def training_text(record: dict[str, Any]) -> str:
    """The text a model sees of a record: its title, unless its text opens with it anyway, then its text."""
    title, content = record.get("title") or "", record["content"]
    return f"{title}\n{content}" if title and not content.startswith(title) else content
