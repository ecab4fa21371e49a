"""Text for the tokenizer benchmarks: Chinese, English and code, in files, from megabytes to gigabytes.

Real text comes from a folder given by --data (files named zh*, en*: JSON lines, JSON arrays, parquet) and, for code,
from the Python sources of the installed packages. Beyond that, an order-3 character model fitted on the real text of
each language writes on (`text_model`), so that gigabytes are not the same megabytes over and over.

    texts = real_texts(data)                       documents by language
    write_split(texts, folder)                     zh.train.txt, zh.held.txt ... every 20th document is held out
    write_mix(texts, folder, megabytes)            mix-000.txt ... of 100 MB, 45 % zh, 35 % en, 20 % code each
"""

from __future__ import annotations

import hashlib
import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from benchmarks.text_model import TextModel
from benchmarks.tokenizer_encoding import read_texts
from zero2all.common.files import write_atomic

LANGUAGES = ("zh", "en", "code")
HELD_OUT_EVERY = 20
MIX_FILE_MEGABYTES = 100
SHARES = {"zh": 0.45, "en": 0.35, "code": 0.20}
FITTED_CHARACTERS = 30_000_000
GENERATED_CHARACTERS = 1_000_000
CODE_BYTES = 200_000_000
"""At most this much of the installed sources."""


def real_texts(data: Path) -> dict[str, list[str]]:
    """Documents by language."""
    texts: dict[str, list[str]] = {language: [] for language in LANGUAGES}
    for path in sorted(data.iterdir()):
        language = path.name[:2]
        if language in texts and path.suffix != ".md":
            texts[language] += read_texts(path)
    texts["code"] = installed_sources()
    for language, documents in texts.items():
        assert documents, f"{data} has no file that begins with {language}"
        print(f"{language}: {len(documents):,} documents, {_bytes(documents) / 1e6:.0f} MB of real text")
    return texts


def installed_sources() -> list[str]:
    """Python files of the installed packages and the standard library, each content once."""
    folders = [Path(path) for path in (*site.getsitepackages(), sysconfig.get_paths()["stdlib"])]
    seen: set[bytes] = set()
    sources: list[str] = []
    size = 0
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            try:
                data = path.read_bytes()
                text = data.decode()
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(data).digest()
            if text and digest not in seen and size < CODE_BYTES:
                seen.add(digest)
                sources.append(text)
                size += len(data)
    return sources


def write_split(texts: dict[str, list[str]], folder: Path, limit_bytes: int | None = None) -> None:
    """Per language a file to train on, one held out, and one with everything."""
    for language, documents in texts.items():
        chosen = documents if limit_bytes is None else list(_up_to(documents, limit_bytes))
        held = chosen[::HELD_OUT_EVERY]
        train = [text for place, text in enumerate(chosen) if place % HELD_OUT_EVERY]
        for name, part in (("train", train), ("held", held), ("all", chosen)):
            _write(folder / f"{language}.{name}.txt", "\n".join(part) + "\n")


def write_small_mix(folder: Path, megabytes: int) -> Path:
    """The first so many megabytes of the mix in one file, all of it real text."""
    path = folder / f"mix-{megabytes}.txt"
    if not path.exists():
        pieces = []
        for language, share in SHARES.items():
            data = (folder / f"{language}.train.txt").read_bytes()[: int(1e6 * megabytes * share)]
            pieces.append(data.decode("utf-8", "ignore"))
        _write(path, "\n".join(pieces))
    return path


def write_mix(texts: dict[str, list[str]], folder: Path, megabytes: int) -> list[Path]:
    """Files of 100 MB with all languages in each: real text as long as there is any, then the model's."""
    count = megabytes // MIX_FILE_MEGABYTES
    paths = [folder / f"mix-{number:03d}.txt" for number in range(count)]
    if all(path.exists() for path in paths):
        return paths
    streams = {language: _endless(documents, language) for language, documents in texts.items()}
    for path in paths:
        pieces = []
        for language, share in SHARES.items():
            wanted = int(1e6 * MIX_FILE_MEGABYTES * share)
            while wanted > 0:
                text = next(streams[language])
                pieces.append(text)
                wanted -= len(text.encode()) + 1
        if not path.exists():
            _write(path, "\n".join(pieces) + "\n")
            print(f"written {path}", flush=True)
    return paths


def _endless(documents: list[str], language: str) -> Iterator[str]:
    yield from documents
    model = TextModel("\n".join(documents)[:FITTED_CHARACTERS])
    seed = LANGUAGES.index(language) * 1_000_000
    while True:
        seed += 1
        yield model.write(GENERATED_CHARACTERS, seed)


def _up_to(documents: list[str], limit_bytes: int) -> Iterator[str]:
    for text in documents:
        if limit_bytes <= 0:
            return
        limit_bytes -= len(text.encode())
        yield text


def _bytes(documents: list[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
