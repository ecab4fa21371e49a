"""The engine writes what the model says, whoever else is in the batch and however small the cache is."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch

from tests.infer.tiny import MAX_LEN, greedy, log_probabilities, prompts, tiny_model
from zero2all.common.errors import UsageError
from zero2all.infer.cache import BLOCK
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.forward import Span
from zero2all.infer.job import Request
from zero2all.infer.sampling import Sampling
from zero2all.infer.weights import int8_weight

NEW = 24
ROWS = prompts(14)


def bytes_of(blocks: int) -> int:
    """The memory of so many blocks: keys and values of 3 layers, 2 heads of 16 float32 numbers."""
    return blocks * 2 * 3 * BLOCK * 2 * 16 * 4


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    jobs = [engine.submit(request) for request in requests]
    while not engine.is_idle:
        engine.step()
    assert engine.pool.free == engine.pool.total
    return [job.new_ids for job in jobs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [greedy(tiny_model(), row, NEW) for row in ROWS]


class LikeliestOnDevice:
    """As `CudaDecoder`, with plain passes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def decode(self, tokens, positions, tables):
        return self.engine.forward.decode(tokens, positions, tables)

    def greedy(self, tokens, positions, tables):
        return self.decode(tokens, positions, tables).index_fill(1, self.engine.never, -torch.inf).argmax(dim=-1)

    def read(self, tokens, positions, tables):
        rows = tables.long()
        slots = rows.gather(1, (positions // BLOCK).unsqueeze(1)).squeeze(1) * BLOCK + positions % BLOCK
        begins = [0, *((rows[1:] != rows[:-1]).any(dim=1).nonzero().flatten() + 1).tolist(), len(rows)]
        spans = [
            Span(begin, end - begin, int(positions[end - 1]) + 1, rows[begin].tolist())
            for begin, end in itertools.pairwise(begins)
        ]
        return self.engine.forward.prefill(tokens, positions, slots, spans)


@pytest.mark.parametrize("way", ["read at once", "read late", "likeliest on the device"])
@pytest.mark.parametrize(
    "settings",
    [
        EngineSettings(),
        EngineSettings(max_batch=1),
        EngineSettings(max_batch=4, prefill_tokens=7),
        EngineSettings(max_batch=6, cache_bytes=bytes_of(MAX_LEN // BLOCK + 4)),
    ],
    ids=["all at once", "one by one", "small portions", "small cache"],
)
def test_cached_and_batched_text_is_that_of_the_whole_model_run_again_for_every_token(settings, way, expected):
    engine = Engine(tiny_model(), settings)
    engine._reads_late = way != "read at once"  # as on a GPU
    if way == "likeliest on the device":
        engine._fast = LikeliestOnDevice(engine)
    assert run(engine, [Request(row, NEW) for row in ROWS]) == expected


@pytest.mark.parametrize("kind", [{"moe": True}, {"tied": True}], ids=str)
def test_experts_and_tied_embeddings(kind):
    loaded, rows = tiny_model(**kind), ROWS[:5]
    assert run(Engine(loaded), [Request(row, 10) for row in rows]) == [greedy(loaded, row, 10) for row in rows]


def test_weights_in_8_bits_write_what_the_rounded_model_writes():
    loaded, rows = tiny_model(), ROWS[:4]
    rounded = copy.deepcopy(loaded.model)
    for parameter in [*rounded.blocks.parameters(), *rounded.head.parameters()]:
        if parameter.dim() > 1:
            parameter.data = int8_weight(parameter.data).widened()
    expected = [greedy(dataclasses.replace(loaded, model=rounded), row, 10) for row in rows]
    assert run(Engine(loaded, EngineSettings(int8=True)), [Request(row, 10) for row in rows]) == expected


def test_a_job_that_gave_way_writes_on_as_if_nothing_had_happened(expected):
    engine, sent_back = Engine(tiny_model(), EngineSettings(cache_bytes=bytes_of(MAX_LEN // BLOCK + 2))), []
    send_back = engine._send_back
    engine._send_back = lambda job: (sent_back.append(job), send_back(job))
    assert run(engine, [Request(row, NEW) for row in ROWS]) == expected
    assert sent_back


def test_an_equal_beginning_is_computed_once():
    engine, row = Engine(tiny_model()), list(range(60))
    first, second, third = (engine.submit(Request([*row, last], 1)) for last in (100, 101, 102))
    while not engine.is_idle:
        engine.step()
    assert (first.reused_tokens, second.reused_tokens, third.reused_tokens) == (0, 48, 48)


def test_samples_are_the_same_alone_in_company_and_again():
    sampling = Sampling(temperature=1, top_p=0.9, top_k=60, repetition_penalty=1.2, seed=5)
    requests = [Request(row, NEW, sampling) for row in ROWS]
    alone = [run(Engine(tiny_model()), [request])[0] for request in requests]
    engine = Engine(tiny_model(), EngineSettings(max_batch=5))
    assert run(engine, requests) == alone
    assert run(engine, requests) == alone
    assert run(engine, [Request(ROWS[0], NEW, Sampling(temperature=1, seed=6))]) != alone[:1]


def test_log_probabilities_of_new_tokens_and_of_the_likeliest():
    row = ROWS[2]
    engine = Engine(tiny_model())
    job = engine.submit(Request(row, 6, alternatives=3))
    while not engine.is_idle:
        engine.step()
    wanted = log_probabilities(tiny_model(), [*row, *job.new_ids])[len(row) - 1 :]
    assert [choice.logprob for choice in job.choices] == pytest.approx(wanted, abs=1e-5)
    for choice in job.choices:
        values = [value for _, value in choice.alternatives]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert choice.logprob <= values[0] + 1e-6


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(max_batch=3, prefill_tokens=5)], ids=str)
def test_scores_are_those_of_the_whole_model(settings):
    engine = Engine(tiny_model(), settings)
    starts = [1 + number % 3 for number in range(len(ROWS))]
    found = engine.score(ROWS, starts)
    for row, start, scores in zip(ROWS, starts, found, strict=True):
        assert scores.logprobs == pytest.approx(log_probabilities(tiny_model(), row)[start - 1 :], abs=1e-5)
    assert engine.pool.free == engine.pool.total


def test_scoring_shares_what_rows_have_in_common():
    engine, row = Engine(tiny_model()), list(range(80))
    computed = []
    trunk = engine.forward.trunk
    engine.forward.trunk = lambda tokens, *rest: (computed.append(len(tokens)), trunk(tokens, *rest))[1]
    engine.score([[*row, last, last] for last in range(8)], [80] * 8)
    assert sum(computed) == 80 + 8


def test_a_text_of_the_full_length_can_be_scored_and_the_answer_ends_at_it():
    engine = Engine(tiny_model())
    assert len(engine.score([list(range(MAX_LEN + 1))], [1])[0].logprobs) == MAX_LEN
    assert len(run(engine, [Request(list(range(MAX_LEN - 3)), 50)])[0]) <= 3


def test_a_cancelled_job_gives_its_blocks_back_and_the_others_go_on(expected):
    engine = Engine(tiny_model())
    jobs = [engine.submit(Request(row, NEW)) for row in ROWS]
    engine.step()
    for job in jobs[::2]:
        engine.cancel(job)
    while not engine.is_idle:
        engine.step()
    assert {job.finish for job in jobs[::2]} == {"cancelled"}
    assert [job.new_ids for job in jobs[1::2]] == expected[1::2]
    assert engine.pool.free == engine.pool.total


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([], 5), "no tokens"),
        (Request([1] * MAX_LEN, 5), f"has {MAX_LEN} tokens; .* may have {MAX_LEN}"),
        (Request([1, 100_000], 5), "the token id 100000"),
        (Request([1, -1], 5), "the token id -1"),
        (Request([1], 5, alternatives=21), "21 alternatives"),
        (Request([1, 2], 0, score_from=0), "nothing before it"),
        (Request([1, 2], 0), "nothing to do"),
        (Request([1, 2], 0, score_from=2), "nothing to do"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_cannot_be_served_is_refused(request_, words):
    with pytest.raises(UsageError, match=words):
        Engine(tiny_model()).submit(request_)


def test_a_cache_too_small_for_one_text_is_refused():
    with pytest.raises(UsageError, match="too small: one text of 160 tokens needs"):
        Engine(tiny_model(), EngineSettings(cache_bytes=1000))
