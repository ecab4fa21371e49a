"""Groups exchange payloads over real sockets, agree on whose they use, and outlive each other."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.parallel.group_worker import FACTS, SECRET, do_rounds, expected, payload_of
from tests.ports import free_port
from zero2all.common.errors import AbsentGroupsError, PreemptedError, UsageError
from zero2all.config import ConfigError, config_from_values
from zero2all.parallel import group_link, group_mind
from zero2all.parallel.config import SlowLinkConfig
from zero2all.parallel.group_link import GroupLink, link_facts
from zero2all.parallel.group_wire import Inbox, inner_folder

WORKER = Path(__file__).with_name("group_worker.py")
RANKS = 2


def free_ports(count):
    return [free_port() for _ in range(count)]


class Threads:
    """Every rank of every group is a thread; what each returned or raised, by (group, rank)."""

    def __init__(
        self, settings, work, facts=None, run="test", join_seconds=60.0, ranks=RANKS, histories=("",) * 9, **options
    ):
        """`options`: `secret`, `expected`."""
        options = {"secret": SECRET, "expected": expected(), **options}
        self.found, self.links = {}, {}

        def rank_of(config, rank):
            place = (config.group, rank)
            try:
                own = {**FACTS, **(facts or {}).get(config.group, {})}
                link = GroupLink(
                    config, run, rank, ranks, own, join_seconds, history=histories[config.group], **options
                )
                self.links[place] = link
                try:
                    self.found[place] = work(link)
                finally:
                    link.close()
            except Exception as error:
                self.found[place] = error

        self.threads = [
            threading.Thread(target=rank_of, args=(config, rank), daemon=True)
            for config in settings
            for rank in range(ranks)
        ]
        for thread in self.threads:
            thread.start()

    def ends(self, seconds=180):
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), "somebody waits for ever"
        return self.found


def settings_of(groups, **fields):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(groups)]
    return [
        SlowLinkConfig(groups=addresses, group=group, **{"wait_seconds": 60.0, "bind": addresses[group], **fields})
        for group in range(groups)
    ]


def rounds_of(logs, place, rounds, **options):
    def work(link):
        return do_rounds(link, logs.setdefault((link.group, link.rank), []).append, rounds, **options)

    return work


@pytest.mark.parametrize("groups", [2, 3])
def test_all_ranks_of_all_groups_get_the_same_bytes_in_every_round(groups):
    logs = {}
    found = Threads(settings_of(groups), rounds_of(logs, None, 6, fragments=2)).ends()
    for rank in range(RANKS):
        assert len({found[group, rank] for group in range(groups)}) == 1
        assert all(row["set"] == list(range(groups)) for row in logs[0, rank])
        assert len(logs[0, rank]) == 12


def test_a_large_payload_is_cut_over_the_streams_and_counted():
    large = {group: random.Random(group).randbytes(20_000_003) for group in range(2)}

    def work(link):
        wait_until(lambda: len(link.data[1 - link.group].streams) == 4)
        link.offer(0, 0, large[link.group])
        found = link.collect(0, 0)
        return found == large, link.received_bytes

    found = Threads(settings_of(2), work, ranks=1, expected=expected(20_000_003)).ends()
    assert [found[group, 0] for group in range(2)] == [(True, 20_000_003)] * 2


def test_a_late_group_misses_a_round_and_stays_in_step():
    logs, settings = {}, settings_of(2, wait_seconds=1.0)

    def work(link):
        has_missed = lambda: any(row["round"] == 2 for row in logs.get((0, link.rank), []))  # noqa: E731
        slow = {2: lambda: wait_until(has_missed)} if link.group == 1 else None
        return do_rounds(link, logs.setdefault((link.group, link.rank), []).append, 6, slow=slow)

    found = Threads(settings, work).ends()
    assert {row["round"]: row["set"] for row in logs[0, 0]}[2] == [0]
    assert [row["set"] for row in logs[1, 0]] == [row["set"] for row in logs[0, 0]]
    for rank in range(RANKS):
        assert found[0, rank] == found[1, rank]
        assert isinstance(found[0, rank], bytes)


@pytest.mark.slow
def test_a_group_that_is_many_rounds_late_adopts_and_holds_no_payloads_for_them():
    logs, settings = {}, settings_of(2, wait_seconds=0.2)
    held = []

    def work(link):
        if link.group == 0:
            return do_rounds(link, logs.setdefault((0, link.rank), []).append, 60, step_seconds=0.1)
        log = logs.setdefault((1, link.rank), [])
        do_rounds(link, log.append, 5, step_seconds=0.1)
        state = bytes.fromhex(log[-1]["state"])
        wait_until(lambda: len(logs[0, 0]) > 25)
        held.append(len(link._payloads))
        return do_rounds(link, log.append, 60, state=state, number=5, step_seconds=0.1)

    found = Threads(settings, work).ends()
    assert found[0, 0] == found[1, 0]
    assert any("adopted" in row for row in logs[1, 0])
    assert max(held) < 8


def test_a_lower_numbered_group_that_comes_after_a_proposal_accepts_it():
    logs, is_held, is_open = {}, threading.Event(), threading.Event()

    def work(link):
        if link.group == 0:
            take = link.data[1]._on_payload
            link.data[1]._on_payload = lambda *payload: is_open.wait(300) and take(*payload)
            is_held.set()
            wait_until(lambda: (1, 0) in threads.links and threads.links[1, 0]._mind.proposal)
            link.offer(0, 0, payload_of(0, 0, 0))
            wait_until(lambda: threads.links[1, 0]._mind.heard[0]["reach"] == [0, 0])
            is_open.set()
        is_held.wait(300)
        return do_rounds(link, logs.setdefault(link.group, []).append, 3)

    threads = Threads(settings_of(2, wait_seconds=2.0), work, ranks=1)
    found = threads.ends()
    assert found[0, 0] == found[1, 0]
    assert [row["set"] for row in logs[0]] == [[1], [0, 1], [0, 1]]


class Relay:
    """A forwarded port, which can be cut and mended."""

    def __init__(self, target):
        self.target, self.pairs, self.is_cut = target, [], False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            if self.is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            self.pairs += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self.copy, args=pair, daemon=True).start()

    def copy(self, source, goal):
        try:
            while data := source.recv(65536):
                goal.sendall(data)
        except OSError:
            pass
        for each in (source, goal):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self, is_cut):
        self.is_cut = is_cut
        for each in self.pairs if is_cut else []:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_both_sides_of_a_partition_go_on_and_one_adopts_when_it_heals():
    inside = free_ports(2)
    relays = [Relay(port) for port in inside]
    addresses = [f"127.0.0.1:{relay.port}" for relay in relays]  # as seen from outside
    settings = [
        SlowLinkConfig(addresses, group, bind=f"127.0.0.1:{inside[group]}", wait_seconds=0.5) for group in range(2)
    ]
    logs = {}
    threads = Threads(settings, rounds_of(logs, None, 120, step_seconds=0.05))
    wait_until(lambda: len(logs.get((0, 0), [])) > 10)
    relays[0].cut(True)
    wait_until(lambda: all(logs[group, 0][-1].get("set") == [group] for group in range(2)))
    wait_until(lambda: all(sum(row.get("set") == [group] for row in logs[group, 0]) > 5 for group in range(2)))
    relays[0].cut(False)
    found = threads.ends()
    for rank in range(RANKS):
        assert found[0, rank] == found[1, rank]
        assert isinstance(found[0, rank], bytes)
        # That with fewer contributions; which one it is depends on how fast each was alone.
        assert sum(any("adopted" in row for row in logs[group, rank]) for group in range(2)) == 1
        assert logs[0, rank][-1]["set"] == [0, 1]


def wait_until(is_so, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def test_a_finished_group_gives_its_state_to_one_that_is_behind():
    settings, histories = settings_of(2), {}

    def train(link):
        state = do_rounds(link, [].append, 6 - 3 * link.group)  # group 1 ends, group 0 goes on alone
        histories[link.group] = link.history
        return state

    final = Threads(settings, train).found

    both = threading.Barrier(RANKS, timeout=60)

    def again(link):
        if link.group == 0:
            while link.serve_last(6, lambda: final[0, link.rank]):
                pass
            return None
        assert link.behind() == 6
        both.wait()  # a rank that leaves ends the other one's start
        return link.adopt()

    wait_until(lambda: len(final) == 4)
    found = Threads(settings, again, histories=histories).ends(30)
    assert [found[1, rank] for rank in range(RANKS)] == [(6, final[0, rank]) for rank in range(RANKS)]
    # Group 0 leaves while group 1 waits for its state: nobody waits for ever.
    found = Threads(settings, lambda _link: None, join_seconds=2.0, histories=histories).ends(30)
    assert "If they have finished the run, start them again, too" in str(found[1, 1])


def test_groups_that_differ_or_do_not_come_are_named():
    found = Threads(settings_of(2), lambda _link: None, facts={1: {"train.seed": 2}}).ends()
    assert "copy the packed data of one to all others" in str(found[0, 1])
    assert {type(each) for each in found.values()} == {UsageError}
    assert "Group 1 differs from group 0: train.seed 2 instead of 1" in str(found[0, 1])
    found = Threads(settings_of(3)[:2], lambda _link: None, join_seconds=3.0).ends()
    assert {type(each) for each in found.values()} == {AbsentGroupsError}
    assert "did not join within parallel.join_seconds (3 s): 2 (127.0.0.1:" in str(found[1, 1])
    assert "nothing listens on that port" in str(found[1, 1])
    settings = settings_of(2)
    wrong = [settings[0], SlowLinkConfig(settings[0].groups, 1, bind=f"127.0.0.1:{free_ports(1)[0]}")]
    Threads(wrong[:1], lambda _link: None, run="other")
    assert "Group 0 of the run 'other' listens there, not group 0 of 'test'" in str(
        Threads(wrong[1:], lambda _link: None).ends()[1, 0]
    )


def test_a_group_that_waits_says_why_and_ends_on_a_signal(monkeypatch, capfd):
    monkeypatch.setattr(group_mind, "NOTICE_SECONDS", 0.5)
    settings, stopped_at = settings_of(3), []
    silent = socket.create_server(("127.0.0.1", int(settings[0].groups[1].rpartition(":")[2])))  # another program
    name = SlowLinkConfig([*settings[0].groups[:2], "no.such.invalid:1"], 0, settings[0].bind)

    def is_stopped():
        stopped_at.extend([time.monotonic()] if "no.such" in (seen := capfd.readouterr().err) else [])
        said.append(seen)
        return bool(stopped_at)

    said = []
    with pytest.raises(PreemptedError, match="Stopped while it waited"):
        GroupLink(name, "test", 0, 1, FACTS, 60.0, SECRET, expected(), is_stopped=is_stopped)
    assert time.monotonic() < stopped_at[0] + 2
    assert "Group 2 cannot be reached at no.such.invalid:1: this machine does not know that name." in "".join(said)
    assert f"Group 1 at {settings[0].groups[1]} can be reached, but has not connected to group 0" in "".join(said)
    silent.close()


def test_bad_settings_are_all_named_before_anything_starts():
    fields = {"groups": ["a:1", "b", "a:1"], "group": 3, "bind": "x"}
    with pytest.raises(ConfigError) as caught:
        config_from_values({"parallel": {"slow_link": fields}}, "of a test")
    assert len(caught.value.problems) == 4
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:"):
        GroupLink(settings_of(2, bind=f"192.0.2.1:{free_ports(1)[0]}")[0], "test", 0, 1, FACTS, 1.0, SECRET, expected())
    one = settings_of(2)[0]
    with (
        socket.create_server(("127.0.0.1", int(one.bind.rpartition(":")[2]))),
        pytest.raises(UsageError, match="Is group 0 already running on this machine"),
    ):
        GroupLink(one, "test", 0, 1, FACTS, 1.0, SECRET, expected())
    with pytest.raises(UsageError, match="this one has no number"):
        GroupLink(SlowLinkConfig(["a:1", "b:1"]), "test", 0, 1, FACTS, 1.0, SECRET, expected())
    assert link_facts({"parallel.slow_link.group": 1, "train.seed": 2}) == {"train.seed": 2}


@pytest.mark.parametrize("name", ["Z2A_GROUP", "ZERO2ALL_GROUP"])
def test_the_environment_may_number_a_group_also_by_the_name_of_before(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert group_link.own_group(SlowLinkConfig(["a:1", "b:1"])) == 1
    assert group_link.own_group(SlowLinkConfig(["a:1", "b:1"], group=0)) == 0


class Processes:
    """Every rank is a process that can be killed."""

    def __init__(self, folder, settings, rounds, step_seconds):
        self.folder, self.settings, self.options = folder, settings, {"rounds": rounds, "step_seconds": step_seconds}
        self.running, self.lives = {}, dict.fromkeys(range(len(settings)), 0)
        for group in range(len(settings)):
            self.start(group)

    def start(self, group):
        self.lives[group] += 1
        config = self.settings[group]
        fields = {name: getattr(config, name) for name in ("groups", "group", "bind", "streams", "wait_seconds")}
        for rank in range(RANKS):
            words = json.dumps({**fields, **self.options, "rank": rank})
            path = self.folder / f"{group}-{rank}-{self.lives[group]}.jsonl"
            command = [sys.executable, str(WORKER), words, str(path)]
            self.running[group, rank] = subprocess.Popen(command)

    def kill(self, group):
        for rank in range(RANKS):
            self.running[group, rank].send_signal(signal.SIGKILL)
        for rank in range(RANKS):
            self.running[group, rank].wait()

    def rows(self, group, rank=0, life=None):
        path = self.folder / f"{group}-{rank}-{life or self.lives[group]}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def close(self):
        if sys.exc_info()[0] is not None:  # a stall, perhaps: every rank prints what it waits for
            for process in self.running.values():
                process.send_signal(signal.SIGUSR1)
            time.sleep(2)
        for process in self.running.values():
            process.kill()
            process.wait()


def check_rounds(processes, groups):
    """Of all rounds: one set and one state in all groups; none twice in a life; both ranks alike."""
    seen = {}
    for group in range(groups):
        for life in range(1, processes.lives[group] + 1):
            by_rank = [[row for row in processes.rows(group, rank, life) if "set" in row] for rank in range(RANKS)]
            numbers = [row["round"] for row in by_rank[0]]
            assert numbers == sorted(set(numbers)), "a round twice"
            for rank, rows in enumerate(by_rank):
                for row in rows:
                    first = seen.setdefault((row["round"], rank), row)
                    assert (first["set"], first["state"]) == (row["set"], row["state"]), (group, life, first, row)
            assert all(one["set"] == two["set"] for one, two in zip(*by_rank, strict=False))
    return {number: row["set"] for (number, rank), row in seen.items() if rank == 0}


@pytest.mark.slow
def test_a_group_that_is_killed_in_a_round_is_left_behind_and_adopts_when_it_is_back(tmp_path):
    processes = Processes(tmp_path, settings_of(3, wait_seconds=1.0), rounds=100_000, step_seconds=0.05)
    try:
        wait_until(lambda: all(len(processes.rows(group)) > 5 for group in range(3)))
        processes.kill(0)  # the leader
        killed, before = time.time(), len(processes.rows(1))
        wait_until(lambda: len(processes.rows(1)) > before + 10)
        after = [row for row in processes.rows(1) if row["time"] > killed and row.get("set") == [1, 2]]
        assert after[0]["time"] - killed < 6
        processes.start(0)
        wait_until(lambda: sum(row.get("set") == [0, 1, 2] for row in processes.rows(0)) > 5)
        assert "adopted" in processes.rows(0)[1]
        check_rounds(processes, 3)
    finally:
        processes.close()


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 3])
def test_twenty_kills_at_random_moments(tmp_path, groups):
    chance = random.Random(groups)
    processes = Processes(tmp_path, settings_of(groups, wait_seconds=1.0), rounds=100_000, step_seconds=0.01)
    try:
        for _ in range(20):
            wait_until(lambda: all(sum("set" in row for row in processes.rows(group)) > 2 for group in range(groups)))
            time.sleep(chance.random() / 4)
            group = chance.randrange(groups)
            processes.kill(group)
            time.sleep(chance.choice([0.0, 0.5, 2.0]))
            processes.start(group)
        wait_until(lambda: processes.rows(0)[-1].get("set") == list(range(groups)))
        sets = check_rounds(processes, groups)
        assert any(len(found) < groups for found in sets.values())
    finally:
        processes.close()


def test_a_group_that_comes_twice_from_two_machines_is_named_and_the_first_is_unharmed(monkeypatch, capfd):
    monkeypatch.setattr(group_link, "TWICE_SECONDS", 1.0)
    settings, logs, is_met, is_refused = settings_of(2), {}, threading.Event(), threading.Event()

    def work(link):
        is_met.set()
        assert is_refused.wait(60)
        return do_rounds(link, logs.setdefault((link.group, link.rank), []).append, 6)

    threads = Threads(settings, work)
    assert is_met.wait(60)
    elsewhere = f"127.0.0.1:{free_port()}"
    twin = SlowLinkConfig(groups=[settings[0].groups[0], elsewhere], group=1, bind=elsewhere)
    found = Threads([twin], lambda _link: None).ends(60)
    is_refused.set()
    for error in found.values():
        assert isinstance(error, UsageError)
        assert "Group 1 came twice: group 0 sees it at 127.0.0.1:" in str(error)
    found = threads.ends()
    assert found[0, 0] == found[1, 0]
    assert all(row["set"] == [0, 1] for row in logs[0, 0])
    assert capfd.readouterr().err.count("group 1 came twice: from 127.0.0.1:") == 1


def test_a_process_that_has_fallen_silent_gives_its_place_to_the_next(monkeypatch):
    monkeypatch.setattr(group_mind, "STATUS_SECONDS", 3.0)
    monkeypatch.setattr(group_link, "ALIVE_SECONDS", 0.5)
    settings, is_met, is_over = settings_of(2), threading.Event(), threading.Event()

    def work(_link):
        is_met.set()
        return is_over.wait(60)

    threads = Threads(settings, work, ranks=1)
    assert is_met.wait(60)
    elsewhere = f"127.0.0.1:{free_port()}"
    twin = SlowLinkConfig(groups=[settings[0].groups[0], elsewhere], group=1, bind=elsewhere)
    assert Threads([twin], lambda _link: "joined", ranks=1).ends(60) == {(1, 0): "joined"}
    is_over.set()
    threads.ends()


def test_the_payloads_of_the_test_differ():
    assert (
        len({payload_of(group, rank, number) for group in range(3) for rank in range(2) for number in range(3)}) == 18
    )


@pytest.fixture
def short_temporary(monkeypatch):
    """An empty folder for temporary files whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def test_a_group_that_is_started_twice_leaves_the_sockets_of_the_first_alone(short_temporary):
    folder = inner_folder("run", 0, 1, SECRET)
    first = Inbox(folder, 1, lambda _greeting, connection: connection.close())
    with pytest.raises(UsageError, match="already running on this machine: another process has its rank 1"):
        Inbox(folder, 1, lambda _greeting, connection: connection.close())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.connect(str(folder / "1.sock"))
    other = Inbox(folder, 0, lambda _greeting, connection: connection.close())
    first.close()
    first.close()
    assert sorted(path.name for path in folder.iterdir()) == ["0.lock", "0.sock"]
    Inbox(folder, 1, lambda _greeting, connection: connection.close()).close()
    other.close()
    assert list(short_temporary.iterdir()) == []  # the last one removes the folder


@pytest.mark.parametrize("planted", ["a link", "mode 0777", "another owner"])
def test_the_sockets_lie_in_a_folder_of_this_user_alone(planted, short_temporary):
    folder = inner_folder("run", 0, 1, SECRET)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert inner_folder("run", 0, 1, SECRET) == folder
    if planted == "a link":
        folder.rename(short_temporary / "elsewhere")
        folder.symlink_to(short_temporary / "elsewhere")
    elif planted == "mode 0777":
        folder.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    else:
        pytest.skip("only root gives a folder to another user")
    with pytest.raises(UsageError, match="not a folder of this user alone"):
        inner_folder("run", 0, 1, SECRET)
