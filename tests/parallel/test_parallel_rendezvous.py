"""The processes of a run find each other, or say who is missing and who is another one. Ranks are threads here."""

import json
import os
import socket
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import zero2all
from tests.ports import free_port
from tests.waiting import in_threads
from zero2all.common.errors import PeerFailureError, UsageError
from zero2all.parallel.rendezvous import facts_of, meet, open_store


@pytest.fixture(autouse=True)
def one_machine(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")


FACTS = facts_of({"train.seed": 1, "optim.lr_max": 3e-4}, 3)


def ends(store, facts_by_rank, seconds=60.0, size=3, again=(), late=()):
    """What each rank that comes ends with; `store`: one for all, or one for each. Ranks of `again` come a second time,
    under the name of their rank + 0.5, those of `late` when the others have ended."""
    found = {}

    def come(item):
        name, facts = item
        rank = int(name)
        try:
            found[name] = meet(store[rank] if isinstance(store, list) else store, rank, size, facts, seconds)
        except Exception as error:
            found[name] = error

    first = [*facts_by_rank.items(), *((rank + 0.5, FACTS) for rank in again)]
    for coming in (first, [(rank + 0.5, FACTS) for rank in late]):
        in_threads(come, coming)
    return found


def test_one_with_another_setting_and_other_code_is_named_to_all_with_what_differs():
    other = {**FACTS, "train.seed": 2, "code of zero2all": "0123"}
    found = ends(dist.HashStore(), {0: FACTS, 1: FACTS, 2: other})
    for rank in range(3):
        assert isinstance(found[rank], UsageError)
        text = str(found[rank])
        assert f"rank 2 on {socket.gethostname()}, code in {Path(zero2all.__file__).parent}: code of zero2all" in text
        assert "train.seed 2 instead of 1" in text
        assert "rank 1" not in text


def test_one_that_does_not_come_is_named_to_all_within_the_configured_seconds_and_long_before(monkeypatch, capfd):
    monkeypatch.setattr("zero2all.parallel.rendezvous.NOTICE_SECONDS", 1.0)
    found = ends(dist.HashStore(), {2: FACTS, 0: FACTS}, seconds=2.0)
    for rank in (0, 2):
        assert isinstance(found[rank], PeerFailureError)
        assert "did not join within parallel.join_seconds (2 s): 1." in str(found[rank])
    assert capfd.readouterr().err.count("z2a: waiting for rank 1 of 3, until") == 1


def test_one_that_was_started_with_another_number_of_processes_stops_itself():
    stranger = {**FACTS, "processes": 4}
    found = ends(dist.HashStore(), {0: FACTS, 1: FACTS, 2: FACTS, 3: stranger})
    assert [found[rank] for rank in range(3)] == [None] * 3
    assert str(found[3]) == "Rank 3 differs from rank 0: processes 4 instead of 3. Nothing was started."


def test_one_that_comes_twice_is_named_to_all_at_once_and_one_that_comes_when_the_run_has_begun_ends_alone():
    found = ends(dist.HashStore(), {0: FACTS, 1: FACTS}, seconds=1e6, again=[1])
    for name in (0, 1, 1.5):
        assert isinstance(found[name], UsageError)
        one = f"Rank 1 connected twice: from {socket.gethostname()} (process {os.getpid()}) and "
        assert str(found[name]).startswith(one)
    found = ends(dist.HashStore(), dict.fromkeys(range(3), FACTS), late=[1])
    assert [found[rank] for rank in range(3)] == [None] * 3
    assert str(found[1.5]).startswith("Rank 1 connected twice: from ")


@pytest.fixture
def machines(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture
def port(monkeypatch):
    number = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


def test_without_rank_0_the_others_say_where_they_looked(port):
    with pytest.raises(PeerFailureError, match=rf"Rank 1 has not reached rank 0 at 127.0.0.1:{port}: nothing listens"):
        open_store(1, 0.5)


def test_a_port_that_accepts_and_stays_silent_is_not_waited_for_for_ever(port, monkeypatch, capfd):
    """As the socket of a rank 0 that is still starting; torch alone would wait there without end."""
    monkeypatch.setattr("zero2all.parallel.rendezvous.NOTICE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(PeerFailureError, match="rank 0 is still starting, or the port is wrong"):
            open_store(1, 0.5)
        monkeypatch.setenv("Z2A_ATTEMPT", "a1")
        monkeypatch.setenv("Z2A_RENDEZVOUS", "gpu1:29500")
        with pytest.raises(PeerFailureError, match=r"at gpu1:29500: rank 0 is still starting\."):
            open_store(1, 0.5)
    said = capfd.readouterr().err
    assert said.count("z2a: Rank 1 has not reached rank 0") == 2
    assert "frame #" not in said


def test_a_store_without_a_launcher_listens_at_its_own_address_only_and_once(port):
    store = open_store(0, 60.0)
    found = {one.laddr.ip for one in psutil.Process().net_connections() if one.laddr and one.laddr.port == port}
    assert found == {"127.0.0.1"}
    with pytest.raises(PeerFailureError, match=rf"127.0.0.1:{port} .*Rank 0 was started twice, another program"):
        open_store(0, 60.0)
    del store


@pytest.mark.usefixtures("machines")
def test_machines_that_cannot_exchange_data_are_named_with_the_remedy_in_one_paragraph(monkeypatch):
    """Rank 2, written by hand, names an address at which nothing listens."""
    for attempt, kind in (("1", UsageError), ("2", PeerFailureError)):
        monkeypatch.setenv("Z2A_ATTEMPT_NUMBER", attempt)
        store = dist.HashStore()
        rank = {"host": "far", "process": "1", "folder": "", "door": ["127.0.0.1", free_port()]}
        store.set("rank/2", json.dumps({**rank, "facts": json.loads(json.dumps(FACTS))}))
        store.set("blocked/2", "")
        store.set("seen/reached/2", "")
        for error in ends(store, dict.fromkeys(range(2), FACTS)).values():
            assert type(error) is kind
            assert "for data: from rank 0 to rank 2 at 127.0.0.1: refused: that address is another" in str(error)
            assert "choose the network with --interface" in str(error)
            assert "\n" not in str(error)


@pytest.mark.usefixtures("port")
def test_the_store_of_rank_0_over_a_socket():
    stores = [open_store(rank, 60.0) for rank in range(3)]
    assert ends(stores, dict.fromkeys(range(3), FACTS)) == {0: None, 1: None, 2: None}
