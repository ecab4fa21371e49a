"""A probes file: one JSON object a line, each a short question with one right answer.

No torch here: a mistake in the file is reported before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.schema import Problem, build

REPORTED_APART = ("arithmetic",)
"""Families that are shown but not part of the mean: they test a skill, not a fact."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question to a trained model."""

    id: str
    channel: str
    family: str
    prompt: str
    """Text to continue; no space at its end."""
    joiner: str = ""
    """What comes between prompt and answer: a space or nothing."""
    answer: str
    foils: list[str] = field(default_factory=list)
    """Wrong answers of the same kind, to rank the right one against."""
    new_wording: bool = False
    """The wording occurs nowhere in the training text, not even with another fact."""

    @property
    def group(self) -> str:
        """The name under which results are averaged: the family, with new wordings apart."""
        return f"{self.family} (new wording)" if self.new_wording else self.family

    @property
    def counts(self) -> bool:
        """Whether this probe is part of the mean accuracy."""
        return not self.new_wording and self.family not in REPORTED_APART


def read_probes(path: Path) -> list[Probe]:
    """Read a probes file; the error for a bad line names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInputError(f"The probes file {path} cannot be read: {error}") from error
    if not lines:
        raise BadInputError(f"The probes file {path} is empty. Expected one JSON object a line, each a probe.")
    return [_read_probe(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]


def _read_probe(line: bytes, place: str) -> Probe:
    problems: list[Problem] = []
    try:
        probe = build(Probe, jsonio.loads(line), "", problems)
    except ValueError as error:
        raise BadInputError(f"{place} is no JSON ({error}). Expected one JSON object a line.") from error
    if not problems and not probe.answer:
        problems.append(Problem("answer", probe.answer, "some text"))
    if problems:
        raise BadInputError(
            f"{place} is no probe: {' '.join(map(str, problems))} Expected an object with id, channel, family, prompt, "
            f"answer, and optionally joiner, foils, new_wording."
        )
    assert isinstance(probe, Probe), "build returns what it was asked for when it found no problem"
    return probe
