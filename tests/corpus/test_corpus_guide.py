"""docs/corpus.md says what the code does: its tables are compared with the settings they describe."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from zero2all.cli.main import build_parser
from zero2all.corpus import BuildOptions
from zero2all.corpus.clean.config import EDITS, RULES
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.sources import FIELD_NAMES, KINDS

GUIDE = (Path(__file__).parents[2] / "docs" / "corpus.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> list[str]:
    """The names in the first column of the table with this heading, in order."""
    table = GUIDE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_edits_and_rules_are_listed_in_the_order_in_which_they_are_judged():
    assert set(first_cells("edit")) == (set(EDITS) - {"kinds"}) | {"block_art"}
    rules = [name for name in RULES if name not in EDITS and name != "block_art"]
    assert [name for name in first_cells("rules, in this order") if name != "block_art"] == rules


def test_every_kind_is_named():
    assert [kind for kind in KINDS if f"`{kind}`" not in GUIDE] == []


@pytest.mark.parametrize("field", FIELD_NAMES)
def test_names_under_which_fields_are_recognised(field):
    assert f"| `{field}` | {FIELD_NAMES[field].replace(' ', ', ')} |" in GUIDE


def test_every_option_is_a_flag_with_help_or_explained():
    flags = build_parser().verb("corpus").verb("build").flags
    names = [each.name for each in dataclasses.fields(BuildOptions) if each.name not in ("clean", "dedup")]
    without_flag = [name for name in names if f"--{name.replace('_', '-')}" not in flags]
    assert [name for name in without_flag if f"`options.{name}" not in GUIDE] == []
    settings = {each.name for each in dataclasses.fields(DedupConfig)}
    assert [name for name in settings if name not in GUIDE] == []


def test_figures_of_the_search_for_near_duplicates():
    config = DedupConfig()
    assert f"b = {config.bands} bands of r = {config.rows}" in GUIDE
    assert f"agree in {config.needed_matches} of 256 bytes" in GUIDE
    similarities, compared = (
        [cell.strip() for cell in re.search(rf"^\| {name} \|(.*)\|$", GUIDE, re.MULTILINE)[1].split("|")]
        for name in ("J", "compared")
    )
    for similarity, share in zip(map(float, similarities), compared, strict=True):
        chance = similarity + (1 - similarity) / 256
        expected = 1 - (1 - chance**config.rows) ** config.bands
        assert abs(float(share.removesuffix(" %")) / 100 - expected) < 0.001
