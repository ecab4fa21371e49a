"""The engine writes what the model says, whoever else is in the batch and however small the cache is."""

import copy
import dataclasses
import itertools
import random

import pytest
import torch

from tests.infer.tiny import MAX_LEN, greedy, log_probabilities, prompts, tiny_model
from zero2all.common.errors import UsageError
from zero2all.infer import weights
from zero2all.infer.cache import BLOCK, SCRATCH, BlockPool, block_keys
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.forward import Span
from zero2all.infer.job import Request
from zero2all.infer.sampling import Sampling
from zero2all.infer.score import RowScorer, distributions_after
from zero2all.infer.weights import int4_weight, int8_weight

NEW = 24
WAYS = ("read at once", "read late", "likeliest on the device")
ROWS = prompts(14)


def bytes_of(blocks: int) -> int:
    """The memory of so many blocks: keys and values of 3 layers, 2 heads of 16 float32 numbers."""
    return blocks * 2 * 3 * BLOCK * 2 * 16 * 4


def finish(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()
    assert engine.pool.free == engine.pool.total


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    jobs = [engine.submit(request) for request in requests]
    finish(engine)
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
        parts = itertools.pairwise(begins)
        spans = [Span(at, end - at, int(positions[end - 1]) + 1, rows[at].tolist()) for at, end in parts]
        return self.engine.forward.prefill(tokens, positions, slots, spans)


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        (EngineSettings(), "read at once"),
        (EngineSettings(), "read late"),
        (EngineSettings(), "likeliest on the device"),
        (EngineSettings(max_batch=1), "read late"),
        (EngineSettings(max_batch=4, prefill_tokens=7), "read at once"),
        (EngineSettings(max_batch=4, prefill_tokens=7), "likeliest on the device"),
        *((EngineSettings(max_batch=6, cache_bytes=bytes_of(MAX_LEN // BLOCK + 4)), way) for way in WAYS),
    ],
    ids=str,
)
def test_cached_and_batched_text_is_that_of_the_whole_model_run_again_for_every_token(settings, way, expected):
    engine, sent_back = Engine(tiny_model(), settings), []
    engine._reads_late = way != "read at once"  # as on a GPU
    if way == "likeliest on the device":
        engine._fast = LikeliestOnDevice(engine)
    send_back = engine._send_back
    engine._send_back = lambda job: (sent_back.append(job), send_back(job))
    assert run(engine, [Request(row, NEW) for row in ROWS]) == expected
    assert bool(sent_back) == (settings.cache_bytes is not None), "a job that gave way writes on"


@pytest.mark.parametrize("kind", ["moe", "tied", "int8", "int4"])
def test_experts_tied_embeddings_and_weights_in_8_and_4_bits(kind, monkeypatch):
    monkeypatch.setattr(weights, "_has_int4_cpu_kernel", lambda: False)  # it rounds to bfloat16
    settings = EngineSettings(weights=kind if kind in ("int8", "int4") else "plain")
    loaded = tiny_model(moe="moe" in kind, tied="tied" in kind)
    rounded = copy.deepcopy(loaded.model)
    for name, parameter in rounded.named_parameters() if settings.weights != "plain" else ():
        if parameter.dim() > 1 and "embedding" not in name:
            in_8_bits = kind == "int8" or name.startswith("head")
            parameter.data = (int8_weight if in_8_bits else int4_weight)(parameter.data).widened()
    expected = [greedy(dataclasses.replace(loaded, model=rounded), row, 10) for row in ROWS[:5]]
    assert run(Engine(loaded, settings), [Request(row, 10) for row in ROWS[:5]]) == expected


def test_samples_are_the_same_alone_in_company_and_again():
    sampling = Sampling(temperature=1, top_p=0.9, top_k=60, repetition_penalty=1.2, seed=5)
    requests = [Request(row, NEW, sampling) for row in ROWS]
    alone = [run(Engine(tiny_model()), [request])[0] for request in requests]
    engine = Engine(tiny_model(), EngineSettings(max_batch=5))
    assert run(engine, requests) == alone
    assert run(engine, requests) == alone
    assert run(engine, [Request(ROWS[0], NEW, Sampling(temperature=1, seed=6))]) != alone[:1]


def test_an_equal_beginning_is_computed_once():
    engine, row = Engine(tiny_model()), list(range(60))
    jobs = [engine.submit(Request([*row, last], 1)) for last in (100, 101, 102)]
    finish(engine)
    assert [job.reused_tokens for job in jobs] == [0, 48, 48]


def test_log_probabilities_of_new_tokens_and_of_the_likeliest():
    row, engine = ROWS[2], Engine(tiny_model())
    job = engine.submit(Request(row, 6, alternatives=3))
    finish(engine)
    wanted = log_probabilities(tiny_model(), [*row, *job.new_ids])[len(row) - 1 :]
    assert [choice.logprob for choice in job.choices] == pytest.approx(wanted, abs=1e-5)
    for choice in job.choices:
        values = [value for _, value in choice.alternatives]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert choice.logprob <= values[0] + 1e-6


def assert_scores(rows, starts, found):
    for row, start, scores in zip(rows, starts, found, strict=True):
        assert scores.logprobs == pytest.approx(log_probabilities(tiny_model(), row)[start - 1 :], abs=1e-5)
        assert len(scores.ranks) == len(row) - start


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(max_batch=3, prefill_tokens=5)], ids=str)
def test_scores_are_those_of_the_whole_model(settings):
    engine = Engine(tiny_model(), settings)
    starts = [1 + number % 3 for number in range(len(ROWS))]
    assert_scores(ROWS, starts, engine.score(ROWS, starts))
    assert engine.pool.free == engine.pool.total


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
    finish(engine)
    assert {job.finish for job in jobs[::2]} == {"cancelled"}
    assert [job.new_ids for job in jobs[1::2]] == expected[1::2]


def test_a_request_that_cannot_be_served_is_refused():
    for request_, words in (
        (Request([], 5), "no tokens"),
        (Request([1] * MAX_LEN, 5), f"has {MAX_LEN} tokens; .* may have {MAX_LEN}"),
        (Request([1, 100_000], 5), "the token id 100000"),
        (Request([1, -1], 5), "the token id -1"),
        (Request([1], 5, alternatives=21), "21 alternatives"),
        (Request([1, 2], 0, score_from=0), "nothing before it"),
        (Request([1, 2], 0, score_from=2), "nothing to do"),
    ):
        with pytest.raises(UsageError, match=words):
            Engine(tiny_model()).submit(request_)
        with pytest.raises(UsageError, match="too small: one text of 160 tokens needs"):
            Engine(tiny_model(), EngineSettings(cache_bytes=1000))


def branching_rows(seed):
    """Texts that share long and short beginnings; one twice, one that begins another, one alone."""
    rng, rows = random.Random(seed), []

    def draw(count):
        return rng.choices(range(40), k=count)

    for _ in range(2):
        examples = draw(25)
        for _ in range(3):
            question = examples + draw(rng.randrange(1, 20))
            rows += [question + draw(rng.randrange(1, 4)) for _ in range(3)]
    return [*rows, rows[0], rows[1][:30], draw(50)]


@pytest.mark.parametrize("tokens_at_once", [3, 64, 4096])
def test_scores_are_those_of_each_row_alone(tokens_at_once):
    rows = branching_rows(tokens_at_once)
    starts = [1 + number * 7 % (len(row) - 1) for number, row in enumerate(rows)]
    scorer, done = RowScorer(Engine(tiny_model()).forward, rows, starts, tokens_at_once), []
    assert_scores(rows, starts, scorer.score(done.append))
    assert sorted(done) == list(range(len(rows)))


def test_each_token_of_the_tree_is_computed_once_where_a_pass_has_room():
    forward, computed, rows = Engine(tiny_model()).forward, [], branching_rows(0)
    trunk = forward.trunk
    forward.trunk = lambda tokens, *rest: (computed.append(len(tokens)), trunk(tokens, *rest))[1]
    RowScorer(forward, rows, [1] * len(rows), 4096).score()
    assert computed == [len({tuple(row[:end]) for row in rows for end in range(1, len(row))})]


def test_distributions_follow_the_last_token():
    rows, forward = branching_rows(1), Engine(tiny_model()).forward
    for row, found in zip(rows, distributions_after(forward, rows, 20), strict=True):
        assert float(found.exp().sum()) == pytest.approx(1, abs=1e-4)
        assert float(found[7]) == pytest.approx(log_probabilities(tiny_model(), [*row, 7])[-1], abs=1e-5)


KEYS = block_keys(range(4 * BLOCK))


def test_a_key_stands_for_all_tokens_up_to_the_end_of_its_block():
    assert len(KEYS) == 4
    assert block_keys(range(4 * BLOCK + 5)) == KEYS  # a block that is not full has no key
    assert not set(KEYS) & set(block_keys([99, *range(1, 4 * BLOCK)]))
    assert block_keys(range(4 * BLOCK), KEYS[:3]) == KEYS


def noted(blocks: int) -> tuple[BlockPool, list[int]]:
    """A pool of which three blocks have content."""
    pool = BlockPool(blocks)
    taken = pool.take(3)
    for block, key in zip(taken, KEYS, strict=False):
        pool.note(block, key)
    return pool, taken


def test_equal_content_is_found_as_far_as_it_is_equal():
    pool, first = noted(9)
    assert SCRATCH not in first
    assert pool.take(6) is None, "three of eight are held"
    assert pool.find([*KEYS[:2], b"another"]) == first[:2]
    assert pool.find([b"another", KEYS[1]]) == []
    pool.release(first[:2])
    pool.release(first)
    assert pool.free == 8


def test_what_nobody_holds_stays_findable_until_its_memory_is_needed():
    pool, blocks = noted(4)
    pool.release(blocks)
    assert pool.find(KEYS[:3]) == blocks
    pool.release(blocks)
    taken = pool.take(1)
    assert taken == blocks[2:]  # the end goes before the beginning
    assert pool.find(KEYS[:3]) == blocks[:2]
    pool.note(taken[0], KEYS[0])  # a second block with the same content does not replace the first
    pool.release(taken)
    assert pool.take(1) == taken
    assert pool.find(KEYS[:1]) == blocks[:1]


@pytest.mark.parametrize("seed", range(2))
def test_random_use_loses_no_block(seed):
    draw, pool, held = random.Random(seed), BlockPool(30), []
    texts = [block_keys([draw.randrange(2) for _ in range(BLOCK * 3)]) for _ in range(12)]
    for _ in range(400):
        if held and draw.random() < 0.5:
            pool.release(held.pop(draw.randrange(len(held))))
            continue
        keys = draw.choice(texts)
        known = pool.find(keys)
        more = pool.take(len(keys) - len(known))
        held.append(known + (more or []))
        for block, key in zip(held[-1] if more is not None else [], keys, strict=more is not None):
            pool.note(block, key)
        assert len({block for each in held for block in each}) == 29 - pool.free
    for blocks in held:
        pool.release(blocks)
    assert pool.free == 29
