"""The writer must never hurt training: these tests break the disk, the folder and the process under it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.waiting import wait_until
from zero2all.track import MetricsWriter
from zero2all.track.writer import END_KIND, REPORT_KIND, SEGMENT_KIND


def all_rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(path: Path) -> list[dict]:
    """What the program wrote: without the first row, and without the last of a closed run, which are the writer's."""
    rows = all_rows_of(path)
    assert rows[0]["kind"] == SEGMENT_KIND
    return [row for row in rows if row.get("kind") not in (SEGMENT_KIND, END_KIND)]


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def replace_file_by_full_pipe(run: MetricsWriter) -> int:
    """Put a full pipe that nobody reads under the writer's open file: its writes hang. Returns the reading end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    (fd,) = (int(link.name) for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(run.path))
    os.dup2(writing, fd)
    os.close(writing)
    return reading


def test_rows_are_written_in_order_with_the_contract_fields(tmp_path):
    before = time.time()
    with MetricsWriter(tmp_path / "run") as run:
        for step in range(500):
            run.log({"loss": 3.5 - step / 1000, "lr": 1e-3}, step=step, tokens=step * 64)
        run.event("checkpoint", step=499, data={"path": Path("step-499"), "bytes": 12, "parts": ("a", "b")})
    rows = rows_of(tmp_path / "run" / "metrics" / "train-1.jsonl")
    assert ([row["step"] for row in rows], set(rows[7])) == ([*range(500), 499], {"step", "time", "tokens", "values"})
    assert (rows[7]["values"], rows[7]["tokens"]) == ({"loss": 3.493, "lr": 1e-3}, 448)
    assert before <= rows[7]["time"] <= time.time()
    assert set(rows[-1]) == {"step", "time", "kind", "data"}
    assert rows[-1]["data"] == {"path": "step-499", "bytes": 12, "parts": ["a", "b"]}
    assert (run.problems, run.dropped_rows) == ({}, 0)


def test_a_file_begins_with_who_writes_it_and_ends_with_how_it_ended(tmp_path):
    with MetricsWriter(tmp_path, resumed_from=40) as run:
        run.log({"loss": 1.0}, step=41)
    first, row, last = all_rows_of(run.path)
    assert (first["kind"], first["step"]) == ("segment", 40)
    data = first["data"]
    assert (data["writer"], data["attempt"], data["resumed_from"], data["format"]) == ("train", 1, 40, 1)
    assert (data["host"], data["pid"]) == (os.uname().nodename, os.getpid())
    assert abs(data["process_start"] - psutil.Process().create_time()) < 2
    assert row["tokens"] == 0
    assert (last["kind"], last["step"], last["data"]) == ("end", 41, {"reason": "done"})
    failed = MetricsWriter(tmp_path)
    with suppress(RuntimeError), failed:
        raise RuntimeError("out of cheese")
    assert all_rows_of(failed.path)[-1]["data"] == {"reason": "failed", "message": "RuntimeError: out of cheese"}
    stopped = MetricsWriter(tmp_path)
    stopped.close(reason="preempted", message="asked to stop")
    stopped.close(reason="done")
    rows = all_rows_of(stopped.path)
    assert rows[-1]["data"] == {"reason": "preempted", "message": "asked to stop"}
    assert sum(row.get("kind") == "end" for row in rows) == 1


def test_a_program_that_ends_without_closing_leaves_its_end_too(tmp_path):
    code = "import sys; from zero2all.track import MetricsWriter as W; run = W(sys.argv[1]); run.log({'x': 1}, 1)"
    ends = [{"reason": "exit"}, {"reason": "failed", "message": "ZeroDivisionError: division by zero"}]
    processes = [run_python(code + last, tmp_path / name) for name, last in (("exit", ""), ("failed", "; 1 / 0"))]
    for process, end in zip(processes, ends, strict=True):
        process.communicate(timeout=120)
        assert all_rows_of(tmp_path / end["reason"] / "metrics" / "train-1.jsonl")[-1]["data"] == end


def test_every_attempt_and_every_writer_has_its_own_file(tmp_path):
    names = []
    for options in ({}, {}, {"writer": "eval"}, {}):
        with MetricsWriter(tmp_path, **options) as run:
            run.log({"loss": 1.0}, step=1, tokens=1)
            names.append(run.path.name)
    assert names == [f"{name}.jsonl" for name in ("train-1", "train-2", "eval-1", "train-3")]
    with pytest.raises(ValueError, match="file name"):
        MetricsWriter(tmp_path, writer="../elsewhere")


def test_processes_starting_together_do_not_share_a_file(tmp_path):
    code = "import sys; from zero2all.track import MetricsWriter as W\nwith W(sys.argv[1]) as run: run.log({}, 1, 1)"
    processes = [run_python(code, tmp_path) for _ in range(4)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 4
    files = sorted(path.name for path in (tmp_path / "metrics").iterdir())
    assert files == [f"train-{attempt}.jsonl" for attempt in (1, 2, 3, 4)]


def test_numbers_of_other_libraries_are_understood_and_those_that_are_not_finite_become_strings(tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.ones((), requires_grad=True)
    total = torch.tensor(2.0)
    with MetricsWriter(tmp_path) as run:
        values = {"grad": weight * 3, "half": torch.tensor(0.5, dtype=torch.bfloat16), "total": total}
        run.log({**values, "numpy": np.float64(1.25), "count": np.int64(7), "flag": True}, step=np.int64(1), tokens=1)
        total.zero_()  # as a training loop does right after logging
        run.event("spike", step=1, data={"loss": weight * 2})
    metric, event = rows_of(run.path)
    assert metric["values"] == {"grad": 3, "half": 0.5, "total": 2, "numpy": 1.25, "count": 7, "flag": 1}
    assert event["data"] == {"loss": 2.0}
    with MetricsWriter(tmp_path) as run:
        run.log({"a": float("nan"), "b": float("inf"), "c": np.float32("-inf")}, step=1, tokens=1)
        run.event("spike", step=1, data={"losses": [float("nan"), 2.0]})
    metric, event = rows_of(run.path)
    assert metric["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert event["data"] == {"losses": ["NaN", 2.0]}


class DeviceScalar:
    """A scalar on a device that computes until told to be ready: reading it waits."""

    def __init__(self) -> None:
        self.ready = threading.Event()

    def detach(self) -> "DeviceScalar":
        return self

    def item(self) -> float:
        assert self.ready.wait(120)
        return 4.5


def test_a_device_scalar_is_waited_for_in_the_thread_and_not_in_log(tmp_path):
    loss = DeviceScalar()
    with MetricsWriter(tmp_path) as run:
        run.log({"loss": loss}, step=1, tokens=1)  # would wait here
        loss.ready.set()
    assert rows_of(run.path)[0]["values"] == {"loss": 4.5}


@pytest.mark.gpu
def test_cuda_scalars_are_copied_without_waiting_for_the_gpu(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    matrix = torch.randn(8192, 8192, device="cuda")
    total = torch.zeros((), device="cuda")
    with MetricsWriter(tmp_path) as warm:
        warm.log({"total": total, "step": total + 1}, step=0, tokens=0)
    torch.cuda.synchronize()
    with MetricsWriter(tmp_path) as run:
        for step in range(5):
            for _ in range(20):
                matrix = torch.tanh(matrix @ matrix)
            total.fill_(step)
            run.log({"total": total, "step": total + 1}, step=step, tokens=step)
            total.fill_(-1)
        unfinished = not torch.cuda.current_stream().query()
        torch.cuda.synchronize()  # the time that close() gives the last rows is for the disk
    assert unfinished, "the loop waited for the GPU"
    assert [row["values"] for row in rows_of(run.path)] == [{"total": step, "step": step + 1} for step in range(5)]


def test_one_bad_value_costs_only_itself_and_is_remembered_up_to_a_bound(tmp_path):
    with MetricsWriter(tmp_path) as run:
        run.log({"loss": 1.0, "name": "text", "list": [1, 2], 5: 2.0, "\ud800": 3.0}, step=1, tokens=1)  # type: ignore[dict-item]
        run.log(None, step=2, tokens=2)  # type: ignore[arg-type]
        run.log({"loss": 1.0}, step="three", tokens=3)  # type: ignore[arg-type]
    rows = rows_of(run.path)
    assert rows[0]["values"] == {"loss": 1.0, "5": 2.0, "\\ud800": 3.0}
    assert (run.dropped_rows, len(run.problems)) == (2, 4)
    assert rows[-1]["kind"] == REPORT_KIND
    with MetricsWriter(tmp_path) as run:
        run.log({f"metric {number}": "not a number" for number in range(1000)}, step=1)
    assert len(run.problems) <= 101
    assert sum(run.problems.values()) == 1000


def test_log_never_raises_when_the_folder_is_deleted(tmp_path):
    run = MetricsWriter(tmp_path / "run")
    run.log({"loss": 1.0}, step=0, tokens=0)
    wait_until(lambda: run.path.read_bytes().count(b"\n") == 2)
    shutil.rmtree(tmp_path / "run")
    for step in range(2000):
        run.log({"loss": 1.0}, step=step, tokens=step)
    wait_until(lambda: any("deleted" in problem for problem in run.problems))
    run.close()
    assert run.dropped_rows == 2000
    assert not (tmp_path / "run").exists(), "a run that someone deleted stays deleted"


def test_writing_goes_on_when_the_metrics_folder_was_deleted_and_one_that_cannot_be_created_raises_nothing(tmp_path):
    with MetricsWriter(tmp_path) as run:
        run.log({"loss": 1.0}, step=1, tokens=1)
        wait_until(lambda: run.path.read_bytes().count(b"\n") == 2)
        shutil.rmtree(tmp_path / "metrics")
        run.log({"loss": 2.0}, step=2, tokens=2)
    rows = rows_of(run.path)
    assert rows[0]["step"] == 2
    assert "deleted" in str(rows[1]["data"]), "the file says that earlier rows are lost"
    (tmp_path / "file").write_text("in the way")
    with MetricsWriter(tmp_path / "file" / "run") as run:
        run.log({"loss": 1.0}, step=1, tokens=1)
        run.event("start", step=1)
    assert (bool(run.problems), run.dropped_rows) == (True, 2)


FULL_DISK = """
import resource, sys, time
from zero2all.track import MetricsWriter
run = MetricsWriter(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))  # 4,000 bytes of room
for step in range(500):
    run.log({"loss": 1.0}, step=step, tokens=step)
while not run.problems:  # a full disk that goes unnoticed
    time.sleep(0.01)
if sys.argv[2] == "room again":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
run.close()
print(run.dropped_rows)
"""


def rows_lost_on_a_full_disk(folder: Path, then: str) -> int:
    process = run_python(FULL_DISK, folder, then)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    return int(output)


def test_a_full_disk_raises_nothing_and_loses_nothing_once_there_is_room_again(tmp_path):
    assert rows_lost_on_a_full_disk(tmp_path, "room again") == 0
    rows = rows_of(tmp_path / "metrics" / "train-1.jsonl")
    assert [row["step"] for row in rows if "values" in row] == list(range(500))
    assert "File too large" in str([row["data"] for row in rows if "kind" in row])


def test_a_disk_that_stays_full_raises_nothing_and_the_loss_is_counted(tmp_path):
    lost = rows_lost_on_a_full_disk(tmp_path, "stays full")
    whole_lines = (tmp_path / "metrics" / "train-1.jsonl").read_bytes().count(b"\n")
    assert lost + whole_lines == 501  # the first row is the writer's own


def test_a_hung_disk_blocks_nothing_keeps_the_newest_rows_and_counts_the_dropped(tmp_path):
    run = MetricsWriter(tmp_path, queue_rows=100)
    reading = replace_file_by_full_pipe(run)
    calls = 5_000
    for step in range(calls):  # would never end if it waited for the disk
        run.log({"loss": float(step)}, step=step, tokens=step)
        if step == 0:
            wait_until(lambda: run._queue.qsize() == 0)  # the thread has it, and hangs
    assert run._queue.qsize() == 100
    assert run.dropped_rows == calls - 101  # 100 wait in the queue, one is in the hands of the thread
    os.set_blocking(reading, False)  # the disk comes back
    received = bytearray()

    def drained() -> bool:
        try:
            received.extend(os.read(reading, 1 << 20))
        except BlockingIOError:
            return run._queue.qsize() == 0 and received.endswith(b"}\n") and REPORT_KIND.encode() in received
        return False

    wait_until(drained)
    run.close()
    os.close(reading)
    rows = [json.loads(line) for line in received.split()]
    steps = [row["step"] for row in rows if "values" in row]
    assert (len(steps) + run.dropped_rows, steps) == (calls, sorted(steps))
    assert steps[-100:] == list(range(calls - 100, calls))
    assert [row["data"]["dropped_rows"] for row in rows if "kind" in row][-1] == run.dropped_rows


def test_close_gives_up_on_a_hung_disk_after_its_timeout_and_is_idempotent(tmp_path):
    run = MetricsWriter(tmp_path)
    reading = replace_file_by_full_pipe(run)
    for step in range(3_000):
        run.log({"loss": 1.0}, step=step, tokens=step)
    run.close(timeout_seconds=0.3)
    run.close(timeout_seconds=threading.TIMEOUT_MAX)  # would never end
    dropped = run.dropped_rows
    assert dropped > 0
    run.log({"loss": 1.0}, step=1, tokens=1)
    assert run.dropped_rows == dropped + 1
    assert any("after close" in problem for problem in run.problems)
    os.close(reading)


def test_a_killed_process_loses_at_most_one_row(tmp_path):
    code = """
import sys, time
from zero2all.track import MetricsWriter
run = MetricsWriter(sys.argv[1])
for step in range(10_000):
    while run.path.read_bytes().count(b"\\n") < step + 1:  # the thread has written the row before
        time.sleep(0.001)
    run.log({"loss": 1.0}, step=step, tokens=step)
    sys.stdout.write(f"{step}\\n"); sys.stdout.flush()
"""
    process = run_python(code, tmp_path)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 50:
        pass
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    logged = int(rest.splitlines()[-1]) if rest else 50
    written = rows_of(tmp_path / "metrics" / "train-1.jsonl")
    assert [row["step"] for row in written] == list(range(len(written)))
    assert len(written) >= logged  # rows 0..logged are logged + 1 rows


def test_a_forked_child_writes_nothing_and_ends_at_once(tmp_path):
    code = """
import os, sys, warnings
from zero2all.track import MetricsWriter
warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: a process with threads forks, which is meant
run = MetricsWriter(sys.argv[1])
for step in range(200):
    run.log({"loss": 1.0}, step=step, tokens=step)
if os.fork() == 0:
    for step in range(2_000):
        run.log({"loss": -1.0}, step=step, tokens=step)
    run.close()
    sys.exit(7)  # through the atexit handlers
_, status = os.wait()
run.log({"loss": 1.0}, step=200, tokens=200)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    process = run_python(code, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (7, "")
    rows = rows_of(tmp_path / "metrics" / "train-1.jsonl")
    assert [row["step"] for row in rows] == list(range(201))
    assert all(row["values"] == {"loss": 1.0} for row in rows)


def test_a_writer_whose_run_belongs_to_another_process_writes_not_one_byte_more(tmp_path):
    held = True
    run = MetricsWriter(tmp_path, may_write=lambda: held)
    run.log({"loss": 1.0}, step=1)
    wait_until(lambda: len(all_rows_of(run.path)) == 2)
    held, before = False, run.path.read_bytes()
    run.log({"loss": 2.0}, step=2)
    run.event("spike", step=2)
    run.close(10.0)
    assert run.path.read_bytes() == before
    assert ([path.name for path in tmp_path.rglob("*")], run.dropped_rows) == (["metrics", run.path.name], 2)
    assert any("belongs to another process" in problem for problem in run.problems)
    late = MetricsWriter(tmp_path / "late", may_write=lambda: False)
    late.log({"loss": 1.0}, step=1)
    late.close(10.0)
    assert not (tmp_path / "late").exists()
