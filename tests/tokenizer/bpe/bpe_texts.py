"""Text for the trainer's tests."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class TextList:
    kept: list[str]
    name: str = "part"
    reads: list[int] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        return str(hash(tuple(self.kept)))

    @property
    def size_bytes(self) -> int:
        return sum(len(text) for text in self.kept)

    def texts(self) -> Iterator[str]:
        self.reads.append(1)
        return iter(self.kept)


def in_parts(texts: list[str], count: int) -> list[TextList]:
    return [TextList(texts[start::count], f"part-{start}") for start in range(count)]


def chinese_like(seed: int, clauses: int) -> list[str]:
    """Documents whose words follow a skewed distribution, with Latin words, digits and rare characters in between."""
    chance = random.Random(seed)
    characters = [chr(0x4E00 + number) for number in range(400)] + ["😀", "\U00020000", "é", "ß"]
    words = ["".join(chance.choices(characters[:300], k=chance.choice((1, 2, 2, 3, 4)))) for _ in range(600)]
    words += ["parse", "token", "_name", "value42", "don't", "I'll", "\n", "\n    return "]
    texts = []
    for _ in range(clauses // 10):
        clause = []
        for _ in range(10):
            picked = [words[int(len(words) * chance.random() ** 3)] for _ in range(chance.randint(1, 9))]
            if chance.random() < 0.05:
                picked.append(chance.choice(characters))
            clause.append("".join(picked))
        texts.append(chance.choice("，。 ！").join(clause))
    return texts
