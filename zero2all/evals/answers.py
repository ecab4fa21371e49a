"""What a written answer says: an option, several options, a number or a text; and whether that is right.

    read_answer(item, " B. Paris", "ABCD")                                         the option 1
    read_answer(item, "Rome is in Italy. So the answer is Paris.", "ABCD", True)   the option 1
    read_answer(item, "Who knows?", "ABCD")                                        None: an answer that cannot be read

Rules, of which the first that finds something counts: a label, or an option's text, after `answer is`; a label after
`option`; a label that begins the text; an option's text that does; in the first line, the only label that stands
alone; there, the only option that is named. `A is wrong` names no label, nor does `A or B` where one is right. An
answer that none finds is wrong.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

from zero2all.evals.items import LABELS, Item

MARKERS = {"en": "So the answer is", "zh": "所以答案是"}
"""What a text that thinks first says before its final answer."""
PLAIN = {
    0x2212: ord("-"),
    0xFF0D: ord("-"),
    **{code + 0xFEE0: code for code in b"0123456789" + string.ascii_letters.encode()},
}
NUMBER = r"(?:(?<![A-Za-z0-9_)])-)?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)"
FINAL = (
    r"(?:####|(?i:\\boxed(?=\{)|(?:answers?|reply|response) (?:is|are|(?:must|should|would) be)\b|answers?\W{0,2}:)"
    r"|答案(?:应该?)?[是为选：:]|故选|而是)[:：]?"
)
ASIDE = r"(?:(?i:option|choose)|选项?|选择)\s*[:：]?"
OPENING = r"[\s(（\[{*_\"“'`$¥:：]*"
SENTENCE_END = r"(?<=\w)[.!?](?:\s|$)|[。！？]"
BETWEEN = r"(?:[\s,，、;；&/*_()（）\[\]\"'“”-]|(?i:and|as well as)|和|与|及|以及|项)*"
WRONG = r"(?!(?: (?:is|are)(?: not\b| wrong| incorrect| false|n't))|\s*项?(?:都|均)?(?:不|错))"
SMALL = rf"(?:{FINAL}|{ASIDE}|\A){OPENING}(?:[a-z]{{1,4}}(?=[)\].:*}}]*\s*$)|[a-z](?=[)\].:]))"
"""A label in small letters, where an answer may stand: `(b)`, `b.`, `b`."""


def read_answer(item: Item, written: str, labels: str = LABELS, is_thought: bool = False) -> str | None:
    """The answer in the spelling in which answers are compared: numbers of options, a number, or normalised text; None
    where there is none. `is_thought`: it stands after the last words such as `the answer is`."""
    written = written.translate(PLAIN)
    if is_thought:
        if len(said := re.split(FINAL, written)) == 1:
            return None
        written = said[-1]
    written = written.strip()
    written = re.sub(SMALL, lambda small: small[0].upper(), written)
    shown, choices = shown_labels(item, labels).translate(PLAIN), [text.translate(PLAIN) for text in item.choices]
    if item.choices:
        options = (_several if item.golds else _option)(written, shown, choices)
        return ",".join(map(str, options)) or None
    if "number" in item.extra:
        number = number_in("####" + written, 0) if is_thought else number_in(written)
        return None if number is None else str(number)
    line = written.partition("\n")[0]
    sentence = re.split(SENTENCE_END, re.split(FINAL, line, maxsplit=1)[-1])[0]
    right = right_answers(item)
    return next((text for text in map(normalised, (line, sentence)) if text in right), normalised(sentence)) or None


def number_in(written: str, place: int = -1) -> float | None:
    """The number after `answer is` or `####`, of a sum its result; or else the last one, or that at this place."""
    written = written.translate(PLAIN)
    named = re.search(rf"{FINAL}(?:[-+*/×÷().,\w\s$¥]*=)*{OPENING}({NUMBER})", written)
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
    judged = [(str(number) in said) == (number in item.golds) for number in range(len(item.choices))]
    return sum(judged) / len(judged)


def majority(answers: Sequence[str | None]) -> str | None:
    """The answer that was given most often; of several the one that came first."""
    given = Counter(answer for answer in answers if answer is not None)
    return given.most_common(1)[0][0] if given else None


def shown_labels(item: Item, labels: str) -> str:
    """The labels that stand before the options; none where the text of an option is the answer."""
    return str(item.extra.get("labels", labels))[: len(item.choices)]


def normalised(answer: str) -> str:
    """For comparison: small letters, no articles, punctuation or spaces; but -5, 1.5, 3/4, and A or + alone stay."""
    small = answer.translate(PLAIN).lower().strip()
    words = re.sub(r"(?<=\d),(?=\d{3})", "", re.sub(r"\b(a|an|the)\b", " ", small))
    return re.sub(r"(?!(?<!\w)-\.?\d|(?<=\d)[./:]\d|(?<!\w)\.\d)[\W_]", "", words) or small.rstrip(".。")


def _option(written: str, labels: str, choices: Sequence[str]) -> list[int]:
    not_hedged = rf"(?!{BETWEEN}(?:or|或)?\s*{_one_of(labels)})"
    for before in (FINAL, ASIDE, r"\A"):
        for found in re.finditer(before + OPENING, written):
            label = re.match(_one_of(labels) + not_hedged, written[found.end() :])
            if label and not _is_article(written, found.end()):
                return [labels.index(label.group(1))]
            begun = [number for number, text in enumerate(choices) if _begins(written[found.end() :], text)]
            if begun and before != ASIDE:
                return [max(begun, key=lambda number: len(choices[number]))]
    line = written.partition("\n")[0]  # what comes later may be another question
    if all(re.fullmatch(NUMBER, text) for text in choices):
        line = re.split(SENTENCE_END, line)[0]  # or another sum
    return next((only for only in (_alone(line, labels), _named(line, choices)) if len(only) == 1), [])


def _several(written: str, labels: str, choices: Sequence[str]) -> list[int]:
    for label, text in zip(labels, choices, strict=False):  # A. Paris, C. Rome -> A, C
        written = re.sub(rf"(?<!\w){re.escape(label)}[.．:：)]\s*{re.escape(text)}(?!\w)", f"{label} ", written)
    group = f"[{re.escape(labels)}]{'' if labels.isdigit() else '+'}(?![A-Za-z0-9])" if labels else "(?!)"  # 13 is none
    for before in (FINAL, ASIDE, r"\A"):
        for found in re.finditer(rf"{before}{OPENING}({group}(?:{BETWEEN}{group})*+){WRONG}", written):
            if not _is_article(written, found.start(1)):
                return sorted({labels.index(letter) for letter in found.group(1) if letter in labels})
    return _alone(written, labels) or _named(written, choices)


def _one_of(labels: str, is_alone: bool = False) -> str:
    """A pattern of a label, not that of the A of `An`, the 1 of 12 or the 一 of 一个; nor, alone, of `DNA`."""
    if not labels:
        return "(?!)"
    kinds = {"A-Za-z0-9": str.isascii, "\u4e00-\u9fff": lambda label: label >= "\u4e00"}
    beside = next((f"[{kind}]" for kind, is_of in kinds.items() if is_of(labels[0])), "(?!)")
    return (
        rf"(?<!{beside})(?<!不是)(?<!not )(?<!nor )(?<!neither )" if is_alone else ""
    ) + f"([{re.escape(labels)}])(?!{beside}){WRONG}"


def _alone(written: str, labels: str) -> list[int]:
    found = re.finditer(_one_of(labels, is_alone=True), written)
    return sorted({labels.index(each.group(1)) for each in found if not _is_article(written, each.start(1))})


def _is_article(written: str, place: int) -> bool:
    """Whether the letter there is a word: `A dog`, `I think`, `I'm`."""
    return written[place] in "AI" and bool(re.match(r" (?!(and|or|is|only|as)\b)[a-z]|['’][a-z]", written[place + 1 :]))


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
