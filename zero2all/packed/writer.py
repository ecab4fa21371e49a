"""Corpus shards and a tokenizer in, token shards out.

    pieces    some records of a corpus shard -> their tokens, in parallel                             pieces.py
    shards    pieces -> numbered shards with their document index, in parallel                        shards.py
    commit    manifest last, then the split appears under its name; `report.json` when all have

Each document becomes <|begin_of_text|>, its tokens, <|end_of_text|>; documents follow one another without padding.
Everything before the commit lies under `packed/.build/<inputs>/`. A packing that was killed continues with what is
there, and writes the same bytes whatever the number of workers. Corpus shards are checked as they are read; packing
again checks what is there, and packs a split anew where the corpus, the tokenizer or a byte of it has changed.
"""

import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import EngineConfig, TaskEngine, open_engine
from zero2all.common.errors import BadInputError
from zero2all.common.files import (
    MANIFEST_NAME,
    PARTIAL_MARK,
    fsync_folder,
    joined_crc32c,
    put_in_place,
    read_json,
    require_free_space,
    sweep_partials,
    write_json,
)
from zero2all.common.lock import folder_lock
from zero2all.common.manifest import (
    FileCheck,
    checks_of_current,
    damaged_files,
    file_checks,
    fingerprint,
    read_manifest,
    write_manifest,
)
from zero2all.common.progress import progress, say
from zero2all.common.records import SPLITS, TITLE_AND_TEXT, corpus_sources, iter_records, text_template, training_text
from zero2all.packed.bestfit import best_fit_folder, build_best_fit
from zero2all.packed.pieces import COUNTS, LENGTHS, PIECE_BYTES, PieceTask, cut_part, keep_tools, make_piece
from zero2all.packed.shard_format import PACK_COMMAND, REPORT_NAME, open_split, token_dtype
from zero2all.packed.shard_writer import SHARD_TOKENS, TokenShardTask, plan_shards, write_shard_of_pieces
from zero2all.tokenizer.encoders import Encoder, EncoderConfig, open_encoder
from zero2all.tokenizer.load import Tokenizer, load_tokenizer

RULES = 2
"""Raise it when packing changes what it writes from the same corpus and tokenizer."""
BUILD_NAME = ".build"
PRELOADED = ("zero2all.packed.writer",)
"""What worker processes need."""
SMALL_BYTES = 8_000_000
"""Below this much text one process is faster than starting several."""
SAMPLE_DOCUMENTS = 64
SAMPLE_CHARACTERS = 100_000
"""The first documents of each source, up to these limits, on which an encoder has to agree with the reference."""
DISK_MARGIN_BYTES = 16 << 20


@dataclass(frozen=True)
class PackOptions:
    """What a person may choose about packing."""

    learn_prompts: bool = False
    """Of conversations, count all tokens in the loss and not only what the assistant writes."""
    best_fit: tuple[int, ...] = ()
    """Sequence lengths for which best-fit indexes are built (see `packed.bestfit`)."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """What turns text into ids; the ids do not depend on it."""
    shard_tokens: int = SHARD_TOKENS
    """A shard is closed after the document that takes it past this many tokens."""
    piece_bytes: int = PIECE_BYTES
    """About as much of a corpus shard is one task."""


@dataclass(frozen=True)
class _Plan:
    """One split of one source, and what its packed form is made from."""

    source: str
    split: str
    channel: str
    folder: Path
    work: Path
    """Where it is prepared."""
    inputs: str
    parts: dict[Path, dict[str, Any]]
    """Corpus shards, each with its size and crc32c."""
    template: str
    """How its records become training text."""

    @property
    def corpus_bytes(self) -> int:
        return sum(int(part["bytes"]) for part in self.parts.values())


def pack_corpus(
    corpus: Path,
    tokenizer_folder: Path,
    packed: Path,
    options: PackOptions | None = None,
    engine: EngineConfig | None = None,
) -> dict[str, dict[str, Any]]:
    """Pack every split of every source; returns the manifests by 'source/split'."""
    options = options or PackOptions()
    corpus, tokenizer_folder, packed = (path.absolute() for path in (corpus, tokenizer_folder, packed))
    sources = corpus_sources(corpus)
    tokenizer = load_tokenizer(tokenizer_folder)
    with writing_to(packed):
        imported = _imported_sources(packed, sources, tokenizer)
        plans = _make_plans(corpus, sources, packed, tokenizer, options)
        for plan in plans:
            sweep_partials(plan.folder)
        engine = engine or EngineConfig()
        stale, lost = _find_stale(plans, imported, packed, engine.workers)
        indexes = [(plan, seq_len) for plan in plans for seq_len in options.best_fit]
        indexes += [index for index in lost if index not in indexes]
        _sweep_builds(packed, stale)
        if stale or indexes:
            with open_engine(_engine_for(engine, plans), PRELOADED) as opened:
                if stale:
                    for plan in stale:
                        _check_sizes(plan)
                    needed = sum(plan.corpus_bytes for plan in stale) + max(plan.corpus_bytes for plan in stale)
                    require_free_space(packed, needed + DISK_MARGIN_BYTES, "the packed tokens")
                    (packed / REPORT_NAME).unlink(missing_ok=True)
                    encoder = _choose_encoder(corpus, plans, tokenizer, options)
                    keep_tools(tokenizer_folder, tokenizer, encoder)
                    _pack(stale, tokenizer_folder, tokenizer, encoder, options, opened)
                _build_indexes(packed, indexes, opened)
        _sweep_builds(packed, [])
        results = {f"{plan.source}/{plan.split}": read_manifest(plan.folder, "packed", PACK_COMMAND) for plan in plans}
        if not any(result["tokens"] for result in results.values()):
            raise BadInputError(f"The corpus in {corpus} has no text to pack. Build it again from other sources.")
        write_report(packed, tokenizer.fingerprint, [*results.values(), *imported])
    return results


def writing_to(packed: Path) -> AbstractContextManager[None]:
    """Keep every other packing or import out of `packed`."""
    packed.mkdir(parents=True, exist_ok=True)
    return folder_lock(packed, f"Another process is packing in {packed}. Wait for it, or choose another --work.")


def _make_plans(
    corpus: Path, sources: dict[str, dict[str, Any]], packed: Path, tokenizer: Tokenizer, options: PackOptions
) -> list[_Plan]:
    plans = []
    for name, manifest in sources.items():
        for split in SPLITS:
            files = {part: file for part, file in manifest["files"].items() if part.startswith(f"{split}/")}
            decisive = {
                "rules": RULES,
                "files": files,
                "channel": manifest["channel"],
                "tokenizer": tokenizer.fingerprint,
                "shard_tokens": options.shard_tokens,
                "learn_prompts": options.learn_prompts,
            }
            template = text_template(manifest)
            if template != TITLE_AND_TEXT:
                decisive["training_text"] = template
            inputs = fingerprint(decisive)
            # Two sources may hold the same text; each is prepared by itself.
            work = packed / BUILD_NAME / fingerprint([name, split, inputs, options.piece_bytes, "crc32c"])
            parts = {corpus / name / part: file for part, file in sorted(files.items())}
            plans.append(_Plan(name, split, manifest["channel"], packed / name / split, work, inputs, parts, template))
    return plans


def _find_stale(
    plans: Sequence[_Plan], imported: Sequence[dict[str, Any]], packed: Path, workers: int | None
) -> tuple[list[_Plan], list[tuple[_Plan, int]]]:
    """The splits to be packed, because of other inputs or a damaged file, and the best-fit indexes lost by damage."""
    current = {plan.folder: plan for plan in plans}
    checks: list[FileCheck] = []
    for plan in plans:
        found = checks_of_current(plan.folder, "packed", plan.inputs)
        if found is None:
            del current[plan.folder]
        else:
            checks += found
    indexes = [index for folder in current for index in sorted(folder.glob("best-fit-*")) if _is_index(index)]
    for folder in [*indexes, *(packed / manifest["source"] / manifest["split"] for manifest in imported)]:
        checks += file_checks(folder, read_json(folder / MANIFEST_NAME))
    damaged: set[Path] = set()
    for check, problem in damaged_files(checks, workers):
        if check.path.parent not in damaged:
            damaged.add(check.path.parent)
            _say_damaged(problem, check.path.parent, current)
    lost = []
    for index in indexes:
        if damaged & {index, index.parent}:
            lost.append((current[index.parent], int(index.name.removeprefix("best-fit-"))))
            shutil.rmtree(index)
    return [plan for plan in plans if plan.folder not in current or plan.folder in damaged], lost


def _is_index(folder: Path) -> bool:
    return folder.name.removeprefix("best-fit-").isdigit() and (folder / MANIFEST_NAME).is_file()


def _say_damaged(problem: str, folder: Path, current: Mapping[Path, _Plan]) -> None:
    """Say that a damaged folder is written again; an error for an imported one."""
    split = folder.parent if folder.parent in current else folder
    if split not in current:
        raise BadInputError(
            f"{problem}. It belongs to an imported source, which cannot be packed from the corpus: delete "
            f"{folder} and import it again."
        )
    name = folder.relative_to(split.parent.parent)
    say(f"pack: {problem}. {name} is written again.")


def _check_sizes(plan: _Plan) -> None:
    """Refuse corpus shards that were cut, before anything is read."""
    for part, expected in plan.parts.items():
        size = part.stat().st_size if part.is_file() else None
        if size != expected["bytes"]:
            if size is None:
                raise _damaged_part(f"{part} is missing")
            raise _damaged_part(f"{part} has {size} bytes, its manifest says {expected['bytes']}")


def _damaged_part(problem: str) -> BadInputError:
    return BadInputError(
        f"{problem}. Run `z2a corpus build` again with the same sources: it finds the damage and rewrites the "
        f"source. Then run `{PACK_COMMAND}` again."
    )


def _engine_for(config: EngineConfig, plans: Sequence[_Plan]) -> EngineConfig:
    is_small = sum(plan.corpus_bytes for plan in plans) < SMALL_BYTES
    return EngineConfig("local", 1) if config.kind == "local" and config.workers is None and is_small else config


def _sweep_builds(packed: Path, wanted: Sequence[_Plan]) -> None:
    """Remove what was prepared for something else than `wanted`."""
    kept = {plan.work for plan in wanted}
    for folder in (packed / BUILD_NAME).glob("*"):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    if not wanted:
        shutil.rmtree(packed / BUILD_NAME, ignore_errors=True)


def imported_manifests(packed: Path) -> list[dict[str, Any]]:
    """Manifests of the splits that came in by `z2a data import`."""
    paths = [path for path in sorted(packed.glob("*/*/manifest.json")) if path.parent.name in SPLITS]
    return [manifest for manifest in map(read_json, paths) if manifest.get("imported")]


def _imported_sources(packed: Path, sources: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The imported splits, which stay beside those of the corpus; an error where they cannot."""
    found = imported_manifests(packed)
    for manifest in found:
        name, folder = manifest["source"], packed / manifest["source"]
        if name in sources:
            raise BadInputError(
                f"The source `{name}` is in the corpus, and {folder} was imported under the same name. Delete {folder} "
                f"and import it under another name."
            )
        if manifest["tokenizer"] != tokenizer.fingerprint:
            raise BadInputError(
                f"The imported source {folder} was made with tokenizer {manifest['tokenizer'][:8]}, but this "
                f"workspace has {tokenizer.fingerprint[:8]}. All sources of a workspace share one tokenizer: "
                f"delete {folder}, or restore the tokenizer it was made with."
            )
    return found


def _choose_encoder(corpus: Path, plans: Sequence[_Plan], tokenizer: Tokenizer, options: PackOptions) -> Encoder:
    """By all splits, not only those to be written, so that a repaired one has the manifest of a new one."""
    templates = {plan.source: plan.template for plan in plans}
    sample = [text for source, template in templates.items() for text in first_texts(corpus, source, template)]
    encoder = open_encoder(tokenizer, options.encoder, sample, sum(plan.corpus_bytes for plan in plans))
    if options.encoder.name not in ("auto", encoder.name):
        say(f"pack: the encoder {options.encoder.name} cannot be used, so {encoder.name} is used: {encoder.reason}")
    return encoder


def first_texts(corpus: Path, source: str, template: str) -> Iterator[str]:
    """The beginning of a source, on which an encoder is compared with the reference."""
    characters = 0
    records = itertools.chain.from_iterable(iter_records(corpus, source, split) for split in SPLITS)
    for record in itertools.islice(records, SAMPLE_DOCUMENTS):
        text = training_text(record, template)
        yield text[: SAMPLE_CHARACTERS - characters]
        characters += len(text)
        if characters >= SAMPLE_CHARACTERS:
            return


def _pack(
    plans: Sequence[_Plan],
    tokenizer_folder: Path,
    tokenizer: Tokenizer,
    encoder: Encoder,
    options: PackOptions,
    engine: TaskEngine,
) -> None:
    """Pieces of all splits, then the shards of each; a split is committed with its last shard."""
    splits = [_SplitWriter(plan, tokenizer_folder, tokenizer, encoder, options) for plan in plans]
    pieces = [(split, number) for split in splits for number in range(len(split.pieces))]
    with progress("pack", total=sum(plan.corpus_bytes for plan in plans), unit="B") as bar:
        tasks = [split.pieces[number] for split, number in pieces]
        for position, facts in engine.run(make_piece, tasks, bar.advance):
            split, number = pieces[position]
            split.take_piece(number, facts)
    shards = [(split, task) for split in splits for task in split.plan_shards()]
    with progress("shards", total=sum(split.totals["tokens"] for split in splits), unit="tokens") as bar:
        for position, files in engine.run(write_shard_of_pieces, [task for _, task in shards], bar.advance):
            shards[position][0].take_shard(files)


class _SplitWriter:
    """A split while it is packed."""

    def __init__(
        self, plan: _Plan, tokenizer_folder: Path, tokenizer: Tokenizer, encoder: Encoder, options: PackOptions
    ) -> None:
        self.plan, self._tokenizer, self._encoder, self._options = plan, tokenizer, encoder, options
        self._dtype = token_dtype(tokenizer.vocab_size)
        ranges = [
            (part, start, end)
            for part, file in plan.parts.items()
            for start, end in cut_part(part, int(file["bytes"]), options.piece_bytes)
        ]
        made_with = (tokenizer_folder, tokenizer.fingerprint, encoder.name, options.learn_prompts)
        self.pieces = [
            PieceTask(part, start, end, plan.source, plan.template, plan.work / f"piece-{number:05d}", *made_with)
            for number, (part, start, end) in enumerate(ranges)
        ]
        self._of_part: dict[Path, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            self._of_part.setdefault(piece.part, []).append(number)
        self.totals: dict[str, int] = {}
        self._facts: dict[int, dict[str, Any]] = {}
        self._files: dict[str, dict[str, Any]] = {}
        self._shards = self._shards_left = 0
        self._masked = False

    def take_piece(self, number: int, facts: dict[str, Any]) -> None:
        """Note a piece that is made; refuse a corpus shard that is not what its manifest says."""
        self._facts[number] = facts
        part = self.pieces[number].part
        numbers = self._of_part[part]
        if not all(other in self._facts for other in numbers):
            return
        pieces = [(self._facts[other]["crc32c"], self.pieces[other]) for other in numbers]
        if joined_crc32c((crc32c, one.end - one.start) for crc32c, one in pieces) != self.plan.parts[part]["crc32c"]:
            shutil.rmtree(self.plan.work, ignore_errors=True)  # what was made of it is wrong
            raise _damaged_part(f"{part} has changed since it was written (crc32c differs)")

    def plan_shards(self) -> list[TokenShardTask]:
        """When all pieces are there: the shards they make. A split without any is committed at once."""
        names = ("documents", "tokens", "unknown_tokens", "text_bytes", "conversations")
        self.totals = {name: sum(facts.get(name, 0) for facts in self._facts.values()) for name in names}
        folders = [piece.folder for piece in self.pieces]
        self._masked = any((folder / COUNTS).is_file() for folder in folders)
        lengths = (np.fromfile(folder / LENGTHS, "<u4") for folder in folders)
        planned = plan_shards(lengths, self._options.shard_tokens)
        self._shards = self._shards_left = len(planned)
        if not planned:
            self._commit()
        return [
            TokenShardTask(
                self.plan.work / "out",
                number,
                self._dtype.str,
                tuple(folders[stretches[0].piece : stretches[-1].piece + 1]),
                tuple(stretches),
                self._masked,
            )
            for number, stretches in enumerate(planned)
        ]

    def take_shard(self, files: dict[str, dict[str, Any]]) -> None:
        """Note a shard that is written; with the last of them the split is committed."""
        self._files.update(files)
        self._shards_left -= 1
        if not self._shards_left:
            self._commit()

    def _commit(self) -> None:
        """Write the manifest and put the split in its place; then its pieces are no longer needed."""
        plan, out = self.plan, self.plan.work / "out"
        out.mkdir(parents=True, exist_ok=True)
        for leftover in out.glob(f"*{PARTIAL_MARK}*"):  # of a killed attempt
            leftover.unlink()
        content = {
            **split_content(plan.source, plan.split, plan.channel, self._tokenizer),
            "shards": self._shards,
            **self.totals,
            "max_id": max((facts["max_id"] for facts in self._facts.values()), default=0),
            "loss_mask": self._masked,
            "gids": True,
            "encoder": asdict(self._encoder.choice),
        }
        write_manifest(out, "packed", plan.inputs, content, self._files)
        fsync_folder(out)
        plan.folder.parent.mkdir(parents=True, exist_ok=True)
        put_in_place(out, plan.folder)
        fsync_folder(plan.folder.parent)
        shutil.rmtree(plan.work, ignore_errors=True)


def split_content(source: str, split: str, channel: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the manifest of a split says first."""
    facts = {"source": source, "split": split, "channel": channel, "tokenizer": tokenizer.fingerprint}
    return {**facts, "vocab_size": tokenizer.vocab_size, "dtype": token_dtype(tokenizer.vocab_size).str}


def _build_indexes(packed: Path, indexes: Sequence[tuple[_Plan, int]], engine: TaskEngine) -> None:
    tasks = [(packed, plan.source, plan.split, seq_len) for plan, seq_len in indexes]
    missing = [task for task in tasks if open_split(*task[:3]).tokens]
    if missing:
        with progress("best fit", total=len(missing), unit="indexes") as bar:
            for _ in engine.run(_build_index, missing):
                bar.advance(1)


def _build_index(task: tuple[Path, str, str, int]) -> None:
    packed, source, split, seq_len = task
    opened = open_split(packed, source, split)
    sweep_partials(best_fit_folder(opened, seq_len))
    build_best_fit(opened, seq_len)


def write_report(packed: Path, tokenizer_fingerprint: str, manifests: Sequence[dict[str, Any]]) -> None:
    """The list of sources that belong together, written last."""
    sources: dict[str, dict[str, Any]] = {}
    for manifest in manifests:
        counts = {name: manifest[name] for name in ("documents", "tokens", "text_bytes")}
        sources.setdefault(manifest["source"], {"channel": manifest["channel"]})[manifest["split"]] = counts
    report = {"tokenizer": tokenizer_fingerprint, "sources": sources}
    path = packed / REPORT_NAME
    sweep_partials(path)
    if not path.is_file() or path.read_bytes() != jsonio.dumps_pretty(report):
        write_json(path, report)
