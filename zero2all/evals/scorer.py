"""The one primitive of scoring: log P(continuation | prompt), as text.

Prompt and continuation are texts, and the model knows tokens. Where the tokens of the prompt are the first tokens of
prompt and continuation together, P is the product over the others. Where a token spans the border, that product would
ask about tokens the model never sees: there P(prompt and continuation) / P(prompt) is computed over all spellings of
the end of the prompt, exactly. A continuation is counted in its usual spelling, so that the probabilities of different
continuations never add up to more than one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zero2all.common.progress import Bar
from zero2all.infer.boundary import opening_id, split_scored
from zero2all.infer.engine import Engine
from zero2all.infer.job import Scores

NEGLIGIBLE = 1e-3
"""Ways to begin the end of a prompt that are less likely than this, and that no continuation takes, are not followed
to their end."""


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
    token_logprob: float | None = None
    """Where a token spans the border: what counting the tokens after those of the prompt would give."""

    @property
    def spans_border(self) -> bool:
        """Whether a token spans the border of the prompt with this continuation, or with another of its question."""
        return self.token_logprob is not None


def score_questions(engine: Engine, questions: Sequence[Question], bar: Bar | None = None) -> list[list[Scored] | str]:
    """Of each question, its continuations in their order, or, in words, why it cannot be scored. All rows go to the
    engine at once, which shares what they have in common; the bar counts questions."""
    tokenizer, opening = engine.tokenizer, opening_id(engine.tokenizer)
    found: list[list[Scored] | str] = []
    rows: list[list[int]] = []
    starts: list[int] = []
    places: list[tuple[int, int]] = []  # of each row: question, continuation
    for number, question in enumerate(questions):
        texts = [question.prompt, *(question.prompt + continuation for continuation in question.continuations)]
        before, *wholes = tokenizer.encode_batch(texts)
        problem = _problem(engine, question, [len(ids) for ids in wholes])
        found.append(problem or [])
        if problem is not None:
            if bar is not None:
                bar.advance(1)
            continue
        for place, ids in enumerate(wholes):
            rows.append([opening, *ids])
            starts.append(1 + min(len(before), len(ids) - 1))
            places.append((number, place))
    left = [len(question.continuations) for question in questions]

    def when_done(row: int) -> None:
        number = places[row][0]
        left[number] -= 1
        if bar is not None and not left[number]:
            bar.advance(1)

    by_question: dict[int, list[tuple[list[int], int, Scores]]] = {}
    for (number, _), row, start, scores in zip(
        places, rows, starts, engine.score(rows, starts, when_done), strict=True
    ):
        by_question.setdefault(number, []).append((row, start, scores))
    for number, scored in by_question.items():
        found[number] = _of_question(engine, questions[number], scored)
    return found


def _problem(engine: Engine, question: Question, lengths: list[int]) -> str | None:
    if not question.continuations:
        return "it has no continuation to score"
    if "" in question.continuations:
        return "a continuation is empty"
    if max(lengths) > engine.max_len:
        return f"prompt and continuation have {max(lengths) + 1:,} tokens; the model takes {engine.max_len:,}"
    return None


def _of_question(engine: Engine, question: Question, scored: list[tuple[list[int], int, Scores]]) -> list[Scored]:
    before = [opening_id(engine.tokenizer), *engine.tokenizer.encode_text(question.prompt)]
    spans = any(row[: len(before)] != before or len(row) == len(before) for row, _, _ in scored)
    exact = continuation_log_probabilities(engine, question.prompt, list(question.continuations)) if spans else None
    results = []
    for place, (row, start, scores) in enumerate(scored):
        by_tokens = math.fsum(scores.logprobs)
        is_greedy = not any(scores.ranks)
        logprob, beside = (by_tokens, None) if exact is None else (exact[place], by_tokens)
        results.append(Scored(logprob, len(row) - start, is_greedy, tuple(scores.ranks), beside))
    return results


def continuation_log_probabilities(engine: Engine, prompt: str, continuations: list[str]) -> list[float]:
    """Natural log of P(continuation | prompt) for each, over all spellings of the end of the prompt: right also where
    a token spans the border."""
    scored = split_scored(prompt, continuations, engine.tokenizer)
    scores = engine.score(scored.texts, [scored.shared] * len(scored.texts))
    spelled = 1.0
    if scored.tail:
        context, paths = scored.texts[0][: scored.shared], [text[scored.shared :] for text in scored.texts]
        spelled = _spelling_probability(engine, context, scored.tail, engine.distribution(context).exp(), paths)
    if spelled <= 0:
        return [-math.inf] * len(scores)
    return [min(0.0, math.fsum(each.logprobs) - math.log(spelled)) for each in scores]


def _spelling_probability(
    engine: Engine, context: list[int], tail: bytes, following: Tensor, paths: list[list[int]], reached: float = 1.0
) -> float:
    """P(the text after `context` begins with `tail`), over all ways to spell it.

    `following` is P(next token). `paths` are the tokens of the continuations from here on: they are always followed,
    so that none of them can be likelier than this sum. `reached` is how likely it was to come here.
    """
    if not tail:
        return 1.0
    total = 0.0
    for token in engine.vocabulary.continuing(tail):
        probability, piece = float(following[token]), engine.vocabulary.pieces[token]
        ahead = [path[1:] for path in paths if path[:1] == [token]]
        if len(piece) >= len(tail):
            total += probability
        elif ahead or reached * probability > NEGLIGIBLE:
            there = [*context, token]
            after = engine.distribution(there).exp()
            total += probability * _spelling_probability(
                engine, there, tail[len(piece) :], after, ahead, reached * probability
            )
    return total
