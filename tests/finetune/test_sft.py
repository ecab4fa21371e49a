"""Fine-tuning is a run like any other, from a base run's weights; its loss is that of the conversations alone."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from tests.finetune.conftest import has_weights, weights_of
from tests.finetune.test_finetune_data import documents, lines, row
from zero2all.common.errors import UsageError
from zero2all.common.workspace import Workspace
from zero2all.exchange import export_run
from zero2all.finetune.sft import SftOptions, prepare_sft
from zero2all.infer.chat import choose
from zero2all.infer.load import load_run
from zero2all.packed.loader import read_batch
from zero2all.track.reader import RunReader
from zero2all.train.run import train
from zero2all.train.run_data import open_run_data

MATRICES = ("q.weight", "k.weight", "v.weight", "out.weight", "gate_up_pairs.weight", "down.weight")


def options(chats, *overrides, **changes):
    return SftOptions("talk", [chats], **changes, overrides=overrides)


def trained(prepared, work):
    return train(prepared.config, work, say=lambda _: None)


def losses_of(work):
    return RunReader(work.run("talk")).series("loss").value


def lose_the_last_checkpoint(work):
    shutil.rmtree(sorted(work.run("talk").glob("checkpoints/step-*"))[-1])
    (work.run("talk") / "last_saved.json").unlink(missing_ok=True)


def test_the_loss_of_packed_rows_is_that_of_the_conversations_alone(work, chats):
    prepared = prepare_sft("tiny", work, options(chats, "--train.precision", "float64", valid_share=0.0))
    rows, seq_len = prepared.report["rows"]["train"], prepared.config.data.seq_len
    assert rows < 50, "several conversations stand in a row"
    model = load_run(work, "tiny").model.double()
    nats = counted = 0.0
    with torch.no_grad():
        for ids, mask in documents(work.root / "sft/talk"):
            tokens = torch.from_numpy(ids.astype(np.int64))
            logits = model.logits(model(tokens[None, :-1]))[0]
            losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
            nats += float((losses * torch.from_numpy(mask[1:].astype(float))).sum())
            counted += float(mask[1:].sum())
    settings = {"steps": 2, "tokens_per_step": rows * seq_len, "micro_batch_samples": 3}
    config = dataclasses.replace(prepared.config, train=dataclasses.replace(prepared.config.train, **settings))
    train(config, work, accept_changes=True, say=lambda _: None)
    assert losses_of(work)[0] == pytest.approx(nats / counted, rel=1e-9)


def test_the_run_begins_with_the_weights_of_its_base_and_learns_only_answers(work, chats):
    prepared = prepare_sft("tiny", work, options(chats))
    begun = load_run(work, "talk")
    assert begun.step == 0
    assert has_weights(work, "talk", weights_of(work, "tiny"))
    assert prepared.config.data.document_mask
    data, _ = open_run_data(prepared.config, work, resumed=False)
    batch = read_batch(data, 0, 4)
    learned = begun.tokenizer.decode(batch.tokens[:, 1:][batch.weights > 0].tolist(), skip_control=False)
    assert set(learned.split("<|message_end|>")[0][:2]) == {"a", " "}
    assert "q" not in learned


def test_the_chat_is_learned_and_a_resumed_run_ends_with_the_same_bits(work, chats):
    asked = options(chats, "--checkpoint.every_steps", "3", epochs=4.0)
    summary = trained(prepare_sft("tiny", work, asked), work)
    assert losses_of(work)[-1] < 0.7 * losses_of(work)[0]
    again = prepare_sft("tiny", work, asked)
    assert not again.is_new
    assert trained(again, work).step == summary.step
    assert choose(load_run(work, "talk")).how == "template"
    before = weights_of(work, "talk")
    lose_the_last_checkpoint(work)
    trained(again, work)
    assert has_weights(work, "talk", before)


def test_other_data_or_settings_under_the_same_name_are_refused(work, chats):
    prepare_sft("tiny", work, options(chats))
    with pytest.raises(UsageError, match="talk already exists, and was begun with other values of: settings"):
        prepare_sft("tiny", work, options(chats, epochs=3.0))
    lines(chats, [row(n) for n in range(90)])
    report = work.root / "sft/talk/conversations.json"
    packed = report.read_bytes()
    with pytest.raises(UsageError, match="other values of: data"):
        prepare_sft("tiny", work, options(chats))
    assert report.read_bytes() == packed, "those of the run are still there"
    assert prepare_sft("tiny", work, options(chats, replace=True)).is_new


def test_a_workspace_that_was_moved_still_chats_and_goes_on(work, chats):
    prepare_sft("tiny", work, options(chats))
    moved = Workspace(work.root.rename(work.root.with_name("moved")))
    assert choose(load_run(moved, "talk")).how == "template"
    again = prepare_sft("tiny", moved, options(chats))
    assert not again.is_new
    assert again.config.data.packed == str((moved.root / "sft" / "talk").resolve())


def test_replay_mixes_in_text_of_the_base_run(work, chats):
    prepared = prepare_sft("tiny", work, options(chats, replay=0.25))
    mixture = prepared.config.data.mixture
    assert (mixture["chat"], set(mixture)) == (0.75, {"chat", "en", "zh"})
    assert sum(mixture.values()) == pytest.approx(1)
    assert trained(prepared, work).held_out_scores.keys() >= {"en", "zh"}


def test_a_hugging_face_folder_is_imported_first(work, chats, tmp_path):
    export_run(load_run(work, "tiny"), work.tokenizer, tmp_path / "theirs", tokenizer_layout="compatible")
    fresh = Workspace(tmp_path / "new")
    prepared = prepare_sft(str(tmp_path / "theirs"), fresh, options(chats))
    assert fresh.run("theirs").is_dir()
    assert prepared.config.optim.lr_max == 3e-4
    trained(prepared, fresh)
    assert choose(load_run(fresh, "talk")).how == "template"


def test_the_verb_prepares_trains_and_can_be_repeated(work, chats, z2a):
    words = ["sft", "tiny", "--data", chats, "--work", work.root, "--epochs", 1]
    said = z2a.done(*words, "--prepare")
    assert "conversations: 60 of 60 (messages 60)" in said, said
    assert f"z2a train {work.run('tiny-sft')}" in said
    z2a.refused(2, *words, "--optim.lr_max", 0.001)  # another setting
    said = z2a.done("data", "show", "--at", 0, "--config", "tiny-sft", "--work", work.root)
    assert "⟦<|begin_of_text|><|message_start|>user" in said
    assert json.loads((work.run("tiny-sft") / "finetune.json").read_text())["base"] == "tiny"


def test_adapters_begin_as_the_base_learn_the_chat_are_merged_for_use_and_resume_with_the_same_bits(work, chats):
    asked = options(chats, "--checkpoint.every_steps", "3", epochs=4.0, lora=4)
    prepared, base = prepare_sft("tiny", work, asked), weights_of(work, "tiny")
    assert has_weights(work, "talk", base), "B is zero"
    assert prepared.config.optim.kind == "adamw"
    trained(prepared, work)
    assert losses_of(work)[-1] < 0.8 * losses_of(work)[0]
    before = weights_of(work, "talk")
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in base if name.endswith(MATRICES)}
    lose_the_last_checkpoint(work)
    trained(prepare_sft("tiny", work, asked), work)
    assert has_weights(work, "talk", before)
    again = prepare_sft("talk", work, dataclasses.replace(asked, name="more", lora=None))
    assert again.config.finetune.lora.rank is None, "the merged model is what goes on"
    assert has_weights(work, "more", before)
