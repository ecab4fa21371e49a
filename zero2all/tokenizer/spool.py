"""A one-shot iterator of texts made readable many times: the trainer reads its text twice or more."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zero2all.common.errors import BadInputError
from zero2all.tokenizer.parts import TextPart

PART_BYTES = 64 << 20
LENGTH_BYTES = 8


@dataclass(frozen=True)
class SpooledPart:
    """Texts in a file of ours: before each its length in bytes. Lone surrogates survive, to be counted later."""

    name: str
    fingerprint: str
    size_bytes: int
    path: Path

    def texts(self) -> Iterator[str]:
        """The texts, from the first."""
        with open(self.path, "rb") as file:
            while head := file.read(LENGTH_BYTES):
                size = int.from_bytes(head, "little")
                data = file.read(size)
                if len(data) < size:
                    raise BadInputError(f"{self.path} ends early. Delete its folder and start the training again.")
                yield data.decode("utf-8", "surrogatepass")


def parts_from_texts(texts: Iterable[str], scratch: Path, part_bytes: int = PART_BYTES) -> list[TextPart]:
    """Write `texts` to files under `scratch` once, in parts of about `part_bytes`."""
    scratch.mkdir(parents=True, exist_ok=True)
    parts: list[TextPart] = []
    source = iter(texts)
    text = next(source, None)
    while text is not None:
        path = scratch / f"texts-{len(parts):05d}.spool"
        digest = hashlib.sha256()
        size = 0
        with open(path, "wb") as file:
            while text is not None and size < part_bytes:
                data = text.encode("utf-8", "surrogatepass")
                record = len(data).to_bytes(LENGTH_BYTES, "little") + data
                file.write(record)
                digest.update(record)
                size += len(data)
                text = next(source, None)
            file.flush()
            os.fsync(file.fileno())
        parts.append(SpooledPart(path.name, digest.hexdigest()[:16], size, path))
    return parts
