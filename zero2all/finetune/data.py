"""Files of conversations, or of pairs of answers -> a packed source with a loss mask, in a folder of its own.

    sft/<run>/
        chat/{train,valid}/       the packed conversations (`pairs/` where they are pairs), each with its best-fit rows
        conversations.json        what was read: forms, counts, what was left out and why; written last
        left_out.jsonl            file, place, reason and detail of what was left out

    read = kept + sum(left_out)

Files are read by the corpus's readers, whatever their format. Left out are rows that are damaged, no conversation (see
`dialogues`), refused by the chat template, the same as one before, or longer than a row. What is held out is chosen by
the text alone, so that it stays the same when data is added.

Pair i is documents 2 i (chosen) and 2 i + 1 (rejected), which stand in one row; only its answers count in the loss.
Of prompts nothing counts; line i of `records.<split>.jsonl` is what rewards know of prompt i.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json, staged_folder, sweep_partials, write_json
from zero2all.common.manifest import fingerprint, is_current, write_manifest
from zero2all.common.progress import progress
from zero2all.common.records import SPLITS
from zero2all.config.finetune import PAIRS, PROMPTS
from zero2all.corpus.listing import InputFile, list_files, require_readable
from zero2all.corpus.readers import NOT_READ, Damaged, Format, ItemOrigin, RawRow, ReaderLimits, plan_units, read_unit
from zero2all.corpus.readers.chats import log_key
from zero2all.finetune import dialogues
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.pieces import COUNTS, LENGTHS, TOKENS
from zero2all.packed.shard_format import open_split, token_dtype
from zero2all.packed.shard_writer import SHARD_TOKENS, PieceTokens, plan_shards, write_shard
from zero2all.packed.writer import split_content, write_report, writing_to
from zero2all.tokenizer.chat import LEARNED_ROLE, Dialogue
from zero2all.tokenizer.load import load_tokenizer
from zero2all.tokenizer.template import ChatPart, ChatTemplate, TemplateError, chat_of

RULES = 1
"""Raise it when the same files would give other tokens."""
SOURCE = "chat"
"""What the packed conversations are called, as a source and as a channel."""
REPORT_NAME, LEFT_OUT_NAME, RECORDS = "conversations.json", "left_out.jsonl", "records"
BATCH = 256
PLACES = 1 << 16


@dataclass(frozen=True)
class DataOptions:
    """How conversations are packed."""

    seq_len: int
    valid_share: float = 0.02
    """Share of the conversations that is held out; of pairs, of the prompts."""
    source: str = SOURCE
    """The name of what is packed: SOURCE, PAIRS or PROMPTS. Of a pair each answer may take half of a row, with its
    prompt."""
    reserved: int = 0
    """Tokens of a row that are kept free for an answer."""
    needs: Sequence[str] = ()
    """What the record of a prompt must have."""

    @property
    def pairs(self) -> bool:
        """Whether these are pairs of answers."""
        return self.source == PAIRS

    @property
    def room(self) -> int:
        """Tokens that a conversation, an answer of a pair or a prompt may have."""
        return self.seq_len // 2 if self.pairs else self.seq_len + 1 - self.reserved


def records_name(split: str) -> str:
    """The file with the records of the prompts of a split."""
    return f"{RECORDS}.{split}.jsonl"


@dataclass
class _Counts:
    """What was read."""

    read: int = 0
    """Rows; of a log, conversations."""
    kept: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """Of each reason the first row."""


def pack_conversations(
    paths: Sequence[Path], tokenizer_folder: Path, folder: Path, options: DataOptions
) -> dict[str, Any]:
    """Pack all conversations in files and folders; returns what `conversations.json` says. Work that is done is not
    done again."""
    inputs = inputs_of(paths, tokenizer_folder, options)
    report_path = folder / REPORT_NAME
    known = read_json(report_path) if report_path.is_file() else {}
    if known.get("inputs") == inputs and all(
        is_current(folder / options.source / each, "packed", inputs) for each in SPLITS
    ):
        return dict(known)
    with writing_to(folder):
        report = _packed(paths, tokenizer_folder, folder, options, inputs)
        write_json(report_path, report)
    return report


def inputs_of(paths: Sequence[Path], tokenizer_folder: Path, options: DataOptions) -> str:
    """The fingerprint of everything that decides what is packed."""
    tokenizer = load_tokenizer(tokenizer_folder)
    stamps = [[file.name, file.size_bytes, file.mtime_ns] for file in _files(paths)]
    template = chat_of(tokenizer_folder, tokenizer)
    chosen = [options.seq_len, options.valid_share, options.source, options.reserved, *options.needs]
    return fingerprint([RULES, stamps, tokenizer.fingerprint, template.source, *chosen])


def _files(paths: Sequence[Path]) -> list[InputFile]:
    for path in paths:
        require_readable(path, str(path))
    return [file for path in paths for file in list_files(path).files]


def _packed(
    paths: Sequence[Path], tokenizer_folder: Path, folder: Path, options: DataOptions, inputs: str
) -> dict[str, Any]:
    """Pack everything anew; returns the report."""
    tokenizer = load_tokenizer(tokenizer_folder)
    template = chat_of(tokenizer_folder, tokenizer)
    report_path = folder / REPORT_NAME
    sweep_partials(report_path)
    report_path.unlink(missing_ok=True)
    counts = _Counts()
    work = folder / ".build"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with open(folder / LEFT_OUT_NAME, "wb") as left_out, _Writers(work, template, options, counts) as writers:
        for file, item in _samples(_files(paths), counts, options):
            writers.add(item, file, left_out)
        writers.flush(left_out)
    if not counts.kept:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.left_out.most_common())
        raise BadInputError(
            f"There is nothing to learn from in {', '.join(map(str, paths))} (read: {counts.read:,}; left out: "
            f"{reasons or 'none'}). {folder / LEFT_OUT_NAME} has each with its reason."
        )
    if not writers.totals["train"]["documents"]:
        raise BadInputError(f"All {counts.kept:,} of what was kept would be held out. Lower --valid-share.")
    written = _Written(folder, options.source, 2 if options.pairs else 1, tokenizer, inputs)
    manifests = [written.split(split, writers.totals[split], work) for split in SPLITS]
    for split in SPLITS if options.source == PROMPTS else ():
        (work / split / RECORDS).replace(folder / records_name(split))
    shutil.rmtree(work)
    rows = {}
    for split in SPLITS:
        opened = open_split(folder, options.source, split)
        if opened.tokens:
            rows[split] = build_best_fit(opened, options.seq_len)["rows"]
    write_report(folder, tokenizer.fingerprint, manifests)
    return {
        "inputs": inputs,
        "read": counts.read,
        "kept": counts.kept,
        "forms": dict(counts.forms),
        "left_out": dict(counts.left_out.most_common()),
        "examples": counts.examples,
        "rows": rows,
        "tokens": {split: writers.totals[split]["tokens"] for split in SPLITS},
        "learned_tokens": {split: writers.totals[split]["learned"] for split in SPLITS},
    }


# ---- reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Item:
    """A row, or all rows of a conversation, and where it is."""

    place: str
    sample: dialogues.Sample | None
    reason: str = ""
    detail: str = ""


def _samples(files: Sequence[Any], counts: _Counts, options: DataOptions) -> Iterator[tuple[str, _Item]]:
    """Every conversation, pair or prompt of every file, or why a row is none."""
    limits = ReaderLimits()
    shape, read = {
        SOURCE: (dialogues.form_of, lambda fields, form: dialogues.Sample((dialogues.dialogue_of(fields, form),))),
        PAIRS: (dialogues.pair_form, dialogues.pair_of),
        PROMPTS: (dialogues.prompt_form, lambda fields, form: dialogues.prompt_of(fields, form, options.needs)),
    }[options.source]
    with progress("conversations", total=sum(file.size_bytes for file in files), unit="B") as bar:
        for file in files:
            log: dict[Any, list[RawRow]] = {}
            origin: ItemOrigin | None = None
            for unit in plan_units(file, limits):
                if unit.format in NOT_READ and unit.format is not Format.EMPTY:
                    yield file.name, _Item("", None, "not_read", f"{unit.format} {unit.note}")
                for item in read_unit(unit, limits, bar.advance):
                    if item.origin is not origin:  # another member of an archive
                        origin = item.origin
                        yield from ((file.name, each) for each in _logged(log))
                    if isinstance(item, Damaged):
                        yield file.name, _Item(item.place, None, item.reason, item.detail)
                        continue
                    form = shape(item.fields)
                    counts.forms[form or "none"] += 1
                    if form == "log":
                        log.setdefault(log_key(item.fields), []).append(item)
                    else:
                        yield file.name, _item(item.place, lambda item=item, form=form: read(item.fields, form))
            for each in _logged(log):
                yield file.name, each


def _logged(log: dict[Any, list[RawRow]]) -> Iterator[_Item]:
    """The conversations of a file with a row per message; rows are counted as one each."""
    for rows in log.values():
        yield _item(
            rows[0].place, lambda rows=rows: dialogues.Sample((dialogues.log_dialogue([row.fields for row in rows]),))
        )
    log.clear()


def _item(place: str, read: Any) -> _Item:
    try:
        return _Item(place, read())
    except dialogues.RowError as error:
        return _Item(place, None, error.reason, str(error))


# ---- writing --------------------------------------------------------------------------------------------------


class _Writers:
    """Tokens of both splits, as they are encoded."""

    def __init__(self, work: Path, template: ChatTemplate, options: DataOptions, counts: _Counts) -> None:
        self.template, self.options, self.counts = template, options, counts
        self.tokenizer = template.tokenizer
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        names = ("documents", "tokens", "learned", "text_bytes", "max_id", "conversations")
        self.totals = {split: dict.fromkeys(names, 0) for split in SPLITS}
        self._files: dict[tuple[str, str], IO[bytes]] = {}
        self._work = work
        self._seen: set[bytes] = set()
        self._waiting: list[tuple[str, str, str, dialogues.Sample, list[list[ChatPart]]]] = []

    def __enter__(self) -> Self:
        for split in SPLITS:
            (self._work / split).mkdir()
            for name in (TOKENS, LENGTHS, COUNTS, RECORDS):
                self._files[split, name] = open(self._work / split / name, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, item: _Item, file: str, left_out: IO[bytes]) -> None:
        """Take a conversation, or note why it is left out."""
        self.counts.read += 1
        if item.sample is None:
            self._leave_out(left_out, file, item.place, item.reason, item.detail)
            return
        try:
            parts = [self._parts(each, item.sample) for each in item.sample.dialogues]
        except TemplateError as error:
            self._leave_out(left_out, file, item.place, "template", str(error))
            return
        digest = _digest(parts)
        if digest in self._seen:
            self._leave_out(left_out, file, item.place, "duplicate", "")
            return
        self._seen.add(digest)
        chosen = _digest([_prompt(parts[0])]) if item.sample.prompt else digest  # no prompt stands on both sides
        is_valid = int.from_bytes(chosen[:2], "little") < self.options.valid_share * PLACES
        self._waiting.append((SPLITS[is_valid], file, item.place, item.sample, parts))
        if len(self._waiting) >= BATCH:
            self.flush(left_out)

    def _parts(self, dialogue: Dialogue, sample: dialogues.Sample) -> list[ChatPart]:
        if sample.record is not None:
            return self.template.prompt_parts(dialogue)
        return _learned(self.template.parts(dialogue), dialogue, sample)

    def flush(self, left_out: IO[bytes]) -> None:
        """Encode and write what waits."""
        texts = [p.text for *_, pair in self._waiting for parts in pair for p in parts if not p.is_control]
        encoded = iter(self.tokenizer.encode_batch(texts))
        control = self.tokenizer.control
        for split, file, place, sample, pair in self._waiting:
            documents = []
            for parts in pair:
                ids = [[control[part.text]] if part.is_control else next(encoded) for part in parts]
                tokens = np.fromiter((number for each in ids for number in each), self.dtype)
                masks = [np.full(len(each), part.counts, np.uint8) for each, part in zip(ids, parts, strict=True)]
                documents.append((tokens, np.concatenate(masks)))
            if problem := self._problem(documents):
                self._leave_out(left_out, file, place, *problem)
                continue
            totals = self.totals[split]
            for tokens, mask in documents:
                self._files[split, TOKENS].write(tokens.tobytes())
                self._files[split, COUNTS].write(mask.tobytes())
                self._files[split, LENGTHS].write(np.array([len(tokens)], "<u4").tobytes())
                totals["documents"] += 1
                totals["conversations"] += 1
                totals["tokens"] += len(tokens)
                totals["learned"] += int(mask.sum())
                totals["max_id"] = max(totals["max_id"], int(tokens.max()))
            said = (text for each in sample.dialogues for text in dialogues.texts_of(each))
            totals["text_bytes"] += sum(len(text.encode("utf-8", "replace")) for text in said)
            if sample.record is not None:
                line = json.dumps(sample.record, default=str, ensure_ascii=False)  # parquet has dates and bytes
                self._files[split, RECORDS].write(line.encode("utf-8", "replace") + b"\n")
            self.counts.kept += 1
        self._waiting.clear()

    def _problem(self, documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[str, str] | None:
        """Why a conversation or a pair cannot be packed, as reason and detail."""
        room = self.options.room
        longest = max(len(tokens) for tokens, _ in documents)
        if longest > room:
            return "too_long", f"{longest:,} tokens; a row has room for {room:,}"
        if self.options.pairs:
            if np.array_equal(documents[0][0], documents[1][0]):
                return "equal_answers", "the same tokens"
            chosen, rejected = (tokens[: int(mask.argmax())] for tokens, mask in documents)
            if not np.array_equal(chosen, rejected):
                return "template", "The template lays the prompt out differently for the two answers."
        return None

    def _leave_out(self, left_out: IO[bytes], file: str, place: str, reason: str, detail: str) -> None:
        self.counts.left_out[reason] += 1
        where = f"{file}, {place}" if place else file
        self.counts.examples.setdefault(reason, f"{where}: {detail}" if detail else where)
        left_out.write(jsonio.dumps_line({"file": file, "place": place, "reason": reason, "detail": detail[:500]}))


def _learned(parts: list[ChatPart], dialogue: Dialogue, sample: dialogues.Sample) -> list[ChatPart]:
    """The parts of a conversation, of which those of its prompt do not count, whoever wrote them."""
    if not sample.prompt:
        return parts
    counts = [False, *(part.counts for part in parts)]
    begins = [here and not before for before, here in pairwise(counts)]
    answers = [number for number, message in enumerate(dialogue.messages) if message.role == LEARNED_ROLE]
    if sum(begins) != len(answers):
        raise TemplateError("The template does not show each answer by itself, so that the last cannot be told apart.")
    skipped = sum(number < sample.prompt for number in answers)
    return [
        part._replace(counts=part.counts and at > skipped) for at, part in zip(accumulate(begins), parts, strict=True)
    ]


def _prompt(parts: Sequence[ChatPart]) -> list[ChatPart]:
    return list(takewhile(lambda part: not part.counts, parts))


def _digest(parts: Sequence[Sequence[ChatPart]]) -> bytes:
    text = "\0".join(part.text for each in parts for part in each)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


@dataclass(frozen=True)
class _Written:
    """What is written from what was encoded."""

    folder: Path
    source: str
    together: int
    """Documents that stand in one row."""
    tokenizer: Any
    inputs: str

    def split(self, split: str, totals: Mapping[str, int], work: Path) -> dict[str, Any]:
        """Write a split; returns its manifest."""
        dtype, together = token_dtype(self.tokenizer.vocab_size), self.together
        lengths = np.fromfile(work / split / LENGTHS, "<u4")
        plan = plan_shards([lengths.reshape(-1, together).sum(axis=1)], SHARD_TOKENS)
        known: dict[str, dict[str, Any]] = {}
        with staged_folder(self.folder / self.source / split) as partial:
            for number, stretches in enumerate(plan):
                of_documents = [
                    each._replace(
                        first_document=each.first_document * together, end_document=each.end_document * together
                    )
                    for each in stretches
                ]
                parts = [(PieceTokens(work / split, dtype.str), stretch) for stretch in of_documents]
                known |= write_shard(partial, number, dtype.str, parts, gids=False, masked=True)
            counted = {name: count for name, count in totals.items() if name != "learned"}
            facts = {"shards": len(plan), **counted, "loss_mask": True, "gids": False}
            content = {**split_content(self.source, split, self.source, self.tokenizer), **facts}
            content |= {"together": together} if together > 1 else {}
            write_manifest(partial, "packed", self.inputs, content, known)
        return content
