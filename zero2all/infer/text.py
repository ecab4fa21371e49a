"""Prompts and answers as text: from a prompt to token ids, and from tokens to whole characters, up to a stop string."""

from __future__ import annotations

import codecs
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.common.progress import Bar
from zero2all.infer.boundary import heal, opening_id
from zero2all.infer.engine import Engine
from zero2all.infer.job import ChosenToken, Job, Request
from zero2all.infer.sampling import Sampling

MOST_STOPS = 16


@dataclass(frozen=True)
class TextRequest:
    """A text to continue."""

    prompt: str | Sequence[int]
    """Ids are taken as they are, and nothing is put before them."""
    max_new_tokens: int | None = None
    """None: up to the length that the model, or the engine, allows."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these."""
    heal: bool = True
    """A prompt that is a text may end in the middle of a token (see `boundary`)."""
    logprobs: int | None = None
    """Log probabilities of each token and of this many likeliest ones; None: not computed."""
    end_ids: tuple[int, ...] = ()
    """Ids that end the answer, beside the tokenizer's own."""
    grammar: tuple[str, str] | None = None
    """What the answer follows: json, regex or gbnf, and its text (see `grammar`)."""
    score_prompt: bool = False
    """With `logprobs`: those of the prompt too, and of the token that ends the answer. Then nothing need be written."""
    pools: bool = False
    """The mean of the last hidden states of the prompt, and no answer."""


@dataclass(frozen=True)
class Usage:
    """What a request took."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were not computed, because an earlier one began alike."""
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class Piece:
    """What was written since the last piece."""

    text: str
    """Whole characters; may be empty; never a part of a stop string."""
    tokens: tuple[int, ...] = ()
    choices: tuple[ChosenToken, ...] = ()
    """One for each token, where log probabilities were asked for; before them those of the prompt, the first without
    one (NaN), and after them the end, where the prompt is scored."""
    finish: str | None = None
    """In the last piece: stop (the model ended the text, or a stop string came), length, cancelled, error, or grammar
    (it became too large to be followed)."""
    error: str = ""
    usage: Usage | None = None
    """In the last piece."""
    mean_logprob: float = -math.inf
    """In the last piece: of the tokens that were written and the one that ended the text, where log probabilities were
    asked for."""
    pooled: Tensor | None = None
    """The mean of the last hidden states, where it was asked for."""


class TextJob:
    """A request in the engine, read as text."""

    def __init__(self, engine: Engine, request: TextRequest, prepared: Request | None = None) -> None:
        self._engine, self.request = engine, request
        self.job = engine.submit(prepared or engine_request(engine, request))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # characters that may be the beginning of a stop string
        self._read = 0
        self._has_begun = False
        self.is_done = False

    def read(self) -> Piece | None:
        """What is new; None if nothing is. After the last piece, nothing comes."""
        job, pieces = self.job, self._engine.vocabulary.pieces
        if self.is_done or (job.finish is None and self._read == len(job.new_ids)):
            return None
        first, self._read = self._read, len(job.new_ids)
        text, finish, end = "", job.finish, first
        for number in range(first, self._read):
            fresh = pieces[job.new_ids[number]][job.bytes_before[number] :]
            self._held += self._decoder.decode(fresh)
            end = number + 1
            stop = _first_stop(self._held, self.request.stop)
            if stop is not None:
                text, self._held, finish = text + self._held[:stop], "", "stop"
                break
            kept = possible_beginning(self._held, self.request.stop)
            text, self._held = text + self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        if finish is not None:
            text, self.is_done = text + self._held, True  # what was held back turned out to be no stop string
            self._engine.cancel(job)
        usage = self._usage(end) if finish is not None else None
        choices = job.choices[first:end]
        written = [*job.choices[:end], *([job.ending] if job.ending and end == len(job.new_ids) else [])]
        likely = statistics.fmean(each.logprob for each in written) if finish is not None and written else -math.inf
        if self.request.score_prompt:
            begin = [] if self._has_begun else [ChosenToken(job.request.ids[0], math.nan), *job.scored]
            choices = [*begin, *choices, *([job.ending] if self.is_done and job.ending else [])]
            self._has_begun = True
        new = tuple(job.new_ids[first:end])
        pooled = job.pooled if finish == "stop" else None  # else a sum of some tokens
        return Piece(text, new, tuple(choices), finish, job.error, usage, likely, pooled)

    def _usage(self, new_tokens: int) -> Usage:
        job, prompt = self.job, self.job.request.prompt_tokens
        return Usage(prompt, min(job.reused_tokens, prompt), new_tokens, job.ended - job.arrived)


def stream(engine: Engine, request: TextRequest) -> Iterator[Piece]:
    """One request alone, piece by piece."""
    job = TextJob(engine, request)
    try:
        while not job.is_done:
            engine.step()
            if (piece := job.read()) is not None:
                yield piece
    finally:
        engine.cancel(job.job)


def generate(engine: Engine, prompt: str, max_new_tokens: int, sampling: Sampling | None = None) -> str:
    """The text that follows `prompt`, up to the end of the document or max_new_tokens."""
    request = TextRequest(prompt, max_new_tokens, sampling or Sampling())
    return "".join(piece.text for piece in stream(engine, request))


def complete(engine: Engine, requests: Sequence[TextRequest]) -> Iterator[tuple[int, str, Job]]:
    """All of `requests` as one batch; each (its number, its text, its job) when it is done."""
    jobs = [TextJob(engine, request) for request in requests]
    by_job = {text_job.job: number for number, text_job in enumerate(jobs)}
    texts = [""] * len(jobs)
    left = len(jobs)
    while left:
        for job in engine.step():
            number = by_job.get(job)
            if number is None or (piece := jobs[number].read()) is None:
                continue
            texts[number] += piece.text
            if piece.finish is not None:
                left -= 1
                yield number, texts[number], job


def complete_all(engine: Engine, requests: Sequence[TextRequest], bar: Bar) -> list[str]:
    """The texts alone, in the order of the requests; `bar` advances with each."""
    texts = [""] * len(requests)
    for number, text, _ in complete(engine, requests):
        texts[number] = text
        bar.advance(1)
    return texts


def engine_request(engine: Engine, request: TextRequest) -> Request:
    """The request in token ids, checked. Reads what never changes of the engine only: may be called in any thread."""
    _check_stops(request.stop)
    ids: Sequence[int] = ()
    given_back: Sequence[int] = ()
    if not isinstance(request.prompt, str):
        ids = request.prompt
    elif (least := engine.tokenizer.fewest_tokens(request.prompt)) >= engine.max_len:
        raise engine.too_long(f"at least {least:,}")  # now: to encode megabytes takes seconds
    elif request.heal and not request.score_prompt and request.grammar is None:
        healed = heal(request.prompt, engine.tokenizer, engine.vocabulary)
        ids, given_back = healed.ids, healed.given_back
    else:
        ids = [opening_id(engine.tokenizer), *engine.tokenizer.encode_text(request.prompt)]
    room = max(1, engine.max_len - len(ids) - len(given_back))
    most = room if request.max_new_tokens is None else request.max_new_tokens
    if most < 1 and not request.score_prompt and not request.pools:
        raise UsageError(f"max_new_tokens is {most}; it must be at least 1.")
    start = 1 if request.score_prompt else None
    prepared = Request(
        ids, min(most, room), request.sampling, given_back, request.logprobs, start, frozenset(request.end_ids),
        request.grammar, request.pools,
    )  # fmt: skip
    engine.check(prepared)
    if request.grammar is not None:
        engine.grammars.check(request.grammar)
    return prepared


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MOST_STOPS:
        raise UsageError(f"{len(stops)} stop strings were given; at most {MOST_STOPS} are allowed.")
    if "" in stops:
        raise UsageError("A stop string is empty: every text would end before it begins. Leave it out.")


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins in `text`."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, default=None)


def possible_beginning(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    for count in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        if any(stop.startswith(text[-count:]) for stop in stops):
            return count
    return 0
