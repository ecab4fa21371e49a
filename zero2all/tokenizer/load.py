"""Load a tokenizer, ours or from elsewhere, for encoding and decoding. Needs `tokenizers`, not `transformers`.

Text and control tokens are encoded separately: `encode_text` never returns a control id, whatever the text spells, and
`encode_control` is the way to get one (and `encode_marked`, for what chat templates write). For folders of others
(`z2a import`), which declare their control tokens as added tokens, the loader switches their recognition in text off.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import MANIFEST_NAME, as_written, read_json_object
from zero2all.common.language import translate as t
from zero2all.common.manifest import read_manifest
from zero2all.tokenizer.config import byte_alphabet
from zero2all.tokenizer.foreign import ForeignTokenizer, find_foreign, read_foreign
from zero2all.tokenizer.save import tokenizer_fingerprint
from zero2all.tokenizer.text import well_formed

if TYPE_CHECKING:
    import tokenizers

TRAIN_COMMAND = "z2a tokenizer train"

END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>")
"""What the end of a document is usually called, for folders that do not say which of their tokens it is."""

LONG_TEXT = 20_000
"""Characters from which a text is encoded as a batch of one: megabytes take seconds, and only batches let the other
threads of the process run meanwhile."""

RARE_CHARACTER = "\U0010fffd"
"""For private use; no vocabulary has a piece for it."""


class Tokenizer:
    """Text to ids and back. Get one with `load_tokenizer`."""

    begin_id: int | None
    """Comes before a document; None where a foreign tokenizer has no such token."""
    end_id: int
    """Comes after every document."""
    end_ids: tuple[int, ...]
    """Every id at which a model stops: `end_id`, and what else a foreign generation_config.json names."""
    pad_id: int | None
    """Fills rows that are too short; None where a foreign tokenizer has no such token."""
    control: dict[str, int]
    """Name and id of every control token, in id order."""
    control_roles: dict[str, str]
    """Role (`message_start`, …) -> control token, where the folder says so."""
    control_ids: frozenset[int]
    """The ids that no text can produce."""
    vocab_size: int
    """One more than the largest id. A model may pad its embedding beyond that."""
    is_byte_level: bool
    """Whether pieces are strings of bytes, so that bytes are joined before characters are made."""
    normalisation: str
    """none, nfc, nfkc or other: the form in which text comes back from its ids."""
    unknown_id: int | None
    """What text becomes that no piece spells, which loses it; None where bytes spell every text."""
    fingerprint: str
    """Same fingerprint, same ids for every text."""

    def __init__(
        self,
        tokenizer_json: dict[str, Any],
        control: dict[str, int],
        roles: dict[str, str],
        control_roles: dict[str, str] | None = None,
        more_ends: Iterable[int] = (),
    ) -> None:
        self.backend = _backend(tokenizer_json, control)
        self.control = dict(sorted(control.items(), key=lambda item: item[1]))
        self.control_ids = frozenset(control.values())
        begin, end, pad = roles.get("bos_token"), roles["eos_token"], roles.get("pad_token")
        self.begin_id = None if begin is None else control[begin]
        self.end_id = control[end]
        self.end_ids = (self.end_id, *(number for number in more_ends if number != self.end_id))
        self.control_roles = control_roles or {}
        self.normalisation = _normalisation(tokenizer_json.get("normalizer"))
        self.pad_id = None if pad is None else control[pad]
        self.vocab_size = max([*self.backend.get_vocab(with_added_tokens=True).values(), *self.control_ids]) + 1
        self.fingerprint = tokenizer_fingerprint(tokenizer_json, self.control, begin, end, pad)
        self.is_byte_level = _has_part(tokenizer_json.get("decoder"), "ByteLevel")
        model = tokenizer_json["model"]
        unknown = model.get("unk_token")
        number = model.get("unk_id") if unknown is None else self.backend.token_to_id(unknown)
        self.unknown_id = number if number in self.encode_text(RARE_CHARACTER) else None

    def encode_text(self, text: str) -> list[int]:
        """The ids of `text`, none of them a control id. Lone surrogates count as U+FFFD."""
        if len(text) >= LONG_TEXT:
            return self.encode_batch([text])[0]
        ids: list[int] = self.backend.encode(well_formed(text), add_special_tokens=False).ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A number that `encode_text` cannot stay below, found without encoding; 0 where pieces do not spell it all."""
        if not self.is_byte_level or self.normalisation == "other":
            return 0
        text = well_formed(text)
        if self.normalisation != "none":
            text = unicodedata.normalize("NFC" if self.normalisation == "nfc" else "NFKC", text)
        return -(-len(text.encode()) // self._longest_piece)

    @cached_property
    def _longest_piece(self) -> int:
        return max(map(len, self.text_pieces.values()))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_text` of each text, on all cores."""
        whole = [well_formed(text) for text in texts]
        return [encoding.ids for encoding in self.backend.encode_batch_fast(whole, add_special_tokens=False)]

    def encode_marked(self, text: str) -> list[int] | None:
        """The ids of a text in which the names of control tokens stand for these: only for text that a program made and
        in which nobody else can have put a name. None where the `tokenizers` library would give them other ids."""
        if self._marking is None:
            return None
        ids: list[int] = self._marking.encode(well_formed(text), add_special_tokens=False).ids
        return ids

    @cached_property
    def _marking(self) -> tokenizers.Tokenizer | None:
        """A second backend, which recognises control tokens in text."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self.backend.to_str())
        backend.encode_special_tokens = False
        declared = {token.content for token in backend.get_added_tokens_decoder().values()}
        missing = [name for name in self.control if name not in declared]
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])
        return backend if all(backend.token_to_id(name) == number for name, number in self.control.items()) else None

    def encode_control(self, name: str) -> int:
        """The id of a control token such as `<|end_of_text|>`."""
        try:
            return self.control[name]
        except KeyError:
            raise UsageError(
                f"This tokenizer has no control token {name!r}. Available: {', '.join(self.control)}."
            ) from None

    def decode(self, ids: Iterable[int], skip_control: bool = True) -> str:
        """The text of `ids`. Bytes that form no whole character become U+FFFD.

        Control tokens leave no trace, or their names where `skip_control` is off.
        """
        kept = [number for number in ids if not (skip_control and number in self.control_ids)]
        if self.is_byte_level:
            return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        text: str = self.backend.decode(kept, skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one piece, often only a part of a character; for a control token, its name."""
        piece = self._pieces.get(token_id)
        if piece is None:
            raise ValueError(f"token id {token_id} is not in this vocabulary of {self.vocab_size} ids")
        return piece

    @cached_property
    def text_pieces(self) -> dict[int, bytes]:
        """The bytes of every piece that text can produce, by rising id. Foreign vocabularies may have gaps."""
        return {number: piece for number, piece in sorted(self._pieces.items()) if number not in self.control_ids}

    def ids_of_bytes(self, piece: bytes) -> list[int]:
        """The ids of pieces that are exactly these bytes; a vocabulary may have a piece twice, or not at all."""
        return self._ids_by_piece.get(piece, [])

    @cached_property
    def _ids_by_piece(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for number, piece in self.text_pieces.items():
            found.setdefault(piece, []).append(number)
        return found

    @cached_property
    def _pieces(self) -> dict[int, bytes]:
        as_bytes = byte_level_piece if self.is_byte_level else sentencepiece_piece
        pieces = {number: as_bytes(piece) for piece, number in self.backend.get_vocab(with_added_tokens=False).items()}
        added = {number: token.content.encode() for number, token in self.backend.get_added_tokens_decoder().items()}
        return {**pieces, **added, **{number: name.encode() for name, number in self.control.items()}}


@dataclass(frozen=True)
class TokenizerFiles:
    """What a tokenizer folder, or a tokenizer file of others, says."""

    json: dict[str, Any]
    """tokenizer.json, or what the file was converted to."""
    config: dict[str, Any]
    """tokenizer_config.json, on top of what a file of others declares."""
    special: dict[str, Any]
    """special_tokens_map.json."""
    generation: dict[str, Any]
    """generation_config.json."""
    foreign: ForeignTokenizer | None
    """The file of others, where there is no tokenizer.json."""


def read_tokenizer_files(source: Path) -> TokenizerFiles:
    """The files of a tokenizer: a folder of ours or of others, a `.tiktoken` file or a SentencePiece `.model`."""
    path = find_foreign(source)
    if path is not None:
        foreign = read_foreign(path)
        beside = source if source.is_dir() else None  # a file given by itself is all there is
        config = _with_config(
            foreign.config, {} if beside is None else _read_optional(beside / "tokenizer_config.json")
        )
        tokenizer_json = foreign.json
    else:
        foreign, beside = None, source if source.is_dir() else source.parent
        try:
            tokenizer_json = _read_object(beside / "tokenizer.json")
        except FileNotFoundError:
            raise BadInputError(
                f"There is no tokenizer in {source} (no tokenizer.json). Run `{TRAIN_COMMAND}` first. For a model "
                "from elsewhere, save its tokenizer with a recent transformers "
                "(`AutoTokenizer.from_pretrained(SOURCE).save_pretrained(FOLDER)`), which writes that file."
            ) from None
        config = _read_optional(beside / "tokenizer_config.json")
    model = tokenizer_json.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        origin = path or (beside or source) / "tokenizer.json"
        raise BadInputError(f"{origin} has no vocabulary. Download it again, or run `{TRAIN_COMMAND}`.")
    names = ("special_tokens_map.json", "generation_config.json")
    special, generation = ({} if beside is None else _read_optional(beside / name) for name in names)
    return TokenizerFiles(tokenizer_json, config, special, generation, foreign)


def _with_config(declared: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json of a folder over what its tokenizer file declares."""
    both = "added_tokens_decoder"
    return {**declared, **config, both: {**declared[both], **config.get(both, {})}}


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`: one that we trained, any Hugging Face folder, or a tokenizer file of others."""
    folder = Path(folder)
    with as_written(f"The tokenizer in {folder}", f"Download the folder again, or run `{TRAIN_COMMAND}`."):
        files = read_tokenizer_files(folder)
        control, roles = _declared_control(folder, files)
        played = files.config.get("control_roles", {})
        tokenizer = Tokenizer(files.json, control, roles, played, _more_ends(files.generation))
    if folder.is_dir():
        _check_against_manifest(folder, tokenizer)
    return tokenizer


def _declared_control(folder: Path, files: TokenizerFiles) -> tuple[dict[str, int], dict[str, str]]:
    """Every control token's id, and which of them are bos_token, eos_token and pad_token."""
    tokenizer_json, config = files.json, files.config
    declared = {**files.special, **config}
    vocab = tokenizer_json["model"]["vocab"]
    ids: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {piece[0]: n for n, piece in enumerate(vocab)}
    control: dict[str, int] = {}
    for token in tokenizer_json.get("added_tokens", []):
        ids[token["content"]] = token["id"]
        if token["special"]:
            control[token["content"]] = token["id"]
    for number, token in config.get("added_tokens_decoder", {}).items():
        ids[token["content"]] = int(number)
        if token.get("special"):
            control[token["content"]] = int(number)
    for extra in (*_listed(declared, "additional_special_tokens"), *_listed(declared, "extra_special_tokens")):
        if extra in ids:
            control[extra] = ids[extra]
    roles = {role: name for role in ("bos_token", "eos_token", "pad_token") if (name := _name(declared.get(role)))}
    if "eos_token" not in roles:
        roles["eos_token"] = _usual_end(folder, control)
    for role, name in roles.items():
        if name not in ids:
            raise BadInputError(
                f"{folder} declares {name!r} as its {role}, but its tokenizer.json has no such token. Correct "
                "the declaration in tokenizer_config.json, or use the tokenizer that belongs to the model."
            )
        control[name] = ids[name]
    # An unknown-token is made from text, so text must be able to produce it, unless it also has one of the roles.
    unknown = tokenizer_json["model"].get("unk_token")
    if unknown not in roles.values():
        control.pop(unknown, None)
    return control, roles


def _more_ends(generation: dict[str, Any]) -> list[int]:
    """The ids at which the folder's model stops; chat models have several."""
    ends = generation.get("eos_token_id")
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _usual_end(folder: Path, control: dict[str, int]) -> str:
    for name in END_NAMES:
        if name in control:
            return name
    raise BadInputError(
        f"The tokenizer in {folder} does not say which token ends a document. Add a line such as "
        f'"eos_token": "</s>" to its tokenizer_config.json (its special tokens: {", ".join(control) or t("none")}).'
    )


def _backend(tokenizer_json: dict[str, Any], control: dict[str, int]) -> tokenizers.Tokenizer:
    """The `tokenizers` object that takes text as text: nothing in it is recognised as a control token."""
    from tokenizers import Tokenizer as Backend

    # Only tokens marked special can be switched off, and some folders forget to mark theirs.
    added = [
        {**token, "special": token["special"] or token["content"] in control}
        for token in tokenizer_json.get("added_tokens", [])
    ]
    try:
        backend = Backend.from_str(jsonio.dumps_line({**tokenizer_json, "added_tokens": added}).decode())
    except Exception as error:  # the library raises plain Exception
        raise BadInputError(
            f"The tokenizers library cannot read this tokenizer.json ({error}). Update the library (`pip "
            "install -U tokenizers`), or download the folder again."
        ) from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _check_against_manifest(folder: Path, tokenizer: Tokenizer) -> None:
    """A folder that we wrote must hold the tokenizer that we wrote; others have no tokenizer manifest."""
    found = _read_optional(folder / MANIFEST_NAME)
    if found.get("kind") != "tokenizer":
        return
    manifest = read_manifest(folder, "tokenizer", TRAIN_COMMAND)
    if manifest["fingerprint"] != tokenizer.fingerprint:
        raise BadInputError(
            f"The tokenizer in {folder} was changed after it was trained (its fingerprint is "
            f"{tokenizer.fingerprint}, its manifest says {manifest['fingerprint']}), so packed data and "
            f"models no longer match it. Run `{TRAIN_COMMAND}` again. To keep your change, copy the folder "
            f"elsewhere and delete {MANIFEST_NAME} from the copy."
        )


def _read_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, f"Download it again, or run `{TRAIN_COMMAND}`.")


def _read_optional(path: Path) -> dict[str, Any]:
    try:
        return _read_object(path)
    except FileNotFoundError:
        return {}


def _name(token: Any) -> str | None:
    """A token is declared either by its name or by an object that describes it."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _listed(declared: dict[str, Any], key: str) -> list[str]:
    """The names under `key`: a list in some versions of transformers, an object in others."""
    tokens = declared.get(key) or []
    return [name for token in (tokens.values() if isinstance(tokens, dict) else tokens) if (name := _name(token))]


def _has_part(part: Any, kind: str) -> bool:
    """Whether a decoder, possibly a sequence of decoders, contains one of this type."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_has_part(inner, kind) for inner in part.get("decoders", []))
    return False


_BYTE_OF = {ord(character): byte for character, byte in byte_alphabet().items()}
_SPELLED_BYTES = re.compile(f"[{re.escape(''.join(byte_alphabet()))}]*")
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _normalisation(normalizer: Any) -> str:
    """What a tokenizer.json's normalizer does to the characters of a text."""
    parts = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    exact = ("Prepend", "Replace")  # the space before a text and ▁; a regular expression replaces more than that
    forms = {
        str(part.get("type")).lower()
        for part in parts
        if part.get("type") not in exact or "Regex" in part.get("pattern", {})
    }
    return "none" if not forms else forms.pop() if forms <= {"nfc"} or forms <= {"nfkc"} else "other"


def byte_level_piece(piece: str) -> bytes:
    """The bytes of a piece that is spelled in the byte alphabet."""
    if _SPELLED_BYTES.fullmatch(piece):
        return piece.translate(_BYTE_OF).encode("latin-1")
    return piece.encode()  # a control token's name, or a piece that was added as plain text


def sentencepiece_piece(piece: str) -> bytes:
    """The bytes of a piece that is spelled as SentencePiece does: ▁ is a space, <0xE4> a byte."""
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
