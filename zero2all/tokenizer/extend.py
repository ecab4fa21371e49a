"""Add pieces to an existing BPE tokenizer, ours or from elsewhere, without moving an old id.

New pieces take the ids after the last one, and their merges come after all old merges. Old merges therefore run first
and exactly as before; a new merge only joins what they left. So a text changes only where a new piece applies.

Two ways to choose them:

- *by name*: a piece is spelled with old ids a b c, and the merges a+b, ab+c are added. A piece of more than two old
  ones needs helpers (here ab), which take ids as well and are counted.
- *from text*: the text is encoded with the old tokenizer, and BPE continues from there: the most frequent pair of
  neighbouring ids becomes a piece, again and again. A plain algorithm on at most `MOST_BYTES` of text, which is enough
  to adapt a vocabulary to a field.

Byte-level BPE only: a SentencePiece model spells what it lacks in byte pieces, which no merge can join to a character.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import staged_folder, write_atomic, write_json
from zero2all.common.manifest import fingerprint, read_manifest, write_manifest
from zero2all.common.progress import progress
from zero2all.tokenizer.load import Tokenizer, byte_level_piece, load_tokenizer, read_tokenizer_files
from zero2all.tokenizer.save import CONFIG_NAME, OTHER_FILES, TOKENIZER_NAME
from zero2all.tokenizer.text import well_formed

MOST_BYTES = 50_000_000
"""Text beyond this is not read when pieces are learned from text; what was left out is counted."""
SMALLEST_COUNT = 2
"""A pair must occur this often in the text to become a piece."""
EXTEND_COMMAND = "z2a tokenizer extend"


def require_replaceable(target: Path) -> None:
    """Stop when writing a tokenizer to `target` would delete something else: a model, a home folder."""
    if target.is_dir() and any(target.iterdir()):
        try:
            read_manifest(target, "tokenizer", EXTEND_COMMAND)
        except BadInputError as error:
            raise UsageError(
                f"{target} is not empty and is not a zero2all tokenizer folder, so it is not replaced. Give a "
                "new folder with --out, or empty this one."
            ) from error


class Extender:
    """A tokenizer to which pieces are added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.json = read_tokenizer_files(folder).json
        model = self.json["model"]
        if model.get("type") != "BPE" or not self.tokenizer.is_byte_level:
            kind = f"a {model.get('type')} model" if model.get("type") != "BPE" else "SentencePiece's"
            raise BadInputError(
                f"The tokenizer in {folder} is {kind}. Pieces can be added to byte-level BPE tokenizers only: those of "
                "`z2a tokenizer train`, GPT, Llama 3, Qwen and others."
            )
        self.vocab: dict[str, int] = dict(model["vocab"])
        self.first_id = self.tokenizer.vocab_size
        self.pieces: list[str] = []
        """New pieces, spelled as in the vocabulary; each is the union of two that are there before it."""
        self.ranks: dict[tuple[str, str], int] = {}
        """New merges, in order."""
        self.already_there = self.helpers = 0
        self.text_bytes = self.text_bytes_left_out = 0

    def add(self, texts: Iterable[str]) -> None:
        """Add pieces by name: the text of each, with its leading space where it has one."""
        for text in texts:
            if not text or well_formed(text) != text:
                raise UsageError(f"{text!r} cannot be a piece: give text that is not empty and that is valid UTF-8.")
            if text in self.tokenizer.control:
                raise UsageError(f"{text!r} is a control token, which text must not produce.")
            before = len(self.pieces)
            pieces = self._joined(self._spelling(text))
            whole = "".join(pieces)
            if len(pieces) == 1 and len(self.pieces) == before:
                self.already_there += 1
            while len(pieces) > 1:
                left, right = pieces[:2]
                if left + right in self.vocab:  # the union exists, but nothing leads to it from these two: add the way
                    self._add_merge(left, right)
                else:
                    self._merge(left, right)
                    self.helpers += left + right != whole
                pieces = self._joined(pieces)

    def learn(self, texts: Iterable[str], vocab_size: int) -> None:
        """Pieces from text, until there are `vocab_size` ids."""
        wanted = vocab_size - self.first_id - len(self.pieces)
        if wanted <= 0:
            raise UsageError(
                f"The tokenizer already has {self.first_id + len(self.pieces):,} ids, so --vocab-size "
                f"{vocab_size} adds none. Give a larger number."
            )
        words = self._words(texts)
        learned = _learn(words, wanted, self._joinable)
        if len(learned) < wanted:
            largest = self.first_id + len(self.pieces) + len(learned)
            raise BadInputError(
                f"This text has new pieces (seen at least {SMALLEST_COUNT} times) for at most {largest} ids, "
                f"not {vocab_size:,}. Set --vocab-size to {largest} or less, or give more text."
            )
        for left, right in learned:
            self._merge(left, right)

    def save(self, target: Path) -> dict[str, Any]:
        """Write the extended tokenizer to `target`, whole or not at all; returns what was done."""
        if not self.ranks and not self.pieces:
            raise UsageError("Nothing was added: all pieces you named are already in the vocabulary.")
        facts = {
            "old_vocab_size": self.first_id,
            "pieces_added": len(self.pieces),
            "helper_pieces": self.helpers,
            "already_there": self.already_there,
            "text": {"bytes": self.text_bytes, "bytes_left_out": self.text_bytes_left_out},
        }
        with staged_folder(target) as partial:
            self._write(partial)
            for name in OTHER_FILES:
                if (self.folder / name).is_file():
                    write_atomic(partial / name, (self.folder / name).read_bytes())
            extended = load_tokenizer(partial)
            check_extends(self.tokenizer, extended, target)
            assert extended.control == self.tokenizer.control, "the extension changed control tokens"
            content = {
                "tokenizer_kind": "extended",
                "vocab_size": extended.vocab_size,
                "fingerprint": extended.fingerprint,
                "extended_from": self.tokenizer.fingerprint,
                "extension": facts,
            }
            inputs = fingerprint([self.tokenizer.fingerprint, list(self.ranks), self.pieces])
            write_manifest(partial, "tokenizer", inputs, content)
        return {**facts, "vocab_size": extended.vocab_size}

    def _write(self, partial: Path) -> None:
        """tokenizer.json with the new pieces, and what declares the control tokens."""
        model = self.json["model"]
        # Added tokens get their ids by counting up from the model's vocabulary unless they are in it; put them there,
        # or the new pieces would push them on.
        added = {token["content"]: token["id"] for token in self.json.get("added_tokens", [])}
        new_ids = {piece: self.first_id + place for place, piece in enumerate(self.pieces)}
        vocab = {**model["vocab"], **added, **new_ids}
        old_merges = model["merges"]
        pairs_are_lists = not old_merges or not isinstance(old_merges[0], str)
        new_merges: list[Any] = [[left, right] if pairs_are_lists else f"{left} {right}" for left, right in self.ranks]
        changed = {**self.json, "model": {**model, "vocab": vocab, "merges": [*old_merges, *new_merges]}}
        write_json(partial / TOKENIZER_NAME, changed)
        write_json(partial / CONFIG_NAME, read_tokenizer_files(self.folder).config)

    def _spelling(self, text: str) -> list[str]:
        """The old pieces of a text that is to be one piece; an error when it never could be one."""
        backend = self.tokenizer.backend
        normalised = backend.normalizer.normalize_str(text) if backend.normalizer else text
        whole = [(normalised, (0, len(normalised)))]
        words = backend.pre_tokenizer.pre_tokenize_str(normalised) if backend.pre_tokenizer else whole
        if len(words) != 1:
            cut = " | ".join(normalised[start:end] for _, (start, end) in words)
            raise UsageError(
                f"{text!r} cannot be one piece: this tokenizer cuts it into {cut} before any merge. Add these "
                "parts instead."
            )
        return self._old_pieces(words[0][0])

    def _old_pieces(self, word: str) -> list[str]:
        return [token.value for token in self.tokenizer.backend.model.tokenize(word)]

    def _words(self, texts: Iterable[str]) -> Counter[tuple[str, ...]]:
        """How often each pretoken occurs, spelled in the pieces so far."""
        backend = self.tokenizer.backend
        counts: Counter[str] = Counter()
        with progress("extend", total=None, unit="B") as bar:
            for given in texts:
                text = well_formed(given)
                size = len(text.encode())
                if self.text_bytes + size > MOST_BYTES:
                    self.text_bytes_left_out += size
                    continue
                self.text_bytes += size
                text = backend.normalizer.normalize_str(text) if backend.normalizer else text
                counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))
                bar.advance(size)
        if not self.text_bytes:
            raise BadInputError("There is no text to learn pieces from.")
        spelled: Counter[tuple[str, ...]] = Counter()
        for word, count in counts.items():
            spelled[tuple(self._joined(self._old_pieces(word)))] += count
        return spelled

    def _joined(self, pieces: list[str]) -> list[str]:
        """What the merges that were added so far make of old pieces: lowest rank first, as in encoding."""
        while True:
            ranked = [(self.ranks[pair], pair) for pair in pairwise(pieces) if pair in self.ranks]
            if not ranked:
                return pieces
            _merge_pair(pieces, min(ranked)[1])

    def _joinable(self, left: str, right: str) -> bool:
        """No piece of a character and a part of another, no second spelling of a piece that is there."""
        return left + right not in self.vocab and _whole_or_one_character(byte_level_piece(left + right))

    def _merge(self, left: str, right: str) -> None:
        self.vocab[left + right] = self.first_id + len(self.pieces)
        self.pieces.append(left + right)
        self._add_merge(left, right)

    def _add_merge(self, left: str, right: str) -> None:
        self.ranks[(left, right)] = len(self.ranks)


def read_pieces(path: Path) -> list[str]:
    """Pieces from a file, one a line; what a line cannot show may be written as `unescaped` reads it."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"The pieces in {path} cannot be read ({error}). Give a UTF-8 file with one piece per line."
        ) from error
    return [unescaped(line.rstrip("\r")) for line in lines if line.strip("\r")]


def unescaped(text: str) -> str:
    """`\\\\n`, `\\\\t` and `\\\\s` become a line end, a tab and a space."""
    return text.replace("\\n", "\n").replace("\\t", "\t").replace("\\s", " ")


def _learn(words: Counter[tuple[str, ...]], wanted: int, joinable: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """Merges over words that are sequences of pieces: plain BPE, ties to the alphabetically first pair."""
    sequences = [list(word) for word in words if len(word) > 1]
    weights = [count for word, count in words.items() if len(word) > 1]
    counts: Counter[tuple[str, str]] = Counter()
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for number, (sequence, weight) in enumerate(zip(sequences, weights, strict=True)):
        for pair in pairwise(sequence):
            counts[pair] += weight
            places[pair].add(number)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[tuple[str, str]] = []
    made: set[str] = set()
    with progress("extend", total=wanted, unit="piece") as bar:
        while heap and len(merges) < wanted:
            count, pair = heapq.heappop(heap)
            if -count != counts[pair]:
                if counts[pair] >= SMALLEST_COUNT:
                    heapq.heappush(heap, (-counts[pair], pair))
                continue
            if -count < SMALLEST_COUNT:
                break
            whole = pair[0] + pair[1]
            if whole in made or not joinable(*pair):
                continue
            merges.append(pair)
            made.add(whole)
            bar.advance(1)
            touched: set[tuple[str, str]] = set()
            for number in places.pop(pair, set()):
                touched |= _rewrite(sequences[number], weights[number], number, pair, counts, places)
            for other in touched:
                if counts[other] >= SMALLEST_COUNT:
                    heapq.heappush(heap, (-counts[other], other))
    return merges


def _rewrite(
    sequence: list[str],
    weight: int,
    number: int,
    pair: tuple[str, str],
    counts: Counter[tuple[str, str]],
    places: defaultdict[tuple[str, str], set[int]],
) -> set[tuple[str, str]]:
    """Join `pair` in one word; returns the pairs whose counts have risen."""
    for old in pairwise(sequence):
        counts[old] -= weight
    _merge_pair(sequence, pair)
    risen = set()
    for new in pairwise(sequence):
        counts[new] += weight
        places[new].add(number)
        risen.add(new)
    return risen


def _merge_pair(pieces: list[str], pair: tuple[str, str]) -> None:
    """Replace every occurrence of `pair`, from the left."""
    place = 0
    while place < len(pieces) - 1:
        if (pieces[place], pieces[place + 1]) == pair:
            pieces[place : place + 2] = [pair[0] + pair[1]]
        place += 1


def _whole_or_one_character(data: bytes) -> bool:
    """Whether bytes are whole characters, or the beginning of a single one."""
    try:
        data.decode()
        return True
    except UnicodeDecodeError as error:
        return error.start == 0 and error.end >= len(data) and error.reason == "unexpected end of data"


def check_extends(old: Tokenizer, new: Tokenizer, folder: Path) -> None:
    """Refuse a tokenizer whose ids are not, one by one, those of `old`, with new ones behind them."""
    moved = next(
        (
            number
            for number in range(old.vocab_size)
            if number >= new.vocab_size or old.backend.id_to_token(number) != new.backend.id_to_token(number)
        ),
        None,
    )
    if moved is not None:
        raise BadInputError(
            f"The tokenizer in {folder} does not extend the tokenizer of the model: id {moved} is "
            f"{old.backend.id_to_token(moved)!r} in the model's and {new.backend.id_to_token(moved)!r} there. "
            f"Make one with `{EXTEND_COMMAND}` from the model's own tokenizer."
        )


def spelled_by(old: Tokenizer, piece: bytes) -> list[int]:
    """The old ids that spell a new piece."""
    try:
        ids = old.encode_text(piece.decode())
    except UnicodeDecodeError:
        ids = [number for byte in piece for number in old.ids_of_bytes(bytes([byte]))]
    return ids or [old.end_id]
