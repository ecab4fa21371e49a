"""How a calculator says its result: every number with its unit, the formula that makes it, and the convention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.schema import Problem

PREFIXED = {"FLOP", "FLOP/s", "FLOP/token", "MAC/token"}
"""Units that take a decimal prefix: 51.5 GFLOP."""
DURATIONS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Term:
    """One number. JSON has it in its base unit: bytes, seconds, FLOP, a share of 1."""

    name: str
    value: float
    unit: str
    formula: str = ""


@dataclass(frozen=True)
class CalculatorAnswer:
    """What a calculator found."""

    title: str
    convention: str
    terms: Sequence[Term]
    notes: Sequence[str] = ()

    def __getitem__(self, name: str) -> float:
        """The value of a term."""
        return next(term.value for term in self.terms if term.name == name)

    def as_json(self) -> dict[str, Any]:
        """One form for all calculators."""
        terms = {term.name: {"value": term.value, "unit": term.unit, "formula": term.formula} for term in self.terms}
        return {"title": self.title, "convention": self.convention, "terms": terms, "notes": list(self.notes)}

    def rows(self) -> list[list[str]]:
        """A table with its heading."""
        said_terms = ([t(term.name), said(term.value, term.unit), t(term.formula)] for term in self.terms)
        return [["what", "value", "how"], *said_terms]


class ImpossibleError(UsageError):
    """Input with one or more problems, each with the rule it breaks."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        super().__init__(f"Nothing was computed; problems: {len(problems)}.\n" + lines)


def said(value: float, unit: str) -> str:
    """A number as a person reads it: 31.41 GB = 29.25 GiB, 33.8 d, 45.7 %, 6,738,415,616 parameters."""
    if not math.isfinite(value):
        return t("never") if unit == "s" else str(value)
    if unit == "share":
        return f"{100 * value:.4g} %"
    if unit == "bytes":
        return f"{_prefixed(value, 'B', 1000)} = {_prefixed(value, 'B', 1024)}" if value >= 1000 else f"{value:g} B"
    if unit == "s":
        size, name = next((pair for pair in DURATIONS if value >= pair[0]), DURATIONS[-1])
        return f"{value / size:.4g} {name}"
    if unit == "bytes/s":
        return _prefixed(value, "B/s", 1000)
    if unit in PREFIXED:
        return _prefixed(value, unit, 1000)
    if unit == "USD":
        return f"{value:,.2f} USD"
    number = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1e4 else f"{value:,.4g}"
    large = f" ({value / 1e9:.4g} B)" if unit in ("parameters", "tokens") and value >= 1e9 else ""
    return f"{number} {t(unit)}{large}".rstrip()


def _prefixed(value: float, unit: str, base: int) -> str:
    prefixes = ("", "k", "M", "G", "T", "P", "E", "Z", "Y") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    power = 0 if abs(value) < 1 else min(int(math.log(abs(value), base) + 1e-9), len(prefixes) - 1)
    return f"{value / base**power:,.4g} {prefixes[power]}{unit}"
