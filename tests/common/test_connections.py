"""Connections that prove that they belong to a run, and the secret with which they do."""

import json
import os
import random
import socket
import stat
import struct
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hostile import COUNTS, SEED, hostile_bytes, hostile_value
from zero2all.common import connections
from zero2all.common.connections import Connection, NotOfThisRunError, dial, join, listen
from zero2all.common.errors import UsageError
from zero2all.common.secret import VARIABLE, given_secret, make_secret, shared_secret

SECRET = b"a secret of sixteen bytes or more"


class Echo:
    """A door that keeps hellos and sends every message back."""

    def __init__(self):
        listener, self.hellos = listen("127.0.0.1"), list[dict]()
        self.address = listener.getsockname()[:2]
        self.door = connections.ConnectionListener(listener, SECRET, self.take, "echo")

    def take(self, connection: Connection) -> None:
        with connection:
            self.hellos.append(connection.hello)
            if connection.hello.get("fail"):
                raise RecursionError("of one connection")
            while True:
                connection.send(connection.receive())

    def answers(self) -> bool:
        with dial(self.address, SECRET, "echo", {"who": "friend"}) as connection:
            connection.send({"value": [1, "二", None]})
            return connection.receive(5) == {"value": [1, "二", None]}


@pytest.fixture
def echo():
    echo = Echo()
    yield echo
    echo.door.close()


def raw(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 5)


def frame(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


def dial_meanwhile(address: tuple[str, int], door: str) -> None:
    """An honest dialer, which does not come in."""

    def work() -> None:
        with suppress(ConnectionError):
            dial(address[:2], SECRET, door, {})

    threading.Thread(target=work, daemon=True).start()


def test_who_knows_the_secret_is_taken_and_both_sides_know_it(echo):
    assert (echo.answers(), echo.hellos) == (True, [{"who": "friend"}])


def test_who_does_not_is_refused_and_the_log_names_the_address_once(echo, capfd):
    for _ in range(3):
        with pytest.raises(NotOfThisRunError, match="another secret"):
            dial(echo.address, b"another secret of some length", "echo", {})
    assert echo.answers()
    time.sleep(0.1)
    assert (capfd.readouterr().err.count("a connection from 127.0.0.1 was refused"), len(echo.hellos)) == (1, 1)


def test_a_listener_that_does_not_know_the_secret_is_refused_by_the_dialer():
    with listen("127.0.0.1") as listener:

        def pretend() -> None:
            connected, _ = listener.accept()
            connected.sendall(connections.MAGIC + bytes(32))
            said = connected.recv(70, socket.MSG_WAITALL)
            connected.sendall(said[38:])  # the dialer's own proof, sent back
            time.sleep(0.2)
            connected.close()

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(NotOfThisRunError):
            dial(listener.getsockname()[:2], SECRET, "echo", {"private": True})


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_connection_of_another_user_is_told_from_an_own_one(address):
    with listen("127.0.0.1") as listener:
        for user in (0, 65534):
            os.seteuid(user)
            try:
                far = socket.create_connection((address, listener.getsockname()[1]), 5)
            finally:
                os.seteuid(0)
            near, _ = listener.accept()
            with near, far:
                assert connections.is_of_this_user(near) is (user == 0)


def test_one_that_has_closed_its_end_is_not_taken_for_root():
    with listen("127.0.0.1") as listener:
        raw(listener.getsockname()).close()
        near, _ = listener.accept()
        with near:
            time.sleep(0.05)
            assert not connections.is_of_this_user(near)


def test_many_addresses_do_not_fill_the_log_and_words_of_other_machines_cannot_move_the_cursor(echo, capfd):
    for number in range(100):
        echo.door._say(f"10.0.0.{number}", f"refused {number}")
    assert len(capfd.readouterr().err.splitlines()) == connections.MOST_SAID
    assert connections.printable("组 1\x1b[2J\r\nz2a: done") == "组 1?[2J??z2a: done"
    assert len(connections.printable("x" * 10_000)) == connections.MOST_SHOWN


def test_who_listens_where_a_dialer_knocks_cannot_come_in_at_another_door_with_its_proof(echo):
    """Every group has a door and dials others with one secret: its proof for another one must not open its own."""
    with raw(echo.address) as own_door, listen("127.0.0.1") as false:
        dial_meanwhile(false.getsockname(), "another door")
        victim, _ = false.accept()
        with victim:
            victim.sendall(own_door.recv(38, socket.MSG_WAITALL))
            own_door.sendall(victim.recv(70, socket.MSG_WAITALL))
            assert own_door.recv(32, socket.MSG_WAITALL) == bytes(32)  # refused
            assert not own_door.recv(1)
    assert echo.hellos == []


def test_a_proof_that_was_overheard_is_worth_nothing_later(echo):
    with raw(echo.address) as outer, listen("127.0.0.1") as middle:
        dial_meanwhile(middle.getsockname(), "echo")
        inner, _ = middle.accept()
        inner.sendall(outer.recv(1 << 10))
        heard = inner.recv(70, socket.MSG_WAITALL)
        inner.close()
    with raw(echo.address) as replay:
        replay.recv(1 << 10)
        replay.sendall(heard)
        assert replay.recv(1 << 10) == bytes(32)
    assert echo.hellos == []


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64, b"\xff" * (1 << 16), b"z2a 1\n" + b"\x00" * 90],
    ids=["http", "flood", "old magic"],
)  # fmt: skip
def test_what_is_no_proof_ends_that_connection_only(echo, sent):
    with raw(echo.address) as stranger:
        stranger.sendall(sent)
        with suppress(ConnectionError):  # a reset, where bytes were left unread
            while stranger.recv(1 << 10):
                pass
    assert echo.answers()
    assert len(echo.hellos) == 1


@pytest.mark.parametrize(
    "sent", [frame(b'{"a":' * 100_000), frame(b"[1]"), frame(b"\xff\xfe"), frame(b""), b"\xff\xff\xff\xff"],
    ids=["deep", "list", "bytes", "empty", "announced only"],
)  # fmt: skip
def test_a_bad_message_ends_that_connection_only(echo, sent):
    connected = dial(echo.address, SECRET, "echo", {}).socket
    connected.sendall(sent)
    connected.settimeout(5)
    assert connected.recv(1) == b""
    assert echo.answers()


def test_an_error_of_the_one_who_takes_it_ends_that_connection_only(echo, capfd):
    with dial(echo.address, SECRET, "echo", {"fail": True}) as connection, pytest.raises(ConnectionError):
        connection.receive(5)
    assert echo.answers()
    assert "of one connection" in capfd.readouterr().err


def test_idle_connections_keep_nobody_out_and_their_number_is_bounded(echo):
    before = threading.active_count()
    idle = [raw(echo.address) for _ in range(3 * connections.MOST_UNPROVED_OF_ADDRESS)]
    assert echo.answers()
    assert threading.active_count() - before <= connections.MOST_UNPROVED_OF_ADDRESS + 4
    for each in idle:
        each.close()


def test_a_slow_proof_is_given_up(echo, monkeypatch):
    monkeypatch.setattr(connections, "PROOF_SECONDS", 0.3)
    with raw(echo.address) as slow:
        slow.recv(1 << 10)
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < began + 5:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 2


def test_a_message_that_comes_in_pieces_outlives_the_time_limit_of_one_call():
    ours, theirs = socket.socketpair()
    connection = Connection(ours, "here")
    message = frame(b'{"a": 1}')
    for piece in (message[:2], message[2:7]):
        theirs.sendall(piece)
        with pytest.raises(TimeoutError):
            connection.receive(0.05)
    theirs.sendall(message[7:] + b"raw bytes")
    assert (connection.receive(5), ours.recv(100)) == ({"a": 1}, b"raw bytes")


def test_joined_sockets_pass_on_all_bytes_both_ways_and_end_together():
    (left, one), (other, right) = socket.socketpair(), socket.socketpair()
    threading.Thread(target=join, args=(one, other), daemon=True).start()
    data = random.Random(SEED).randbytes(1 << 20)
    threading.Thread(target=left.sendall, args=(data,), daemon=True).start()
    found = b""
    while len(found) < len(data):
        found += right.recv(1 << 16)
    assert found == data
    right.sendall(b"back")
    assert left.recv(10) == b"back"
    right.close()
    left.settimeout(5)
    assert left.recv(10) == b""


def test_a_port_is_taken_from_a_range_and_a_full_one_is_an_error():
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", (port,))
        with listen("127.0.0.1", (port, 0)) as free:
            assert free.getsockname()[1] != port


@pytest.mark.parametrize("count", COUNTS)
def test_only_a_true_proof_and_a_json_object_pass_the_door(count, monkeypatch):
    door = connections.ConnectionListener.__new__(connections.ConnectionListener)
    door._secret, door._name = SECRET, "echo"
    monkeypatch.setattr(connections.secrets, "token_bytes", lambda length: bytes(length))
    monkeypatch.setattr(connections, "address_of", lambda _connected: "here")
    rng = random.Random(SEED)
    nonces = bytes(64)
    good = connections.MAGIC + nonces[32:] + connections._proof(SECRET, "dialer", "echo", nonces)
    passed = 0
    for _ in range(count):
        hello = json.dumps(hostile_value(rng, {"run": "a", "node": 1, "list": [1, {"a": 2}]})).encode()
        text = good + frame(hello)
        sent = hostile_bytes(rng, text) if rng.random() < 0.8 else text
        theirs, ours = _pair()
        with theirs, ours:
            ours.sendall(sent)
            ours.shutdown(socket.SHUT_WR)
            with suppress(OSError, ValueError):
                assert isinstance(door._prove(theirs).hello, dict)
                assert sent.startswith(good)
                passed += 1
    assert 0 < passed < count


@pytest.mark.parametrize("count", COUNTS)
def test_a_reader_of_messages_ends_with_a_message_or_one_of_two_errors(count):
    rng = random.Random(SEED)
    good = frame(b'{"do": "beat"}') + frame(b'{"a": [1, {"b": null}]}')
    tracemalloc.start()
    found = 0
    for _ in range(count):
        ours, theirs = socket.socketpair()
        with theirs, Connection(ours, "here") as connection:
            theirs.sendall(hostile_bytes(rng, good))
            theirs.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError, ValueError):
                while True:
                    assert isinstance(connection.receive(5), dict)
                    found += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found > count // 10
    assert peak < 16 << 20


def _pair() -> tuple[socket.socket, socket.socket]:
    """A socket pair that takes the options of TCP, which `_prove` sets."""
    theirs, ours = socket.socketpair()
    return _Plain(fileno=theirs.detach()), ours


class _Plain(socket.socket):
    def setsockopt(self, *_options):
        pass


def test_all_who_share_a_folder_get_the_one_that_the_first_makes(tmp_path):
    path = tmp_path / "runs" / "run.secret"
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: shared_secret(path), range(64)))
    assert len(set(found)) == 1
    assert len(found[0]) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert shared_secret(tmp_path / "another") != found[0], "two are never alike"


def test_the_file_goes_before_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert given_secret(None) is None
    monkeypatch.setenv(VARIABLE, "of the variable, long enough")
    assert given_secret(None) == b"of the variable, long enough"
    make_secret(tmp_path / "file")
    assert given_secret(tmp_path / "file") == (tmp_path / "file").read_bytes().strip()


def refused(path: Path | None) -> str:
    with pytest.raises(UsageError) as caught:
        given_secret(path)
    return str(caught.value)


def test_a_file_that_others_may_read_or_that_another_user_has_planted_is_refused(tmp_path):
    make_secret(tmp_path / "file")
    (tmp_path / "file").chmod(0o640)
    assert "chmod 600" in refused(tmp_path / "file")
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(tmp_path / "file", 65534, 65534)
        assert "belongs to another user" in refused(tmp_path / "file")


def test_what_is_no_secret_is_refused_with_the_command_that_makes_one(tmp_path, monkeypatch):
    (tmp_path / "file").touch(0o600)
    for text in ("", "short", "x" * 5000):
        monkeypatch.setenv(VARIABLE, text)
        assert "z2a launch secret" in refused(None)
        (tmp_path / "file").write_text(text)
        assert "z2a launch secret" in refused(tmp_path / "file")


def test_a_missing_file_a_folder_and_a_fifo_are_named_and_a_link_is_never_followed_to_write(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("missing", ".", "fifo"):
        assert "secret" in refused(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        make_secret(tmp_path / "link")
    assert not (tmp_path / "target").exists()
