"""Models taught from examples, which give every text a score: `quality`, a classifier, and `reference`, perplexity.

Both are one table over hashed units and pairs of units (words in lower case with one digit for a number, signs, line
breaks, single Han, kana and Hangul), so that no vocabulary is kept and any script has a score:

    quality      the mean weight of a text's units and pairs, by logistic regression -> P(good), from 0 to 1
    reference    how often each unit and pair occurs in good text -> minus the mean bits of a unit after the one before
                 (Witten and Bell): p(w | c) = (count(c w) + kinds(c) p(w)) / (count(c) + kinds(c))

A score depends on the text and the table alone. A fifth of the examples, chosen by their text, is held out, and shows
what every threshold would drop. Figures: `python -m benchmarks.corpus_taught`.

    <workspace>/taught/<kind>/model.safetensors, report.json, manifest.json
"""

from __future__ import annotations

import heapq
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import crc32c_of, staged_folder, write_json
from zero2all.common.manifest import fingerprint, read_manifest, write_manifest
from zero2all.common.records import SPLITS, iter_records

if TYPE_CHECKING:
    from zero2all.corpus.sources import Source

TAUGHT, MODEL_NAME = "taught", "model.safetensors"
LABELS = {"quality": ("good", "bad"), "reference": ("reference",)}
SHAPES = {"quality": ((1 << 20) + 1, 1), "reference": ((1 << 22) + 1, 2)}
"""A weight for each row; or its count, and how many kinds follow it. The last row: the bias, or the totals."""
JUDGED_CHARS = 10_000
"""What is learned from one text, and judged of it: its beginning."""
SCALE, RATE, PASSES = 30.0, 0.1, 5
"""Logit of a text whose units and pairs all have the weight 1; of AdaGrad."""
UNSEEN = 2.0**-17
"""The chance of a unit that no reference text has."""
HELD_OUT, MOST, LEAST_EXAMPLES, ROUND = 0.2, (8_000, 2_000), 20, 4
"""Of each class, to learn from and held out; and the digits of a score."""
DROPPED_OF_GOOD = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""The thresholds that are shown drop so much of the good examples."""
SAMPLES, SAMPLE_CHARS = 3, 300
Examples = dict[str, tuple[list[str], list[str]]]
"""Class -> texts to learn from, texts held out."""


class TaughtModel(NamedTuple):
    """A model as it goes to other processes: by its folder, whose name is its kind."""

    folder: Path
    checksum: str

    def scores(self, texts: Sequence[str]) -> list[float]:
        """The score of each text."""
        return scores_of(texts, self.folder.name, _table(self))


def make_model(sources: Sequence[Source], workspace: Path) -> tuple[Path, dict[str, Any]]:
    """Teach a model and write it; returns its folder and its report."""
    names = [source.name for source in sources]
    kind = next((kind for kind, labels in LABELS.items() if sorted(labels) == sorted(names)), None)
    if kind is None:
        raise UsageError(
            f"{', '.join(names)} cannot be taught. Give good=PATH bad=PATH for a classifier of quality, or "
            "reference=PATH for perplexity."
        )
    examples, counts = _read_examples(sources, workspace / TAUGHT / ".examples")
    table, report = teach(kind, examples)
    report["examples"] = counts
    with staged_folder(workspace / TAUGHT / kind) as staging:
        save_file({"table": table}, staging / MODEL_NAME)
        write_json(staging / "report.json", report)
        write_manifest(staging, TAUGHT, fingerprint(report), {})
    return workspace / TAUGHT / kind, report


def find_model(workspace: Path, kind: str) -> TaughtModel:
    """The model of a workspace; an error where there is none that can be used."""
    folder = workspace / TAUGHT / kind
    manifest = read_manifest(folder, TAUGHT, "z2a corpus teach")
    found = TaughtModel(folder, manifest["files"].get(MODEL_NAME, {}).get("crc32c", ""))
    _table(found)
    return found


@cache
def _table(model: TaughtModel) -> np.ndarray:
    """The table of a model, which the process keeps."""
    path = model.folder / MODEL_NAME
    try:
        is_same, table = crc32c_of(path) == model.checksum, load_file(path)["table"]
    except (OSError, SafetensorError, KeyError) as error:
        raise BadInputError(f"{path} cannot be read ({error}). Run `z2a corpus teach` again.") from error
    if not is_same or table.shape != SHAPES[model.folder.name]:
        raise BadInputError(f"{path} was changed after it was made. Run `z2a corpus teach` again.")
    return table


def _read_examples(sources: Sequence[Source], scratch: Path) -> tuple[Examples, dict[str, Any]]:
    """The texts of each class in the order of their hashes, and how many there were; `scratch` is used and removed."""
    from zero2all.corpus import BuildOptions, build_corpus

    report = build_corpus(scratch, sources, BuildOptions(rules="none", valid_share=HELD_OUT, accept_drops=True))
    examples, counts = {}, {}
    for name, facts in report["sources"].items():
        texts = []
        for split, most in zip(SPLITS, MOST, strict=True):
            found = (record["content"][:JUDGED_CHARS] for record in iter_records(scratch, name, split))
            hashed = ((xxhash.xxh3_64_intdigest(text.encode()), text) for text in found)
            texts.append([text for _, text in heapq.nsmallest(most, hashed)])
        counts[name] = {"read": facts["records_in"], "damaged": facts["quarantined"], **facts["dropped"]}
        counts[name].update({"learned": len(texts[0]), "held out": len(texts[1])})
        examples[name] = (texts[0], texts[1])
    shutil.rmtree(scratch)
    return examples, counts


def teach(kind: str, examples: Examples) -> tuple[np.ndarray, dict[str, Any]]:
    """The table of these classes, and what every threshold would drop of the texts held out."""
    for label, (learned, held_out) in examples.items():
        if len(learned) < LEAST_EXAMPLES or not held_out:
            raise BadInputError(
                f"`{label}` has {len(learned)} different texts to learn from; at least {LEAST_EXAMPLES} are needed, "
                "and some hundreds are better."
            )
    table = _descend(examples) if kind == "quality" else _count(examples["reference"][0])
    scores = {label: np.array(scores_of(examples[label][1], kind, table)) for label in LABELS[kind]}
    good = scores[LABELS[kind][0]]
    texts = sorted(pair for label in scores for pair in zip(scores[label].tolist(), examples[label][1], strict=True))
    shown = [{"score": score, "excerpt": text[:SAMPLE_CHARS]} for score, text in texts]
    report: dict[str, Any] = {"thresholds": []}
    for line in np.quantile(good, DROPPED_OF_GOOD).round(ROUND).tolist():
        place = sum(score < line for score, _ in texts)
        dropped = {label: round(float((found < line).mean()), ROUND) for label, found in scores.items()}
        sides = {"below": shown[max(place - SAMPLES, 0) : place], "above": shown[place : place + SAMPLES]}
        report["thresholds"].append({"min_score": line, "dropped": dropped, **sides})
    if kind == "quality":
        wins = np.sign(good[:, None] - scores["bad"]).mean() / 2 + 0.5  # how often a good one is above a bad one
        return table, {"auc": round(float(wins), ROUND), **report}
    return table, {"perplexity": round(float(2 ** -good.mean()), ROUND), **report}


def scores_of(texts: Sequence[str], kind: str, table: np.ndarray) -> list[float]:
    """The score of each text: P(good), or minus the bits of a unit."""
    score = _certainty if kind == "quality" else _likeness
    return [round(float(score(_rows_of(text, kind), table)), ROUND) for text in texts]


def _rows_of(text: str, kind: str) -> np.ndarray:
    """(units, 2): the rows of the units of a text and of its pairs; a text without units has one of its own."""
    from zero2all.corpus.dedup.text_kernels import CLASSES, find_rows

    points = np.frombuffer(text[:JUDGED_CHARS].lower().encode("utf-32-le", "surrogatepass"), np.uint32)
    rows = np.zeros((len(points) + 1, 2), np.uint32)
    return rows[: max(find_rows(points, CLASSES, SHAPES[kind][0].bit_length() - 1, rows), 1)]


def _certainty(rows: np.ndarray, table: np.ndarray) -> float:
    """P(good) of a text."""
    return float(1 / (1 + np.exp(-SCALE * table[rows.ravel(), 0].mean(dtype=np.float64) - table[-1, 0])))


def _likeness(rows: np.ndarray, table: np.ndarray) -> float:
    """Minus the mean bits of a unit."""
    units, kinds = table[rows[:, 0]].T.astype(np.float64)
    all_units, all_kinds = table[-1].tolist()
    chance = (units + all_kinds * UNSEEN) / (all_units + all_kinds)
    follow = np.maximum(kinds[:-1], 1)
    chance[1:] = (table[rows[1:, 1], 0] + follow * chance[1:]) / (units[:-1] + follow)
    return float(np.log2(np.minimum(chance, 1)).mean())


def _descend(examples: Examples) -> np.ndarray:
    """The weights of the classifier: logistic regression by AdaGrad."""
    table = np.zeros(SHAPES["quality"], np.float32)
    weights, squares = table[:, 0], np.zeros(len(table), np.float32)
    pages = []
    for label in LABELS["quality"]:
        for text in examples[label][0]:
            rows, counts = np.unique(_rows_of(text, "quality"), return_counts=True)
            shares = np.append(counts * (SCALE / counts.sum()), 1).astype(np.float32)  # the last is the bias
            pages.append((np.append(rows, np.uint32(len(table) - 1)), shares, label == "good"))
    for number in range(PASSES):
        for at in np.random.Generator(np.random.PCG64(number)).permutation(len(pages)):
            rows, shares, is_good = pages[at]
            slopes = (1 / (1 + np.exp(-(weights[rows] * shares).sum())) - is_good) * shares
            squares[rows] += slopes * slopes
            weights[rows] -= RATE * slopes / np.sqrt(squares[rows] + 1e-12)
    return table


def _count(texts: Sequence[str]) -> np.ndarray:
    """Of each unit and pair how often it occurs, and of a unit how many kinds follow it; of all in the last row."""
    table = np.zeros(SHAPES["reference"], np.uint32)
    for text in texts:
        rows = _rows_of(text, "reference")
        units, counts = np.unique(rows[:, 0], return_counts=True)
        table[-1] += np.array([len(rows), (table[units, 0] == 0).sum()], np.uint32)
        table[units, 0] += counts.astype(np.uint32)
        pairs, firsts, counts = np.unique(rows[1:, 1], return_index=True, return_counts=True)
        np.add.at(table[:, 1], rows[firsts[table[pairs, 0] == 0], 0], 1)
        table[pairs, 0] += counts.astype(np.uint32)
    return table
