"""Tokenizer files of others that are no tokenizer.json: `.tiktoken` files (Qwen, Llama 3, OpenAI) and SentencePiece
`.model` files (LLaMA, ChatGLM). Each becomes a tokenizer.json with equal ids, so that every other part can use it.

A `.tiktoken` file lists pieces and ranks only. Its regular expression and its control tokens are code of the model that
it came with; for known files (by their number of pieces) they are here, for others the user gives them.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.tokenizer.config import BYTE_COUNT, PATTERNS, PRETOKEN_PATTERN, byte_alphabet
from zero2all.tokenizer.hf_bbpe import pattern_of
from zero2all.tokenizer.save import NORMALIZERS, assembled_json, bpe_model
from zero2all.tokenizer.sentencepiece_model import (
    declared_config,
    read_sentencepiece,
    sentencepiece_config,
    sentencepiece_json,
)

LARGEST_FILE = 200_000_000
"""Bytes. Tokenizers have a few megabytes; this is a model given by mistake."""
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?")
FOREIGN_NAMES = ("*.tiktoken", "*.model")

CL100K_PATTERN = PRETOKEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
"""Qwen's with up to three digits together."""
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_PATTERNS = {**PATTERNS, "cl100k": CL100K_PATTERN, "o200k": O200K_PATTERN}
"""Regular expressions by name, for `--pattern`."""


@dataclass(frozen=True)
class Family:
    """What belongs to a published `.tiktoken` file without being in it."""

    name: str
    pieces: int
    """How many the file has: this tells which one it is."""
    pattern: str
    control: dict[int, str]
    """Control tokens by id."""
    roles: dict[str, str]
    normalisation: str = "none"


def _after(first: int, names: Sequence[str]) -> dict[int, str]:
    return {first + place: name for place, name in enumerate(names)}


_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{n}|>" for n in range(4))),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{n}|>" for n in range(5, 251)),
)
_END = {"eos_token": "<|endoftext|>"}
FAMILIES = (
    Family(
        "Qwen",
        151_643,
        PRETOKEN_PATTERN,
        _after(151_643, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]),
        _END,
        "nfc",
    ),
    Family(
        "Llama 3",
        128_000,
        CL100K_PATTERN,
        _after(128_000, _LLAMA3),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    Family(
        "cl100k_base",
        100_256,
        CL100K_PATTERN,
        _after(100_257, ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"])
        | {100_276: "<|endofprompt|>"},
        _END,
    ),
    Family("o200k_base", 199_998, O200K_PATTERN, {199_999: "<|endoftext|>", 200_018: "<|endofprompt|>"}, _END),
)


@dataclass(frozen=True)
class ForeignTokenizer:
    """A tokenizer file of another program, converted."""

    kind: str
    """tiktoken or sentencepiece."""
    json: dict[str, Any]
    """tokenizer.json."""
    config: dict[str, Any]
    """tokenizer_config.json."""
    data: bytes
    """The file as it was."""


def find_foreign(source: Path) -> Path | None:
    """The tokenizer file that `source` is, or the only one in the folder that it is; None where there is none, or a
    tokenizer.json, which comes first."""
    if source.is_file():
        return None if source.name == "tokenizer.json" else source
    if (source / "tokenizer.json").is_file():
        return None
    found = sorted(path for name in FOREIGN_NAMES for path in source.glob(name))
    if len(found) > 1:
        raise UsageError(
            f"{source} has several tokenizer files ({', '.join(path.name for path in found)}). Name the one to use."
        )
    return found[0] if found else None


def read_foreign(path: Path, pattern: str | None = None, control: Sequence[str] = ()) -> ForeignTokenizer:
    """The tokenizer in a file, whatever it is called: its content says what it is.

    `pattern` and `control` are for `.tiktoken` files that we do not know: the regular expression (or the name of one),
    and the control tokens behind the pieces; the first of them ends a document.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
            if path.stat().st_size > LARGEST_FILE:
                raise _unknown_kind(path)
            data = head + file.read()
    except OSError as error:
        raise BadInputError(
            f"The tokenizer file {path} cannot be read ({error}). Check its path and rights."
        ) from error
    if TIKTOKEN_LINE.fullmatch(head.partition(b"\n")[0]):
        tokenizer_json, config = _from_tiktoken(path, data, pattern, control)
        return ForeignTokenizer("tiktoken", tokenizer_json, config, data)
    if head[:1] != b"\x0a":  # the first piece of a SentencePiece model
        raise _unknown_kind(path)
    if pattern is not None or control:
        raise UsageError(f"{path} is a SentencePiece model: --pattern and --special are for .tiktoken files.")
    model = read_sentencepiece(data, path)
    return ForeignTokenizer("sentencepiece", sentencepiece_json(model, path), sentencepiece_config(model), data)


def _unknown_kind(path: Path) -> BadInputError:
    return BadInputError(
        f"{path} is not a tokenizer file of a known kind. Known are tokenizer.json (Hugging Face), .tiktoken (a base64 "
        "piece and its rank per line) and SentencePiece's .model. Save the tokenizer with a recent transformers "
        "(`AutoTokenizer.from_pretrained(SOURCE).save_pretrained(FOLDER)`) as tokenizer.json."
    )


def _from_tiktoken(
    path: Path, data: bytes, pattern: str | None, control: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    ranks = _read_ranks(path, data)
    family = _family(path, ranks, pattern, control)
    visible = {byte: character for character, byte in byte_alphabet().items()}
    names = {piece: "".join(visible[byte] for byte in piece) for piece in ranks}
    split = {"type": "Split", "pattern": {"Regex": family.pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {names[piece]: rank for piece, rank in ranks.items()}
    merges = [[names[left], names[right]] for left, right in _merges(ranks)]
    converted = assembled_json(
        NORMALIZERS[family.normalisation],
        {"type": "Sequence", "pretokenizers": [split, byte_level]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        # A pretoken that is a piece is that piece, even if no merges lead to it: tiktoken's rule.
        bpe_model(vocab, merges, ignore_merges=True),
    )
    # `tokenizers` numbers added tokens without gaps, so names are put into gaps.
    numbers = range(len(ranks), max(family.control) + 1)
    named = [(number, family.control.get(number, f"<|unused_{number}|>")) for number in numbers]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    converted["added_tokens"] = [{"id": number, "content": name, **flags} for number, name in named]
    return converted, declared_config(named, family.roles)


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            piece = base64.b64decode(token, validate=True)
            if piece in ranks:
                raise ValueError(t(f"the piece {token.decode()} stood there before, with the rank {ranks[piece]}"))
            ranks[piece] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise BadInputError(
                f"{path} is damaged: line {number} is not a new base64 piece and its rank ({error}). Download it again."
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise BadInputError(f"{path} is damaged: its ranks are not 0, 1, 2, … without a gap. Download it again.")
    missing = [byte for byte in range(BYTE_COUNT) if bytes([byte]) not in ranks]
    if missing:
        raise BadInputError(
            f"{path} has no piece for {len(missing)} of the 256 bytes, so not every text has ids. Download it again."
        )
    return ranks


def _family(path: Path, ranks: dict[bytes, int], pattern: str | None, control: Sequence[str]) -> Family:
    """What the file does not say: from the user, or known for this number of pieces."""
    known = next((family for family in FAMILIES if family.pieces == len(ranks)), None)
    if pattern is None and not control and known is not None:
        return known
    if pattern is None or not control:
        listed = ", ".join(f"{family.name} ({family.pieces:,})" for family in FAMILIES)
        raise UsageError(
            f"{path} has {len(ranks):,} pieces, which is none of the .tiktoken files that are known: {listed}. Give "
            f"the regular expression that cuts its text with --pattern ({', '.join(TIKTOKEN_PATTERNS)}, or your own), "
            "and its control tokens with --special, the one that ends a document first (`z2a tokenizer import`)."
        )
    pattern_of(pattern, TIKTOKEN_PATTERNS)  # an error where it is no regular expression
    expression = TIKTOKEN_PATTERNS.get(pattern, pattern)
    if len(set(control)) < len(control):
        raise UsageError(f"--special names a control token twice: {', '.join(control)}.")
    pieces = [name for name in control if name.encode() in ranks]
    if pieces:
        raise UsageError(
            f"--special {pieces[0]} is a piece of {path}, so text has it too. Give control tokens that are not among "
            "the pieces."
        )
    return Family("given", len(ranks), expression, _after(len(ranks), control), {"eos_token": control[0]})


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """tiktoken joins the neighbours whose joint piece has the lowest rank: every way to cut a piece is a merge."""
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
