"""What a written answer says: an option, several options, a number or a text; and whether that is right.

    read_answer(item, " B. Paris", "ABCD")                                         the option 1
    read_answer(item, "Rome is in Italy. So the answer is Paris.", "ABCD", True)   the option 1
    read_answer(item, "Who knows?", "ABCD")                                        None: an answer that cannot be read

Rules, of which the first that finds something counts: a label after words such as `the answer is`; a label that begins
the text; the text of an option that begins it; the only label that stands alone in it; the only option whose text it
has. What is found by none of them is wrong, and counted.
"""

import re
from collections import Counter
from collections.abc import Sequence

from zero2all.evals.items import LABELS, Item, language_of

MARKERS = {"en": "So the answer is", "zh": "所以答案是"}
"""What a text that thinks first says before its final answer."""
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
NAMED = r"(?:####|(?i:answer is|answer:|option|choose)|答案是|答案为|答案：|选项?|选择)\s*[:：]?\s*"
OPENING = r"[\s(（\[*_\"“'$¥]*"
BETWEEN = r"(?:\s*(?:[,，、;&/]|and|和|与|及)?\s*)"


def read_answer(item: Item, written: str, labels: str = LABELS, is_thought: bool = False) -> str | None:
    """The answer in the spelling in which answers are compared: numbers of options, a number, or normalised text; None
    where there is none. `is_thought`: it stands after the last marker."""
    if is_thought:
        _, marker, written = written.rpartition(MARKERS[language_of(item)])
        if not marker:
            return None
    written = written.strip()
    if item.golds:
        options = _several(written, shown_labels(item, labels), item.choices)
        return ",".join(map(str, options)) or None
    if item.choices:
        option = _option(written, shown_labels(item, labels), item.choices)
        return None if option is None else str(option)
    if "number" in item.extra:
        number = number_in(written, 0 if is_thought else -1)
        return None if number is None else str(number)
    line = written.partition("\n")[0]
    sentence = re.split(r"(?<=[^\W\d])[.!?](?:\s|$)|[。！？]", line)[0]
    right = right_answers(item)
    return next((text for text in map(normalised, (line, sentence)) if text in right), normalised(sentence)) or None


def number_in(written: str, place: int = -1) -> float | None:
    """The number after `answer is` or `####`, or else the last one, or that at this place."""
    named = re.search(rf"{NAMED}{OPENING}({NUMBER})", written)
    numbers = [named.group(1)] if named else re.findall(NUMBER, written)
    return float(numbers[place].replace(",", "")) if numbers else None


def right_answers(item: Item) -> set[str]:
    """The answers that are right, in the same spelling."""
    if item.choices:
        return {",".join(map(str, item.golds or (item.gold,)))}
    if "number" in item.extra:
        return {str(float(item.extra["number"]))}
    return {normalised(answer) for answer in (item.answer, *item.extra.get("aliases", ()))}


def credit(item: Item, answer: str | None) -> float:
    """Of an item with several right options, the share of options that are judged rightly; else 0 or 1."""
    if not item.golds:
        return float(answer in right_answers(item))
    said = set(answer.split(",")) if answer else set()
    return sum((str(number) in said) == (number in item.golds) for number in range(len(item.choices))) / len(
        item.choices
    )


def majority(answers: Sequence[str | None]) -> str | None:
    """The answer that was given most often; of several the one that came first."""
    given = Counter(answer for answer in answers if answer is not None)
    return given.most_common(1)[0][0] if given else None


def shown_labels(item: Item, labels: str) -> str:
    """The labels that stand before the options; none where the text of an option is the answer."""
    return str(item.extra.get("labels", labels))[: len(item.choices)]


def normalised(answer: str) -> str:
    """For comparison: small letters, no articles, no punctuation, no spaces."""
    return re.sub(r"[\W_]+", "", re.sub(r"\b(a|an|the)\b", " ", answer.lower()))


def _option(written: str, labels: str, choices: Sequence[str]) -> int | None:
    for before in (NAMED, r"\A"):
        for found in re.finditer(before + OPENING + _one_of(labels), written):
            if not _is_article(written, found.start(1)):
                return labels.index(found.group(1))
    begun = [number for number, text in enumerate(choices) if _begins(written, text)]
    if begun:
        return max(begun, key=lambda number: len(choices[number]))
    alone = _alone(written, labels)
    if len(alone) == 1:
        return alone.pop()
    named = _named(written, choices)
    return named[0] if len(named) == 1 else None


def _several(written: str, labels: str, choices: Sequence[str]) -> list[int]:
    group = f"[{re.escape(labels)}]" if labels else "(?!)"
    found = re.search(rf"(?:{NAMED}|\A){OPENING}({group}(?:{BETWEEN}{group})*)(?![A-Za-z0-9])", written)
    if found and not _is_article(written, found.start(1)):
        return sorted({labels.index(letter) for letter in found.group(1) if letter in labels})
    return sorted(_alone(written, labels)) or _named(written, choices)


def _one_of(labels: str, is_alone: bool = False) -> str:
    """A pattern of a label, not that of the A of `An`, the 1 of 12 or the 一 of 一个; nor, alone, of `DNA`."""
    if not labels:
        return "(?!)"
    kinds = {"A-Za-z0-9": str.isascii, "\u4e00-\u9fff": lambda label: label >= "\u4e00"}
    beside = next((f"[{kind}]" for kind, is_of in kinds.items() if is_of(labels[0])), "(?!)")
    return (f"(?<!{beside})" if is_alone else "") + f"([{re.escape(labels)}])(?!{beside})"


def _alone(written: str, labels: str) -> set[int]:
    found = re.finditer(_one_of(labels, is_alone=True), written)
    return {labels.index(each.group(1)) for each in found if not _is_article(written, each.start(1))}


def _is_article(written: str, place: int) -> bool:
    """Whether the letter there is a word: `A dog`, `I think`."""
    return written[place] in "AI" and re.match(r" (?!and\b|or\b|is\b)[a-z]", written[place + 1 :]) is not None


def _begins(written: str, choice: str) -> bool:
    begun, whole = written.lstrip(" (（\"“'*").casefold(), choice.casefold()
    return begun.startswith(whole) and not re.match(r"[a-z0-9]", begun[len(whole) : len(whole) + 1])


def _named(written: str, choices: Sequence[str]) -> list[int]:
    """The options whose texts occur, but for those that are part of another one that does."""
    words = [rf"(?<![a-z0-9]){re.escape(text.casefold())}(?![a-z0-9])" for text in choices]
    found = [number for number, pattern in enumerate(words) if re.search(pattern, written.casefold())]
    return [
        one
        for one in found
        if not any(one != other and choices[one].casefold() in choices[other].casefold() for other in found)
    ]
