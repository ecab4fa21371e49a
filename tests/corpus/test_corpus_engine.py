"""Where the work runs must not show in what is written: workers, Ray, kills at any moment."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.corpus.corpus_helpers import HERE, build_three, tree
from zero2all.common.engine import advance, open_engine
from zero2all.common.errors import BadInputError, UsageError
from zero2all.corpus import EngineConfig

# ---- tasks ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2])
def engine(request):
    """In this process, and with two workers."""
    with open_engine(EngineConfig("local", request.param)) as opened:
        yield opened


def double(number: int) -> int:
    advance(number)
    return 2 * number


def refuse(number: int) -> int:
    raise BadInputError(f"task {number} cannot be done")


def die_once(mark: Path) -> str:
    """Kill the worker the first time."""
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return mark.name


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_every_task_is_run_and_its_bytes_are_counted(engine):
    told = []
    assert sorted(engine.run(double, range(20), told.append)) == [(n, 2 * n) for n in range(20)]
    assert sorted(engine.run(double, [5])) == [(0, 10)], "the same workers take the next tasks"
    assert sum(told) == sum(range(20))
    for _ in engine.run(double, range(20)):
        break
    assert sorted(engine.run(double, range(5))) == [(n, 2 * n) for n in range(5)], "a run given up leaves it usable"


def test_error_of_a_task_arrives_as_it_was_raised(engine):
    with pytest.raises(BadInputError, match="task 3 cannot be done"):
        list(engine.run(refuse, [3]))


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_tasks_and_results_may_be_larger_than_a_socket_holds_and_killed_workers_are_replaced(engine, tmp_path):
    tasks = [bytes([n]) * 3_000_000 for n in range(8)]
    assert sorted(engine.run(len, tasks)) == [(n, 3_000_000) for n in range(8)]
    assert [len(result) for _, result in engine.run(large, [3_000_000] * 8)] == [3_000_000] * 8
    marks = [tmp_path / f"{n}" for n in range(3)]
    assert sorted(engine.run(die_once, marks)) == [(n, f"{n}") for n in range(3)]


def large(count: int) -> bytes:
    return bytes(count)


class TwoWordsError(Exception):
    """Cannot be unpickled: its arguments are not what its constructor wants."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail(_: int) -> None:
    raise TwoWordsError("good", "grief")


def unsendable(_: int) -> object:
    return lambda: None


@pytest.mark.parametrize("engine", [2], indirect=True)
@pytest.mark.parametrize(("function", "words"), [(fail, "good grief"), (unsendable, "pickle"), (die, "killed 4 times")])
def test_what_cannot_be_sent_back_is_an_error_and_not_a_hang(engine, function, words):
    with pytest.raises(Exception, match=words) as caught:
        list(engine.run(function, [1, 2, 3]))
    if function is die:  # again and again
        assert isinstance(caught.value, BadInputError)
        assert re.search(r"in a row.*--workers", str(caught.value))


def test_problems_of_the_engine_are_told():
    with pytest.raises(UsageError, match="expected at least 1"), open_engine(EngineConfig(workers=0)):
        pass
    with pytest.raises(UsageError, match="add --engine ray"), open_engine(EngineConfig(address="auto")):
        pass


ORPHAN_MAKER = """
import os, sys, time
from zero2all.common.engine import EngineConfig, open_engine
if __name__ == "__main__":
    with open_engine(EngineConfig("local", 2)) as engine:
        list(engine.run(time.sleep, [60, 60]))
"""


def mapped(process: int) -> list[str]:
    """Files that a process has in its memory."""
    return (Path("/proc") / str(process) / "maps").read_text().splitlines()


def test_workers_share_nothing_with_a_name_and_end_with_their_parent():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN_MAKER], start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while len(group(parent.pid)) < 5 and time.monotonic() < deadline:  # parent, tracker, fork server, 2 workers
            time.sleep(0.05)
        time.sleep(0.5)
        # What has a name there is left behind when everything is killed at once, the tracker included.
        named = [line for pid in group(parent.pid) for line in mapped(pid) if "/dev/shm/" in line]
        assert [line for line in named if not line.endswith("(deleted)")] == []
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 120
        while group(parent.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group(parent.pid)
    finally:
        kill_group(parent)


def group(number: int) -> list[int]:
    """Processes of a process group, by its number."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == number and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- whole builds ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Three sources of about 1 MB in three formats, with copies, near copies and damage."""
    folder = tmp_path_factory.mktemp("raw")
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000)]

    def text() -> list[str]:
        return rng.choices(words, k=rng.randint(20, 250))

    texts = [text() for _ in range(2400)]
    for n in range(0, 2400, 10):
        texts[n] = list(texts[(n * 7 + 1) % 2400])  # an exact copy of another
        if n % 20:
            texts[n][len(texts[n]) // 2] = "changed"
    lines = [json.dumps({"title": f"t{n}", "text": " ".join(each)}).encode() for n, each in enumerate(texts[:800])]
    lines[400:400] = [b'{"text": "cut', b"\xff\xfe{"]
    (folder / "lines.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    rows = [{"id": n, "content": " ".join(each)} for n, each in enumerate(texts[800:1600])]
    (folder / "array.json").write_text(json.dumps(rows, indent=1))
    (folder / "texts").mkdir()
    for n, each in enumerate(texts[1600:]):
        (folder / f"texts/{n:04d}.txt").write_text(" ".join(each))
    return folder


@pytest.fixture(scope="module")
def whole(raw, tmp_path_factory):
    """The corpus of a build in one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    report = build_three(folder, raw, HERE)
    assert report["totals"]["dropped"].keys() == {"duplicate", "near_duplicate"}
    assert report["sources"]["lines"]["quarantined"] == 2
    assert len(list((folder / "lines/train").iterdir())) > 1
    return tree(folder)


BUILD = """
import random, sys
from pathlib import Path
from tests.corpus.corpus_helpers import EngineConfig, build_three
from tests.moments import signal_when
folder, raw = Path(sys.argv[1]), Path(sys.argv[2])
"""
KILLED_BUILD = f"""{BUILD}
pattern, count = sys.argv[3], int(sys.argv[4])
signal_when(lambda: len(list(folder.glob(pattern))) >= count, after=random.random() * 0.03)
build_three(folder, raw, EngineConfig(workers=2))
"""

MOMENTS = {
    "while it reads": (".build/*/*/unit-*/done.json", 4),
    "while it looks for duplicates": (".build/*/steps", 1),
    "while it writes": (".build/*/out/*/train/part-*", 1),
    "between two sources": ("*/manifest.json", 1),
}


def found(folder: Path, pattern: str) -> list[Path]:
    """Paths in a folder that a build is working in; it may remove them while we look."""
    try:
        return list(folder.glob(pattern))
    except FileNotFoundError:
        return []


def test_build_killed_at_any_moment_and_run_again_is_byte_identical(raw, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for moment, (pattern, count) in MOMENTS.items():
        command = [sys.executable, "-c", KILLED_BUILD, str(tmp_path), str(raw), pattern, str(count)]
        killed = subprocess.run(command, start_new_session=True, stderr=subprocess.DEVNULL)
        assert killed.returncode == -9, f"it was to be killed {moment}"
    build_three(tmp_path, raw, HERE)
    assert tree(tmp_path) == whole


@pytest.mark.slow
def test_ray_with_a_killed_worker_writes_the_same_bytes(raw, whole, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", RAY_BUILD, str(tmp_path / "corpus"), str(raw)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    killed = 0
    while process.poll() is None and not killed:
        for busy in found(tmp_path / "corpus", ".build/*/*/unit-*/seg-*.partial-*")[:1]:
            killed = int(busy.name.rpartition("-")[2])
            os.kill(killed, signal.SIGKILL)
        time.sleep(0.001)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert killed not in (0, process.pid)
    assert tree(tmp_path / "corpus") == whole


RAY_BUILD = f'{BUILD}\nbuild_three(folder, raw, EngineConfig(kind="ray", workers=2))'
