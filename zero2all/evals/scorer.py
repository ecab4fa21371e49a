"""The one primitive of scoring: log P(continuation | prompt), as text.

Prompt and continuation are texts, and the model knows tokens. Where the tokens of the prompt are the first tokens of
prompt and continuation together, P is the product over the others. Where a token spans the border, that product would
ask about tokens the model never sees: there P(prompt and continuation) / P(prompt) is computed over all spellings of
the end of the prompt, exactly. A continuation is counted in its usual spelling, so that the probabilities of different
continuations never add up to more than one.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zero2all.common.progress import Bar
from zero2all.infer.boundary import ScoredTexts, opening_id, split_scored
from zero2all.infer.engine import Engine

NEGLIGIBLE = 1e-3
"""Ways to begin the end of a prompt that are less likely than this, and that no continuation takes, are not followed
to their end."""
SPELLINGS_AT_ONCE = 64
"""Distributions over the whole vocabulary that are held at once."""


@dataclass(frozen=True)
class Question:
    """A prompt and the texts that may follow it."""

    prompt: str
    continuations: tuple[str, ...]


@dataclass(frozen=True)
class Scored:
    """What a model says of one continuation."""

    logprob: float
    """Natural log of P(continuation | prompt)."""
    tokens: int
    is_greedy: bool
    """Whether greedy decoding from the prompt's own tokens would write it."""
    ranks: tuple[int, ...] = ()
    """For each of its tokens, how many ids are likelier there."""
    spans_border: bool = False
    """A token spans the border of the prompt with this continuation, or with another of its question."""


def score_questions(engine: Engine, questions: Sequence[Question], bar: Bar | None = None) -> list[list[Scored] | str]:
    """For each question its continuations in their order, or why it cannot be scored, in words. All rows go to the
    engine at once, which shares what they have in common."""
    tokenizer, opening = engine.tokenizer, opening_id(engine.tokenizer)
    texts = [[each.prompt, *(each.prompt + continuation for continuation in each.continuations)] for each in questions]
    encoded = iter(tokenizer.encode_batch(list(itertools.chain.from_iterable(texts))))
    tokens = [list(itertools.islice(encoded, len(each))) for each in texts]  # of each question: prompt, wholes
    found: list[list[Scored] | str] = []
    rows: list[list[int]] = []
    starts: list[int] = []
    owners: list[int] = []  # of each row: its question
    spanning: list[int] = []
    for number, (question, (before, *wholes)) in enumerate(zip(questions, tokens, strict=True)):
        problem = _problem(engine, question, [len(ids) for ids in wholes])
        found.append(problem or [])
        if problem is not None:
            if bar is not None:
                bar.advance(1)
            continue
        rows += [[opening, *ids] for ids in wholes]
        starts += [1 + min(len(before), len(ids) - 1) for ids in wholes]
        owners += [number] * len(wholes)
        if any(ids[: len(before)] != before or len(ids) == len(before) for ids in wholes):
            spanning.append(number)
    left = [len(question.continuations) for question in questions]

    def when_done(row: int) -> None:
        number = owners[row]
        left[number] -= 1
        if bar is not None and not left[number]:
            bar.advance(1)

    scores = engine.score(rows, starts, when_done)
    exact = dict(zip(spanning, _log_probabilities(engine, [questions[number] for number in spanning]), strict=True))
    for number, row, start, score in zip(owners, rows, starts, scores, strict=True):
        answers = found[number]
        assert isinstance(answers, list), "only questions that can be scored have rows"
        logprob = exact[number][len(answers)] if number in exact else math.fsum(score.logprobs)
        answers.append(Scored(logprob, len(row) - start, not any(score.ranks), tuple(score.ranks), number in exact))
    return found


def _problem(engine: Engine, question: Question, lengths: list[int]) -> str | None:
    if not question.continuations:
        return "it has no continuation to score"
    if "" in question.continuations:
        return "a continuation is empty"
    if max(lengths) > engine.max_len:
        return f"prompt and continuation have {max(lengths) + 1:,} tokens; the model takes {engine.max_len:,}"
    return None


def continuation_log_probabilities(engine: Engine, prompt: str, continuations: list[str]) -> list[float]:
    """Natural log of P(continuation | prompt) for each, over all spellings of the end of the prompt: right also where
    a token spans the border."""
    return _log_probabilities(engine, [Question(prompt, tuple(continuations))])[0]


def _log_probabilities(engine: Engine, questions: Sequence[Question]) -> list[list[float]]:
    """`continuation_log_probabilities` of many questions at once."""
    split = [split_scored(each.prompt, list(each.continuations), engine.tokenizer) for each in questions]
    rows = [text for each in split for text in each.texts]
    scores = iter(engine.score(rows, [each.shared for each in split for _ in each.texts]))
    found = []
    for each, spelled in zip(split, _spelling_probabilities(engine, split), strict=True):
        own = [math.fsum(next(scores).logprobs) for _ in each.texts]
        found.append([min(0.0, value - math.log(spelled)) if spelled > 0 else -math.inf for value in own])
    return found


@dataclass(frozen=True)
class _Spelling:
    """A way to begin the end of a prompt."""

    question: int
    context: list[int]
    tail: bytes
    """What is still to be spelled."""
    paths: list[list[int]]
    """The tokens of the continuations from here on: they are always followed, so that none of them can be likelier
    than the sum."""
    reached: float = 1.0
    """How likely it was to come here."""


def _spelling_probabilities(engine: Engine, split: Sequence[ScoredTexts]) -> list[float]:
    """For each question, P(the text after the shared tokens begins with the tail), over all ways to spell it."""
    totals = [0.0 if each.tail else 1.0 for each in split]
    todo = [
        _Spelling(number, each.texts[0][: each.shared], each.tail, [text[each.shared :] for text in each.texts])
        for number, each in enumerate(split)
        if each.tail
    ]
    while todo:
        now, todo = todo[:SPELLINGS_AT_ONCE], todo[SPELLINGS_AT_ONCE:]
        for spelling, following in zip(now, engine.distributions([each.context for each in now]), strict=True):
            totals[spelling.question] += _ends(engine, spelling, following, todo)
    return totals


def _ends(engine: Engine, spelling: _Spelling, following: Tensor, todo: list[_Spelling]) -> float:
    """P(one more token spells the whole tail); ways that need several are added to `todo`."""
    tokens = engine.vocabulary.continuing(spelling.tail)
    total = 0.0
    for token, probability in zip(tokens, following[tokens].exp().tolist(), strict=True):
        reached, piece = spelling.reached * probability, engine.vocabulary.pieces[token]
        ahead = [path[1:] for path in spelling.paths if path[:1] == [token]]
        if len(piece) >= len(spelling.tail):
            total += reached
        elif ahead or reached > NEGLIGIBLE:
            rest = spelling.tail[len(piece) :]
            todo.append(_Spelling(spelling.question, [*spelling.context, token], rest, ahead, reached))
    return total
