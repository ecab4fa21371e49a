"""Copies in another width, another script or in part: found over whole builds, and never on both sides of the split."""

import random

from zero2all.common.records import iter_records
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


def wide(simplified: str) -> str:
    return simplified.translate(WIDE)


def test_copies_in_another_width_or_script_are_near_duplicates_and_on_one_side_of_the_split(write_lines, build, kept):
    rows = [{"text": change(text(n))} for n in range(100) for change in (str, traditional, wide)]
    assert rows[0] != rows[1] != rows[2]
    path = write_lines("a.jsonl", rows)
    assert build(path, dedup=DedupConfig())["dropped"] == {"near_duplicate": 200}
    build(path, valid_share=0.3)
    sides = [
        {fold(record["content"]) for record in iter_records(path.parent / "corpus", "one", split)}
        for split in ("train", "valid")
    ]
    assert len(sides[1]) > 10
    assert not sides[0] & sides[1], "even without near duplicates"
