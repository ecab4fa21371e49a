"""What clients of OpenAI's own library get: texts, streams, choices, log probabilities, usage."""

import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from zero2all.cli.main import build_parser
from zero2all.evals.scorer import Question, score_questions
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.job import ChosenToken, Request
from zero2all.infer.load import LoadedModel
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import Piece, TextJob, TextRequest, stream
from zero2all.serve.answers import CompletionAnswer
from zero2all.serve.wire import Call

from .conftest import ROWS

PROMPT = "The capital of France"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}
CHAT_SAMPLING = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
CHAT_SAMPLING |= {"max_tokens": 512}
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(prompt=prompt, **{**GREEDY, **fields})


def chat(client: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> Any:
    return client.chat.completions.create(messages=messages, **{**GREEDY, **fields})


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> str:
    """The greedy text after PROMPT."""
    return str(complete(client).choices[0].text)


def test_the_text_is_what_the_engine_writes_and_a_prompt_may_be_text_or_ids_one_or_several(client, loaded, greedy):
    assert greedy == "".join(piece.text for piece in stream(Engine(loaded), TextRequest(PROMPT, 24)))
    assert len(greedy) > 5
    ids = [loaded.tokenizer.begin_id, *loaded.tokenizer.encode_text(PROMPT)]
    several = complete(client, [ids, ids[:4]]).choices
    assert [choice.index for choice in several] == [0, 1]
    assert several[0].text == complete(client, ids).choices[0].text
    texts = [choice.text for choice in complete(client, [PROMPT, "Hello"]).choices]
    assert texts == [greedy, complete(client, "Hello").choices[0].text]


def test_usage_counts_a_prompt_once_and_every_token_written(client, loaded: LoadedModel):
    one, two = complete(client).usage, complete(client, n=2).usage
    assert one.prompt_tokens == 1 + len(loaded.tokenizer.encode_text(PROMPT))
    assert (one.completion_tokens, one.total_tokens) == (24, one.prompt_tokens + 24)
    assert (two.prompt_tokens, two.completion_tokens) == (one.prompt_tokens, 48)
    long = "Hello, world! " * 20
    complete(client, long)
    assert complete(client, long + "Paris").usage.prompt_tokens_details.cached_tokens >= 16, "it was read before"


def test_stop_strings_end_the_text_before_them_and_echo_puts_the_prompt_before_it(client, greedy):
    stop = greedy[6:8]
    choice = complete(client, stop=["nowhere", stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (greedy[: greedy.index(stop)], "stop")
    assert complete(client, echo=True).choices[0].text == PROMPT + greedy
    assert "".join(chunk.choices[0].text for chunk in complete(client, echo=True, stream=True)) == PROMPT + greedy


def test_choices_differ_by_their_seed_and_a_seed_repeats_them(client):
    def texts(**fields: Any) -> list[str]:
        return [choice.text for choice in complete(client, temperature=1, n=3, **fields).choices]

    first = texts(seed=5)
    assert len(set(first)) == 3
    assert texts(seed=5) == first
    assert texts() != texts()  # without a seed, another answer each time
    assert complete(client, temperature=1, seed=5).choices[0].text == first[0]


def test_other_samplings_than_openais_can_be_asked_for(client, greedy):
    assert complete(client, temperature=1, extra_body={"top_k": 1}).choices[0].text == greedy
    assert complete(client, temperature=1, extra_body={"min_p": 1.0}).choices[0].text == greedy
    assert complete(client, temperature=1, top_p=1e-6).choices[0].text == greedy
    assert complete(client, extra_body={"repetition_penalty": 5.0}).choices[0].text != greedy


def test_bias_and_penalties_change_their_own_answers_only(client, loaded: LoadedModel, greedy):
    (often,) = loaded.tokenizer.ids_of_bytes(b"a")
    (choice,) = complete(client, logit_bias={str(often): 100}).choices
    assert choice.text == "a" * 24
    (choice,) = complete(client, logit_bias={str(often): 100}, frequency_penalty=2.0, max_tokens=200).choices
    assert 24 < choice.text.count("a") < 200, "each time that it is written, it becomes less likely"
    engine, sampling = Engine(loaded), Sampling(frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((7, 3.0),))
    job, logits = engine.submit(Request([1], 5, sampling)), torch.zeros(ROWS)
    engine._counts[job.number] = torch.zeros(ROWS).index_fill(0, torch.tensor([5]), 2.0)
    engine._adjust(logits, job)
    assert {place: logits[place].item() for place in logits.nonzero().flatten().tolist()} == {5: -1.25, 7: 3.0}
    both = complete(client, [PROMPT, PROMPT], temperature=1, seed=5).choices[1].text
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(complete, client, temperature=1, seed=8, frequency_penalty=1.5, max_tokens=60)
        assert pool.submit(complete, client, temperature=1, seed=5).result().choices[0].text == both
    assert len(other.result().choices[0].text) > 0


def test_a_chat_is_answered_by_the_assistant(client):
    answer = chat(client)
    assert (answer.object, answer.choices[0].message.role) == ("chat.completion", "assistant")
    assert answer.choices[0].message.content
    parts = [{"role": each["role"], "content": [{"type": "text", "text": each["content"]}]} for each in HELLO]
    again = client.chat.completions.create(model="tiny", temperature=0, max_completion_tokens=24, messages=parts)
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_an_answer_that_was_begun_is_continued(client):
    begun = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The capital"}]
    answer = chat(client, begun, extra_body={"continue_final_message": True, "frame": "plain"})
    assert answer.choices[0].message.content == complete(client, "HelloThe capital").choices[0].text


def test_turns_that_do_not_fit_are_left_out_and_counted_where_asked_and_refused_otherwise(client):
    long = [{"role": role, "content": "x" * 1500} for role in ("user", "assistant")] * 3
    messages, auto = [HELLO[0], *long, HELLO[-1]], {"truncation": "auto"}
    with pytest.raises(openai.BadRequestError, match="Shorten the prompt"):
        chat(client, messages)
    answer, kept = chat(client, messages, extra_body=auto), chat(client, [HELLO[0], *long[4:], HELLO[-1]])
    assert answer.model_dump()["dropped_messages"] == 4
    assert answer.choices[0].message.content == kept.choices[0].message.content
    assert answer.usage.prompt_tokens == kept.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="Shorten the message") as refusal:
        chat(client, [{"role": "user", "content": "x" * 5000}], extra_body=auto)
    assert refusal.value.code == "context_length_exceeded"


def test_a_stream_gives_the_same_texts(client):
    fields = {"n": 3, "temperature": 1, "seed": 9, "stop": "e"}
    whole, chunks = complete(client, **fields), list(complete(client, **fields, stream=True))
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_of_a_chat_gives_the_same_message(client):
    whole = chat(client, logprobs=True, top_logprobs=2)
    chunks = list(chat(client, logprobs=True, top_logprobs=2, stream=True))
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.delta.content for part in parts) == whole.choices[0].message.content
    assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    entries = [entry for part in parts for entry in part.logprobs.content]
    assert [entry.bytes for entry in entries] == [entry.bytes for entry in whole.choices[0].logprobs.content]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_stream_ends_with_its_usage_or_every_chunk_says_what_was_used_so_far_where_asked(client):
    usual = complete(client).usage
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (usual.prompt_tokens, usual.completion_tokens)
    assert all(chunk.usage is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(client, n=2, stream=True, stream_options=options)
    assert len(chunks) > 1, "what is streamed is not gathered first"
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens} == {usual.prompt_tokens}
    written = [chunk.usage.completion_tokens for chunk in chunks]
    assert written == sorted(written)
    assert written[-1] == last.usage.completion_tokens == 48
    assert chunks[-1].usage.total_tokens == last.usage.total_tokens


def test_log_probabilities_in_the_form_of_completions(client, greedy):
    choice = complete(client, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 24
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert all(1 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert choice.text == greedy
    whole = [not token.startswith("bytes:") for token in logprobs.tokens]
    after_whole = [place for place in range(1, 24) if whole[place - 1] and whole[place]]
    assert after_whole
    for place in after_whole:
        assert greedy[logprobs.text_offset[place] :].startswith(logprobs.tokens[place])
    assert complete(client, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_echo_with_logprobs_scores_prompts_as_our_evals_do(client, loaded: LoadedModel):
    prompt, continuation = "The capital of France is", " Paris. 中国"
    before, whole = (loaded.tokenizer.encode_text(text) for text in (prompt, prompt + continuation))
    assert whole[: len(before)] == before, "no token spans the border"
    ((scored,),) = score_questions(Engine(loaded), [Question(prompt, (continuation,))])
    ids = [loaded.tokenizer.begin_id, *whole]
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0}
    by_ids, short = complete(client, [ids, ids[:3]], **fields).choices
    (by_text,) = complete(client, prompt + continuation, **fields).choices
    for choice in (by_ids, by_text):
        found = choice.logprobs
        assert (choice.text, choice.finish_reason) == (prompt + continuation, "length")
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(ids)
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert sum(found.token_logprobs[1 + len(before) :]) == pytest.approx(scored.logprob, abs=1e-4)
        assert found.text_offset[:2] == [0, 0]
        assert found.text_offset[1 + len(before)] == len(prompt)
    assert len(short.logprobs.tokens) == 3


def test_lm_eval_reads_what_it_needs_from_echo_with_logprobs(client, loaded: LoadedModel):
    """Its client drops one written token, and takes a continuation for greedy where each is the likeliest."""
    prompt = [loaded.tokenizer.begin_id, *loaded.tokenizer.encode_text(PROMPT)]
    (job,) = Engine(loaded).run([Request(prompt, 8)])
    likely = [*prompt, *job.new_ids]
    (scores,) = Engine(loaded).score([likely], [len(prompt)])
    (choice,) = complete(client, [likely], echo=True, logprobs=1, max_tokens=1).choices
    found = choice.logprobs
    assert len(found.token_logprobs) == len(likely) + 1
    assert choice.text.startswith(loaded.tokenizer.decode(likely))
    pairs = zip(found.token_logprobs[len(prompt) : -1], found.top_logprobs[len(prompt) : -1], strict=True)
    assert [own == max(top.values()) for own, top in pairs] == [rank == 0 for rank in scores.ranks]
    assert 0 in scores.ranks
    end = loaded.tokenizer.end_id
    (choice,) = complete(
        client, [likely[:4]], echo=True, logprobs=0, extra_body={"logit_bias": {str(end): 100}}
    ).choices
    assert (len(choice.logprobs.tokens), choice.finish_reason) == (5, "stop"), "the end is a written token too"
    chunks = list(complete(client, [likely], echo=True, logprobs=1, stream=True, max_tokens=4))
    assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks) == len(likely) + 4


def test_offsets_count_characters_that_broken_bytes_become(loaded: LoadedModel):
    spelled = b"a\xe4b\xe4\xb8\xad\xe4\xe4c\xef\xbf\xbdd"
    tokens = [loaded.tokenizer.ids_of_bytes(bytes([byte]))[0] for byte in spelled]
    answer = CompletionAnswer(Call("tiny", [TextRequest("x", logprobs=0)], 1), "tiny", loaded.tokenizer)
    text = spelled.decode("utf-8", "replace")
    piece = Piece(text, tuple(tokens), tuple(ChosenToken(token, 0.0) for token in tokens))
    assert text == "a\ufffdb中\ufffd\ufffdc\ufffdd"
    assert answer.choice(0, piece)["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 7, 7, 8]


def test_log_probabilities_in_the_form_of_chats(client):
    choice = chat(client, logprobs=True, top_logprobs=20).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 24
    assert len(entries[0].top_logprobs) == 20
    assert bytes(byte for entry in entries for byte in entry.bytes).decode("utf-8", "replace").strip()
    for entry in entries:
        assert sum(math.exp(each.logprob) for each in entry.top_logprobs) <= 1 + 1e-4
        assert entry.top_logprobs[0].logprob == max(each.logprob for each in entry.top_logprobs)
    assert chat(client).choices[0].logprobs is None


def test_the_model_is_listed_with_its_facts_and_the_sampling_of_the_terminal(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    facts = {"parameters": 29_792, "step": 7, "tokens": 1000, "max_len": 4096, "sampling": CHAT_SAMPLING}
    facts |= {"chat": "plain", "tools": [], "dtype": "float32", "device": "cpu"}
    assert client.models.retrieve("tiny").model_dump()["z2a"] == facts
    typed = vars(build_parser().parse_args(["chat"]))
    assert {name: typed[name.replace("max_tokens", "max_new_tokens")] for name in CHAT_SAMPLING} == CHAT_SAMPLING


def test_embeddings_are_means_of_the_last_hidden_states_in_any_form_and_batch(client, served, loaded):
    texts = [PROMPT, "Hello", "中国的首都是", "x" * 700, "Hello"] * 5  # more than the engine takes at once
    found = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    plain = client.embeddings.create(model="tiny", input=texts[:3], encoding_format="float")
    rows = [[loaded.tokenizer.begin_id, *loaded.tokenizer.encode_text(text)] for text in texts]
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (sum(map(len, rows)),) * 2
    assert [each.index for each in found.data] == list(range(len(texts)))
    for row, each in zip(rows, found.data, strict=True):
        with torch.no_grad():
            mean = loaded.model(torch.tensor([row]))[0].mean(dim=0)
        assert each.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)
    assert [each.embedding for each in plain.data] == [pytest.approx(each.embedding) for each in found.data[:3]]
    assert client.embeddings.create(model="tiny", input=rows[2]).data[0].embedding == pytest.approx(
        found.data[2].embedding, abs=1e-6
    )
    assert served.model.stats()["cache"]["free"] == served.model.stats()["cache"]["blocks"]


def test_an_embedding_that_gave_its_memory_to_an_older_text_is_computed_again(loaded: LoadedModel):
    engine = Engine(loaded, EngineSettings(max_len=64, cache_bytes=6 * 16 * 2 * 16 * 4, prefill_tokens=2))
    writer = engine.submit(Request([5] * 15, 40))
    while not writer.new_ids:
        engine.step()
    row = [1 + number % 250 for number in range(48)]
    job, done = engine.submit(Request(row, 0, pools=True)), []
    while job.finish is None:
        engine.step()
        done.append(job.done)
    assert done != sorted(done), "it was not sent back"
    with torch.no_grad():
        mean = loaded.model(torch.tensor([row]))[0].mean(dim=0)
    assert job.pooled.tolist() == pytest.approx(mean.tolist(), abs=1e-5)


def test_a_text_that_was_half_read_has_no_embedding(loaded: LoadedModel):
    engine = Engine(loaded, EngineSettings(prefill_tokens=2))
    job = TextJob(engine, TextRequest([5] * 20, 0, pools=True))
    engine.step()
    engine.cancel(job.job)
    piece = job.read()
    assert piece is not None
    assert (job.job.pooled is None, piece.finish, piece.pooled) == (False, "cancelled", None)


def test_best_of_answers_with_the_texts_of_the_largest_mean_log_probability(client, loaded):
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 6}
    for prompt in (PROMPT, [PROMPT, "Hello"]):
        drawn = complete(client, prompt, n=6, logprobs=0, **asked).choices
        means = [statistics.fmean(choice.logprobs.token_logprobs) for choice in drawn]
        best = complete(client, prompt, n=2, best_of=6, echo=True, **asked)
        wanted = [
            drawn[index].text
            for first in range(0, len(drawn), 6)
            for index in sorted(range(first, first + 6), key=lambda index: -means[index])[:2]
        ]
        prompts = [prompt] if isinstance(prompt, str) else prompt
        assert [choice.text for choice in best.choices] == [
            prompts[place // 2] + text for place, text in enumerate(wanted)
        ]
        assert [choice.index for choice in best.choices] == list(range(len(wanted)))
        assert best.choices[0].logprobs is None
        assert best.usage.completion_tokens == 6 * len(drawn), "what was drawn and not kept counts"
    with_logprobs = complete(client, n=1, best_of=6, logprobs=1, **asked).choices[0].logprobs
    assert statistics.fmean(with_logprobs.token_logprobs) == pytest.approx(max(means[:6]), abs=1e-5)
    assert len(complete(client, best_of=1, stream=False, **asked).choices) == 1
