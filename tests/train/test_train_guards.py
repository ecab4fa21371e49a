"""Runs over bad data, from beginning to end: what is noticed, what is done about it, and how such a run ends.

The data is poisoned where a disk or a crawler would have done it: in the packed shards. Which sample stands in which
step is a function of config and data, so a test can write noise into exactly the samples of a few steps.
"""

import json
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch

from tests.train.checkpoints.conftest import set_value
from tests.train.states import copies
from zero2all.cli import main
from zero2all.common.errors import AnomalyError, BadInputError, DiskError, PreemptedError
from zero2all.common.manifest import read_manifest, write_manifest
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import config_from_values, config_values, config_yaml
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed.shard_format import open_split, tokens_name
from zero2all.packed.writer import PackOptions, pack_corpus
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus
from zero2all.track.reader import read_run
from zero2all.train import trainer
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.manifest import read_manifest as read_checkpoint_manifest
from zero2all.train.checkpoints.retention import pins
from zero2all.train.guards.documents import rows_of_step
from zero2all.train.guards.ledger import SkipLedger
from zero2all.train.run import train
from zero2all.train.run_data import open_run_data

SEQ_LEN, ROWS, STEPS, VOCABULARY = 32, 8, 200, 400
STEP_TOKENS = SEQ_LEN * ROWS
FIRST_BAD, BAD_STEPS = 121, 8
"""The poisoned window: steps as the metrics count them."""
GUARDS = {"skip_steps_after": 8}
"""16 by default; of a run of 200 steps, that is much to leave out."""
SETTINGS = {
    "model": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "max_seq_len": SEQ_LEN,
    },
    "data": {"seq_len": SEQ_LEN, "mixture": {"en": 3, "zh": 1}},
    "train": {"name": "run", "steps": STEPS, "tokens_per_step": STEP_TOKENS, "micro_batch_samples": ROWS},
    "optim": {"lr_max": 0.01},
    "schedule": {"warmup_steps": 10},
    "checkpoint": {"every_steps": 20},
    "validation": {"every_steps": 0, "tokens_per_source": 2048},
    "parallel": {"device": "cpu", "cpu_threads": 1},
    "resilience": {"supervise": False, "memory_every_steps": 0},
}


def settings(name="run", **sections):
    values = {
        section: {**SETTINGS.get(section, {}), **sections.get(section, {})} for section in {**SETTINGS, **sections}
    }
    values["train"]["name"] = name
    return config_from_values(values, "of a test")


# ---- data -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    """Text of two languages in which a word allows four next ones; shards of 4,000 tokens. Read only."""
    work = open_workspace(tmp_path_factory.mktemp("guarded") / "work", create=True)
    work.raw.mkdir()
    rng = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeiou"]
    english = sorted({"".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(60)})
    chinese = [*(chr(0x4E00 + number) for number in range(60)), *"的是在了"]
    sources = []
    for name, words, count, space in (("en", english, 1500, " "), ("zh", chinese, 400, "")):
        following = {word: rng.choices(words, k=4) for word in words}
        texts = []
        for _ in range(count):
            text = [rng.choice(words)]
            while len(text) < rng.randint(25, 60):
                text.append(rng.choice(following[text[-1]]))
            texts.append(space.join(text))
        path = work.raw / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append(Source(name, path, name))
    build_corpus(work.corpus, sources, BuildOptions(valid_share=0.05, rules="none"))
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=VOCABULARY))
    pack_corpus(work.corpus, work.tokenizer, work.packed, PackOptions(shard_tokens=4000))
    return work


@pytest.fixture(scope="session")
def copy_of(tmp_path_factory):
    """A copy of a workspace, without runs unless asked for."""

    def copied(work, runs=False):
        root = tmp_path_factory.mktemp("copy") / "work"
        shutil.copytree(work.root, root, ignore=None if runs else shutil.ignore_patterns("runs"))
        return Workspace(root)

    return copied


@pytest.fixture
def work(clean, copy_of):
    return copy_of(clean)


def rewrite_manifest(folder, **changes):
    manifest = read_manifest(folder, "packed", "z2a pack")
    fixed = ("kind", "format", "zero2all", "inputs", "files")
    content = {name: value for name, value in manifest.items() if name not in fixed}
    write_manifest(folder, "packed", manifest["inputs"], content | changes)


def shard_tokens(work, source, shard):
    folder = work.packed / source / "train"
    dtype = read_manifest(folder, "packed", "z2a pack")["dtype"]
    return np.memmap(folder / tokens_name(shard), dtype=dtype, mode="r+")


def overwrite_shard(work, source, shard, ids):
    """Every token of a shard; the borders of its documents stay."""
    tokens = shard_tokens(work, source, shard)
    tokens[:] = ids if np.isscalar(ids) else ids[: len(tokens)]
    tokens.flush()
    rewrite_manifest(work.packed / source / "train")


def noise(count):
    return np.random.default_rng(7).integers(10, VOCABULARY, count)


def poison_steps(work, config, first, steps):
    """Noise in place of every sample of `steps` global batches from step `first` on."""
    data, _ = open_run_data(config, work, False)
    ids = noise(steps * STEP_TOKENS)
    for number in range(steps):
        rows = rows_of_step(data, (first - 1 + number) * STEP_TOKENS, ROWS)
        for row, (source, sample) in enumerate(zip(rows.sources.tolist(), rows.samples.tolist(), strict=True)):
            split = data.splits[source]
            for column in range(SEQ_LEN):
                token = sample * SEQ_LEN + column
                shard = int(np.searchsorted(split.shard_starts, token, side="right")) - 1
                tokens = shard_tokens(work, split.name, shard)
                tokens[token - int(split.shard_starts[shard])] = ids[(number * ROWS + row) * SEQ_LEN + column]
    for split in data.splits:
        rewrite_manifest(split.folder)


def decoder(work):
    def load():
        tokenizer = load_tokenizer(work.tokenizer)
        return lambda ids: tokenizer.decode(ids, skip_control=False)

    return load


def trained(config, work, **arguments):
    return train(config, work, make_decode=decoder(work), say=lambda _: None, **arguments)


def events(run, *kinds):
    return [event for event in read_run(run).events if event.kind in kinds]


def page(run, name):
    """An incident's JSON, after checking that its page and its text are there."""
    folder = run / "incidents"
    assert (folder / f"{name}.html").is_file()
    assert (folder / f"{name}.txt").is_file()
    return json.loads((folder / f"{name}.json").read_text())


def weights(run):
    folder = newest_checkpoint(run).folder
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="session")
def left_alone(clean, copy_of):
    """The run over clean data, and how it ended."""
    work = copy_of(clean)
    return work.run("run"), trained(settings(), work)


def test_clean_data_raises_no_alarm(left_alone):
    run, summary = left_alone
    assert summary.step == STEPS
    assert not events(run, "spike", "drop", "skip", "rollback")
    assert not (run / "incidents").exists()


# ---- a poisoned window ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def poisoned(clean, copy_of):
    """The same text with 8 consecutive global batches of noise."""
    work = copy_of(clean)
    poison_steps(work, settings(), FIRST_BAD, BAD_STEPS)
    return work


@pytest.fixture(scope="session")
def right_before(poisoned, tmp_path_factory):
    """The run as it stands some steps before the bad data: what comes before is the same work for every run below. When
    it goes on, it has proven the checkpoint it was resumed from by then."""
    work = beside(poisoned, tmp_path_factory.mktemp("before"))
    real_step = trainer.train_step

    def step_or_stop(state, *arguments):
        if state.step == FIRST_BAD - 11:
            raise InterruptedError
        return real_step(state, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", step_or_stop)
        with pytest.raises(InterruptedError):
            trained(settings(guards=GUARDS), work)
    return work


def beside(work, root):
    """A workspace of its own over the same data."""
    root.mkdir(exist_ok=True)
    for item in work.root.iterdir():
        if item.name != "runs":
            (root / item.name).symlink_to(item)
    return Workspace(root)


@pytest.fixture(scope="session")
def recovered(poisoned, right_before):
    """The run that goes on from there, and how it ended."""
    shutil.copytree(right_before.runs, poisoned.runs)
    return poisoned.run("run"), trained(settings(guards=GUARDS), poisoned)


def mean_held_out(summary):
    return np.mean([value for name, value in summary.held_out.items() if "/loss/" in name])


def test_a_run_over_a_poisoned_window_goes_back_leaves_it_out_and_ends_like_the_clean_one(left_alone, recovered):
    run, summary = recovered
    assert summary.step == STEPS
    assert mean_held_out(summary) == pytest.approx(mean_held_out(left_alone[1]), rel=0.01)
    (rollback,) = events(run, "rollback")
    assert rollback.data["to_step"] == 100
    first, second, third = SkipLedger.load(run / "incidents").entries
    assert [entry.action for entry in (first, second, third)] == ["refuse", "refuse", "rollback"]
    assert (third.first, third.end) == ((FIRST_BAD - 1) * STEP_TOKENS, (FIRST_BAD + 2 + 8) * STEP_TOKENS)
    spikes = [event.step for event in events(run, "spike") if event.data["kind"] == "loss_spike"]
    assert spikes == [FIRST_BAD, FIRST_BAD + 1, FIRST_BAD + 2]


def test_the_page_of_the_spike_names_the_documents_and_shows_their_text(recovered, poisoned):
    run, _ = recovered
    incident = page(run, f"{FIRST_BAD + 2}-loss_spike")
    assert incident["action"] == "rollback"
    assert "back to the checkpoint of step 100" in incident["done"]
    assert len(incident["samples"]) == ROWS
    tokenizer = load_tokenizer(poisoned.tokenizer)
    bad = noise(BAD_STEPS * STEP_TOKENS)[2 * STEP_TOKENS : 3 * STEP_TOKENS].reshape(ROWS, SEQ_LEN)
    for sample in incident["samples"]:
        assert sample["loss"] > 4
        text = "".join(document["text"] for document in sample["documents"])
        assert text.startswith(tokenizer.decode(bad[sample["row"]].tolist(), skip_control=False)[:20])
        assert all(document["gid"] is not None for document in sample["documents"])
        assert all(f"{sample['source']}.jsonl" in document["origin"] for document in sample["documents"])
    html = (run / "incidents" / f"{FIRST_BAD + 2}-loss_spike.html").read_text()
    assert f"gid {incident['samples'][0]['documents'][0]['gid']}" in html


KILL = """
import os, signal, sys
from zero2all.train import trainer
from zero2all.train.checkpoints.store import CheckpointStore

def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def dying_after(method):
    def call(*arguments):
        method(*arguments)
        die()
    return call

moment = sys.argv.pop()
if moment == "decided":
    CheckpointStore.go_back_to = die
elif moment == "withdrawn":
    trainer.load_checkpoint = die
else:
    trainer.Trainer.rollback = dying_after(trainer.Trainer.rollback)
from zero2all.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("moment", ["decided", "withdrawn"])
def test_a_run_killed_while_it_goes_back_ends_like_the_one_left_alone(
    moment, recovered, poisoned, right_before, start, tmp_path
):
    work, path = beside(poisoned, tmp_path / "work"), tmp_path / "config.yaml"
    path.write_text(config_yaml(settings(guards=GUARDS)))
    shutil.copytree(right_before.runs, work.runs)
    killed = start("train", path, "--work", work.root, moment, code=KILL)
    assert killed.wait() == -9, killed.text()
    run = work.run("run")
    assert not events(run, "finish")
    again = start("train", path, "--work", work.root)
    assert again.wait() == 0, again.text()
    assert weights(run) == weights(recovered[0])
    assert SkipLedger.load(run / "incidents").entries == SkipLedger.load(recovered[0] / "incidents").entries
    assert list(pins(run)) == [100]
    assert (run / "checkpoints/step-00000100").is_dir(), "what was gone back to stays"


def test_a_truncated_record_of_skipped_data_is_rebuilt_and_the_run_ends_with_the_same_bits(
    recovered, poisoned, tmp_path
):
    work, lines = beside(poisoned, tmp_path / "work"), []
    shutil.copytree(recovered[0], work.run("run"))
    run = work.run("run")
    wanted, entries = weights(run), SkipLedger.load(run / "incidents").entries
    shutil.rmtree(newest_checkpoint(run).folder)
    for page_file in (run / "incidents").glob(f"{FIRST_BAD}-*"):
        page_file.unlink()  # the checkpoint knows of it, too
    path = run / "incidents/skipped.json"
    path.write_bytes(path.read_bytes()[:100])
    train(settings(guards=GUARDS), work, say=lines.append)
    (said,) = [line for line in lines if "skipped.json" in line]
    assert "rebuilt from step-00000180 and the incident pages: 3 decisions" in said
    assert "elete" not in said
    assert SkipLedger.load(run / "incidents").entries == entries
    assert (run / "incidents/skipped.json.damaged").stat().st_size == 100
    assert weights(run) == wanted


# ---- a checkpoint that is not what it was ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def stopped_at_194(clean, copy_of):
    """The clean run, stopped and saved at step 194: checkpoints 180 and 194."""
    work, real_step = copy_of(clean), trainer.train_step

    def step_and_signal(state, *arguments):
        pending = real_step(state, *arguments)
        if state.step == 193:
            os.kill(os.getpid(), signal.SIGTERM)
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", step_and_signal)
        with pytest.raises(PreemptedError):
            trained(settings(), work)
    return work


@pytest.mark.parametrize("weight", [1e30, 1e4, 30.0], ids=["not finite", "spikes", "small spikes"])
def test_a_run_resumed_from_a_damaged_checkpoint_keeps_the_good_one_and_ends_with_the_bits_of_the_clean_run(
    weight, stopped_at_194, left_alone, copy_of
):
    work = copy_of(stopped_at_194, runs=True)
    run = work.run("run")
    set_value(run, 194, "model-00000-00000.safetensors", "norm.weight", weight)
    trained(settings(checkpoint={"every_steps": 15}), work)  # saves at step 195, before anything is proven
    (rollback,) = events(run, "rollback")
    assert (rollback.data["to_step"], rollback.data["withdrawn"]) == (180, [195, 194])
    manifest = read_checkpoint_manifest(run / "checkpoints/withdrawn/step-00000195")
    assert manifest["not_good"] == "the updates of these steps were refused: 195"
    assert SkipLedger.load(run / "incidents").entries == (), "the data was not bad"
    assert weights(run) == weights(left_alone[0])


def test_a_run_whose_only_checkpoint_is_damaged_does_not_end_well(stopped_at_194, copy_of):
    work = copy_of(stopped_at_194, runs=True)
    run = work.run("run")
    shutil.rmtree(run / "checkpoints/step-00000180")
    set_value(run, 194, "model-00000-00000.safetensors", "norm.weight", 1e4)
    for _ in range(2):  # the second one only passes over the data that the first one has refused
        with pytest.raises(AnomalyError, match=r"no step after the checkpoint of step 19\d was accepted"):
            trained(settings(checkpoint={"every_steps": 15}), work)
    assert max(map(step_of, list_checkpoints(run))) < STEPS


def rot_at_step(patch, folder):
    """Damage a checkpoint on the disk while the first bad step is computed."""
    real_step = trainer.train_step

    def step(state, *arguments):
        path = folder / "model-00000-00000.safetensors"
        if state.step == FIRST_BAD - 1 and path.exists():
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return real_step(state, *arguments)

    patch.setattr(trainer, "train_step", step)


@pytest.mark.parametrize(("kept", "gone_back_to"), [(3, [80]), (2, [])])
def test_a_rollback_whose_target_is_rotten_takes_an_older_one_or_moves_nothing(
    kept, gone_back_to, poisoned, right_before, tmp_path, monkeypatch
):
    work = beside(poisoned, tmp_path / "work")
    shutil.copytree(right_before.runs, work.runs)
    run = work.run("run")
    rot_at_step(monkeypatch, run / "checkpoints/step-00000100")
    summary = trained(settings(guards=GUARDS, checkpoint={"keep_last": kept}), work)
    assert summary.step == STEPS
    assert (run / "checkpoints/damaged/step-00000100.txt").is_file()
    assert [event.data["to_step"] for event in events(run, "rollback")] == gone_back_to
    assert (run / "checkpoints/withdrawn/step-00000120").is_dir() == bool(gone_back_to)


# ---- steps that are not finite, and runs that keep failing ----------------------------------------------------


@pytest.fixture
def not_finite(monkeypatch):
    """Make the loss of these steps NaN, and with it every gradient; keeps the state before and after each."""
    around = {}

    def in_steps(*steps):
        real_step = trainer.train_step

        def step(state, *arguments):
            if state.step + 1 not in steps:
                return real_step(state, *arguments)
            before = copies(state)
            head_loss = state.model.head_loss
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(state.model, "head_loss", lambda *given: tuple(x * torch.nan for x in head_loss(*given)))
                pending = real_step(state, *arguments)
            around[state.step] = before, copies(state)
            return pending

        monkeypatch.setattr(trainer, "train_step", step)
        return around

    return in_steps


SHORT = {"train": {"steps": 12}, "checkpoint": {"every_steps": 4}}


def test_a_step_that_is_not_finite_changes_no_bit_of_weights_and_moments(work, not_finite):
    around = not_finite(6)
    summary = trained(settings(**SHORT), work)
    assert summary.step == 12
    before, after = around[6]
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    run = work.run("run")
    assert [event.step for event in events(run, "skip")] == [6]
    assert page(run, "6-nonfinite")["action"] == "continue"
    losses = read_run(run).series["loss"]
    assert np.isnan(losses.value).sum() == 1
    assert losses.step.tolist() == list(range(1, 13))
    doubts = {step_of(folder): read_checkpoint_manifest(folder).get("not_good") for folder in list_checkpoints(run)}
    refused = "the updates of these steps were refused: 6"  # for rollback_within_steps, 16
    assert doubts == {4: None, 8: refused, 12: refused}


def test_what_came_before_steps_that_are_not_finite_stays_until_there_is_something_good_again(work, not_finite):
    not_finite(6, 10, 14, 18)
    trained(settings(train={"steps": 20}, checkpoint={"every_steps": 4}), work)
    assert [step_of(folder) for folder in list_checkpoints(work.run("run"))] == [20, 16, 4]


def test_with_rollback_steps_that_are_not_finite_lead_back_to_the_last_good_checkpoint(work, not_finite):
    not_finite(*range(10, 16))
    guards = {"nonfinite": "rollback", "skip_steps_after": 3}
    summary = trained(settings(train={"steps": 20}, checkpoint={"every_steps": 4}, guards=guards), work)
    assert summary.step == 20
    (rollback,) = events(work.run("run"), "rollback")
    assert (rollback.data["from_step"], rollback.data["to_step"]) == (12, 8)
    (entry,) = SkipLedger.load(work.run("run") / "incidents").entries
    assert (entry.first, entry.end) == (9 * STEP_TOKENS, 15 * STEP_TOKENS)
    assert list(pins(work.run("run"))) == [8]


def command(work, tmp_path, config):
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(config))
    return main(["train", str(path), "--work", str(work.root)])


def test_a_run_that_stopped_itself_does_not_go_on_from_memory(work, not_finite, tmp_path, capsys):
    """What is in memory is newer than the disk, and may be a part of what went wrong."""
    not_finite(6)
    memory = {"memory_every_steps": 1, "memory_folder": str(tmp_path), "supervise": False}
    config = settings(**SHORT, resilience=memory, guards={"nonfinite": "stop"})
    assert command(work, tmp_path, config) == 12
    assert command(work, tmp_path, config) == 12
    assert "resumed run at step 4 from step-00000004" in capsys.readouterr().out


def test_a_run_that_keeps_failing_ends_with_code_12_and_weights_from_before(work, not_finite, tmp_path, capsys):
    not_finite(*range(6, 12))
    assert command(work, tmp_path, settings(**SHORT, guards={"max_skips_in_a_row": 3})) == 12
    out, message = capsys.readouterr()
    assert "Updates skipped in a row: 3" in message
    assert "The weights are those of step 5" in message
    (line,) = [line for line in out.splitlines() if line.startswith("step 6 is not finite")]
    assert line.endswith(
        f"was refused. {work.run('run')}/incidents/6-nonfinite.html shows the documents and what to try."
    )
    assert page(work.run("run"), "8-nonfinite")["action"] == "stop"


# ---- bad input, before the first step -------------------------------------------------------------------------


def test_data_packed_with_another_tokenizer_is_refused(work):
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=360))
    with pytest.raises(BadInputError, match=r"made with the tokenizer .* holds .* Run `z2a pack` again") as caught:
        trained(settings(**SHORT), work)
    assert caught.value.exit_code == 3
    assert not list_checkpoints(work.run("run"))


def test_an_id_beyond_the_vocabulary_is_named_with_its_file_before_the_model_sees_it(work):
    for shard in range(len(open_split(work.packed, "en", "train").shards)):
        overwrite_shard(work, "en", shard, VOCABULARY + 7)
    with pytest.raises(BadInputError, match=r"packed.en.train: token \d+ of sample .* has the id 407.*z2a data verify"):
        trained(settings(**SHORT), work)
    rewrite_manifest(work.packed / "en/train", max_id=VOCABULARY + 7)
    with pytest.raises(BadInputError, match=r"`max_id` is 407, expected an id below vocab_size \(400\)"):
        trained(settings(**SHORT), work)


def test_a_disk_that_cannot_hold_a_checkpoint_is_noticed_before_the_first_step(work, monkeypatch):
    usage = shutil.disk_usage(work.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=20_000))
    with pytest.raises(DiskError, match="Free some space") as caught:
        trained(settings(**SHORT), work)
    assert caught.value.exit_code == 4
    assert "loss" not in read_run(work.run("run")).series


# ---- guards and resume ----------------------------------------------------------------------------------------


def test_guards_of_a_run_stopped_where_a_stage_begins_know_what_those_of_the_one_left_alone_know(work, monkeypatch):
    """A checkpoint at the border is saved before the stage begins, and the window starts over with the stage."""
    late = [{"name": "late", "from_step": 8, "mixture": {"zh": 1}}]
    changes = {"train": {"steps": 12}, "checkpoint": {"every_steps": 1}}
    plain = [config_values(settings(name, **changes)) for name in ("alone", "stopped")]
    configs = [config_from_values({**values, "stages": late}, "of a test") for values in plain]
    trained(configs[0], work)
    real_step = trainer.train_step

    def step_or_stop(state, *arguments):
        if state.step == 8:
            raise InterruptedError
        return real_step(state, *arguments)

    monkeypatch.setattr(trainer, "train_step", step_or_stop)
    with pytest.raises(InterruptedError):
        trained(configs[1], work)
    monkeypatch.undo()
    trained(configs[1], work)
    alone, stopped = (newest_checkpoint(work.run(name)).record["guards"] for name in ("alone", "stopped"))
    assert len(alone["detector"]["losses"]) == 4
    assert stopped == alone


@pytest.mark.slow
def test_a_run_killed_before_a_rollback_to_a_checkpoint_that_rots_meanwhile_moves_nothing_and_says_what_to_do(
    poisoned, right_before, start, tmp_path
):
    work, path = beside(poisoned, tmp_path / "work"), tmp_path / "config.yaml"
    path.write_text(config_yaml(settings(guards=GUARDS)))
    shutil.copytree(right_before.runs, work.runs)
    killed = start("train", path, "--work", work.root, "decided", code=KILL)
    assert killed.wait() == -9, killed.text()
    set_value(work.run("run"), 100, "model-00000-00000.safetensors", "norm.weight", 1.0, seals=False)
    again = start("train", path, "--work", work.root)
    assert again.wait() == 3, again.text()
    assert "was going back to the checkpoint of step 100, which is damaged or missing" in again.text()
    assert [step_of(folder) for folder in list_checkpoints(work.run("run"))] == [120]


def test_with_stop_the_command_ends_with_code_12_and_names_its_page(work, not_finite, tmp_path, capsys):
    not_finite(6)
    assert command(work, tmp_path, settings(**SHORT, guards={"nonfinite": "stop"})) == 12
    run, message = work.run("run"), capsys.readouterr().err
    assert str(run / "incidents/6-nonfinite.html") in message
    assert "Traceback" not in message
    incident = page(run, "6-nonfinite")
    assert incident["action"] == "stop"
    assert incident["samples"][0]["documents"][0]["text"]
    assert step_of(list_checkpoints(run)[0]) == 4


@pytest.mark.slow
def test_a_run_that_has_to_go_back_again_and_again_stops(work):
    """All text from some step on is noise: no window to leave out helps."""
    guards = {"spike_window_steps": 24, "spike_min_steps": 16, "skip_steps_after": 2, "max_rollbacks": 2}
    config = settings(train={"steps": 70}, checkpoint={"every_steps": 10, "keep_last": 3}, guards=guards)
    poison_steps(work, config, 41, 30)
    with pytest.raises(AnomalyError, match="gone back 2 times") as caught:
        trained(config, work)
    assert caught.value.exit_code == 12
    run = work.run("run")
    assert [event.data["to_step"] for event in events(run, "rollback")] == [30, 20], "one further each time"
    last = max((run / "incidents").glob("*-loss_spike.json"), key=lambda path: int(path.name.split("-")[0]))
    assert json.loads(last.read_text())["action"] == "stop"
