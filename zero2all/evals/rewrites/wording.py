"""R7 to R11, R13, R15 and three more: the question in another shape, with more around it, in other words or letters."""

import ast
import operator
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

from zero2all.evals.items import BLANK, CONTINUE, QUESTION, SENTENCE, Item, language_of, proposed
from zero2all.evals.ngrams import simplified_of
from zero2all.evals.rewrites.base import Rewrite, of_choices, with_options
from zero2all.evals.rewrites.options import labelled, listed_for_writing

IRRELEVANT = {
    "en": ("Tom is wearing a red coat today.", "It rained a little in the morning.", "The shop closes at six."),
    "zh": ("小明今天穿了红色外套。", "早上下了一点雨。", "那家商店六点关门。"),
}


def statement(item: Item, choice: str) -> str:
    """Question and answer as one text."""
    if item.shape == CONTINUE:
        return item.question + ("" if language_of(item) == "zh" else " ") + choice
    told = f"答案是{choice}。" if language_of(item) == "zh" else f" The answer is {choice}."
    return item.question + told


def _short_answer(item: Item, _: random.Random) -> Item | None:
    return replace(item, choices=(), gold=None, shape=QUESTION) if item.shape == QUESTION else None


def _true_or_false(item: Item, _: random.Random) -> Item | None:
    """Each option is proposed, and P(it is right) compared: the text after the blank is what is scored."""
    if "_" in statement(item, "") or any("_" in choice for choice in item.choices):
        return None
    asked = statement(item, "_") + ("这对吗？对" if language_of(item) == "zh" else " True or false? True")
    return replace(item, question=_with_context(item, asked), context="", shape=BLANK)


def _proposed(item: Item, _: random.Random) -> list[Item]:
    """The same in writing: a question for every option, to be answered with true or false."""
    words = ("对", "错") if language_of(item) == "zh" else ("True", "False")
    right = item.golds or (item.gold,)
    asked = [
        with_options(item, words, int(number not in right), [-1, -1], question=proposed(item, choice))
        for number, choice in enumerate(item.choices)
    ]
    return [replace(each, extra={**each.extra, "labels": "", "golds": ()}) for each in asked]


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


def _other_language(item: Item, _: random.Random) -> Item | None:
    """The question in the other language (`extra["translation"]`), the options as they are."""
    translation = item.extra.get("translation")
    if not translation:
        return None
    return replace(item, question=translation, language="en" if item.language == "zh" else "zh")


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


_unchanged = of_choices(lambda item, _: item)
WORDING = (
    Rewrite("R7", "no labels: the texts of the options are scored", _unchanged, "choice", "cloze", is_written=False),
    Rewrite("R8", "no options: a short answer is written", of_choices(_short_answer), "choice", "generate"),
    Rewrite("R9", "each option proposed: P(true)", of_choices(_true_or_false), "cloze", "cloze", of_choices(_proposed)),
    Rewrite("R10", "the likeliest whole statement", of_choices(_sentences), "cloze", "cloze", is_written=False),
    Rewrite("R13", "an irrelevant sentence before the question", _irrelevant),
    Rewrite("R15", "question in the other language, same options", of_choices(_other_language)),
    Rewrite("R16", "all `question + answer X` in the context", of_choices(_all_statements), "cloze", "cloze"),
    Rewrite("R18.one", "another wording of the question", _paraphrase),
    Rewrite("R18.all", "all other wordings", _paraphrases),
)


FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
HALF_WIDTH = {full: half for half, full in FULL_WIDTH.items()}
DIGITS = "零一二三四五六七八九"
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
SMALL_WORDS = (*ONES, *(f"{begun}teen" for begun in ("thir", "four", "fif", "six", "seven", "eigh", "nine")))
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def _everywhere(item: Item, table: dict[int, int] | dict[int, str]) -> Item:
    texts = {name: getattr(item, name).translate(table) for name in ("question", "context", "answer")}
    return replace(item, choices=tuple(choice.translate(table) for choice in item.choices), **texts)


def _changed(before: Item, after: Item) -> Sequence[Item]:
    """The rewritten item, if anything is otherwise."""
    same = (before.question, before.context, before.choices) == (after.question, after.context, after.choices)
    return () if same else (after,)


def _width(item: Item, _: random.Random) -> Sequence[Item]:
    """Letters, digits and signs in the other width: full in Chinese texts, where they stand beside Han."""
    if item.language != "zh":
        return ()
    full = _everywhere(item, FULL_WIDTH)
    return _changed(item, full) or _changed(item, _everywhere(item, HALF_WIDTH))


def _traditional(item: Item, _: random.Random) -> Sequence[Item]:
    return _changed(item, _everywhere(item, traditional_table())) if item.language == "zh" else ()


@cache
def traditional_table() -> dict[int, str]:
    """Simplified Han character -> its traditional form, where there is one only."""
    forms: dict[str, list[str]] = {}
    for traditional, simplified in simplified_of().items():
        forms.setdefault(simplified, []).append(traditional)
    return {ord(simplified): found[0] for simplified, found in forms.items() if len(found) == 1}


def chinese_numeral(number: int) -> str:
    """0 to 99 in Chinese: 12 is 十二."""
    tens, ones = divmod(number, 10)
    if not tens:
        return DIGITS[ones]
    return (DIGITS[tens] if tens > 1 else "") + "十" + (DIGITS[ones] if ones else "")


def english_numeral(number: int) -> str:
    """0 to 99 in English: 42 is forty-two."""
    if number < len(SMALL_WORDS):
        return SMALL_WORDS[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL_WORDS[ones]}" if ones else "")


def _numerals(item: Item, _: random.Random) -> Sequence[Item]:
    """Whole numbers below 100 in the question, in words."""
    if item.shape not in (QUESTION, CONTINUE):
        return ()
    spell = chinese_numeral if item.language == "zh" else english_numeral
    alone = r"(?<![\d.,A-Za-z])(?:0|[1-9]\d?)(?![\d.,%A-Za-z]*[\dA-Za-z%])"
    asked = re.sub(alone, lambda found: spell(int(found.group())), item.question)
    return _changed(item, replace(item, question=asked))


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


_options_first = of_choices(lambda item, _: labelled(item, "ABCDEFGHIJ", options_first=True))
_written_first = of_choices(lambda item, _: listed_for_writing(item, "ABCDEFGHIJ", options_first=True))
SURFACE = (
    Rewrite("R11.width", "letters and digits in the other width", _width),
    Rewrite("R11.traditional", "traditional Han", _traditional),
    Rewrite("R11.numerals", "numbers in words", _numerals),
    Rewrite("R11.wording", "other words around it", of_choices(_instruction), "cloze", "cloze", is_written=False),
    Rewrite("R11.options_first", "options before the question", _options_first, "choice", "cloze", _written_first),
)


# R12: other numbers in the question, and the answer worked out anew.
#
# The way to the answer must be known: the equations of a written solution (`3 * 4 = 12`, as in GSM8K), or a question
# with two numbers of which exactly one of + - × ÷ gives the answer.


NUMBER = re.compile(r"(?<![\w.,])\d+(?:\.\d+)?(?![\w]|[.,]\d)")
EQUATION = re.compile(r"((?:[\d.,$]+|[-+*/()x×÷ ])*\d[\d.,)]*\s*)=\s*\$?(-?\d[\d,]*(?:\.\d+)?)")
OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
TRIES = 20


class _UnclearError(ValueError):
    """The way to the answer is not known."""


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _evaluated(expression: str, values: Mapping[Fraction, Fraction]) -> Fraction:
    """The value of an expression with other numbers in the places of some."""

    def visit(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Expression):
            return visit(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            number = Fraction(str(node.value))
            return values.get(number, number)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            try:
                return Fraction(OPERATORS[type(node.op)](visit(node.left), visit(node.right)))
            except ZeroDivisionError as error:
                raise _UnclearError("it divides by zero") from error
        raise _UnclearError("it is not plain arithmetic")

    plain = re.sub(r"[$,]", "", expression).replace("×", "*").replace("x", "*").replace("÷", "/").strip()
    try:
        return visit(ast.parse(plain, mode="eval"))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _UnclearError("it is not an expression") from error


def _steps(item: Item) -> list[tuple[str, Fraction]]:
    """The equations that lead to the answer, the last one giving it."""
    answer = _answer(item)
    found = [(expression, _value(result)) for expression, result in EQUATION.findall(item.answer)]
    if found:
        known: dict[Fraction, Fraction] = {}
        right = all(_evaluated(expression, known) == result for expression, result in found)
        if not right or found[-1][1] != answer:
            raise _UnclearError("its equations do not lead to the answer")
        return found
    numbers = NUMBER.findall(item.question)
    if len(numbers) != 2:
        raise _UnclearError("it has no equations, and not two numbers")
    left, right_hand = numbers
    ways = [f"{left} {sign} {right_hand}" for sign in "+-*/" if sign != "/" or _value(right_hand)]
    ways = [way for way in ways if _evaluated(way, {}) == answer]
    if len(ways) != 1 or left == right_hand:
        raise _UnclearError("no calculation gives the answer, or more than one does")
    return [(ways[0], answer)]


def _answer(item: Item) -> Fraction:
    text = str(item.extra.get("number", item.answer)).strip()
    if not re.fullmatch(r"-?\d[\d,]*(?:\.\d+)?", text):
        raise _UnclearError("its answer is not a number")
    return _value(text)


def _other_numbers(item: Item, rng: random.Random) -> Sequence[Item]:
    if item.shape not in (QUESTION, CONTINUE):
        return ()
    try:
        steps = _steps(item)
        for _ in range(TRIES):
            made = _attempt(item, steps, rng)
            if made is not None:
                return (made,)
    except _UnclearError:
        pass
    return ()


def _attempt(item: Item, steps: Sequence[tuple[str, Fraction]], rng: random.Random) -> Item | None:
    """The item with every whole number of the question changed, if all results stay of their kind (whole, positive)."""
    texts = NUMBER.findall(item.question)
    used = {_value(number) for expression, _ in steps for number in re.findall(r"\d[\d,]*(?:\.\d+)?", expression)}
    given = {_value(text) for text in texts if "." not in text}
    changed = {
        number: Fraction(rng.randint(2, max(9, int(number) * 2))) for number in sorted(given & used) if number > 1
    }
    if not changed or all(old == new for old, new in changed.items()) or {result for _, result in steps} & given:
        return None
    values = dict(changed)
    for expression, result in steps:
        worked_out = _evaluated(expression, values)
        if worked_out <= 0 or (result.denominator == 1) != (worked_out.denominator == 1):
            return None
        values[result] = worked_out
    answer = values[steps[-1][1]]
    if answer.denominator != 1:
        return None
    asked = NUMBER.sub(lambda found: str(changed.get(_value(found.group()), found.group())), item.question)
    return _with_answer(replace(item, question=asked), _answer(item), answer)


def _with_answer(item: Item, before: Fraction, answer: Fraction) -> Item | None:
    if item.choices:
        try:
            moved = [str(_value(choice.strip()) - before + answer) for choice in item.choices]
        except ValueError:
            return None
        return with_options(item, moved, item.gold or 0, [-1] * len(moved))
    extra = {**item.extra, "number": str(answer)} if "number" in item.extra else item.extra
    return replace(item, answer=str(answer), extra={**extra, "aliases": ()})


NUMBERS = (Rewrite("R12", "other numbers, answer worked out anew", _other_numbers),)
