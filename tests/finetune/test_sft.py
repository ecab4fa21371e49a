"""Fine-tuning is a run like any other, from a base run's weights; its loss is that of the conversations alone."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from tests.finetune.test_finetune_data import documents, lines, row
from tests.train.ranks import RankStarter
from zero2all.common.errors import UsageError
from zero2all.common.workspace import Workspace
from zero2all.exchange import export_run
from zero2all.finetune.sft import SftOptions, prepare_sft
from zero2all.infer.chat import chat_prompt, choose
from zero2all.infer.load import load_run
from zero2all.packed.loader import LoaderOptions, read_batch
from zero2all.tokenizer.chat import Message
from zero2all.track.reader import RunReader
from zero2all.train.run import train
from zero2all.train.run_data import open_run_data

MATRICES = ("q.weight", "k.weight", "v.weight", "out.weight", "gate_up_pairs.weight", "down.weight")


def options(chats, *overrides, **changes):
    return SftOptions("talk", [chats], **changes, overrides=overrides)


def trained(prepared, work):
    return train(prepared.config, work, say=lambda _: None)


def nats_alone(model, folder):
    """The loss of every conversation by itself, summed, and how many tokens count."""
    nats = counted = 0.0
    with torch.no_grad():
        for ids, mask in documents(folder, "train"):
            tokens = torch.from_numpy(ids.astype(np.int64))
            logits = model.logits(model(tokens[None, :-1]))[0].double()
            losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
            nats += float((losses * torch.from_numpy(mask[1:].astype(float))).sum())
            counted += float(mask[1:].sum())
    return nats, counted


def test_the_loss_of_packed_rows_is_that_of_the_conversations_alone(work, chats):
    prepared = prepare_sft("tiny", work, options(chats, valid_share=0.0))
    rows, seq_len = prepared.report["rows"]["train"], prepared.config.data.seq_len
    assert rows < 50, "several conversations stand in a row"
    settings = dataclasses.replace(
        prepared.config.train, steps=2, tokens_per_step=rows * seq_len, micro_batch_samples=3
    )
    config = dataclasses.replace(prepared.config, train=settings)
    model, folder = load_run(work, "tiny").model, work.root / "sft" / "talk"
    nats, counted = nats_alone(model, folder)
    train(config, work, accept_changes=True, say=lambda _: None)
    first = RunReader(work.run("talk")).series("loss").value[0]
    assert float(first) == pytest.approx(nats / counted, rel=1e-6), "what the trainer computes, in float32"
    model.double()
    model.cos, model.sin = model.cos.double(), model.sin.double()
    nats, counted = nats_alone(model, folder)
    data, _ = open_run_data(config, work, resumed=False)
    batch = read_batch(data, 0, rows, LoaderOptions(documents=True))
    tokens, documents_of = torch.from_numpy(batch.tokens), torch.from_numpy(batch.document_ids)
    found = {}
    with torch.no_grad():
        for name, ids in (("stops", documents_of[:, :-1]), ("goes on", None)):
            logits = model.logits(model(tokens[:, :-1], document_ids=ids))
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            found[name] = float((losses * torch.from_numpy(batch.weights).flatten()).sum())
    assert batch.weights.sum() == counted
    assert found["stops"] == pytest.approx(nats, rel=1e-12)
    assert found["goes on"] != pytest.approx(nats, rel=1e-4), "and without the border it is another"


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"zero": 3}], ids=str)
def test_the_loss_is_the_same_however_the_model_is_spread(work, chats, warm, tmp_path, layout):
    prepared = prepare_sft("tiny", work, options(chats, "--checkpoint.every_steps", "0", valid_share=0.0))
    rows, seq_len = prepared.report["rows"]["train"], prepared.config.data.seq_len
    nats, counted = nats_alone(load_run(work, "tiny").model, work.root / "sft" / "talk")
    settings = dataclasses.replace(
        prepared.config.train, steps=2, tokens_per_step=rows * seq_len, micro_batch_samples=4
    )
    parallel = dataclasses.replace(prepared.config.parallel, **layout)
    config = dataclasses.replace(prepared.config, train=settings, parallel=parallel)
    start = RankStarter(warm, work.root, tmp_path)
    try:
        step, _ = start.finished(config, 2, words={rank: ["--accept-changes"] for rank in range(2)}).steps()
    finally:
        start.stop()
    assert step.loss == pytest.approx(nats / counted, rel=1e-6)


def test_the_run_begins_with_the_weights_of_its_base_and_learns_only_answers(work, chats):
    prepared = prepare_sft("tiny", work, options(chats))
    base, begun = load_run(work, "tiny"), load_run(work, "talk")
    assert begun.step == 0
    assert all(torch.equal(tensor, begun.weights()[name]) for name, tensor in base.weights().items())
    assert prepared.config.data.document_mask
    data, _ = open_run_data(prepared.config, work, resumed=False)
    batch = read_batch(data, 0, 4)
    learned = begun.tokenizer.decode(batch.tokens[:, 1:][batch.weights > 0].tolist(), skip_control=False)
    assert set(learned.split("<|message_end|>")[0][:2]) == {"a", " "}
    assert "q" not in learned


def test_the_chat_is_learned_and_a_resumed_run_ends_with_the_same_bits(work, chats, tmp_path):
    prepared = prepare_sft("tiny", work, options(chats, "--checkpoint.every_steps", "3", epochs=4.0))
    summary = trained(prepared, work)
    loss = RunReader(work.run("talk")).series("loss").value
    assert loss[-1] < 0.7 * loss[0]
    again = prepare_sft("tiny", work, options(chats, "--checkpoint.every_steps", "3", epochs=4.0))
    assert not again.is_new
    assert trained(again, work).step == summary.step
    loaded = load_run(work, "talk")
    assert choose(loaded).how == "template"
    assert chat_prompt(loaded, [Message("user", "q 1")]).how == "template"
    before = {name: tensor.clone() for name, tensor in loaded.weights().items()}
    for folder in sorted(work.run("talk").glob("checkpoints/step-*"))[-1:]:
        shutil.rmtree(folder)
    (work.run("talk") / "last_saved.json").unlink(missing_ok=True)
    shutil.rmtree(work.run("talk") / "checkpoints" / "withdrawn", ignore_errors=True)
    train(again.config, work, say=lambda _: None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_run(work, "talk").weights().items())


def test_other_data_or_settings_under_the_same_name_are_refused(work, chats):
    prepare_sft("tiny", work, options(chats))
    with pytest.raises(UsageError, match="talk already exists, and was begun with other values of: settings"):
        prepare_sft("tiny", work, options(chats, epochs=3.0))
    lines(chats, [row(n) for n in range(90)])
    packed = (work.root / "sft/talk/conversations.json").read_bytes()
    with pytest.raises(UsageError, match="other values of: data"):
        prepare_sft("tiny", work, options(chats))
    assert (work.root / "sft/talk/conversations.json").read_bytes() == packed, "those of the run are still there"
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
    assert mixture["chat"] == 0.75
    assert sum(mixture.values()) == pytest.approx(1)
    assert set(mixture) == {"chat", "en", "zh"}
    assert trained(prepared, work).held_out_scores.keys() >= {"en", "zh"}


def test_a_hugging_face_folder_is_imported_first(work, chats, tmp_path):
    export_run(load_run(work, "tiny"), work.tokenizer, tmp_path / "theirs", tokenizer_layout="compatible")
    fresh = Workspace(tmp_path / "new")
    prepared = prepare_sft(str(tmp_path / "theirs"), fresh, options(chats))
    assert fresh.run("theirs").is_dir()
    assert prepared.config.optim.lr_max == 3e-4
    trained(prepared, fresh)
    assert choose(load_run(fresh, "talk")).how == "template"


def test_the_verb_prepares_trains_and_can_be_repeated(work, chats, capfd):
    from zero2all.cli.main import main

    words = ["sft", "tiny", "--data", str(chats), "--work", str(work.root), "--epochs", "1"]
    assert main([*words, "--prepare"]) == 0
    said = capfd.readouterr().out
    assert "conversations: 60 of 60 (messages 60)" in said, said
    assert f"z2a train {work.run('tiny-sft')}" in said
    assert main([*words, "--optim.lr_max", "0.001"]) == 2, "another setting"
    assert main(["data", "show", "--at", "0", "--config", "tiny-sft", "--work", str(work.root)]) == 0
    assert "⟦<|begin_of_text|><|message_start|>user" in capfd.readouterr().out
    assert json.loads((work.run("tiny-sft") / "finetune.json").read_text())["base"] == "tiny"


def test_adapters_begin_as_the_base_learn_the_chat_are_merged_for_use_and_resume_with_the_same_bits(work, chats):
    asked = options(chats, "--checkpoint.every_steps", "3", epochs=4.0, lora=4)
    prepared = prepare_sft("tiny", work, asked)
    base, begun = load_run(work, "tiny").weights(), load_run(work, "talk").weights()
    assert all(torch.equal(tensor, begun[name]) for name, tensor in base.items()), "B is zero"
    assert prepared.config.optim.kind == "adamw"
    trained(prepared, work)
    loss = RunReader(work.run("talk")).series("loss").value
    assert loss[-1] < 0.8 * loss[0]
    before = {name: tensor.clone() for name, tensor in load_run(work, "talk").weights().items()}
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in base if name.endswith(MATRICES)}
    shutil.rmtree(sorted(work.run("talk").glob("checkpoints/step-*"))[-1])
    (work.run("talk") / "last_saved.json").unlink(missing_ok=True)
    trained(prepare_sft("tiny", work, asked), work)
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_run(work, "talk").weights().items())
    again = prepare_sft("talk", work, dataclasses.replace(asked, name="more", lora=None))
    assert again.config.finetune.lora.rank is None, "the merged model is what goes on"
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_run(work, "more").weights().items())
