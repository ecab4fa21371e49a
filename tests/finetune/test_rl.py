"""Reinforcement learning: its gradient is the formula's, its answers the model's own, and a resume draws them again."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from tests.finetune.conftest import assert_gradients, begun, figures_and_gradients, learn, move
from tests.finetune.test_finetune_data import lines
from zero2all.common.errors import BadInputError, UsageError
from zero2all.config import ConfigError
from zero2all.config.finetune import PROMPTS
from zero2all.finetune.data import DataOptions, pack_conversations
from zero2all.finetune.grpo import advantages_of
from zero2all.finetune.rl import RlOptions, digits_of, is_held_out, prepare_rl, sums
from zero2all.finetune.rollouts import Answer
from zero2all.infer.job import ChosenToken, Job, Request
from zero2all.infer.load import load_run
from zero2all.tokenizer.chat import Message
from zero2all.track.reader import RunReader
from zero2all.train.saved_config import load_run_config

SMALL = ("--finetune.grpo.prompts=4", "--finetune.grpo.answers=4", "--finetune.grpo.max_new_tokens=12")
SMALL += ("--finetune.grpo.valid_prompts=4", "--optim.lr_max=1e-3", "--train.micro_batch_samples=2")
REWARD = "def score(answer, record):\n    return answer.count('a') - 0.1 * len(answer) + 0.01 * len(record['prompt'])\n"


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    return lines(tmp_path / "prompts.jsonl", [{"prompt": f"q {n} " * (1 + n % 3)} for n in range(20)])


def prepared(work, path, *overrides, steps=4):
    reward = f"--finetune.grpo.rewards={json.dumps({f'{path.parent}/mine.py:score': 1.0})}"
    words = [*SMALL, reward, *overrides]
    return prepare_rl("tiny", work, RlOptions("tries", [path], steps=steps, overrides=words, valid_share=0.2))


def formula(model, batch, config, reference=None):
    """The loss of a step, with every answer scored by itself."""
    losses = []
    for row in range(batch.real_rows):
        for number in np.unique(batch.document_ids[row]):
            at = np.flatnonzero(batch.document_ids[row] == number)
            drawn = batch.weights[row, at[0] : at[-1]] > 0
            if not drawn.any():
                continue
            ids = torch.from_numpy(batch.tokens[row, at])[None]
            wanted = torch.from_numpy(drawn)

            def logps_of(each, ids=ids, wanted=wanted):
                return each.logits(each(ids[:, :-1]))[0].log_softmax(-1).gather(1, ids[0, 1:, None])[wanted, 0]

            now, old = logps_of(model), torch.from_numpy(batch.old[row, at[0] : at[-1]][drawn])
            advantage = float(batch.advantages[row, at[0] : at[-1]][drawn][0])
            ratio = torch.exp(now - old)
            if config.loss == "cispo":
                loss = -ratio.clamp(max=config.clip_high).detach() * advantage * now
            else:
                clipped = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
                loss = -torch.minimum(ratio * advantage, clipped * advantage)
            if reference is not None:
                away = logps_of(reference).detach() - now
                loss = loss + config.kl_weight * ratio * (torch.exp(away) - away - 1)
            losses.append(loss)
    assert len(set(map(len, losses))) > 1, "else all means coincide"
    if config.loss == "grpo":
        return torch.stack([each.mean() for each in losses]).mean()
    divisor = len(losses) * config.max_new_tokens if config.loss == "dr_grpo" else sum(map(len, losses))
    return torch.cat(losses).sum() / divisor


LOSSES = [{}, {"loss": "grpo"}, {"loss": "dr_grpo"}, {"loss": "cispo", "clip_high": 1.05}, {"kl_weight": 0.3}]


@pytest.mark.parametrize("asked", LOSSES, ids=str)
def test_loss_and_gradient_are_those_of_the_formula_with_every_answer_scored_alone(work, prompts, asked):
    words = [f"--finetune.grpo.{name}={value}" for name, value in asked.items()]
    run = prepared(work, prompts, "--train.precision=float64", *words)
    objective, state = begun(work, run)
    batch = objective.step_batch(state)
    assert batch.global_rows < 16, "several answers stand in a row"
    move(state.model)
    said, gradients = figures_and_gradients(run, state, batch, objective)
    reference = load_run(work, "tries", 0).model.double() if asked.get("kl_weight") else None
    loss = formula(state.model, batch, run.config.finetune.grpo, reference)
    loss.backward()
    assert said["loss/grpo"] == pytest.approx(loss.item(), rel=1e-9)
    assert said["policy/sampler_gap"] > 0.01
    assert ("policy/kl" in said) == bool(asked.get("kl_weight"))
    assert_gradients(state.model, gradients)


def test_an_answer_that_cannot_be_judged_counts_neither_in_the_mean_nor_in_the_loss():
    assert advantages_of([1.0, None, 3.0], "dr_grpo") == [-1.0, None, 1.0]
    assert advantages_of([None, None], "dapo") == [None, None]
    assert advantages_of([2.0, 2.0], "dapo") == [0.0, 0.0]
    found = advantages_of([0.0, 1.0, 1.0, 1.0], "dapo")
    assert found[:2] == pytest.approx([-0.75 / (0.5 + 1e-4), 0.25 / (0.5 + 1e-4)])


@pytest.mark.parametrize("words", [(), ("--finetune.lora.rank=4",)], ids=["all weights", "adapters"])
def test_a_run_learns_what_is_rewarded_and_draws_from_the_weights_it_has(work, prompts, words):
    run = prepared(work, prompts, *words, "--optim.lr_max=1e-2", steps=12)
    learn(run, work)
    reader = RunReader(work.run("tries"))
    rewards = reader.series("rollout/reward").value
    assert rewards[-3:].mean() > rewards[:3].mean() + 0.2
    assert reader.series("policy/sampler_gap").value.max() < 1e-5, "the sampler has the weights of the step"
    for name in ("greedy", "pass@1", "pass@4", "reward", "entropy", "kl"):
        assert np.isfinite(reader.series(f"eval/valid/{name}").value).all(), name
    assert reader.series("eval/valid/kl").value[-1] > 1e-3
    assert reader.series("rollout/groups_without_advantage").value.max() <= 1


def test_a_killed_run_draws_the_same_answers_and_ends_with_the_same_bits(work, prompts, killed_run_keeps_its_bits):
    words = ("--checkpoint.every_steps=3", "--validation.every_steps=0")
    killed_run_keeps_its_bits(lambda: prepared(work, prompts, *words, steps=8), [1, 5])


def test_two_processes_draw_and_learn_what_one_does(work, prompts, same_in):
    names = ("rollout/reward", "rollout/length", "loss/grpo", "loss", "grad_norm", "eval/valid/reward")
    same_in(lambda: prepared(work, prompts, "--train.precision=float64", steps=3), names, {"zero": 2})


def test_a_reward_that_judges_nothing_ends_the_run_with_its_reason_and_the_run_continues(work, prompts):
    run = prepared(work, prompts)
    (prompts.parent / "mine.py").write_text("def score(answer, record):\n    raise KeyError('gold')\n")
    with pytest.raises(BadInputError, match=r"None of the 16 answers of step 0 could be judged \(.*KeyError: 'gold'"):
        learn(run, work)
    (prompts.parent / "mine.py").write_text(REWARD)
    assert learn(run, work).step == 4


def turn(sampler, answer, text, end=True):
    """What the engine gives for a turn that says `text`."""
    ids = sampler.tokenizer.encode_text(text)
    job = Job(Request(answer.ids, 99), 1, list(answer.ids), [], [], new_ids=ids)
    job.choices = [ChosenToken(number, -0.5) for number in ids]
    job.ending = ChosenToken(sampler.template.end_ids[0], -0.25) if end else None
    return sampler._goes_on(answer, job)


def test_results_of_calls_are_appended_in_ids_and_never_learned(work, prompts):
    run = prepared(work, prompts, "--finetune.grpo.tools=[calculator]")
    sampler = begun(work, run)[0].sampler
    prompt = sampler.tokenizer.encode_text("q")
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*12"}}</tool_call>'
    answer = Answer(0, list(prompt), [])
    sampler.config = dataclasses.replace(sampler.config, max_new_tokens=10_000)
    sampler.engine.max_len = 10_000
    assert turn(sampler, answer, call)
    expected = sampler.template.encode_after([Message("tool", "144")])
    assert answer.ids == [*prompt, *sampler.tokenizer.encode_text(call), *expected]
    assert [logp is None for logp in answer.logps[-len(expected) :]] == [False] + [True] * (len(expected) - 1)
    assert not turn(sampler, answer, "It is 144.")
    assert (answer.text, answer.calls, answer.ended, len(answer.texts)) == ("It is 144.", 1, True, 2)
    assert len(answer.ids) == len(prompt) + len(answer.logps)
    cut = Answer(0, list(prompt), [])
    assert not turn(sampler, cut, call, end=False)
    assert not cut.ended
    sampler.config = dataclasses.replace(sampler.config, max_turns=1)
    assert not turn(sampler, Answer(0, list(prompt), []), call)


def test_rows_with_a_prompt_become_prompts_and_the_rest_is_named(trained_workspace, tmp_path):
    user = {"role": "user", "content": "q 3"}
    rows = [
        {"question": "q 1", "answer": "a #### 1", "level": 2},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q 2"}], "ground_truth": "2"},
        {"messages": [user, {"role": "assistant", "content": "3"}]},
        {"conversations": [{"from": "human", "value": "q 4"}, {"from": "gpt", "value": ""}], "gt": ["4"]},
        {"prompt": "q 5"},
        {"text": "q 6"},
        {"prompt": "q 7 " * 60, "answer": "7"},
        {"prompt": [{"role": "assistant", "content": "8"}], "answer": "8"},
        {"prompt": [{"role": "system", "content": "9"}], "answer": "9"},
        {"question": "q 1", "answer": "1"},
    ]
    options, path = DataOptions(64, 0.0, PROMPTS, 16, ["answer"]), lines(tmp_path / "p.jsonl", rows)
    report = pack_conversations([path], trained_workspace.tokenizer, tmp_path / "out", options)
    assert report["left_out"] == {"no_prompt": 3, "no_answer": 1, "too_long": 1, "duplicate": 1}
    records = [json.loads(line) for line in (tmp_path / "out/records.train.jsonl").read_text().splitlines()]
    assert [each["answer"] for each in records] == ["a #### 1", "2", "3", ["4"]]
    assert [each["prompt"] for each in records] == ["q 1", "q 2", "q 3", "q 4"]
    assert records[0]["level"] == 2
    assert report["learned_tokens"]["train"] == 0


def test_sums_have_the_digits_that_were_asked_for_and_held_out_pairs_stay_apart():
    for held_out in (False, True):
        for row in sums(2, 3, 200, held_out=held_out):
            one, other = map(int, row["prompt"].removesuffix("=").split("+"))
            assert int(row["answer"]) == one + other
            assert {len(str(one)), len(str(other))} <= {2, 3}
            assert is_held_out(one, other) == is_held_out(other, one) == held_out
    assert (digits_of("3"), digits_of("2-4")) == ((3, 3), (2, 4))
    for text in ("0", "4-2", "x", "1-99"):
        with pytest.raises(UsageError, match="expected digits such as 3, or 2-4"):
            digits_of(text)


def test_the_verb_prepares_what_was_asked_and_refuses_what_cannot_be(work, z2a):
    words = ["rl", "tiny", "--work", work.root, "--prepare"]
    assert "--arithmetic DIGITS" in z2a.refused(2, *words)
    words += ["--arithmetic", 2]
    out = z2a.done(*words, "--max-new-tokens", 12)
    assert "prompts: 3,166 of 4,096 (prompt 4,096)" in out
    assert "z2a data show" not in out
    asked = ["--name", "more", "--seq-len", 128, "--max-new-tokens", 16, "--reward", "number=2", "calls=-0.1"]
    z2a.done(*words, *asked, "--answers", 3)
    grpo = load_run_config(work.run("more")).finetune.grpo
    assert (grpo.rewards, grpo.answers, grpo.max_new_tokens) == ({"number": 2.0, "calls": -0.1}, 3, 16)
    assert "'much' is no number" in z2a.refused(2, *words, "--reward", "number=much")
    said = z2a.refused(2, *words, "--tools", "oracle", "--max-new-tokens", 12, "--name", "x")
    assert "there is no 'oracle'. Expected: calculator" in said


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2", "context=2", "zero=3"])
def test_layouts_without_a_whole_model_in_each_process_are_refused(work, prompts, layout):
    with pytest.raises(ConfigError, match=r"finetune\.method grpo"):
        prepared(work, prompts, f"--parallel.{layout}")
