"""A whole run inside this process: what it logs, what it refuses, what it does when it is run again."""

import dataclasses
import math
import shutil
import threading

import numpy as np
import pytest
import torch

from zero2all.common import jsonio
from zero2all.common.errors import AnomalyError, BadInputError, RunLockedError, UsageError
from zero2all.common.files import crc32c_of
from zero2all.config import load_config
from zero2all.config.training import ValidationConfig
from zero2all.estimate.flops import flops_per_token
from zero2all.infer.load import load_run
from zero2all.packed.shard_format import open_split
from zero2all.parallel.world import World
from zero2all.track.reader import find_runs, read_run
from zero2all.train import train_step as step_module
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.manifest import OWN_FIELDS, manifest_bytes, read_manifest
from zero2all.train.checkpoints.run_lock import hold_run
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.run import train
from zero2all.train.sanity import check_last_loss, expected_first_loss, risen_loss
from zero2all.train.saved_config import load_run_config
from zero2all.train.setup import prepare
from zero2all.train.trainer import Trainer
from zero2all.train.validate import held_out_metrics, held_out_scores, open_valid_splits, valid_sources


def steps_of(run):
    return [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(run)]


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def prepared_run(settings, work, fresh=False):
    return prepare(settings, work, World(), CheckpointStore(work.run(settings.train.name)), fresh=fresh)


def quiet(_text):
    pass


# ---- what a run leaves behind ----


@pytest.fixture(scope="module")
def finished(shared_work, config, tmp_path_factory):
    """A finished run in a workspace of its own (packed data shared), with its summary and its notes."""
    work = dataclasses.replace(shared_work, root=tmp_path_factory.mktemp("finished"))
    work.packed.symlink_to(shared_work.packed)
    notes: list[str] = []
    summary = train(config(), work, say=notes.append)
    return work, summary, notes


def test_every_step_is_logged_with_loss_rate_norm_speed_and_each_channel(finished):
    work, _, _ = finished
    data = read_run(work.run("run"))
    for name in ("loss", "lr", "grad_norm", "tokens_per_second", "loss/en", "bpb/en", "loss/zh", "bpb/zh", "time/step"):
        assert data.series[name].step.tolist() == list(range(1, 9)), name
        assert np.isfinite(data.series[name].value).all()
    assert data.series["loss"].tokens.tolist() == [128 * step for step in range(1, 9)]
    assert data.problems == []


def test_bits_per_byte_are_nats_over_the_bytes_of_a_token(finished):
    work, _, _ = finished
    data = read_run(work.run("run"))
    for channel in ("en", "zh"):
        bytes_per_token = open_split(work.packed, channel, "train").bytes_per_token
        wanted = data.series[f"loss/{channel}"].value / math.log(2) / bytes_per_token
        assert data.series[f"bpb/{channel}"].value == pytest.approx(wanted)


def test_held_out_losses_are_logged_when_due_and_at_the_end(finished):
    work, summary, _ = finished
    data = read_run(work.run("run"))
    assert sorted(summary.held_out) == [
        f"eval/valid/{kind}{channel}" for kind in ("bpb", "loss") for channel in ("", "/en", "/zh")
    ]
    for name, value in summary.held_out.items():
        assert data.series[name].step.tolist() == [4, 8]
        assert data.series[name].value[-1] == value
    assert data.series["eval/valid/loss/en"].value[-1] < math.log(400)  # it learned something


def test_the_summary_tells_how_the_run_ended(finished):
    work, summary, _ = finished
    data = read_run(work.run("run"))
    assert (summary.run, summary.step, summary.tokens) == ("run", 8, 8 * 128)
    assert summary.loss == data.series["loss"].value[-1]
    assert summary.channel_losses == {name: data.series[f"loss/{name}"].value[-1] for name in ("en", "zh")}
    assert summary.tokens_per_second == pytest.approx(summary.tokens / summary.seconds)


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


def test_tflops_and_the_seconds_to_the_first_loss_are_recorded(finished):
    work, summary, _ = finished
    data = read_run(work.run("run"))
    config = load_run_config(work.run("run"))
    speed, tflops = data.series["tokens_per_second"].value, data.series["tflops"].value
    assert tflops == pytest.approx(speed * flops_per_token(config.model, config.data.seq_len)["causal"] / 1e12)
    assert not [name for name in data.series if name.startswith("mfu/")], "the peak of a CPU is not known"
    assert 0 < summary.first_loss_seconds < summary.seconds + 60
    assert data.events[-1].data["first_loss_seconds"] == summary.first_loss_seconds


def test_general_text_above_2_at_the_planned_end_is_noted_and_code_is_not(finished):
    _, summary, notes = finished
    assert min(loss for name, loss in summary.held_out.items() if "/loss/" in name) > 2, "a run of 8 steps"
    (note,) = [note for note in notes if note.startswith("note: the held-out loss is still above 2")]
    assert "en " in note
    assert "still falling, train it longer" in note
    config = load_config("quickstart", ["--model.vocab_size=1000", "--optim.lr_max=0.5"])
    losses = {"eval/valid/loss/code": 3.0, "eval/valid/loss/en": 1.9}
    assert check_last_loss(losses, config) == []
    (note,) = check_last_loss({**losses, "eval/valid/loss/en": 6.95}, config)  # ln(1000) = 6.91: a few steps were made
    assert "still falling, train it longer" in note
    (note,) = check_last_loss({**losses, "eval/valid/loss/en": 14.0}, config)
    assert f"above that of an untrained model, at most {expected_first_loss(config.model)[1]:.2f}: en 14.00" in note
    assert "lower optim.lr_max (now 0.5)" in note


def test_a_checkpoint_has_its_held_out_loss_and_the_lowest_one_stays(work, config):
    """A rate that grows too high: the held-out loss falls first, then rises. All displays take what was recorded."""
    settings = config(
        train={"steps": 12},
        optim={"lr_max": 0.02},
        schedule={"kind": "constant"},
        checkpoint={"every_steps": 2},
        validation={"every_steps": 2},
        stages=[{"name": "hot", "from_step": 4, "schedule": {"lr_max": 20.0, "warmup_steps": 8}}],
    )
    notes: list[str] = []
    summary = train(settings, work, say=notes.append)
    run, losses = work.run("run"), read_run(work.run("run")).series["eval/valid/loss"]
    values = dict(zip(losses.step.tolist(), losses.value.tolist(), strict=True))
    best = min(values, key=values.get)
    assert best < 10, "the loss rises before the end"
    assert steps_of(run) == [12, 10, best]
    for folder in list_checkpoints(run):
        kept = read_manifest(folder)["held_out"]
        assert kept["loss"] == values[step_of(folder)]
        assert kept["tokens"] == sum(found["tokens"] for found in kept["channels"].values())
    assert summary.held_out["eval/valid/loss"] == values[12]
    rise = values[12] - values[best]
    said = (
        f"held-out loss was lowest at step {best} ({values[best]:.4f}). It has risen since by {rise:.4f}: stop earlier"
    )
    assert any(said in note for note in notes), notes
    warnings = [event.data["problem"] for event in read_run(run).events if event.kind == "warning"]
    assert any(said in problem for problem in warnings), "the board shows it"
    assert not any("train it longer" in note for note in notes)
    assert (load_run(work, "run", "best").step, load_run(work, "run").step) == (best, 12)
    again: list[str] = []
    assert train(settings, work, say=again.append).held_out == summary.held_out
    assert any(said in note for note in again), "the lowest loss is in the checkpoint"


def test_the_advice_to_train_longer_is_not_given_when_the_loss_has_risen():
    config = load_config("quickstart", ["--model.vocab_size=1000"])
    losses = {"eval/valid/loss/en": 3.0}
    assert "train it longer" in check_last_loss(losses, config)[0]
    assert check_last_loss(losses, config, can_train_longer=False) == []
    assert risen_loss((357, 2.9), 3.0) == [
        "held-out loss was lowest at step 357 (2.9000). It has risen since by 0.1000: stop earlier, use more text, or "
        "more weight decay or dropout."
    ]
    assert risen_loss((357, 2.99), 3.0) == risen_loss(None, 3.0) == []


def test_sources_that_the_run_does_not_read_are_not_in_its_held_out_loss(work, config):
    """`z2a eval` scored all packed sources, training those of its mixture: two values for one checkpoint."""
    settings = config(data={"mixture": {"en": 1}}, train={"steps": 3})
    assert valid_sources(work.packed, settings) == ["en"]
    assert valid_sources(work.packed, config(stages=[{"name": "s", "from_step": 1, "mixture": {"zh": 1}}])) == [
        "en",
        "zh",
    ]
    assert valid_sources(work.packed, config(data={"mixture": None})) == ["en", "zh"]


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_a_micro_batch_that_does_not_divide_is_noted(work, config, samples):
    notes = "\n".join(prepared_run(config(train={"micro_batch_samples": samples}), work)[0].notes)  # 4 rows a step
    is_noted = "micro-batch: 3 does not divide 4 samples, so the last pass of a step has 1" in notes
    assert is_noted == ("does not divide" in notes) == (samples == 3)


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
    notes: list[str] = []
    train(config(train={"precision": "bfloat16"}), work, say=notes.append)
    assert any("bfloat16 on a CPU" in note and "float32" in note for note in notes)
    assert not [warning for warning in recwarn if "mkldnn" in str(warning.message)]


# ---- run again ----


def test_a_finished_run_run_again_changes_nothing_and_still_reports(work, config):
    first = train(config(), work, say=quiet)
    before = folder_bytes(work.run("run") / "checkpoints/step-00000008")
    notes: list[str] = []
    again = train(config(), work, say=notes.append)
    assert folder_bytes(work.run("run") / "checkpoints/step-00000008") == before
    assert steps_of(work.run("run")) == [8, 6]
    assert again.held_out == first.held_out
    assert (again.step, again.tokens, again.loss) == (8, 8 * 128, None)
    assert "resumed run at step 8 from step-00000008" in notes
    data = read_run(work.run("run"))
    assert data.series["loss"].step.tolist() == list(range(1, 9))
    (listed,) = find_runs([work.runs])
    assert [path.name for path in (work.run("run") / "metrics").iterdir()] == ["train-1.jsonl"], "no other attempt"
    assert (listed.status.state, listed.status.attempt, listed.last_loss) == ("finished", 1, first.loss)


def test_a_run_that_died_before_it_could_say_that_it_was_done_says_so_when_run_again(work, config):
    train(config(), work, say=quiet)
    metrics = work.run("run") / "metrics" / "train-1.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))  # without its `end`
    train(config(), work, say=quiet)
    (listed,) = find_runs([work.runs])
    assert (listed.status.state, listed.status.attempt) == ("finished", 2)
    assert listed.last_loss == read_run(work.run("run")).series["loss"].value[-1], "of the attempt that trained"


def test_fresh_starts_over(work, config):
    train(config(train={"steps": 3}), work, say=quiet)
    first = folder_bytes(work.run("run") / "checkpoints/step-00000003")
    notes: list[str] = []
    train(config(train={"steps": 3, "seed": 7}), work, fresh=True, say=notes.append)
    assert not [note for note in notes if "resumed" in note or "changed" in note]
    assert folder_bytes(work.run("run") / "checkpoints/step-00000003") != first
    assert [path.name for path in (work.run("run") / "metrics").iterdir()] == ["train-1.jsonl"]


def test_fresh_with_a_mistake_in_it_destroys_nothing(work, config):
    train(config(train={"steps": 3}), work, say=quiet)
    with pytest.raises(UsageError, match="neither a packed source nor a channel"):
        train(config(data={"mixture": {"english": 1}}), work, fresh=True, say=quiet)
    assert steps_of(work.run("run")) == [3]


def test_a_run_that_died_before_its_first_checkpoint_says_that_it_begins_again(work, config):
    settings = config(guards={"nonfinite": "stop"}, optim={"lr_max": 1e30}, schedule={"warmup_steps": 0})
    with pytest.raises(AnomalyError):
        train(settings, work, say=quiet)
    notes: list[str] = []
    train(config(train={"steps": 2}, schedule={"warmup_steps": 0}), work, say=notes.append)
    assert "run was started before, but has no checkpoint yet. It begins at step 0" in notes


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_run_ends_with_the_same_bits(work, config):
    train(config(), work, say=quiet)
    wanted = folder_bytes(work.run("run") / "checkpoints/step-00000008")
    path = work.run("run") / "checkpoints/step-00000008/model-00000-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    train(config(), work, say=quiet)
    found = folder_bytes(work.run("run") / "checkpoints/step-00000008")
    assert b"2 steps of 8 have proven the checkpoint of step 6" in found.pop("manifest.json")
    assert found == {name: data for name, data in wanted.items() if name != "manifest.json"}
    assert (work.run("run") / "checkpoints/damaged/step-00000008").is_dir()


# ---- changed settings ----


def test_changed_settings_are_listed_and_refused(work, config):
    train(config(train={"steps": 3}), work, say=quiet)
    changed = config(train={"steps": 5}, optim={"lr_max": 0.02, "beta2": 0.9}, model={"rope_theta": 5000.0})
    with pytest.raises(UsageError) as caught:
        train(changed, work, say=quiet)
    message = str(caught.value)
    for line in (
        "- train.steps: 3 -> 5",
        "- optim.lr_max: 0.01 -> 0.02",
        "- optim.beta2: 0.95 -> 0.9",
        "- model.rope_theta: 10000.0 -> 5000.0",
    ):
        assert line in message
    assert "--accept-changes" in message
    assert "--fresh" in message
    assert caught.value.exit_code == 2
    assert steps_of(work.run("run")) == [3]


def test_settings_that_cannot_change_the_result_may_change(work, config):
    train(config(train={"steps": 3}), work, say=quiet)
    free = config(
        train={"steps": 3},
        validation={"every_steps": 1},
        track={"log_every_steps": 3},
        checkpoint={"every_steps": 1, "keep_last": 5},
        guards={"max_skips_in_a_row": 3},
        resilience={"save_on_signal": False},
    )
    notes: list[str] = []
    train(free, work, say=notes.append)
    assert "changed since the last attempt: checkpoint.keep_last: 2 -> 5" in notes


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


def test_data_that_changed_since_is_refused(work, config, repack):
    train(config(train={"steps": 3}), work, say=quiet)
    repack(work, 9)
    with pytest.raises(UsageError, match="the packed data, or the order in which it is read, has changed"):
        train(config(train={"steps": 3}), work, say=quiet)
    notes: list[str] = []
    train(config(train={"steps": 5}), work, accept_changes=True, say=notes.append)
    assert "the order of the data has changed: from here on samples may be repeated or left out" in notes


def test_another_shape_or_optimizer_is_refused_even_when_changes_are_accepted(work, config):
    train(config(train={"steps": 3}), work, say=quiet)
    wider = config(train={"steps": 3}, model={"hidden_size": 64})
    with pytest.raises(BadInputError, match=r"embedding.weight: \(448, 32\) instead of \(448, 64\)"):
        train(wider, work, accept_changes=True, say=quiet)
    with pytest.raises(UsageError, match=r"another optimizer \(optim.kind: 'adamw' -> 'adamw_8bit'\).*cannot continue"):
        train(config(train={"steps": 5}, optim={"kind": "adamw_8bit"}), work, accept_changes=True, say=quiet)


# ---- the environment ----


def test_resume_restores_the_thread_count_it_was_started_with(work, config):
    train(config(train={"steps": 3}, parallel={"cpu_threads": 2}), work, say=quiet)
    torch.set_num_threads(1)
    notes: list[str] = []
    train(config(train={"steps": 5}, parallel={"cpu_threads": None}), work, accept_changes=True, say=notes.append)
    assert torch.get_num_threads() == 2
    assert newest_checkpoint(work.run("run")).manifest["environment"]["cpu_threads"] == 2
    assert not [note for note in notes if "not bit-exact" in note]


def test_resume_says_so_when_the_environment_differs(work, config):
    train(config(train={"steps": 3}, parallel={"cpu_threads": 2}), work, say=quiet)
    notes: list[str] = []
    train(config(train={"steps": 3}, parallel={"cpu_threads": 1}), work, say=notes.append)
    assert "not bit-exact with the earlier attempt, because of: cpu_threads 2 -> 1" in notes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_card_is_an_error_before_anything_is_written(work, config):
    with pytest.raises(UsageError, match="torch sees no CUDA device"):
        train(config(parallel={"device": "cuda"}), work, say=quiet)
    assert not (work.run("run") / "config.yaml").exists()


def test_a_model_with_fewer_rows_than_the_data_has_ids_is_an_error_before_step_0(work, config):
    with pytest.raises(UsageError, match=r"model\.vocab_size is 399, but the data was packed with 400"):
        train(config(model={"vocab_size": 399}), work, say=quiet)
    assert list_checkpoints(work.run("run")) == []
    assert train(config(model={"vocab_size": 400}, train={"steps": 3}), work, say=quiet).step == 3


def test_no_packed_data_is_an_error_that_names_the_command(work, config):
    (work.packed / "report.json").unlink()
    with pytest.raises(BadInputError, match="z2a pack"):
        train(config(), work, say=quiet)


def test_a_run_that_is_held_cannot_be_taken(work, config):
    with hold_run(work.run("run")), pytest.raises(RunLockedError, match="process") as caught:
        train(config(), work, say=quiet)
    assert caught.value.exit_code == 13
    assert train(config(train={"steps": 3}), work, say=quiet).step == 3  # free again


# ---- steps that go wrong ----


def test_metrics_that_cannot_be_written_do_not_stop_the_run_and_are_reported_at_its_end(work, config):
    run = work.run("run")
    run.mkdir(parents=True)
    (run / "metrics").write_text("in the way")
    said: list[str] = []
    summary = train(config(train={"steps": 3}), work, say=said.append)
    assert summary.step == 3
    assert any(text.startswith("metrics: opening the metrics file: ") for text in said)
    assert any("could not be written to" in text for text in said)


def test_training_works_outside_the_main_thread(work, config):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(config(train={"steps": 3}), work, say=quiet)))
    thread.start()
    thread.join()
    assert results[0].step == 3


# ---- stages and held-out text ----


def test_a_stage_changes_the_mixture_at_its_step(work, config):
    settings = config(stages=[{"name": "late", "from_step": 4, "mixture": {"zh": 1}}])
    notes: list[str] = []
    train(settings, work, say=notes.append)
    assert "mixture (late, from token 512): en 0.00%, zh 100.00%" in notes
    data = read_run(work.run("run"))
    assert data.series["loss/en"].step.tolist() == [1, 2, 3, 4]
    assert data.series["loss/zh"].step.tolist() == list(range(1, 9))


def test_held_out_loss_is_that_of_the_first_held_out_samples_without_dropout(work, config):
    context, state = prepared_run(config(), work)
    model = state.model
    options = ValidationConfig(tokens_per_source=96, batch_samples=2)
    settings = dataclasses.replace(context.config, validation=options)
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


# ---- a checkpoint whose record somebody wrote and sealed anew ----


def sealed_anew(folder, state=None, **details):
    """Another state or other details in a checkpoint, with checksums and a seal that are right."""
    document = {**jsonio.loads_exact((folder / "state.json").read_bytes(), "state"), **(state or {})}
    manifest = {**jsonio.loads_exact((folder / "manifest.json").read_bytes(), "manifest"), **details}
    data = jsonio.dumps_exact(document)
    (folder / "state.json").write_bytes(data)
    files = {**manifest["files"], "state.json": {"bytes": len(data), "crc32c": crc32c_of(folder / "state.json")}}
    kept = {name: value for name, value in manifest.items() if name not in OWN_FIELDS}
    (folder / "manifest.json").write_bytes(manifest_bytes(manifest["step"], manifest["world_size"], files, kept))


@pytest.mark.parametrize(
    "change",
    [
        {"state": {"guards": {"format": 99}}},
        {"state": {"guards": {"ledger": 5}}},
        {"state": {"guards": {"ledger": [{"first": "x"}]}}},
        {"state": {"guards": {"ledger": [5]}}},
        {"environment": None},
        {"order": {"stages": 5}},
        {"order": {"stages": [{"name": "main", "from_token": 0, "seq_len": 0, "units": {}}]}},
        {"data": 5},
    ],
    ids=str,
)
def test_a_record_that_no_run_of_ours_would_keep_is_refused_in_words(finished, config, tmp_path, change):
    done, _, _ = finished
    work = dataclasses.replace(done, root=tmp_path)
    work.packed.symlink_to(done.packed)
    shutil.copytree(done.run("run"), work.run("run"))
    sealed_anew(list_checkpoints(work.run("run"))[0], **change)
    steps = config().train.steps + 1
    with pytest.raises(BadInputError, match=r"not have the form that this version .* writes.*start over with --fresh"):
        train(config(train={"steps": steps}), work, accept_changes=True, say=quiet)


def test_a_run_folder_of_an_earlier_version_is_continued_to_the_same_bits(finished, config, tmp_path):
    old = dataclasses.replace(finished[0], root=tmp_path)
    shutil.copytree(finished[0].root, old.root, symlinks=True, dirs_exist_ok=True)
    kept, last = old.run("run") / "config.yaml", old.run("run") / "checkpoints/step-00000008"
    kept.write_text(kept.read_text().replace("min_lr_ratio:", "lr_min_share:"))
    wanted = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    shutil.rmtree(last)
    notes: list[str] = []
    assert train(config(), old, say=notes.append).step == 8
    assert {path.name: path.read_bytes() for path in last.glob("*.safetensors")} == wanted
    assert not [note for note in notes if "changed" in note]
    assert "min_lr_ratio: 0.1" in kept.read_text()
