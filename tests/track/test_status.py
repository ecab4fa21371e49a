"""Running, stalled, finished, crashed: judged from the files and the process, and the list of many runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.track.logged import logged
from zero2all.track import MetricsWriter
from zero2all.track.reader import RunReader, find_runs
from zero2all.track.status import Evidence, is_writer_alive, judge, pid_namespace

NOW = 1_000_000.0
SOMEWHERE_ELSE = {"host": "another-machine", "pid": 1, "process_start": 0.0}


def judged(silent: float, end: dict | None = None, step_seconds: float = 0.1) -> str:
    return judge(Evidence(SOMEWHERE_ELSE, end, NOW - silent, NOW - silent, step_seconds), now=NOW)[0]


def test_on_another_machine_only_silence_can_be_seen_and_the_writers_own_word_counts_most():
    for silent, step_seconds, state in (
        *((5, 0.1, "running"), (59, 0.1, "running"), (61, 0.1, "stalled")),
        *((290, 30, "running"), (310, 30, "stalled")),  # ten of its steps take five minutes
    ):
        assert judged(silent, step_seconds=step_seconds) == state
    assert judged(silent=9e6, end={"reason": "done"}) == "finished"
    for reason, state in (("exit", "finished"), ("failed", "crashed"), ("preempted", "stopped")):
        assert judged(silent=0, end={"reason": reason}) == state
    assert judge(Evidence({}, {"reason": "failed", "message": "out of memory"}, None, NOW))[1] == "out of memory"


def test_clocks_that_differ_a_little_do_not_stall_a_run_and_a_fresh_copy_of_an_old_one_is_not_running():
    for difference in (-400, 0, 400):
        evidence = Evidence(SOMEWHERE_ELSE, None, last_time=NOW - 1 + difference, modified=NOW - 1)
        assert judge(evidence, now=NOW)[0] == "running"
    evidence = Evidence(SOMEWHERE_ELSE, None, last_time=NOW - 86_400, modified=NOW)
    assert judge(evidence, now=NOW)[0] == "stalled"


WRITE_AND_WAIT = """
import sys, time
from zero2all.track import MetricsWriter
run = MetricsWriter(sys.argv[1])
for step in range(100):
    run.log({"loss": 2.0 - step / 100}, step=step, tokens=step * 10)
time.sleep(600)
"""


def test_a_killed_process_is_a_crashed_run_at_once_and_a_stopped_one_is_not(tmp_path, start):
    process = start(tmp_path / "run", code=WRITE_AND_WAIT)
    reader = RunReader(tmp_path / "run", cache=tmp_path / "cache")
    while reader.status.last_step != 99:
        reader.refresh()
        assert process.poll() is None
    assert reader.status.state == "running"
    assert [each.status.state for each in find_runs([tmp_path])] == ["running"]
    (path,) = (tmp_path / "run" / "metrics").iterdir()
    os.utime(path, (time.time() - 300,) * 2)
    reader.refresh()
    assert reader.status.state == "stalled", "alive, but silent for five minutes"
    process.signal(signal.SIGKILL)
    while is_writer_alive(json.loads(path.read_text().split("\n")[0])["data"]):  # a zombie is dead as well
        time.sleep(0.01)
    assert reader.status.state == "crashed"
    status = RunReader(tmp_path / "run", cache=tmp_path / "cache").status
    assert (status.state, status.last_step, status.last_tokens, status.attempt) == ("crashed", 99, 990, 1)
    assert str(process.pid) in status.message
    (listing,) = find_runs([tmp_path])
    assert (listing.status.state, listing.last_loss) == ("crashed", pytest.approx(1.01))


def test_an_end_written_after_the_last_look_is_not_a_crash(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITE_AND_WAIT.replace("600", "0"), tmp_path / "run"])
    reader = RunReader(tmp_path / "run", cache=tmp_path / "cache")
    while reader.status.last_step is None:
        reader.refresh()
    process.wait()
    assert (reader.status.state, reader.status.last_step) == ("finished", 99)


def test_a_process_that_only_has_the_same_number_is_not_the_writer():
    header = {"host": os.uname().nodename, "pid": os.getpid(), "pid_namespace": pid_namespace()}
    assert is_writer_alive(header | {"process_start": time.time()}) is True
    assert is_writer_alive(header | {"process_start": 1000.0}) is False
    assert is_writer_alive(header | {"process_start": time.time(), "pid_namespace": "pid:[1]"}) is None
    for broken in ({}, {"pid": "x", "host": os.uname().nodename}, header | {"pid": -1}, header | {"pid": 10**30}):
        assert is_writer_alive(broken) is None


def test_the_state_is_that_of_the_latest_training_attempt(tmp_path):
    logged(tmp_path, {"loss": 1.0})
    second = MetricsWriter(tmp_path, resumed_from=1)
    logged(tmp_path, {"eval/score": 1.0}, writer="eval")
    reader = RunReader(tmp_path)
    assert (reader.status.state, reader.status.attempt) == ("running", 2)
    second.close(reason="failed", message="no")
    reader.refresh()
    assert (reader.status.state, reader.status.message) == ("crashed", "no")


def test_runs_are_found_at_and_below_the_given_folders(tmp_path):
    for name in ("work/runs/b", "work/runs/a", "other", "work/runs/a/checkpoints/deeper"):
        with MetricsWriter(tmp_path / name) as run:
            for values in ({"loss": 2.5, "lr": 1.0}, {"eval/score": 1.0}):
                run.log(values, step=4, tokens=40)
    (tmp_path / "work/runs/a/config.yaml").write_text("data:\n  seed: 1\n\ntrain:\n  # length\n  steps: 900\n")
    (tmp_path / "empty/metrics").mkdir(parents=True)
    (tmp_path / "empty/config.yaml").write_text("")
    (tmp_path / "library/metrics").mkdir(parents=True)
    (tmp_path / "library/metrics/accuracy.py").write_text("no run")
    found = find_runs([tmp_path, tmp_path / "work", tmp_path / "absent"])
    states = {"empty": "unknown", **dict.fromkeys(("other", "work/runs/a", "work/runs/b"), "finished")}
    assert [(each.name, each.status.state) for each in found] == list(states.items())
    status = found[2].status
    assert (status.last_step, status.total_steps, found[2].last_loss) == (4, 900, 2.5)
    assert found[2].folder == tmp_path / "work/runs/a"
    assert [each.name for each in find_runs([tmp_path / "other"])] == ["other"]


def test_a_run_that_anneals_ends_where_its_anneal_ends(tmp_path):
    logged(tmp_path / "a", {"loss": 2.5}, first=4)
    (tmp_path / "a/config.yaml").write_text("train:\n  steps: 900\n")
    records = {'{"from_step": null, "steps": 50}': 900, '{"from_step": 4, "steps": 50}': 54, "[]": 900, "{": 900}
    for record, expected in records.items():
        (tmp_path / "a/anneal.json").write_text(record)
        assert find_runs([tmp_path])[0].status.total_steps == expected


def test_long_runs_are_listed_without_being_read(tmp_path):
    first = logged(tmp_path / "first", *[{"loss": 1.0, "lr": 1.0}] * 2000)
    for number in range(20):
        shutil.copytree(first, tmp_path / f"run-{number}")
    read_by_us = Path("/proc/self/io")
    before = int(read_by_us.read_text().split()[1])
    found = find_runs([tmp_path])
    size = (first / "metrics/train-1.jsonl").stat().st_size
    assert int(read_by_us.read_text().split()[1]) - before < 21 * size / 2
    assert [each.status.last_step for each in found] == [2000] * 21


def test_the_last_step_and_loss_are_found_before_two_damaged_lines_of_megabytes(tmp_path):
    (tmp_path / "run/metrics").mkdir(parents=True)
    row = '{"step":%d,"time":5.0,"tokens":1,"values":{"loss":2.5}}\n'
    damage = ("x" * 3_000_000 + "\n") * 2
    (tmp_path / "run/metrics/train-1.jsonl").write_text("".join(row % step for step in range(1, 1001)) + damage)
    (listing,) = find_runs([tmp_path])
    assert (listing.status.last_step, listing.last_loss) == (1000, 2.5)


def test_a_damaged_run_does_not_keep_the_others_out_of_the_list(tmp_path):
    logged(tmp_path / "good", {"loss": 1.0})
    (tmp_path / "bad/metrics").mkdir(parents=True)
    for damage in (b"", b"\xff\xfe\x00", b'{"step":', b"x" * 200_000, b"\n" * 50_000):
        (tmp_path / "bad/metrics/train-1.jsonl").write_bytes(damage)
        bad, good = find_runs([tmp_path])
        assert (bad.name, bad.last_loss, good.status.last_step) == ("bad", None, 1)
