"""SentencePiece `.model` files without the library: read one, turn it into a tokenizer.json with equal ids.

A `.model` is a protobuf message; only the few fields that decide ids are read. A BPE model becomes merges in the order
of its scores; a unigram model keeps its scores. What tokenizer.json cannot express exactly is refused with the reason.
"""

import base64
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.language import translate as t
from zero2all.tokenizer.save import NO_LENGTH_LIMIT, assembled_json, bpe_model

SPACE = "▁"
NORMAL, UNKNOWN_PIECE, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces, as the format numbers them."""
MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
UNKNOWN_SHOWN = " \u2047 "
"""What the library decodes an unknown piece to."""


@dataclass(frozen=True)
class SentencePieceModel:
    """What decides the ids of a SentencePiece model."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: str
    """unigram, bpe, word or char."""
    byte_fallback: bool
    suffix_space: bool
    """Spaces belong to the word before them."""
    roles: dict[str, int]
    """bos_token, eos_token, pad_token -> id, where the model has one."""
    charsmap: bytes
    """The normaliser's compiled table; empty: characters stay as they are."""
    dummy_prefix: bool
    remove_extra_spaces: bool
    escape_spaces: bool

    @property
    def learned(self) -> dict[str, float]:
        """The pieces that text can produce, with their scores."""
        listed = zip(self.pieces, self.scores, self.types, strict=True)
        return {piece: score for piece, score, kind in listed if kind in (NORMAL, USER_DEFINED)}

    @property
    def unknown(self) -> int:
        """The id of the unknown piece."""
        return self.types.index(UNKNOWN_PIECE)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of every field: an int, the 4 or 8 bytes of a fixed one, or the bytes of a string."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire == 2:
            size, place = _varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if number == 0 or place + size > len(data):
            raise ValueError("a field that reaches beyond the end")
        yield number, data[place : place + size]
        place += size


def _one(data: bytes) -> dict[int, Any]:
    """The fields of a message without repeated ones; the last value of each counts."""
    return dict(_fields(data))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def read_sentencepiece(data: bytes, origin: object) -> SentencePieceModel:
    """The model in the bytes of a `.model` file; BadInputError for anything else."""
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = _one(value)
                pieces.append(piece[1].decode())
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                types.append(piece.get(3, NORMAL))
            elif number == 2:
                trainer = _one(value)
            elif number == 3:
                normalizer = _one(value)
        roles = {name: _signed(trainer.get(field, default)) for name, field, default in _ROLE_FIELDS}
        roles = {name: at for name, at in roles.items() if 0 <= at < len(pieces) and types[at] == CONTROL}
        model = SentencePieceModel(
            pieces,
            scores,
            types,
            MODEL_TYPES.get(trainer.get(3, 1), str(trainer.get(3))),
            bool(trainer.get(35, 0)),
            bool(trainer.get(24, 0)),
            roles,
            normalizer.get(2, b""),
            bool(normalizer.get(3, 1)),
            bool(normalizer.get(4, 1)),
            bool(normalizer.get(5, 1)),
        )
    except (ValueError, IndexError, KeyError, struct.error, AttributeError, TypeError) as error:
        raise _not_a_model(origin, f"{type(error).__name__}: {error}") from error
    if not pieces or types.count(UNKNOWN_PIECE) != 1:
        raise _not_a_model(origin, "it has no pieces" if not pieces else "it must have one unknown piece")
    return model


_ROLE_FIELDS = (("bos_token", 41, 1), ("eos_token", 42, 2), ("pad_token", 43, -1))
"""Role, field of the trainer's settings, default."""


def _not_a_model(origin: object, reason: str) -> BadInputError:
    return BadInputError(
        f"{origin} is not a SentencePiece model ({reason}). Give a tokenizer.json, a .tiktoken file or a "
        "SentencePiece .model, and download it again if it is damaged."
    )


def sentencepiece_json(model: SentencePieceModel, origin: object) -> dict[str, Any]:
    """A tokenizer.json that gives the ids of the model."""
    _require_expressible(model, origin)
    converted = assembled_json(
        {"type": "Sequence", "normalizers": _normalizers(model)},
        None,
        {"type": "Sequence", "decoders": _decoders(model)},
        _unigram(model) if model.kind == "unigram" else _bpe(model),
    )
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    converted["added_tokens"] = [
        {"id": number, "content": piece.replace(SPACE, " "), **flags}
        for number, piece in enumerate(model.pieces)
        if model.types[number] == USER_DEFINED
    ]
    return converted


def _require_expressible(model: SentencePieceModel, origin: object) -> None:
    kind = model.kind
    reasons = [
        (kind not in ("unigram", "bpe"), t(f"it is a {kind} model; unigram and bpe are supported")),
        (model.suffix_space, t("its spaces belong to the word before them (treat_whitespace_as_suffix)")),
        (not model.escape_spaces, t("it does not write spaces as ▁ (escape_whitespaces is off)")),
        (UNUSED in model.types, t("it has unused pieces (a restricted vocabulary)")),
        (len(set(model.pieces)) < len(model.pieces), t("it has two pieces of the same spelling")),
        (_missing_marks(model), t("it lacks characters of its control and byte pieces, so text could spell these")),
        (
            USER_DEFINED in model.types and model.dummy_prefix,
            t("it has user-defined pieces and puts a space before every text, which tokenizer.json cannot express"),
        ),
    ]
    for applies, reason in reasons:
        if applies:
            raise BadInputError(
                f"The SentencePiece model {origin} cannot be used: {reason}. Save the tokenizer with a recent "
                "transformers as tokenizer.json and use that, or train one with `z2a tokenizer train`."
            )


def _missing_marks(model: SentencePieceModel) -> bool:
    """A unigram encoder takes a listed piece over unknown characters, so all characters of the pieces that text must
    not produce have to be known: then spelling always wins (see `_unigram`)."""
    listed = zip(model.pieces, model.types, strict=True)
    marks = {character for piece, kind in listed if kind in (CONTROL, BYTE) for character in piece}
    return model.kind == "unigram" and not marks <= set(model.learned)


def _normalizers(model: SentencePieceModel) -> list[dict[str, Any]]:
    """What happens to a text before it is cut, in the library's order."""
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.remove_extra_spaces:
        for pattern, content in ((r"\A +", ""), (" {2,}", " "), (f"[ {SPACE}]+\\z", "")):
            steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    if model.dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return steps


def _decoders(model: SentencePieceModel) -> list[dict[str, Any]]:
    unknown = {"type": "Replace", "pattern": {"String": model.pieces[model.unknown]}, "content": UNKNOWN_SHOWN}
    steps: list[dict[str, Any]] = [
        *([] if model.byte_fallback else [unknown]),
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.dummy_prefix or model.remove_extra_spaces:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    """SentencePiece joins the neighbours whose joint piece scores highest; merges in the order of scores do the same.

    A piece can arise from several pairs; all of them are merges, next to each other in rank.
    """
    learned = model.learned
    merges = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in learned.items()
        for cut in range(1, len(piece))
        if piece[:cut] in learned and piece[cut:] in learned
    ]
    merges.sort(key=lambda merge: merge[0])
    vocab = {piece: number for number, piece in enumerate(model.pieces)}
    listed = [[left, right] for _, left, right in merges]
    unknown = model.pieces[model.unknown]
    return bpe_model(vocab, listed, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    """Control tokens and byte pieces are in the list that the encoder matches text against, with a score so low that
    no path takes one."""
    reachable = [kind in (NORMAL, USER_DEFINED) for kind in model.types]
    longest = max(
        (len(piece) for piece, is_text in zip(model.pieces, reachable, strict=True) if not is_text), default=0
    )
    lowest = min(model.learned.values(), default=-1.0)
    unreachable = (longest + 2) * min(lowest, -1.0) - 100
    listed = zip(model.pieces, model.scores, reachable, strict=True)
    return {
        "type": "Unigram",
        "unk_id": model.unknown,
        "vocab": [[piece, score if is_text else unreachable] for piece, score, is_text in listed],
        "byte_fallback": model.byte_fallback,
    }


def sentencepiece_config(model: SentencePieceModel) -> dict[str, Any]:
    """tokenizer_config.json of a converted model: its control tokens, and which of them begin and end a text."""
    control = [(number, piece) for number, piece in enumerate(model.pieces) if model.types[number] == CONTROL]
    return declared_config(control, {role: model.pieces[number] for role, number in model.roles.items()})


def declared_config(control: Iterable[tuple[int, str]], roles: dict[str, str]) -> dict[str, Any]:
    """tokenizer_config.json that declares these control tokens, for us and for `AutoTokenizer`."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(number): {"content": name, **plain} for number, name in control},
        **roles,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": NO_LENGTH_LIMIT,
    }
