"""The health check: who is named for which findings, and real processes of which one fails."""

import json
import socket

import pytest

from tests.ports import free_port
from zero2all.common.errors import UnhealthyError
from zero2all.parallel.health import judge, pairs_of

RANKS = 6


def products(**changed: dict) -> list[dict]:
    usual = {"host": "a", "device": "gpu", "seconds": 1.0, "bits": 7}
    return [{"rank": rank, **usual, **changed.get(f"rank{rank}", {})} for rank in range(RANKS)]


def exchanges(units: int, bad: set[int], speed: float = 0.0) -> list[dict]:
    """Both rounds, in which a pair with a bad one fails, or has another speed."""
    good, worse = {"speed": 8.0, "problem": ""}, {"speed": speed, "problem": "" if speed else "nothing arrived"}
    pairs = [pair for number in (1, 2) for pair in pairs_of(range(units), number)]
    return [{"units": list(pair), **(worse if bad & set(pair) else good)} for pair in pairs]


def test_one_that_is_in_no_good_pair_is_named_whichever_it_is():
    for units, bad in [(count, bad) for count in (3, 4, 5, 6, 9) for bad in range(count)]:
        found = judge(products()[:1], exchanges(units, {bad}), 1, 1)
        assert list(found.broken) == [bad], (units, bad)
        if units > 3:  # of three, two pairs may both be slow, and none is usual
            found = judge(products()[:1], exchanges(units, {bad}, speed=2.0), 1, 1)
            assert (list(found.slow), found.broken) == ([bad], {}), (units, bad)
    assert list(judge(products()[:1], exchanges(8, {2, 3}), 1, 1).broken) == [2, 3]


def test_a_link_between_two_good_ones_and_a_rank_that_stops_answering():
    pairs = exchanges(4, set())
    pairs[0] |= {"speed": 0.0, "problem": "nothing arrived"}
    assert "between rank 0 on a and rank 1 on a failed" in judge(products(), pairs, RANKS, 1).broken[1]
    pairs = exchanges(5, {3})
    assert judge(products(), pairs, RANKS, 1, silent={3}).broken == {3: "rank 3 stopped answering during the exchange"}


def test_wrong_bits_and_slow_products_are_named_by_machine():
    found = judge(products(rank3={"bits": 8, "host": "b"}, rank5={"seconds": 2.5}), [], RANKS, 2)
    assert found.broken == {1: "the product of rank 3 on b has other bits than those of most"}
    assert found.slow == {2: "the product of rank 5 on a took 2.5 times as long as usual"}
    two = judge(products(rank1={"bits": 8})[:2], [], 2, 1)
    assert set(two.broken) == {0, 1}
    assert "each may be wrong" in two.broken[0]
    assert judge(products(rank1={"bits": 8, "device": "another"})[:2], [], 2, 1).broken == {}


PROCESS = """
import json, os, sys, torch
from zero2all.parallel import health
from zero2all.parallel.rendezvous import open_store
job = json.loads(sys.argv[1])
os.environ |= job["variables"]
health.PAIR_SECONDS, health.LAST_WORD_SECONDS = job["seconds"]
health.SLOW = 1e9  # the cores are shared: none is slow
torch.set_num_threads(1)
rank, product = int(os.environ["RANK"]), health.product
wrong = {"bits": 1} if rank == job["wrong"] else {}
health.product = lambda device: {**product(device), **wrong}
rules = health.HealthRules(job["excludes"], job["isolate"])
health.check_health(open_store(rank, 300.0), rank, 3, torch.device("cpu"), rules)
print("well")
"""


@pytest.fixture
def check(start, tmp_path):
    """Three processes, on as many machines as one says; what each prints."""

    def run(faults=(), wrong=None, excludes=False, isolate=None, per_machine=3):
        (tmp_path / "plan.json").write_text(json.dumps(list(faults)))
        shared = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": str(per_machine), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(free_port()), "Z2A_FAULTS": str(tmp_path / "plan.json")}
        job = {"wrong": wrong, "excludes": excludes, "isolate": isolate}
        job["seconds"] = (3.0, 2.0) if faults else (300.0, 300.0)  # one that dies in the exchange is waited for so long
        of_rank = [{**job, "variables": {**shared, "RANK": str(rank)}} for rank in range(3)]
        started = [start(json.dumps(each), code=PROCESS) for each in of_rank]
        for one in started:
            one.wait()
        return [one.text() for one in started]

    return run


def test_three_good_processes_go_on(check):
    assert [text.strip() for text in check()] == ["well"] * 3


def test_a_process_that_dies_in_the_exchange_is_named_to_the_others(check):
    said = check([{"point": "health", "step": 1, "rank": 1, "fault": "kill"}])
    for rank in (0, 2):
        assert "UnhealthyError: The health check found: rank 1 stopped answering during the exchange" in said[rank]


def test_a_bad_machine_is_left_out_and_the_command_gets_its_name(check, tmp_path):
    script = tmp_path / "isolate.sh"
    script.write_text(f"#!/bin/sh\necho drain $* > {tmp_path}/isolated\n")
    script.chmod(0o700)
    said = check(wrong=2, excludes=True, isolate=f"{script} now", per_machine=1)
    assert "UnhealthyError: The health check found this machine bad: the product of rank 2" in said[2]
    for rank in (0, 1):
        assert "PeerFailureError: The health check found a bad machine: the product of rank 2" in said[rank]
    assert (tmp_path / "isolated").read_text() == f"drain now {socket.gethostname()}\n"
    assert UnhealthyError.exit_code == 16
