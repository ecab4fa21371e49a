"""Benchmarks asked of a model: accuracy, accuracy above chance with its interval, bits per byte of the right answer.

    results = judge(engine, read_tasks(folder, ["cmmlu", "piqa"]), JudgeOptions(limit=500))
    summary(results)  # one number for English, one for Chinese

An item that cannot be asked (longer than the context, …) is counted by its reason and named; the rest is scored.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.progress import progress
from zero2all.evals import forms as ways
from zero2all.evals.forms import PromptedItem, Writing
from zero2all.evals.items import CODE, CONTINUE, FORMS, LABELS, Item, Task, check_forms
from zero2all.evals.sandbox import SandboxLimits, program_of, run_program
from zero2all.evals.scorer import Question, Scored, score_questions
from zero2all.infer.engine import Engine
from zero2all.infer.text import TextRequest, complete, engine_request

SUMMED = {
    "en": (*("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "mmlu"), *("blimp", "lambada", "gsm8k")),
    "zh": ("cmmlu", "ceval", "c3", "cmrc", "zhoblimp"),
}
"""The tasks of the two summary numbers."""

HALVINGS = 10
"""Of the items, to choose a form on one half and score it on the other."""
TOO_LONG = "longer than the context"
EMPTY_CONTINUATION = "empty continuation"
NO_CHOICES = "a question without choices"
NO_PMI = "no unconditional prompt"
NO_LABELS = "more choices than labels"
NOT_RUN = "code is run only with --run-code"
Z95 = 1.959964


@dataclass(frozen=True)
class ItemResult:
    """What a model made of one item in one form."""

    id: str
    correct: bool | None = None
    """None: this form has no right or wrong."""
    chosen: int | None = None
    written: str = ""
    bits: float | None = None
    """Of the right answer, in all."""
    bytes: int = 0
    """UTF-8 bytes of the right answer."""
    spans_border: bool = False
    scores: tuple[float, ...] = ()
    """What the choices were compared by."""
    note: str = ""
    """How a program failed."""
    chance: float = 0.0
    """Of a guess: one of the options; 0 where the answer is open, and where options were to be written and none was."""


@dataclass(frozen=True)
class FormResult:
    """One task in one form."""

    task: str
    language: str
    form: str
    shots: int
    """Most examples before an item; fewer where the task has fewer."""
    items: int
    """Items that were judged."""
    skipped: dict[str, int]
    """Reason -> items left out, on reading or on asking."""
    problems: tuple[str, ...]
    """Items left out on asking, each in words."""
    chance: float
    accuracy: float | None
    interval: tuple[float, float] | None
    """95 % (Wilson) of the accuracy."""
    bits_per_byte: float | None
    border_spans: int
    """Items where a token spans the border of prompt and answer (see `scorer`)."""
    per_item: list[ItemResult] = field(repr=False)

    @property
    def centred(self) -> float | None:
        """(accuracy - chance) / (1 - chance): 0 is guessing, 1 is all right, whatever the number of choices."""
        return None if self.accuracy is None else self._centre(self.accuracy)

    @property
    def centred_interval(self) -> tuple[float, float] | None:
        """95 % of the centred accuracy."""
        return None if self.interval is None else (self._centre(self.interval[0]), self._centre(self.interval[1]))

    def _centre(self, accuracy: float) -> float:
        return (accuracy - self.chance) / (1 - self.chance)


@dataclass(frozen=True)
class JudgeOptions:
    """How benchmarks are asked."""

    forms: Sequence[str] | None = None
    """Of those that fit a task; None: all."""
    shots: int | None = None
    """Examples before an item; None: as is usual for the task."""
    limit: int | None = None
    """At most so many items of a task, the same ones for the same seed."""
    run_code: bool = False
    """Programs that the model writes are run (see `sandbox` for what protects the machine); otherwise their items are
    counted as skipped."""
    seed: int = 0
    labels: str = LABELS


def judge(engine: Engine, tasks: Sequence[Task], options: JudgeOptions | None = None) -> list[FormResult]:
    """Ask every task in every form that fits it."""
    options = options or JudgeOptions()
    check_forms(options.forms)
    results = []
    for task in tasks:
        asking = _TaskJudge(engine, task, options)
        for form in FORMS:
            if form in task.forms and (options.forms is None or form in options.forms):
                results += asking.ask(form)
    return results


def summary(results: Sequence[FormResult]) -> dict[str, dict[str, Any]]:
    """For en and zh: the mean over tasks of the centred accuracy, each task in its best form (as OLMES does: early a
    model can only be asked by cloze, later labels suit it better), of those in `SUMMED` that were asked. Compare only
    numbers over the same tasks."""
    found: dict[str, dict[str, Any]] = {}
    for language, names in SUMMED.items():
        by_task: dict[str, list[FormResult]] = {}
        for each in results:
            if each.task in names and each.centred is not None:
                by_task.setdefault(each.task, []).append(each)
        if by_task:
            best = {task: _in_best_form(forms) for task, forms in by_task.items()}
            forms = {task: "/".join(chosen) for task, (_, chosen) in best.items()}
            found[language] = {"score": fmean(centred for centred, _ in best.values()), "forms": forms}
    return found


def _in_best_form(forms: Sequence[FormResult]) -> tuple[float, list[str]]:
    """The centred accuracy in the best form, and the forms that were best. The form is chosen on one half of the items
    and scored on the other, both ways round, in the mean over several halvings: the best of three guesses would be
    above chance on the items that it was chosen on."""
    if len(forms) == 1:
        return forms[0].centred or 0.0, [forms[0].form]
    names = sorted({each.id for form in forms for each in form.per_item if each.correct is not None})
    rng = random.Random(f"halves of {forms[0].task}")
    chosen: Counter[str] = Counter()
    scores = []
    for _ in range(HALVINGS):
        first = set(rng.sample(names, len(names) // 2))
        for half in (first, set(names) - first):
            best = max(forms, key=lambda form: _centred_of(form, set(names) - half))
            scores.append((_centred_of(best, half), len(half)))
            chosen[best.form] += 1
    counted = [(score, weight) for score, weight in scores if score > -math.inf]
    total = sum(weight for _, weight in counted)
    return sum(score * weight for score, weight in counted) / total, [form for form, _ in chosen.most_common()]


def _centred_of(result: FormResult, names: Collection[str]) -> float:
    """The centred accuracy over some items; the least possible where none of them was judged."""
    mine = [each for each in result.per_item if each.correct is not None and each.id in names]
    if not mine:
        return -math.inf
    chance = fmean(each.chance for each in mine)
    return (fmean(bool(each.correct) for each in mine) - chance) / (1 - chance)


def wilson(right: float, total: int) -> tuple[float, float]:
    """The 95 % interval of a share, which stays within 0 and 1 for few items too."""
    share, z2 = right / total, Z95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def limited(task: str, items: Sequence[Item], limit: int | None, seed: int) -> list[Item]:
    """At most so many items of a task, the same ones for the same seed."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[place] for place in sorted(random.Random(f"{seed} {task}").sample(range(len(items)), limit))]


class _TaskJudge:
    """One task, asked of one model."""

    def __init__(self, engine: Engine, task: Task, options: JudgeOptions) -> None:
        self.engine, self.task = engine, task
        self.labels, self.run_code = options.labels, options.run_code
        self.count = min(task.default_shots if options.shots is None else options.shots, len(task.shots))
        items = limited(task.name, task.items, options.limit, options.seed)
        shots_of = ways.Shots(task, self.count, options.seed).of
        self.items = [(item, shots_of(item)) for item in items]
        self.golds: FormResult | None = None  # of the cloze form, which scores the right answers too

    def ask(self, form: str) -> list[FormResult]:
        """The results of a form; cloze has two, compared per byte and by PMI."""
        asking = {"cloze": self._cloze, "choice": self._choice, "bits": self._bits, "generate": self._generate}
        return asking[form]()

    def _cloze(self) -> list[FormResult]:
        left_out = _LeftOut(self.task, "cloze")
        asked = [ways.cloze(*each) for each in left_out.with_choices(self.items)]
        plain: list[ItemResult] = []
        by_pmi: list[ItemResult] = []
        without: list[Item] = []  # a text to be continued has no prompt that says nothing
        for each, scored, beside in self._scored(asked, left_out):
            continuations = _continuations(each)
            bits, size, spans = _of_gold(each, scored)
            lengths = [len(text.encode()) if each.by_bytes else 1 for text in continuations]
            scores = [found.logprob / length for found, length in zip(scored, lengths, strict=True)]
            plain.append(_chosen(each.item, scores, bits, size, spans))
            if beside is None:
                without.append(each.item)
            else:
                pairs = zip(scored, beside, strict=True)
                gains = [a.logprob - b.logprob if a.logprob > -math.inf else -math.inf for a, b in pairs]
                by_pmi.append(_chosen(each.item, gains, bits, size, spans))
        results = [self._result("cloze", plain, left_out)]
        self.golds = results[0]
        if by_pmi:
            for item in without:
                left_out.add(item, NO_PMI)
            results.append(self._result("cloze_pmi", by_pmi, left_out))
        return results

    def _choice(self) -> list[FormResult]:
        left_out = _LeftOut(self.task, "choice")
        fitting = []
        for item, shots in left_out.with_choices(self.items):
            if max(len(each.choices) for each in (item, *shots)) > len(self.labels):
                left_out.add(item, NO_LABELS)
            else:
                fitting.append(ways.choice(item, shots, self.labels))
        judged = []
        for each, scored, _ in self._scored(fitting, left_out):
            _, size, spans = _of_gold(each, scored)
            judged.append(_chosen(each.item, [found.logprob for found in scored], None, size, spans))
        return [self._result("choice", judged, left_out)]

    def _bits(self) -> list[FormResult]:
        """Bits of the right text of each item. Items with choices may have been scored in the cloze form already. A
        text to be continued (LAMBADA) is right where greedy decoding would write the rest."""
        left_out = _LeftOut(self.task, "bits")
        judged: list[ItemResult] = []
        items = self.items
        if self.golds is not None and self.golds.items:
            judged = [
                ItemResult(each.id, bits=each.bits, bytes=each.bytes, spans_border=each.spans_border)
                for each in self.golds.per_item
            ]
            left_out.counts.update(self.golds.skipped)
            left_out.counts.subtract(self.task.skipped)
            del left_out.counts[NO_CHOICES]
            items = [(item, shots) for item, shots in self.items if not item.choices]
        for each, scored, _ in self._scored([ways.gold(*each) for each in items], left_out):
            bits, size, spans = _of_gold(each, scored)
            correct = scored[0].is_greedy if each.item.shape == CONTINUE and not each.item.choices else None
            judged.append(ItemResult(each.item.id, correct, bits=bits, bytes=size, spans_border=spans))
        return [self._result("bits", judged, left_out)]

    def _generate(self) -> list[FormResult]:
        left_out = _LeftOut(self.task, "generate")
        writings = []
        for item, shots in self.items:
            if item.shape == CODE and not self.run_code:
                left_out.add(item, NOT_RUN)
            elif len(item.choices) > len(self.labels):
                left_out.add(item, NO_LABELS)
            else:
                writings.append(ways.generate(item, shots, self.labels))
        judged = [self._read(writing, text) for writing, text in self._written(writings, left_out)]
        return [self._result("generate", judged, left_out)]

    def _scored(
        self, asked: Sequence[PromptedItem], left_out: _LeftOut
    ) -> list[tuple[PromptedItem, list[Scored], list[Scored] | None]]:
        """For each item that could be scored: its continuations, and the same after a prompt without information."""
        questions: list[Question] = []
        for each in asked:
            questions += [*each.questions, *([each.unconditional] if each.unconditional else [])]
        with progress(f"{self.task.name} {left_out.form}", total=len(questions), unit="step") as bar:
            answers = iter(score_questions(self.engine, questions, bar))
        found = []
        for each in asked:
            parts = [next(answers) for _ in each.questions]
            beside = next(answers) if each.unconditional else None
            reason = next((part for part in (*parts, beside) if isinstance(part, str)), None)
            if reason is not None:
                left_out.add(each.item, _reason(reason), reason)
                continue
            scored = [one for part in parts for one in part]
            found.append((each, scored, beside))
        return found  # type: ignore[return-value]  # no part is a str here

    def _written(self, writings: Sequence[Writing], left_out: _LeftOut) -> list[tuple[Writing, str]]:
        requests = []
        kept = []
        for writing in writings:
            request = TextRequest(writing.prompt, writing.max_new_tokens, stop=writing.stop)
            try:
                engine_request(self.engine, request)
            except UsageError as error:
                left_out.add(writing.item, TOO_LONG, str(error))
                continue
            requests.append(request)
            kept.append(writing)
        texts = [""] * len(kept)
        with progress(f"{self.task.name} generate", total=len(kept), unit="step") as bar:
            for number, text, _ in complete(self.engine, requests):
                texts[number] = text
                bar.advance(1)
        return list(zip(kept, texts, strict=True))

    def _read(self, writing: Writing, text: str) -> ItemResult:
        item = writing.item
        if item.shape != CODE:
            has_label = item.choices and ways.extract_label(text, self.labels[: len(item.choices)]) is not None
            chance = 1 / len(item.choices) if has_label else 0.0
            return ItemResult(item.id, ways.is_right(item, text, self.labels), written=text, chance=chance)
        outcome = run_program(program_of(item, text), SandboxLimits())
        return ItemResult(item.id, outcome == "passed", written=text, note=outcome)

    def _result(self, form: str, judged: list[ItemResult], left_out: _LeftOut) -> FormResult:
        decided = [each for each in judged if each.correct is not None]
        right = sum(bool(each.correct) for each in decided)
        measured = [each for each in judged if each.bits is not None]
        size = sum(each.bytes for each in measured)
        return FormResult(
            self.task.name,
            self.task.language,
            form,
            self.count,
            len(judged),
            dict(Counter(self.task.skipped) + left_out.counts),
            tuple(left_out.problems),
            fmean(each.chance for each in decided) if decided else 0.0,
            right / len(decided) if decided else None,
            wilson(right, len(decided)) if decided else None,
            sum(each.bits or 0.0 for each in measured) / size if size else None,
            sum(each.spans_border for each in judged),
            judged,
        )


class _LeftOut:
    """Counts and names the items that could not be asked in a form."""

    def __init__(self, task: Task, form: str) -> None:
        self.task, self.form = task, form
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def add(self, item: Item, reason: str, detail: str = "") -> None:
        """Note an item."""
        self.counts[reason] += 1
        self.problems.append(f"{self.task.name} {self.form} {item.id}: {detail or reason}")

    def with_choices(self, items: Sequence[tuple[Item, tuple[Item, ...]]]) -> list[tuple[Item, tuple[Item, ...]]]:
        """Those that have choices; the others are noted."""
        for item, _ in items:
            if not item.choices:
                self.add(item, NO_CHOICES)
        return [(item, shots) for item, shots in items if item.choices]


def _reason(words: str) -> str:
    if "the model takes" in words:
        return TOO_LONG
    return EMPTY_CONTINUATION if "empty" in words else words


def _continuations(asked: PromptedItem) -> list[str]:
    return [text for question in asked.questions for text in question.continuations]


def _of_gold(asked: PromptedItem, scored: Sequence[Scored]) -> tuple[float, int, bool]:
    """Bits and bytes of the right answer, and whether a token spans the border."""
    place = (asked.item.gold or 0) if len(scored) > 1 else 0
    spans = any(each.spans_border for each in scored)
    return -scored[place].logprob / math.log(2), len(_continuations(asked)[place].encode()), spans


def _chosen(item: Item, scores: Sequence[float], bits: float | None, size: int, spans: bool) -> ItemResult:
    """The best option. A tie gives no credit: where a wrong option scores as well as the right one, the wrong one is
    chosen. So a model without a preference, or with scores that are no numbers, is never right by the order."""
    comparable = [-math.inf if math.isnan(score) else score for score in scores]
    best = max(range(len(scores)), key=lambda number: (comparable[number], number != item.gold))
    chance = 1 / len(scores)
    return ItemResult(item.id, best == item.gold, best, "", bits, size, spans, tuple(scores), chance=chance)
