"""Preference tuning: its gradient is the formula's, in every layout, and what it needs is computed once."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.finetune.conftest import assert_gradients, begun, figures_and_gradients, learn, move
from tests.finetune.test_finetune_data import documents, left_out, lines
from zero2all.common.errors import BadInputError, UsageError
from zero2all.config.finetune import PAIRS
from zero2all.finetune.data import DataOptions, pack_conversations
from zero2all.finetune.dpo import prepare_dpo
from zero2all.finetune.sft import SftOptions
from zero2all.infer.load import load_run
from zero2all.packed.loader import LoaderOptions, read_batch
from zero2all.tokenizer import load_tokenizer
from zero2all.track.reader import RunReader
from zero2all.train.saved_config import load_run_config

FOUR_ROWS = ("--train.steps", "4", "--train.tokens_per_step", "512", "--validation.every_steps", "0")
SETTINGS = ("--train.precision", "float64", "--optim.lr_max", "1e-3", "--optim.kind", "adamw")


def pair(number):
    return {"prompt": f"q {number}", "chosen": f"a {number} yes", "rejected": f"no {number} " * (1 + number % 3)}


@pytest.fixture
def pairs(tmp_path):
    return lines(tmp_path / "pairs.jsonl", map(pair, range(40)))


def prepared(work, path, *overrides, **changes):
    return prepare_dpo("tiny", work, SftOptions("pref", [path], 1.0, overrides=[*SETTINGS, *overrides], **changes))


def logps_alone(model, found):
    """The log-probability of every answer, scored by itself, (pairs, 2), and the loss of a chosen token."""
    sums, chosen = [], []
    for number, (ids, mask) in enumerate(found):
        tokens = torch.from_numpy(ids.astype(np.int64))
        logits = model.logits(model(tokens[None, :-1]))[0]
        losses = F.cross_entropy(logits, tokens[1:], reduction="none")[torch.from_numpy(mask[1:] > 0)]
        sums.append(-losses.sum())
        chosen += [losses] if number % 2 == 0 else []
    return torch.stack(sums).view(-1, 2), torch.cat(chosen).mean()


ALL_OF_IT = {"beta": 2.0, "normalise": True, "label_smoothing": 0.1, "sft_weight": 0.3}


@pytest.mark.parametrize("asked", [{}, {"beta": 0.5, "label_smoothing": 0.2}, {"normalise": True}, ALL_OF_IT], ids=str)
def test_loss_and_gradient_are_those_of_the_formula_with_every_answer_scored_alone(work, pairs, asked):
    words = [f"--finetune.dpo.{name}={value}" for name, value in asked.items()]
    run = prepared(work, pairs, *words, "--train.micro_batch_samples", "3", valid_share=0.0)
    objective, state = begun(work, run)
    found = documents(work.root / "dpo/pref", source="pairs")
    with torch.no_grad():
        reference, _ = logps_alone(state.model, found)
        torch.testing.assert_close(objective.reference["train"], reference, rtol=1e-12, atol=1e-12)
    move(state.model)
    rows = run.report["rows"]["train"]
    assert rows < 30, "several pairs stand in a row"
    batch = read_batch(state.data, 0, rows, LoaderOptions(documents=True))
    said, gradients = figures_and_gradients(run, state, batch, objective)

    policy, sft_loss = logps_alone(state.model, found)
    beta = asked.get("beta", 5.0 if asked.get("normalise") else 0.1)
    lengths = torch.tensor([float(mask[1:].sum()) for _, mask in found]).double().view(-1, 2)
    h = (policy - reference) / (lengths if asked.get("normalise") else 1)
    margin, e = beta * (h[:, 0] - h[:, 1]), asked.get("label_smoothing", 0.0)
    loss = (-(1 - e) * torch.log(torch.sigmoid(margin)) - e * torch.log(torch.sigmoid(-margin))).mean()
    (loss + asked.get("sft_weight", 0.0) * sft_loss).backward()
    expected = {"loss/dpo": loss, "rewards/margins": margin, "rewards/accuracies": (margin > 0).double()}
    for column, name in enumerate(("chosen", "rejected")):
        each = {"rewards": beta * h, "logps": policy, "lengths": lengths}
        expected |= {f"{kind}/{name}": values[:, column] for kind, values in each.items()}
    assert said == pytest.approx({name: values.mean().item() for name, values in expected.items()}, rel=1e-10)
    assert_gradients(state.model, gradients)


def test_a_run_prefers_what_was_chosen_and_keeps_its_bits_where_it_was_killed(work, pairs, killed_run_keeps_its_bits):
    words = ("--checkpoint.every_steps", "3", "--train.steps", "8", "--optim.lr_max", "3e-4")
    killed_run_keeps_its_bits(lambda: prepared(work, pairs, *words, valid_share=0.2), [5])
    reader = RunReader(work.run("pref"))
    first, last = (reader.series("loss/dpo").value[at] for at in (0, -1))
    assert first == pytest.approx(np.log(2), abs=1e-12), "the policy is the reference"
    assert last < 0.6
    held_out = reader.series("eval/valid/rewards/margins").value
    assert held_out[-1] > held_out[0] > 0
    assert reader.series("eval/valid/rewards/accuracies").value[-1] == 1.0
    [kept] = (work.root / "dpo/pref").glob("reference-*/train.f64")
    assert kept.stat().st_size == 16 * len(documents(work.root / "dpo/pref", source="pairs")) // 2


@pytest.mark.parametrize("layout", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_every_layout_gives_the_losses_and_weights_of_one_process(work, pairs, same_in, layout):
    names = ("loss/dpo", "rewards/margins", "loss", "grad_norm", "eval/valid/loss/dpo", "eval/valid/logps/chosen")
    same_in(lambda: prepared(work, pairs, *FOUR_ROWS, valid_share=0.1), names, layout)


def test_a_lost_reference_and_new_weights_are_refused(work, pairs):
    run = prepared(work, pairs, "--train.steps", "2")
    learn(run, work)
    with pytest.raises(UsageError, match="--fresh would draw new weights"):
        learn(run, work, fresh=True)
    [folder] = (work.root / "dpo/pref").glob("reference-*")
    values = bytearray((folder / "train.f64").read_bytes())
    values[3] ^= 1
    (folder / "train.f64").write_bytes(values)
    with pytest.raises(BadInputError, match="is missing or damaged: it has what the base gives"):
        learn(run, work)


def test_the_verb_prepares_a_run_with_what_was_asked(work, pairs, z2a):
    words = ["dpo", "tiny", "--data", pairs, "--work", work.root, "--normalise", "--sft-weight", 0.1]
    assert "pairs: 40 of 40 (prompt 40)" in z2a.done(*words, "--prepare")
    config = load_run_config(work.run("tiny-dpo"))
    assert (config.finetune.dpo.strength, config.finetune.dpo.sft_weight) == (5.0, 0.1)
    assert (config.optim.lr_max, config.data.seq_len) == (1e-6, 2 * load_run(work, "tiny").config.data.seq_len)
    assert json.loads((work.run("tiny-dpo") / "finetune.json").read_text())["base"] == "tiny"


def messages(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def human(*texts):
    return [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]


FORMS = {
    "texts": {"prompt": "q 1", "chosen": "yes", "rejected": "no"},
    "messages": {"prompt": messages("q 1"), "chosen": messages("", "yes")[1:], "rejected": messages("", "no")[1:]},
    "whole": {"chosen": messages("q 1", "yes"), "rejected": messages("q 1", "no")},
    "both": {"prompt": "q 1", "chosen": messages("q 1", "yes"), "rejected": messages("q 1", "no")},
    "sharegpt": {"conversations": human("q 1"), "chosen": human("", "yes")[1], "rejected": human("", "no")[1]},
    "orca": {"question": "q 1", "chosen": "yes", "rejected": "no"},
}


@pytest.fixture
def packed(trained_workspace, tmp_path):
    """A function that packs pairs; returns the report and the documents."""

    def pack(rows, seq_len=64, valid_share=0.0, tokenizer=trained_workspace.tokenizer):
        path, folder = lines(tmp_path / "pairs.jsonl", rows), tmp_path / "out"
        report = pack_conversations([path], tokenizer, folder, DataOptions(seq_len, valid_share, PAIRS))
        return report, documents(folder, source="pairs")

    return pack


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pair_of_which_only_the_answers_count(packed, trained_workspace, form):
    report, found = packed([FORMS[form]])
    assert (report["read"], report["kept"]) == (1, 1)
    tokenizer = load_tokenizer(trained_workspace.tokenizer)
    said = [tokenizer.decode(ids[mask > 0].tolist(), skip_control=False) for ids, mask in found]
    assert said == ["yes<|message_end|>", "no<|message_end|>"]
    (prompt,) = {tokenizer.decode(ids[mask == 0].tolist()) for ids, mask in found}
    assert "q 1" in prompt


def test_earlier_answers_and_a_common_beginning_belong_to_the_prompt(packed, trained_workspace):
    row = {"chosen": messages("q", "a", "r", "yes"), "rejected": messages("q", "a", "r", "no"), "system": "be kind"}
    tokenizer, (_, found) = load_tokenizer(trained_workspace.tokenizer), packed([row], seq_len=128)
    said = [tokenizer.decode(ids[mask > 0].tolist()) for ids, mask in found]
    assert said == ["yes", "no"]


def test_bad_pairs_are_counted_named_and_the_rest_goes_on(packed, tmp_path):
    bad = {
        "equal_answers": {"prompt": "q", "chosen": "a", "rejected": "a"},
        "empty_answer": {"prompt": "q", "chosen": "a", "rejected": " "},
        "too_long": {"prompt": "q", "chosen": "a", "rejected": "b " * 40},
        "no_assistant_turn": {"chosen": messages("q", "a"), "rejected": messages("other", "a")},
        "no_pair": {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        "unknown_role": {"prompt": [{"role": "chef", "content": "q"}], "chosen": "a", "rejected": "b"},
        "not_text": {"prompt": "q", "chosen": None, "rejected": "b"},
        "duplicate": pair(1),
    }
    report, _ = packed([pair(1), *bad.values(), pair(2)])
    assert report["left_out"] == dict.fromkeys(bad, 1)
    assert (report["read"], report["kept"]) == (len(bad) + 2, 2)
    named = {each["reason"]: (each["file"], each["place"][:4]) for each in left_out(tmp_path / "out")}
    assert named == dict.fromkeys(bad, ("pairs.jsonl", "byte"))


def test_a_template_that_drops_the_prompt_is_named_and_what_is_held_out_follows_the_prompt(packed, work, tmp_path):
    rows = [{**pair(n % 20), "chosen": f"a {n}"} for n in range(100)]
    _, found = packed(rows, 128, 0.3)
    held_out = documents(tmp_path / "out", "valid", "pairs")
    prompts = [{bytes(ids[mask == 0]) for ids, mask in split} for split in (found, held_out)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == 20
    (work.tokenizer / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(BadInputError, match="template 100"):
        packed(rows, 128, 0.3, work.tokenizer)
    first = left_out(tmp_path / "out")[0]
    assert (first["place"], first["detail"]) == ("byte 0", "The template leaves out what message 1 says.")
