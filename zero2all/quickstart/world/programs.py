"""Small Python programs that run: the code of the quickstart, the same on every machine and Python version.

`programs.txt` has functions whose names and values are slots, and after `?` expressions that call them. A program is
one to three of them with the slots filled, and either asserts or prints what the expressions give, which is found by
running it. No two programs are equal, so none that is held out was trained on.
"""

import random
import re
from collections.abc import Iterator

from zero2all.common.files import package_text

FUNCTIONS = package_text(__package__, "programs.txt").rstrip().split("\n---\n")
SLOT = re.compile(r"\$(things|thing|Thing|adjective|numbers|words|word|letter|tiny|small|large)")
THINGS = (
    *("apple", "book", "bottle", "boat", "card", "coin", "cup", "door", "egg", "flower", "garden", "hat", "house"),
    *("key", "lamp", "letter", "map", "number", "orange", "pencil", "river", "road", "shell", "ship", "song", "star"),
    *("stone", "table", "ticket", "train", "tree", "window", "word"),
)
ADJECTIVES = ("small", "red", "old", "good", "round", "new", "even", "blue")
FUNCTIONS_PER_PROGRAM = (1, 3)


def programs(target_bytes: int, seed: int) -> Iterator[str]:
    """Programs until they together have at least `target_bytes`."""
    rng = random.Random(f"zero2all programs/{seed}")
    seen: set[str] = set()
    written_bytes = 0
    while written_bytes < target_bytes:
        program = _program(rng)
        if program not in seen:
            seen.add(program)
            written_bytes += len(program)
            yield program


def _program(rng: random.Random) -> str:
    definitions, calls = [], []
    for function in rng.sample(FUNCTIONS, rng.randint(*FUNCTIONS_PER_PROGRAM)):
        definition, *expressions = _filled(function, _names(rng), rng).split("\n? ")
        definitions.append(definition.rstrip())
        calls += expressions
    code = "\n\n\n".join(definitions)
    namespace: dict[str, object] = {}
    exec(code, namespace)  # our own text
    values = [(call.strip(), eval(call, namespace)) for call in calls]
    if rng.random() < 0.5:
        ending = "\n".join(f"assert {call} == {value!r}" for call, value in values)
    else:
        lines = "\n".join(f"    print({call})  # {value}" for call, value in values)
        ending = f'def main():\n{lines}\n\n\nif __name__ == "__main__":\n    main()'
    return f"{code}\n\n\n{ending}\n"


def _filled(function: str, names: dict[str, str], rng: random.Random) -> str:
    return SLOT.sub(lambda slot: names.get(slot[1]) or _value(slot[1], rng), function)


def _names(rng: random.Random) -> dict[str, str]:
    """The slots that have one value in all of a function."""
    thing = rng.choice(THINGS)
    return {"thing": thing, "things": f"{thing}s", "Thing": thing.capitalize(), "adjective": rng.choice(ADJECTIVES)}


def _value(slot: str, rng: random.Random) -> str:
    """A value as Python writes it."""
    if slot == "numbers":
        return repr([rng.randint(1, 20) for _ in range(rng.randint(3, 5))])
    if slot == "words":
        return str(rng.sample(THINGS, rng.randint(2, 4))).replace("'", '"')
    if slot == "word":
        return f'"{rng.choice(THINGS)}"'
    if slot == "letter":
        return f'"{rng.choice(THINGS)[0]}"'
    smallest, largest = {"tiny": (2, 5), "small": (6, 12), "large": (13, 40)}[slot]
    return str(rng.randint(smallest, largest))
