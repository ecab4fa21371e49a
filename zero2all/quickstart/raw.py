"""The quickstart's raw data: three sources in three common formats.

    en.jsonl       English small world    one JSON object a line   {id, title, text}
    zh.json        Chinese small world    one indented JSON array  [{qid, title, content}]
    code.parquet   small Python programs  parquet                  {repo_name, path, content}
    probes.jsonl   what to ask the trained model, one probe a line
    pairs.jsonl    true and false sentences for it to tell apart, one pair a line

Nothing is downloaded, and every machine makes the same files.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.files import staged_folder
from zero2all.common.manifest import fingerprint, is_current, read_manifest, write_manifest
from zero2all.common.progress import Bar, progress
from zero2all.evals.question_files import Pair, Probe
from zero2all.quickstart.world import GeneratedText, documents, pairs, probes, programs

GENERATOR_VERSION = 4
"""Raise it whenever the small world or the programs change, so that older raw folders are made anew."""

ENGLISH_NAME, CHINESE_NAME, CODE_NAME = "en.jsonl", "zh.json", "code.parquet"
PROBES_NAME, PAIRS_NAME = "probes.jsonl", "pairs.jsonl"

ROWS_PER_GROUP = 64


def write_raw(folder: Path, seed: int, bytes_per_language: int, code_bytes: int) -> dict[str, Any]:
    """Write the raw files, or find them already written; either way return the folder's manifest."""
    inputs = fingerprint(
        {
            "generator": GENERATOR_VERSION,
            "seed": seed,
            "bytes_per_language": bytes_per_language,
            "code_bytes": code_bytes,
        }
    )
    if not is_current(folder, "raw", inputs):
        with (
            staged_folder(folder) as partial,
            progress("raw data", total=2 * bytes_per_language + code_bytes, unit="B") as bar,
        ):
            content = {
                "seed": seed,
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
) -> Iterator[tuple[int, GeneratedText]]:
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

    schema = pa.schema([(name, pa.string()) for name in ("repo_name", "path", "content")])
    counts = {"documents": 0, "text_bytes": 0}
    with pq.ParquetWriter(path, schema) as writer:
        contents = programs(target_bytes, seed)
        while group := list(islice(contents, ROWS_PER_GROUP)):
            rows = []
            for content in group:
                counts["documents"] += 1
                counts["text_bytes"] += len(content)
                name = f"program_{counts['documents']:05d}.py"
                rows.append({"repo_name": "zero2all/programs", "path": name, "content": content})
                bar.advance(len(content), "Python")
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return counts


def _write_questions(path: Path, seed: int, of: Callable[[str, int], Iterable[Probe | Pair]]) -> dict[str, int]:
    counts = {}
    with open(path, "wb") as file:
        for language in ("en", "zh"):
            asked = list(of(language, seed))
            file.writelines(jsonio.dumps_line(asdict(each)) for each in asked)
            counts[language] = len(asked)
    return counts
