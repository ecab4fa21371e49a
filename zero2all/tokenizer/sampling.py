"""Which documents a tokenizer is trained on: a share of every source, chosen by the hash of each document.

`20/44` takes 20 of 44 equal shares of a source's documents, `2GB` about that much of it, `0` none. A document belongs
to a share by the hash of its text (xxh3, 64 bits): taken if hash / 2^64 < 20/44. So the choice is the same on every
machine, in every shard format and for every number of threads; it is spread over the whole source instead of being its
beginning; and a smaller share is part of every larger one. An amount is turned into the share amount / size, with the
size the corpus report states, so what is taken comes close to it (the manifest says how close).
"""

import re
from collections.abc import Mapping
from fractions import Fraction

from zero2all.common.errors import UsageError
from zero2all.common.schema import nearest_hint

_SHARE = re.compile(r"\s*([0-9]+)\s*/\s*([0-9]+)\s*")
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_UNITS = {"": 1, "b": 1, **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
HASHES = 1 << 64


def parse_bytes(text: str) -> int | None:
    """`2GB`, `500 MB`, `1.5GiB` or a plain number of bytes; None for anything else. KB is 1000 bytes, KiB is 1024."""
    found = _AMOUNT.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        return None
    amount = int(float(found[1]) * _UNITS[found[2].lower()])
    return amount if amount > 0 else None


def take_problem(text: str) -> str | None:
    """What was expected instead of `text`, or None when it can be understood."""
    found = _SHARE.fullmatch(text)
    if found is not None:
        return None if int(found[2]) > 0 and int(found[1]) <= int(found[2]) else "a share of at most one, such as 20/44"
    if text.strip() == "0" or parse_bytes(text) is not None:
        return None
    return "a share such as 20/44, an amount such as 2GB, or 0"


def parse_take(words: str) -> dict[str, str] | str:
    """What `--take` says: `news=20/44,wiki=2GB` by source, or `2GB` for all sources together."""
    if "=" not in words:
        return words.strip()
    taken: dict[str, str] = {}
    for word in words.split(","):
        name, equals, share = (part.strip() for part in word.partition("="))
        if not equals or not name:
            raise UsageError(
                f"--take {words}: {word.strip()!r} is not of the form SOURCE=SHARE. Write, for example, "
                f"--take news=20/44,wiki=2GB, or --take 2GB for all sources together."
            )
        if name in taken:
            raise UsageError(f"--take {words}: {name} is named twice.")
        taken[name] = share
    return taken


def shares(take: Mapping[str, str] | str | None, source_bytes: Mapping[str, int]) -> dict[str, Fraction]:
    """The share of every source, from 0 to 1."""
    if take is None:
        return dict.fromkeys(source_bytes, Fraction(1))
    if isinstance(take, str):
        return dict.fromkeys(source_bytes, _share(take, sum(source_bytes.values())))
    for name in take:
        if name not in source_bytes:
            raise UsageError(f"--take names {name!r}, which is not a source. {nearest_hint(name, source_bytes)}")
    return {name: _share(take[name], size) if name in take else Fraction(1) for name, size in source_bytes.items()}


def belongs(text: str, share: Fraction) -> bool:
    """Whether a document of this text is in the share."""
    if share >= 1:
        return True
    import xxhash

    number: int = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
    return number * share.denominator < share.numerator * HASHES


def _share(text: str, size: int) -> Fraction:
    found = _SHARE.fullmatch(text)
    if found is not None:
        return Fraction(int(found[1]), int(found[2]))
    amount = 0 if text.strip() == "0" else (parse_bytes(text) or 0)
    return min(Fraction(1), Fraction(amount, max(1, size)))
