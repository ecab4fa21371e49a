"""Builds killed at random moments, and built on Ray with a worker killed: do they write what a quiet build writes?

Every other kill comes at a random time, the rest in a random phase of the build, so that short phases are hit too.
Most kills hit everything at once, as a lost machine does; every fourth hits one worker alone, as the kernel does when
memory runs out, and the build has to go on by itself. When a build comes to its end before enough kills were made, it
is compared, and the next one is begun from nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.corpus_builds import Bench, build_command, build_measured
from benchmarks.corpus_inputs import SHARES, Input, real_input
from benchmarks.processes import kill_group, start_group, workers_of
from zero2all.common import jsonio
from zero2all.common.files import read_json

KILLS = 20
WORKER_KILL_EVERY = 4
PHASES = ("start", "read", "dedup", "write")
LONGEST_IN_PHASE_SECONDS = 0.5
KILLED_NAME = "killed"
SMALL_UNITS = ("--shard-bytes", "20000000")
"""More, smaller shards, so that kills also fall between them."""


def measure_kills(bench: Bench, seed: int = 1) -> dict[str, Any]:
    """A quiet build, then 20 kills."""
    inputs, sources, wanted, quiet_seconds = _quiet_build(bench)
    command = build_command(sources, bench.work / KILLED_NAME, "--workers", "2", *SMALL_UNITS)
    build = _KilledBuild(bench, command, quiet_seconds, random.Random(seed))
    different: list[str] = []
    builds = 0
    while build.kills < KILLS or not build.is_finished:
        if build.is_finished:
            build.begin()
        build.go_on(may_kill=build.kills < KILLS)
        if build.is_finished:
            builds += 1
            different += _compare(wanted, bench.work / KILLED_NAME / "corpus")
    counted = count_records(bench.work / KILLED_NAME / "corpus", inputs)
    results = {
        "kills": build.kills,
        "kills_of_one_worker": build.worker_kills,
        "kills_during": dict(build.phases),
        "builds_finished": builds,
        "files_compared_each": len(wanted),
        "different_files": sorted(set(different)),
        "count": counted,
    }
    print(f"{build.kills} kills in {builds} builds, during {dict(build.phases)}", flush=True)
    print(f"different files: {different}; {counted}", flush=True)
    return results


def measure_ray(bench: Bench) -> dict[str, Any]:
    """The same sources on Ray with two workers, one of them killed while it works."""
    if importlib.util.find_spec("ray") is None:
        return {"skipped": "ray is not installed"}
    _, sources, wanted, _ = _quiet_build(bench)
    workspace = bench.work / "ray"
    shutil.rmtree(workspace, ignore_errors=True)
    command = build_command(sources, workspace, "--engine", "ray", "--workers", "2", *SMALL_UNITS)
    process = start_group(command, bench.work / "ray.log", bench.environment)
    killed = _kill_ray_worker(process)
    code = process.wait()
    different = _compare(wanted, workspace / "corpus") if code == 0 else ["the build failed"]
    print(f"ray: worker {'killed' if killed else 'NOT killed'}, exit {code}, different files: {different}", flush=True)
    return {"worker_killed": killed, "exit_code": code, "different_files": different, "files_compared": len(wanted)}


def _quiet_build(bench: Bench) -> tuple[list[Input], dict[str, Path], dict[str, str], float]:
    """The inputs, the sources, digests of what an uninterrupted build makes of them, and its wall time."""
    inputs = [real_input(bench.data, language, bench.work / "real") for language in SHARES]
    sources = {given.language: given.path for given in inputs}
    usage, _ = build_measured(bench, sources, "--workers", "2", *SMALL_UNITS)
    return inputs, sources, digests(bench.work / "workspace" / "corpus"), usage.wall_seconds


class _KilledBuild:
    """A build that is killed now and then, and started again."""

    def __init__(self, bench: Bench, command: list[str], quiet_seconds: float, rng: random.Random) -> None:
        self.bench, self.command, self.quiet_seconds, self.rng = bench, command, quiet_seconds, rng
        self.workspace = bench.work / KILLED_NAME
        self.kills = self.worker_kills = 0
        self.phases: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """From nothing."""
        shutil.rmtree(self.workspace, ignore_errors=True)
        self.is_finished = False

    def go_on(self, may_kill: bool) -> None:
        """Start the command once; kill it at a random moment, or let it come to its end."""
        process = start_group(self.command, self.bench.work / "killed.log", self.bench.environment)
        if may_kill:
            self._wait_for_moment(process)
            if process.poll() is None and self.kills % WORKER_KILL_EVERY == WORKER_KILL_EVERY - 1:
                self._kill_worker(process)
            elif process.poll() is None:
                self._note()
                kill_group(process)
                return
        code = process.wait()
        if code:
            raise AssertionError(f"the build failed: {(self.bench.work / 'killed.log').read_text()[-4000:]}")
        self.is_finished = True

    def _kill_worker(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            for worker in workers_of(process.pid)[:1]:
                self._note()
                self.worker_kills += 1
                os.kill(worker, signal.SIGKILL)
                return
            time.sleep(0.05)

    def _note(self) -> None:
        self.kills += 1
        phase = _phase(self.workspace / "corpus")
        self.phases[phase] += 1
        print(f"kill {self.kills}: {phase}", flush=True)

    def _wait_for_moment(self, process: subprocess.Popen[bytes]) -> None:
        """Until a random time, or into a random phase; the build may come to its end before, but not too often."""
        if self.kills % 2 == 0:
            _wait(process, self.rng.uniform(0.2, self.quiet_seconds / 2))
            return
        phase = self.rng.choice(PHASES)
        while process.poll() is None and _phase(self.workspace / "corpus") != phase:
            time.sleep(0.01)
        _wait(process, self.rng.uniform(0, LONGEST_IN_PHASE_SECONDS))


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """So long, or until the process has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _phase(corpus: Path) -> str:
    """What the build was doing, by the files that are there."""
    if (corpus / "report.json").exists():
        return "report"
    if any(corpus.glob(".build/*/found.json")):
        return "write"
    if any(corpus.glob(".build/*/steps")):
        return "dedup"
    return "read" if any(corpus.glob(".build/*/*/unit-*")) else "start"


def _kill_ray_worker(process: subprocess.Popen[bytes]) -> bool:
    """Kill the first worker that is seen at a task of ours."""
    import psutil

    while process.poll() is None:
        try:
            family = psutil.Process(process.pid).children(recursive=True)
            busy = [one for one in family if one.cmdline()[:1] == ["ray::_call"]]
        except psutil.Error:
            continue
        if busy:
            time.sleep(0.3)  # into the middle of its work
            busy[0].kill()
            return True
        time.sleep(0.02)
    return False


def digests(corpus: Path) -> dict[str, str]:
    """sha256 of every file of a corpus, hidden ones too."""
    files = sorted(path for path in corpus.rglob("*") if path.is_file())
    return {path.relative_to(corpus).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _compare(wanted: dict[str, str], corpus: Path) -> list[str]:
    """Names of files that differ, are missing or should not be there."""
    found = digests(corpus)
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def count_records(corpus: Path, inputs: list[Input]) -> dict[str, Any]:
    """Every document is accounted for once: by the report, and by counting the shards."""
    totals = read_json(corpus / "report.json")["totals"]
    gids = [
        jsonio.loads(line)["gid"]
        for given in inputs
        for path in sorted((corpus / given.language).glob("*/part-*.jsonl"))
        for line in open(path, "rb")  # noqa: SIM115
    ]
    accounted = totals["records_kept"] + sum(totals["dropped"].values()) + totals["quarantined"]
    return {
        "documents_given": sum(given.documents for given in inputs),
        "records_in": totals["records_in"],
        "records_accounted_for": accounted,
        "records_kept": totals["records_kept"],
        "records_in_shards": len(gids),
        "different_gids": len(set(gids)),
    }


def missed_targets(results: dict[str, Any]) -> list[str]:
    """What went wrong, for kills and for Ray."""
    missed = [f"{name} differs from the uninterrupted build" for name in results.get("different_files", [])]
    if results.get("worker_killed") is False:
        missed.append("no Ray worker was killed")
    count = results.get("count")
    if count is not None:
        if not count["documents_given"] == count["records_in"] == count["records_accounted_for"]:
            missed.append(f"records are lost or counted twice: {count}")
        if not count["records_kept"] == count["records_in_shards"] == count["different_gids"]:
            missed.append(f"shards and report do not agree: {count}")
    return missed
