"""One sample, as a person reads it: its documents, their borders, what counts in the loss, where each came from.

A record's gid is its source's number x 2^40 + the ordinal of the item in that source, counting what was dropped. The
corpus keeps `<source>/origins.jsonl`, one line for each stretch of items from one file: `first`, the ordinal of its
first item, and `file`. From these follow the raw file and the place in it.

Below: all of the packed data in figures (`z2a data stats`).
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import UsageError
from zero2all.common.files import MANIFEST_NAME, as_written, read_json
from zero2all.common.language import translate as t
from zero2all.common.manifest import read_manifest
from zero2all.common.records import ORIGINS_NAME, READERS, SPLITS
from zero2all.packed.bestfit import BEST_FIT_COMMAND
from zero2all.packed.mixture import TrainingData
from zero2all.packed.samples import NO_DOCUMENT, Borders, open_samples
from zero2all.packed.shard_format import PackedSplit, open_split, packed_sources
from zero2all.tokenizer.load import Tokenizer

ORDINAL_BITS = 40
LARGEST_POSITION = 1 << 40
"""In samples: at 4,096 tokens each, 300 times the tokens of the longest runs there are."""


@dataclass(frozen=True)
class DocumentOrigin:
    """What is known of where a document came from."""

    gid: int
    ordinal: int
    """Of the item in its source, from 0."""
    part: Path | None
    """The corpus shard that holds the record."""
    title: str
    file: str | None
    """The raw file."""
    item: int | None
    """Which item of that file, from 0."""
    files: int
    """How many raw files the source has; where `file` is None, it is one of them."""
    path: str
    """What the source was built from."""

    def in_words(self) -> str:
        """In a line."""
        where = t(f"item {self.ordinal:,} of {self.path} (files: {self.files:,})")
        if self.file is not None and self.item is not None:
            where = t(f"{self.file}, item {self.item:,}")
        record = f"; {'/'.join(self.part.parts[-3:])}" if self.part is not None else ""
        return f"{where}{record}; gid {self.gid}"


class Origins:
    """Finds origins in one corpus."""

    def __init__(self, corpus: Path) -> None:
        self._corpus = corpus
        self._manifest = cache(self._read_manifest)
        self._listed = cache(self._read_list)

    def find(self, source: str, split: str, gid: int) -> DocumentOrigin | None:
        """The origin of a document of `source`; None when the corpus is not here or no longer the same."""
        with as_written(self._corpus / source, "Run `z2a corpus build` again."):
            return self._find(source, split, gid)

    def _find(self, source: str, split: str, gid: int) -> DocumentOrigin | None:
        manifest = self._manifest(source)
        if not manifest or manifest.get("number") != gid >> ORDINAL_BITS:
            return None
        ordinal = gid & ((1 << ORDINAL_BITS) - 1)
        files = int(manifest.get("report", {}).get("input_files", 0))
        path = str(manifest.get("path", "?"))
        file, item = self._raw_file(source, ordinal, files, path)
        part, title = self._record(source, split, gid)
        return DocumentOrigin(gid, ordinal, part, title, file, item, files, path)

    def _read_manifest(self, source: str) -> dict[str, Any]:
        path = self._corpus / source / MANIFEST_NAME
        return read_json(path) if path.exists() else {}

    def _raw_file(self, source: str, ordinal: int, files: int, path: str) -> tuple[str | None, int | None]:
        firsts, names = self._listed(source)
        stretch = bisect_right(firsts, ordinal) - 1
        if stretch >= 0:
            name = names[stretch]
            earlier = [n for n in range(stretch) if names[n] == name]  # stretches of the same file
            before = sum(firsts[n + 1] - firsts[n] for n in earlier)
            folder, _, last = path.rpartition("/")
            is_one_file = files == 1 and name.split("/")[0] == last  # then the list names it, and not what is below it
            return f"{folder if is_one_file else path}/{name}", before + ordinal - firsts[stretch]
        return (path, ordinal) if files == 1 else (None, None)

    def _read_list(self, source: str) -> tuple[list[int], list[str]]:
        path = self._corpus / source / ORIGINS_NAME
        rows = [jsonio.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        return [row["first"] for row in rows], [row["file"] for row in rows]

    def _record(self, source: str, split: str, gid: int) -> tuple[Path | None, str]:
        """The shard that holds a record, and its title; records stand in the order of their gids."""
        for part in sorted((self._corpus / source / split).glob("part-*"), reverse=True):
            reader = READERS.get(part.name.partition(".")[2])
            if reader is None or part.suffix == ".txt":
                continue
            first = next(iter(reader(part, source)), None)
            if first is not None and first["gid"] <= gid:
                return part, self._title(part, source, gid)
        return None, ""

    def _title(self, part: Path, source: str, gid: int) -> str:
        if part.suffix == ".jsonl":
            start = b'{"gid":%d,' % gid
            with open(part, "rb") as file:
                found = next((line for line in file if line.startswith(start)), None)
            return str(jsonio.loads(found)["title"]) if found else ""
        records = READERS[part.name.partition(".")[2]](part, source)
        return next((str(record["title"]) for record in records if record["gid"] == gid), "")


@dataclass(frozen=True)
class ShownDocument:
    """The part of a document that stands in a sample."""

    number: int | None
    """Of the document in its split; None for padding."""
    column: int
    """Where in the row it begins."""
    tokens: np.ndarray
    counted: np.ndarray
    """1 for each token that counts in the loss. Nothing predicts the first token of a row."""
    origin: DocumentOrigin | None

    def parts(self, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
        """Decoded, control tokens by name, in stretches: each with whether it counts in the loss."""
        changes = np.flatnonzero(np.diff(self.counted)) + 1
        stretches = zip(np.split(self.tokens, changes), np.split(self.counted, changes), strict=True)
        return [(tokenizer.decode(ids.tolist(), skip_control=False), bool(counts[0])) for ids, counts in stretches]

    def text(self, tokenizer: Tokenizer) -> str:
        """The same as one text; ⟦ … ⟧ stands around what does not count in the loss."""
        return "".join(text if counts else f"⟦{text}⟧" for text, counts in self.parts(tokenizer))


@dataclass(frozen=True)
class ShownSample:
    """A sample and what is known about it."""

    split: PackedSplit
    index: int
    """Which sample of its split."""
    count: int
    """How many there are."""
    seq_len: int
    documents: list[ShownDocument]
    position: int | None = None
    """Place in the run."""
    epoch: int | None = None
    stage: str | None = None

    def heading(self) -> str:
        """In a line."""
        words = t(
            f"source {self.split.name}, channel {self.split.channel}, {self.split.split}; sample {self.index:,} of "
            f"{self.count:,} of {self.seq_len:,} + 1 tokens"
        )
        if self.position is None:
            return words
        return t(f"position {self.position:,} (stage {self.stage}); {words}; epoch {self.epoch}")


def sample_at(data: TrainingData, position: int, corpus: Path, end_token: int | None = None) -> ShownSample:
    """The sample at `position` of the run, counted in samples from its start. `end_token`: where the run ends."""
    if end_token is not None and position >= (total := _samples_before(data, end_token)):
        raise UsageError(
            f"The run has {total:,} samples, so there is no sample {position:,}. Give a number from 0 to {total - 1:,}."
        )
    if position >= LARGEST_POSITION:
        raise UsageError(f"There is no sample {position}. Give a number below {LARGEST_POSITION}.")
    before = 0
    for number, segment in enumerate(data.segments):
        following = data.segments[number + 1] if number + 1 < len(data.segments) else None
        count = None if following is None else segment.position_at(following.from_token)
        if count is None or position < before + count:
            break
        before += count
    within = position - before
    sources, indices = segment.order.lookup(np.array([within], dtype=np.int64))
    source, index = int(sources[0]), int(indices[0])
    taken = int(segment.order.taken(within)[source])
    split = data.splits[source]
    token = segment.from_token + within * segment.seq_len
    stage = [stage.name for stage in data.plan if stage.from_token <= token][-1]
    shown = split_sample(split, index, segment.seq_len, data.packing, corpus)
    return replace(shown, position=position, epoch=taken // segment.order.sources[source].samples, stage=stage)


def _samples_before(data: TrainingData, end_token: int) -> int:
    """How many samples of the run begin before a token."""
    ends = [segment.from_token for segment in data.segments[1:]] + [end_token]
    pairs = zip(data.segments, ends, strict=True)
    return sum(one.position_at(min(end, end_token)) for one, end in pairs if one.from_token < end_token)


def split_sample(split: PackedSplit, index: int, seq_len: int, packing: str, corpus: Path) -> ShownSample:
    """Sample `index` of a split, whatever run may read it."""
    samples = open_samples(split, seq_len, packing)
    if not 0 <= index < samples.count:
        raise UsageError(
            f"{split.folder} has {samples.count:,} samples of {seq_len:,} + 1 tokens, so there is no sample "
            f"{index:,}. Give a smaller number, or another --data.seq_len."
        )
    tokens, weights = np.empty(seq_len + 1, np.int64), np.empty(seq_len, np.float32)
    borders = Borders()
    samples.read(index, tokens, weights, borders, 0)
    columns, numbers = borders.columns[0].tolist(), borders.numbers[0].tolist()
    counted = np.concatenate((weights[:1], weights)) != 0  # shown as its neighbour, which it may stand before
    origins = Origins(corpus)
    documents = []
    for number, start, end in zip(numbers, columns, [*columns[1:], seq_len + 1], strict=True):
        known = None if number == NO_DOCUMENT else int(number)
        gid = None if known is None else split.gid_of(known)
        origin = None if gid is None else origins.find(split.name, split.split, gid)
        documents.append(ShownDocument(known, start, tokens[start:end], counted[start:end].astype(np.int8), origin))
    return ShownSample(split, index, samples.count, seq_len, documents)


LENGTH_BUCKETS = 40
"""Documents of 2^b to 2^(b + 1) - 1 tokens are in bucket b."""


def packed_stats(
    packed: Path, seq_len: int, data: TrainingData | None = None, budget: int | None = None
) -> dict[str, Any]:
    """Everything, as JSON holds it. With `data` and a `budget` of tokens, also how often each source is read."""
    rows = [
        _split_stats(open_split(packed, name, split), seq_len) for name in packed_sources(packed) for split in SPLITS
    ]
    train = [row for row in rows if row["split"] == "train"]
    total = sum(row["tokens"] for row in train) or 1
    channels: dict[str, dict[str, Any]] = {}
    for row in train:
        row["share"] = row["tokens"] / total
        channel = channels.setdefault(row["channel"], {"tokens": 0, "text_bytes": 0, "documents": 0})
        for name in channel:
            channel[name] += row[name]
    for channel in channels.values():
        channel["share"] = channel["tokens"] / total
    stats: dict[str, Any] = {"seq_len": seq_len, "sources": rows, "channels": channels}
    if data is not None and budget is not None:
        stats["budget"] = budget_stats(data, budget)
    return stats


def budget_stats(data: TrainingData, budget: int) -> dict[str, Any]:
    """How often each source is read in a run of `budget` tokens."""
    sources: dict[str, dict[str, Any]] = {}
    for split, (read, epochs) in zip(data.splits, data.reading(budget), strict=True):
        facts = {"channel": split.channel, "tokens": split.tokens, "read": round(read), "epochs": epochs}
        sources[split.name] = facts
    total = sum(source["read"] for source in sources.values()) or 1
    for source in sources.values():
        source["share"] = source["read"] / total
    return {"tokens": budget, "packing": data.packing, "sources": sources}


def _split_stats(split: PackedSplit, seq_len: int) -> dict[str, Any]:
    histogram = np.zeros(LENGTH_BUCKETS, np.int64)
    documents = longest = cut = 0
    for shard, tokens in enumerate(split.shards.lengths):
        starts = split.docs[shard].astype(np.int64)
        ends = np.append(starts[1:], tokens)
        lengths = ends - starts
        histogram += np.bincount(np.log2(np.maximum(lengths, 1)).astype(np.int64), minlength=LENGTH_BUCKETS)
        documents += len(starts)
        longest = max(longest, int(lengths.max(initial=0)))
        base = int(split.shard_starts[shard])
        cut += int(((starts + base) // seq_len != (ends - 1 + base) // seq_len).sum())
    samples = split.samples(seq_len)
    unused = max(0, split.tokens - 1 - samples * seq_len)
    packing: dict[str, Any] = {
        "concat": {
            "samples": samples,
            "lost_tokens": unused,
            "lost_share": unused / max(1, split.tokens),
            "documents_cut_share": cut / max(1, documents),
        }
    }
    for index in sorted(split.folder.glob("best-fit-*/manifest.json")):
        facts = read_manifest(index.parent, "best_fit", BEST_FIT_COMMAND)
        slots = facts["rows"] * (facts["seq_len"] + 1)
        packing[f"best_fit {facts['seq_len']}"] = {
            "samples": facts["rows"],
            "lost_tokens": facts["padding"],
            "lost_share": facts["padding"] / max(1, slots),
            "documents_cut_share": facts["cut"] / max(1, documents),
            "documents_dropped": facts["dropped"],
        }
    return {
        "source": split.name,
        "split": split.split,
        "channel": split.channel,
        "imported": bool(split.manifest.get("imported")),
        "documents": documents,
        "conversations": split.manifest.get("conversations", 0),
        "tokens": split.tokens,
        "text_bytes": split.manifest["text_bytes"],
        "bytes_per_token": split.bytes_per_token,
        "counted_share": _counted_share(split),
        "mean_length": split.tokens / max(1, documents),
        "longest": longest,
        "length_histogram": {str(1 << bucket): int(count) for bucket, count in enumerate(histogram) if count},
        "packing": packing,
    }


def _counted_share(split: PackedSplit) -> float:
    """Share of the tokens that count in the loss."""
    if split.masks is None:
        return 1.0
    step = 1 << 22
    starts = range(0, split.tokens, step)
    counted = sum(int(split.read_mask(start, min(step, split.tokens - start)).sum()) for start in starts)
    return counted / max(1, split.tokens)
