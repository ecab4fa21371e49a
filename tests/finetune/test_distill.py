"""Distillation: its gradient is the formula's, in every layout, and the teacher is read once."""

import json

import numpy as np
import pytest
import torch

from tests.finetune.conftest import assert_gradients, begun, figures_and_gradients, learn
from tests.finetune.test_finetune_data import documents
from zero2all.common.errors import BadInputError, UsageError
from zero2all.config import ConfigError
from zero2all.config.finetune import DistillConfig
from zero2all.exchange import export_run
from zero2all.finetune.sft import SftOptions, prepare_sft
from zero2all.infer.load import load_model, load_run
from zero2all.packed.loader import LoaderOptions, read_batch
from zero2all.track.reader import RunReader

SETTINGS = ("--train.precision", "float64", "--optim.lr_max", "1e-2", "--optim.kind", "adamw")
FOUR_STEPS = ("--train.steps", "4", "--train.tokens_per_step", "512", "--validation.every_steps", "0")


def prepared(work, chats, *overrides, teacher="tiny", valid_share=0.1):
    """The run as it was at step 15 learns from what it is at the end."""
    words = [*SETTINGS, *overrides]
    asked = SftOptions("pupil", [chats], valid_share=valid_share, teacher=teacher, step=15, overrides=words)
    return prepare_sft("tiny", work, asked)


@pytest.mark.parametrize(("k", "alpha"), [(1, 0.0), (8, 0.5), (40, 0.2)])
def test_loss_and_gradient_are_those_of_the_formula_over_the_whole_vocabulary(work, chats, k, alpha):
    words = (f"--finetune.distill.top_k={k}", f"--finetune.distill.alpha={alpha}", "--train.micro_batch_samples=3")
    run = prepared(work, chats, *words, valid_share=0.0)
    objective, state = begun(work, run)
    batch = read_batch(state.data, 0, run.report["rows"]["train"], LoaderOptions(documents=True))
    said, gradients = figures_and_gradients(run, state, batch, objective)

    teacher, kept = load_model("tiny", work).model, objective.kept["train"]
    losses, divergences, at = [], [], 0
    for ids, mask in documents(work.root / "sft/pupil", "train"):
        tokens, learned = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask[1:] > 0)
        here = slice(at, at := at + int(learned.sum()))
        with torch.no_grad():
            theirs = teacher.logits(teacher(tokens[None, :-1]))[0, learned].log_softmax(-1)
        top = torch.from_numpy(kept["ids"][here].astype(np.int64))
        q = torch.tensor(kept["logps"][here]).double().exp()
        torch.testing.assert_close(theirs.gather(1, top).exp().double(), q, rtol=1e-4, atol=1e-6)
        assert (theirs.topk(k).values[:, -1] <= theirs.gather(1, top).min(dim=1).values + 1e-4).all()
        p = state.model.logits(state.model(tokens[None, :-1]))[0, learned].log_softmax(-1)
        losses.append(-p.gather(1, tokens[1:][learned, None])[:, 0])
        inside = torch.zeros_like(p, dtype=torch.bool).scatter(1, top, True)
        p_rest, q_rest = p.masked_fill(inside, -torch.inf).logsumexp(1), 1 - q.sum(1)
        divergences.append((q * (q.log() - p.gather(1, top))).sum(1) + q_rest * (q_rest.log() - p_rest))
    assert at == len(kept["ids"])
    kl = torch.cat(divergences).mean()
    loss = alpha * torch.cat(losses).mean() + (1 - alpha) * kl
    loss.backward()
    assert said == pytest.approx({"loss/distill": loss.item(), "kl": kl.item()}, rel=1e-9)
    assert_gradients(state.model, gradients)


def test_the_teacher_is_learned_and_a_killed_run_goes_on_with_the_same_bits(work, chats, killed_run_keeps_its_bits):
    asked = ("--checkpoint.every_steps", "3", "--train.steps", "8", "--validation.every_steps", "2")
    read_at, run = set(), None

    def begin():
        nonlocal run
        run = prepared(work, chats, *asked, "--finetune.distill.alpha=0")
        read_at.update(each.stat().st_mtime_ns for each in (work.root / "sft/pupil").glob("teacher-*/train-logps.npy"))
        return run

    killed_run_keeps_its_bits(begin, [5])
    assert len(read_at) == 1, "the teacher is read once"
    for name in ("loss/distill", "kl", "eval/valid/kl"):
        values = RunReader(work.run("pupil")).series(name).value
        assert 0 < values[-1] < 0.8 * values[0], name
    [kept] = (work.root / "sft/pupil").glob("teacher-*")
    values = bytearray((kept / "train-logps.npy").read_bytes())
    values[-1] ^= 1
    (kept / "train-logps.npy").write_bytes(values)
    with pytest.raises(BadInputError, match="is missing or damaged: it has what the teacher says of each token"):
        learn(run, work)


@pytest.mark.parametrize("layout", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}], ids=str)
def test_every_layout_gives_the_losses_and_weights_of_one_process(work, chats, same_in, layout):
    names = ("loss/distill", "kl", "loss", "grad_norm", "eval/valid/kl", "eval/valid/loss/distill")
    same_in(lambda: prepared(work, chats, *FOUR_STEPS), names, layout)


def test_what_cannot_be_learned_from_is_refused_with_one_message(work, chats, tmp_path):
    with pytest.raises(UsageError, match=r"top_k is 420; expected fewer than the 420 ids there are\."):
        prepared(work, chats, "--finetune.distill.top_k=420")
    with pytest.raises(ConfigError) as error:
        prepared(work, chats, "--data.document_mask=false", "--ops.linear_cross_entropy=off")
    assert [problem.field for problem in error.value.problems] == ["data.document_mask", "ops.linear_cross_entropy"]
    theirs = tmp_path / "theirs"
    export_run(load_run(work, "tiny"), work.tokenizer, theirs)
    file, known = theirs / "model.safetensors", json.loads((theirs / "tokenizer.json").read_text())
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    with pytest.raises(BadInputError, match=r"model\.safetensors"):
        prepared(work, chats, teacher=str(theirs))
    file.write_bytes(whole)
    first, *_, last = vocab = known["model"]["vocab"]
    vocab[first], vocab[last] = vocab[last], vocab[first]
    (theirs / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(UsageError, match="The teacher theirs has another vocabulary than tiny: the same ids mean"):
        prepared(work, chats, teacher=str(theirs))
    assert not work.run("pupil").exists()


def test_a_hugging_face_folder_teaches_adapters_by_the_verb(work, chats, tmp_path, z2a):
    theirs = tmp_path / "theirs"
    export_run(load_run(work, "tiny"), work.tokenizer, theirs, tokenizer_layout="compatible")
    words = ["sft", "tiny", "--step", 15, "--teacher", theirs, "--data", chats, "--work", work.root]
    z2a.done(*words, "--lora", 4, "--finetune.distill.alpha", 0, "--train.steps", 2)
    assert load_run(work, "tiny-sft").config.finetune.distill == DistillConfig(str(theirs), alpha=0.0)
    assert RunReader(work.run("tiny-sft")).series("kl").value[-1] > 0
    assert "A teacher reads only conversations." in z2a.refused(2, *words, "--replay", 0.1)
