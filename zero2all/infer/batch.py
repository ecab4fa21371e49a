"""Many prompts as one continuous batch, and their results as JSON values."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero2all.common.errors import UsageError, UserError
from zero2all.infer.job import Choice
from zero2all.infer.prompts import Prompt
from zero2all.infer.service import Service, Ticket
from zero2all.infer.text import Piece, TextRequest
from zero2all.tokenizer.load import Tokenizer

Arrived = queue.SimpleQueue[tuple[tuple[int, int], Piece]]
MOST_AT_ONCE = 2048
"""Requests that the engine knows of: more than fit into any batch, so that it never waits for the next."""


@dataclass(frozen=True)
class BatchPrompt:
    """One text to write: sample `sample` of prompt `index`."""

    index: int
    sample: int
    prompt: Prompt
    request: TextRequest

    @property
    def key(self) -> tuple[int, int]:
        """Which of all texts it is."""
        return self.index, self.sample


@dataclass
class _Running:
    task: BatchPrompt
    ticket: Ticket
    text: str = ""
    choices: list[Choice] = field(default_factory=list)


def tasks_of(prompts: Sequence[Prompt]) -> list[BatchPrompt]:
    """Every text to be written, in the order of the prompts."""
    return [
        BatchPrompt(index, sample, prompt, request)
        for index, prompt in enumerate(prompts)
        for sample, request in enumerate(prompt.samples())
    ]


def results_of(service: Service, tasks: Iterable[BatchPrompt]) -> Iterator[dict[str, Any]]:
    """The result of each task when it is ready, in no order. One that cannot be done has an `error` instead of text."""
    arrived: Arrived = queue.SimpleQueue()
    running: dict[tuple[int, int], _Running] = {}
    left = iter(tasks)
    try:
        while True:
            while len(running) < MOST_AT_ONCE and (task := next(left, None)) is not None:
                try:
                    ticket = service.submit(task.request, _deliver_to(arrived, task.key))
                except UsageError as error:
                    yield {**_head(task), "error": str(error)}
                else:
                    running[task.key] = _Running(task, ticket)
            if not running:
                return
            key, piece = arrived.get()
            one = running[key]
            one.text += piece.text
            one.choices += piece.choices
            if piece.finish is not None:
                del running[key]
                yield _result(one, piece, service.loaded.tokenizer)
    finally:
        for one in running.values():
            service.cancel(one.ticket)


def _deliver_to(arrived: Arrived, key: tuple[int, int]) -> Callable[[Piece], None]:
    return lambda piece: arrived.put((key, piece))


def streams_of(service: Service, tasks: Sequence[BatchPrompt]) -> Iterator[tuple[BatchPrompt, Iterator[Piece]]]:
    """Each task with its pieces as they come, one task after the other, while all of them are computed as one batch."""
    queues: list[queue.SimpleQueue[Piece]] = [queue.SimpleQueue() for _ in tasks]
    tickets = []
    try:
        for task, arrived in zip(tasks, queues, strict=True):
            tickets.append(service.submit(task.request, arrived.put))
        for task, arrived in zip(tasks, queues, strict=True):
            yield task, _until_finish(arrived)
    finally:
        for ticket in tickets:
            service.cancel(ticket)


def _until_finish(arrived: queue.SimpleQueue[Piece]) -> Iterator[Piece]:
    finish = None
    while finish is None:
        piece = arrived.get()
        finish = piece.finish
        yield piece


def _head(task: BatchPrompt) -> dict[str, Any]:
    """What a result says first: which text it is."""
    names = {} if task.prompt.id is None else {"id": task.prompt.id}
    sample = {"sample": task.sample} if task.prompt.n > 1 else {}
    return {"index": task.index, **sample, **names, "prompt": task.request.prompt}


def _result(one: _Running, last: Piece, tokenizer: Tokenizer) -> dict[str, Any]:
    if last.finish == "error":  # no matter of this prompt: another attempt may succeed, so nothing is kept of it
        raise UserError(f"{last.error} What was finished is kept; run the same command again to continue.")
    result = {**_head(one.task), "text": one.text, "finish": last.finish}
    if last.usage is not None:
        result |= {"prompt_tokens": last.usage.prompt_tokens, "new_tokens": last.usage.new_tokens}
    if one.task.request.logprobs is not None:
        result["logprobs"] = [_choice(choice, tokenizer) for choice in one.choices]
    return result


def _choice(choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    likeliest = [_token(number, logprob, tokenizer) for number, logprob in choice.alternatives]
    return {**_token(choice.id, choice.logprob, tokenizer), "likeliest": likeliest}


def _token(number: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token as it is written; half a character shows as U+FFFD."""
    try:
        piece = tokenizer.token_bytes(number).decode("utf-8", "replace")
    except ValueError:  # a padding row of the embedding
        piece = ""
    return {"token": piece, "id": number, "logprob": logprob}
