"""log P(continuation | prompt) against brute force, and the laws of probability."""

import itertools
import math

import pytest
import torch

from zero2all.common.errors import UsageError
from zero2all.evals import scorer
from zero2all.evals.scorer import Question, continuation_log_probabilities, score_questions
from zero2all.infer.engine import Engine
from zero2all.infer.load import untrained


def probabilities(loaded, prompt, continuations):
    logs = continuation_log_probabilities(Engine(loaded), prompt, continuations)
    return [math.exp(value) for value in logs]


def brute_force(loaded, logits, prompt, continuation):
    """The definition over all token sequences, in float64, for a bigram model and a prompt of one word of context."""
    tokenizer = loaded.tokenizer
    table = logits.double().softmax(dim=-1)
    spelled = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    for name in tokenizer.control:
        spelled.pop(name.encode())

    def begins_with(last, tail):
        if not tail:
            return 1.0
        total = sum(float(table[last, token]) for piece, token in spelled.items() if piece.startswith(tail))
        for cut in range(1, len(tail)):
            if tail[:cut] in spelled:
                token = spelled[tail[:cut]]
                total += float(table[last, token]) * begins_with(token, tail[cut:])
        return total

    before, whole = tokenizer.encode_text(prompt), tokenizer.encode_text(prompt + continuation)
    kept = len(before) - 1
    while before[:kept] != whole[:kept]:
        kept -= 1
    path = [before[kept - 1] if kept else tokenizer.begin_id, *whole[kept:]]
    numerator = math.prod(float(table[last, token]) for last, token in itertools.pairwise(path))
    return numerator / begins_with(path[0], b"".join(map(tokenizer.token_bytes, before[kept:])))


@pytest.fixture(scope="module")
def random_logits():
    return torch.randn(320, 320, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [("首都是", "北京"), ("首都", "是北京"), ("是北", "京"), (" Rome", "land"), ("是", "。")],
)
def test_probability_equals_brute_force_over_all_spellings(bigram, random_logits, monkeypatch, prompt, continuation):
    monkeypatch.setattr(scorer, "NEGLIGIBLE", 0.0)
    loaded = bigram(random_logits)
    (found,) = probabilities(loaded, prompt, [continuation])
    assert found == pytest.approx(brute_force(loaded, random_logits, prompt, continuation), rel=1e-5)


def test_a_model_certain_of_the_merged_token_is_certain_of_the_continuation(speller):
    # The model writes 首都|是北京 and has never seen 是 alone: the prompt 首都是 must not confuse it.
    assert probabilities(speller("首都", "是北京"), "首都是", ["北京"])[0] > 0.999
    engine = Engine(speller("首都", " Rome", "land"))
    ((right, wrong),) = score_questions(engine, [Question("首都", (" Rome", " Oslo"))])
    assert (right.is_greedy, set(right.ranks)) == (True, {0})
    assert not wrong.is_greedy


@pytest.mark.parametrize("prompt", ["中国的首都", "The capital of France is", "The capital of Fr"])
def test_probabilities_of_exclusive_continuations_add_up_to_at_most_one(trained, trained_workspace, prompt):
    # No character begins another, so all of them together are exclusive, and nearly all a model can go on with.
    characters = sorted({*"中国法日本英德的首都是我知道北京巴黎东伦敦柏林在答案。.,", *map(chr, range(32, 127))})
    for loaded in (trained, untrained(trained_workspace, trained.config)):
        assert 0 < sum(probabilities(loaded, prompt, characters)) <= 1 + 1e-6


def test_unlikely_way_to_spell_the_prompt_counts_where_a_continuation_takes_it(bigram, border_tokenizer, logits):
    # ` Rom` begins with a space of probability 0.0005, far below NEGLIGIBLE, and goes on with an or b, both as likely.
    space, ro, m = border_tokenizer.encode_text(" Rom")
    (an,), (b,) = border_tokenizer.encode_text("an"), border_tokenizer.encode_text("b")
    logits[:] = -40.0
    logits[:, 300] = 0.0
    logits[border_tokenizer.begin_id, space] = math.log(0.0005)
    logits[space, ro] = logits[ro, m] = logits[m, an] = logits[m, b] = 40.0
    assert probabilities(bigram(logits), " Rom", ["e", "an", "b"]) == pytest.approx([0, 0.5, 0.5], abs=1e-5)


def test_impossible_continuation_has_probability_zero_and_a_text_longer_than_the_model_is_refused(bigram, logits):
    logits[:, 300] = 1e6
    assert probabilities(bigram(logits), "首都是", ["北京"]) == [0.0]
    with pytest.raises(UsageError, match=r"together may have 64 .*Shorten"):
        probabilities(bigram(logits), "首都是", ["x" * 80])


def test_many_questions_at_once_and_what_cannot_be_scored(bigram, random_logits):
    engine = Engine(bigram(random_logits))
    questions = [Question("首都", ("Rome", " Rome and more")), Question("首都是", ("北京", "Rome"))]
    wrong = [Question("x" * 70, ("a",)), Question("首都", ()), Question("首都", ("", "a"))]
    plain, spanning, *refused = score_questions(engine, [*questions, *wrong])
    assert refused[0] == "prompt and continuation have 72 tokens; the model takes 64"
    assert refused[1:] == ["it has no continuation to score", "a continuation is empty"]
    table = random_logits.double().log_softmax(dim=-1)
    for continuation, found in zip(questions[0].continuations, plain, strict=True):
        before, after = (engine.tokenizer.encode_text(text) for text in ("首都", "首都" + continuation))
        path = itertools.pairwise(after[len(before) - 1 :])
        assert found.logprob == pytest.approx(sum(float(table[last, token]) for last, token in path), rel=1e-5)
        assert (found.spans_border, found.tokens) == (False, len(after) - len(before))
    exact = continuation_log_probabilities(engine, "首都是", ["北京", "Rome"])
    assert [found.logprob for found in spanning] == pytest.approx(exact, rel=1e-6)
    assert all(found.spans_border for found in spanning)
