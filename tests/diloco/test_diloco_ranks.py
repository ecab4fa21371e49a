"""The ranks of a group share one link: each gets its own part of what rank 0 has, and nobody waits for an error."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zero2all.common.errors import PeerFailureError
from zero2all.common.peers import Peers
from zero2all.diloco import ranks
from zero2all.diloco.messages import Key
from zero2all.diloco.ranks import Layout, Ranks, expected_of

LAYOUTS = [Layout("float32", [[3], [2, 1]], [4], 2), Layout("float32", [[5], []], [1, 2], 2)]
"""Of two ranks: the second has nothing of fragment 1."""


class Thread(Peers):
    """One of two ranks, each in a thread."""

    def __init__(self, rank, shared):
        self.rank, self.size, self.shared, self.control = rank, 2, shared, self

    def broadcast(self, value):
        if self.rank == 0:
            self.shared.value = value
        self.shared.barrier.wait(20)
        found = self.shared.value
        self.shared.barrier.wait(20)
        return found


class Link:
    """In place of `GroupLink`: what was offered, from whom payloads come, and the state that is given and taken."""

    history, is_behind, is_asked = "its history", False, False

    def __init__(self):
        self.offered, self.served, self.problem = [], [], None

    def offer(self, key, payload):
        self.offered.append((key, payload))

    def collect(self, _key):
        if self.problem:
            raise self.problem
        own = self.offered[-1][1]
        return {1: bytes(len(own)), 0: own}

    def adopt(self):
        self.is_behind = False
        return self.served[-1]

    def serve(self, state):
        self.served.append(state)
        self.is_asked = False

    def stays(self):
        return self.is_asked


@pytest.fixture
def run(monkeypatch):
    """Runs `work(ranks, number of the rank)` in both, over one link; what each returned or raised."""
    shared = SimpleNamespace(barrier=threading.Barrier(2), value=None, sent={0: queue.Queue(), 1: queue.Queue()})
    fake = SimpleNamespace(
        send=lambda values, group, group_dst: group.shared.sent[group_dst].put(values.clone()),
        recv=lambda values, group, group_src: values.copy_(group.shared.sent[group.rank].get(timeout=20)),  # noqa: ARG005
    )
    monkeypatch.setattr(ranks, "dist", fake)

    def both(link, work):
        found = [None, None]

        def one(rank):
            try:
                found[rank] = work(Ranks(Thread(rank, shared), LAYOUTS, None if rank else link), rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    return both


def values(rank, count):
    return (np.arange(count, dtype="<f4") + 100 * rank).tobytes()


def test_payloads_are_joined_in_the_order_of_the_ranks_and_each_gets_its_part(run):
    link = Link()

    def work(own, rank):
        sizes = [LAYOUTS[rank].size(fragment) // 4 for fragment in range(2)]
        return [own.exchange(Key(7, at), values(rank, size)) for at, size in enumerate(sizes)], own.history

    found = run(link, work)
    assert link.offered == [(Key(7, 0), values(0, 3) + values(1, 5)), (Key(7, 1), values(0, 3))]
    for rank, (first, second) in enumerate(((3, 3), (5, 0))):
        both = [{0: values(rank, first), 1: bytes(4 * first)}, {0: values(rank, second), 1: bytes(4 * second)}]
        assert found[rank] == (both, "its history")
    assert list(found[0][0][0]) == [0, 1], "in the order of the groups"


def test_a_state_goes_whole_to_the_others_and_comes_back_in_parts(run):
    link = Link()
    link.is_asked = link.is_behind = True
    head = LAYOUTS[0].head.pack(3, 400, 0.0, 1.5)

    def work(own, rank):
        state = head + values(rank, sum(LAYOUTS[rank].state))
        assert own.is_behind
        stayed = [own.stays(lambda: state), own.stays(lambda: state)]
        return stayed, own.adopt() == state, own.is_behind

    assert run(link, work) == [([True, False], True, False)] * 2
    assert link.served == [head + values(0, 4) + head + values(1, 3)]
    assert expected_of(LAYOUTS).fault(None, link.served[0]) == ""


def test_an_error_of_the_link_is_raised_in_every_rank(run):
    link = Link()
    link.problem = PeerFailureError("the others are gone")
    found = run(link, lambda own, rank: own.exchange(Key(1, 0), values(rank, LAYOUTS[rank].size(0) // 4)))
    assert [type(error) for error in found] == [PeerFailureError] * 2
    assert [str(error) for error in found] == ["the others are gone"] * 2


def test_a_payload_of_a_group_has_a_fault_wherever_a_value_is_not_finite():
    known = expected_of(LAYOUTS)
    assert known.payload_bytes == [32, 12]
    assert known.fault(0, torch.ones(8).numpy().tobytes()) == ""
    for at in (0, 3, 7):
        payload = torch.ones(8)
        payload[at] = torch.inf
        assert known.fault(0, payload.numpy().tobytes())
