"""Bare `z2a`: the journey, and the next command that makes sense in this folder."""

import itertools
import json
import os
import shutil
from pathlib import Path

from zero2all.cli.overview import JOURNEY, next_commands
from zero2all.cli.runs import Run
from zero2all.common.workspace import open_workspace


def test_a_folder_without_a_workspace_leads_to_the_quickstart(z2a, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = z2a.done()
    assert out == z2a("help").out
    assert "There is no workspace here yet. Next:\n  z2a quickstart\n" in out
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80


def test_a_finished_run_leads_to_eval_chat_and_board_and_a_workspace_below_is_named(z2a, journey, monkeypatch):
    monkeypatch.chdir(journey)
    out = z2a().out
    assert f"Workspace {journey}: corpus, tokenizer, packed.\n  run tiny: finished, step 4 of 4, training loss " in out
    assert "Next:\n  z2a eval\n  z2a chat\n  z2a board\n" in out
    monkeypatch.chdir(journey.parent)
    assert "Next:\n  z2a eval --work work\n  z2a chat --work work\n  z2a board work\n" in z2a().out
    monkeypatch.setenv("Z2A_WORK", str(journey))
    assert "Next:\n  z2a eval\n" in z2a().out


def test_each_missing_stage_is_the_next_command(z2a, copy, monkeypatch):
    monkeypatch.chdir(copy)
    stages = {"runs": "train z2all-100m", "packed": "pack", "tokenizer": "tokenizer train --vocab-size 32000"}
    for folder, command in {**stages, "corpus": "corpus build NAME=PATH"}.items():
        shutil.rmtree(copy / folder)
        assert f"\n  z2a {command}\n" in z2a().out


def test_the_newest_run_decides_what_comes_next():
    for runs, first in (
        (["crashed"], "z2a train w/runs/a/config.yaml --work w"),
        (["running"], "z2a watch --work w"),
        (["finished", "running"], "z2a watch 'my run' --work w"),
    ):
        names, ages = ("a", "my run"), (9.0, 1.0)
        facts = zip(names, runs, ages, strict=False)
        given = [Run(name, state, 3, 9, 1.0, None, age, "") for name, state, age in facts]
        assert next_commands(Path("w"), " --work w", ["corpus", "tokenizer", "packed"], given)[0] == first


def test_every_verb_of_the_journey_exists_and_help_of_a_verb_is_its_help(z2a):
    commands = [line[2:23].split(", ") for line in JOURNEY.splitlines() if line.startswith("  z2a ")]
    for command in itertools.chain.from_iterable(commands):
        z2a.done(*command.split()[1:], "--help")
    assert z2a.done("help", "corpus", "build") == z2a.done("corpus", "build", "--help")


def test_a_run_says_whether_it_was_stopped_or_killed_or_has_not_begun(z2a, copy):
    runs = copy / "runs"
    metrics = runs / "tiny/metrics/train-1.jsonl"
    lines = metrics.read_text().splitlines()
    header, end = json.loads(lines[0]), json.loads(lines[-1])
    header["data"]["pid"] = 2**22 - 1  # of no process
    failed = {"reason": "failed", "message": "The loss is not finite."}
    reasons = {"stopped": [{"reason": "preempted"}], "failed": [failed], "killed": []}
    for name, of_end in reasons.items():
        shutil.copytree(runs / "tiny", runs / name)
        rows = [json.dumps(header), *lines[1:-1], *(json.dumps({**end, "data": data}) for data in of_end)]
        (runs / name / "metrics/train-1.jsonl").write_text("\n".join(rows) + "\n")
    shutil.copytree(runs / "tiny/checkpoints", runs / "new/checkpoints")
    states = {run["name"]: run["state"] for run in json.loads(z2a("runs", "--json", "--work", copy).out)}
    crashed = dict.fromkeys(("failed", "killed"), "crashed")
    assert states == {"tiny": "finished", "stopped": "stopped", **crashed, "new": "unknown"}
    out = z2a("runs", "--work", copy).out
    assert "failed: The loss is not finite." in out
    assert "killed: Process 4194303 has ended without closing the run." in out


def test_the_one_run_of_a_workspace_needs_no_name(z2a, copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("Z2A_WORK", str(copy))
    generate = "generate --prompt ka --max-new-tokens 2"
    for words in ("watch --once", "inspect 2 --json", generate, "track export --to csv F.csv", "anneal --steps 5"):
        z2a.done(*words.split())


def test_a_workspace_in_the_place_of_a_run_is_named_as_one(z2a, journey):
    for words in ("eval W", "watch W", "export W --out x", "chat W", "perf explain W", "train W"):
        said = z2a.refused(3, *words.replace("W", str(journey)).split())
        assert f"{journey} is a workspace. Name a" in said
        assert f"--work {journey}." in said


def test_among_several_runs_one_has_to_be_named_and_a_workspace_without_runs_says_how_to_get_one(z2a, copy, tmp_path):
    shutil.copytree(copy / "runs/tiny", copy / "runs/other")
    assert "has 2 runs. Name the one you mean: other, tiny." in z2a.refused(2, "watch", "--once", "--work", copy)
    assert z2a("watch", "other", "--once", "--work", copy).code == 0
    open_workspace(tmp_path / "new", create=True)
    assert z2a.done("runs", "--work", tmp_path / "new").startswith("There are no runs in ")
    assert "has no runs yet: train one with `z2a train`." in z2a.refused(2, "eval", "--work", tmp_path / "new")


def test_the_flag_wins_over_the_environment(z2a, journey, tmp_path, monkeypatch):
    monkeypatch.setenv("Z2A_WORK", str(tmp_path / "elsewhere"))
    assert z2a("runs", "--work", journey).code == 0
    assert f"Z2A_WORK is {tmp_path}/elsewhere, which is not a workspace (it has no " in z2a("runs").err
    assert f"Z2A_WORK is {tmp_path}/elsewhere, which is not a workspace yet. Next:\n" in z2a().out


def test_a_folder_that_holds_workspaces_names_them(z2a, journey, monkeypatch):
    monkeypatch.chdir(journey.parent)
    assert "it holds some: work. Add --work work or set Z2A_WORK." in z2a.refused(2, "runs")
    assert "it holds some: work. Add --work work" in z2a("chat", "nosuch").err
    assert "`z2a runs` takes no argument `work`. Did you mean `--work work`?" in z2a.refused(2, "runs", "work")


def test_below_a_workspace_the_command_works_in_it_and_above_several_in_the_newest(z2a, journey, tmp_path, monkeypatch):
    for folder in ("runs", "runs/tiny"):
        monkeypatch.chdir(journey / folder)
        assert f"Workspace {journey}: corpus, tokenizer, packed." in z2a().out
        assert "Next:\n  z2a eval\n" in z2a().out
        assert "tiny" in z2a("runs").out
    for name in ("first", "second"):
        open_workspace(tmp_path / name, create=True)
    os.utime(tmp_path / "first", (1, 1))
    monkeypatch.chdir(tmp_path)
    assert "This folder holds 2 workspaces: second, first. The newest:\nWorkspace " in z2a().out
