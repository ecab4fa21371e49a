"""Add pieces to a SentencePiece BPE model (the known case: LLaMA plus Chinese), by name or from any amount of text.

New pieces go behind the old ones in the `.model`, with scores below all old scores. SentencePiece merges the highest
score first, so the old merges run before any new one, and text without a new piece keeps its ids. The new
tokenizer.json is converted from the new `.model`: both give the same ids.

From text: our BPE trainer (`bpe/`), which keeps to a memory limit whatever the amount, learns a vocabulary of the text.
Its pieces that the model lacks become pieces of the model, characters first, in the trainer's order. Pieces that the
old merges would never let arise are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import write_atomic, write_json
from zero2all.common.manifest import fingerprint
from zero2all.common.progress import say
from zero2all.tokenizer.extend import Extender
from zero2all.tokenizer.foreign import find_foreign
from zero2all.tokenizer.load import Tokenizer, read_tokenizer_files
from zero2all.tokenizer.parts import TextPart
from zero2all.tokenizer.save import CONFIG_NAME, SENTENCEPIECE_NAME, TOKENIZER_NAME
from zero2all.tokenizer.sentencepiece_model import SPACE, read_sentencepiece, sentencepiece_json, with_pieces
from zero2all.tokenizer.specials import BYTE_COUNT
from zero2all.tokenizer.text import TooFewPiecesError, well_formed
from zero2all.tokenizer.train import scratch_folder

DEFAULT_MEMORY = 2_000_000_000
"""Bytes that learning from text may use when nothing else is said."""
MODEL_NAMES = (SENTENCEPIECE_NAME, "tokenizer.model")
SAMPLE_BYTES = 2_000_000
"""Of the text, on which compression is measured."""


def open_extender(source: Path) -> Extender:
    """What adds pieces to this tokenizer."""
    model = _model_file(source)
    return Extender(source) if model is None else SentencePieceExtender(source, model)


def _model_file(source: Path) -> Path | None:
    """The SentencePiece BPE model of a tokenizer; None where it has none."""
    foreign = find_foreign(source)
    beside = [source / name for name in MODEL_NAMES if (source / name).is_file()]
    path = foreign or (beside[0] if beside else None)
    if path is None or path.read_bytes()[:1] != b"\x0a":
        return None
    return path if read_sentencepiece(path.read_bytes(), path).kind == "bpe" else None


class SentencePieceExtender(Extender):
    """A SentencePiece BPE model to which pieces are added."""

    def __init__(self, source: Path, model_file: Path) -> None:
        super().__init__(source)
        self.data = model_file.read_bytes()
        self.model = read_sentencepiece(self.data, model_file)
        converted = sentencepiece_json(self.model, model_file)
        for piece, number in converted["model"]["vocab"].items():
            if self.vocab.get(piece) != number:
                raise BadInputError(
                    f"{model_file} does not belong to the tokenizer.json beside it: {piece!r} is id {number} in the "
                    f"one and {self.vocab.get(piece)} in the other. Give the .model file itself with --tokenizer."
                )
        if self.first_id != len(self.model.pieces):
            raise BadInputError(
                f"The tokenizer in {source} has {self.first_id:,} ids and its {model_file.name} "
                f"{len(self.model.pieces):,}: tokens were added outside of the model, and new pieces would take their "
                "ids. Give the .model file itself with --tokenizer."
            )
        self.prefix = SPACE if self.model.dummy_prefix else ""

    def learn_parts(
        self, parts: Sequence[TextPart], vocab_size: int, target: Path, max_memory: int | None = None
    ) -> None:
        """Pieces from text, until there are `vocab_size` ids, in `max_memory` bytes."""
        from zero2all.tokenizer.bpe.learn import learn_bpe

        wanted = self.wanted(vocab_size)
        inputs = fingerprint([self.tokenizer.fingerprint, [part.fingerprint for part in parts]])
        to_learn, is_all = wanted + BYTE_COUNT, False
        with scratch_folder(target, inputs) as scratch:
            while True:
                try:
                    learned = learn_bpe(
                        parts,
                        to_learn,
                        scratch=scratch,
                        max_memory=max_memory or DEFAULT_MEMORY,
                        forbidden=list(self.tokenizer.control),
                    )
                except TooFewPiecesError as error:
                    to_learn, is_all = error.largest - len(self.tokenizer.control), True
                    if to_learn <= BYTE_COUNT:
                        raise self.too_few(0, vocab_size) from error
                    continue
                usable = self._usable(learned.pieces)
                if len(usable) >= wanted:
                    break
                if is_all:
                    raise self.too_few(len(usable), vocab_size)
                to_learn += 64 + (wanted - len(usable)) * 11 // 10
                say(f"extend: {wanted - len(usable):,} of the pieces are there already; learning {to_learn:,} instead")
        self.text_bytes = learned.facts["text"]["bytes"]
        for piece in usable[:wanted]:
            self.vocab[piece] = self.first_id + len(self.pieces)
            self.pieces.append(piece)

    def _usable(self, learned: Iterable[bytes]) -> list[str]:
        """The pieces, as the model spells them, that it lacks and that encoding can reach."""
        found = list(dict.fromkeys(self._missing(learned)))
        backend = _backend(self._json_with(found))
        return [piece for piece in found if [token.value for token in backend.model.tokenize(piece)] == [piece]]

    def _missing(self, learned: Iterable[bytes]) -> Iterator[str]:
        normalizer = self.tokenizer.backend.normalizer
        for data in learned:
            try:
                text = data.decode()
            except UnicodeDecodeError:  # part of a character: the model has bytes for that
                continue
            piece = text.replace(" ", SPACE)
            if piece in self.vocab or self._has_new_ascii(piece):
                continue
            if normalizer.normalize_str(text) in (piece, self.prefix + piece):
                yield piece

    def _has_new_ascii(self, piece: str) -> bool:
        """Line ends and the like that the model spells in bytes stay so, or nearly every old text would change."""
        return any(ord(character) < 128 and character not in self.vocab for character in piece)

    def _spelling(self, text: str) -> list[str]:
        """The old pieces of a text that is to be one piece; characters that are spelled in bytes become pieces."""
        piece = text.replace(" ", SPACE)
        for character in piece:
            if character not in self.vocab:
                self.vocab[character] = self.first_id + len(self.pieces)
                self.pieces.append(character)
                self.helpers += character != piece
        return [token.value for token in _backend(self._json_with(self.pieces)).model.tokenize(piece)]

    def _json_with(self, pieces: Sequence[str]) -> dict[str, Any]:
        return sentencepiece_json(read_sentencepiece(self._extended(pieces), self.folder), self.folder)

    def _extended(self, pieces: Sequence[str]) -> bytes:
        lowest = min(self.model.learned.values(), default=0.0)
        return with_pieces(self.data, pieces, [lowest - 1 - place for place in range(len(pieces))])

    def _write(self, partial: Path) -> None:
        data = self._extended(self.pieces)
        write_atomic(partial / SENTENCEPIECE_NAME, data)
        normalizer = self.json["normalizer"]  # which may begin with a Unicode form of our own training
        converted = sentencepiece_json(read_sentencepiece(data, self.folder), self.folder)
        write_json(partial / TOKENIZER_NAME, {**converted, "normalizer": normalizer})
        write_json(partial / CONFIG_NAME, read_tokenizer_files(self.folder).config)


def _backend(tokenizer_json: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer as Backend

    return Backend.from_str(jsonio.dumps_line(tokenizer_json).decode())


def sample_of(parts: Sequence[TextPart]) -> list[str]:
    """Some of the text, in equal shares from the beginning of every part."""
    share = max(1, SAMPLE_BYTES // max(1, len(parts)))
    sample = []
    for part in parts:
        size = 0
        for text in part.texts():
            kept = well_formed(text[: share - size])
            sample.append(kept)
            size += len(kept.encode())
            if size >= share:
                break
    return sample


def compression(old: Tokenizer, new: Tokenizer, sample: Sequence[str]) -> dict[str, float | int]:
    """Bytes per token of a sample before and after, and how many of its texts do not come back from their new ids."""
    size = sum(len(text.encode()) for text in sample)
    before, after = old.encode_batch(sample), new.encode_batch(sample)
    return {
        "bytes": size,
        "bytes_per_token_before": size / max(1, sum(map(len, before))),
        "bytes_per_token_after": size / max(1, sum(map(len, after))),
        "changed_texts": sum(new.decode(ids) != text for ids, text in zip(after, sample, strict=True)),
    }
