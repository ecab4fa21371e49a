"""Tracking: what a log call costs, what breaks it, how fast a long run opens.

    python benchmarks/track.py                     everything, about four minutes
    python benchmarks/track.py writer reader       some sections
    python benchmarks/track.py --hang-seconds 5    a shorter hang of the disk

`writer` compares with TensorBoard's EventFileWriter and with trackio, each in a process of its own and in turn, where
they are installed (`pip install tensorboard trackio`). Reading is measured in fresh
processes with the metrics file in the page cache; *cold* is without a sidecar, *warm* with one. `page` measures the
board in a browser.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS, save_result
from benchmarks.track_run import ROWS, write_long_run
from zero2all.common.files import read_json
from zero2all.track import MetricsWriter

ROOT = Path(__file__).resolve().parent.parent
SCALARS = 10
PACE_SECONDS = 0.003
PACED_CALLS = 2_000
ROUNDS = 3
FAULT_CALLS = 100_000
BLOCKED_SECONDS = 0.1
"""A call slower than this was blocked; the scheduler of a busy machine alone can hold a call for some ten ms."""
KILLS = 10
RUNS = 200

hang_seconds = 60.0
"""What --hang-seconds named."""


# ---- the cost of a call ----


def ours(folder: Path) -> tuple[Callable[[dict[str, float], int], None], Callable[[], None]]:
    """Our writer: how to log, and how to finish."""
    run = MetricsWriter(folder)
    return (lambda values, step: run.log(values, step)), run.close


def tensorboard(folder: Path) -> tuple[Callable[[dict[str, float], int], None], Callable[[], None]]:
    """TensorBoard's writer, all values of a step in one event, which suits it best."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))

    def log(values: dict[str, float], step: int) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    return log, writer.close


def trackio(folder: Path) -> tuple[Callable[[dict[str, float], int], None], Callable[[], None]]:
    """trackio, writing to its local database."""
    os.environ["TRACKIO_DIR"] = str(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    library = importlib.import_module("trackio")
    library.init(project="bench", embed=False)
    return (lambda values, step: library.log(values, step=step)), library.finish


BACKENDS = {"ours": ours, "tensorboard": tensorboard, "trackio": trackio}


def worker_log(backend: str, folder: Path) -> dict[str, float]:
    """In a process of its own: paced calls of one backend."""
    log, finish = BACKENDS[backend](folder)
    values = {f"metric/{number}": 1.0 + number / 7 for number in range(SCALARS)}
    seconds = []
    for step in range(PACED_CALLS):
        values["metric/0"] = step / 3
        started = time.perf_counter()
        log(values, step)
        seconds.append(time.perf_counter() - started)
        time.sleep(PACE_SECONDS)
    started = time.perf_counter()
    finish()
    cuts = statistics.quantiles(seconds[50:], n=100)
    return {
        "p50_us": 1e6 * cuts[49],
        "p99_us": 1e6 * cuts[98],
        "worst_ms": 1e3 * max(seconds[50:]),
        "finish_seconds": time.perf_counter() - started,
    }


def writer() -> dict[str, Any]:
    """Our log() against the others', in turn."""
    rounds: dict[str, list[dict[str, float]]] = {}
    skipped = {}
    for _ in range(ROUNDS):
        for backend in BACKENDS:
            if backend in skipped:
                continue
            with temporary_folder() as folder:
                done = start_worker("log", backend, folder)
            if done.returncode:
                skipped[backend] = (done.stderr.strip().splitlines() or ["no message"])[-1]
                print(f"{backend}: left out ({skipped[backend]})")
            else:
                rounds.setdefault(backend, []).append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        backend: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for backend, found in rounds.items()
    }
    for backend, figures in medians.items():
        ratio = figures["p50_us"] / medians["ours"]["p50_us"]
        print(
            f"log() of {SCALARS} scalars, {backend}: p50 {figures['p50_us']:.1f} µs ({ratio:.1f} × ours), "
            f"p99 {figures['p99_us']:.0f} µs, worst {figures['worst_ms']:.1f} ms, "
            f"finish {figures['finish_seconds']:.2f} s"
        )
    ratios = {name: each["p50_us"] / medians["ours"]["p50_us"] for name, each in medians.items() if name != "ours"}
    return {"medians": medians, "rounds": rounds, "p50_ratio_to_ours": ratios, "left_out": skipped}


# ---- what must not hurt ----


def worker_faults(kind: str, folder: Path, seconds: float) -> dict[str, Any]:
    """In a process of its own: 100,000 calls while the disk is gone, full or hung."""
    run = MetricsWriter(folder / "run")
    reading = -1
    if kind == "folder deleted":
        shutil.rmtree(folder / "run")
    elif kind == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))
    else:
        reading = hang_file(run.path)
    pause = seconds / FAULT_CALLS if kind == "disk hung" else 0.0
    values = {f"metric/{number}": 1.0 for number in range(SCALARS)}
    exceptions = 0
    slowest = []
    began = time.perf_counter()
    for step in range(FAULT_CALLS):
        started = time.perf_counter()
        try:
            run.log(values, step)
        except BaseException:
            exceptions += 1
        slowest.append(time.perf_counter() - started)
        behind = began + step * pause - time.perf_counter()
        if behind > 0:
            time.sleep(behind)
    lasted = time.perf_counter() - began
    queued = run._queue.qsize()
    started = time.perf_counter()
    run.close()
    closing = time.perf_counter() - started
    dropped = run.dropped_rows
    if reading >= 0:
        os.close(reading)
    return {
        "calls": FAULT_CALLS,
        "seconds": lasted,
        "exceptions": exceptions,
        "blocked_calls": sum(each > BLOCKED_SECONDS for each in slowest),
        "slowest_ms": 1e3 * max(slowest),
        "rows_waiting": queued,
        "rows_dropped": dropped,
        "close_seconds": closing,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def hang_file(path: Path) -> int:
    """Put a full pipe that nobody reads under an open file: writing to it hangs. Returns the reading end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    (fd,) = (int(link.name) for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(path))
    os.dup2(writing, fd)
    return reading


def faults() -> dict[str, Any]:
    """Nothing that happens to the disk reaches the training loop."""
    results = {}
    for kind in ("folder deleted", "disk full", "disk hung"):
        with temporary_folder() as folder:
            results[kind] = result_of(start_worker("faults", kind, folder, hang_seconds))
        figures = results[kind]
        print(
            f"{kind}: {figures['exceptions']} exceptions, {figures['blocked_calls']} blocked of {FAULT_CALLS:,} calls "
            f"in {figures['seconds']:.0f} s, slowest {figures['slowest_ms']:.1f} ms, "
            f"{figures['rows_dropped']:,} rows dropped and counted, close {figures['close_seconds']:.2f} s, "
            f"peak memory {figures['peak_memory_mb']:.0f} MB"
        )
    return results


def worker_steps(folder: Path) -> None:
    """In a process that will be killed: log, and say what was logged."""
    run = MetricsWriter(folder)
    for step in range(100_000):
        run.log({"loss": 1.0, "lr": 0.1}, step)
        os.write(1, b"%d\n" % step)
        time.sleep(PACE_SECONDS)


def kills() -> dict[str, Any]:
    """Rows that were logged and are not in the file after SIGKILL."""
    rng = random.Random(0)
    lost, logged_rows = [], 0
    for _ in range(KILLS):
        with temporary_folder() as folder:
            command = [sys.executable, __file__, "--worker", json.dumps(["steps", str(folder)])]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None, "it has a pipe"
            wait_for = rng.randrange(100, 400)
            while int(process.stdout.readline()) < wait_for:
                pass
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines()
            process.wait()
            logged = int(rest[-1]) + 1 if rest else wait_for + 1
            written = (folder / "metrics" / "train-1.jsonl").read_bytes().count(b'"values"')
            lost.append(max(0, logged - written))
            logged_rows += logged
    print(f"SIGKILL, {KILLS} times: {max(lost)} rows lost at most, {sum(lost)} of {logged_rows:,} in all")
    return {"kills": KILLS, "most_rows_lost": max(lost), "rows_lost": sum(lost), "rows_logged": logged_rows}


def exit_time() -> dict[str, Any]:
    """How much longer a program takes to end because it logged 1,500 rows in a burst and did not close."""
    log = "for step in range(1500): run.log({f'm{n}': 1.0 for n in range(10)}, step)"
    code = "import sys, time; from zero2all.track import MetricsWriter\n{}\nprint(time.time(), flush=True)"
    lasted: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(5):
        for kind, work in (("with", f"run = MetricsWriter(sys.argv[1])\n{log}"), ("without", "pass")):
            with temporary_folder() as folder:
                environment = {**os.environ, "PYTHONPATH": str(ROOT)}
                done = subprocess.run(
                    [sys.executable, "-c", code.format(work), folder], env=environment, capture_output=True, check=True
                )
                lasted[kind].append(time.time() - float(done.stdout))
    overhead = statistics.median(lasted["with"]) - statistics.median(lasted["without"])
    print(f"exit after 1,500 rows in a burst: {overhead:.3f} s longer than without")
    return {"overhead_seconds": overhead, **lasted}


# ---- reading ----


def worker_open(folder: Path, cache: Path) -> dict[str, Any]:
    """In a fresh process: from nothing to bins ready to draw."""
    started = time.perf_counter()
    reader_module = importlib.import_module("zero2all.track.reader")
    imported, imported_cpu = time.perf_counter(), time.process_time()
    reader = reader_module.RunReader(folder, cache)
    opened, opened_cpu = time.perf_counter(), time.process_time()
    bins = reader.bins("loss", smoothing=50)
    binned = time.perf_counter()
    rows = len(reader.series("loss"))
    idle_started = time.perf_counter()
    for _ in range(100):
        reader.refresh()
    return {
        "import_seconds": imported - started,
        "open_seconds": opened - imported,
        "open_cpu_seconds": opened_cpu - imported_cpu,
        "bins_seconds": binned - opened,
        "idle_refresh_us": 1e4 * (time.perf_counter() - idle_started),
        "rows": rows,
        "spike_in_maximum": bool(bins.maximum.max() >= 9.5),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def reader() -> dict[str, Any]:
    """A run of a million rows, cold and warm."""
    results: dict[str, Any] = {}
    for label, digits in (("five digits", 5), ("every digit", None)):
        with temporary_folder() as folder:
            path = write_long_run(folder / "run", digits)
            colds, warms = [], []
            for number in range(ROUNDS):
                cache = folder / f"cache{number}"
                colds.append(result_of(start_worker("open", folder / "run", cache)))
                warms.append(result_of(start_worker("open", folder / "run", cache)))
            megabytes = path.stat().st_size / 1e6
            sidecar_megabytes = sum(each.stat().st_size for each in cache.iterdir()) / 1e6
        cold, warm = (
            {key: statistics.median(each[key] for each in found) for key in found[0]} for found in (colds, warms)
        )
        results[label] = {"megabytes": megabytes, "sidecar_megabytes": sidecar_megabytes, "cold": cold, "warm": warm}
        print(
            f"{ROWS:,} rows, {label}, {megabytes:.0f} MB: cold {cold['open_seconds']:.2f} s "
            f"({cold['open_cpu_seconds']:.2f} s of CPU), warm "
            f"{1e3 * warm['open_seconds']:.0f} ms, 2,000 smoothed bins {1e3 * warm['bins_seconds']:.0f} ms, "
            f"spike in the maximum: {bool(cold['spike_in_maximum'])}, idle refresh {warm['idle_refresh_us']:.0f} µs, "
            f"peak memory {cold['peak_memory_mb']:.0f} MB"
        )
    return results


def listing() -> dict[str, Any]:
    """200 runs with their state, last step and last loss."""
    from zero2all.track.reader import find_runs

    with temporary_folder() as folder:
        for number in range(RUNS):
            with MetricsWriter(folder / f"run-{number:03}") as run:
                for step in range(500):
                    run.log({f"metric/{each}": 1.0 / (step + 1) for each in range(SCALARS)} | {"loss": 2.0}, step)
            (run.folder / "config.yaml").write_text("train:\n  # how many steps\n  steps: 500\n")
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            found = find_runs([folder])
            seconds.append(time.perf_counter() - started)
    assert len(found) == RUNS, f"{len(found)} runs found"
    print(f"{RUNS} runs listed in {statistics.median(seconds):.2f} s")
    return {"runs": RUNS, "seconds": statistics.median(seconds)}


def page() -> dict[str, Any]:
    """What the browser sees: measured by benchmarks/track_page.py."""
    try:
        from benchmarks.track_page import measure
    except ImportError as error:
        print(f"page: left out ({error})")
        return {"left_out": str(error)}
    return measure()


# ---- processes ----


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="z2a-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


WORKERS: dict[str, Callable[..., Any]] = {
    "log": lambda backend, folder: worker_log(backend, Path(folder)),
    "faults": lambda kind, folder, seconds: worker_faults(kind, Path(folder), float(seconds)),
    "steps": lambda folder: worker_steps(Path(folder)),
    "open": lambda folder, cache: worker_open(Path(folder), Path(cache)),
}


def start_worker(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run one worker in a fresh process."""
    request = json.dumps([name, *map(str, arguments)])
    return subprocess.run([sys.executable, __file__, "--worker", request], capture_output=True, text=True)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a worker printed last."""
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "writer": writer,
    "faults": faults,
    "kills": kills,
    "exit": exit_time,
    "reader": reader,
    "listing": listing,
    "page": page,
}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="which to run (default: all)")
    parser.add_argument("--hang-seconds", type=float, default=hang_seconds, help="how long the disk hangs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, *rest = json.loads(arguments.worker)
        print(json.dumps(WORKERS[name](*rest)))
        return
    globals()["hang_seconds"] = arguments.hang_seconds
    path = RESULTS / "track.json"
    results = {name: value for name, value in (read_json(path) if path.is_file() else {}).items() if name in SECTIONS}
    for name in arguments.sections or list(SECTIONS):
        results[name] = SECTIONS[name]()
    save_result("track", {name: results[name] for name in SECTIONS if name in results})


if __name__ == "__main__":
    main()
