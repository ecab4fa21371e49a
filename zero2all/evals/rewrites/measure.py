"""How much accuracy a model loses when the same items are asked otherwise: the memorisation gap.

For every task and rewrite, over the items that fit it: accuracy of the original and of the rewritten items, their
difference with a paired 95 % interval, and McNemar's p. Over all rewrites of a task: the spread of accuracies, and how
many items get the same answer whatever way they are asked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero2all.evals.items import CODE, Item, Task
from zero2all.evals.judge import Z95, FormResult, judge
from zero2all.evals.rewrites.base import Rewrite, order_of, origin_of, rewritten
from zero2all.evals.rewrites.list import Chain
from zero2all.evals.rewrites.options import HARDEST
from zero2all.evals.rewrites.shots import ShotRewrite
from zero2all.infer.engine import Engine

DOES_NOT_FIT = "the rewrite does not fit"
NO_SHOTS = "too few examples"
VARIES = -1
COMPARED = ("cloze", "choice")
"""Forms that are compared where a rewrite names none; `generate` for open answers."""


@dataclass(frozen=True)
class Answer:
    """What a model said to an item, or to all items that were made of it."""

    correct: bool
    chosen: int | None
    """Which option of the original; VARIES: not the same one each time; None: none of them."""


def measure_rewrites(
    engine: Engine,
    tasks: Sequence[Task],
    chains: Mapping[str, Chain],
    shots: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    forms: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Ask all tasks as they are and rewritten; by task: rows, spread and consistency. `forms`: those in which the
    original items may be asked (None: all)."""
    report: dict[str, Any] = {}
    for task in tasks:
        asking = _Asking(engine, _limited(task, limit, seed), shots, seed, forms)
        rows = [row for name, chain in chains.items() for row in asking.rows(name, chain)]
        report[task.name] = {"rows": rows, **asking.spread(rows), "consistency": asking.consistency()}
    return report


def _limited(task: Task, limit: int | None, seed: int) -> Task:
    items = [item for item in task.items if item.shape != CODE]  # programs are not rewritten
    if limit is not None and limit < len(items):
        places = sorted(random.Random(f"{seed} {task.name}").sample(range(len(items)), limit))
        items = [items[place] for place in places]
    return replace(task, items=tuple(items))


class _Asking:
    """One task, as it is and rewritten."""

    def __init__(self, engine: Engine, task: Task, shots: int | None, seed: int, forms: Sequence[str] | None) -> None:
        self.engine, self.task, self.seed, self.asked_forms = engine, task, seed, forms
        self.shots = task.default_shots if shots is None else shots
        self._originals: dict[str, dict[str, Answer]] = {}
        self._said: dict[str, dict[str, list[int]]] = {}
        """By form of the original, of each item: the options chosen, whatever way it was asked."""

    def rows(self, name: str, chain: Chain) -> list[dict[str, Any]]:
        """One row for every form in which a rewrite is compared with the original."""
        if isinstance(chain, ShotRewrite):
            return [self._shot_row(chain, form) for form in self._usual_forms() if self._is_asked(form)]
        forms = [(baseline, form) for baseline, form in self._forms(chain) if self._is_asked(baseline)]
        return [self._row(name, chain, baseline, form) for baseline, form in forms]

    def _is_asked(self, baseline: str) -> bool:
        return self.asked_forms is None or baseline in self.asked_forms

    def _forms(self, chain: Sequence[Rewrite]) -> list[tuple[str, str]]:
        """(form of the original, form of the rewritten items)."""
        form = next((rewrite.form for rewrite in reversed(chain) if rewrite.form), "")
        baseline = next((rewrite.baseline for rewrite in reversed(chain) if rewrite.baseline), "")
        if form:
            return [(baseline or form, form)]
        return [(usual, usual) for usual in self._usual_forms()]

    def _usual_forms(self) -> list[str]:
        forms = [form for form in COMPARED if form in self.task.forms]
        return forms if any(item.choices for item in self.task.items) else ["generate"]

    def _row(self, name: str, chain: Sequence[Rewrite], baseline: str, form: str) -> dict[str, Any]:
        before = self._original(baseline)
        items = self._with_hardest() if any(rewrite.name == "R6" for rewrite in chain) else self.task.items
        made = {item.id: rewritten(item, chain, self.seed) for item in items}
        shots = [each[0] for each in (rewritten(shot, chain, self.seed) for shot in self.task.shots) if each]
        flat = tuple(each for variants in made.values() for each in variants)
        task = replace(self.task, items=flat, shots=tuple(shots), forms=(form,), skipped={}, problems=())
        results = judge(self.engine, [task], [form], self.shots, seed=self.seed) if flat else []
        after = _gathered(results[0], flat) if results else {}
        skipped = dict(results[0].skipped) if results else {}
        unfit = sum(not variants for variants in made.values())
        if unfit:
            skipped[DOES_NOT_FIT] = unfit
        return self._compared(name, baseline, form, before, after, skipped)

    def _shot_row(self, rewrite: ShotRewrite, form: str) -> dict[str, Any]:
        before = self._original(form)
        task = rewrite.task(self.task, self.seed)
        if rewrite.count and len(task.shots) < rewrite.count:
            return self._compared(rewrite.name, form, form, before, {}, {NO_SHOTS: len(task.items)})
        (result, *_) = judge(self.engine, [replace(task, skipped={})], [form], rewrite.count, seed=self.seed)
        after = _gathered(result, task.items)
        return self._compared(rewrite.name, form, form, before, after, result.skipped)

    def _original(self, form: str) -> dict[str, Answer]:
        if form not in self._originals:
            task = replace(self.task, forms=(form,))
            found = judge(self.engine, [task], [form], self.shots, seed=self.seed)
            self._originals[form] = _gathered(found[0], task.items)
            if form == "cloze":
                self._scores = {each.id: each.scores for each in found[0].per_item}
            self._note(form, self._originals[form])
        return self._originals[form]

    def _with_hardest(self) -> list[Item]:
        """The items, each with the wrong option that the model finds likeliest."""
        self._original("cloze")
        items = []
        for item in self.task.items:
            scores = self._scores.get(item.id)
            if scores:
                wrong = [number for number in range(len(scores)) if number != item.gold]
                item = replace(item, extra={**item.extra, HARDEST: max(wrong, key=scores.__getitem__)})
            items.append(item)
        return items

    def _note(self, baseline: str, answers: Mapping[str, Answer]) -> None:
        of_form = self._said.setdefault(baseline, {})
        for name, answer in answers.items():
            if answer.chosen is not None:
                of_form.setdefault(name, []).append(answer.chosen)

    def _compared(
        self,
        name: str,
        baseline: str,
        form: str,
        before: Mapping[str, Answer],
        after: Mapping[str, Answer],
        skipped: Mapping[str, int],
    ) -> dict[str, Any]:
        self._note(baseline, after)
        both = [item for item in before if item in after]
        pairs = [(before[item].correct, after[item].correct) for item in both]
        chosen = [(before[item].chosen, after[item].chosen) for item in both]
        comparable = [(one, other) for one, other in chosen if one is not None and other is not None]
        same = sum(one == other for one, other in comparable) / len(comparable) if comparable else None
        row = {"rewrite": name, "baseline": baseline, "form": form, "items": len(pairs), "skipped": dict(skipped)}
        return {**row, **paired_gap(pairs), "same_answer": same}

    def spread(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Lowest and highest accuracy over the rewrites, and their distance."""
        found = [row["rewritten"] for row in rows if row["rewritten"] is not None]
        if not found:
            return {"lowest": None, "highest": None, "spread": None}
        return {"lowest": min(found), "highest": max(found), "spread": max(found) - min(found)}

    def consistency(self) -> dict[str, float]:
        """By form of the original: share of the items that get the same answer as it stands and under all rewrites
        whose answer is one of the original options."""
        shares = {}
        for form, of_form in self._said.items():
            several = [said for said in of_form.values() if len(said) > 1]
            same = sum(len(set(said)) == 1 and VARIES not in said for said in several)
            if several:
                shares[form] = same / len(several)
        return shares


def _gathered(result: FormResult, items: Sequence[Item]) -> dict[str, Answer]:
    """What was said to each original: right only where all items made of it were asked and are right."""
    found = {each.id: each for each in result.per_item}
    by_origin: dict[str, list[Item]] = {}
    for item in items:
        by_origin.setdefault(origin_of(item), []).append(item)
    answers = {}
    for origin, variants in by_origin.items():
        said = [found[item.id] for item in variants if item.id in found]
        if len(said) < len(variants) or any(each.correct is None for each in said):
            continue
        options = {_option(item, each.chosen) for item, each in zip(variants, said, strict=True)}
        chosen = None if None in options else options.pop() if len(options) == 1 else VARIES
        answers[origin] = Answer(all(bool(each.correct) for each in said), chosen)
    return answers


def _option(item: Item, chosen: int | None) -> int | None:
    """Which option of the original was chosen; None where it is none of them."""
    order = order_of(item)
    if chosen is None or order is None or order[chosen] < 0:
        return None
    return order[chosen]


def paired_gap(pairs: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """(original right, rewritten right) of each item -> both accuracies, the gap with its 95 % interval (Bonett and
    Price: a normal interval with one more item on either side, good for few items too), and McNemar's exact p."""
    total = len(pairs)
    if not total:
        return {"original": None, "rewritten": None, "gap": None, "gap_interval": None, "p": None}
    lost = sum(before and not after for before, after in pairs)
    won = sum(after and not before for before, after in pairs)
    middle = (lost - won) / (total + 2)
    half = Z95 * math.sqrt(((lost + won + 2) / (total + 2) - middle**2) / (total + 2))
    changed = lost + won
    tail = sum(math.comb(changed, number) for number in range(min(lost, won) + 1))
    return {
        "original": sum(before for before, _ in pairs) / total,
        "rewritten": sum(after for _, after in pairs) / total,
        "gap": (lost - won) / total,
        "gap_interval": (max(-1.0, middle - half), min(1.0, middle + half)),
        "p": min(1.0, 2 * tail / 2**changed),
    }
