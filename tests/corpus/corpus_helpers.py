"""What several corpus tests need beside fixtures."""

from pathlib import Path
from typing import Any

from zero2all.common.records import iter_records
from zero2all.corpus import BuildOptions, EngineConfig, Source, build_corpus
from zero2all.corpus.dedup.config import DedupConfig, Passages

HERE = EngineConfig(workers=1)
"""No worker processes."""


def plain_options(**options: Any) -> BuildOptions:
    """Options under which the short made-up texts of the tests survive: no rules, no near duplicates, no questions."""
    min_chars = options.pop("min_chars", None)
    if min_chars is not None:
        options["clean"] = {"too_short": {"on": True, "min_chars": min_chars}}
    return BuildOptions(**{"rules": "none", "dedup": DedupConfig(near="off"), "accept_drops": True, **options})


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def build_three(corpus: Path, raw: Path, engine: EngineConfig) -> dict[str, Any]:
    paths = {"lines": raw / "lines.jsonl", "array": raw / "array.json", "texts": raw / "texts"}
    dedup = DedupConfig(passages=Passages(100))
    options = BuildOptions(rules="none", unit_bytes=75_000, shard_bytes=200_000, valid_share=0.05, dedup=dedup)
    return build_corpus(corpus, [Source(name, path, "en") for name, path in paths.items()], options, engine)


def both(corpus: Path, name: str = "a") -> list[Any]:
    return [record for split in ("train", "valid") for record in iter_records(corpus, name, split)]
