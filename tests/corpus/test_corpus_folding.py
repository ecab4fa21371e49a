"""Copies in another width, another script or in part: found over whole builds, and never on both sides of the split."""

from __future__ import annotations

import random

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options
from zero2all.common.records import iter_records
from zero2all.corpus import Source, build_corpus, summary_notes
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.fold import fold, simplified_of

TRADITIONAL = {chr(simplified): chr(form) for form, simplified in reversed(simplified_of().items())}
WIDE = str.maketrans("，。！？：；", ",.!?:;")


def text(number: int, chars: int = 300) -> str:
    """Some text of common characters; every seventh is a sign, a third has another traditional form."""
    rng = random.Random(number)
    simplified = list(TRADITIONAL)[:400]
    letters = [
        rng.choice(simplified) if rng.random() < 0.33 else chr(rng.randrange(0x5000, 0x5100)) for _ in range(chars)
    ]
    return "".join(rng.choice("，。！？：；") if at % 7 == 6 else fold(letter) for at, letter in enumerate(letters))


def traditional(simplified: str) -> str:
    return "".join(TRADITIONAL.get(char, char) for char in simplified)


@pytest.mark.parametrize("change", [lambda one: one.translate(WIDE), traditional], ids=["width", "traditional"])
def test_copies_in_another_width_or_script_are_near_duplicates(tmp_path, write_lines, change):
    rows = [{"text": text(n)} for n in range(100)] + [{"text": change(text(n))} for n in range(100)]
    assert rows[0] != rows[100]
    report = build_corpus(
        tmp_path / "corpus",
        [Source("one", write_lines("a.jsonl", rows), "zh")],
        plain_options(dedup=DedupConfig()),
        HERE,
    )
    assert report["sources"]["one"]["dropped"] == {"near_duplicate": 100}


def test_such_copies_are_on_one_side_even_without_near_dedup(tmp_path, write_lines):
    rows = [
        {"text": change(text(n))} for n in range(100) for change in (str, traditional, lambda one: one.translate(WIDE))
    ]
    build_corpus(
        tmp_path / "corpus", [Source("one", write_lines("a.jsonl", rows), "zh")], plain_options(valid_share=0.3), HERE
    )
    sides = {
        split: {fold(record["content"]) for record in iter_records(tmp_path / "corpus", "one", split)}
        for split in ("train", "valid")
    }
    assert len(sides["valid"]) > 10
    assert not sides["train"] & sides["valid"]


def test_half_copies_are_reported(tmp_path, write_lines):
    rows = [{"text": text(n, 1000)} for n in range(100)]
    rows += [{"text": text(n, 1000)[(n % 2) * 500 :][:500]} for n in range(100)]
    rows += [{"text": text(1000 + n, 700)} for n in range(100)]
    report = build_corpus(
        tmp_path / "corpus",
        [Source("one", write_lines("a.jsonl", rows), "zh")],
        plain_options(dedup=DedupConfig()),
        HERE,
    )
    contained = report["sources"]["one"]["contained"]
    assert contained["looked_up"] == 300
    assert 90 <= contained["records"] <= 100
    assert all(example["gid"] == example["inside"] + 100 for example in contained["examples"])
    assert any("are contained in a longer record to 80% or more" in note for note in summary_notes(report))
    assert report["sources"]["one"]["records_kept"] == 300, "reported, not dropped"
