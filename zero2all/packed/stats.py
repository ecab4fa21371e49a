"""What is in packed data, in figures: tokens, lengths of documents, what packing loses, how often each
source would be read for a budget of tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.manifest import read_manifest
from zero2all.common.records import SPLITS
from zero2all.packed.bestfit import BEST_FIT_COMMAND
from zero2all.packed.mixture import TrainingData
from zero2all.packed.shard_format import PackedSplit, open_split, packed_sources

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
