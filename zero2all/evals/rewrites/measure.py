"""How much accuracy a model loses when the same items are asked otherwise: the memorisation gap.

For every task and rewrite, over the items that fit it: accuracy of the original and of the rewritten items, and their
difference with a paired 95 % interval. Two things would look like a gap and are none:

- Several questions made of one item (all rotations of the options, all wordings) are rarely *all* right, even of a
  model that knows half of them each time. So the accuracy is that of one question, the mean over them; how many items
  are right in all is given beside it.
- A guesser may do better on the originals than on the rewritten items: with more options, with none at all (a short
  answer), or because most right options stand where the model likes to answer. So the accuracy of the original is
  carried over first: what a model would get that knows the same items and guesses the others, with its own liking for
  some labels. The gap is what is missing from this *expected* accuracy.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from zero2all.common.language import cells, table_lines
from zero2all.common.language import translate as t
from zero2all.evals.items import CODE, WRITTEN, Item, Task
from zero2all.evals.judge import Z95, FormResult, JudgeOptions, judge, limited
from zero2all.evals.rewrites.base import Rewrite, order_of, origin_of, rewritten
from zero2all.evals.rewrites.list import Chain, ShotRewrite
from zero2all.evals.rewrites.options import HARDEST
from zero2all.infer.engine import Engine

DOES_NOT_FIT = "the rewrite does not fit"
NO_SHOTS = "too few examples"
VARIES = -1
COMPARED = ("cloze", "choice")
"""Forms that are compared where a rewrite names none; `generate` for open answers."""


class Said(NamedTuple):
    """The answer to one question."""

    options: int
    """How many there were; 0: an open answer."""
    gold: int
    chosen: int | None
    correct: bool


@dataclass(frozen=True)
class ModelAnswer:
    """What a model said to an item, or to all items that were made of it."""

    said: tuple[Said, ...]
    """Of each question that is not the original itself."""
    all_right: bool | None
    """Also of the original, where it is one of the rotations; None: only one question was asked."""
    chosen: int | None
    """Which option of the original; VARIES: not the same one each time; None: none of them."""

    @property
    def right(self) -> float:
        """Share of the questions that are right."""
        return fmean(each.correct for each in self.said)


def measure_rewrites(
    engine: Engine, tasks: Sequence[Task], chains: Mapping[str, Chain], options: JudgeOptions | None = None
) -> dict[str, Any]:
    """Ask all tasks as they are and rewritten; by task: rows, spread of the gaps, consistency. The forms of the options
    are those in which the original items may be asked."""
    options = options or JudgeOptions()
    report: dict[str, Any] = {}
    for task in tasks:
        items = [item for item in task.items if item.shape != CODE]  # programs are not rewritten
        task = replace(task, items=tuple(limited(task.name, items, options.limit, options.seed)))
        asking = _RewriteMeasure(engine, task, options)
        rows = [row for name, chain in chains.items() for row in asking.rows(name, chain)]
        report[task.name] = {"rows": rows, "spread": gap_spread(rows), "consistency": asking.consistency()}
    return report


class _RewriteMeasure:
    """One task, as it is and rewritten."""

    def __init__(self, engine: Engine, task: Task, options: JudgeOptions) -> None:
        self.engine, self.task, self.seed, self.asked_forms = engine, task, options.seed, options.forms
        self.options = options
        self.shots = task.default_shots if options.shots is None else options.shots
        self._originals: dict[str, dict[str, ModelAnswer]] = {}
        self._chosen: dict[str, dict[str, list[int]]] = {}
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
        usual = self._usual_forms()
        if form:
            usual = [each for each in usual if each in WRITTEN and self.asked_forms is not None]
        pairs = [(each, each) for each in usual if each not in WRITTEN or all(one.is_written for one in chain)]
        return [(baseline or form, form), *pairs] if form else pairs

    def _usual_forms(self) -> list[str]:
        """Those that compare likelihoods, and of those in which the model writes the ones that were asked for."""
        written = [form for form in WRITTEN if form in (self.asked_forms or ())]
        forms = [form for form in (*COMPARED, *written) if form in self.task.forms]
        return forms if any(item.choices for item in self.task.items) else written or ["generate"]

    def _row(self, name: str, chain: Sequence[Rewrite], baseline: str, form: str) -> dict[str, Any]:
        before = self._original(baseline)
        items = self._with_hardest() if any(rewrite.name == "R6" for rewrite in chain) else self.task.items
        made = {item.id: rewritten(item, chain, self.seed, form) for item in items}
        shots = [each[0] for each in (rewritten(shot, chain, self.seed, form) for shot in self.task.shots) if each]
        flat = tuple(each for variants in made.values() for each in variants)
        task = replace(self.task, items=flat, shots=tuple(shots), forms=(form,), skipped={}, problems=())
        results = self._judged(task, form, self.shots) if flat else []
        again = {each.id for item in items for each in made[item.id] if baseline == form and _is_same(each, item)}
        after = _gathered(results[0], flat, again) if results else {}
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
        (result, *_) = self._judged(replace(task, skipped={}), form, rewrite.count)
        after = _gathered(result, task.items)
        return self._compared(rewrite.name, form, form, before, after, result.skipped)

    def _judged(self, task: Task, form: str, shots: int) -> list[FormResult]:
        asked = replace(self.options, forms=[form], shots=shots, limit=None)
        return judge(self.engine, [replace(task, forms=(form,))], asked)

    def _original(self, form: str) -> dict[str, ModelAnswer]:
        if form not in self._originals:
            task = replace(self.task, forms=(form,))
            found = self._judged(task, form, self.shots)
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

    def _note(self, baseline: str, answers: Mapping[str, ModelAnswer]) -> None:
        of_form = self._chosen.setdefault(baseline, {})
        for name, answer in answers.items():
            if answer.chosen is not None:
                of_form.setdefault(name, []).append(answer.chosen)

    def _compared(
        self,
        name: str,
        baseline: str,
        form: str,
        before: Mapping[str, ModelAnswer],
        after: Mapping[str, ModelAnswer],
        skipped: Mapping[str, int],
    ) -> dict[str, Any]:
        self._note(baseline, after)
        both = [item for item in before if item in after]
        chosen = [(before[item].chosen, after[item].chosen) for item in both]
        comparable = [(one, other) for one, other in chosen if one is not None and other is not None]
        same = sum(one == other for one, other in comparable) / len(comparable) if comparable else None
        row = {"rewrite": name, "baseline": baseline, "form": form, "items": len(both), "skipped": dict(skipped)}
        found = gap_of([before[item] for item in both], [after[item] for item in both], baseline == form)
        return {**row, **found, "same_answer": same}

    def consistency(self) -> dict[str, float]:
        """By form of the original: the share of items whose answer stays the same under all rewrites that keep the
        original options."""
        shares = {}
        for form, of_form in self._chosen.items():
            several = [said for said in of_form.values() if len(said) > 1]
            same = sum(len(set(said)) == 1 and VARIES not in said for said in several)
            if several:
                shares[form] = same / len(several)
        return shares


def _is_same(one: Item, other: Item) -> bool:
    """Whether two items are asked alike: the first rotation of the options is the original."""
    return all(getattr(one, name) == getattr(other, name) for name in ("question", "choices", "context", "shape"))


def _gathered(result: FormResult, items: Sequence[Item], again: Collection[str] = ()) -> dict[str, ModelAnswer]:
    """What was said to each original for which all items made of it were asked. `again`: ids of those that are the
    original itself."""
    found = {each.id: each for each in result.per_item}
    by_origin: dict[str, list[Item]] = {}
    for item in items:
        by_origin.setdefault(origin_of(item), []).append(item)
    answers = {}
    for origin, variants in by_origin.items():
        asked = [(item, found[item.id]) for item in variants if item.id in found]
        if len(asked) < len(variants) or any(each.correct is None for _, each in asked):
            continue
        options = {_option(item, each.chosen) for item, each in asked}
        chosen = None if None in options else options.pop() if len(options) == 1 else VARIES
        said = tuple(
            Said(0 if item.golds else len(item.choices), item.gold or 0, each.chosen, bool(each.correct))
            for item, each in asked
            if item.id not in again or len(asked) == 1
        )
        all_right = all(each.correct for _, each in asked) if len(asked) > 1 else None
        answers[origin] = ModelAnswer(said, all_right, chosen)
    return answers


def _option(item: Item, chosen: int | None) -> int | None:
    """Which option of the original was chosen; None where it is none of them."""
    order = order_of(item)
    if chosen is None or order is None or order[chosen] < 0:
        return None
    return order[chosen]


# ---- the gap --------------------------------------------------------------------------------------------------


def gap_of(before: Sequence[ModelAnswer], after: Sequence[ModelAnswer], is_same_form: bool) -> dict[str, Any]:
    """The answers to some originals and to what was made of them -> both accuracies, what a guesser would get of each,
    the expected accuracy, and the gap with its interval and p.

    Of originals right with accuracy a, where a guesser has g, the share (1 - a) / (1 - g) is not known; guessed in the
    rewritten items, where a guesser has h, these give an accuracy of 1 - (1 - h) (1 - a) / (1 - g). Never more than
    a: where fewer options are left (R6), they may be those that mislead this model."""
    names = ("original", "guess", "rewritten", "rewritten_guess", "expected", "all_right", "gap", "gap_interval", "p")
    if not before:
        return dict.fromkeys(names)
    said = [[each for answer in answers for each in answer.said] for answers in (before, after)]
    seen = [said[0] + said[1]] * 2 if is_same_form else said
    guess, later = (_guesser(answers, each) for answers, each in zip((before, after), seen, strict=True))
    scale = max(1.0, (1 - later) / max(1 - guess, 1 / (len(before) + 1)))
    original, rewritten = ([answer.right for answer in answers] for answers in (before, after))
    gaps = [1 - scale * (1 - one) - other for one, other in zip(original, rewritten, strict=True)]
    all_right = [answer.all_right for answer in after if answer.all_right is not None]
    gap, interval, p = mean_gap(gaps)
    expected = 1 - scale * (1 - fmean(original))
    of_all = fmean(all_right) if all_right else None
    values = (fmean(original), guess, fmean(rewritten), later, expected, of_all, gap, interval, p)
    return dict(zip(names, values, strict=True))


def _guesser(answers: Sequence[ModelAnswer], seen: Sequence[Said]) -> float:
    """The accuracy of a guesser who likes each place among the options as the model does. The liking shows where the
    model is wrong: how often it chose a place of those times when that place was wrong."""
    likings: dict[int, list[float]] = {}
    for options in {each.options for each in seen if each.options}:
        mine = [each for each in seen if each.options == options]
        wrong = Counter(each.chosen for each in mine if not each.correct)
        chances = [sum(each.gold != place for each in mine) for place in range(options)]
        usual = wrong.total() / max(1, sum(chances))
        rates = [(wrong[place] + usual) / (chances[place] + 1) for place in range(options)]
        likings[options] = [rate / sum(rates) if usual else 1 / options for rate in rates]
    return fmean(
        fmean(likings[each.options][each.gold] if each.options else 0.0 for each in answer.said) for answer in answers
    )


def mean_gap(gaps: Sequence[float]) -> tuple[float, tuple[float, float], float]:
    """The mean, its 95 % interval and two-sided p: a normal interval with one more item on either side, good for few
    items too (Bonett and Price, for gaps of -1, 0 and 1)."""
    total = len(gaps) + 2
    middle = math.fsum(gaps) / total
    error = math.sqrt(((math.fsum(gap**2 for gap in gaps) + 2) / total - middle**2) / total)
    interval = (max(-1.0, middle - Z95 * error), min(1.0, middle + Z95 * error))
    return fmean(gaps), interval, math.erfc(abs(middle) / error / math.sqrt(2))


def gap_spread(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """The least and the largest gap of the rows that are asked in the same forms; others cannot be compared."""
    gaps: dict[str, list[float]] = {}
    for row in rows:
        if row["gap"] is not None:
            gaps.setdefault(forms_words(row), []).append(row["gap"])
    return {forms: (min(found), max(found)) for forms, found in gaps.items() if len(found) > 1}


def forms_words(row: Mapping[str, Any]) -> str:
    """The form of the original and, if it is another, that of the rewritten items."""
    return row["form"] if row["form"] == row["baseline"] else f"{row['baseline']} → {row['form']}"


# Rewrites in the report of a checkpoint: the section `rewrites`, its table and its metrics.


def rewrite_figures(section: Mapping[str, Any]) -> dict[str, float]:
    """Metrics: the memorisation gap of each rewrite, and the consistency of each task."""
    figures = {}
    for task, found in section["tasks"].items():
        for row in found["rows"]:
            if row["gap"] is not None:
                figures[f"eval/rewrites/gap/{task}/{row['rewrite']}/{row['form']}"] = row["gap"]
        for form, share in found["consistency"].items():
            figures[f"eval/rewrites/consistency/{task}/{form}"] = share
    return figures


def rewrite_lines(section: Mapping[str, Any]) -> list[str]:
    """The section as a table for a terminal."""
    rows: list[str | list[str]] = []
    for task, found in section["tasks"].items():
        rows.append(f"  {task}")
        if not found["rows"]:
            rows.append(t("    none of these rewrites is compared in the forms of --forms"))
        for row in found["rows"]:
            if row["items"]:
                values = {**row, "forms": forms_words(row), "left_out": sum(row["skipped"].values())}
                rows.append([f"  {row['rewrite']}", *cells(values, ROW_CELLS)])
        for reason in dict.fromkeys(reason for row in found["rows"] if not row["items"] for reason in row["skipped"]):
            without = dict.fromkeys(
                row["rewrite"] for row in found["rows"] if reason in row["skipped"] and not row["items"]
            )
            rows.append(t(f"    all items left out ({reason}): {', '.join(without)}"))
        for forms, (low, high) in found["spread"].items():
            rows.append(t(f"    {forms}: gaps from {low:+.1%} to {high:+.1%}"))
        for form, share in found["consistency"].items():
            rows.append(t(f"    the same answer as {form} and under all its rewrites: {share:.1%} of the items"))
    figures = t("form | items | original | expected | rewritten | gap | (95 %) | same | all right | left out")
    return ["", *table_lines(f"{t('rewrites')} | {figures}", rows)]


ROW_CELLS = {"forms": "", "items": ",", "original": ".1%", "expected": ".1%", "rewritten": ".1%", "gap": "+.1%"}
ROW_CELLS |= {"gap_interval": "+.1%", "same_answer": ".1%", "all_right": ".1%", "left_out": ","}
