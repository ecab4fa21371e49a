"""The documents of the small world, in fixed proportions: facts 75 %, arithmetic 5 %, stories 20 % of the bytes.

Fact sentences come from decks: a deck holds every permitted telling of every fact once, is dealt out in random
order, and is shuffled anew when it is empty. So all facts, and all wordings of a fact, occur about equally often
at any length of text. No document tells the same fact twice: the answer must come from memory, not from the line
above.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from zero2all.quickstart.world.facts import CARD, DIALOGUE, QUESTION, STATEMENT, FactKey, Sentence, varied
from zero2all.quickstart.world.language import LANGUAGES, Calculation, Language, tell, written

SHARES = {"facts": 0.75, "arithmetic": 0.05, "story": 0.20}
"""Share of the text bytes per group of documents; `facts` covers sheets, quizzes and dialogues."""
FACTS_PER_DOCUMENT = (5, 12)
CALCULATIONS_PER_DOCUMENT = (8, 20)
OPENER_SHARE = 0.3
LEAD_IN_SHARE = 0.35
NOISY_SHARE = 0.15
"""Of statements and questions: words of the stories, which no wording has, stand in them or replace words of theirs. So
a model relies on the names and on what a sentence is about, not on the whole of it."""
NOISY_WORD_SHARE = 0.25
SHORT_REPLY_SHARE = 0.6
WORD = re.compile(r"[A-Za-z']+|[\u4e00-\u9fff]")
FIRST_FRAME_SHARE = 0.4
"""Of questions: the rest are in all frames alike."""
LIST_SHARE = 0.3


@dataclass(frozen=True)
class GeneratedText:
    """One text of the small world."""

    title: str
    """Only stories have one: everything else starts with its first sentence."""
    text: str
    family: str
    """`facts`, `quiz`, `arithmetic` or `story`."""


def documents(language: str, target_bytes: int, seed: int) -> Iterator[GeneratedText]:
    """Documents until their texts together have at least `target_bytes` of UTF-8."""
    writer = _Writer(LANGUAGES[language], seed)
    written_bytes = dict.fromkeys(SHARES, 0)
    while (total := sum(written_bytes.values())) < target_bytes:
        group = max(SHARES, key=lambda name: SHARES[name] * total - written_bytes[name])
        document = writer.write(group)
        written_bytes[group] += len(document.text.encode())
        yield document


class _Deck:
    """Sentences dealt out evenly, never the same fact twice in one hand."""

    def __init__(self, sentences: list[Sentence], rng: random.Random) -> None:
        self.sentences, self.rng = sentences, rng
        self.left: list[Sentence] = []

    def deal(self, count: int) -> list[Sentence]:
        hand: dict[FactKey, Sentence] = {}
        set_aside: list[Sentence] = []
        while len(hand) < count:
            if not self.left:
                self.left = list(self.sentences)
                self.rng.shuffle(self.left)
            sentence = self.left.pop()
            if sentence.fact in hand:
                set_aside.append(sentence)
            else:
                hand[sentence.fact] = sentence
        self.left += set_aside
        return list(hand.values())


class _Writer:
    """Writes one document after the other; all randomness of a language's text is here."""

    def __init__(self, language: Language, seed: int) -> None:
        self.language = language
        self.rng = language.random("documents", seed)
        self.varied = partial(varied, choose=self.rng.choice)
        sentences = language.sentences(seed)
        by_style = {
            style: [sentence for sentence in sentences if sentence.style == style]
            for style in (STATEMENT, CARD, QUESTION, DIALOGUE)
        }
        self.decks = {style: _Deck(members, self.rng) for style, members in by_style.items()}
        # A style with more wordings gets more documents, so that every wording is used equally often.
        self.styles = tuple(by_style)
        self.style_weights = tuple(len(members) for members in by_style.values())
        wordings = " ".join(template for relation in language.relations for template in relation.answer_last)
        scenes = (wording for arc in language.stories.arcs for wordings in arc.scenes for wording in wordings)
        words = WORD.findall(re.sub(r"{.*?}", "", " ".join((*language.stories.details, *scenes))))
        self.words = sorted(set(words) - set(WORD.findall(f"{wordings} {wordings.lower()}")))
        self.calculations = language.calculations(seed)[0]
        self.calculations_left: list[Calculation] = []

    def write(self, group: str) -> GeneratedText:
        if group == "arithmetic":
            return self._arithmetic()
        if group == "story":
            title, text = tell(self.language.stories, self.language.joiner, self._statements, self.rng)
            return GeneratedText(title, text, "story")
        return self._facts(self.rng.choices(self.styles, self.style_weights)[0])

    def _facts(self, style: str) -> GeneratedText:
        language, rng = self.language, self.rng
        lines = [self._dressed(one) for one in self.decks[style].deal(rng.randint(*FACTS_PER_DOCUMENT))]
        if rng.random() < OPENER_SHARE:
            lines.insert(0, rng.choice(language.sheet_openers if style in (STATEMENT, CARD) else language.quiz_openers))
        between = language.joiner if style == STATEMENT and rng.random() >= LIST_SHARE else "\n"
        return GeneratedText("", between.join(lines), "quiz" if style == QUESTION else "facts")

    def _statements(self, count: int) -> list[str]:
        return [self.varied(sentence.text) for sentence in self.decks[STATEMENT].deal(count)]

    def _dressed(self, sentence: Sentence) -> str:
        """The sentence as it is printed: some after a lead-in or with noise, questions in a frame with their reply."""
        language, rng, text = self.language, self.rng, self.varied(sentence.text)
        lead_ins = {STATEMENT: language.lead_ins, QUESTION: language.question_lead_ins}.get(sentence.style, ())
        if lead_ins and rng.random() < LEAD_IN_SHARE:
            keeps_capital = text.startswith((*sentence.names, "I "))
            text = self.varied(rng.choice(lead_ins)) + (text if keeps_capital else text[0].lower() + text[1:])
        if lead_ins and rng.random() < NOISY_SHARE:
            parts = re.split(f"({'|'.join(map(re.escape, sentence.names))})", text)
            text = "".join(part if part in sentence.names else WORD.sub(self._noisy, part) for part in parts)
            self.decks[sentence.style].left.insert(0, sentence)  # to be told as it is, too
        if sentence.style != QUESTION:
            return text
        if rng.random() < FIRST_FRAME_SHARE:
            return language.question_frames[0].format(q=text, a=sentence.replies[0])
        reply = sentence.replies[0] if rng.random() < SHORT_REPLY_SHARE else rng.choice(sentence.replies)
        return self.varied(rng.choice(language.question_frames)).format(q=text, a=self.varied(reply))

    def _noisy(self, word: re.Match[str]) -> str:
        """The word, another one in its place, or both."""
        if self.rng.random() >= NOISY_WORD_SHARE:
            return word[0]
        other = self.rng.choice(self.words)
        return other if self.rng.random() < 0.5 else f"{word[0]}{self.language.joiner}{other}"

    def _arithmetic(self) -> GeneratedText:
        language, rng = self.language, self.rng
        lines = []
        for _ in range(rng.randint(*CALCULATIONS_PER_DOCUMENT)):
            if not self.calculations_left:
                self.calculations_left = list(self.calculations)
                rng.shuffle(self.calculations_left)
            lines.append(written(self.calculations_left.pop(), language.arithmetic, rng))
        between = "\n" if rng.random() < LIST_SHARE else language.joiner
        return GeneratedText("", between.join(lines), "arithmetic")
