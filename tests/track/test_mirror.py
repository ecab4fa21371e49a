"""Runs on another machine, copied over ssh: a real sshd on loopback, real keys, real broken connections."""

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import LONG_SECONDS
from tests.track.logged import logged
from tests.track.sshd import Sshd, start_sshd
from tests.waiting import wait_until
from zero2all.cli import main
from zero2all.common.errors import UsageError
from zero2all.track import MetricsWriter
from zero2all.track.mirror import Mirror, parse_line
from zero2all.track.ssh import OPTIONS, Address, parse_address


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with start_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


class Watched(Mirror):
    """A mirror that keeps all its states: one may last only a moment."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "state":
            self.__dict__.setdefault("states", []).append(value)


@pytest.fixture
def mirror_of(sshd: Sshd, tmp_path: Path) -> Iterator[Callable[..., Mirror]]:
    """Start a mirror of a folder on the far side (which is this machine)."""
    started: list[Mirror] = []

    def start(folder: Path, cache: str = "cache", **options: object) -> Mirror:
        mirror = Watched(sshd.url(folder), tmp_path / cache, sshd.command, retry_seconds=(0.05, 0.2), **options)  # type: ignore[arg-type]
        started.append(mirror)
        mirror.start()
        return mirror

    yield start
    for mirror in started:
        mirror.stop()


def synced(mirror: Mirror) -> Mirror:
    assert mirror.wait_synced(LONG_SECONDS), mirror.state
    return mirror


def content(folder: Path) -> dict[str, bytes]:
    """All files; the mirror may be at work, so what goes while we look is not there."""
    found = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def rows(count: int, first: int = 0) -> bytes:
    return b"".join(b'{"step":%d,"time":1.5,"tokens":0,"values":{"loss":2.5}}\n' % step for step in range(first, count))


def test_metrics_config_and_anneal_of_every_run_are_copied_and_then_next_to_nothing_moves(mirror_of, tmp_path):
    far = tmp_path / "far"
    put(far / "a" / "metrics" / "train-1.jsonl", rows(10_000))
    put(far / "a" / "metrics" / "eval-12.jsonl", rows(3))
    put(far / "a" / "config.yaml", b"name: a\n")
    put(far / "a" / "anneal.json", b'{"from_step": 90, "steps": 20}')
    put(far / "中文 run" / "metrics" / "train-1.jsonl", rows(5))
    wanted = {**content(far), "linked/metrics/train-1.jsonl": rows(10)}
    put(tmp_path / "scratch" / "a" / "metrics" / "train-1.jsonl", rows(10))
    (far / "linked").symlink_to(tmp_path / "scratch" / "a")
    for name in ("checkpoints/step-1/model.safetensors", "metrics/notes.txt", "media/sample.png"):
        put(far / "a" / name, b"?")
    put(far / "a" / "metrics" / "deeper" / "train-1.jsonl", b"?")
    mirror = synced(mirror_of(far))
    assert (content(mirror.folder), mirror.state) == (wanted, "live")
    assert mirror.problems == {"files that do not belong to a run": 1}, "deeper/train-1.jsonl"
    before = mirror._connection.received_bytes
    wait_until(lambda: mirror._connection.received_bytes >= before + 38)  # one answer "same"
    assert mirror._connection.received_bytes - before < 200


def test_the_path_may_be_a_workspace_or_one_run_or_below_the_home_folder(mirror_of, sshd, tmp_path):
    work = tmp_path / "work"
    put(work / "config.yaml", b"not a run's")
    put(work / "runs" / "a" / "metrics" / "train-1.jsonl", rows(10))
    below_home = Mirror(f"ssh://{sshd.alias}/~/{os.path.relpath(work, Path.home())}", tmp_path / "home", sshd.command)
    with below_home:
        for mirror in [below_home, mirror_of(work), mirror_of(work / "runs" / "a")]:
            assert content(synced(mirror).folder) == {"a/metrics/train-1.jsonl": rows(10)}


def test_new_rows_and_runs_other_files_and_deletions_arrive_over_one_connection(mirror_of, tmp_path, monkeypatch):
    monkeypatch.setattr("zero2all.track.mirror.GONE_AFTER_SECONDS", 0.3)
    far = tmp_path / "far"
    fresh = {"shrunk": rows(3), "longer": rows(3_000, 1), "as-long": b"x" * len(rows(1_000))}
    for name in (*fresh, "old"):
        put(far / name / "metrics" / "train-1.jsonl", rows(1_000))
    with MetricsWriter(far / "live") as run:
        run.log({"loss": 1.0}, step=0, tokens=0)
        mirror = synced(mirror_of(far))

        def here(name: str) -> bytes:
            return (mirror.folder / name / "metrics" / "train-1.jsonl").read_bytes()

        for step in range(1, 4):
            run.log({"loss": 1.0}, step=step, tokens=0)
            wait_until(lambda step=step: b'"step":%d,' % step in here("live"), why=lambda: mirror.state)
    put(far / "new" / "metrics" / "train-1.jsonl", rows(20))
    (far / "old" / "metrics" / "train-1.jsonl").unlink()
    for name, data in fresh.items():
        path = far / name / "metrics" / "train-1.jsonl"
        if name == "shrunk":
            path.write_bytes(data)
        else:
            put(tmp_path / "fresh", data).replace(path)
        wait_until(lambda name=name, data=data: here(name) == data, why=lambda: mirror.state)
        append(path, b"more\n")
    wait_until(lambda: content(mirror.folder) == content(far), why=lambda: mirror.state)
    wait_until(lambda: not (mirror.folder / "old").exists(), why=lambda: mirror.state)  # its folder goes after its file
    assert mirror.connections == 1


def test_a_connection_cut_in_the_middle_of_a_file_goes_on_where_it_was(mirror_of, sshd, tmp_path):
    path = put(tmp_path / "far" / "a" / "metrics" / "train-1.jsonl", os.urandom(6_000_000))
    mirror = mirror_of(tmp_path / "far", bytes_per_second=1_000_000)  # seconds for the whole file
    here = mirror.folder / "a" / "metrics" / "train-1.jsonl"
    wait_until(lambda: here.exists() and here.stat().st_size > 300_000, why=lambda: mirror.state)
    sshd.signal_connections(signal.SIGKILL)
    came_so_far = here.stat().st_size
    wait_until(lambda: any(state.startswith("broken: ") for state in mirror.states), why=lambda: mirror.state)
    assert came_so_far < 6_000_000
    append(path, b'written while nobody listened, and {"half a li')
    synced(mirror)
    assert (here.read_bytes(), mirror.connections) == (path.read_bytes(), 2)
    total = mirror.received_bytes + mirror._connection.received_bytes
    assert total < 6_000_000 * 1.5, "what had arrived was not sent again"


def test_a_network_that_falls_silent_is_noticed_and_left(mirror_of, sshd, tmp_path, monkeypatch):
    put(tmp_path / "far" / "a" / "metrics" / "train-1.jsonl", rows(10))
    mirror = synced(mirror_of(tmp_path / "far"))
    monkeypatch.setattr("zero2all.track.ssh.ANSWER_SECONDS", 1.0)
    sshd.signal_connections(signal.SIGSTOP)
    wait_until(lambda: "broken: no answer from far-box within 1 s" in mirror.states, why=lambda: mirror.state)
    monkeypatch.undo()
    assert content(synced(mirror).folder) == content(tmp_path / "far")


def test_a_second_start_continues_from_what_the_first_copied(mirror_of, tmp_path):
    path = put(tmp_path / "far" / "a" / "metrics" / "train-1.jsonl", os.urandom(6_000_000))
    synced(mirror_of(tmp_path / "far")).stop()
    append(path, b"later\n")
    mirror = synced(mirror_of(tmp_path / "far"))
    assert (mirror.folder / "a" / "metrics" / "train-1.jsonl").read_bytes() == path.read_bytes()
    assert mirror._connection.received_bytes < 10_000


def test_two_viewers_of_one_address_do_not_write_into_the_same_copy(mirror_of, tmp_path):
    put(tmp_path / "far" / "a" / "metrics" / "train-1.jsonl", rows(10))
    first, second = [synced(mirror) for mirror in [mirror_of(tmp_path / "far") for _ in range(2)]]
    assert first.folder != second.folder
    assert content(first.folder) == content(second.folder)


def test_why_it_cannot_connect_is_said_and_stop_does_not_wait(mirror_of, sshd, tmp_path):
    absent = mirror_of(tmp_path / "absent")
    wait_until(lambda: "has no folder" in absent.state, why=lambda: absent.state)
    rarely = {"retry_seconds": (600.0, 600.0)}
    refused = Mirror(f"ssh://nobody-at-all@{sshd.alias}/x", tmp_path / "refused", sshd.command, **rarely)
    unreachable = Mirror("ssh://no-such-host.invalid/x", tmp_path / "unreachable", sshd.command, **rarely)
    for mirror, reason in ((refused, "Permission denied"), (unreachable, "no-such-host")):
        with mirror:
            wait_until(lambda m=mirror: m.state != "connecting", why=lambda m=mirror: m.state)
            assert mirror.state.startswith("broken: ")
            assert reason in mirror.state
            began = time.monotonic()
        assert time.monotonic() - began < 300, "it waited until it would have tried again"
    put(tmp_path / "absent" / "a" / "metrics" / "train-1.jsonl", rows(1))
    assert content(synced(absent).folder) == {"a/metrics/train-1.jsonl": rows(1)}, "it kept trying"


def test_what_login_scripts_print_is_not_taken_for_an_answer(sshd, tmp_path):
    put(tmp_path / "far" / "a" / "metrics" / "train-1.jsonl", rows(1))
    noisy = tmp_path / "noisy-ssh"
    noisy.write_text('#!/bin/sh\necho "Welcome! list files end"\nprintf "no newline"\nexec ssh "$@"\n')
    noisy.chmod(0o755)
    with Mirror(sshd.url(tmp_path / "far"), tmp_path / "cache", [str(noisy), *sshd.command[1:]]) as mirror:
        assert content(synced(mirror).folder) == {"a/metrics/train-1.jsonl": rows(1)}


def test_names_with_shell_code_options_and_line_breaks_run_nothing_and_escape_nothing(mirror_of, tmp_path):
    far = tmp_path / "far; touch PWNED $(touch PWNED) `touch PWNED` 'x"
    names = ["-rf", "$(touch PWNED)", "`touch PWNED`", "'; touch PWNED; '", '" ; touch PWNED; "', "a b  c ", "*", "é"]
    for name in names:
        put(far / name / "metrics" / "train-1.jsonl", name.encode())
    for name in ("line\nbreak", "back\\slash"):
        put(far / name / "metrics" / "train-1.jsonl", b"?")
    mirror = synced(mirror_of(far))
    assert content(mirror.folder) == {f"{name}/metrics/train-1.jsonl": name.encode() for name in names}
    assert not list(tmp_path.rglob("PWNED"))
    assert not (Path.home() / "PWNED").exists()
    assert sum(mirror.problems.values()) == 3, "two halves of the line break, and the backslash"


def test_a_listed_path_that_could_escape_is_left_out():
    for name in (
        *(b"./../../etc/metrics/train-1.jsonl", b"./a/metrics/../../../x-1.jsonl", b"/etc/metrics/train-1.jsonl"),
        *(b"../a/metrics/train-1.jsonl", b"./a//train-1.jsonl", b"./a/metrics/tr\x00ain-1.jsonl"),
        *(b"./a/metrics/tr\x1bain-1.jsonl", b"./a/metrics/tr\xffain-1.jsonl", b"./a/media/1.png"),
        *(b"./" + b"x" * 300 + b"/config.yaml", b"./config.yaml"),
    ):
        assert parse_line(b"12 -rw-r--r-- 1 0 0 34 Nov 15 08:02 " + name, None) is None, name


def test_addresses_are_read_and_what_is_none_is_refused_with_an_example():
    good = {
        "ssh://box/data/runs": Address("box", "/data/runs"),
        "ssh://me@box:2222/data/my%20runs": Address("box", "/data/my runs", "me", 2222),
        "ssh://box/~/work": Address("box", "./work"),
        "ssh://box/~": Address("box", "."),
        "ssh://[::1]:22/x": Address("::1", "/x", None, 22),
        "ssh://Gpu_Box.site-1/x;y": Address("Gpu_Box.site-1", "/x;y"),
    }
    assert {url: parse_address(url) for url in good} == good
    bad = ["ssh://-oProxyCommand=x/runs", "ssh://-l@box/runs", "ssh://me:secret@box/runs", "ssh://box", "ssh:///runs"]
    bad += ["ssh://box:port/runs", "ssh://box:99999/runs", "ssh://bo x/runs", "ssh://$(x)/runs", "ssh://box/a%0Ab"]
    for url in (*bad, "ssh://box/%ff", "http://box/runs", "ssh://box/runs?x", "ssh://[::1/x"):
        with pytest.raises(UsageError, match="ssh://gpu-box"):
            parse_address(url)
    # ssh never asks, never forwards and never becomes a master
    assert {"BatchMode=yes", "ClearAllForwardings=yes", "ControlMaster=no", "RemoteCommand=none"} <= set(OPTIONS)


def test_verbs_take_an_address_and_say_what_is_wrong_with_it(sshd, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("Z2A_SSH", shlex.join(sshd.command))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("one", "two"):
        logged(tmp_path / "runs" / name, {"loss": 2.5}, first=7)
    assert main(["watch", "--once", sshd.url(tmp_path / "runs" / "one")]) == 0
    out = capsys.readouterr().out
    assert "step 7" in out
    assert "\x1b" not in out
    to_csv = ["--to", "csv", str(tmp_path / "out.csv")]
    assert main(["track", "export", sshd.url(tmp_path / "runs"), *to_csv]) == 2
    assert "has 2 runs: one, two." in capsys.readouterr().err
    assert main(["track", "export", sshd.url(tmp_path / "runs" / "two"), *to_csv]) == 0
    assert (tmp_path / "out.csv").read_text().startswith("step,tokens,time,loss\n7,70,")
    assert main(["watch", "--once", sshd.url(tmp_path / "nowhere")]) == 3
    assert "has no folder" in capsys.readouterr().err
