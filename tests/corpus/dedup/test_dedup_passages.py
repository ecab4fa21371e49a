"""Repeated passages are cut out of a corpus that is really built, each one of the set length and no other."""

import random
from pathlib import Path

import pytest

from tests.corpus.corpus_helpers import HERE, both, plain_options
from tests.corpus.dedup.dedup_helpers import zh_text
from zero2all.corpus import Source, build_corpus
from zero2all.corpus.dedup import passages
from zero2all.corpus.dedup.config import DedupConfig, Passages
from zero2all.corpus.finish import iter_dropped

LEAST = 40


@pytest.fixture(autouse=True)
def keep_short_records(monkeypatch):
    monkeypatch.setattr(passages, "LEAST_LEFT", 10)


def build(folder: Path, path: Path) -> dict:
    options = plain_options(dedup=DedupConfig(near="off", passages=Passages(LEAST)), valid_share=0)
    return build_corpus(folder, [Source("a", path, "zh")], options, HERE)["sources"]["a"]


def contents(folder: Path) -> dict[int, str]:
    return {record["id"]: record["content"] for record in both(folder)}


def repeats(texts: list[str], length: int) -> list[tuple[int, int]]:
    """Every window that occurred before, by looking at all of them."""
    seen: set[str] = set()
    found = []
    for number, text in enumerate(texts):
        for at in range(len(text) - length + 1):
            if text[at : at + length] in seen:
                found.append((number, at))
            seen.add(text[at : at + length])
    return found


def without(text: str, starts: list[int], length: int) -> str:
    gone = {at for start in starts for at in range(start, start + length)}
    kept = "".join("\0" if at in gone else char for at, char in enumerate(text))
    return "\n".join(piece.strip("\n") for piece in kept.split("\0") if piece.strip("\n"))


@pytest.mark.parametrize("alphabet", ["", "ab", "-"])
def test_every_passage_of_the_length_is_cut_and_none_that_is_shorter(alphabet, tmp_path, write_lines, monkeypatch):
    rng = random.Random(len(alphabet))
    make = lambda size: "".join(rng.choices(alphabet, k=size)) if alphabet else zh_text(rng, size)  # noqa: E731
    pool = [make(size) for size in (LEAST - 1, LEAST, LEAST + 1, 90, 300)]
    texts = [f"{make(60)}{number}{rng.choice(pool)}🙂{make(30)}{rng.choice(pool)}{number}" for number in range(60)]
    path = write_lines("a.jsonl", [{"text": text} for text in texts])
    monkeypatch.setattr(passages, "MEMORY_BYTES", 1 << 12)  # many batches and parts
    monkeypatch.setattr(passages, "LEAST_LEFT", 1)
    report = build(tmp_path / "corpus", path)
    found = repeats(texts, LEAST)
    expected = {}
    for number, text in enumerate(texts):
        left = without(text, [at for where, at in found if where == number], LEAST)
        if left:
            expected[number] = left
    assert contents(tmp_path / "corpus") == expected
    assert report["records_cut"] == sum(expected[number] != texts[number] for number in expected)
    assert sum(report["bytes_dropped"].values()) == sum(len(text.encode()) for text in texts) - report["bytes_kept"]


def test_a_record_of_which_too_little_is_left_is_dropped_with_a_sample(tmp_path, write_lines):
    rng = random.Random(5)
    text = zh_text(rng, 300)
    path = write_lines("a.jsonl", [{"text": text}, {"text": "引：" + text[50:200] + "完"}, {"text": text[:30]}])
    report = build(tmp_path / "corpus", path)
    assert report["dropped"] == {"repeated_passages": 1}
    assert contents(tmp_path / "corpus") == {0: text, 2: text[:30]}
    (sample,) = iter_dropped(tmp_path / "corpus", "a", "repeated_passages")
    assert sample["excerpt"].startswith("引：")


def test_a_length_that_would_lose_text_is_refused():
    assert [problem.split(";")[0] for problem in DedupConfig(passages=Passages(5)).problems()] == [
        "passages.min_chars is 5"
    ]
