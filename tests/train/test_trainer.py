"""A whole run inside this process: what it logs, what it refuses, what it does when it is run again."""

import dataclasses
import math
import shutil

import numpy as np
import pytest
import torch

from tests.train.checkpoints.conftest import reseal
from tests.train.conftest import prepared_run, quiet, said_by_run
from tests.train.states import events, steps_of
from zero2all.common import jsonio
from zero2all.common.errors import AnomalyError, BadInputError, UsageError
from zero2all.config import load_config
from zero2all.config.training import ValidationConfig
from zero2all.estimate.flops import flops_per_token
from zero2all.infer.load import load_run
from zero2all.packed.shard_format import open_split
from zero2all.track.reader import find_runs, read_run
from zero2all.train import train_step as step_module
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.manifest import read_manifest
from zero2all.train.run import train
from zero2all.train.sanity import check_last_loss, expected_first_loss, risen_loss
from zero2all.train.saved_config import load_run_config
from zero2all.train.trainer import Trainer
from zero2all.train.validate import held_out_metrics, held_out_scores, open_valid_splits, valid_sources


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def finished(shared_work, config, tmp_path_factory):
    """A finished run in a workspace of its own (packed data shared), with its summary and its notes."""
    work = dataclasses.replace(shared_work, root=tmp_path_factory.mktemp("finished"))
    work.packed.symlink_to(shared_work.packed)
    notes: list[str] = []
    summary = train(config(), work, say=notes.append)
    return work, summary, notes


@pytest.fixture
def again(work, finished):
    """A workspace of the test's own with a copy of the finished run."""
    shutil.copytree(finished[0].run("run"), work.run("run"))
    return work


@pytest.fixture
def listed(again):
    return lambda: find_runs([again.runs])[0]


def test_every_step_is_logged_with_loss_rate_norm_speed_and_each_channel(finished):
    work, _, _ = finished
    data = read_run(work.run("run"))
    for name in ("loss", "lr", "grad_norm", "tokens_per_second", "loss/en", "bpb/en", "loss/zh", "bpb/zh", "time/step"):
        assert data.series[name].step.tolist() == list(range(1, 9)), name
        assert np.isfinite(data.series[name].value).all()
    assert data.series["loss"].tokens.tolist() == [128 * step for step in range(1, 9)]
    assert data.problems == []
    wanted = data.series["loss/zh"].value / math.log(2) / open_split(work.packed, "zh", "train").bytes_per_token
    assert data.series["bpb/zh"].value == pytest.approx(wanted)
    speed, flops = data.series["tokens_per_second"].value, flops_per_token(load_run_config(work.run("run")).model, 32)
    assert data.series["tflops"].value == pytest.approx(speed * flops["causal"] / 1e12)
    assert not [name for name in data.series if name.startswith("mfu/")], "the peak of a CPU is not known"


def test_held_out_losses_are_logged_when_due_and_the_summary_tells_how_the_run_ended(finished):
    work, summary, _ = finished
    series = read_run(work.run("run")).series
    assert sorted(summary.held_out) == [
        f"eval/valid/{kind}{channel}" for kind in ("bpb", "loss") for channel in ("", "/en", "/zh")
    ]
    for name, value in summary.held_out.items():
        assert series[name].step.tolist() == [4, 8]
        assert series[name].value[-1] == value
    assert summary.held_out["eval/valid/loss/en"] < math.log(400)  # it learned something
    assert (summary.run, summary.step, summary.tokens) == ("run", 8, 8 * 128)
    assert summary.loss == series["loss"].value[-1]
    assert summary.channel_losses == {name: series[f"loss/{name}"].value[-1] for name in ("en", "zh")}
    assert summary.tokens_per_second == pytest.approx(summary.tokens / summary.seconds)
    assert 0 < summary.first_loss_seconds < summary.seconds + 60
    assert read_run(work.run("run")).events[-1].data["first_loss_seconds"] == summary.first_loss_seconds


def test_tokens_that_other_groups_trained_without_this_one_are_not_its_speed(work, config, monkeypatch):
    def apply_changes(training):
        if training.state.step != 2:
            return False
        training.state.step, training.state.tokens = 7, 7 * 128
        return True

    monkeypatch.setattr(Trainer, "apply_changes", apply_changes)
    summary = train(config(), work, say=quiet)
    assert summary.tokens == 8 * 128
    assert summary.tokens_per_second == pytest.approx(3 * 128 / summary.seconds), "steps 1, 2 and 8"


def test_events_tell_the_story_of_the_run(finished):
    work, _, notes = finished
    found = [event for event in read_run(work.run("run")).events if event.kind != "prepared"]
    events = [(event.kind, event.step) for event in found]
    saves = [("checkpoint", step) for step in (3, 6, 8)]
    assert events == [("start", 0), ("sanity", 0), *saves, ("finish", 8)]
    start = found[0].data
    assert start["notes"] == notes[:-3]  # those on disk space, on checkpoints and on the held-out loss come later
    assert "no checkpoint may be old enough to go back to: 2 are kept, one every 3 steps" in notes[-2]
    assert start["environment"]["cpu_threads"] == 1


def test_general_text_above_2_at_the_planned_end_is_noted_and_code_is_not(finished):
    _, summary, notes = finished
    assert min(loss for name, loss in summary.held_out.items() if "/loss/" in name) > 2, "a run of 8 steps"
    (note,) = [note for note in notes if note.startswith("note: the held-out loss is still above 2")]
    assert "en " in note
    config = load_config("quickstart", ["--model.vocab_size=1000", "--optim.lr_max=0.5"])
    losses = {"eval/valid/loss/code": 3.0, "eval/valid/loss/en": 1.9}
    assert check_last_loss(losses, config) == []
    few_steps = {**losses, "eval/valid/loss/en": 6.95}  # ln(1000) = 6.91
    (note,) = check_last_loss(few_steps, config)
    assert "still falling, train it longer" in note
    assert check_last_loss(few_steps, config, can_train_longer=False) == [], "it has risen"
    (note,) = check_last_loss({**losses, "eval/valid/loss/en": 14.0}, config)
    assert f"above that of an untrained model, at most {expected_first_loss(config.model)[1]:.2f}: en 14.00" in note
    assert "lower optim.lr_max (now 0.5)" in note
    assert risen_loss((357, 2.99), 3.0) == risen_loss(None, 3.0) == []


def test_a_checkpoint_has_its_held_out_loss_and_the_lowest_one_stays(work, config):
    """A rate that grows too high: the held-out loss falls first, then rises. All displays take what was recorded."""
    often, hot = {"every_steps": 2}, {"name": "hot", "from_step": 4, "schedule": {"lr_max": 20.0, "warmup_steps": 8}}
    fields = {"train": {"steps": 12}, "optim": {"lr_max": 0.02}, "schedule": {"kind": "constant"}}
    settings = config([hot], checkpoint=often, validation=often, **fields)
    notes: list[str] = []
    summary = train(settings, work, say=notes.append)
    run, data = work.run("run"), read_run(work.run("run"))
    losses = data.series["eval/valid/loss"]
    values = dict(zip(losses.step.tolist(), losses.value.tolist(), strict=True))
    best = min(values, key=values.get)
    assert best < 10, "the loss rises before the end"
    assert steps_of(run) == [12, 10, best]
    for folder in list_checkpoints(run):
        kept = read_manifest(folder)["held_out"]
        assert kept["loss"] == values[step_of(folder)]
        assert kept["tokens"] == sum(found["tokens"] for found in kept["channels"].values())
    lowest = f"held-out loss was lowest at step {best} ({values[best]:.4f})."
    said = f"{lowest} It has risen since by {values[12] - values[best]:.4f}: stop earlier"
    assert any(said in note for note in notes), notes
    assert any(said in event.data["problem"] for event in events(run, "warning")), "the board shows it"
    assert not any("train it longer" in note for note in notes)
    assert (load_run(work, "run", "best").step, load_run(work, "run").step) == (best, 12)
    again: list[str] = []
    assert train(settings, work, say=again.append).held_out == summary.held_out
    assert any(said in note for note in again), "the lowest loss is in the checkpoint"


def test_sources_that_the_run_does_not_read_are_not_in_its_held_out_loss(shared_work, config):
    """`z2a eval` scored all packed sources, training those of its mixture: two values for one checkpoint."""
    only_en = {"data": {"mixture": {"en": 1}}, "train": {"steps": 3}}
    late = [{"name": "s", "from_step": 1, "mixture": {"zh": 1}}]
    assert valid_sources(shared_work.packed, config(**only_en)) == ["en"]
    assert valid_sources(shared_work.packed, config(**only_en, stages=late)) == ["en", "zh"]
    assert valid_sources(shared_work.packed, config(data={"mixture": None})) == ["en", "zh"]


def test_a_micro_batch_that_does_not_divide_is_noted(work, config):
    def notes(samples):  # of 4 rows a step
        return "\n".join(prepared_run(config(train={"micro_batch_samples": samples}), work)[0].notes)

    assert "micro-batch: 3 does not divide 4 samples, so the last pass of a step has 1" in notes(3)
    assert "does not divide" not in notes(2) + notes(8)


def test_the_newest_two_checkpoints_and_the_resolved_config_are_kept(finished):
    work, _, _ = finished
    run = work.run("run")
    assert steps_of(run) == [8, 6]
    assert load_run_config(run).model.vocab_size == 400
    manifest = newest_checkpoint(run).manifest
    assert manifest["environment"]["torch"] == torch.__version__
    assert manifest["ops"]["optimizer"]["got"] == "fused"
    assert not list(run.rglob("*.partial-*"))


def test_logging_less_often_still_logs_the_last_step(work, config):
    train(config(train={"steps": 5}, track={"log_every_steps": 2}), work, say=quiet)
    assert read_run(work.run("run")).series["loss"].step.tolist() == [2, 4, 5]


def test_sixteen_bits_on_a_cpu_are_said_to_be_slow_without_a_page_of_frames(work, config, recwarn):
    notes = said_by_run(config(train={"precision": "bfloat16", "steps": 3}), work)
    assert any("bfloat16 on a CPU" in note and "float32" in note for note in notes)
    assert not [warning for warning in recwarn if "mkldnn" in str(warning.message)]


def test_a_finished_run_run_again_changes_nothing_and_still_reports(again, listed, finished, config):
    run, first = again.run("run"), finished[1]
    before = folder_bytes(run / "checkpoints/step-00000008")
    notes: list[str] = []
    summary = train(config(), again, say=notes.append)
    assert folder_bytes(run / "checkpoints/step-00000008") == before
    assert steps_of(run) == [8, 6]
    assert summary.held_out == first.held_out
    assert (summary.step, summary.tokens, summary.loss) == (8, 8 * 128, None)
    assert "resumed run at step 8 from step-00000008" in notes
    assert read_run(run).series["loss"].step.tolist() == list(range(1, 9))
    assert [path.name for path in (run / "metrics").iterdir()] == ["train-1.jsonl"], "no other attempt"
    assert (listed().status.state, listed().status.attempt, listed().last_loss) == ("finished", 1, first.loss)


def test_a_run_that_died_before_it_could_say_that_it_was_done_says_so_when_run_again(again, listed, finished, config):
    metrics = again.run("run") / "metrics" / "train-1.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))  # without its `end`
    train(config(), again, say=quiet)
    assert (listed().status.state, listed().status.attempt) == ("finished", 2)
    assert listed().last_loss == finished[1].loss, "of the attempt that trained"


def test_fresh_starts_over_but_with_a_mistake_in_it_destroys_nothing(again, config):
    with pytest.raises(UsageError, match="neither a packed source nor a channel"):
        train(config(data={"mixture": {"english": 1}}), again, fresh=True, say=quiet)
    assert steps_of(again.run("run")) == [8, 6]
    notes = said_by_run(config(train={"steps": 3, "seed": 7}), again, fresh=True)
    assert not [note for note in notes if "resumed" in note or "changed" in note]
    assert steps_of(again.run("run")) == [3]
    assert [path.name for path in (again.run("run") / "metrics").iterdir()] == ["train-1.jsonl"]


def test_a_run_that_died_before_its_first_checkpoint_says_that_it_begins_again(work, config):
    settings = config(guards={"nonfinite": "stop"}, optim={"lr_max": 1e30}, schedule={"warmup_steps": 0})
    with pytest.raises(AnomalyError):
        train(settings, work, say=quiet)
    notes = said_by_run(config(train={"steps": 2}, schedule={"warmup_steps": 0}), work)
    assert "run was started before, but has no checkpoint yet. It begins at step 0" in notes


def test_a_run_whose_checkpoints_are_gone_does_not_start_over_without_asking(again, config):
    run = again.run("run")
    shutil.rmtree(run / "checkpoints")
    (run / "metrics").rename(run / "away")
    with pytest.raises(BadInputError, match=f"step 8 was saved, but {run}/checkpoints no longer contains it"):
        train(config(), again, say=quiet)
    (run / "away").rename(run / "metrics")
    (run / "last_saved.json").unlink()
    before = sorted((run / "metrics").iterdir())
    with pytest.raises(BadInputError, match=r"the metrics say that step 8 was saved, but(?s:.*)another --train.name"):
        train(config(), again, say=quiet)
    assert sorted((run / "metrics").iterdir()) == before
    assert train(config(train={"steps": 3}), again, fresh=True, say=quiet).step == 3


def test_changed_settings_are_listed_and_refused(again, config):
    changed = config(train={"steps": 9}, optim={"lr_max": 0.02}, model={"rope_theta": 5000.0})
    with pytest.raises(UsageError) as caught:
        train(changed, again, say=quiet)
    listed = ("- train.steps: 8 -> 9", "- optim.lr_max: 0.01 -> 0.02", "- model.rope_theta: 10000.0 -> 5000.0")
    for words in (*listed, "--accept-changes", "--fresh"):
        assert words in str(caught.value)
    assert caught.value.exit_code == 2
    assert steps_of(again.run("run")) == [8, 6]


def test_settings_that_cannot_change_the_result_may_change(again, config):
    free = {"validation": {"every_steps": 1}, "track": {"log_every_steps": 3}, "guards": {"max_skips_in_a_row": 3}}
    free |= {"checkpoint": {"every_steps": 1, "keep_last": 5}, "resilience": {"save_on_signal": False}}
    assert "changed since the last attempt: checkpoint.keep_last: 2 -> 5" in said_by_run(config(**free), again)


def test_more_tokens_per_step_repeat_and_skip_no_sample(work, config, monkeypatch):
    seen: list[int] = []
    forward_backward = step_module.forward_backward

    def watch(state, batch, *rest):
        seen.extend(range(batch.first_position, batch.first_position + len(batch.tokens)))
        return forward_backward(state, batch, *rest)

    monkeypatch.setattr(step_module, "forward_backward", watch)
    train(config(train={"steps": 3}), work, say=quiet)
    train(config(train={"steps": 5, "tokens_per_step": 256}), work, accept_changes=True, say=quiet)
    assert seen == list(range(3 * 4 + 2 * 8))


def test_data_that_changed_since_is_refused(again, config, repack):
    repack(again, 9)
    with pytest.raises(UsageError, match="the packed data, or the order in which it is read, has changed"):
        train(config(), again, say=quiet)
    notes = said_by_run(config(train={"steps": 9}), again, accept_changes=True)
    assert "the order of the data has changed: from here on samples may be repeated or left out" in notes


def test_another_shape_or_optimizer_is_refused_even_when_changes_are_accepted(again, config):
    with pytest.raises(BadInputError, match=r"embedding.weight: \(448, 32\) instead of \(448, 64\)"):
        train(config(model={"hidden_size": 64}), again, accept_changes=True, say=quiet)
    with pytest.raises(UsageError, match=r"another optimizer \(optim.kind: 'adamw' -> 'adamw_8bit'\).*cannot continue"):
        train(config(optim={"kind": "adamw_8bit"}), again, accept_changes=True, say=quiet)


def test_resume_restores_the_thread_count_it_was_started_with_and_says_so_when_another_is_asked_for(again, config):
    torch.set_num_threads(2)
    notes = said_by_run(config(parallel={"cpu_threads": None}), again, accept_changes=True)
    assert torch.get_num_threads() == 1
    assert not [note for note in notes if "not bit-exact" in note]
    notes = said_by_run(config(train={"steps": 9}, parallel={"cpu_threads": 2}), again, accept_changes=True)
    assert "not bit-exact with the earlier attempt, because of: cpu_threads 1 -> 2" in notes
    assert newest_checkpoint(again.run("run")).manifest["environment"]["cpu_threads"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_card_is_an_error_before_anything_is_written(work, config):
    with pytest.raises(UsageError, match="torch sees no CUDA device"):
        train(config(parallel={"device": "cuda"}), work, say=quiet)
    assert not (work.run("run") / "config.yaml").exists()


def test_data_that_has_more_ids_than_the_model_rows_or_is_not_there_is_an_error_before_step_0(work, config):
    with pytest.raises(UsageError, match=r"model\.vocab_size is 399, but the data was packed with 400"):
        train(config(model={"vocab_size": 399}), work, say=quiet)
    (work.packed / "report.json").unlink()
    with pytest.raises(BadInputError, match="z2a pack"):
        train(config(), work, say=quiet)
    assert steps_of(work.run("run")) == []


def test_metrics_that_cannot_be_written_do_not_stop_the_run_and_are_reported_at_its_end(work, config):
    run = work.run("run")
    run.mkdir(parents=True)
    (run / "metrics").write_text("in the way")
    said: list[str] = []
    assert train(config(train={"steps": 3}), work, say=said.append).step == 3
    assert any(text.startswith("metrics: opening the metrics file: ") for text in said)
    assert any("could not be written to" in text for text in said)


def test_held_out_loss_is_that_of_the_first_held_out_samples_without_dropout(work, config):
    context, state = prepared_run(config(), work)
    model = state.model
    settings = dataclasses.replace(context.config, validation=ValidationConfig(tokens_per_source=96, batch_samples=2))
    found = held_out_metrics(held_out_scores(model, context.valid, settings))
    assert model.training  # as it was before
    assert held_out_metrics(held_out_scores(model, context.valid, settings)) == found
    model.eval()
    split = open_split(work.packed, "zh", "valid")
    rows = torch.from_numpy(np.stack([split.read(sample * 32, 33) for sample in range(3)]))
    with torch.no_grad():
        wanted = float(model.loss(rows[:, :-1], rows[:, 1:])[1].double().mean())
    assert found["eval/valid/loss/zh"] == pytest.approx(wanted, rel=1e-6)
    assert found["eval/valid/bpb/zh"] == pytest.approx(wanted / math.log(2) / split.bytes_per_token, rel=1e-6)


def test_a_source_with_too_little_held_out_text_is_left_out_and_named(work, config):
    (valid,) = open_valid_splits(work.packed, ["zh"])
    manifest = valid.folder / "manifest.json"
    text = manifest.read_text()
    emptied = {f'"shards": {valid.manifest["shards"]}': '"shards": 0', f'"tokens": {valid.tokens}': '"tokens": 0'}
    for old, new in emptied.items():
        text = text.replace(old, new)
    manifest.write_text(text)
    notes: list[str] = []
    summary = train(config(train={"steps": 3}), work, say=notes.append)
    assert "held-out loss: not measured for channels with less than one sample: zh" in notes
    assert sorted(summary.held_out) == [f"eval/valid/{kind}{of}" for kind in ("bpb", "loss") for of in ("", "/en")]


@pytest.mark.parametrize(
    "change",
    [
        *({"state": {"guards": guards}} for guards in ({"format": 99}, {"ledger": 5}, {"ledger": [{"first": "x"}]})),
        {"environment": None},
        {"order": {"stages": 5}},
        {"order": {"stages": [{"name": "main", "from_token": 0, "seq_len": 0, "units": {}}]}},
        {"data": 5},
    ],
    ids=str,
)
def test_a_record_that_no_run_of_ours_would_keep_is_refused_in_words(again, config, change):
    folder, details = list_checkpoints(again.run("run"))[0], dict(change)
    state = jsonio.loads_exact((folder / "state.json").read_bytes(), "state") | details.pop("state", {})
    (folder / "state.json").write_bytes(jsonio.dumps_exact(state))
    reseal(folder, **details)
    with pytest.raises(BadInputError, match=r"not have the form that this version .* writes.*start over with --fresh"):
        train(config(train={"steps": 9}), again, accept_changes=True, say=quiet)


def test_a_run_folder_of_an_earlier_version_is_continued_to_the_same_bits(again, config):
    kept, last = again.run("run") / "config.yaml", again.run("run") / "checkpoints/step-00000008"
    kept.write_text(kept.read_text().replace("min_lr_ratio:", "lr_min_share:"))
    wanted = folder_bytes(last)
    shutil.rmtree(last)
    notes = said_by_run(config(), again)
    found = folder_bytes(last)
    assert all(found[name] == data for name, data in wanted.items() if name.endswith(".safetensors"))
    assert not [note for note in notes if "changed" in note]
    assert "min_lr_ratio: 0.1" in kept.read_text()
