"""The quickstart's raw data: three sources in three common formats.

    en.jsonl       English small world    one JSON object a line   {id, title, text}
    zh.json        Chinese small world    one indented JSON array  [{qid, title, content}]
    code.parquet   Python's own library   parquet                  {repo_name, path, content}
    probes.jsonl   what to ask the trained model, one probe a line
    pairs.jsonl    true and false sentences for it to tell apart, one pair a line

Nothing is downloaded. The code is the standard library of the Python that runs this, so it differs between Python
versions; the two languages do not.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import staged_folder
from zero2all.common.manifest import fingerprint, is_current, read_manifest, write_manifest
from zero2all.common.progress import Bar, progress
from zero2all.evals.pair_file import Pair
from zero2all.evals.probe_file import Probe
from zero2all.quickstart.world import Document, documents, pairs, probes

GENERATOR_VERSION = 2
"""Raise it whenever the small world or the choice of code changes, so that older raw folders are made anew."""

ENGLISH_NAME, CHINESE_NAME, CODE_NAME = "en.jsonl", "zh.json", "code.parquet"
PROBES_NAME, PAIRS_NAME = "probes.jsonl", "pairs.jsonl"

SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)
"""`encodings` is almost only character tables, and would otherwise be a quarter of the code."""
LARGEST_CODE_FILE_BYTES = 60_000
ROWS_PER_GROUP = 64


def write_raw(folder: Path, seed: int, bytes_per_language: int, code_bytes: int) -> dict[str, Any]:
    """Write the raw files, or find them already written; either way return the folder's manifest."""
    inputs = fingerprint(
        {
            "generator": GENERATOR_VERSION,
            "seed": seed,
            "bytes_per_language": bytes_per_language,
            "code_bytes": code_bytes,
            "python": platform.python_version(),
        }
    )
    if not is_current(folder, "raw", inputs):
        with (
            staged_folder(folder) as partial,
            progress("raw data", total=2 * bytes_per_language + code_bytes, unit="B") as bar,
        ):
            content = {
                "seed": seed,
                "python": platform.python_version(),
                "english": _write_english(partial / ENGLISH_NAME, seed, bytes_per_language, bar),
                "chinese": _write_chinese(partial / CHINESE_NAME, seed, bytes_per_language, bar),
                "code": _write_code(partial / CODE_NAME, seed, code_bytes, bar),
                "probes": _write_questions(partial / PROBES_NAME, seed, probes),
                "pairs": _write_questions(partial / PAIRS_NAME, seed, pairs),
            }
            write_manifest(partial, "raw", inputs, content)
    return read_manifest(folder, "raw", made_by="z2a quickstart")


def _write_english(path: Path, seed: int, target_bytes: int, bar: Bar) -> dict[str, int]:
    counts = {"documents": 0, "text_bytes": 0}
    with open(path, "wb") as file:
        for number, document in _counted("en", seed, target_bytes, counts, bar):
            file.write(jsonio.dumps_line({"id": f"en-{number:06d}", "title": document.title, "text": document.text}))
    return counts


def _write_chinese(path: Path, seed: int, target_bytes: int, bar: Bar) -> dict[str, int]:
    counts = {"documents": 0, "text_bytes": 0}
    with open(path, "w", encoding="utf-8") as file:
        file.write("[")
        for number, document in _counted("zh", seed, target_bytes, counts, bar):
            record = {"qid": number, "title": document.title, "content": document.text}
            lines = (f'    "{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in record.items())
            file.write(("\n" if number == 1 else ",\n") + "  {\n" + ",\n".join(lines) + "\n  }")
        file.write("\n]\n")
    return counts


def _counted(
    language: str, seed: int, target_bytes: int, counts: dict[str, int], bar: Bar
) -> Iterator[tuple[int, Document]]:
    """The documents of a language, numbered from 1; adds them to `counts`."""
    for number, document in enumerate(documents(language, target_bytes, seed), start=1):
        yield number, document
        size = len(document.text.encode())
        counts["documents"] = number
        counts["text_bytes"] += size
        bar.advance(size, language)


def _write_code(path: Path, seed: int, target_bytes: int, bar: Bar) -> dict[str, int]:
    import pyarrow as pa  # here, because a folder that is already current does not need it
    import pyarrow.parquet as pq

    schema = pa.schema([("repo_name", pa.string()), ("path", pa.string()), ("content", pa.string())])
    sources = StandardLibrary(Path(sysconfig.get_paths()["stdlib"]), seed)
    rows: list[dict[str, str]] = []
    count = text_bytes = 0
    with pq.ParquetWriter(path, schema) as writer:
        for name, content in sources:
            if text_bytes >= target_bytes:
                break
            rows.append({"repo_name": "python/cpython", "path": f"Lib/{name}", "content": content})
            size = len(content.encode())
            count, text_bytes = count + 1, text_bytes + size
            bar.advance(size, "Python")
            if len(rows) == ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))
    if target_bytes > 0 and count == 0:
        raise BadInputError(
            f"No Python sources were found in {sources.root}, where this Python's standard library should be. The "
            f"quickstart uses them as its code. Use a Python that ships its sources (python.org, pyenv, conda, uv)."
        )
    return {
        "documents": count,
        "text_bytes": text_bytes,
        "skipped_too_large": sources.skipped_too_large,
        "skipped_undecodable": sources.skipped_undecodable,
        "skipped_empty": sources.skipped_empty,
    }


def _write_questions(path: Path, seed: int, of: Callable[[str, int], Iterable[Probe | Pair]]) -> dict[str, int]:
    counts = {}
    with open(path, "wb") as file:
        for language in ("en", "zh"):
            asked = list(of(language, seed))
            file.writelines(jsonio.dumps_line(asdict(each)) for each in asked)
            counts[language] = len(asked)
    return counts


@dataclass
class StandardLibrary:
    """The .py files below `root` in an order that follows from `seed`, as (path, text); counts what it skips.

    The counts cover the files looked at so far: the reader stops when it has enough.
    """

    root: Path
    seed: int
    skipped_too_large: int = 0
    skipped_undecodable: int = 0
    skipped_empty: int = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Read the files one by one."""
        names = sorted(self._names())
        random.Random(f"zero2all code/{self.seed}").shuffle(names)
        for name in names:
            path = self.root / name
            if path.stat().st_size > LARGEST_CODE_FILE_BYTES:
                self.skipped_too_large += 1
                continue
            try:
                content = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                self.skipped_undecodable += 1
                continue
            if content.strip():
                yield name, content
            else:
                self.skipped_empty += 1

    def _names(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            below = Path(folder).relative_to(self.root)
            yield from ((below / name).as_posix() for name in files if name.endswith(".py"))
