"""Teaching a model (`quality.py`) from examples, of which a fifth is held out and shows what a threshold would drop."""

from __future__ import annotations

import heapq
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import save_file

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import staged_folder, write_json
from zero2all.common.manifest import fingerprint, write_manifest
from zero2all.common.records import SPLITS, iter_records
from zero2all.corpus.build import build_corpus
from zero2all.corpus.quality import JUDGED_CHARS, MODEL_NAME, ROUND, SHAPES, TAUGHT, rows_of, scores_of, shares_of
from zero2all.corpus.settings import BuildOptions
from zero2all.corpus.sources import Source

LABELS = {"quality": ("good", "bad"), "reference": ("reference",)}
RATE, PASSES = 0.1, 5
"""Of AdaGrad."""
HELD_OUT, MOST, LEAST_EXAMPLES = 0.2, (8_000, 2_000), 20
"""Texts of each class, to learn from and held out."""
DROPPED_OF_GOOD = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""The thresholds that are shown drop so much of the good examples."""
SAMPLES, SAMPLE_CHARS = 3, 300
Examples = dict[str, tuple[list[str], list[str]]]
"""Class -> texts to learn from, texts held out."""


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


def _read_examples(sources: Sequence[Source], scratch: Path) -> tuple[Examples, dict[str, Any]]:
    """The texts of each class in the order of their hashes, and how many there were; `scratch` is used and removed."""
    sources = [replace(source, channel=None) if source.is_auto else source for source in sources]
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


def _descend(examples: Examples) -> np.ndarray:
    """The weights of the classifier: logistic regression by AdaGrad."""
    table = np.zeros(SHAPES["quality"], np.float32)
    weights, squares = table[:, 0], np.zeros(len(table), np.float32)
    pages = []
    for label in LABELS["quality"]:
        for text in examples[label][0]:
            rows, shares = shares_of(text)
            bias = np.uint32(len(table) - 1), np.float32(1)
            pages.append((np.append(rows, bias[0]), np.append(shares, bias[1]), label == "good"))
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
        rows = rows_of(text, "reference")
        units, counts = np.unique(rows[:, 0], return_counts=True)
        table[-1] += np.array([len(rows), (table[units, 0] == 0).sum()], np.uint32)
        table[units, 0] += counts.astype(np.uint32)
        pairs, firsts, counts = np.unique(rows[1:, 1], return_index=True, return_counts=True)
        np.add.at(table[:, 1], rows[firsts[table[pairs, 0] == 0], 0], 1)
        table[pairs, 0] += counts.astype(np.uint32)
    return table
