"""A study on disk: its plan, its ledger, and workers that diverge, run out of memory or are killed."""

import json
import os
import signal
import threading
import time

import psutil
import pytest

from tests.experiments.conftest import alone
from zero2all.common.errors import RunLockedError, UsageError
from zero2all.experiments.study import LEDGER_NAME, Task, open_study

PLAN = {"steps": 18, "rates": [0.1, 0.2]}


def test_a_study_goes_on_with_its_plan_only_and_never_with_runs_of_others(work):
    for _ in range(2):
        with open_study(work, "s", PLAN), pytest.raises(RunLockedError, match="worked on by another process"):
            open_study(work, "s", PLAN).__enter__()
    with pytest.raises(UsageError, match=r"begun with other values of: rates, seeds\. Choose another --name"):
        open_study(work, "s", {"steps": 18, "rates": [0.1], "seeds": 1}).__enter__()
    work.run("t-000").mkdir(parents=True)
    for name, problem in (("t", "already has runs named t-000"), ("", "--name: got ''"), ("a/b", "--name: got 'a/b'")):
        with pytest.raises(UsageError, match=problem):
            open_study(work, name, PLAN).__enter__()


def test_a_line_that_was_cut_off_is_a_task_that_has_not_ended(work):
    with open_study(work, "s", PLAN) as study:
        study.record(Task("s-000", {}, 1), {"loss": 1.0})
        study.record(Task("s-000", {}, 1, until=5), {"loss": 2.0})
        path = study.folder / LEDGER_NAME
    path.write_bytes(path.read_bytes()[:-9])
    with open_study(work, "s", PLAN) as study:
        assert study.results == {"s-000": {"task": "s-000", "loss": 1.0}}
        study.record(Task("s-000", {}, 1, until=5), {"loss": 2.0})
    with open_study(work, "s", PLAN) as study:
        assert study.results["s-000@5"]["loss"] == 2.0


def test_an_error_in_the_first_trial_leaves_the_name_free_for_another_plan(sweep_of, work):
    with pytest.raises(UsageError, match="cuda_graph"):
        sweep_of("optim.lr_max=0.01,0.02", overrides=("--train.cuda_graph=on",)).run(lambda *_: None)
    assert not list(work.runs.glob("s-*"))
    with open_study(work, "s", PLAN) as study:
        study.record(Task("s-000", {}, 1), {"loss": 1.0})
    with pytest.raises(UsageError, match="of the second trial"), open_study(work, "s", PLAN):
        raise UsageError("of the second trial")
    assert (study.folder / "plan.json").is_file(), "what was trained stays, and so does its plan"


def test_a_trial_that_diverges_or_needs_too_much_memory_fails_alone(sweep_of):
    sweep = sweep_of("optim.lr_max=0.01,1e30", "model.hidden_size=32,4194304")
    ended: list[str] = []
    sweep.run(lambda task, _: ended.append(task.key))
    failures = {key: str(result.get("failed")) for key, result in sweep.study.results.items()}
    assert sorted(ended) == sorted(failures) == ["s-000", "s-001", "s-002", "s-003"]
    assert all("There is not enough memory" in failures[name] for name in ("s-001", "s-003"))
    assert "not finite" in failures["s-002"]
    assert sweep.study.results["s-000"]["channels"] == alone(sweep, "s-000")["s-000"]


def test_a_worker_that_does_not_end_when_another_was_killed_is_not_waited_for(sweep_of, monkeypatch):
    monkeypatch.setattr("zero2all.experiments.study.SECONDS_TO_SAVE", 0.2)
    sweep, hit = sweep_of("optim.lr_max=0.01,0.02", overrides=("--train.steps=4",)), []

    def hit_both_once(*_: object) -> None:
        if not hit:  # an idle worker may die with the lock for which the other one then waits
            hit.extend(each for each in psutil.Process().children() if "spawn_main" in " ".join(each.cmdline()))
            hit[-1].send_signal(signal.SIGSTOP)
            hit[0].kill()

    sweep.run(hit_both_once)
    assert (len(hit), sorted(sweep.study.results)) == (2, ["s-000", "s-001"])


def test_a_worker_that_always_dies_fails_alone(work, sweep_of):
    sweep = sweep_of("optim.lr_max=0.01,0.02", overrides=("--train.steps=150",))
    killed = set()

    def kill_each_that_trains_the_first() -> None:
        while len(killed) < 3:
            for log in set((work.run("s-000") / "metrics").glob("*.jsonl")) - killed:
                if b'"step":3,' in (lines := log.read_bytes()):
                    killed.add(log)
                    os.kill(json.loads(lines.partition(b"\n")[0])["data"]["pid"], signal.SIGKILL)
            time.sleep(0.01)

    killer = threading.Thread(target=kill_each_that_trains_the_first)
    killer.start()
    sweep.run(lambda *_: None)
    killer.join()
    assert "its process was killed" in sweep.study.results["s-000"]["failed"]
    assert sweep.study.results["s-001"]["channels"] == alone(sweep, "s-001")["s-001"]


def test_a_killed_sweep_leaves_no_workers_and_ends_with_the_same_table(work, sweep_of, start, z2a):
    rates, table = "optim.lr_max=0.01,0.02,0.04", work.root / "table.json"
    words = ["sweep", work.root / "tiny.yaml", "--over", rates, "--name", "s", "--at-once", 2, "--work", work.root]
    words += ["--train.steps=40", "--json", table]
    ledger, program = work.root / "studies" / "s" / LEDGER_NAME, start(*words)

    def workers() -> list[psutil.Process]:
        children = psutil.Process(program.pid).children(recursive=True)
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    program.wait_until(lambda: ledger.exists() and len(workers()) == 2)
    left = workers()
    assert "being worked on by another process" in z2a.refused(RunLockedError.exit_code, *words)
    program.signal(signal.SIGKILL)
    assert psutil.wait_procs(left, timeout=20)[1] == []
    assert start(*words).wait() == 0
    lines = {line["task"]: line["channels"] for line in map(json.loads, ledger.read_text().splitlines())}
    assert sorted(lines) == ["s-000", "s-001", "s-002"]
    assert lines == alone(sweep_of(rates, overrides=("--train.steps=40",)), *lines)
    assert len(json.loads(table.read_text())["table"]) == 4
