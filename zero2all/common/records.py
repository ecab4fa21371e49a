"""Reading the corpus contract: what every later stage needs of it and nothing more.

`corpus/report.json` lists the sources of the corpus; each source has `<name>/{train,valid}/part-*` with its records,
as JSON lines, compressed JSON lines, parquet or plain text (see `zero2all.corpus.shard_files`, which writes them).
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import PARTIAL_MARK, read_json
from zero2all.common.language import translate as t
from zero2all.common.manifest import read_manifest
from zero2all.common.workspace import is_folder_name

REPORT_NAME = "report.json"
ORIGINS_NAME = "origins.jsonl"
"""Which raw file each stretch of a source's items came from: `first` ordinal and `file`, a line each, rising."""
SPLITS = ("train", "valid")
TEXT_END = b"\n\f\n"
"""Ends a document in a plain text shard. Cleaning takes form feeds out of texts, so none stands inside one."""
PARQUET_BATCH_ROWS = 256
TEXT_FIELDS = ("title", "desc", "content")
TITLE_AND_TEXT = "{title}\n{content}"
"""How a record becomes training text where nothing else is said."""
QUESTION_AND_ANSWER = "{title}\n{desc}\n{content}"
"""The same for question sites: their question goes on in `desc`."""
TEXT_ONLY = "{content}"


def corpus_sources(corpus: Path) -> dict[str, dict[str, Any]]:
    """The sources of a finished corpus by name, each with its manifest."""
    try:
        report = read_json(corpus / REPORT_NAME)
    except FileNotFoundError:
        raise BadInputError(
            f"There is no finished corpus in {corpus} (no {REPORT_NAME}). Run `z2a corpus build` first. If it "
            "was interrupted, run it again to continue."
        ) from None
    names = report_sources(report, corpus / REPORT_NAME, "Run `z2a corpus build` again.")
    return {name: read_manifest(corpus / name, "corpus", "z2a corpus build") for name in names}


def report_sources(report: Any, origin: object, remedy: str) -> list[str]:
    """The names of the sources that a report lists, each a folder beside it; BadInputError for anything else."""
    sources = report.get("sources") if isinstance(report, dict) else None
    if not isinstance(sources, dict) or not all(map(is_folder_name, sources)):
        raise BadInputError(f"{origin} is not a corpus report: it does not list sources by name. {remedy}")
    return list(sources)


def iter_records(corpus: Path, source: str, split: str) -> Iterator[dict[str, Any]]:
    """The records of one split of a source, in order. Those of plain text have only `content`, with the title first."""
    for part in sorted((corpus / source / split).glob("part-*")):
        if PARTIAL_MARK in part.name:
            continue
        reader = READERS.get(part.name.partition(".")[2])
        if reader is None:
            raise BadInputError(
                f"{part} is not a shard in a known format ({', '.join(READERS)}). zero2all did not write it: remove it."
            )
        yield from reader(part, source)


def training_text(record: dict[str, Any], template: str = TITLE_AND_TEXT) -> str:
    """The text a model sees of a record, by the template of its source (`text_template`).

    An empty field is left out with what stands before it, and so is a field with which the next one opens anyway.
    """
    if template == TITLE_AND_TEXT:
        title, content = record.get("title") or "", record["content"]
        return f"{title}\n{content}" if title and not content.startswith(title) else content
    pieces, last_words = _template_parts(template)
    texts = [record.get(field) or "" for _, field in pieces]
    for place in range(len(texts) - 2, -1, -1):
        following = next(filter(None, texts[place + 1 :]), "")
        if following.startswith(texts[place]):
            texts[place] = ""
    written = ""
    for (words, _), text in zip(pieces, texts, strict=True):
        if text:
            written += (words if written else words.lstrip()) + text
    return written + last_words


def text_template(manifest: dict[str, Any]) -> str:
    """How the records of a source become training text, from its manifest; older ones do not say."""
    template: str = manifest.get("training_text", TITLE_AND_TEXT)
    return template


def template_problem(template: str) -> str | None:
    """What is wrong with a template by itself."""
    try:
        fields = template_fields(template)
    except ValueError as error:
        return t(f"the braces do not fit together ({error}); a brace that is text is written twice: {{{{ or }}}}")
    formatted = [field for *_, field, form, conversion in Formatter().parse(template) if form or conversion]
    if formatted:
        return t(
            f"{formatted[0]} has a conversion (!r) or a format (:>5), which are not known; write {{{formatted[0]}}}"
        )
    unknown = [field for field in fields if field not in TEXT_FIELDS]
    if unknown:
        return t(f"there is no field {unknown[0]!r}; fields are {', '.join(TEXT_FIELDS)}")
    repeated = next((field for field in fields if fields.count(field) > 1), None)
    if repeated:
        return t(f"{{{repeated}}} stands in it twice")
    return None if "content" in fields else t("{content}, the text itself, is not in it")


def template_fields(template: str) -> list[str]:
    """The fields that a template names, in order."""
    return [field for _, field in _template_parts(template)[0]]


@lru_cache(maxsize=64)
def _template_parts(template: str) -> tuple[list[tuple[str, str]], str]:
    """What stands before each field, and the field; and what stands after the last one."""
    pieces, words = [], ""
    for literal, field, _, _ in Formatter().parse(template):  # {{ and }} each end a literal
        words += literal
        if field is not None:
            pieces.append((words, field))
            words = ""
    return pieces, words


def _read_jsonl(part: Path, _: str) -> Iterator[dict[str, Any]]:
    with open(part, "rb") as file:
        for number, line in enumerate(file, 1):
            yield record_of_line(line, part, f"line {number}")


def _read_zst(part: Path, _: str) -> Iterator[dict[str, Any]]:
    rest = b""
    number = 0
    for piece in _decompressed(part):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            number += 1
            yield record_of_line(line, part, f"line {number}")
    if rest:
        raise _damaged(part, "it ends inside a record")


def _decompressed(part: Path) -> Iterator[bytes]:
    """The frames of a file in pieces; unlike a stream reader this notices a file that ends inside a frame."""
    import zstandard

    with open(part, "rb") as file:
        frame: Any = None
        while data := file.read(1 << 18):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise _damaged(part, f"it cannot be decompressed ({error})") from error
                data = frame.unused_data
                frame = None if frame.eof else frame
        if frame is not None:
            raise _damaged(part, "it ends inside a compressed frame")


def _read_parquet(part: Path, _: str) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(part, buffer_size=1 << 20, pre_buffer=False) as table:
            for batch in table.iter_batches(PARQUET_BATCH_ROWS, use_threads=False):
                for row in batch.to_pylist():
                    row["others"] = jsonio.loads(row["others"])
                    yield row
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(part, f"it cannot be read as parquet ({error})") from error


def _read_txt(part: Path, source: str) -> Iterator[dict[str, Any]]:
    with open(part, "rb") as file:
        rest = b""
        while piece := file.read(1 << 20):
            *texts, rest = (rest + piece).split(TEXT_END)
            for text in texts:
                try:
                    content = text.decode()
                except UnicodeDecodeError as error:
                    raise _damaged(part, f"it is not UTF-8 ({error})") from error
                yield {"data_src": source, "category": "", "title": "", "content": content, "desc": "", "others": {}}
        if rest:
            raise _damaged(part, "it ends inside a document")


def record_of_line(line: bytes, part: Path, where: str) -> dict[str, Any]:
    """The record on one line of a JSON-lines shard; `where` names the line if it is damaged."""
    try:
        record: dict[str, Any] = jsonio.loads(line)
    except ValueError as error:
        raise _damaged(part, f"it is not JSON at {where} ({error})") from error
    return record


def _damaged(part: Path, what: str) -> BadInputError:
    return BadInputError(
        f"{part} is damaged: {what}. The shard was changed after it was written. Run `z2a corpus build` again "
        "with the same sources: it finds the damage and rewrites the source."
    )


READERS: dict[str, Callable[[Path, str], Iterator[dict[str, Any]]]] = {
    "jsonl": _read_jsonl,
    "jsonl.zst": _read_zst,
    "parquet": _read_parquet,
    "txt": _read_txt,
}
