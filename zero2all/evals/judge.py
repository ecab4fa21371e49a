"""Benchmarks asked of a model: accuracy, accuracy above chance with its interval, bits per byte of the right answer.

    results = judge(engine, read_tasks(folder, ["cmmlu", "piqa"]), JudgeOptions(limit=500))
    summary(results)  # one number for English, one for Chinese

An item that cannot be asked (longer than the context, …) is counted by its reason and named; the rest is scored.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from statistics import fmean
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.progress import progress, say
from zero2all.evals import forms as ways
from zero2all.evals.answers import credit, majority, read_answer, right_answers
from zero2all.evals.chat_tasks import judge_answer
from zero2all.evals.forms import PromptedItem, Writing
from zero2all.evals.items import BEST, CHAT_FORM, CODE, CONTINUE, FORMS, LABELS, WRITTEN, Item, Task, check_forms
from zero2all.evals.sandbox import SandboxLimits, program_of, run_program
from zero2all.evals.scorer import Question, Scored, score_questions
from zero2all.infer.chat import ChatPrompt
from zero2all.infer.engine import Engine
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import TextRequest, complete_all, engine_request
from zero2all.tokenizer.chat import Message

SUMMED = {
    "en": (*("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "mmlu"), *("blimp", "lambada", "gsm8k")),
    "zh": ("cmmlu", "ceval", "c3", "cmrc", "zhoblimp"),
}
"""The tasks of the two summary numbers."""

CHOSEN_ON = 200
"""Items of the split of the examples, to choose a form on."""
HALVINGS = 10
"""Of the items, to choose a form on one half and score it on the other."""
TOO_LONG = "longer than the context"
EMPTY_CONTINUATION = "empty continuation"
NO_CHOICES = "a question without choices"
SEVERAL = "several options may be right"
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
    """With several samples the first that gave the answer."""
    answers: tuple[str | None, ...] = ()
    """What was read in each sample, as options are numbered from 0; None: no answer."""
    credit: float | None = None
    """Of an item with several right options: the share of its options that was judged rightly."""
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
    no_answer: int = 0
    """Answers that could not be read; they are wrong."""
    credit: float | None = None
    """Mean partial credit, with items that have several right options."""
    credit_interval: tuple[float, float] | None = None
    chosen_on: int = 0
    """Items of another split that the form was chosen on."""

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
    """Of those that fit a task; None: all but think, which takes long."""
    shots: int | None = None
    """Examples before an item; None: as is usual for the task."""
    limit: int | None = None
    """At most so many items of a task, the same ones for the same seed."""
    run_code: bool = False
    """Programs that the model writes are run (see `sandbox` for what protects the machine); otherwise their items are
    counted as skipped."""
    seed: int = 0
    labels: str = LABELS
    samples: int = 1
    """Answers that are drawn for an item in the forms that write; the one given most often counts. 1: the likeliest."""
    temperature: float = 0.7
    """Of the draws, where there are several."""
    think_tokens: int = ways.SOLUTION_TOKENS
    chat: Callable[[Sequence[Message]], ChatPrompt] | None = None
    """Makes the prompt of a conversation: written answers are asked for as from an assistant."""


def judge(engine: Engine, tasks: Sequence[Task], options: JudgeOptions | None = None) -> list[FormResult]:
    """Ask every task in every form that fits it."""
    options = options or JudgeOptions()
    check_forms(options.forms)
    results = []
    for task in tasks:
        if options.forms is not None and BEST in options.forms:
            results += _in_form_of_examples(engine, task, options)
            continue
        asking = _TaskJudge(engine, task, options)
        for form in (*FORMS, CHAT_FORM):
            if form in task.forms and (form != "think" if options.forms is None else form in options.forms):
                results += asking.ask(form)
    return results


def _in_form_of_examples(engine: Engine, task: Task, options: JudgeOptions) -> list[FormResult]:
    """The task in the form that is best on items of another split, so that the choice gains nothing on those asked."""
    others = limited(task.name, task.shots, CHOSEN_ON, options.seed)
    if not others:
        say(f"{task.name}: there is no other split to choose its form on; left out")
        return []
    tried = replace(task, items=tuple(others), skipped={}, problems=())
    found = judge(engine, [tried], replace(options, forms=None, limit=None))
    best = max(found, key=lambda each: -math.inf if each.centred is None else each.centred).form
    asked = judge(engine, [task], replace(options, forms=[best.removesuffix("_pmi").partition("@")[0]]))
    return [replace(each, chosen_on=len(others)) for each in asked if each.form == best]


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
            score = fmean(centred for centred, _ in best.values())
            chosen = [next(each for each in by_task[task] if each.form == best[task][1][0]) for task in best]
            spread = [
                math.hypot(*(((each.centred or 0.0) - (each.centred_interval or (0.0, 0.0))[end]) for each in chosen))
                for end in (0, 1)
            ]
            interval = (score - spread[0] / len(chosen), score + spread[1] / len(chosen))
            found[language] = {"score": score, "interval": interval, "forms": forms}
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
        self.labels, self.run_code, self.options = options.labels, options.run_code, options
        self.count = min(task.default_shots if options.shots is None else options.shots, len(task.shots))
        items = limited(task.name, task.items, options.limit, options.seed)
        shots_of = ways.Shots(task, self.count, options.seed).of
        self.items = [(item, shots_of(item)) for item in items]
        self.golds: FormResult | None = None  # of the cloze form, which scores the right answers too

    def ask(self, form: str) -> list[FormResult]:
        """The results of a form; cloze has two, compared per byte and by PMI."""
        compared = {"cloze": self._cloze, "choice": self._choice, "bits": self._bits}
        return compared[form]() if form in compared else [self._write(form)]

    def _cloze(self) -> list[FormResult]:
        left_out = _LeftOut(self.task, "cloze")
        items = left_out.fitting(self.items, NO_CHOICES, lambda item: item.choices)
        asked = [ways.cloze(*each) for each in left_out.fitting(items, SEVERAL, lambda item: not item.golds)]
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
        fitting, several = [], []
        for item, shots in left_out.fitting(self.items, NO_CHOICES, lambda item: item.choices):
            if item.golds:
                several.append(PromptedItem(item, tuple(ways.each_option(item)), None, False))
            elif max(len(each.choices) for each in (item, *shots)) > len(self.labels):
                left_out.add(item, NO_LABELS)
            else:
                fitting.append(ways.choice(item, shots, self.labels))
        judged = []
        for each, scored, _ in self._scored(fitting, left_out):
            _, size, spans = _of_gold(each, scored)
            judged.append(_chosen(each.item, [found.logprob for found in scored], None, size, spans))
        for each, scored, _ in self._scored(several, left_out):
            gains = tuple(yes.logprob - no.logprob for yes, no in zip(scored[::2], scored[1::2], strict=True))
            answer = ",".join(str(number) for number, gain in enumerate(gains) if gain > 0)
            spans, chance = any(found.spans_border for found in scored), 0.5 ** len(gains)
            judged.append(_of_answers(each.item, [answer], "", chance, scores=gains, spans_border=spans))
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
        items = left_out.fitting(items, SEVERAL, lambda item: not item.golds)
        for each, scored, _ in self._scored([ways.gold(*each) for each in items], left_out):
            bits, size, spans = _of_gold(each, scored)
            correct = scored[0].is_greedy if each.item.shape == CONTINUE and not each.item.choices else None
            judged.append(ItemResult(each.item.id, correct, bits=bits, bytes=size, spans_border=spans))
        return [self._result("bits", judged, left_out)]

    def _write(self, form: str) -> FormResult:
        """The model writes, once or several times."""
        left_out = _LeftOut(self.task, form)
        writings = []
        for item, shots in self.items:
            if item.shape == CODE and not self.run_code:
                left_out.add(item, NOT_RUN)
            elif len(item.choices) > len(self.labels):
                left_out.add(item, NO_LABELS)
            elif form == "think":
                asked = 2 if self.options.shots is None else self.options.shots
                examples = ways.thought_examples(item, shots, asked)
                writings.append(ways.think(item, examples, self.labels, self.options.think_tokens))
            else:
                writings.append(ways.generate(item, shots, self.labels))
        judged = [self._read(*each, is_thought=form == "think") for each in self._written(writings, left_out)]
        return self._result(form, judged, left_out)

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

    def _written(self, writings: Sequence[Writing], left_out: _LeftOut) -> list[tuple[Writing, list[str]]]:
        """What was written for each item that could be asked, as often as samples are drawn."""
        requests: list[TextRequest] = []
        kept: list[tuple[Writing, Callable[[str], str]]] = []
        samples = self.options.samples
        for number, writing in enumerate(writings):
            try:
                request, reader = self._request(writing)
                engine_request(self.engine, request)
            except UsageError as error:
                left_out.add(writing.item, TOO_LONG, str(error))
                continue
            kept.append((writing, reader))
            for draw in range(samples) if samples > 1 else ():
                seed = int.from_bytes(blake2b(f"{self.options.seed} {number} {draw}".encode(), digest_size=6).digest())
                requests.append(replace(request, sampling=Sampling(self.options.temperature, seed=seed)))
            requests += [request] if samples == 1 else []
        with progress(f"{self.task.name} {left_out.form}", total=len(requests), unit="step") as bar:
            texts = complete_all(self.engine, requests, bar)
        firsts = range(0, len(texts), samples)
        return [
            (writing, [reader(text) for text in texts[first : first + samples]])
            for first, (writing, reader) in zip(firsts, kept, strict=True)
        ]

    def _request(self, writing: Writing) -> tuple[TextRequest, Callable[[str], str]]:
        """What is asked of the engine, and what takes the answer out of the text: an assistant's may begin with a
        thought."""
        if self.options.chat is None or writing.item.shape == CODE:
            return TextRequest(writing.prompt, writing.max_new_tokens, stop=writing.stop), str
        prompt = self.options.chat(ways.conversation(writing))
        asked = replace(TextRequest(prompt.prompt), max_new_tokens=writing.max_new_tokens, stop=prompt.stop)
        return replace(asked, heal=prompt.heal, end_ids=prompt.end_ids), lambda text: prompt.read(text).text

    def _read(self, writing: Writing, texts: Sequence[str], is_thought: bool) -> ItemResult:
        item = writing.item
        if "right" in item.extra:
            correct, chance = judge_answer(texts[0], item.extra["right"])
            return ItemResult(item.id, correct, written=texts[0], chance=chance)
        if item.shape != CODE:
            answers = [read_answer(item, text, self.labels, is_thought) for text in texts]
            given = majority(answers)
            options = len(item.choices)
            guesses = 2**options - 1 if item.golds else options
            chance = 1 / guesses if options and given is not None else 0.0
            return _of_answers(item, answers, texts[answers.index(given)], chance)
        outcome = run_program(program_of(item, texts[0]), SandboxLimits())
        return ItemResult(item.id, outcome == "passed", written=texts[0], note=outcome)

    def _result(self, form: str, judged: list[ItemResult], left_out: _LeftOut) -> FormResult:
        decided = [each for each in judged if each.correct is not None]
        right = sum(bool(each.correct) for each in decided)
        measured = [each for each in judged if each.bits is not None]
        size = sum(each.bytes for each in measured)
        partial = [each.credit for each in judged if each.credit is not None]
        samples = self.options.samples if form in WRITTEN else 1
        return FormResult(
            self.task.name,
            self.task.language,
            form if samples == 1 else f"{form}@{samples}",
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
            sum(answer is None for each in judged for answer in each.answers),
            fmean(partial) if partial else None,
            wilson(sum(partial), len(partial)) if partial else None,
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

    def fitting(
        self, items: Sequence[tuple[Item, tuple[Item, ...]]], reason: str, is_fitting: Callable[[Item], Any]
    ) -> list[tuple[Item, tuple[Item, ...]]]:
        """Those items, with their examples, that fit; the others are noted."""
        for item, _ in items:
            if not is_fitting(item):
                self.add(item, reason)
        return [(item, shots) for item, shots in items if is_fitting(item)]


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


def _of_answers(item: Item, answers: Sequence[str | None], written: str, chance: float, **more: Any) -> ItemResult:
    """The result of the answer that was given most often."""
    answer = majority(answers)
    is_option = bool(item.choices) and not item.golds and answer is not None
    partial = credit(item, answer) if item.golds else None
    return ItemResult(
        item.id, answer in right_answers(item), int(answer or 0) if is_option else None, written, tuple(answers),
        partial, chance=chance, **more,
    )  # fmt: skip


def _chosen(item: Item, scores: Sequence[float], bits: float | None, size: int, spans: bool) -> ItemResult:
    """The best option. A tie gives no credit: where a wrong option scores as well as the right one, the wrong one is
    chosen. So a model without a preference, or with scores that are no numbers, is never right by the order."""
    comparable = [-math.inf if math.isnan(score) else score for score in scores]
    best = max(range(len(scores)), key=lambda number: (comparable[number], number != item.gold))
    chance = 1 / len(scores)
    return ItemResult(
        item.id, best == item.gold, best, bits=bits, bytes=size, spans_border=spans, scores=tuple(scores), chance=chance
    )
