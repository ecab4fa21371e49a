"""The tokenizer stage of a workspace: train on its corpus, or on plain text files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.manifest import fingerprint
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.parts import corpus_parts, file_parts
from zero2all.tokenizer.train import deciding, train_on_parts


def train_on_corpus(corpus: Path, folder: Path, config: TokenizerConfig, ignore_memory: bool = False) -> dict[str, Any]:
    """Train on the training split of every source; does nothing when corpus and settings are those of last time."""
    parts, taken = corpus_parts(corpus, config.take)
    inputs = fingerprint({"parts": [[part.name, part.fingerprint] for part in parts], "config": deciding(config)})
    return train_on_parts(lambda _: parts, config, folder, inputs, {"taken": taken}, ignore_memory)


def train_on_files(
    paths: Sequence[Path], folder: Path, config: TokenizerConfig, ignore_memory: bool = False
) -> dict[str, Any]:
    """The same for plain text files."""
    if config.take is not None:
        raise UsageError("--take chooses among the sources of a corpus. With --text, name the files you want.")
    parts = file_parts(paths)
    inputs = fingerprint({"files": [part.fingerprint for part in parts], "config": deciding(config)})
    taken = {str(path): {"asked": "all", "share": "1", "about_bytes": path.stat().st_size} for path in paths}
    return train_on_parts(lambda _: parts, config, folder, inputs, {"taken": taken}, ignore_memory)
