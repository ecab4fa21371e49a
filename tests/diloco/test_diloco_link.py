"""Groups exchange payloads over real sockets, agree on whose they use, and outlive each other."""

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.diloco.group_worker import do_rounds, expected, membership, state_bytes
from tests.ports import free_port
from tests.waiting import wait_until
from zero2all.common.errors import AbsentGroupsError, PeerFailureError, PreemptedError, UsageError
from zero2all.config import ConfigError, config_from_values
from zero2all.diloco import coordinator
from zero2all.diloco import link as diloco_link
from zero2all.diloco.config import DilocoConfig
from zero2all.diloco.link import GroupLink, link_facts, own_group
from zero2all.diloco.messages import GroupEra, Key
from zero2all.diloco.transport import CHUNK_BYTES, PAYLOAD, STATE, Channel, PayloadId

WORKER = Path(__file__).with_name("group_worker.py")


def free_ports(count):
    return [free_port() for _ in range(count)]


class Threads:
    """Every group is a thread; what each returned or raised, by group."""

    def __init__(self, settings, work, facts=None, histories=("",) * 9, **options):
        self.found, self.links = {}, {}

        def run(config):
            group = config.group
            try:
                own = {**options, "history": histories[group]}
                own |= {"facts": (facts or {})[group]} if group in (facts or {}) else {}
                link = self.links[group] = GroupLink(membership(config, **own))
                try:
                    self.found[group] = work(link)
                finally:
                    link.close()
            except Exception as error:
                self.found[group] = error

        self.threads = [threading.Thread(target=run, args=(config,), daemon=True) for config in settings]
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
    fields = {"wait_seconds": 60.0, **fields}
    return [DilocoConfig(addresses, group, **{"bind": addresses[group], **fields}) for group in range(groups)]


def twin_of(settings):
    """Group 1 from another address."""
    elsewhere = f"127.0.0.1:{free_port()}"
    return DilocoConfig(groups=[settings[0].groups[0], elsewhere], group=1, bind=elsewhere)


def rounds_of(logs, rounds, **options):
    return lambda link: do_rounds(link, logs.setdefault(link.group, []).append, rounds, **options)


def test_a_large_payload_is_cut_over_the_streams_and_counted():
    large = {group: random.Random(group).randbytes(20_000_003) for group in range(2)}

    def work(link):
        wait_until(lambda: len(link.data[1 - link.group].streams) == 4)
        link.offer(Key(0, 0), large[link.group])
        found = link.collect(Key(0, 0))
        return found == large, link.received_bytes

    found = Threads(settings_of(2), work, expected=expected(20_000_003)).ends()
    assert found == dict.fromkeys(range(2), (True, 20_000_003))


@pytest.mark.parametrize("late", [0, 2], ids=["the coordinator", "another"])
def test_a_late_group_misses_a_round_and_stays_in_step(late):
    logs = {}

    def work(link):
        others_went_on = lambda: any(row["round"] == 2 for row in logs.get(1, []))  # noqa: E731
        slow = {2: lambda: wait_until(others_went_on)} if link.group == late else None
        log = logs.setdefault(link.group, [])
        noted = lambda row: log.append({**row, "term": link._coordinator.term})  # noqa: E731
        return do_rounds(link, noted, 5, fragments=2, slow=slow)

    found = Threads(settings_of(3, wait_seconds=1.0), work).ends()
    sets = [(row["round"], row["set"]) for row in logs[1]]
    everybody, others = [0, 1, 2], [group for group in range(3) if group != late]
    assert sets[:4] == [(0, everybody)] * 2 + [(1, everybody)] * 2
    assert (2, others) in sets
    assert [[(row["round"], row["set"]) for row in logs[group]] for group in range(3)] == [sets] * 3
    assert len({*found.values()}) == 1
    assert isinstance(found[0], bytes)
    assert {row["term"] for row in logs[1] if row["round"] < 4} == {0}  # nobody took the place of the coordinator


def test_of_several_states_only_the_newest_is_held():
    """A group that asks again and again, or sends states that nobody asked for, must not fill the memory of another."""
    expected = SimpleNamespace(size_fault=lambda _item, _total: "")
    channel = Channel("group 1", None, lambda _: None, expected=expected)
    payload = PayloadId(PAYLOAD, Key(3, 0), GroupEra(0, 0))
    channel.send(payload, b"p")
    for request in range(5):
        channel.send(PayloadId(STATE, Key(request, 0), GroupEra(0, 0)), bytes(10))
        channel._take_chunk(PayloadId(STATE, Key(request, 0), GroupEra(1, 0)), 0, 10 * CHUNK_BYTES, b"")
    assert [(item.kind, item.key.number) for item in channel._unacknowledged] == [(PAYLOAD, 3), (STATE, 4)]
    assert [item.key.number for item in channel._arriving] == [4]


@pytest.mark.slow
def test_a_group_that_is_many_rounds_late_adopts_and_holds_no_payloads_for_them():
    logs, held = {}, []

    def work(link):
        if link.group == 0:
            return do_rounds(link, logs.setdefault(0, []).append, 60, step_seconds=0.1)
        log = logs.setdefault(1, [])
        do_rounds(link, log.append, 5, step_seconds=0.1)
        state = bytes.fromhex(log[-1]["state"])
        wait_until(lambda: len(logs[0]) > 25)
        held.append(len(link._coordinator.payloads))
        return do_rounds(link, log.append, 60, state=state, number=5, step_seconds=0.1)

    found = Threads(settings_of(2, wait_seconds=0.2), work).ends()
    assert found[0] == found[1]
    assert any("adopted" in row for row in logs[1])
    assert max(held) < 12


def test_a_finished_group_gives_its_state_to_one_that_is_behind():
    settings, histories = settings_of(2, wait_seconds=5.0), {}

    def train(link):
        state = do_rounds(link, [].append, 6 - 3 * link.group)  # group 1 ends, group 0 goes on alone
        histories[link.group] = link.history
        return state

    final = Threads(settings, train).ends()

    def again(link, served):
        if link.group == 1:
            assert link.is_behind
            return link.adopt()
        while link.stays():
            if link.is_asked:
                link.serve(served)
        return None

    sound, bad = partial(again, served=state_bytes(6, final[0])), partial(again, served=b"\xff" * 36)
    assert Threads(settings, sound, histories=histories).ends(30)[1] == state_bytes(6, final[0])
    found = Threads(settings, bad, histories=histories, join_seconds=10.0).ends(60)
    assert isinstance(found[1], PeerFailureError)
    assert re.search(r"Group 0 \(127\.0\.0\.1:(?s:.*)it is bad", str(found[1])), "its sender is named"
    # Group 0 leaves while group 1 waits for its state: nobody waits for ever.
    found = Threads(settings, lambda _link: None, join_seconds=2.0, histories=histories).ends(30)
    assert "If they have finished the run, start them again, too" in str(found[1])


def test_groups_that_differ_or_do_not_come_are_named():
    found = Threads(settings_of(2), lambda _link: None, facts={1: {"train.seed": 2}}).ends()
    assert "copy the packed data of one to all others" in str(found[0])
    assert {type(each) for each in found.values()} == {UsageError}
    assert "Group 1 differs from group 0: train.seed 2 instead of 1" in str(found[0])
    found = Threads(settings_of(3)[:2], lambda _link: None, join_seconds=3.0).ends()
    assert {type(each) for each in found.values()} == {AbsentGroupsError}
    assert "did not join within parallel.join_seconds (3 s): 2 (127.0.0.1:" in str(found[1])
    assert "nothing listens on that port" in str(found[1])
    settings = settings_of(2)
    wrong = [settings[0], DilocoConfig(settings[0].groups, 1, bind=f"127.0.0.1:{free_ports(1)[0]}")]
    Threads(wrong[:1], lambda _link: None, run="other")
    found = Threads(wrong[1:], lambda _link: None).ends()
    assert "Group 0 of the run 'other' listens there, not group 0 of 'test'" in str(found[1])


def test_a_group_that_waits_says_why_and_ends_on_a_signal(monkeypatch, capfd):
    monkeypatch.setattr(diloco_link, "NOTICE_SECONDS", 0.5)
    settings, stopped_at = settings_of(3), []
    silent = socket.create_server(("127.0.0.1", int(settings[0].groups[1].rpartition(":")[2])))  # another program
    name = DilocoConfig([*settings[0].groups[:2], "no.such.invalid:1"], 0, settings[0].bind)

    def is_stopped():
        stopped_at.extend([time.monotonic()] if "no.such" in (seen := capfd.readouterr().err) else [])
        said.append(seen)
        return bool(stopped_at)

    said = []
    with pytest.raises(PreemptedError, match="Stopped while it waited"):
        GroupLink(membership(name, is_stopped=is_stopped))
    assert time.monotonic() < stopped_at[0] + 2
    assert "Group 2 cannot be reached at no.such.invalid:1: this machine does not know that name." in "".join(said)
    assert f"Group 1 at {settings[0].groups[1]} can be reached, but has not connected to group 0" in "".join(said)
    silent.close()


def test_bad_settings_are_all_named_before_anything_starts_and_the_environment_may_number_a_group(monkeypatch):
    fields = {"groups": ["a:1", "b", "a:1"], "group": 3, "bind": "x"}
    with pytest.raises(ConfigError) as caught:
        config_from_values({"diloco": fields}, "of a test")
    assert len(caught.value.problems) == 4
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:"):
        GroupLink(membership(settings_of(2, bind=f"192.0.2.1:{free_ports(1)[0]}")[0]))
    one = settings_of(2)[0]
    with (
        socket.create_server(("127.0.0.1", int(one.bind.rpartition(":")[2]))),
        pytest.raises(UsageError, match="Is group 0 already running on this machine"),
    ):
        GroupLink(membership(one))
    assert link_facts({"diloco.group": 1, "train.seed": 2}) == {"train.seed": 2}
    with pytest.raises(UsageError, match="this one has no number"):
        own_group(DilocoConfig(["a:1", "b:1"]))
    monkeypatch.setenv("Z2A_GROUP", "1")
    assert (own_group(DilocoConfig(["a:1", "b:1"])), own_group(DilocoConfig(["a:1", "b:1"], group=0))) == (1, 0)


class Processes:
    def __init__(self, folder, settings, rounds, step_seconds):
        self.folder, self.settings, self.options = folder, settings, {"rounds": rounds, "step_seconds": step_seconds}
        self.running, self.lives = {}, dict.fromkeys(range(len(settings)), 0)
        for group in range(len(settings)):
            self.start(group)

    def start(self, group):
        self.lives[group] += 1
        config = self.settings[group]
        fields = {name: getattr(config, name) for name in ("groups", "group", "bind", "streams", "wait_seconds")}
        path = self.folder / f"{group}-{self.lives[group]}.jsonl"
        words = json.dumps({**fields, **self.options})
        self.running[group] = subprocess.Popen([sys.executable, str(WORKER), words, str(path)])

    def kill(self, group):
        self.running[group].send_signal(signal.SIGKILL)
        self.running[group].wait()

    def rows(self, group, life=None):
        path = self.folder / f"{group}-{life or self.lives[group]}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def close(self):
        for process in self.running.values():
            process.kill()
            process.wait()


def check_rounds(processes, groups):
    """Of all rounds: one set and one state in all groups; none twice in a life."""
    seen = {}
    for group in range(groups):
        for life in range(1, processes.lives[group] + 1):
            rows = [row for row in processes.rows(group, life) if "set" in row]
            numbers = [row["round"] for row in rows]
            assert numbers == sorted(set(numbers)), "a round twice"
            for row in rows:
                first = seen.setdefault(row["round"], row)
                assert (first["set"], first["state"]) == (row["set"], row["state"]), (group, life, first, row)
    return {number: row["set"] for number, row in seen.items()}


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 3])
def test_a_killed_coordinator_is_left_behind_and_adopts_when_it_is_back_and_so_after_twenty_kills(tmp_path, groups):
    chance = random.Random(groups)
    processes = Processes(tmp_path, settings_of(groups, wait_seconds=1.0), rounds=100_000, step_seconds=0.01)
    try:
        wait_until(lambda: all(len(processes.rows(group)) > 5 for group in range(groups)))
        processes.kill(0)  # the coordinator
        killed, before, others = time.time(), len(processes.rows(1)), list(range(1, groups))
        wait_until(lambda: len(processes.rows(1)) > before + 10)
        after = [row for row in processes.rows(1) if row["time"] > killed and row.get("set") == others]
        assert after[0]["time"] - killed < 6
        processes.start(0)
        wait_until(lambda: sum(row.get("set") == list(range(groups)) for row in processes.rows(0)) > 5)
        assert "adopted" in processes.rows(0)[1]
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
    monkeypatch.setattr(diloco_link, "DUPLICATE_SECONDS", 1.0)
    settings, logs, is_met, is_refused = settings_of(2), {}, threading.Event(), threading.Event()

    def work(link):
        is_met.set()
        assert is_refused.wait(60)
        return do_rounds(link, logs.setdefault(link.group, []).append, 6)

    threads = Threads(settings, work)
    assert is_met.wait(60)
    found = Threads([twin_of(settings)], lambda _link: None).ends(60)
    is_refused.set()
    for error in found.values():
        assert isinstance(error, UsageError)
        assert "Group 1 connected twice: group 0 sees it at 127.0.0.1:" in str(error)
    found = threads.ends()
    assert found[0] == found[1]
    assert all(row["set"] == [0, 1] for row in logs[0])
    assert capfd.readouterr().err.count("group 1 connected twice: from 127.0.0.1:") == 1


def test_a_process_that_has_fallen_silent_gives_its_place_to_the_next(monkeypatch):
    monkeypatch.setattr(coordinator, "STATUS_SECONDS", 3.0)
    monkeypatch.setattr(diloco_link, "ALIVE_SECONDS", 0.5)
    settings, is_met, is_over = settings_of(2), threading.Event(), threading.Event()

    def work(_link):
        is_met.set()
        return is_over.wait(60)

    threads = Threads(settings, work)
    assert is_met.wait(60)
    assert Threads([twin_of(settings)], lambda _link: "joined").ends(60) == {1: "joined"}
    is_over.set()
    threads.ends()
