"""The tokenizers that are compared: ours, Hugging Face folders, tiktoken's encodings, SentencePiece models.

Each becomes a `TokenizerCandidate`, which encodes and knows the bytes of every piece. Folders encode through the
fastest encoder that agrees with them (`tokenizer.encoders`), the others through their own libraries.

The text that tokenizers are judged on: documents of the corpus by channel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.records import corpus_sources, iter_records, text_template, training_text
from zero2all.tokenizer.encoders import EncodedBatch, EncoderConfig, open_encoder
from zero2all.tokenizer.encoders.kinds import batch_of
from zero2all.tokenizer.load import load_tokenizer
from zero2all.tokenizer.text import well_formed

TIKTOKEN_MARK = "tiktoken:"
SAMPLE_CHARACTERS = 50_000


@dataclass(frozen=True)
class TokenizerCandidate:
    """One tokenizer to compare."""

    name: str
    kind: str
    """Where it comes from and what encodes it, in a few words."""
    vocab_size: int
    pieces: dict[int, bytes]
    """The bytes of every piece that text can produce; control tokens are left out."""
    control: int
    """How many control tokens it has."""
    encode: Callable[[Sequence[str]], EncodedBatch]
    decode: Callable[[Sequence[int]], str] | None
    """From ids to text; None where joining the bytes of the pieces is decoding."""


def open_candidates(folder: Path, against: Sequence[str], text: EvalText) -> list[TokenizerCandidate]:
    """The tokenizer of the workspace, and the others, each under a name of its own."""
    sample = [document[:SAMPLE_CHARACTERS] for texts in text.channels.values() for document in texts[:3]]
    size = sum(len(document) for document in text.documents)
    found = [_from_folder(folder, "ours", sample, size)]
    for given in against:
        if given.startswith(TIKTOKEN_MARK):
            candidate = _from_tiktoken(given.removeprefix(TIKTOKEN_MARK))
        elif Path(given).is_file():
            candidate = _from_folder(Path(given), _model_name(Path(given)), sample, size)
        elif Path(given).is_dir():
            candidate = _from_folder(Path(given), Path(given).resolve().name, sample, size)
        else:
            raise UsageError(
                f"--against {given}: there is no such file or folder. Give a Hugging Face folder (with "
                f"tokenizer.json), a SentencePiece .model file, or {TIKTOKEN_MARK}NAME such as "
                f"{TIKTOKEN_MARK}o200k_base."
            )
        name, number = candidate.name, 2
        while name in {other.name for other in found}:
            name, number = f"{candidate.name} ({number})", number + 1
        found.append(replace(candidate, name=name))
    return found


def _from_folder(folder: Path, name: str, sample: list[str], text_bytes: int) -> TokenizerCandidate:
    tokenizer = load_tokenizer(folder)
    encoder = open_encoder(tokenizer, EncoderConfig(), sample, text_bytes)
    joins = tokenizer.is_byte_level and tokenizer.normalisation == "none"
    return TokenizerCandidate(
        name,
        f"{'folder' if folder.is_dir() else 'file'}, {encoder.name}",
        tokenizer.vocab_size,
        tokenizer.text_pieces,
        len(tokenizer.control_ids),
        encoder.encode_batch,
        None if joins else tokenizer.decode,
    )


def _from_tiktoken(name: str) -> TokenizerCandidate:
    tiktoken = _library("tiktoken", f"{TIKTOKEN_MARK}{name}")
    if name not in tiktoken.list_encoding_names():
        raise UsageError(f"tiktoken has no encoding {name!r}. Available: {', '.join(tiktoken.list_encoding_names())}.")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever the network library raises, and tiktoken for a damaged file
        raise BadInputError(
            f"tiktoken's file for {name} is not on this machine and could not be downloaded ({type(error).__name__}). "
            f"On a machine with internet run `python -c \"import tiktoken; tiktoken.get_encoding('{name}')\"` with "
            f"TIKTOKEN_CACHE_DIR set to a folder, copy the folder here and set the same variable."
        ) from error
    special = set(encoding._special_tokens.values())
    pieces = {}
    for number in range(encoding.n_vocab):
        if number not in special:
            try:
                pieces[number] = encoding.decode_single_token_bytes(number)
            except KeyError:  # these vocabularies have gaps
                continue
    return TokenizerCandidate(
        name,
        "tiktoken",
        encoding.n_vocab,
        pieces,
        len(special),
        lambda texts: batch_of(encoding.encode_ordinary_batch(list(texts))),
        None,
    )


def _model_name(path: Path) -> str:
    """What a tokenizer file is called, or its folder where the file is just called tokenizer."""
    return path.stem if path.stem != "tokenizer" else path.resolve().parent.name


def _library(name: str, given: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"--against {given} needs the package {name}: pip install {name}, then run it again."
        ) from error


@dataclass(frozen=True)
class EvalText:
    """Documents by channel, well-formed."""

    split: str
    channels: dict[str, list[str]]

    @property
    def documents(self) -> list[str]:
        """All documents."""
        return [text for texts in self.channels.values() for text in texts]


def held_out_text(corpus: Path, split: str, limit_bytes: int) -> EvalText:
    """The first documents of every source's split, in equal shares of bytes; what short ones leave is not given on."""
    sources = corpus_sources(corpus)
    channels: dict[str, list[str]] = {}
    for name, manifest in sources.items():
        left = limit_bytes // len(sources)
        for record in iter_records(corpus, name, split):
            text = well_formed(training_text(record, text_template(manifest)))
            left -= len(text.encode())
            if left < 0 and channels.get(manifest["channel"]):
                break
            channels.setdefault(manifest["channel"], []).append(text)
    if not channels:
        raise BadInputError(
            f"The {split} split of the corpus in {corpus} has no documents. Build the corpus with a larger "
            "--valid-share, or measure on training text with --split train."
        )
    return EvalText(split, channels)
