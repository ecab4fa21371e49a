"""docs/corpus.md says what the code does: its tables are compared with the settings they describe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from zero2all.corpus import BuildOptions
from zero2all.corpus.clean.config import EDITS, RULES, default_config
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.sources import FIELD_NAMES, KINDS

GUIDE = Path(__file__).parents[2] / "docs" / "corpus.md"
CHANNELS = ("zh", "en", "code", "other")
WORDS = {
    "from_chars": "from {} chars", "from_lines": "from {} lines", "from_units": "from {} units",
    "ngram_units": "n = {}",
    "spare_function_share": "spared from {:g}", "max_line_chars": "{:,} chars", "max_mean_line_chars": "mean {}",
    "script": "{}", "of": "{}", "spare_prose_share": "prose {:g}", "max_verse_share": "verse {:g}",
    "min_old_excess": "old {:g}", "max_old_share": "old {:g}", "max_rare_share": "rare {:g}",
    "max_old_rare_share": "old {:g}",
    "max_word_share": "words {:g}", "max_function_share": "function {:g}", "max_old_function_share": "old {:g}",
    "min_old_pair_share": "pairs {:g}", "from_pairs": "from {} pairs", "min_terms": "{} terms",
    "from_verse_pairs": "verse from {}",
    "spare_repeated_share": "repeated {:g}", "min_rare_share": "rare {:g}", "max_unended_bare_share": "unended {:g}",
}  # fmt: skip
LEFT_OUT = {"max_line_share"}
"""Settings of edits that a rule makes beside dropping."""


@pytest.fixture(scope="module")
def rows():
    """The cells of every table row of the guide, by the first cell."""
    lines = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row for row in cells}


def defaults_in_words(rule: str, channel: str) -> str:
    settings = dataclasses.asdict(getattr(default_config(channel), rule))
    if not settings.pop("on", True):
        return "off"
    zero_means_all = {name for name in settings if name.startswith("from_") and not settings[name]}
    shown = [name for name in settings if name not in LEFT_OUT | zero_means_all]
    return "; ".join(WORDS.get(name, "{:g}").format(settings[name]) for name in shown) or "on"


@pytest.mark.parametrize("rule", [name for name in RULES if name not in EDITS])
def test_defaults_of_each_rule(rows, rule):
    assert rows[rule][2:] == [defaults_in_words(rule, channel) for channel in CHANNELS]


def test_rules_stand_in_the_order_in_which_they_are_judged(rows):
    listed = [name for name in rows if name in RULES and len(rows[name]) == 6]
    assert [name for name in listed if name not in EDITS and name != "block_art"] == [
        name for name in RULES if name not in EDITS and name != "block_art"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_each_kind(rows, kind):
    mapping = KINDS[kind].mapping
    fields = [mapping.get(field, "") for field in ("content", "title", "category", "desc")]
    assert rows[kind][1:6] == [KINDS[kind].channel or "guessed", *fields]


@pytest.mark.parametrize("field", FIELD_NAMES)
def test_names_under_which_fields_are_recognised(field):
    assert f"| `{field}` | {FIELD_NAMES[field].replace(' ', ', ')} |" in GUIDE.read_text(encoding="utf-8")


def test_every_option_is_explained():
    text = GUIDE.read_text(encoding="utf-8")
    names = [each.name for each in dataclasses.fields(BuildOptions) if each.name not in ("clean", "dedup")]
    assert [name for name in names if f"`options.{name}`" not in text] == []
    assert [each.name for each in dataclasses.fields(DedupConfig) if each.name not in text] == []


def test_figures_of_the_search_for_near_duplicates(rows):
    config = DedupConfig()
    text = GUIDE.read_text(encoding="utf-8")
    assert f"b = {config.bands} *bands* of r = {config.rows}" in text
    assert f"counts from {config.needed_matches}" in text.replace("\n", " ")
    for column, similarity in enumerate(rows["J"][1:], 1):
        chance = float(similarity) + (1 - float(similarity)) / 256
        compared = 1 - (1 - chance**config.rows) ** config.bands
        assert abs(float(rows["compared"][column].removesuffix(" %")) / 100 - compared) < 0.001
