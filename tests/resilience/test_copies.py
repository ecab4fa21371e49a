"""Copies of memory checkpoints on the next machine: three machines with two ranks each, as folders of this one."""

import dataclasses
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hostile import COUNTS, conversations, play
from tests.waiting import in_threads, wait_until
from zero2all.common.fault import flip_byte
from zero2all.resilience import copies as module
from zero2all.resilience import slots
from zero2all.resilience.copies import PEER_FOLDER, Copies, whole_saves
from zero2all.resilience.slots import PAGE, Slot

SECRET = b"a secret of sixteen bytes or more"


class Machines:
    def __init__(self, root: Path) -> None:
        self.root, self.run, self.attempt = root, root / "run", 0
        self.run.mkdir()
        name = slots.run_id(self.run, create=True)
        self.all = [self.machine(number) for number in range(3)]
        self.folders = [slots.ram_home(root / str(number)) / name for number in range(3)]

    def machine(self, number: int) -> Copies:
        (self.root / str(number)).mkdir(exist_ok=True)
        return Copies(self.run, self.root / str(number), "127.0.0.1", SECRET)

    def begin(self) -> None:
        self.attempt += 1
        parts = [[node, 2, list(each.address)] for node, each in enumerate(self.all)]
        order = {"token": f"attempt {self.attempt}", "machines": parts}
        in_threads(lambda node: self.all[node].begin({**order, "first": 2 * node}), range(3))

    def save(self, step: int, machines=(0, 1, 2), copied=True) -> None:
        """As the ranks do, into the buffer that was not the last."""
        for node in machines:
            slots.make_run_folder(self.folders[node].parent, self.folders[node].name, self.run)
            for rank in (2 * node, 2 * node + 1):
                slot = Slot(slots.slot_paths(self.folders[node], rank)[step // 2 % 2], 3 * PAGE)
                slot.begin(step)
                slot.data[:] = bytes([step, rank, 0]) * PAGE
                slot.finish(step, {"save": f"of {step}", "rank": rank, "ranks": [2 * node, 2 * node + 1]})
                slot.close()
        wait_until(lambda: not copied or all(step in self.copied(node) for node in range(3)))

    def own(self, node: int) -> list[int]:
        return sorted(step for step, _ in whole_saves(self.folders[node], [2 * node, 2 * node + 1]))

    def copied(self, node: int) -> list[int]:
        folder = self.folders[(node + 1) % 3] / PEER_FOLDER
        return sorted(step for step, _ in whole_saves(folder, [2 * node, 2 * node + 1]))

    def replace(self, node: int) -> None:
        # Renamed, not deleted: its old process may still be writing a copy there.
        (self.root / str(node)).rename(self.root / f"lost {len(list(self.root.glob('lost *')))}")
        self.all[node] = self.machine(node)


@pytest.fixture
def machines(tmp_path) -> Machines:
    found = Machines(tmp_path)
    found.begin()
    for step in (4, 6, 8):
        found.save(step)
    assert [found.copied(node) for node in range(3)] == [[6, 8]] * 3
    return found


def test_a_machine_without_memory_fetches_the_newest_step_that_all_have(machines, capfd):
    machines.replace(1)
    machines.begin()
    assert [machines.own(node) for node in range(3)] == [[6, 8], [8], [6, 8]]
    assert "step 8 was fetched from the memory of machine 2" in capfd.readouterr().err
    for path in slots.slot_paths(machines.folders[1], 2):
        if path.exists():
            assert path.read_bytes()[PAGE : 4 * PAGE] == bytes([8, 2, 0]) * PAGE
    machines.save(10, copied=False)  # the new machine keeps the copy of the one before again
    machines.save(10)
    assert machines.copied(0)[-1] == 10


def test_a_copy_that_was_not_finished_is_sent_again_without_a_new_save(machines, monkeypatch, capfd):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.1)
    send, failed = module._send, set()

    def send_but_not_the_first_of_each(connection, group):
        if group[0].path.parent not in failed:
            failed.add(group[0].path.parent)
            raise ConnectionError("the line was cut")
        send(connection, group)

    monkeypatch.setattr(module, "_send", send_but_not_the_first_of_each)
    machines.save(10)
    assert capfd.readouterr().err.count("was not finished: the line was cut") == 3


def test_what_the_run_gave_up_is_fetched_from_nobody(machines):
    machines.replace(1)
    slots.forget(machines.run)
    machines.begin()
    assert machines.own(1) == []
    home, before = machines.folders[0].parent, machines.folders[0]
    assert slots.sweep_stale(home, slots.run_id(machines.run, create=True)) == [str(machines.run)]
    assert not before.exists()


def test_a_step_that_one_machine_lacks_is_not_used(machines):
    machines.save(10, machines=(0, 1), copied=False)  # machine 2 was killed before: it has 6 and 8
    wait_until(lambda: machines.copied(1) == [8, 10])
    machines.replace(1)
    machines.begin()
    assert machines.own(1) == [8]


def test_a_damaged_copy_is_refused_and_the_older_one_is_used_if_all_have_it(machines, capfd):
    machines.replace(1)
    copies = machines.folders[2] / PEER_FOLDER
    flip_byte(whole_saves(copies, [2, 3])[8, "of 8"][1].path, PAGE + 5)
    machines.begin()
    assert machines.own(1) == [6]
    assert "cannot be used" in capfd.readouterr().err
    machines.replace(1)
    for path in (*slots.slot_paths(copies, 2), *slots.slot_paths(copies, 3)):
        flip_byte(path, PAGE + 6)
    machines.begin()
    assert machines.own(1) == []


def test_a_half_sent_copy_replaces_no_whole_one_and_a_stranger_gets_no_answer(machines, monkeypatch):
    ring = machines.all[1]._ring
    found = whole_saves(machines.folders[1], [2, 3])[8, "of 8"]
    for _ in range(3):
        with module._call(ring, 2, "put", (10, "of 10")) as connection:
            module._send(connection, found[:1])  # of another step, and the second rank is missing
        with module._call(ring, 2, "put", (8, "of 8")) as connection:
            connection.send({"rank": 2, "size": 4 * PAGE})
            connection.socket.sendall(found[0].path.read_bytes()[: 2 * PAGE])
    time.sleep(0.3)
    assert machines.copied(1)[-1] == 8
    monkeypatch.setattr(module, "TOKEN_SECONDS", 0.1)
    for stranger in ({"token": "of another attempt"}, {"secret": b"guessed, and long enough"}):
        assert module._ask(dataclasses.replace(ring, **stranger), 2) == (set(), set())
    with socket.create_connection(ring.machines[2][2], 5) as flood, suppress(ConnectionError):
        for _ in range(400):  # no newline, no end
            flood.sendall(bytes(1 << 20))
    assert module._ask(ring, 2)[1] >= {(8, "of 8")}


def test_what_a_rollback_gave_up_does_not_come_back_from_the_copies(machines):
    for node in range(3):
        for path in machines.folders[node].glob("[ab]-*"):
            path.unlink()
    machines.begin()
    assert [machines.own(node) for node in range(3)] == [[], [], []]


@pytest.mark.parametrize("count", COUNTS)
def test_hostile_questions_of_one_who_knows_the_secret_change_nothing(machines, monkeypatch, count):
    monkeypatch.setattr(module, "TOKEN_SECONDS", 0.0)
    token = machines.all[2]._ring.token
    asked = [{"token": token, "do": do, "save": [8, "of 8"]} for do in ("list", "get", "put")]
    good = [[each] for each in asked] + [[asked[2], {"rank": 2, "size": 4 * PAGE}, {"rank": 3, "size": 4 * PAGE}]]
    before = set(machines.folders[2].rglob("*"))
    for said in conversations(count, good):
        play(machines.all[2]._answer, *said)
    assert (machines.copied(1)[-1:], machines.own(2)) == ([8], [6, 8])
    assert set(machines.folders[2].rglob("*")) <= before
