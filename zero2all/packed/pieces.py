"""Pieces: the unit of work of packing. Some records of one corpus shard in, their tokens out.

    .build/<inputs>/piece-00000/
        tokens.bin        the documents one after the other, in the split's own type
        lengths.u4        tokens of each document
        gids.u8           gid of each document's record; all bits set where the corpus has none (plain text shards)
        counts.u1         one byte per token, 1 where it counts in the loss; only where a conversation is among them
        facts.json        documents, tokens, unknown_tokens, text_bytes, max_id, conversations; crc32c of the bytes

What a piece holds depends on its task alone, and it appears whole or not at all, so a packing that was killed goes on
with the pieces that are there.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import advance
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import crc32c_of, read_json, staged_folder, write_json
from zero2all.common.records import READERS, training_text
from zero2all.packed.shard_format import NO_GID, token_dtype
from zero2all.tokenizer.chat import ROLES, Dialogue, Message
from zero2all.tokenizer.encoders import EncodedBatch, Encoder, EncoderConfig, EncoderName, open_encoder
from zero2all.tokenizer.load import Tokenizer, load_tokenizer
from zero2all.tokenizer.template import ChatPart, ChatTemplate, chat_of

PIECE_BYTES = 32 << 20
"""About as much of a corpus shard is one task."""
READ_BYTES = 1 << 20
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
"""A batch is encoded after the document that takes it past either of these."""

TOKENS, LENGTHS, GIDS, COUNTS, FACTS = "tokens.bin", "lengths.u4", "gids.u8", "counts.u1", "facts.json"


@dataclass(frozen=True)
class PieceTask:
    """Everything a worker needs to make one piece."""

    part: Path
    """A shard of the corpus."""
    start: int
    end: int
    """Which bytes of it; records begin and end there. Shards that cannot be cut are taken whole."""
    source: str
    template: str
    """How its records become training text."""
    folder: Path
    tokenizer: Path
    tokenizer_fingerprint: str
    encoder: EncoderName
    learn_prompts: bool


def cut_part(part: Path, size_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """Where a corpus shard is cut into pieces: behind a line, near every multiple of `piece_bytes`."""
    if part.suffix != ".jsonl" or size_bytes <= piece_bytes:
        return [(0, size_bytes)]
    cuts = [0]
    with open(part, "rb") as file:
        for target in range(piece_bytes, size_bytes, piece_bytes):
            if target > cuts[-1]:
                file.seek(target - 1)
                file.readline()
                cuts.append(file.tell())
    cuts = [cut for cut in dict.fromkeys(cuts) if cut < size_bytes]
    return list(zip(cuts, [*cuts[1:], size_bytes], strict=True))


def make_piece(task: PieceTask) -> dict[str, Any]:
    """Write one piece, unless an earlier attempt did; returns its facts."""
    if (task.folder / FACTS).is_file():
        advance(task.end - task.start)
    else:
        tokenizer, encoder = _tools(task)
        with staged_folder(task.folder) as partial:
            _write_piece(task, tokenizer, encoder, partial)
    facts: dict[str, Any] = read_json(task.folder / FACTS)
    return facts


# ---- tools ----------------------------------------------------------------------------------------------------

_kept_tools: dict[tuple[str, str, str], tuple[Tokenizer, Encoder]] = {}
"""Of this process: opening them takes longer than a small piece."""


def keep_tools(folder: Path, tokenizer: Tokenizer, encoder: Encoder) -> None:
    """Tasks that run in this process use these."""
    _kept_tools.clear()
    _kept_tools[str(folder), tokenizer.fingerprint, encoder.name] = tokenizer, encoder


def _tools(task: PieceTask) -> tuple[Tokenizer, Encoder]:
    key = (str(task.tokenizer), task.tokenizer_fingerprint, task.encoder)
    if key not in _kept_tools:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # in a worker, of which there is one per core
        tokenizer = load_tokenizer(task.tokenizer)
        if tokenizer.fingerprint != task.tokenizer_fingerprint:
            raise BadInputError(f"The tokenizer in {task.tokenizer} was changed while packing. Run `z2a pack` again.")
        keep_tools(task.tokenizer, tokenizer, open_encoder(tokenizer, EncoderConfig(task.encoder, True, threads=1)))
    return _kept_tools[key]


# ---- reading --------------------------------------------------------------------------------------------------


class UnencodedDocument(NamedTuple):
    """A record, ready to be encoded."""

    gid: int
    texts: list[str]
    """What is encoded, each by itself."""
    parts: list[ChatPart] | None
    """Of a conversation; None: plain text, the only one of `texts`."""


def _records(part: Path, start: int, end: int, source: str) -> Iterator[dict[str, Any]]:
    if part.suffix != ".jsonl":
        yield from READERS[part.name.partition(".")[2]](part, source)
        advance(end - start)
        return
    told, at = 0, start
    with open(part, "rb", buffering=READ_BYTES) as file:
        file.seek(start)
        while at < end:
            line = file.readline()
            try:
                record = jsonio.loads(line)
            except ValueError as error:
                raise BadInputError(
                    f"{part} is damaged: the line at byte {at} is not JSON ({error}). The shard was changed "
                    "after it was written. Run `z2a corpus build` again with the same sources: it rewrites "
                    "the source."
                ) from error
            yield record
            at += len(line)
            if at - start - told > READ_BYTES:
                advance(at - start - told)
                told = at - start
    advance(end - start - told)


def document_batches(
    part: Path, start: int, end: int, source: str, template: str, chat: Callable[[], ChatTemplate] | None = None
) -> Iterator[list[UnencodedDocument]]:
    """The documents in some bytes of a corpus shard (see `cut_part`), a batch at a time; tells `advance` the bytes.
    Without `chat`, of conversations the texts of the messages alone."""
    batch: list[UnencodedDocument] = []
    characters = 0
    for record in _records(part, start, end, source):
        gid = record.get("gid", NO_GID)
        where = f"{part}, record gid {gid}"
        turns, parts = turns_of(record, where), None
        if turns is None:
            texts = [training_text(record, template)]
        elif chat is None:
            texts = [turn.text for turn in turns]
        else:
            tools = [tool for tool in record["others"].get("tools") or () if isinstance(tool, dict)]
            parts = _laid_out(chat(), Dialogue(turns, tools), where)
            texts = [each.text for each in parts if not each.is_control]
        batch.append(UnencodedDocument(gid, texts, parts))
        characters += sum(map(len, texts))
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _laid_out(chat: ChatTemplate, dialogue: Dialogue, where: str) -> list[ChatPart]:
    try:
        return chat.parts(dialogue)
    except UsageError as error:
        raise BadInputError(f"{where}: {error}") from error


# ---- writing --------------------------------------------------------------------------------------------------


def _write_piece(task: PieceTask, tokenizer: Tokenizer, encoder: Encoder, folder: Path) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    names = ("documents", "tokens", "unknown_tokens", "text_bytes", "max_id", "conversations")
    totals = dict.fromkeys(names, 0)
    crc32c = crc32c_of(task.part, task.start, task.end)  # about 1 % of the work; what follows comes from the page cache

    @cache
    def chat() -> ChatTemplate:
        try:
            return chat_of(task.tokenizer, tokenizer)
        except UsageError as error:
            raise BadInputError(f"The corpus has conversations. {error}") from error

    gids: list[int] = []
    all_lengths: list[np.ndarray] = []
    with open(folder / TOKENS, "wb") as tokens_file, open(folder / COUNTS, "wb") as counts_file:
        for batch in document_batches(task.part, task.start, task.end, task.source, task.template, chat):
            texts = [text for document in batch for text in document.texts]
            encoded = encoder.encode_batch(texts)
            largest = int(encoded.ids.max(initial=0))
            if largest >= tokenizer.vocab_size:
                raise BadInputError(
                    f"The encoder {encoder.name} gave the id {largest}, but the tokenizer has only "
                    f"{tokenizer.vocab_size} ids."
                )
            conversations = sum(document.parts is not None for document in batch)
            if conversations:
                tokens, lengths, counts = _mixed_tokens(batch, encoded, tokenizer)
            else:
                tokens, lengths = _plain_tokens(encoded, tokenizer, dtype)
                counts = None
            if conversations and not totals["conversations"]:  # what came before was plain text
                for first in range(0, totals["tokens"], 1 << 20):
                    counts_file.write(b"\1" * min(1 << 20, totals["tokens"] - first))
            totals["conversations"] += conversations
            if totals["conversations"]:
                counts_file.write((np.ones(len(tokens), np.uint8) if counts is None else counts).tobytes())
            tokens_file.write(tokens.astype(dtype, copy=False).data)
            all_lengths.append(lengths)
            gids += [document.gid for document in batch]
            totals["documents"] += len(batch)
            totals["tokens"] += len(tokens)
            if tokenizer.unknown_id is not None:
                totals["unknown_tokens"] += int(np.count_nonzero(encoded.ids == tokenizer.unknown_id))
            marks = int(tokens.max()) if conversations else max(tokenizer.end_id, tokenizer.begin_id or 0)
            totals["max_id"] = max(totals["max_id"], largest, marks)
            totals["text_bytes"] += sum(map(_utf8_bytes, texts))
    if not totals["conversations"] or task.learn_prompts:
        (folder / COUNTS).unlink()
    (folder / LENGTHS).write_bytes(b"".join(lengths.astype("<u4").tobytes() for lengths in all_lengths))
    (folder / GIDS).write_bytes(np.array(gids, dtype="<u8").tobytes())
    write_json(folder / FACTS, {**totals, "crc32c": crc32c})


def _plain_tokens(encoded: EncodedBatch, tokenizer: Tokenizer, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Every text between its begin and end: all tokens, and how many each document has."""
    begin = tokenizer.begin_id  # imported tokenizers may have none
    lengths = np.diff(encoded.offsets) + (1 if begin is None else 2)
    ends = np.cumsum(lengths)
    tokens = np.empty(int(ends[-1]), dtype)
    is_text = np.ones(len(tokens), bool)
    is_text[ends - 1] = False
    tokens[ends - 1] = tokenizer.end_id
    if begin is not None:
        is_text[ends - lengths] = False
        tokens[ends - lengths] = begin
    tokens[is_text] = encoded.ids
    return tokens, lengths


def _mixed_tokens(
    batch: Sequence[UnencodedDocument], encoded: EncodedBatch, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same where conversations are among the documents, and which tokens count in the loss."""
    begin = [] if tokenizer.begin_id is None else [ChatPart(_name(tokenizer, tokenizer.begin_id), True, True)]
    end = ChatPart(_name(tokenizer, tokenizer.end_id), True, True)
    tokens: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    lengths = []
    text = 0
    for document in batch:
        is_plain = document.parts is None
        parts = document.parts or [*begin, ChatPart("", False, True)]
        size = 0
        for part in (*parts, end._replace(counts=is_plain)):
            if part.is_control:
                ids = np.array([tokenizer.control[part.text]], np.uint32)
            else:
                ids = encoded.ids[encoded.offsets[text] : encoded.offsets[text + 1]]
                text += 1
            tokens.append(ids)
            counts.append(np.full(len(ids), part.counts, np.uint8))
            size += len(ids)
        lengths.append(size)
    return np.concatenate(tokens), np.array(lengths, np.int64), np.concatenate(counts)


def _name(tokenizer: Tokenizer, number: int) -> str:
    return next(name for name, each in tokenizer.control.items() if each == number)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


# Conversations: instruction data, packed as the messages of a chat.
#
# A record is a conversation when its `others.messages` is a list of `{"role": …, "content": …}`, or its
# `others.conversations` one of `{"from": …, "value": …}`, as ShareGPT writes it. It becomes
#
#     <|begin_of_text|> <|message_start|> user\n…text… <|message_end|> … assistant\n… <|message_end|> <|end_of_text|>
#
# or what the chat template of an imported tokenizer makes of it. The marks are control ids, which no text can spell.
# Counted in the loss is what the assistant writes: its text and the mark that ends its message.


ROLE_NAMES = {
    **{"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "function": "tool"},
    **{"developer": "system", "ai": "assistant", "model": "assistant", "observation": "tool", "ipython": "tool"},
    **{"function_call": "assistant", "function_response": "tool", "customer": "user", "agent": "assistant"},
    **{role: role for role in ROLES},
}
"""What roles are called elsewhere."""
FORMS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Field of `others` -> what a message calls its role and its text."""


def turns_of(record: Mapping[str, Any], where: str) -> list[Message] | None:
    """The messages of a record; None when it is plain text. `where` names the record if its messages are damaged."""
    others = record.get("others") or {}
    for field, (role_key, text_key) in FORMS.items():
        messages = others.get(field)
        if isinstance(messages, list) and messages and isinstance(messages[0], dict) and role_key in messages[0]:
            places = (f"{where}, others.{field}[{n}]" for n in range(len(messages)))
            return [_turn(message, role_key, text_key, place) for message, place in zip(messages, places, strict=True)]
    return None


def _turn(message: Any, role_key: str, text_key: str, where: str) -> Message:
    given = without_nulls(message) if isinstance(message, dict) else {}
    name, text, calls = given.get(role_key), given.get(text_key), given.get("tool_calls", [])
    role = ROLE_NAMES.get(str(name).strip().lower(), name)
    text = "" if text is None and calls else text
    if role not in ROLES:
        raise BadInputError(
            f"{where}: the role is {name!r}, expected one of {', '.join(ROLES)}. Correct it and build the corpus again."
        )
    thought = given.get("reasoning_content", "")
    for key, value, kind in ((text_key, text, str), ("tool_calls", calls, list), ("reasoning_content", thought, str)):
        if not isinstance(value, kind):
            found, expected = type(value).__name__, "text" if kind is str else "a list"
            raise BadInputError(
                f"{where}: `{key}` is {found}, expected {expected}. Correct it and build the corpus again."
            )
    return Message(str(role), str(text), thought, tuple(calls))


def without_nulls(value: Any) -> Any:
    """Arrow fills keys that a row does not have with null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
