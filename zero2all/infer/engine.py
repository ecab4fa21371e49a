"""Continuous batching: requests come and go while others run.

`step` makes one pass over prompts that are not yet read, in portions of `prefill_tokens`, so that a long prompt does
not stop the others, and one pass that adds a token to every job whose prompt is read. Requests are admitted in the
order they came. When the cache is full, the job that came last gives its blocks back and is computed again later;
its text does not change, since a draw depends only on the seed and the number of the token.

On a GPU the tokens of a pass are read one pass later: the next pass takes them from the device and is launched before
the host knows them, so that the device never waits for the host. What a job writes after its end is thrown away.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.common.memory import available_memory
from zero2all.infer import WeightKind
from zero2all.infer.boundary import Vocabulary
from zero2all.infer.cache import BLOCK, BlockPool, KeyValueBlocks, block_bytes, block_keys
from zero2all.infer.cuda import MOST_PROMPT_ROWS, CudaDecoder, obstacle
from zero2all.infer.forward import Forward, Span
from zero2all.infer.grammar import Grammars
from zero2all.infer.job import ChosenToken, Job, Request, Scores
from zero2all.infer.load import LoadedModel
from zero2all.infer.sampling import Picker, penalised
from zero2all.infer.score import LOGITS_AT_ONCE, RowScorer, distributions_after
from zero2all.infer.weights import Weights, drop_matrices, packed_for_cpu, quantise, weights_of

MOST_ALTERNATIVES = 20
WORTH_SHARING = 0.7
"""Rows to score are read as a tree where that leaves at most this share of their tokens to compute."""


class PromptTooLongError(UsageError):
    """A prompt that leaves no room for an answer."""


@dataclass(frozen=True)
class EngineSettings:
    """How much is done at once; None: found from the model and the memory."""

    max_batch: int | None = None
    """Sequences that run at once: 32 on a CPU, 256 on a GPU, unless told."""
    cache_bytes: int | None = None
    """Memory for keys and values: a quarter of what is free on a CPU, 80 % on a GPU, but no more than can be used."""
    max_len: int | None = None
    """Tokens of prompt and answer together; the model's own limit unless told."""
    prefill_tokens: int | None = None
    """Prompt tokens that are read in one pass: 512 on a CPU, 8,192 on a GPU."""
    weights: WeightKind = "plain"
    """How the matrices are kept: as they are, in 8 or in 4 bits (see `weights`)."""
    owns_model: bool = False
    """Nobody else uses the model that was loaded: the memory of what the engine does not need becomes free."""


@dataclass(frozen=True)
class _Launched:
    """A decoding pass whose tokens the host has not read yet."""

    rows: list[Job]
    tokens: Tensor  # on the device
    on_host: list[Tensor]  # the tokens and, where a row asks for them, log probabilities: see `_choose`
    ready: torch.cuda.Event | None
    positions: Tensor  # (B,) and (B, blocks), on the host
    tables: Tensor
    more: int
    """Passes that can follow with the same rows and blocks, whatever the tokens are, unless jobs come or go."""
    changes: int


class Engine:
    """One model with its cache and its requests. Not for several threads (see `service`)."""

    def __init__(
        self, loaded: LoadedModel, settings: EngineSettings | None = None, vocabulary: Vocabulary | None = None
    ) -> None:
        settings = settings or EngineSettings()
        config, self.device = loaded.model.config, loaded.device
        on_gpu = self.device.type == "cuda"
        mesh = loaded.world and loaded.world.mesh
        self.model_config = config
        self._model, weights = loaded.model, weights_of(loaded.model, mesh.tensor.size if mesh else 1)
        if settings.weights != "plain":
            weights = quantise(weights, settings.weights)
            if settings.owns_model:
                drop_matrices(loaded.model)
        dtype = weights.embedding.dtype
        self.tokenizer = loaded.tokenizer
        self.vocabulary = vocabulary or Vocabulary(loaded.tokenizer, config.vocab_ids)
        self.max_len = min(settings.max_len or config.max_seq_len, config.max_seq_len)
        self.max_batch = settings.max_batch or (256 if on_gpu else 32)
        self.prefill_tokens = settings.prefill_tokens or (8192 if on_gpu else 512)
        one = block_bytes(weights.config, dtype)
        blocks = _blocks_in(settings.cache_bytes, one, self.max_len, self.max_batch, self.device)
        if loaded.world is not None:  # the same on all ranks
            blocks = min(loaded.world.gather(blocks))
        self.pool = BlockPool(blocks)
        self.blocks = KeyValueBlocks(weights.config, blocks, dtype, self.device)
        if not on_gpu and settings.weights == "plain" and self.max_batch > 1:
            weights = packed_for_cpu(weights, available_memory())
        self.forward = self.make_forward(weights)
        self.slow_because = obstacle(weights) or ("a model that is spread over ranks" if mesh else "")
        """Why decoding does not use the kernels and graphs of `cuda`; empty: it does."""
        never = self.vocabulary.never
        self._fast = None if self.slow_because else CudaDecoder(weights, self.blocks, self.max_len, never)
        self.never = self.vocabulary.never.to(self.device)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.generated = 0
        """Tokens written since the start."""
        self._reads_late = on_gpu
        self._launched: _Launched | None = None
        self._changes = 0  # how often a job came or went
        self._seen: dict[int, Tensor] = {}  # of sequences with a repetition penalty: which ids occur (V,)
        self._counts: dict[int, Tensor] = {}  # of those with other penalties: how often each id was written (V,)
        self.grammars = Grammars(self.vocabulary, self.tokenizer.end_ids)
        self._picker: tuple[list[Job], Picker] | None = None
        self._count = 0

    def make_forward(self, weights: Weights) -> Forward:
        """What makes the passes."""
        return Forward(weights, self.blocks)

    # What callers use ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Job:
        """Queue a request; what becomes of it is seen in what is returned, while `step` is called."""
        self.check(request)
        ids = list(request.ids)
        self._count += 1
        job = Job(request, self._count, ids, list(request.given_back), block_keys(ids))
        if request.sampling.repetition_penalty != 1:
            seen = torch.zeros(self.forward.weights.config.vocab_ids, dtype=torch.bool, device=self.device)
            seen[torch.tensor(ids, device=self.device)] = True
            self._seen[job.number] = seen
        self.waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Take a request out; what it wrote so far stays readable."""
        if job.finish is None:
            self._end(job, "cancelled")

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """One round of work; returns the jobs that grew or ended in it."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread: our kernels are launched there
        self._admit()
        last = self._launched
        if last is not None and last.more and last.changes == self._changes:
            self._launched = self._launch_again(last)
            return self._collect(last)
        grown: list[Job] = []
        if any(job.is_reading for job in self.running):
            grown += self._settle()
            grown += self._read_prompts()
        return grown + self._decode()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running and self._launched is None

    def reset(self) -> None:
        """Forget everything: after a pass that failed, what stands in the cache is not known."""
        self.waiting.clear()
        self.running.clear()
        self._seen.clear()
        self._counts.clear()
        self.grammars.close()
        self._launched = self._picker = None
        self.pool = BlockPool(self.pool.total + 1)

    def refresh(self) -> None:
        """Take up the values that the model's weights have now; what was computed with the old ones is forgotten. Not
        for an engine in 8 or 4 bits."""
        self.reset()
        old, weights = self.forward.weights, weights_of(self._model)
        if self.device.type == "cuda":  # recorded graphs read the tensors that they have
            old.embedding.copy_(weights.embedding)
        else:
            can_pack = self.max_batch > 1
            self.forward.weights = packed_for_cpu(weights, available_memory()) if can_pack else weights

    def run(self, requests: Iterable[Request]) -> Iterator[Job]:
        """All of `requests`, each when it is done."""
        left = {id(job): job for job in [self.submit(request) for request in requests]}
        while left:
            for job in self.step():
                if job.finish is not None and left.pop(id(job), None) is not None:
                    yield job

    def score(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], when_done: Callable[[int], None] | None = None
    ) -> list[Scores]:
        """For each row of ids, its tokens from the start on, given those before them. `when_done` gets the number of
        each row when it is scored."""
        numbers = [number for number, row in enumerate(rows) if len(row) > starts[number]]
        for number in numbers:
            self.check(Request(rows[number], 0, score_from=starts[number]))
        scorer = RowScorer(
            self.forward, [rows[number] for number in numbers], [starts[number] for number in numbers],
            self.prefill_tokens,
        )  # fmt: skip
        if scorer.share_computed <= WORTH_SHARING:
            done = None if when_done is None else lambda place: when_done(numbers[place])
            found = dict(zip(numbers, scorer.score(done), strict=True))
        else:
            found = self._score_one_by_one(rows, starts, numbers, when_done)
        return [found.get(number, Scores([], [])) for number in range(len(rows))]

    def _score_one_by_one(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], numbers: Sequence[int],
        when_done: Callable[[int], None] | None,
    ) -> dict[int, Scores]:  # fmt: skip
        """Rows that have little in common."""
        jobs = {self.submit(Request(rows[number], 0, score_from=starts[number])): number for number in numbers}
        left = len(jobs)
        while left:
            for job in self.step():
                if job in jobs and job.finish is not None:
                    left -= 1
                    if when_done is not None:
                        when_done(jobs[job])
        return {number: Scores(job.scores, job.ranks) for job, number in jobs.items()}

    def distributions(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log probabilities of all ids (V,) after each row."""
        for row in rows:
            self.check(Request(row, 1))
        return distributions_after(self.forward, rows, self.prefill_tokens)

    # Admission -------------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse what cannot be served."""
        config = self.forward.weights.config
        length, vocabulary = request.prompt_tokens, config.vocab_ids
        if not request.ids:
            raise UsageError("The prompt has no tokens; give at least one.")
        is_scored = request.score_from is not None and len(request.ids) > request.score_from
        if request.max_new_tokens < 1 and not is_scored and not request.pools:
            raise UsageError("There is nothing to do: the request generates no token and scores none.")
        # The last token of a text that is only scored is never fed to the model.
        if length >= self.max_len + (0 if request.max_new_tokens else 1 if request.pools else 2):
            raise self.too_long(f"{length:,}")
        wrong = next((number for number in request.ids if not 0 <= number < vocabulary), None)
        if wrong is not None:
            raise UsageError(f"The prompt has the token id {wrong}; this model has the ids 0 to {vocabulary - 1}.")
        wrong = next((number for number, _ in request.sampling.logit_bias if not 0 <= number < vocabulary), None)
        if wrong is not None:
            raise UsageError(f"logit_bias has the token id {wrong}; this model has the ids 0 to {vocabulary - 1}.")
        if request.alternatives is not None and not 0 <= request.alternatives <= MOST_ALTERNATIVES:
            raise UsageError(f"{request.alternatives} alternatives were asked for; there are 0 to {MOST_ALTERNATIVES}.")
        if request.score_from is not None and request.score_from < 1:
            raise UsageError("The first token of a text has nothing before it: scoring starts at token 1.")

    def too_long(self, tokens: str) -> PromptTooLongError:
        """The refusal of a prompt of so many tokens."""
        origin = "model.max_seq_len" if self.max_len == self.forward.weights.config.max_seq_len else "--max-len"
        return PromptTooLongError(
            f"The prompt has {tokens} tokens; prompt and answer together may have {self.max_len:,} ({origin}). "
            f"Shorten the prompt."
        )

    def _admit(self) -> None:
        """Let waiting requests in, in their order, as long as there is room."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return
        being_read = {key for job in self.running if job.is_reading for key in job.keys[job.noted :]}
        for job in list(itertools.islice(self.waiting, 2 * self.max_batch)):
            reusable = self._reusable(job) // BLOCK
            known = self.pool.find(job.keys[:reusable])
            if len(known) < reusable and job.keys[len(known)] in being_read:
                self.pool.release(known)  # another job computes this very block: it can be shared in the next round
                continue
            needed = -(-len(job.ids) // BLOCK) - len(known)
            # A block in reserve for each that runs, so that the newcomer is not sent away at once.
            more = self.pool.take(needed) if self.pool.free >= needed + len(self.running) else None
            if more is None or len(self.running) >= self.max_batch:
                self.pool.release([*known, *(more or ())])
                return
            job.blocks = known + more
            job.done = len(known) * BLOCK
            job.noted = len(known)
            job.reused_tokens = max(job.reused_tokens, job.done)
            being_read.update(job.keys[len(known) :])
            self.waiting.remove(job)
            self.running.append(job)
            self._changes += 1

    def _reusable(self, job: Job) -> int:
        """Tokens that need not be computed if their keys and values are known: what predicts a wanted token must."""
        if job.request.pools:
            return 0
        last, start = job.goal - 1, job.request.score_from
        return last if start is None or job.is_scored else min(last, start - 1)

    # Reading prompts -------------------------------------------------------------------------------------------------

    def _read_prompts(self) -> list[Job]:
        rows: list[tuple[Job, int]] = []
        budget = self.prefill_tokens
        for job in self.running:
            if job.is_reading and budget > 0:
                count = min(budget, job.goal - job.done)
                rows.append((job, count))
                budget -= count
        hidden = self._hidden_states(rows)
        self._score(rows, hidden)
        ends, end = {}, 0
        for job, count in rows:
            end += count
            if job.request.pools:
                found = self.forward.on_all_ranks(hidden[end - count : end].float().sum(dim=0))
                job.pooled = found if job.pooled is None else job.pooled + found
            job.done += count
            self._note_full_blocks(job)
            if job.done == job.goal:
                ends[job] = end - 1
        scored = [job for job in ends if not job.request.max_new_tokens]
        for job in scored:
            if job.pooled is not None:
                job.pooled /= len(job.ids)
            self._end(job, "stop" if job.request.pools else "length")
        ready = [job for job in ends if job.request.max_new_tokens]
        if not ready:
            return scored
        logits = self.forward.logits(hidden[self._tensor([ends[job] for job in ready])])
        tokens, logprobs = self._choose(logits, ready)
        return scored + self._take(ready, tokens.tolist(), logprobs or ())

    def _hidden_states(self, rows: list[tuple[Job, int]]) -> Tensor:
        """Of the next tokens of each job."""
        if self._fast is None or sum(count for _, count in rows) > MOST_PROMPT_ROWS:
            return self.forward.prefill(*self._ragged(rows))
        width = max(len(job.blocks) for job, _ in rows)
        tokens = [token for job, count in rows for token in job.ids[job.done : job.done + count]]
        places = [place for job, count in rows for place in range(job.done, job.done + count)]
        tables = torch.tensor([job.blocks + [0] * (width - len(job.blocks)) for job, _ in rows], dtype=torch.int32)
        tables = tables.repeat_interleave(torch.tensor([count for _, count in rows]), dim=0)
        return self._fast.read(self._tensor(tokens), torch.tensor(places), tables)

    def _ragged(self, rows: list[tuple[Job, int]]) -> tuple[Tensor, Tensor, Tensor, list[Span]]:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        for job, count in rows:
            begin, end = job.done, job.done + count
            spans.append(Span(len(tokens), count, end, job.blocks))
            tokens += job.ids[begin:end]
            positions += range(begin, end)
            slots += [job.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in range(begin, end)]
        return self._tensor(tokens), self._tensor(positions), self._tensor(slots), spans

    def _score(self, rows: list[tuple[Job, int]], hidden: Tensor) -> None:
        """Log probabilities of the tokens that these rows predict and that are to be scored."""
        wanted: list[tuple[Job, int, int]] = []  # job, row, id
        begin = 0
        for job, count in rows:
            start = job.request.score_from
            if start is not None and not job.is_scored:
                last = min(job.done + count, len(job.request.ids) - 1)
                places = range(max(start - 1, job.done), last)
                wanted += [(job, begin + place - job.done, job.ids[place + 1]) for place in places]
            begin += count
        at_once = max(1, LOGITS_AT_ONCE // self.forward.weights.config.vocab_ids)
        for first in range(0, len(wanted), at_once):
            jobs, numbers, ids = zip(*wanted[first : first + at_once], strict=True)
            logits = self.forward.logits(hidden[self._tensor(numbers)])
            chosen = logits.gather(1, self._tensor(ids).unsqueeze(1))
            ranks = (logits > chosen).sum(dim=-1).tolist()
            totals = logits.logsumexp(dim=-1, keepdim=True)
            scores = (chosen - totals).squeeze(1).tolist()
            for job, score, rank in zip(jobs, scores, ranks, strict=True):
                job.scores.append(score)
                job.ranks.append(rank)
            asked = [job.request.alternatives for job in jobs]
            if (most := max((each for each in asked if each is not None), default=None)) is None:
                continue
            best = logits.topk(min(most, logits.shape[1]), dim=-1)
            likeliest = zip(best.indices.tolist(), (best.values - totals).tolist(), strict=True)
            for job, own, score, count, pair in zip(jobs, ids, scores, asked, likeliest, strict=True):
                if count is not None:
                    job.scored.append(ChosenToken(own, score, tuple(zip(*pair, strict=True))[:count]))

    def _note_full_blocks(self, job: Job) -> None:
        full = job.done // BLOCK
        if full > len(job.keys):
            job.keys = block_keys(job.ids[: full * BLOCK], job.keys)
        for number in range(job.noted, full):
            self.pool.note(job.blocks[number], job.keys[number])
        job.noted = max(job.noted, full)

    # Writing ---------------------------------------------------------------------------------------------------------

    def _decode(self) -> list[Job]:
        """Launch a pass; read its tokens or, where tokens are read late, those of the pass before."""
        last, grown = self._launched, []
        if last is not None and not self._can_follow(last):
            grown, last = self._settle(), None
        rows = self._with_room(self._writers(), 0 if last is None else 1)
        if not rows:
            return grown
        self._launched = self._launch(rows, last)
        if last is not None:
            grown += self._collect(last)
        return grown if self._reads_late else grown + self._settle()

    def _writers(self) -> list[Job]:
        return [each for each in self.running if not each.is_reading and each.request.max_new_tokens]

    def _can_follow(self, last: _Launched) -> bool:
        """Whether the next pass can take its tokens from the last one, unread: the same rows go on, none is sure to
        end with the token to come, and all have room."""
        return (
            self._writers() == last.rows
            and not any(row.rest or row.request.grammar for row in last.rows)
            and all(len(row.ids) + 1 < self.max_len for row in last.rows)
            and all(len(row.new_ids) + 1 < row.request.max_new_tokens for row in last.rows)
            and sum(_blocks_lacking(row, 1) for row in last.rows) <= self.pool.free
        )

    def _launch(self, rows: list[Job], last: _Launched | None) -> _Launched:
        ahead = 0 if last is None else 1  # the tokens of the last pass are not yet in `ids`
        places = [len(row.ids) - 1 + ahead for row in rows]
        is_plain = self._fast is not None and all(map(_takes_the_likeliest, rows))
        if is_plain and self._reads_late:
            self._take_blocks_ahead(rows, places)
        width = max(len(row.blocks) for row in rows)
        tables = torch.tensor([(row.blocks + [0] * width)[:width] for row in rows], dtype=torch.int32)
        tokens = self._tensor([row.ids[-1] for row in rows]) if last is None else last.tokens
        positions, logprobs, more = torch.tensor(places), None, 0
        if self._fast is None:
            logits = self.forward.decode(tokens, self._tensor(places), tables.to(self.device))
            tokens, logprobs = self._choose(logits, rows, ahead)
        elif is_plain:
            tokens = self._fast.greedy(tokens, positions, tables)
            if self._reads_late and not any(job.is_reading for job in self.running):
                more = min(map(self._passes_left, rows, places)) - ahead
        else:
            logits = self._fast.decode(tokens, positions, tables)
            tokens, logprobs = self._choose(logits, rows, ahead)
        return self._read_later(rows, tokens, logprobs, positions, tables, max(0, more))

    def _take_blocks_ahead(self, rows: list[Job], places: list[int]) -> None:
        """One more for each row that will need it, while there are plenty: then many passes can follow."""
        lacking = [
            row
            for row, place in zip(rows, places, strict=True)
            if len(row.blocks) * BLOCK < min(place + 1 + BLOCK, self.max_len, place + 1 + row.request.max_new_tokens)
        ]
        if self.pool.free - len(lacking) > self.pool.total // 4:
            for row in lacking:
                row.blocks += self.pool.take(1) or []

    def _passes_left(self, row: Job, place: int) -> int:
        """After one at `place`: until its blocks, the longest text or its answer are full."""
        to_write = row.request.max_new_tokens - len(row.new_ids) - 1
        return min(len(row.blocks) * BLOCK - place - 1, self.max_len - place - 2, to_write)

    def _launch_again(self, last: _Launched) -> _Launched:
        """The next pass of the same rows. Nothing is asked of them, so that even the host of a large batch is faster
        than the GPU."""
        assert self._fast is not None
        positions = last.positions + 1
        tokens = self._fast.greedy(last.tokens, positions, last.tables)
        return self._read_later(last.rows, tokens, None, positions, last.tables, last.more - 1)

    def _read_later(
        self, rows: list[Job], tokens: Tensor, logprobs: tuple[Tensor, Tensor, Tensor] | None,
        positions: Tensor, tables: Tensor, more: int,
    ) -> _Launched:  # fmt: skip
        on_host, ready = [tokens, *(logprobs or ())], None
        if self._reads_late and self.device.type == "cuda":
            on_host = [_copied_to_host(each) for each in on_host]
            ready = torch.cuda.Event()
            ready.record()
        return _Launched(rows, tokens, on_host, ready, positions, tables, more, self._changes)

    def _collect(self, launched: _Launched) -> list[Job]:
        if launched.ready is not None:
            launched.ready.synchronize()
        for row in launched.rows:
            if row.finish is None:
                row.done = len(row.ids)
                if row.done // BLOCK > row.noted:
                    self._note_full_blocks(row)
        tokens, *logprobs = launched.on_host
        return self._take(launched.rows, tokens.tolist(), logprobs)

    def _settle(self) -> list[Job]:
        """Read the tokens of the pass that is under way, if one is."""
        launched, self._launched = self._launched, None
        return [] if launched is None else self._collect(launched)

    def _with_room(self, rows: list[Job], ahead: int) -> list[Job]:
        """The rows that have a block for their next token; where there is none, the youngest job gives way."""
        kept = list(rows)
        for row in rows:
            while row in kept:
                more = self.pool.take(_blocks_lacking(row, ahead))
                if more is not None:
                    row.blocks += more
                    break
                youngest = max(self.running, key=lambda job: job.number)
                self._send_back(youngest)
                kept = [each for each in kept if each is not youngest]
        return kept

    def _send_back(self, job: Job) -> None:
        """Back to the front of the queue, to be computed again."""
        self.pool.release(job.blocks)
        self.running.remove(job)
        self._changes += 1
        job.blocks, job.done, job.noted, job.pooled = [], 0, 0, None
        job.keys = block_keys(job.ids, job.keys)
        if not job.is_scored:
            job.scores.clear()
            job.ranks.clear()
            job.scored.clear()
        self.waiting.appendleft(job)

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _choose(
        self, logits: Tensor, rows: list[Job], ahead: int = 0
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """The next tokens (B,) and, where a row asks for them, log probabilities: of each token, and of the likeliest
        with their ids."""
        asked = [row.request.alternatives for row in rows if row.request.alternatives is not None]
        plain = logits.clone() if asked else logits
        picker = self._picker_of(rows)
        if len(self.never):
            of_ends = logits[picker.end_rows, picker.end_ids]
            logits[:, self.never] = -torch.inf
            logits[picker.end_rows, picker.end_ids] = of_ends
        if any(row.number in self._seen for row in rows):
            logits = self._penalise(logits, rows)
        for number, row in enumerate(rows):
            self._adjust(logits[number], row)
            if row.rest:
                tail = b"".join(self.vocabulary.pieces[token] for token in row.rest)
                allowed = torch.tensor([row.rest[0], *self.vocabulary.starting_with(tail)], device=logits.device)
                kept = logits[number, allowed]
                logits[number] = -torch.inf
                logits[number, allowed] = kept
        tokens = picker.pick(logits, [len(row.new_ids) + ahead for row in rows])
        for number, row in enumerate(rows):
            if row.number in self._seen:
                self._seen[row.number].scatter_(0, tokens[number : number + 1], True)
            if row.number in self._counts and not row.rest:
                self._counts[row.number].index_add_(0, tokens[number : number + 1], logits.new_ones(1))
        if not asked:
            return tokens, None
        logprobs = plain.log_softmax(dim=-1)
        best = logprobs.topk(min(max(asked), logprobs.shape[1]), dim=-1)
        return tokens, (logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1), best.values, best.indices)

    def _penalise(self, logits: Tensor, rows: list[Job]) -> Tensor:
        nothing = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        seen = torch.stack([self._seen.get(row.number, nothing) for row in rows])
        penalties = [row.request.sampling.repetition_penalty for row in rows]
        return penalised(logits, seen, torch.tensor(penalties, device=logits.device).unsqueeze(1))

    def _adjust(self, logits: Tensor, row: Job) -> None:
        """Bias, penalties for what was written, and the grammar of a row: its logits (V,) are changed in place."""
        sampling = row.request.sampling
        if sampling.logit_bias:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            logits[self._tensor(ids)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        if sampling.frequency_penalty or sampling.presence_penalty:
            counts = self._counts.setdefault(row.number, torch.zeros_like(logits))
            logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        if row.request.grammar is not None:
            try:
                allowed = self.grammars.allowed(row.number, row.request.grammar, row.new_ids, row.request.end_ids)
            except UsageError as error:
                row.error = str(error)  # its next token is not taken
            else:
                logits.masked_fill_(~allowed.to(logits.device), -torch.inf)

    def _picker_of(self, rows: list[Job]) -> Picker:
        if self._picker is None or self._picker[0] != rows:
            ends = [row.request.end_ids for row in rows]
            self._picker = (rows, Picker([row.request.sampling for row in rows], self.device, ends))
        return self._picker[1]

    def _take(self, rows: list[Job], tokens: list[int], logprobs: Sequence[Tensor]) -> list[Job]:
        """Give each row its token; end those that are complete. Rows that ended meanwhile get nothing."""
        grown: list[Job] = []
        ends = self.tokenizer.end_ids
        numbers = tuple(each.tolist() for each in logprobs)
        for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if row.finish is not None:
                continue
            grown.append(row)
            if row.error:
                self._end(row, "grammar")
                continue
            if token in ends or token in row.request.end_ids:
                if numbers:
                    row.ending = ChosenToken(token, numbers[0][number])
                self._end(row, "stop")
                continue
            tail, is_of_prompt = b"", False
            if row.rest:
                tail = b"".join(self.vocabulary.pieces[each] for each in row.rest)
                is_of_prompt = len(self.vocabulary.pieces[token]) <= len(tail)
                row.rest = row.rest[1:] if token == row.rest[0] else []
            row.ids.append(token)
            if not is_of_prompt:
                self.generated += 1
                row.new_ids.append(token)
                row.bytes_before.append(len(tail))
                if numbers and row.request.alternatives is not None:
                    own, values, ids = (each[number] for each in numbers)
                    best = tuple(zip(ids, values, strict=True))[: row.request.alternatives]
                    row.choices.append(ChosenToken(token, own, best, len(tail)))
            if len(row.new_ids) >= row.request.max_new_tokens or len(row.ids) >= self.max_len:
                self._end(row, "length")
        return grown

    def _end(self, job: Job, finish: str) -> None:
        job.finish, job.ended = finish, time.perf_counter()
        self._changes += 1
        self._seen.pop(job.number, None)
        self._counts.pop(job.number, None)
        self.grammars.forget(job.number)
        if job in self.running:
            self.running.remove(job)
            self.pool.release(job.blocks)
            job.blocks = []
        elif job in self.waiting:
            self.waiting.remove(job)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        made = torch.tensor(numbers, dtype=torch.long, pin_memory=self.device.type == "cuda")
        return made.to(self.device, non_blocking=True)


def _copied_to_host(tensor: Tensor) -> Tensor:
    """Where the copy will be, once the device has made it."""
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


def _takes_the_likeliest(job: Job) -> bool:
    """Whether nothing but the logits decides about its next token, and nothing else is asked about it."""
    request, sampling = job.request, job.request.sampling
    is_plain = sampling.is_greedy and not sampling.changes_logits and request.grammar is None
    return is_plain and request.alternatives is None and not request.end_ids and not job.rest


def _blocks_lacking(job: Job, ahead: int) -> int:
    """Blocks that `job` needs for its next token; `ahead` of its tokens are not known yet."""
    return max(0, -(-(len(job.ids) + ahead) // BLOCK) - len(job.blocks))


def _blocks_in(cache_bytes: int | None, one: int, max_len: int, max_batch: int, device: torch.device) -> int:
    """Blocks of the cache, the scratch block included."""
    least = math.ceil(max_len / BLOCK) + 1
    if cache_bytes is None:
        free = torch.cuda.mem_get_info(device)[0] * 4 // 5 if device.type == "cuda" else available_memory() // 4
        cache_bytes = max(least * one, min(free, max_batch * (least - 1) * one + one))
    if cache_bytes < least * one:
        raise UsageError(
            f"A cache of {cache_bytes / 1e6:,.1f} MB is too small: one text of {max_len:,} tokens needs "
            f"{least * one / 1e6:,.1f} MB. Give it more, or allow shorter texts (--max-len)."
        )
    return cache_bytes // one
