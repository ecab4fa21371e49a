"""Runs over bad data, from beginning to end: what is noticed, what is done about it, and how such a run ends."""

import json
import os
import random
import shutil
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.train.checkpoints.conftest import set_value
from tests.train.conftest import NO_DROPOUT, quiet, said_by_run, small_config
from tests.train.states import assert_same_bits, copies, events, steps_of
from zero2all.common.errors import AnomalyError, BadInputError, DiskError, PreemptedError
from zero2all.common.manifest import read_manifest, write_manifest
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import config_yaml
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed.shard_format import open_split, tokens_name
from zero2all.packed.writer import PackOptions, pack_corpus
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus
from zero2all.track.reader import read_run
from zero2all.train import trainer
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints
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
SHORT = {"train": {"steps": 12}, "checkpoint": {"every_steps": 4}}
WEIGHTS = "model-00000-00000.safetensors"
NOISE = np.random.default_rng(7).integers(10, VOCABULARY, (BAD_STEPS, ROWS, SEQ_LEN))
KILL = """
import os, signal, sys
from zero2all.train import trainer
from zero2all.train.checkpoints.store import CheckpointStore
def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv.pop() == "decided":
    CheckpointStore.go_back_to = die
else:
    trainer.load_checkpoint = die
from zero2all.cli import main
sys.exit(main())
"""
MOMENTS, NOT_ACCEPTED = "optimizer-00000-00000.safetensors", "no step after the checkpoint of step 194 was accepted"


def settings(name="run", stages=None, **sections):
    usual = {
        "model": {**NO_DROPOUT, "intermediate_size": 64},
        "train": {"name": name, "steps": STEPS, "tokens_per_step": STEP_TOKENS, "micro_batch_samples": ROWS},
        "schedule": {"warmup_steps": 10},
        "checkpoint": {"every_steps": 20},
        "validation": {"every_steps": 0, "tokens_per_source": 2048},
    }
    fields = {each: {**usual.get(each, {}), **sections.get(each, {})} for each in {**usual, **sections}}
    return small_config(stages, **fields)


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


@pytest.fixture
def work(clean, tmp_path):
    """A copy, whose data may be changed."""
    return Workspace(shutil.copytree(clean.root, tmp_path / "work"))


def beside(work, root, runs=None):
    """A workspace of its own over the same data, with a copy of these runs."""
    root.mkdir(exist_ok=True)
    for item in work.root.iterdir():
        if item.name != "runs":
            (root / item.name).symlink_to(item)
    if runs is not None:
        shutil.copytree(runs, root / "runs")
    return Workspace(root)


def rewrite_manifest(folder, **changes):
    manifest = read_manifest(folder, "packed", "z2a pack")
    fixed = ("kind", "format", "zero2all", "inputs", "files")
    content = {name: value for name, value in manifest.items() if name not in fixed}
    write_manifest(folder, "packed", manifest["inputs"], content | changes)


def shard_tokens(folder, shard):
    dtype = read_manifest(folder, "packed", "z2a pack")["dtype"]
    return np.memmap(folder / tokens_name(shard), dtype=dtype, mode="r+")


def poison_steps(work, config):
    """Noise in place of every sample of the global batches of the window."""
    data, _ = open_run_data(config, work, False)
    for number in range(BAD_STEPS):
        rows = rows_of_step(data, (FIRST_BAD - 1 + number) * STEP_TOKENS, ROWS)
        for row, (source, sample) in enumerate(zip(rows.sources.tolist(), rows.samples.tolist(), strict=True)):
            split = data.splits[source]
            for column in range(SEQ_LEN):
                token = sample * SEQ_LEN + column
                shard = int(np.searchsorted(split.shard_starts, token, side="right")) - 1
                shard_tokens(split.folder, shard)[token - int(split.shard_starts[shard])] = NOISE[number, row, column]
    for split in data.splits:
        rewrite_manifest(split.folder)


@contextmanager
def in_step(number, action):
    real_step = trainer.train_step

    def step(state, *arguments):
        if state.step == number - 1:
            action()
        return real_step(state, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", step)
        yield


def interrupt():
    raise InterruptedError


def decoder(work):
    tokenizer = load_tokenizer(work.tokenizer)
    return lambda ids: tokenizer.decode(ids, skip_control=False)


def trained(config, work, say=quiet):
    return train(config, work, make_decode=lambda: decoder(work), say=say)


def page(run, name):
    """An incident's JSON, after checking that its page and its text are there."""
    folder = run / "incidents"
    assert (folder / f"{name}.html").is_file()
    assert (folder / f"{name}.txt").is_file()
    return json.loads((folder / f"{name}.json").read_text())


def weights(run):
    return {path.name: path.read_bytes() for path in newest_checkpoint(run).folder.glob("*.safetensors")}


@pytest.fixture(scope="session")
def left_alone(clean, tmp_path_factory):
    work = beside(clean, tmp_path_factory.mktemp("alone"))
    return work.run("run"), trained(settings(), work)


def test_clean_data_raises_no_alarm(left_alone):
    run, summary = left_alone
    assert summary.step == STEPS
    assert not events(run, "spike", "drop", "skip", "rollback")
    assert not (run / "incidents").exists()


@pytest.fixture(scope="session")
def poisoned(clean, tmp_path_factory):
    work = Workspace(shutil.copytree(clean.root, tmp_path_factory.mktemp("poisoned") / "work"))
    poison_steps(work, settings())
    return work


@pytest.fixture(scope="session")
def right_before(poisoned, tmp_path_factory):
    """The run as it stands some steps before the bad data: when it goes on, it has proven its checkpoint by then."""
    work = beside(poisoned, tmp_path_factory.mktemp("before"))
    with in_step(FIRST_BAD - 10, interrupt), pytest.raises(InterruptedError):
        trained(settings(guards=GUARDS), work)
    return work


@pytest.fixture
def resumable(poisoned, right_before, tmp_path):
    """A copy of it, with the words that go on with it."""
    work, path = beside(poisoned, tmp_path / "work", right_before.runs), tmp_path / "config.yaml"
    path.write_text(config_yaml(settings(guards=GUARDS)))
    return work, ["train", path, "--work", work.root]


@pytest.fixture(scope="session")
def recovered(poisoned, right_before, tmp_path_factory):
    work = beside(poisoned, tmp_path_factory.mktemp("recovered"), right_before.runs)
    return work.run("run"), trained(settings(guards=GUARDS), work)


def test_a_run_over_a_poisoned_window_goes_back_leaves_it_out_and_ends_like_the_clean_one(left_alone, recovered):
    run, summary = recovered
    assert summary.step == STEPS
    ended, wanted = (each.held_out["eval/valid/loss"] for each in (summary, left_alone[1]))
    assert ended == pytest.approx(wanted, rel=0.01)
    (rollback,) = events(run, "rollback")
    assert rollback.data["to_step"] == 100
    first, second, third = SkipLedger.load(run / "incidents").entries
    assert [entry.action for entry in (first, second, third)] == ["refuse", "refuse", "rollback"]
    assert (third.first, third.end) == ((FIRST_BAD - 1) * STEP_TOKENS, (FIRST_BAD + 2 + 8) * STEP_TOKENS)
    spikes = [event.step for event in events(run, "spike") if event.data["kind"] == "loss_spike"]
    assert spikes == [FIRST_BAD, FIRST_BAD + 1, FIRST_BAD + 2]


def test_the_page_of_the_spike_shows_the_text_that_was_bad(recovered, poisoned):
    run, _ = recovered
    incident = page(run, f"{FIRST_BAD + 2}-loss_spike")
    assert incident["action"] == "rollback"
    assert "back to the checkpoint of step 100" in incident["done"]
    assert len(incident["samples"]) == ROWS
    for sample in incident["samples"]:
        text = "".join(document["text"] for document in sample["documents"])
        assert text.startswith(decoder(poisoned)(NOISE[2, sample["row"]].tolist())[:20])


@pytest.mark.parametrize("moment", ["decided", "withdrawn"])
def test_a_run_killed_while_it_goes_back_ends_like_the_one_left_alone(moment, recovered, resumable, start):
    work, words = resumable
    killed = start(*words, moment, code=KILL)
    assert killed.wait() == -9, killed.text()
    run = work.run("run")
    assert not events(run, "finish")
    again = start(*words)
    assert again.wait() == 0, again.text()
    assert weights(run) == weights(recovered[0])
    assert SkipLedger.load(run / "incidents").entries == SkipLedger.load(recovered[0] / "incidents").entries
    assert list(pins(run)) == [100]
    assert (run / "checkpoints/step-00000100").is_dir(), "what was gone back to stays"


@pytest.mark.slow
def test_a_run_killed_before_a_rollback_whose_target_rots_meanwhile_moves_nothing_and_says_so(resumable, start):
    work, words = resumable
    killed = start(*words, "decided", code=KILL)
    assert killed.wait() == -9, killed.text()
    set_value(work.run("run"), 100, WEIGHTS, "norm.weight", 1.0, seals=False)
    again = start(*words)
    assert again.wait() == 3, again.text()
    assert "was going back to the checkpoint of step 100, which is damaged or missing" in again.text()
    assert steps_of(work.run("run")) == [120]


def test_a_truncated_record_of_skipped_data_is_rebuilt_to_the_same_bits(recovered, poisoned, tmp_path):
    work = beside(poisoned, tmp_path / "work", recovered[0].parent)
    run = work.run("run")
    wanted, entries = weights(run), SkipLedger.load(run / "incidents").entries
    shutil.rmtree(newest_checkpoint(run).folder)
    for page_file in (run / "incidents").glob(f"{FIRST_BAD}-*"):
        page_file.unlink()  # the checkpoint knows of it, too
    path = run / "incidents/skipped.json"
    path.write_bytes(path.read_bytes()[:100])
    (said,) = [line for line in said_by_run(settings(guards=GUARDS), work) if "skipped.json" in line]
    assert "rebuilt from step-00000180 and the incident pages: 3 decisions" in said
    assert "elete" not in said
    assert SkipLedger.load(run / "incidents").entries == entries
    assert (run / "incidents/skipped.json.damaged").stat().st_size == 100
    assert weights(run) == wanted


@pytest.fixture(scope="session")
def stopped_at_194(left_alone, clean, tmp_path_factory):
    """The clean run from its checkpoint of step 180 on, stopped and saved at step 194."""
    work = beside(clean, tmp_path_factory.mktemp("stopped"), left_alone[0].parent)
    shutil.rmtree(work.run("run") / "checkpoints/step-00000200")
    with in_step(193, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(PreemptedError):
        trained(settings(), work)
    return work


@pytest.fixture
def stopped(stopped_at_194, tmp_path):
    return beside(stopped_at_194, tmp_path / "stopped", stopped_at_194.runs)


@pytest.mark.parametrize(
    ("file", "name", "value", "said"),
    [
        (WEIGHTS, "norm.weight", 1e30, NOT_ACCEPTED),
        (WEIGHTS, "norm.weight", 30.0, NOT_ACCEPTED),
        (MOMENTS, "exp_avg/norm.weight", np.nan, "contains NaN or infinite values"),
        (MOMENTS, "exp_avg_sq/norm.weight", -1e-9, "contains negative values"),
    ],
    ids=["loss not finite", "small spikes", "moment not finite", "moment negative"],
)
def test_a_run_resumed_from_a_damaged_checkpoint_keeps_the_good_one_and_ends_with_the_bits_of_the_clean_run(
    stopped, left_alone, file, name, value, said
):
    run = stopped.run("run")
    set_value(run, 194, file, name, value)
    trained(settings(checkpoint={"every_steps": 15}), stopped)  # saves at step 195, before anything is proven
    (rollback,) = events(run, "rollback")
    withdrawn = [195, 194] if file == WEIGHTS else [194]
    assert (rollback.data["to_step"], rollback.data["withdrawn"]) == (180, withdrawn)
    assert said in rollback.data["reason"]
    if file == WEIGHTS:
        manifest = read_checkpoint_manifest(run / "checkpoints/withdrawn/step-00000195")
        assert manifest["not_good"] == "the updates of these steps were refused: 195"
    assert SkipLedger.load(run / "incidents").entries == (), "the data was not bad"
    assert weights(run) == weights(left_alone[0])


def test_a_run_whose_only_checkpoint_is_damaged_does_not_end_well(stopped):
    work, run = stopped, stopped.run("run")
    shutil.rmtree(run / "checkpoints/step-00000180")
    set_value(run, 194, WEIGHTS, "norm.weight", 1e4)
    for _ in range(2):  # the second one only passes over the data that the first one has refused
        with pytest.raises(AnomalyError, match=r"no step after the checkpoint of step 19\d was accepted"):
            trained(settings(checkpoint={"every_steps": 15}), work)
    assert max(steps_of(run)) < STEPS


@pytest.mark.parametrize(("kept", "gone_back_to"), [(3, [80]), (2, [])])
def test_a_rollback_whose_target_is_rotten_takes_an_older_one_or_moves_nothing(kept, gone_back_to, resumable):
    work, _ = resumable
    run = work.run("run")
    target = run / "checkpoints/step-00000100" / WEIGHTS

    def rot():
        if target.exists():  # and not yet set aside
            target.write_bytes(target.read_bytes()[:-1] + b"\0")

    with in_step(FIRST_BAD, rot):
        summary = trained(settings(guards=GUARDS, checkpoint={"keep_last": kept}), work)
    assert summary.step == STEPS
    assert (run / "checkpoints/damaged/step-00000100.txt").is_file()
    assert [event.data["to_step"] for event in events(run, "rollback")] == gone_back_to
    assert (run / "checkpoints/withdrawn/step-00000120").is_dir() == bool(gone_back_to)


@pytest.fixture
def not_finite(monkeypatch):
    """Make the loss of these steps NaN, and with it every gradient; keeps the state before and after each."""
    around, real_step = {}, trainer.train_step

    def in_steps(*steps):
        def step(state, *arguments):
            if state.step + 1 not in steps:
                return real_step(state, *arguments)
            before, head_loss = copies(state), state.model.head_loss
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(state.model, "head_loss", lambda *given: tuple(x * torch.nan for x in head_loss(*given)))
                pending = real_step(state, *arguments)
            around[state.step] = before, copies(state)
            return pending

        monkeypatch.setattr(trainer, "train_step", step)
        return around

    return in_steps


def test_a_step_that_is_not_finite_changes_no_bit_of_weights_and_moments(work, not_finite):
    around = not_finite(6)
    assert trained(settings(**SHORT), work).step == 12
    assert_same_bits(*around[6])
    run = work.run("run")
    assert [event.step for event in events(run, "skip")] == [6]
    assert page(run, "6-nonfinite")["action"] == "continue"
    losses = read_run(run).series["loss"]
    assert np.isnan(losses.value).sum() == 1
    assert losses.step.tolist() == list(range(1, 13))
    doubts = [read_checkpoint_manifest(folder).get("not_good") for folder in list_checkpoints(run)]
    refused = "the updates of these steps were refused: 6"  # for rollback_within_steps, 16
    assert (steps_of(run), doubts) == ([12, 8, 4], [refused, refused, None])


@pytest.fixture
def command(work, tmp_path, z2a):

    def run(config):
        path = tmp_path / "config.yaml"
        path.write_text(config_yaml(config))
        return z2a("train", path, "--work", work.root)

    return run


def test_a_run_that_stopped_itself_names_its_page_and_does_not_go_on_from_memory(work, not_finite, tmp_path, command):
    """What is in memory is newer than the disk, and may be a part of what went wrong."""
    not_finite(6)
    memory = {"memory_every_steps": 1, "memory_folder": str(tmp_path), "supervise": False}
    config = settings(**SHORT, resilience=memory, guards={"nonfinite": "stop"})
    run, stopped = work.run("run"), command(config)
    assert stopped.code == 12
    assert str(run / "incidents/6-nonfinite.html") in stopped.err
    assert "Traceback" not in stopped.err
    incident = page(run, "6-nonfinite")
    assert incident["action"] == "stop"
    assert incident["samples"][0]["documents"][0]["text"]
    again = command(config)
    assert again.code == 12
    assert "resumed run at step 4 from step-00000004" in again.out


def test_a_run_that_keeps_failing_ends_with_code_12_and_weights_from_before(work, not_finite, command):
    not_finite(*range(6, 12))
    ended = command(settings(**SHORT, guards={"max_skips_in_a_row": 3}))
    assert ended.code == 12
    assert "Updates skipped in a row: 3" in ended.err
    assert "The weights are those of step 5" in ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("step 6 is not finite")]
    assert f"was refused. {work.run('run')}/incidents/6-nonfinite.html shows the documents" in line
    assert page(work.run("run"), "8-nonfinite")["action"] == "stop"


def test_data_packed_with_another_tokenizer_is_refused(work):
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=360))
    with pytest.raises(BadInputError, match=r"made with the tokenizer .* holds .* Run `z2a pack` again") as caught:
        trained(settings(**SHORT), work)
    assert caught.value.exit_code == 3
    assert not list_checkpoints(work.run("run"))


def test_an_id_beyond_the_vocabulary_is_named_with_its_file_before_the_model_sees_it(work):
    folder = work.packed / "en/train"
    for shard in range(len(open_split(work.packed, "en", "train").shards)):
        shard_tokens(folder, shard)[:] = VOCABULARY + 7
    rewrite_manifest(folder)
    with pytest.raises(BadInputError, match=r"packed.en.train: token \d+ of sample .* has the id 407.*z2a data verify"):
        trained(settings(**SHORT), work)
    rewrite_manifest(folder, max_id=VOCABULARY + 7)
    with pytest.raises(BadInputError, match=r"`max_id` is 407, expected an id below vocab_size \(400\)"):
        trained(settings(**SHORT), work)


def test_a_disk_that_cannot_hold_a_checkpoint_is_noticed_before_the_first_step(work, monkeypatch):
    usage = shutil.disk_usage(work.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=20_000))
    with pytest.raises(DiskError, match="Free some space") as caught:
        trained(settings(**SHORT), work)
    assert caught.value.exit_code == 4
    assert "loss" not in read_run(work.run("run")).series


def test_guards_of_a_run_stopped_where_a_stage_begins_know_what_those_of_the_one_left_alone_know(work):
    """A checkpoint at the border is saved before the stage begins, and the window starts over with the stage."""
    late = [{"name": "late", "from_step": 8, "mixture": {"zh": 1}}]
    changes = {**SHORT, "checkpoint": {"every_steps": 1}}
    trained(settings("alone", late, **changes), work)
    with in_step(9, interrupt), pytest.raises(InterruptedError):
        trained(settings("stopped", late, **changes), work)
    trained(settings("stopped", late, **changes), work)
    alone, stopped = (newest_checkpoint(work.run(name)).record["guards"] for name in ("alone", "stopped"))
    assert len(alone["detector"]["losses"]) == 4
    assert stopped == alone
