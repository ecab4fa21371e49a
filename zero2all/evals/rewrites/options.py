"""R1 to R6: the options under other labels, in another order, replaced, or fewer."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from zero2all.evals.items import QUESTION, Item, language_of
from zero2all.evals.rewrites.base import Rewrite, of_choices, with_options

LABEL_SETS = {
    "han": "一二三四五六七八九十",
    "stems": "甲乙丙丁戊己庚辛壬癸",
    "circled": "①②③④⑤⑥⑦⑧⑨⑩",
    "digits": "123456789",
    "letters": "JKLMNOPQRS",
}
NONE_OF_THEM = {"en": "None of the others", "zh": "其他选项均不正确"}
"""In words that stay true wherever the option stands."""
NEEDS_ALL_OPTIONS = re.compile(
    r"最|不正确|不属于|不包括|错误|除了|\b(?:not|except|best|most|least|false|incorrect|following statements)\b", re.I
)
"""Questions that compare the options or ask for the wrong one: `none of the others` would have no clear answer."""
SPEAKS_OF_OPTIONS = re.compile(r"\b(?:above|below|none of|both|all of|[A-E] and [A-E])\b|以上|都对|都不|均", re.I)
"""Options that speak of other options lose their meaning when those move."""


def listed(item: Item, labels: Sequence[str], options_first: bool = False) -> str:
    """The question with its labelled options as one text."""
    mark = "．" if language_of(item) == "zh" else ". "
    options = [
        f"{label} {text}" if label == "-" else f"{label}{mark}{text}"
        for label, text in zip(labels, item.choices, strict=False)
    ]
    return "\n".join([*options, item.question] if options_first else [item.question, *options])


def labelled(item: Item, labels: str, options_first: bool = False) -> Item | None:
    """The item with its options inside the question, to be answered by a label."""
    count = len(item.choices)
    if count > len(labels):
        return None
    return with_options(
        item, tuple(labels[:count]), item.gold or 0, question=listed(item, labels, options_first), shape=QUESTION
    )


def listed_for_writing(item: Item, labels: str, options_first: bool = False) -> Item | None:
    """The same, to be answered in writing: by a label, or where there is none (`-`) by the text of an option."""
    if labels != "-" and len(item.choices) > len(labels):
        return None
    shown = "-" * len(item.choices) if labels == "-" else labels
    extra = {**item.extra, "labels": "" if labels == "-" else labels[: len(item.choices)]}
    return replace(item, question=listed(item, shown, options_first), shape=QUESTION, extra=extra)


def _relabel(name: str) -> Rewrite:
    make = of_choices(lambda item, _: labelled(item, LABEL_SETS[name]))
    written = of_choices(lambda item, _: listed_for_writing(item, LABEL_SETS[name]))
    return Rewrite(f"R1.{name}", f"labels {LABEL_SETS[name][:4]}", make, "choice", "cloze", written)


def _bullets(item: Item, _: random.Random) -> Item:
    return replace(item, question=listed(item, "-" * len(item.choices)), shape=QUESTION)


def _rotations(item: Item, _: random.Random) -> list[Item] | None:
    if _speaks_of_options(item):
        return None
    count, gold = len(item.choices), item.gold or 0
    orders = [[(start + place) % count for place in range(count)] for start in range(count)]
    return [with_options(item, [item.choices[n] for n in order], order.index(gold), order) for order in orders]


def _speaks_of_options(item: Item) -> bool:
    ours = NONE_OF_THEM.values()
    return any(SPEAKS_OF_OPTIONS.search(choice) for choice in item.choices if choice not in ours)


def _none_of_them(item: Item, place: int) -> Item | None:
    """The item with `none of the others` in place of an option."""
    if NEEDS_ALL_OPTIONS.search(item.question) or _speaks_of_options(item) or len(item.choices) < 3:
        return None
    order = [-1 if number == place else number for number in range(len(item.choices))]
    choices = [NONE_OF_THEM[language_of(item)] if number < 0 else item.choices[number] for number in order]
    return with_options(item, choices, item.gold or 0, order)


def _gold_is_none(item: Item, _: random.Random) -> Item | None:
    return _none_of_them(item, item.gold or 0)


def _distractor_is_none(item: Item, rng: random.Random) -> Item | None:
    return _none_of_them(item, rng.choice([number for number in range(len(item.choices)) if number != item.gold]))


def _which_is_wrong(item: Item, rng: random.Random) -> Item | None:
    """An item with several right options (`extra["golds"]`) keeps one. Any other is turned round: of the right option
    and a wrong one, which is not the answer?"""
    golds = item.extra.get("golds", ())
    if len(golds) > 1:
        kept = rng.choice(list(golds))
        order = [number for number in range(len(item.choices)) if number == kept or number not in golds]
        single = {name: value for name, value in item.extra.items() if name != "golds"}
        if len(order) < 2:
            return None
        return with_options(item, [item.choices[n] for n in order], order.index(kept), order, extra=single)
    if NEEDS_ALL_OPTIONS.search(item.question) or item.shape != QUESTION:
        return None
    wrong = rng.choice([number for number in range(len(item.choices)) if number != item.gold])
    order = rng.sample([item.gold or 0, wrong], 2)
    asked = f"以下哪项不是正确答案？{item.question}"
    if language_of(item) == "en":
        asked = f"Which of these is not a right answer? {item.question}"
    # Another option is right now: what is chosen cannot be compared with the original.
    turned = with_options(item, [item.choices[n] for n in order], order.index(wrong), [-1, -1])
    return replace(turned, question=asked)


def _sets(item: Item, rng: random.Random) -> Item | None:
    """An item with several right options as a choice among sets of options: the right one, and three with one option
    more, less or changed."""
    right, count = set(item.golds), len(item.choices)
    if len(right) < 2:
        return None
    near = [right ^ {number} for number in range(count)]
    near += [right ^ {one, other} for one in right for other in range(count) if other not in right]
    wrong = [each for each in near if each and each != right]
    sets = rng.sample([right, *rng.sample(wrong, min(3, len(wrong)))], min(4, 1 + len(wrong)))
    texts = ["；".join(item.choices[n] for n in sorted(each)) for each in sets]
    if language_of(item) == "en":
        texts = ["; ".join(item.choices[n] for n in sorted(each)) for each in sets]
    single = {name: value for name, value in item.extra.items() if name != "golds"}
    return with_options(item, texts, sets.index(right), [-1] * len(sets), extra=single)


HARDEST = "hardest"
"""In `extra`: the wrong option that the model likes best, where it was asked before."""


def _two_options(item: Item, rng: random.Random) -> Item | None:
    wrong = [number for number in range(len(item.choices)) if number != item.gold]
    other = item.extra.get(HARDEST, rng.choice(wrong))
    order = rng.sample([item.gold or 0, other], 2)
    return with_options(item, [item.choices[n] for n in order], order.index(item.gold or 0), order)


OPTIONS = (
    *(_relabel(name) for name in LABEL_SETS),
    Rewrite(
        "R1.bullets",
        "options with a dash each; the text is the answer",
        of_choices(_bullets),
        "choice",
        "cloze",
        of_choices(lambda item, _: listed_for_writing(item, "-")),
    ),
    Rewrite("R2", "options in every rotation", of_choices(_rotations), "choice", "choice"),
    Rewrite("R3", "the right option becomes `none of the others`", of_choices(_gold_is_none), "choice", "choice"),
    Rewrite("R4", "a wrong option becomes `none of the others`", of_choices(_distractor_is_none), "choice", "choice"),
    Rewrite("R5", "one of several right options; or: which is wrong?", of_choices(_which_is_wrong), "choice", "choice"),
    Rewrite("R5.sets", "several right options: which set of them?", of_choices(_sets), "choice", "choice"),
    Rewrite("R6", "the right option and the hardest wrong one", of_choices(_two_options)),
)
