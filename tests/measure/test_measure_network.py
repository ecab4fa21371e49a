"""`z2a doctor --network`: real listeners on this machine, and strangers on their port."""

import http.server
import socket
import threading
from contextlib import suppress
from functools import partial

import pytest

from tests.hostile import COUNTS, conversations, play
from tests.ports import free_port
from zero2all.common.errors import UsageError
from zero2all.measure.doctor import network
from zero2all.measure.doctor.network import listen, look_at_ways, measure_pairs, measure_to, pair_findings

SECRET = b"a secret of sixteen bytes or more"


@pytest.fixture(scope="module")
def peers():
    ports, ready = [free_port(), free_port()], threading.Semaphore(0)
    for port in ports:
        words = ("127.0.0.1", port, SECRET, lambda _address: ready.release())
        threading.Thread(target=listen, args=words, daemon=True).start()
    assert all(ready.acquire(timeout=300) for _ in ports)
    return [f"127.0.0.1:{port}" for port in ports]


def test_an_nvidia_smi_without_a_matrix_of_links_is_a_note(monkeypatch):
    monkeypatch.setattr("zero2all.measure.doctor.gpus.output_of", lambda _command: ("No devices were found", ""))
    (found,) = network._links()
    assert (found.grade, "it has no matrix of links" in found.found) == ("note", True)


def test_every_pair_is_measured(peers, monkeypatch):
    monkeypatch.setattr(network, "SECONDS", 0.1)
    found = measure_pairs(peers, SECRET)
    assert list(found) == [("here", peers[0]), ("here", peers[1]), (peers[0], peers[1])]
    for one in found.values():
        assert one.problem == ""
        assert one.latency > 0
        assert min(one.one_stream, one.streams) > 0
    assert [row[:2] for row in network.pair_rows(found)[1:]] == [list(pair) for pair in found]


def test_a_stranger_on_the_port_is_dropped_and_a_lost_peer_is_named(peers, monkeypatch):
    monkeypatch.setattr(network, "SECONDS", 0.1)
    host, port = network.split_address(peers[0])
    with socket.create_connection((host, port), timeout=300) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(OSError):  # it may have been dropped already
            stranger.shutdown(socket.SHUT_WR)
        assert len(stranger.recv(100)) == 38  # the question for the proof, and nothing else
        with suppress(ConnectionResetError):  # what it sent was not read to the end
            assert stranger.recv(100) == b""
    assert "the other side has another secret" in measure_to(peers[0], b"a secret that was guessed").problem
    nobody = f"127.0.0.1:{free_port()}"
    found = measure_pairs([peers[0], nobody], SECRET)
    assert found["here", peers[0]].problem == ""
    assert found["here", nobody].problem == found[peers[0], nobody].problem == "nothing listens on that port"
    said = [(finding.grade, finding.found) for finding in pair_findings(found)]
    assert said[0] == ("error", f"not measured, from here to {nobody}: nothing listens on that port")
    assert len(said) == 2


def test_another_program_on_the_port_of_a_peer_or_of_a_listener_is_named():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = measure_to(f"127.0.0.1:{server.server_port}", SECRET).problem
        assert "it is not a z2a process: the port is wrong" in found
        with pytest.raises(UsageError, match=rf":{server.server_port}: this machine cannot listen there"):
            listen("127.0.0.1", server.server_port, SECRET, lambda _address: None)
        server.shutdown()


def test_the_interface_and_the_variables_that_follow(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    said = [finding.found for finding in look_at_ways(["127.0.0.1:29700"])]
    assert any("lo (127.0.0.1" in line and "the route to 127.0.0.1" in line for line in said)
    assert "NCCL_SOCKET_IFNAME=eth7: set by you; `z2a train` leaves it" in said
    assert any(line.startswith("GLOO_SOCKET_IFNAME=lo: `z2a train` sets it") for line in said)


def test_an_address_that_is_none_is_refused():
    for text in ("host", "host:", ":1", "host:0", "host:70000", "host:x"):
        with pytest.raises(UsageError, match="Expected HOST:PORT"):
            network.split_address(text)


@pytest.mark.parametrize("count", COUNTS)
def test_a_listener_answers_any_request_or_ends_it(count, monkeypatch):
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.01)  # nobody reads while it answers
    monkeypatch.setattr(network, "dial", _nobody)
    good = [[{"do": "echo"}], [{"do": "count"}], [{"do": "measure", "to": "127.0.0.1:9"}]]
    take = partial(network._answer, secret=SECRET)
    answers = {play(take, *said) for said in conversations(count, good)}
    assert len(answers) > 1


def _nobody(*_arguments):
    raise ConnectionRefusedError
