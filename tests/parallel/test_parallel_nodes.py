"""Which machine of a run this one is, and where the machines meet."""

from __future__ import annotations

import sys

import pytest

from tests.ports import free_port
from zero2all.common.errors import UsageError
from zero2all.parallel.launch import run_processes
from zero2all.parallel.nodes import Nodes, find_nodes, first_host, read_counts, use_interface

STEP = {"SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "70123"}


def test_flags_win_over_slurm_and_slurm_fills_in_what_they_leave_open():
    assert find_nodes(environment=STEP) == Nodes(2, 1, "gpu03", 20123, "", 20123, 2)
    assert find_nodes((1, 2), 0, "head:5000", "10.0.0.2:6000", STEP) == Nodes(2, 0, "head", 5000, "10.0.0.2", 6000, 1)
    assert find_nodes((3, 3), 2, "[fd00::1]:5000", None, {}) == Nodes(3, 2, "fd00::1", 5000, "::", 5000, 3)
    assert find_nodes(environment={}) == Nodes()
    assert find_nodes(environment={**STEP, "SLURM_STEP_NUM_NODES": "1"}) == Nodes()


def test_all_problems_of_the_flags_are_named_at_once():
    with pytest.raises(UsageError, match=r"--node-rank is 2: expected 0 to 1.*--rendezvous is missing"):
        find_nodes((2, 2), 2, environment={})
    with pytest.raises(UsageError, match="--rendezvous needs the number of machines"):
        find_nodes(rendezvous="a:1", environment={})
    with pytest.raises(UsageError, match="--node-rank needs the number of machines"):
        find_nodes(rank=0, environment={})  # it would train alone
    with pytest.raises(UsageError, match="Expected HOST:PORT"):
        find_nodes((2, 2), 0, "a:99999", environment={})
    with pytest.raises(UsageError, match=r"16 tasks on 2 machines.*--ntasks-per-node=1"):
        find_nodes(environment={**STEP, "SLURM_STEP_NUM_TASKS": "16"})


def test_doubts_about_the_address_of_machine_0_are_said(capfd):
    find_nodes((2, 2), 0, "127.0.0.1:5000", environment={})
    find_nodes((2, 2), 1, "192.0.2.1:5000", environment={})
    find_nodes((2, 2), 0, "192.0.2.1:5000", "0.0.0.0:6000", environment={})
    assert capfd.readouterr().err == ""
    find_nodes((2, 2), 0, "192.0.2.1", environment={})
    said = capfd.readouterr().err
    assert "--rendezvous has no port: 29500 is used." in said
    assert "192.0.2.1 of --rendezvous is no address of this machine" in said
    find_nodes((2, 2), 0, "no-such-host.invalid:5000", environment={})
    assert "does not know the name no-such-host.invalid" in capfd.readouterr().err


def test_a_second_machine_0_on_this_host_is_suspected():
    port = free_port()
    nodes = Nodes(2, 0, "127.0.0.1", port, "127.0.0.1", port)
    with nodes.listen(), pytest.raises(UsageError, match=rf"Port {port} is in use: is another machine 0 of this run"):
        nodes.listen()


def test_a_number_of_machines_or_the_least_and_the_most():
    assert [read_counts(text) for text in ("4", "2:4")] == [(4, 4), (2, 4)]
    for wrong in ("0", "4:2", "2:", "a", "1:2:3"):
        with pytest.raises(ValueError):  # noqa: PT011
            read_counts(wrong)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a1,b2", "a1"), ("gpu[007-012,3],b", "gpu007"), ("r[1-2]n[5,7]-x,b", "r1n5-x"), ("one", "one")],
)
def test_the_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first


def test_an_interface_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UsageError, match=r"--interface is 'ib9'. This machine has: .*lo"):
        use_interface("ib9")


def test_each_machine_starts_its_own_ranks_and_the_first_connects_to_where_it_listens(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\necho "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" '
        f"> {tmp_path}/rank-$RANK\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    port = free_port()
    for rank in (0, 1):
        assert run_processes(2, [], nodes=Nodes(2, rank, "outside.example", 700, "127.0.0.1", port)) == 0
    assert [(tmp_path / f"rank-{rank}").read_text().strip() for rank in range(4)] == [
        f"0/4 0/2 127.0.0.1:{port}",
        f"1/4 1/2 127.0.0.1:{port}",
        "2/4 0/2 outside.example:700",
        "3/4 1/2 outside.example:700",
    ]
