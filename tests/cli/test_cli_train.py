"""`z2a train` with its flags and `z2a anneal`, as a person types them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml

from tests.processes import LONG_SECONDS
from tests.waiting import wait_until
from zero2all.cli import main
from zero2all.common.lock import STALE_SECONDS
from zero2all.config import load_config
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.layout import list_checkpoints, step_of

HUGE = ("--model.hidden_size", str(1 << 20), "--model.heads", "1024", "--model.kv_heads", "1024")


def test_print_schedule_shows_where_the_rate_turns_and_starts_nothing(z2a):
    out = z2a.done("train", "quickstart", "--print-schedule", "--schedule.kind", "wsd", "--train.steps", "1000")
    lines = out.splitlines()
    assert [line.split("  ")[-1] for line in lines] == ["warmup", "stable", "decay (1-sqrt)", "last step"]
    assert f"lr {load_config('quickstart', []).optim.lr_max:.3e}" in lines[1]


RULES = ("--optim.kind", "muon", "--optim.lr_max", "null", "--optim.weight_decay", "null", "--optim.beta2", "null")


def test_a_run_that_goes_on_keeps_what_rules_gave_it_when_it_began(copy, tiny, z2a):
    """A run of AdamW whose config says that it began with Muon and the values of its rules."""
    words = ("train", "quickstart", *tiny, *RULES, "--work", copy)
    path = copy / "runs/tiny/config.yaml"
    began = yaml.safe_load(z2a.done(*words, "--print-config"))["optim"]
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "optim": began}))
    said = z2a.refused(2, *words, "--train.steps", "8")
    assert "  - train.steps: 4 -> 8\nUse --accept-changes" in said, "nothing else has changed"
    assert "values from rules" not in said
    said = z2a.refused(4, *words, *HUGE, "--train.name", "new")
    assert "z2a: values from rules: optim.lr_max 0.0025, optim.lr_multipliers, optim.weight_decay 20.0" in said


def test_a_secret_that_cannot_be_used_is_refused_before_anything_starts(copy, tiny, z2a, tmp_path, monkeypatch):
    words = ("train", "quickstart", *tiny, "--work", copy, "--nodes", "2", "--node-rank", "1", "--rendezvous", "a:1")
    said = z2a.refused(2, *words, "--secret-file", tmp_path / "none")
    assert [words for words in ("cannot be read from", "z2a launch secret z2a.secret") if words not in said] == []
    monkeypatch.setenv("Z2A_SECRET", "short")
    assert "Z2A_SECRET holds 5 bytes. A secret has 16 to 4096." in z2a.refused(2, *words)


def test_a_dry_run_describes_the_data_of_the_whole_run_leaves_no_trace_and_has_to_learn_a_batch(copy, tiny, z2a):
    words = ("train", "quickstart", *tiny, "--train.name", "dry", "--dry-run", "--work", copy)
    out = z2a.done(*words, "--optim.lr_max", "0.1")
    assert "data: row 0 (" in out
    assert out.count("epochs over the whole run") == out.count("epochs over the whole run (512 tokens)") == 1
    assert [words for words in ("memory: about", "dry run: the loss of one batch fell from") if words not in out] == []
    assert not (copy / "runs/dry").exists()
    said = z2a.refused(2, *words, "--train.steps", "4000000", "--data.max_epochs", "{zh: 2}")
    assert "more often than data.max_epochs allows" in said
    ended = z2a("train", "quickstart", *tiny, "--optim.lr_max", "1e-9", "--dry-run", "--work", copy)
    assert ended.code == 12
    assert "optim.lr_max is too small" in ended.out
    assert "could not overfit one batch" in ended.err


def test_a_model_that_cannot_fit_is_refused_before_it_is_built_and_a_dry_run_tells_what_it_needs(copy, tiny, z2a):
    words = ("train", "quickstart", *tiny, *HUGE, "--train.name", "large", "--work", copy)
    said = z2a.refused(4, *words)
    for expected in ("not enough memory to train this model here", "optimizer", "train.micro_batch_samples"):
        assert expected in said
    spread = ("--parallel.processes", "4", "--parallel.zero", "2", "--train.tokens_per_step", "512")
    ended = z2a(*words, *spread, "--dry-run")
    assert ended.code == 4
    for expected in ("the run has 4 processes", "1/4 of the parameters", "communication: each process sends"):
        assert expected in ended.out
    assert "what the dry run needs, which has one process" in ended.err
    assert not (copy / "runs/large").exists()


# Every process that loads torch says so and stands still in the middle of it.
LOADS_FOR_EVER = """
import os, pathlib, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            pathlib.Path(os.environ["LOADING"], os.environ.get("RANK", "0")).touch()
            time.sleep(600)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(("processes", "supervised"), [("1", "true"), ("1", "false"), ("2", "false")])
def test_a_run_stopped_while_it_loads_ends_with_10_and_changes_nothing(processes, supervised, copy, tiny, tmp_path):
    words = ["train", "quickstart", *tiny, "--train.name", "early", "--work", str(copy)]
    words += ["--parallel.processes", processes, "--resilience.supervise", supervised]
    command = [sys.executable, "-m", "zero2all", *words]
    (tmp_path / "sitecustomize.py").write_text(LOADS_FOR_EVER)
    loading = tmp_path / "loading"
    loading.mkdir()
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "LOADING": str(loading)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    ready = lambda: process.poll() is not None or len(list(loading.iterdir())) == int(processes)  # noqa: E731
    wait_until(ready, LONG_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_SECONDS) == 10
    assert "before the run had started. Nothing was changed" in process.stderr.read()
    assert not (copy / "runs/early").exists()


def test_a_silent_run_of_another_host_is_taken_over_only_when_asked(copy, tiny, z2a):
    lock = copy / "runs/tiny/lock"
    lock.write_text(json.dumps({"host": "elsewhere", "boot": "x", "pid": 1, "started": 0.0, "token": "theirs"}))
    old = time.time() - 2 * STALE_SECONDS
    os.utime(lock, (old, old))
    words = ("train", "quickstart", *tiny, "--work", copy)
    said = z2a.refused(13, *words)
    assert [words for words in ("process 1 on elsewhere", "--take-over") if words not in said] == []
    assert "took over the lock of process 1 on elsewhere" in z2a.done(*words, "--take-over")


def test_a_finished_run_is_annealed_to_a_later_end(copy, tiny, z2a):
    run = copy / "runs/tiny"
    last = float(read_run(run).series["lr"].value[-1])
    words = ("anneal", "tiny", "--steps", "3", "--shape", "linear", "--to-share", "0.5", "--work", copy)
    out = z2a.done(*words)
    assert "tiny, at step 4 of 4: the learning rate will fall from" in out
    assert "replaces" not in out
    assert z2a(*words).out.startswith("This replaces an earlier request, which has not begun.")
    trained = z2a("train", "quickstart", *tiny, "--work", copy)
    assert trained.code == 0
    assert "anneal: from step 4 the learning rate falls (linear); the run ends at step 7" in trained.out + trained.err
    series = read_run(run).series["lr"]
    assert series.step.tolist() == list(range(1, 8))
    assert series.value[4:] == pytest.approx([last * 5 / 6, last * 2 / 3, last / 2])
    assert step_of(list_checkpoints(run)[0]) == 7
    z2a.done("inspect", "tiny", "7", "--work", copy)
    assert "tiny has been annealing since step 4, over 3 steps" in z2a.refused(2, "anneal", "tiny", "--work", copy)


def test_a_run_that_is_training_anneals_within_a_step_and_notes_it(copy, tiny, z2a):
    words = ["train", "quickstart", *tiny, "--train.name", "live", "--train.steps", "100000", "--work", str(copy)]
    training = threading.Thread(target=lambda: main(words))
    training.start()
    run = copy / "runs/live"
    wait_until(lambda: list_checkpoints(run), LONG_SECONDS)
    z2a.done("anneal", "live", "--steps", "6", "--work", copy)
    training.join(LONG_SECONDS)
    from_step = json.loads((run / "anneal.json").read_text())["from_step"]
    assert read_run(run).series["lr"].step[-1] == from_step + 6
    assert [event.step for event in read_run(run).events if event.kind == "anneal"] == [from_step]


def test_anneal_refuses_what_makes_no_sense(journey, z2a):
    for words, code, message in (
        (["tinny"], 3, "has no run `tinny`. Did you mean `tiny`?"),
        (["tiny", "--steps", "0"], 2, "at least 1"),
        (["tiny", "--shape", "square"], 2, "--shape: got 'square', expected one of linear, 1-sqrt, cosine."),
        (["tiny", "--to-share", "2"], 2, "from 0 to 1"),
        (["tiny", "--mixture", "{en: 0}"], 2, "--mixture: got {'en': 0.0}, expected at least one weight above 0."),
        (["tiny", "--mixture", ""], 2, "--mixture is empty"),
        (["tiny", "--mixture", "{books: 1}"], 2, "neither a packed source nor a channel. Available: en, zh."),
    ):
        assert message in z2a.refused(code, "anneal", *words, "--work", journey)


def test_an_anneal_that_would_read_a_source_too_often_is_refused_when_it_is_asked_for(copy, z2a):
    path = copy / "runs/tiny/config.yaml"
    values = yaml.safe_load(path.read_text())
    values["data"]["max_epochs"] = {"en": 1.0}
    path.write_text(yaml.safe_dump(values))
    said = z2a.refused(2, "anneal", "tiny", "--steps", "100000", "--work", copy)
    assert "tiny cannot anneal over 100,000 steps from step 4." in said
    assert [words for words in ("at most 1 allowed", "ask for fewer steps") if words not in said] == []
    assert not (copy / "runs/tiny/anneal.json").exists()
    assert z2a("anneal", "tiny", "--steps", "2", "--work", copy).code == 0


def test_a_run_without_a_step_or_without_a_rate_has_nothing_to_anneal(copy, tiny, z2a):
    (copy / "runs/new").mkdir()
    (copy / "runs/new/config.yaml").write_text((copy / "runs/tiny/config.yaml").read_text())
    assert "has no steps yet" in z2a("anneal", "new", "--work", copy).err
    words = ("train", "quickstart", *tiny, "--train.name", "zero", "--schedule.min_lr_ratio", "0", "--work", copy)
    assert z2a(*words).code == 0
    assert "is already 0 at step 4" in z2a.refused(2, "anneal", "zero", "--work", copy)


def test_the_number_of_a_group_without_groups_is_refused(z2a):
    assert "--group is 0, but diloco.groups is empty" in z2a.refused(2, "train", "quickstart", "--group", "0")
