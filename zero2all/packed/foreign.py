"""Token files of others: data that was encoded elsewhere comes in, ours goes out.

    megatron   PREFIX.bin, PREFIX.idx: what Megatron-LM, NeMo and GPT-NeoX read and write
    numpy      tokens.npy, or a bare .bin with --dtype; beside it, where known, tokens.documents.npy (where each
               document starts) and tokens.mask.npy (1 where a token counts in the loss)

What goes out gets `….json` beside it (tokenizer, channel, counts), which is checked when it comes in again. What comes
in is a source like any other, except that `z2a pack` keeps it beside those of the corpus. Every id is checked.
"""

import io
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json_object, require_free_space, staged_folder, write_json
from zero2all.common.manifest import fingerprint, read_manifest, write_manifest
from zero2all.common.progress import progress
from zero2all.common.records import SPLITS
from zero2all.packed.shard_format import PACK_COMMAND, REPORT_NAME, PackedSplit, packed_report, token_dtype
from zero2all.packed.shard_writer import COPY_TOKENS, SHARD_TOKENS, plan_shards, write_shard, written_file
from zero2all.packed.writer import imported_manifests, split_content, write_report, writing_to
from zero2all.tokenizer.load import Tokenizer

FileFormat = Literal["megatron", "numpy"]


def export_split(split: PackedSplit, folder: Path, to: FileFormat) -> list[Path]:
    """Write a split as `folder/<source>.<split>.…`; returns the files."""
    stem = f"{split.name}.{split.split}"
    folder.mkdir(parents=True, exist_ok=True)
    lengths = document_lengths(split)
    known: dict[str, dict[str, Any]] = {}
    is_megatron = to == "megatron"
    dtype = megatron_dtype(int(split.manifest["vocab_size"])) if is_megatron else np.dtype(split.manifest["dtype"])

    def tokens() -> Iterator[bytes]:
        with progress("export", total=split.tokens, unit="tokens") as bar:
            for start, count in _stretches(split.tokens):
                yield split.read(start, count).astype(dtype).tobytes()
                bar.advance(count)

    if is_megatron:
        _write(folder / f"{stem}.bin", tokens(), known)
        _write(folder / f"{stem}.idx", [index_bytes(lengths, dtype)], known)
    else:
        _write(folder / f"{stem}.npy", _npy(dtype, split.tokens, tokens()), known)
        starts = [(np.cumsum(lengths) - lengths).astype("<u8").tobytes()]
        _write(folder / f"{stem}.documents.npy", _npy(np.dtype("<u8"), len(lengths), starts), known)
        if split.masks is not None:
            ones = (split.read_mask(start, count).tobytes() for start, count in _stretches(split.tokens))
            _write(folder / f"{stem}.mask.npy", _npy(np.dtype("u1"), split.tokens, ones), known)
    fields = ("source", "split", "channel", "tokenizer", "vocab_size", "documents", "tokens", "text_bytes")
    facts = {name: split.manifest.get(name) for name in fields}
    write_json(folder / f"{stem}.json", {**facts, "dtype": dtype.str, "files": known})
    return [folder / name for name in (*known, f"{stem}.json")]


def document_lengths(split: PackedSplit) -> np.ndarray:
    """Tokens of each document of a split."""
    found = [
        np.diff(np.append(split.docs[shard].astype(np.int64), tokens))
        for shard, tokens in enumerate(split.shards.lengths)
    ]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _stretches(tokens: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, COPY_TOKENS):
        yield start, min(COPY_TOKENS, tokens - start)


def _npy(dtype: np.dtype, count: int, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of an .npy file."""
    header = io.BytesIO()
    description = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_2_0(header, description)
    yield header.getvalue()
    yield from chunks


def _write(path: Path, chunks: Iterable[bytes], known: dict[str, dict[str, Any]]) -> None:
    with written_file(path, known) as write:
        for chunk in chunks:
            write(chunk)


@dataclass(frozen=True)
class Import:
    """A file of tokens that is to become a source."""

    name: str
    """What the source will be called."""
    path: Path
    """megatron: PREFIX, PREFIX.bin or PREFIX.idx; numpy: the .npy or .bin."""
    format: FileFormat
    channel: str | None = None
    """None: what the .json beside it says, else the name of the source."""
    split: str = "train"
    dtype: str | None = None
    """Of a bare numpy .bin."""
    tokenizer_fingerprint: str | None = None
    """Of the tokenizer it was made with, where that is known."""


def import_source(
    packed: Path, tokenizer: Tokenizer, asked: Import, shard_tokens: int = SHARD_TOKENS
) -> dict[str, Any]:
    """Make a source of tokens from elsewhere; returns the manifest of the split."""
    tokens, facts = _open_foreign(asked, tokenizer)
    channel = asked.channel or facts.get("channel") or asked.name
    _check_tokenizer(asked, facts, tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    with writing_to(packed):
        _check_name(packed, asked, tokenizer)
        require_free_space(packed, len(tokens) * dtype.itemsize, "the imported tokens")
        plan = plan_shards([tokens.all_lengths], shard_tokens)
        known: dict[str, dict[str, Any]] = {}
        with (
            staged_folder(packed / asked.name / asked.split) as partial,
            progress("import", total=len(tokens), unit="tokens") as bar,
        ):
            tokens.on_tokens = bar.advance
            for number, stretches in enumerate(plan):
                parts = [(tokens, stretch) for stretch in stretches]
                known |= write_shard(partial, number, dtype.str, parts, gids=False, masked=tokens.mask is not None)
            content = {
                **_empty_content(asked.name, asked.split, channel, tokenizer),
                "shards": len(plan),
                "documents": len(tokens.all_lengths),
                "tokens": len(tokens),
                "text_bytes": tokens.text_bytes,
                "max_id": tokens.max_id,
                "loss_mask": tokens.mask is not None,
                "imported": {
                    "format": asked.format,
                    "path": str(asked.path.absolute()),
                    "empty_documents": tokens.empty,
                },
            }
            write_manifest(partial, "packed", fingerprint([content, known]), content, known)
        for other in SPLITS:
            if not (packed / asked.name / other / "manifest.json").is_file():
                with staged_folder(packed / asked.name / other) as partial:
                    empty = {**_empty_content(asked.name, other, channel, tokenizer), "imported": {"format": None}}
                    write_manifest(partial, "packed", fingerprint(empty), empty)
        _write_report_with_imports(packed, tokenizer)
    return read_manifest(packed / asked.name / asked.split, "packed", PACK_COMMAND)


def _empty_content(name: str, split: str, channel: str, tokenizer: Tokenizer) -> dict[str, Any]:
    counts = dict.fromkeys(("shards", "documents", "tokens", "text_bytes", "max_id"), 0)
    return {**split_content(name, split, channel, tokenizer), **counts, "loss_mask": False, "gids": False}


def _write_report_with_imports(packed: Path, tokenizer: Tokenizer) -> None:
    """The sources that belonged together before, and those that were imported."""
    try:
        before = list(packed_report(packed)["sources"])
    except FileNotFoundError:
        before = []
    imported = imported_manifests(packed)
    others = [name for name in before if name not in {manifest["source"] for manifest in imported}]
    packed_here = [read_manifest(packed / name / split, "packed", PACK_COMMAND) for name in others for split in SPLITS]
    write_report(packed, tokenizer.fingerprint, [*packed_here, *imported])


def _check_name(packed: Path, asked: Import, tokenizer: Tokenizer) -> None:
    if not asked.name or "/" in asked.name or asked.name.startswith("."):
        raise UsageError(f"`{asked.name}` cannot be the name of a source. Use letters, digits, dots and dashes.")
    imported = {manifest["source"]: manifest for manifest in imported_manifests(packed)}
    if (packed / asked.name / "train" / "manifest.json").is_file() and asked.name not in imported:
        raise UsageError(f"A packed source `{asked.name}` already exists, made from the corpus. Choose another name.")
    if (packed / REPORT_NAME).is_file():
        stated = packed_report(packed).get("tokenizer")
        if stated not in (None, tokenizer.fingerprint):
            raise BadInputError(
                f"The packed data in {packed} was made with tokenizer {stated[:8]}, but this workspace has "
                f"{tokenizer.fingerprint[:8]}. Run `{PACK_COMMAND}` first."
            )


def _check_tokenizer(asked: Import, facts: dict[str, Any], tokenizer: Tokenizer) -> None:
    theirs = asked.tokenizer_fingerprint or facts.get("tokenizer")
    if theirs is not None and theirs != tokenizer.fingerprint:
        raise BadInputError(
            f"{asked.path} was made with tokenizer {theirs[:8]}, but this workspace has "
            f"{tokenizer.fingerprint[:8]}, where ids mean other pieces of text. Put that tokenizer into the "
            "workspace, or encode the text again."
        )


class ForeignTokens:
    """Tokens from elsewhere, checked as they are read."""

    def __init__(
        self, path: Path, array: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None, tokenizer: Tokenizer
    ) -> None:
        self.path, self.array, self.mask = path, array, mask
        self.all_lengths = lengths[lengths > 0]
        self.empty = int(len(lengths) - len(self.all_lengths))
        self.max_id = self.text_bytes = 0
        self.on_tokens: Callable[[float], None] = lambda _: None
        self._vocab_size = tokenizer.vocab_size
        self._text_bytes_of = _text_bytes_of(tokenizer)

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, end: int) -> np.ndarray:
        """Tokens `start` to `end`, ids checked."""
        ids = np.asarray(self.array[start:end])
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(wrong):
            at = start + int(wrong[0])
            raise BadInputError(
                f"{self.path}: token {at:,} has the id {int(ids[wrong[0]])}, but the tokenizer of this "
                f"workspace has only {self._vocab_size:,} ids. The file was made with another tokenizer, or "
                "--dtype is wrong."
            )
        self.max_id = max(self.max_id, int(ids.max(initial=0)))
        self.text_bytes += int(self._text_bytes_of[ids].sum())
        self.on_tokens(len(ids))
        return ids

    def lengths(self, first: int, end: int) -> np.ndarray:
        """Lengths of documents `first` to `end`."""
        return self.all_lengths[first:end]

    def counts(self, start: int, end: int) -> np.ndarray:
        """1 for each token that counts in the loss."""
        assert self.mask is not None, "only asked for where there is one"
        return (np.asarray(self.mask[start:end]) != 0).astype(np.uint8)


def _text_bytes_of(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text behind each id; control tokens stand for none."""
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    for number in range(tokenizer.vocab_size):
        if number not in tokenizer.control_ids:
            try:
                sizes[number] = len(tokenizer.token_bytes(number))
            except ValueError:  # foreign vocabularies may have gaps
                continue
    return sizes


def _open_foreign(asked: Import, tokenizer: Tokenizer) -> tuple[ForeignTokens, dict[str, Any]]:
    if asked.format == "megatron":
        plain = asked.path.with_suffix("") if asked.path.suffix in (".bin", ".idx") else asked.path
        bin_path, index_path = (plain.with_name(f"{plain.name}{suffix}") for suffix in (".bin", ".idx"))
        for path in (bin_path, index_path):
            if not path.is_file():
                raise BadInputError(
                    f"There is no {path}. Megatron data is a pair of files, PREFIX.bin and PREFIX.idx: give PREFIX."
                )
        dtype, lengths = read_index(index_path, bin_path.stat().st_size)
        return ForeignTokens(bin_path, _mapped(bin_path, dtype), lengths, None, tokenizer), _facts(bin_path)
    path = asked.path
    if not path.is_file():
        raise BadInputError(f"There is no file {path}. Check the path.")
    array = _open_numpy(path, asked.dtype)
    rows = array.shape[0] if array.ndim == 2 else None
    flat = array.reshape(-1)
    mask_path, documents_path = (path.with_suffix(suffix) for suffix in (".mask.npy", ".documents.npy"))
    mask = np.load(mask_path, mmap_mode="r", allow_pickle=False) if mask_path.is_file() else None
    if mask is not None and len(mask) != len(flat):
        raise BadInputError(f"{mask_path} has {len(mask):,} entries, expected one for each of {len(flat):,} tokens.")
    if rows is not None:
        lengths = np.full(rows, array.shape[1], np.int64)
    elif documents_path.is_file():
        lengths = _lengths_of_starts(np.load(documents_path, allow_pickle=False), len(flat), documents_path)
    else:
        lengths = _lengths_by_end(flat, tokenizer.end_id)
    return ForeignTokens(path, flat, lengths, mask, tokenizer), _facts(path)


def _open_numpy(path: Path, dtype: str | None) -> np.ndarray:
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise BadInputError(f"{path} cannot be read as a numpy file ({error}). Copy it again.") from error
    else:
        if dtype is None:
            raise UsageError(f"{path} does not say which type its tokens have: add --dtype uint16 (or int32, …).")
        try:
            kind = np.dtype(dtype).newbyteorder("<")
        except TypeError as error:
            raise UsageError(f"--dtype {dtype} is not a numpy type. Use uint16, int32, uint32 or int64.") from error
        if path.stat().st_size % kind.itemsize:
            raise BadInputError(f"{path} has {path.stat().st_size} bytes, not a multiple of {kind.itemsize} (--dtype).")
        array = _mapped(path, kind)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise BadInputError(
            f"{path} holds {array.dtype} of shape {array.shape}; expected a one- or two-dimensional array of integers."
        )
    return array


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def _lengths_of_starts(starts: np.ndarray, tokens: int, path: Path) -> np.ndarray:
    starts = starts.astype(np.int64)
    if (len(starts) and starts[0] != 0) or (np.diff(starts) < 0).any() or (len(starts) and starts[-1] > tokens):
        raise BadInputError(f"{path} must list where each document starts, rising from 0 to at most {tokens:,}.")
    return np.diff(np.append(starts, tokens)) if len(starts) else np.full(min(1, tokens), tokens, np.int64)


def _lengths_by_end(tokens: np.ndarray, end_id: int) -> np.ndarray:
    """Documents end behind each end token."""
    ends = [
        np.flatnonzero(np.asarray(tokens[start : start + count]) == end_id) + start + 1
        for start, count in _stretches(len(tokens))
    ]
    borders = np.concatenate([np.zeros(1, np.int64), *ends, np.array([len(tokens)], np.int64)])
    return np.diff(np.unique(borders))


def _facts(path: Path) -> dict[str, Any]:
    """What an export of ours wrote beside the tokens."""
    beside = path.with_suffix(".json")
    return read_json_object(beside, "Delete it to import without it.") if beside.is_file() else {}


# PREFIX.bin holds all tokens, one sequence after the other. PREFIX.idx: magic, version (uint64), type of the tokens
# (uint8), sequences (uint64), entries of the document list (uint64); then the length of each sequence (int32), its
# first byte in the .bin (int64), and the document list: the first sequence of each document, and the number of
# sequences (int64). What we write has one sequence per document.

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<QBQQ")
TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of the types that can hold ids."""
UINT16_BELOW = 65_500


def megatron_dtype(vocab_size: int) -> np.dtype:
    """The type Megatron-LM takes for a vocabulary."""
    return np.dtype("<u2" if vocab_size < UINT16_BELOW else "<i4")


def index_bytes(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The .idx of documents of these lengths."""
    code = next(code for code, name in TYPES.items() if np.dtype(name) == dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    return b"".join(
        (
            MAGIC,
            HEADER.pack(VERSION, code, len(lengths), len(lengths) + 1),
            lengths.astype("<i4").tobytes(),
            ((ends - lengths) * dtype.itemsize).astype("<i8").tobytes(),
            np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
        )
    )


def read_index(path: Path, bin_bytes: int) -> tuple[np.dtype, np.ndarray]:
    """The type of the tokens in the .bin beside `path`, and the length of each document in tokens."""
    data = path.read_bytes()
    start = len(MAGIC) + HEADER.size
    if not data.startswith(MAGIC) or len(data) < start:
        raise BadInputError(f"{path} is not a Megatron index: it does not begin with {MAGIC!r}. Check the path.")
    version, code, sequences, entries = HEADER.unpack_from(data, len(MAGIC))
    if version != VERSION:
        raise BadInputError(f"{path} is a Megatron index of version {version}; expected {VERSION}.")
    if code not in TYPES:
        raise BadInputError(f"{path} gives its tokens the type {code}; expected one of {', '.join(map(str, TYPES))}.")
    if len(data) < start + 12 * sequences + 8 * entries:
        raise BadInputError(
            f"{path} has {len(data)} bytes, too few for {sequences} sequences and {entries} documents. Copy it again."
        )
    dtype = np.dtype(TYPES[code])
    lengths = np.frombuffer(data, "<i4", sequences, start).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, start + 4 * sequences)
    documents = np.frombuffer(data, "<i8", entries, start + 12 * sequences)
    ends = np.cumsum(lengths)
    if (pointers != (ends - lengths) * dtype.itemsize).any():
        raise BadInputError(
            f"{path}: the sequences do not follow one another in the .bin file, which is not supported."
        )
    expected = int(ends[-1]) * dtype.itemsize if sequences else 0
    if bin_bytes != expected:
        raise BadInputError(
            f"{path.with_suffix('.bin')} has {bin_bytes} bytes, but its index says {expected}. Copy both files again."
        )
    firsts = documents if entries and documents[-1] == sequences else np.append(documents, sequences)
    if len(firsts) == 1 or firsts[0] != 0 or (np.diff(firsts) < 0).any() or firsts[-1] != sequences:
        raise BadInputError(f"{path}: the document list must rise from 0 to {sequences}.")
    borders = np.concatenate(([0], ends))[firsts]
    return dtype, np.diff(borders)
