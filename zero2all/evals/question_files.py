"""Probes: short questions whose answer a model either knows or does not. Read from two kinds of file.

JSON lines: one object a line, each one context with its right answer. YAML (ours: `probes.yaml`): families of facts,
each with templates, which are expanded to one probe per fact and template; the probes of one fact are one question.

No torch here: mistakes in a file are reported before a model is loaded.
"""

import codecs
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from zero2all.common import jsonio, yamlio
from zero2all.common.errors import BadInputError
from zero2all.common.files import read_regular
from zero2all.common.schema import Problem, UnknownName, build, nearest_hint

REPORTED_APART = ("arithmetic", "label prior")
"""Families whose name begins so are shown but not part of the mean: they test a skill or a habit, not knowledge."""
MAX_FOILS = 4
LEAST_TEMPLATES = 3
LARGEST_FILE_BYTES = 1 << 26
SHOWN_PROBLEMS = 20
Read = TypeVar("Read")


class HasId(Protocol):
    """A probe or a pair."""

    @property
    def id(self) -> str:
        """Unique within its file."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question to a trained model, in one wording."""

    id: str
    channel: str
    family: str
    prompt: str
    """Text to continue; no space at its end."""
    joiner: str = ""
    """What comes between prompt and answer: a space or nothing."""
    answer: str
    also: list[str] = field(default_factory=list)
    """Other right answers; what they are worth is added."""
    foils: list[str] = field(default_factory=list)
    """Wrong answers of the same kind, to rank the right one against."""
    new_wording: bool = False
    """The wording occurs nowhere in the training text, not even with another fact."""
    may_go_on: bool = False
    """A letter may follow the answer at once, as 鱼 follows 一条."""
    question: str = ""
    """Probes with the same are wordings of one question; empty: the probe is one of its own."""

    @property
    def group(self) -> str:
        """The name under which results are averaged: the family, with new wordings apart."""
        return f"{self.family} (new wording)" if self.new_wording else self.family

    @property
    def counts(self) -> bool:
        """Whether this probe is part of the mean accuracy."""
        return not self.new_wording and not self.family.startswith(REPORTED_APART)

    @property
    def golds(self) -> list[str]:
        """All right answers."""
        return [self.answer, *self.also]

    @property
    def right(self) -> list[str]:
        """The right answers as they follow the prompt."""
        return [self.joiner + text for text in self.golds]

    @property
    def wrong(self) -> list[str]:
        """The foils that are scored, as they follow the prompt."""
        return [self.joiner + text for text in self.foils[:MAX_FOILS]]


def read_probes(path: Path) -> list[Probe]:
    """Read a probes file: YAML by its name, else one JSON object a line. The error names the places."""
    problems: list[str] = []
    probes = _members(path, "probes", Probe, _expanded, problems)
    for probe in probes:
        if "" in (*probe.golds, *probe.foils):
            problems.append(f"{probe.id}: an answer or a foil is empty")
        problems += [
            f"{probe.id}: {foil!r} is both an answer and a foil" for foil in probe.foils if foil in probe.golds
        ]
    refuse(path, problems + repeated_ids(probes))
    return probes


def read_question_file(path: Path, kind: str) -> bytes:
    """The bytes of a file of probes or pairs, of which there must be some."""
    try:
        data = read_regular(path, LARGEST_FILE_BYTES)
    except OSError as error:
        raise BadInputError(f"The {kind} file {path} cannot be read: {error.strerror}.") from error
    if not data.strip():
        raise BadInputError(f"The {kind} file {path} is empty. Expected one JSON object a line, or YAML (*.yaml).")
    return data


def _members(
    path: Path,
    what: str,
    kind: type[Read],
    of_yaml: Callable[[Any, int, list[str]], Iterable[Read]],
    problems: list[str],
) -> list[Read]:
    """All probes or pairs of a file: YAML by its name, else one JSON object a line."""
    data = read_question_file(path, what)
    if path.suffix not in (".yaml", ".yml"):
        return objects_of(data, kind, problems)
    return [one for number, each in enumerate(load_yaml(data, path), 1) for one in of_yaml(each, number, problems)]


def load_yaml(data: bytes, path: Path) -> list[Any]:
    """The list that a YAML file is."""
    try:
        value = yamlio.loads(data.decode("utf-8-sig"), path)
    except ValueError as error:
        raise BadInputError(f"{path} is not YAML: {error}") from error
    if not isinstance(value, list) or not value:
        raise BadInputError(f"{path} should be a list, each member with `language` and what belongs to it (see docs).")
    return value


def refuse(path: Path, problems: list[str]) -> None:
    """Raise one error that names all problems of a file, if there are any."""
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:SHOWN_PROBLEMS])
        more = len(problems) - SHOWN_PROBLEMS
        rest = f"\n  and {more:,} more" if more > 0 else ""
        raise BadInputError(f"{path} cannot be used, {len(problems)} problems:\n{shown}{rest}")


def objects_of(data: bytes, kind: type[Read], problems: list[str]) -> list[Read]:
    """One object a line; what is wrong with any of them is appended to the problems."""
    found = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        wrong: list[Problem] = []
        try:
            made = build(kind, jsonio.loads(line.decode()), "", wrong)
        except UnicodeDecodeError:
            problems.append(f"line {number} is not UTF-8. Convert the file: iconv -f GB18030 -t UTF-8.")
            continue
        except ValueError as error:
            problems.append(f"line {number} is not JSON ({error})")
            continue
        for each in wrong:
            is_unknown = isinstance(each, UnknownName)
            problems.append(f"line {number}: {f'{each.field} is not a field. {each.hint}' if is_unknown else each}")
        if not wrong:
            found.append(made)
    return found


def repeated_ids(found: Sequence[HasId]) -> list[str]:
    """A problem for each id that stands twice."""
    times = Counter(each.id for each in found)
    return [f"{name}: there are two of this id" for name, count in times.items() if count > 1]


# YAML ----------------------------------------------------------------------------------------------------------------

FAMILY_FIELDS = ("family", "language", "templates", "facts", "foils", "may_go_on")
FACT_FIELDS = ("gold", "foils", "templates")


@dataclass(frozen=True)
class _Fact:
    """One row of a family's table."""

    subject: str
    gold: list[str]
    foils: list[str]
    templates: list[str]


def _expanded(family: Any, number: int, problems: list[str]) -> Iterator[Probe]:
    place = f"family {number}"
    if not isinstance(family, dict):
        problems.append(f"{place}: expected a mapping with {', '.join(FAMILY_FIELDS)}")
        return
    name, language = family.get("family"), family.get("language")
    if not _is_text(name) or not _is_text(language):
        problems.append(f"{place}: family and language must be texts")
        return
    place = f"{language}/{name}"
    problems += _unknown_fields(place, family, FAMILY_FIELDS)
    facts = family.get("facts")
    if not isinstance(facts, dict) or not facts:
        problems.append(f"{place}: facts must be a mapping from what is asked about to the right answer")
        return
    may_go_on = family.get("may_go_on", False)
    if not isinstance(may_go_on, bool):
        problems.append(f"{place}: may_go_on is {may_go_on!r}, expected true or false")
    for fact in _facts_of(family, facts, place, problems):
        for wording, template in enumerate(fact.templates):
            before = template.replace("{x}", fact.subject).replace("{g}", fact.gold[0]).partition("{a}")[0]
            prompt = before.rstrip(" ")
            yield Probe(
                id=f"{place}/{fact.subject}/{wording}",
                channel=str(language),
                family=str(name),
                prompt=prompt,
                joiner=before[len(prompt) :],
                answer=fact.gold[0],
                also=fact.gold[1:],
                foils=fact.foils,
                may_go_on=bool(may_go_on),
                question=f"{place}/{fact.subject}",
            )


def _unknown_fields(place: str, given: dict[Any, Any], known: Sequence[str]) -> list[str]:
    return [f"{place}: {key} is not a field. {nearest_hint(str(key), known)}" for key in given if key not in known]


def _facts_of(family: dict[str, Any], facts: dict[Any, Any], place: str, problems: list[str]) -> list[_Fact]:
    """The table of a family. A row is a gold answer; or a list of it and its foils; or a mapping."""
    rows: list[_Fact] = []
    for subject, value in facts.items():
        where = f"{place}/{subject}"
        row = value if isinstance(value, dict) else {"gold": value}
        if isinstance(value, list):
            row = {"gold": value[:1], "foils": value[1:]}
        problems += _unknown_fields(where, row, FACT_FIELDS)
        gold = _texts(row.get("gold", []), f"{where}: gold", problems)
        foils = _texts(row.get("foils", family.get("foils", [])), f"{where}: foils", problems)
        templates = _texts(row.get("templates", family.get("templates", [])), f"{where}: templates", problems)
        if not gold:
            problems.append(f"{where}: it has no gold answer")
        if len(set(templates)) < LEAST_TEMPLATES:
            problems.append(f"{where}: {len(set(templates))} different templates, expected {LEAST_TEMPLATES} or more")
        if "templates" not in row and len(facts) > 1 and not all("{x}" in template for template in templates):
            problems.append(f"{where}: a template for several facts must have {{x}}")
        rows.append(_Fact(str(subject), gold, foils, templates))
    return [_with_foils(rows, number, place, problems) for number in range(len(rows)) if rows[number].gold]


def _with_foils(rows: list[_Fact], number: int, place: str, problems: list[str]) -> _Fact:
    """The row with foils: its own, or the answers of the rows after it. No two answers may begin alike: the
    probability of one would be part of the other's."""
    row = rows[number]
    foils = [foil for foil in row.foils if foil not in row.gold]  # those of the family may have them all
    if not row.foils:
        for other in (*rows[number + 1 :], *rows[:number]):
            if other.gold and not any(_overlap(other.gold[0], text) for text in (*row.gold, *foils)):
                foils.append(other.gold[0])
    if not foils:
        problems.append(f"{place}/{row.subject}: it has no foil, and the table has no other answer to use")
    problems += [
        f"{place}/{row.subject}: {one!r} and {other!r} are not two answers: one begins with the other"
        for one, other in itertools.combinations([*row.gold, *foils], 2)
        if _overlap(one, other)
    ]
    return _Fact(row.subject, row.gold, foils[:MAX_FOILS], row.templates)


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _texts(value: Any, where: str, problems: list[str]) -> list[str]:
    """One text or a list of them; whole numbers are texts too."""
    found = value if isinstance(value, list) else [value]
    bad = [each for each in found if not _is_text(each) and (isinstance(each, bool) or not isinstance(each, int))]
    if bad:
        problems.append(f"{where}: got {bad[0]!r}, expected text (yes, no, true and null need quotes in YAML)")
        return []
    return [str(each) for each in found]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# A file of contrast pairs: one JSON object a line, or YAML (ours: `pairs.yaml`). No torch here.
#
# In YAML a pair is one sentence with `{right|wrong}` where the two differ: 河里有一{条|张}鱼。


DIFFERENCE = re.compile(r"\{([^{}|]*)\|([^{}|]*)\}")
KIND_FIELDS = ("kind", "language", "pairs")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A right sentence and a wrong one."""

    id: str
    channel: str
    kind: str
    """Pairs of one kind are reported together."""
    right: str
    wrong: str


def read_pairs(path: Path) -> list[Pair]:
    """Read a file of pairs: YAML by its name, else one JSON object a line; all problems are named at once."""
    problems: list[str] = []
    found = _members(path, "pairs", Pair, _of_kind, problems)
    problems += [
        f"{pair.id}: right and wrong must be two different texts"
        for pair in found
        if not pair.right or not pair.wrong or pair.right == pair.wrong
    ]
    refuse(path, problems + repeated_ids(found))
    return found


def _of_kind(kind: Any, number: int, problems: list[str]) -> list[Pair]:
    place = f"kind {number}"
    if not isinstance(kind, dict) or set(kind) != set(KIND_FIELDS) or not isinstance(kind["pairs"], list):
        problems.append(f"{place}: expected a mapping of kind, language, and pairs, a list of sentences")
        return []
    place = f"{kind['language']}/{kind['kind']}"
    pairs = []
    for text in kind["pairs"]:
        if not isinstance(text, str) or not DIFFERENCE.search(text):
            problems.append(f"{place}: got {text!r}, expected a sentence with {{right|wrong}} where the two differ")
            continue
        right, wrong = DIFFERENCE.sub(r"\1", text), DIFFERENCE.sub(r"\2", text)
        pairs.append(
            Pair(id=f"{place}/{right}", channel=str(kind["language"]), kind=str(kind["kind"]), right=right, wrong=wrong)
        )
    return pairs
