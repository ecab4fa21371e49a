"""The planted test at a size for every day; benchmarks/corpus.py runs it on more, and on real zh and en text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.planted import cut_documents, measure, plant, stdlib_sources
from tests.corpus.dedup.dedup_helpers import en_text, zh_text


@pytest.mark.parametrize("channel", ["zh", "en", "code"])
def test_planted_copies_are_found_and_nothing_else(channel: str, tmp_path: Path) -> None:
    rng = random.Random(11)
    if channel == "code":
        bases = cut_documents(stdlib_sources()[:400], channel, 80)
    else:
        bases = [zh_text(rng, 700) if channel == "zh" else en_text(rng, 300) for _ in range(80)]
    quality = measure(plant(bases, channel, copies=3), channel, tmp_path)
    assert quality.similar_copies >= 50
    assert quality.recall >= 0.95, quality
    assert quality.false_positive_share <= 0.005, quality
