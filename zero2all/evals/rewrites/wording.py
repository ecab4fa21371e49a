"""R7 to R18: the question in another shape, with more around it, or in other words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from zero2all.evals.items import BLANK, CONTINUE, QUESTION, SENTENCE, Item
from zero2all.evals.rewrites.base import Rewrite, of_choices, with_options
from zero2all.evals.rewrites.options import labelled, language_of

IRRELEVANT = {
    "en": ("Tom is wearing a red coat today.", "It rained a little in the morning.", "The shop closes at six."),
    "zh": ("小明今天穿了红色外套。", "早上下了一点雨。", "那家商店六点关门。"),
}


def statement(item: Item, choice: str) -> str:
    """Question and answer as one text."""
    if item.shape == CONTINUE:
        return item.question + ("" if language_of(item) == "zh" else " ") + choice
    return (
        f"{item.question}答案是{choice}。" if language_of(item) == "zh" else f"{item.question} The answer is {choice}."
    )


def _same(item: Item, _: random.Random) -> Item:
    return item


def _short_answer(item: Item, _: random.Random) -> Item | None:
    return replace(item, choices=(), gold=None, shape=QUESTION) if item.shape == QUESTION else None


def _true_or_false(item: Item, _: random.Random) -> Item | None:
    """Each option is proposed, and P(it is right) compared: the text after the blank is what is scored."""
    if "_" in statement(item, "") or any("_" in choice for choice in item.choices):
        return None
    asked = (
        f"{statement(item, '_')}这对吗？对"
        if language_of(item) == "zh"
        else f"{statement(item, '_')} True or false? True"
    )
    return replace(item, question=_with_context(item, asked), context="", shape=BLANK)


def _sentences(item: Item, _: random.Random) -> Item:
    told = [_with_context(item, statement(item, choice)) for choice in item.choices]
    return with_options(item, told, item.gold or 0, question="", context="", shape=SENTENCE)


def _with_context(item: Item, text: str) -> str:
    return f"{item.context}\n{text}" if item.context else text


def _irrelevant(item: Item, rng: random.Random) -> Sequence[Item]:
    if item.shape not in (QUESTION, CONTINUE):
        return ()
    language = language_of(item)
    sentence = rng.choice(IRRELEVANT[language])
    return (replace(item, question=sentence + ("" if language == "zh" else " ") + item.question),)


def _all_statements(item: Item, rng: random.Random) -> Item:
    """Every option stands before the question as if it were the answer. Whoever only repeats what stands there cannot
    choose."""
    told = [statement(item, choice) for choice in item.choices]
    rng.shuffle(told)
    if item.shape == CONTINUE:
        return replace(item, question="\n".join([*told, item.question]))
    return replace(item, context=_with_context(item, "\n".join(told)))


def _paraphrase(item: Item, rng: random.Random) -> Sequence[Item]:
    """Another wording, of those that the item brings along (`extra["paraphrases"]`)."""
    wordings = item.extra.get("paraphrases", ())
    return (replace(item, question=rng.choice(wordings)),) if wordings else ()


def _paraphrases(item: Item, _: random.Random) -> Sequence[Item]:
    return [replace(item, question=text) for text in item.extra.get("paraphrases", ())]


INSTRUCTIONS = {
    "en": ("Q: {}\nA:", "Here is a question. {}\nThe right answer is:", "{}\nReply:"),
    "zh": ("问：{}\n答：", "请回答下面的问题。{}\n正确答案是：", "{}\n回答："),
}


def _instruction(item: Item, _: random.Random) -> Sequence[Item]:
    """Other words around the question."""
    if item.shape != QUESTION:
        return ()
    passage = f"{item.context}\n" if item.context else ""
    templates = INSTRUCTIONS[language_of(item)]
    return [
        replace(item, question=passage + each.format(item.question), context="", shape=CONTINUE) for each in templates
    ]


def _options_first(item: Item, _: random.Random) -> Item | None:
    return labelled(item, "ABCDEFGHIJ", options_first=True)


WORDING = (
    Rewrite("R7", "no labels: the texts of the options are scored", of_choices(_same), "choice", "cloze"),
    Rewrite("R8", "no options: a short answer is written", of_choices(_short_answer), "choice", "generate"),
    Rewrite("R9", "each option proposed: P(true)", of_choices(_true_or_false), "cloze", "cloze"),
    Rewrite("R10", "the likeliest whole statement", of_choices(_sentences), "cloze", "cloze"),
    Rewrite("R11.wording", "other words around it", of_choices(_instruction), "cloze", "cloze"),
    Rewrite("R11.options_first", "options before the question", of_choices(_options_first), "choice", "cloze"),
    Rewrite("R13", "an irrelevant sentence before the question", _irrelevant),
    Rewrite("R16", "all `question + answer X` in the context", of_choices(_all_statements), "cloze", "cloze"),
    Rewrite("R18.one", "another wording of the question", _paraphrase),
    Rewrite("R18.all", "all other wordings", _paraphrases),
)
