"""What a run does with its data: mixtures that change on resume, longer sequences, limits, documents, best fit."""

import re
import shutil
from collections import defaultdict

import numpy as np
import psutil
import pytest

from tests.train.checkpoints.conftest import MODEL
from tests.train.conftest import prepared_run, quiet, said_by_run
from tests.train.states import events, flip, steps_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.shard_format import open_split
from zero2all.packed.writer import pack_corpus
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus
from zero2all.track.reader import read_run
from zero2all.train import train_step as step_module
from zero2all.train import trainer
from zero2all.train.anneal import request_anneal
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import checkpoint_folder
from zero2all.train.run import train

STEP = 128
"""Tokens in a step of the small config: 4 samples of 32."""
ZH_AT_STEP_8 = {"max_epochs": {"zh": 0.04}}
"""8 steps read 0.035 epochs of zh, 20 steps more than twice that."""


@pytest.fixture
def watched(monkeypatch):
    """The rows of every batch that is trained on, by source."""
    rows: dict[int, list[bytes]] = defaultdict(list)
    forward_backward = step_module.forward_backward

    def watch(state, batch, *rest):
        for source, row in zip(batch.sources, batch.tokens, strict=True):
            rows[int(source)].append(np.asarray(row).tobytes())
        return forward_backward(state, batch, *rest)

    monkeypatch.setattr(step_module, "forward_backward", watch)
    return rows


def test_a_mixture_changed_on_resume_lets_every_source_continue_where_it_stood(work, config, watched):
    train(config(train={"steps": 3}), work, say=quiet)
    other = config(train={"steps": 7}, data={"mixture": {"en": 1, "zh": 3}})
    with pytest.raises(UsageError, match="the mixture or the sequence length has changed"):
        train(other, work, say=quiet)
    notes = said_by_run(other, work, accept_changes=True)
    assert "the mixture changes at token 384; every source continues where it stopped" in notes
    assert not [note for note in notes if "repeated or left out" in note]
    train(config(train={"steps": 9}, data={"mixture": {"en": 1, "zh": 3}}), work, accept_changes=True, say=quiet)
    assert [len(watched[source]) for source in (0, 1)] == [9 + 6, 3 + 18]
    for number, name in enumerate(("en", "zh")):
        alone = prepared_run(config(data={"mixture": {name: 1}}), work, fresh=True)[1].data
        samples = alone.segments[0].order.lookup(np.arange(len(watched[number])))[1]
        wanted = [alone.splits[0].read(int(sample) * 32, 33).tobytes() for sample in samples]
        assert watched[number] == wanted  # the order of the source alone: nothing repeated, nothing skipped


def test_a_stage_with_longer_sequences_keeps_the_tokens_of_a_step(work, config, watched):
    stage = {"name": "long", "from_step": 5, "mixture": {"en": 1}, "seq_len": 64}
    notes: list[str] = []
    assert train(config(model={"max_seq_len": 64}, stages=[stage]), work, say=notes.append).tokens == 8 * STEP
    assert {len(row) // 8 for row in watched[1]} == {33}, "the mixture of the stage has no zh"
    assert sum(len(row) // 8 == 65 for row in watched[0]) == 3 * 2
    changes = "from token 640 on, sequences have 64 tokens: the text is cut and shuffled again"
    assert any(changes in note for note in notes)


def test_a_stage_longer_than_the_model_is_refused_with_its_field(config):
    with pytest.raises(UsageError, match=r"stages\[0\]\.seq_len: got 64, expected at most model\.max_seq_len \(32\)"):
        config(stages=[{"name": "long", "from_step": 5, "seq_len": 64}])
    with pytest.raises(UsageError, match=r"stages\[0\]\.seq_len: got 24, expected a divisor of train\.tokens_per_step"):
        config(stages=[{"name": "odd", "from_step": 5, "seq_len": 24}])


def test_a_limit_on_epochs_is_held_before_the_first_step(work, config):
    with pytest.raises(UsageError, match=r"zh: 0\.\d\d epochs, at most 0\.01 allowed"):
        train(config(data={"max_epochs": {"zh": 0.01}}), work, say=quiet)
    assert not (work.run("run") / "config.yaml").exists()


def test_an_anneal_that_would_read_more_than_max_epochs_is_refused_by_the_run_which_goes_on(work, config, after_step):
    run = work.run("run")
    after_step(4, lambda: request_anneal(run, 16, "linear", 0.0))
    text = "\n".join(said_by_run(config(data=ZH_AT_STEP_8), work))
    for said in ("run cannot anneal over 16 steps from step 4.", "at most 0.04 allowed", "--steps N"):
        assert said in text
    assert steps_of(run)[0] == 8
    assert 4 in [event.step for event in events(run, "warning")]
    assert events(run, "anneal") == []
    assert not (run / "anneal.json").exists()  # or every step would refuse it again


def test_an_anneal_of_a_run_that_shares_what_is_used_up_stays_within_max_epochs(work, config, after_step):
    settings = config(data={**ZH_AT_STEP_8, "when_used_up": "share"}, checkpoint={"keep_last": 9})
    run = work.run("run")
    after_step(4, lambda: request_anneal(run, 16, "linear", 0.0))
    assert train(settings, work, say=quiet).step == 20
    last = newest_checkpoint(run)
    assert [stage["name"] for stage in last.manifest["order"]["stages"]] == ["main", "main without zh"]
    wanted = (last.folder / MODEL).read_bytes()
    for step in steps_of(run):
        if step > 6:
            shutil.rmtree(checkpoint_folder(run, step))
    train(settings, work, say=quiet)
    assert (last.folder / MODEL).read_bytes() == wanted


def test_an_anneal_has_a_mixture_of_its_own_also_on_resume_and_unknown_sources_are_refused(work, config):
    settings = config()
    train(settings, work, say=quiet)
    run = work.run("run")
    request_anneal(run, 4, "linear", 0.0, {"en": 1.0, "books": 1.0})
    with pytest.raises((BadInputError, UsageError), match="books"):
        train(settings, work, say=quiet)
    request_anneal(run, 4, "linear", 0.0, {"zh": 1.0})
    assert train(settings, work, say=quiet).step == 12
    stages = newest_checkpoint(run).manifest["order"]["stages"]
    assert [(stage["name"], list(stage["units"])) for stage in stages][-1] == ("anneal", ["zh"])
    assert train(settings, work, say=quiet).step == 12  # the record is found again, nothing is refused


def test_a_run_whose_reading_process_is_killed_goes_on_to_the_same_bits_and_writes_it_down(work, config, monkeypatch):
    train(config(), work, say=quiet)
    step = trainer.Trainer.step

    def kill_reader(training, *given):
        if training.state.step == 3:
            for child in psutil.Process().children():
                if "zero2all.packed.readers" in " ".join(child.cmdline()):
                    child.kill()
        step(training, *given)

    monkeypatch.setattr(trainer.Trainer, "step", kill_reader)
    train(config(train={"name": "killed"}, data={"reader_kind": "process", "prefetch_steps": 1}), work, say=quiet)
    one, other = (checkpoint_folder(work.run(name), 8) / MODEL for name in ("run", "killed"))
    assert one.read_bytes() == other.read_bytes()
    (warning,) = events(work.run("killed"), "warning")
    assert warning.data["problem"] == "a reader process ended (SIGKILL); another one takes over"


def test_a_run_stops_at_a_damaged_shard_without_saving_and_goes_on_once_it_is_mended(work, config):
    settings = config(checkpoint={"every_steps": 0}, validation={"every_steps": 0})
    shard, run = work.packed / "zh/train/tokens-00000.bin", work.run("run")
    content = shard.read_bytes()
    flip(shard, 50)
    changed = r"zh/train/tokens-00000\.bin has changed .* not saved. Run `z2a pack` to write"
    with pytest.raises(BadInputError, match=changed):
        train(settings, work, say=quiet)
    assert steps_of(run) == []
    assert len(events(run, "damaged_shard")) == 1
    pack_corpus(work.corpus, work.tokenizer, work.packed)
    assert shard.read_bytes() == content
    assert train(settings, work, say=quiet).step == 8


def test_damage_that_one_of_two_processes_finds_ends_both_and_rank_0_reports_it(lab, config, ranks):
    flip(lab.packed / "en/train/tokens-00000.bin", 50)  # files are dealt out by name, so it falls to the second
    launch = ranks(config(train={"steps": 100_000}, checkpoint={"every_steps": 0}, validation={"every_steps": 0}), 2)
    assert launch.wait() == [3, 10], launch.text()
    said = " ".join(launch.trainers[0].text().split())
    assert re.search(r"Rank 1 on \S+: \S*en/train/tokens-00000\.bin has changed since it was written", said), said
    assert "has changed" not in launch.trainers[1].text()
    assert steps_of(lab.run("run")) == []
    assert events(lab.run("run"), "damaged_shard")


def test_documents_apart_and_best_fit_rows_train(work, config):
    for source in ("en", "zh"):
        build_best_fit(open_split(work.packed, source, "train"), 32)
    losses = []
    for number, fields in enumerate(({"document_mask": True}, {"packing": "best_fit", "document_mask": True})):
        train(config(train={"name": f"run{number}"}, data=fields), work, say=quiet)
        losses.append(read_run(work.run(f"run{number}")).series["loss"].value.tolist())
    assert np.isfinite(losses).all()
    assert losses[0] != losses[1]


def test_data_packed_with_another_tokenizer_than_the_run_was_trained_with_is_refused(work, config):
    settings = config(model={"vocab_size": 448}, train={"steps": 3})
    train(settings, work, say=quiet)
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=390))
    pack_corpus(work.corpus, work.tokenizer, work.packed)
    another = r"step-00000003 was trained with the tokenizer .*`tokenizer` in .*manifest"
    with pytest.raises(BadInputError, match=another):
        train(settings, work, say=quiet)
