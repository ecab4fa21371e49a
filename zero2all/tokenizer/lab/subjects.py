"""The tokenizers that are compared: ours, Hugging Face folders, tiktoken's encodings, SentencePiece models.

Each becomes a Subject, which encodes and knows the bytes of every piece. Folders encode through the fastest encoder
that agrees with them (`tokenizer.encoders`), the others through their own libraries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero2all.common.errors import BadInputError, UsageError
from zero2all.tokenizer.encoders import EncodedBatch, EncoderConfig, open_encoder
from zero2all.tokenizer.encoders.batch import batch_of
from zero2all.tokenizer.lab.text import EvalText
from zero2all.tokenizer.load import load_tokenizer

TIKTOKEN_MARK = "tiktoken:"
SAMPLE_CHARACTERS = 50_000


@dataclass(frozen=True)
class Subject:
    """One tokenizer under test."""

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


def open_subjects(folder: Path, against: Sequence[str], text: EvalText) -> list[Subject]:
    """The tokenizer of the workspace, and the others, each under a name of its own."""
    sample = [document[:SAMPLE_CHARACTERS] for texts in text.channels.values() for document in texts[:3]]
    size = sum(len(document) for document in text.documents)
    found = [_from_folder(folder, "ours", sample, size)]
    for given in against:
        if given.startswith(TIKTOKEN_MARK):
            subject = _from_tiktoken(given.removeprefix(TIKTOKEN_MARK))
        elif Path(given).is_file():
            subject = _from_sentencepiece(Path(given))
        elif Path(given).is_dir():
            subject = _from_folder(Path(given), Path(given).resolve().name, sample, size)
        else:
            raise UsageError(
                f"--against {given}: no such file or folder. Give a Hugging Face folder (with tokenizer.json), a "
                f"SentencePiece .model file, or {TIKTOKEN_MARK}NAME such as {TIKTOKEN_MARK}o200k_base."
            )
        taken = {other.name for other in found}
        number = 2
        name = subject.name
        while name in taken:
            name, number = f"{subject.name} ({number})", number + 1
        found.append(Subject(**{**vars(subject), "name": name}))
    return found


def _from_folder(folder: Path, name: str, sample: list[str], text_bytes: int) -> Subject:
    tokenizer = load_tokenizer(folder)
    encoder = open_encoder(tokenizer, EncoderConfig(), sample, text_bytes)
    pieces = {
        number: tokenizer.token_bytes(number)
        for number in range(tokenizer.vocab_size)
        if number not in tokenizer.control_ids and tokenizer.has_id(number)
    }
    joins = tokenizer.is_byte_level and tokenizer.normalisation == "none"
    decode = None if joins else lambda ids: tokenizer.decode(ids)
    kind = f"folder, {encoder.name}"
    return Subject(name, kind, tokenizer.vocab_size, pieces, len(tokenizer.control_ids), encoder.encode_batch, decode)


def _from_tiktoken(name: str) -> Subject:
    try:
        import tiktoken
    except ImportError as error:
        raise _not_installed(f"{TIKTOKEN_MARK}{name}", "tiktoken") from error
    if name not in tiktoken.list_encoding_names():
        raise UsageError(f"tiktoken has no encoding {name!r}. It has: {', '.join(tiktoken.list_encoding_names())}.")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever the network library raises, and tiktoken for a damaged file
        raise BadInputError(
            f"tiktoken's file for {name} is not on this machine and could not be fetched ({type(error).__name__}). On "
            f"a machine with internet run `python -c \"import tiktoken; tiktoken.get_encoding('{name}')\"` with "
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
    return Subject(
        name,
        "tiktoken",
        encoding.n_vocab,
        pieces,
        len(special),
        lambda texts: batch_of(encoding.encode_ordinary_batch(list(texts))),
        None,
    )


def _from_sentencepiece(path: Path) -> Subject:
    try:
        import sentencepiece
    except ImportError as error:
        raise _not_installed(str(path), "sentencepiece") from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # it raises RuntimeError and OSError, with the C++ file and line as text
        raise BadInputError(f"{path} is no SentencePiece model ({error}). --against takes .model files.") from error
    pieces = {}
    control = 0
    for number in range(model.vocab_size()):
        if model.is_control(number) or model.is_unknown(number):
            control += 1
            continue
        piece = model.id_to_piece(number)
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece) if model.is_byte(number) else None
        pieces[number] = bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
    return Subject(
        path.stem if path.stem != "tokenizer" else path.resolve().parent.name,
        "sentencepiece",
        model.vocab_size(),
        pieces,
        control,
        lambda texts: batch_of(model.encode(list(texts))),
        lambda ids: str(model.decode(list(ids))),
    )


def _not_installed(given: str, module: str) -> UsageError:
    return UsageError(f"--against {given} needs the package {module}: pip install {module}, then run it again.")
