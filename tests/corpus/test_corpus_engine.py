"""Where the work runs must not show in what is written: workers, Ray, kills at any moment."""

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.corpus.corpus_helpers import HERE, build_three, tree
from tests.waiting import wait_until
from zero2all.common.engine import advance, open_engine
from zero2all.common.errors import BadInputError, UsageError
from zero2all.corpus import EngineConfig


@pytest.fixture(scope="module", params=[1, 2])
def engine(request):
    with open_engine(EngineConfig("local", request.param)) as opened:
        yield opened


def double(number: int) -> int:
    advance(number)
    return 2 * number


def refuse(number: int) -> int:
    raise BadInputError(f"task {number} cannot be done")


def die_once(mark: Path) -> str:
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
    assert [len(result) for _, result in engine.run(bytes, [3_000_000] * 8)] == [3_000_000] * 8
    marks = [tmp_path / f"{n}" for n in range(3)]
    assert sorted(engine.run(die_once, marks)) == [(n, f"{n}") for n in range(3)]


class TwoWordsError(Exception):
    """Cannot be unpickled: its arguments are not what its constructor wants."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail(_: int) -> None:
    raise TwoWordsError("good", "grief")


def unsendable(_: int) -> object:
    return lambda: None


@pytest.mark.parametrize("engine", [2], indirect=True)
@pytest.mark.parametrize(
    ("function", "words"), [(fail, "good grief"), (unsendable, "pickle"), (die, r"killed 4 times in a row.*--workers")]
)
def test_what_cannot_be_sent_back_is_an_error_and_not_a_hang(engine, function, words):
    with pytest.raises(Exception, match=words):
        list(engine.run(function, [1]))


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


def test_workers_share_nothing_with_a_name_and_end_with_their_parent():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN_MAKER], start_new_session=True)
    try:
        wait_until(lambda: len(group(parent.pid)) >= 5)  # parent, tracker, fork server, 2 workers
        time.sleep(0.5)
        # What has a name there is left behind when everything is killed at once, the tracker included.
        mapped = [line for pid in group(parent.pid) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        assert [line for line in mapped if "/dev/shm/" in line and not line.endswith("(deleted)")] == []
        parent.kill()
        parent.wait()
        wait_until(lambda: not group(parent.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def group(number: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == number and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Three sources of about 400 KB in three formats, with copies, near copies and damage."""
    folder = tmp_path_factory.mktemp("raw")
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000)]
    texts = [rng.choices(words, k=rng.randint(20, 250)) for _ in range(1200)]
    for n in range(0, 1200, 10):
        texts[n] = list(texts[(n * 7 + 1) % 1200])  # an exact copy of another
        if n % 20:
            texts[n][len(texts[n]) // 2] = "changed"
    notice = rng.choices(words, k=30)
    for n in range(3, 1200, 40):
        texts[n] = [*texts[n], *notice]
    lines = [json.dumps({"title": f"t{n}", "text": " ".join(each)}).encode() for n, each in enumerate(texts[:400])]
    lines[200:200] = [b'{"text": "cut', b"\xff\xfe{"]
    (folder / "lines.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    rows = [{"id": n, "content": " ".join(each)} for n, each in enumerate(texts[400:800])]
    (folder / "array.json").write_text(json.dumps(rows, indent=1))
    (folder / "texts").mkdir()
    for n, each in enumerate(texts[800:]):
        (folder / f"texts/{n:04d}.txt").write_text(" ".join(each))
    return folder


@pytest.fixture(scope="module")
def whole(raw, tmp_path_factory):
    """The corpus of a build in one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    report = build_three(folder, raw, HERE)
    assert report["totals"]["dropped"].keys() == {"duplicate", "near_duplicate"}
    assert report["sources"]["lines"]["quarantined"] == 2
    assert sum(source["records_cut"] for source in report["sources"].values()) == 29
    assert len(list((folder / "lines/train").iterdir())) > 1
    return tree(folder)


KILLED_BUILD = """
import os, random, sys
from pathlib import Path
from tests.corpus.corpus_helpers import EngineConfig, build_three
from tests.moments import signal_when
os.setsid()  # its workers are killed with it
folder, raw, pattern, count = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
signal_when(lambda: len(list(folder.glob(pattern))) >= count, after=random.random() * 0.03)
build_three(folder, raw, EngineConfig(workers=int(sys.argv[5])))
"""

MOMENTS = {
    "while it reads": (".build/*/*/unit-*/done.json", 4, 2),
    "while it looks for duplicates": (".build/*/steps", 1, 1),
    "while it looks for passages": (".build/*/passages/anchors-*", 2, 1),
    "while it cuts them": (".build/*/cut-*", 1, 1),
    "while it writes": (".build/*/out/*/train/part-*", 1, 1),
    "between two sources": ("*/manifest.json", 1, 1),
}
"""What appears how often until then, and the number of workers."""


def test_build_killed_at_any_moment_and_run_again_is_byte_identical(raw, whole, tmp_path, start):
    corpus = tmp_path / "corpus"
    for moment, (pattern, count, workers) in MOMENTS.items():
        killed = start(corpus, raw, pattern, count, workers, code=KILLED_BUILD)
        assert killed.wait() == -signal.SIGKILL, f"it was to be killed {moment}; it printed {killed.text()}"
    build_three(corpus, raw, HERE)
    assert tree(corpus) == whole


@pytest.mark.slow
def test_ray_with_a_killed_worker_writes_the_same_bytes(raw, whole, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", RAY_BUILD, str(tmp_path / "corpus"), str(raw)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    killed = 0
    while process.poll() is None and not killed:
        with contextlib.suppress(FileNotFoundError):  # the build works in the folder while we look
            for busy in list((tmp_path / "corpus").glob(".build/*/*/unit-*/seg-*.partial-*"))[:1]:
                killed = int(busy.name.rpartition("-")[2])
                os.kill(killed, signal.SIGKILL)
        time.sleep(0.001)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert killed not in (0, process.pid)
    assert tree(tmp_path / "corpus") == whole


RAY_BUILD = """
import sys
from pathlib import Path
from tests.corpus.corpus_helpers import EngineConfig, build_three
build_three(Path(sys.argv[1]), Path(sys.argv[2]), EngineConfig(kind="ray", workers=2))
"""


@pytest.mark.slow
def test_two_ray_nodes_write_the_same_bytes(raw, whole, tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{free.getsockname()[1]}"
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **secret, "PYTHONPATH": str(Path(__file__).parents[2]), "RAY_USAGE_STATS_ENABLED": "0"}
    common = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--num-cpus=1",
        "--object-store-memory=80000000",
        "--block",
    ]
    folder = tempfile.mkdtemp(prefix="z2a-ray-")  # the path of a socket must be short
    nodes = [
        [
            "--head",
            "--node-ip-address=127.0.0.1",
            f"--port={head.rpartition(':')[2]}",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
        ],
        [f"--address={head}", "--node-ip-address=127.0.0.2"],
    ]
    running = []
    try:
        for node in nodes:
            out = subprocess.DEVNULL
            running.append(subprocess.Popen([*common, *node], env=environment, stdout=out, start_new_session=True))
            wait_until(lambda: listens(head), 60)  # the second node needs the first
        done = subprocess.run(
            [sys.executable, "-c", TWO_NODES, str(tmp_path / "corpus"), str(raw), head],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert len(set(done.stdout.split())) == 2, done.stdout
        assert tree(tmp_path / "corpus") == whole
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


TWO_NODES = """
import sys
import time
from pathlib import Path
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.corpus.corpus_helpers import EngineConfig, build_three
ray.init(address=sys.argv[3], logging_level="warning", log_to_driver=False)
while len(ray.nodes()) < 2:
    time.sleep(0.2)
ranks = ray.remote(num_cpus=1)(lambda: ray.get_runtime_context().get_node_id())
for node in ray.nodes():
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    print(ray.get(ranks.options(scheduling_strategy=there).remote()))
ray.shutdown()
build_three(Path(sys.argv[1]), Path(sys.argv[2]), EngineConfig(kind="ray", address=sys.argv[3]))
"""
