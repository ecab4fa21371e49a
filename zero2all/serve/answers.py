"""What the engine wrote -> OpenAI's objects: whole answers, and the chunks of a stream."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import dataclasses
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zero2all.common import jsonio
from zero2all.infer.job import ChosenToken
from zero2all.infer.service import Service, ServiceEndedError, Ticket
from zero2all.infer.text import Piece
from zero2all.infer.tools import Written
from zero2all.serve.metrics import Metrics
from zero2all.serve.wire import Call, RefusedError
from zero2all.tokenizer.load import Tokenizer


class Answer:
    """The answer to one call. The two routes differ in their names and in the form of a choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer, prompt_tokens: Sequence[int] = ()) -> None:
        self.call, self.model, self.tokenizer = call, model, tokenizer
        self._prompt_tokens = sum(prompt_tokens[:: call.n])  # a prompt counts once, however many choices it has
        self._new_tokens = 0
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._ends: dict[int, Piece] = {}
        self._begun: set[int] = set()
        self._written: dict[int, tuple[str, Written]] = {}  # of each choice of a chat

    def whole(self, pieces: Mapping[int, Piece]) -> dict[str, Any]:
        """The answer in one object; `pieces` has everything of each choice."""
        self._ends.update(pieces)
        kept = enumerate(self._kept(pieces))
        choices = [{**self.choice(at, self._with_echo(at, pieces[at])), "index": place} for place, at in kept]
        return {**self._head(self.whole_object), "choices": choices, "usage": self.usage()}

    def _kept(self, pieces: Mapping[int, Piece]) -> list[int]:
        """The choices that are answered; for `best_of` the likeliest of each prompt, the best first."""
        n, found = self.call.n, list[int]()
        for first in range(0, len(pieces), n):
            each: Sequence[int] = range(first, first + n)
            if self.call.kept < n:
                each = sorted(each, key=lambda index: pieces[index].mean_logprob, reverse=True)[: self.call.kept]
            found += each
        return found

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The next part of one choice."""
        if piece.finish is not None:
            self._ends[index] = piece
        choice = self.part(index, self._with_echo(index, piece))
        self._begun.add(index)
        self._new_tokens += len(piece.tokens)
        so_far = _usage(self._prompt_tokens, self._new_tokens) if self.call.running_usage else None
        usage = {"usage": so_far} if self.call.include_usage else {}
        return {**self._head(self.chunk_object), "choices": [choice], **usage}

    def usage_chunk(self) -> dict[str, Any]:
        """The end of a stream that was asked for its usage."""
        return {**self._head(self.chunk_object), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens read and written."""
        ends = [(index, piece.usage) for index, piece in self._ends.items() if piece.usage is not None]
        of_prompts = [usage for index, usage in ends if index % self.call.n == 0]
        prompt, new = sum(each.prompt_tokens for each in of_prompts), sum(usage.new_tokens for _, usage in ends)
        cached = sum(each.cached_tokens for each in of_prompts)
        return {**_usage(prompt, new), "prompt_tokens_details": {"cached_tokens": cached}}

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """One choice, whole."""
        raise NotImplementedError

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """The next part of a choice."""
        raise NotImplementedError

    def bytes_of(self, token: int) -> bytes:
        """What a token spells; nothing for rows of the model beyond the vocabulary, which may be alternatives."""
        try:
            return self.tokenizer.token_bytes(token)
        except ValueError:
            return b""

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "dropped_messages": self.call.dropped_messages} if self.call.dropped_messages else head

    def _with_echo(self, index: int, piece: Piece) -> Piece:
        if not self.call.echoes or index in self._begun:
            return piece
        return dataclasses.replace(piece, text=self.call.echoes[index] + piece.text)


def _usage(prompt: int, new: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer, prompt_tokens: Sequence[int] = ()) -> None:
        super().__init__(call, model, tokenizer, prompt_tokens)
        self._offsets = [0] * len(call.requests)
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in call.requests]

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """Its text."""
        logprobs = self._logprobs(index, piece) if self.call.shows_logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    part = choice

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        tokens = [self._spelled(choice.id) for choice in piece.choices]
        written = [b"" if each.id in self.tokenizer.control_ids else self.bytes_of(each.id) for each in piece.choices]
        offsets = [
            self._offset(index, raw[each.bytes_before :]) for raw, each in zip(written, piece.choices, strict=True)
        ]
        top = [
            {self._spelled(token): logprob for token, logprob in reversed(choice.alternatives)} or None
            for choice in piece.choices
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [None if math.isnan(each.logprob) else each.logprob for each in piece.choices],
            "top_logprobs": top if self.call.requests[index].logprobs else None,
            "text_offset": offsets,
        }

    def _offset(self, index: int, fresh: bytes) -> int:
        """Where the first of these bytes stands in the text; inside a character: where that begins."""
        decoder, begin = self._decoders[index], self._offsets[index]
        pending = decoder.getstate()[0]
        first = decoder.decode(fresh[:1])
        # Bytes that the first one does not go on from become a U+FFFD, which stands before this token.
        is_broken = bool(pending) and bool(first) and (len(first) > 1 or bool(decoder.getstate()[0]))
        self._offsets[index] += len(first) + len(decoder.decode(fresh[1:]))
        return begin + is_broken

    def _spelled(self, token: int) -> str:
        """A token as text; where it is a part of a character, its bytes, written as OpenAI writes them."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A message."""
        delta, piece = self._grown(index, piece)
        for call in delta.get("tool_calls", ()):
            del call["index"]  # which only streams have
            delta["content"] = delta["content"] or None
        message = {"role": "assistant", **delta, "refusal": None}
        return {"index": index, "message": message, **self._rest(index, piece)}

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """What the message grows by; the first part names the role."""
        role = {} if index in self._begun else {"role": "assistant"}
        delta, piece = self._grown(index, piece)
        return {"index": index, "delta": {**role, **delta}, **self._rest(index, piece)}

    def _grown(self, index: int, piece: Piece) -> tuple[dict[str, Any], Piece]:
        """What the parts of the message grow by, calls whole, and the piece with the reason for which it ends."""
        prompt = self.call.prompt
        assert prompt is not None, "a chat has one"
        answer, before = self._written.get(index) or ("", prompt.read("", True))
        answer += piece.text
        now = prompt.read(answer, piece.finish is not None)
        self._written[index] = answer, now
        delta: dict[str, Any] = {"content": now.text[len(before.text) :]}
        if thought := now.thought[len(before.thought) :]:
            delta["reasoning_content"] = thought
        if len(now.calls) > len(before.calls):
            calls = list(enumerate(now.calls))[len(before.calls) :]
            delta["tool_calls"] = [{"index": place, **_with_id(call)} for place, call in calls]
        is_call = now.calls and piece.finish == "stop"
        return delta, dataclasses.replace(piece, finish="tool_calls") if is_call else piece

    def _rest(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.call.requests[index].logprobs is not None:
            logprobs = {"content": [self._entry(choice) for choice in piece.choices], "refusal": None}
        return {"logprobs": logprobs, "finish_reason": piece.finish}

    def _entry(self, choice: ChosenToken) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in choice.alternatives]
        return {**self._token(choice.id, choice.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.bytes_of(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def _with_id(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as clients get it: they answer by its id."""
    arguments = jsonio.dumps_line(call["function"]["arguments"]).decode().rstrip()
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class EmbeddingAnswer(Answer):
    """Of /v1/embeddings: means of hidden states, scaled to length 1."""

    id_prefix = "embd"

    def whole(self, pieces: Mapping[int, Piece]) -> dict[str, Any]:
        """A vector for each text."""
        found = [piece.pooled for _, piece in sorted(pieces.items()) if piece.pooled is not None]
        if len(found) < len(pieces):
            raise RefusedError(503, "The server ended before all texts were read.", code="draining")
        vectors = torch.nn.functional.normalize(torch.stack(found).cpu(), dim=1)
        if not vectors.isfinite().all():
            raise RefusedError(500, "Hidden states of this model are not finite: try another --dtype.", code="overflow")
        rows = vectors.numpy().astype("<f4", copy=False)
        values = [base64.b64encode(row.data).decode() if self.call.as_base64 else row.tolist() for row in rows]
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(values)]
        tokens = sum(piece.usage.prompt_tokens for piece in pieces.values() if piece.usage is not None)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}


# What the engine writes for one HTTP request: from the engine's thread into the event loop.
#
# The engine must not wait for clients, and a loop that is woken for every token of every client takes the interpreter
# from the engine's thread. So pieces are left in a queue, and all streams that have news are woken together, every
# `PERIOD_SECONDS`, less often where they are many; the first piece and the end of a text wake their own at once.


PERIOD_SECONDS = 0.05
STREAMS_A_PERIOD = 12
"""Streams that are woken in a period; for twice as many the period is twice as long, up to four times."""


class Bell:
    """Wakes streams of one event loop, many at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[asyncio.Event] = deque()
        self._is_set = False
        self._seconds = PERIOD_SECONDS

    def ring(self, event: asyncio.Event) -> None:
        """Set `event` with the next ringing. From the engine's thread."""
        self._waiting.append(event)
        if not self._is_set:
            self._is_set = True
            self.call(self._set)

    def call(self, note: Callable[[], None]) -> None:
        """Call `note` in the loop, now. From the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waited
            self.loop.call_soon_threadsafe(note)

    def _set(self) -> None:
        self.loop.call_later(self._seconds, self._ring)

    def _ring(self) -> None:
        self._is_set = False  # before the events are taken: what comes after that sets the bell again
        events = {self._waiting.popleft() for _ in range(len(self._waiting))}
        self._seconds = PERIOD_SECONDS * min(4.0, max(1.0, len(events) / STREAMS_A_PERIOD))
        for event in events:
            event.set()


class Generations:
    """The choices of one request while they are written. For the event loop, but for `_deliver`."""

    def __init__(self, service: Service, call: Call, bell: Bell, metrics: Metrics) -> None:
        self._service, self._requests, self._bell = service, call.requests, bell
        self._metrics, self._submitted, self._begun = metrics, time.perf_counter(), set[int]()
        self._arrived: deque[tuple[int, Piece]] = deque()
        self._news, self._ended = asyncio.Event(), asyncio.Event()
        self._is_noted = not call.stream  # without a stream only the end matters
        self._has_begun = False
        self._tickets: list[Ticket] = []
        self._left, self._at_once = 0, call.at_once or len(call.requests)

    def submit(self) -> None:
        """Hand the next ones in; where one is refused, none runs."""
        first = len(self._tickets)
        portion = self._requests[first : first + self._at_once]
        self._left = len(portion)
        try:
            for index, request in enumerate(portion, first):
                self._tickets.append(self._service.submit(request, partial(self._deliver, index)))
        except BaseException:
            self.cancel()
            raise

    @property
    def prompt_tokens(self) -> list[int]:
        """How many tokens the prompt of each choice has."""
        return [ticket.prompt_tokens for ticket in self._tickets]

    def cancel(self) -> None:
        """Take what is not finished out of the engine."""
        if not self._left:
            return
        with contextlib.suppress(ServiceEndedError):
            for ticket in self._tickets:
                self._service.cancel(ticket)

    async def whole(self) -> list[tuple[int, Piece]]:
        """Everything, once all choices are finished."""
        await self._ended.wait()
        while len(self._tickets) < len(self._requests):
            self._ended.clear()
            self.submit()
            await self._ended.wait()
        return list(self._arrived)

    async def portions(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """What has come since the last portion, until all choices are finished."""
        left = len(self._requests)
        while left:
            await self._news.wait()
            self._news.clear()
            self._is_noted = False  # before the queue is read: what comes after that is noted again
            portion = [self._arrived.popleft() for _ in range(len(self._arrived))]
            left -= sum(piece.finish is not None for _, piece in portion)
            if portion:
                yield portion

    def _deliver(self, index: int, piece: Piece) -> None:
        """Called in the engine's thread."""
        self._arrived.append((index, piece))
        is_first = bool(piece.tokens) and index not in self._begun
        self._metrics.note(piece, time.perf_counter() - self._submitted if is_first else None)
        if is_first:
            self._begun.add(index)
        if piece.finish is not None:
            self._left -= 1
        if not self._left:
            self._bell.call(self._all_ended)
        elif not self._is_noted:
            self._is_noted = True
            if self._has_begun:
                self._bell.ring(self._news)
            else:
                self._has_begun = True
                self._bell.call(self._news.set)

    def _all_ended(self) -> None:
        self._ended.set()
        self._news.set()


def merged(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one choice that follow one another, as one."""
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    choices = tuple(choice for piece in pieces for choice in piece.choices)
    text = "".join(piece.text for piece in pieces)
    return dataclasses.replace(last, text=text, tokens=tokens, choices=choices)


def by_choice(portion: Sequence[tuple[int, Piece]]) -> dict[int, Piece]:
    """The pieces of each choice, joined."""
    found: dict[int, list[Piece]] = {}
    for index, piece in portion:
        found.setdefault(index, []).append(piece)
    return {index: merged(pieces) for index, pieces in sorted(found.items())}
