"""A copy of a machine's memory checkpoints in the memory of the next machine (`resilience.peers`).

The machines of an attempt form a ring, in the order of their ranks. When a save is whole on a machine, its supervisor
sends the files, in a thread, to the next machine. That one keeps the two newest saves in `peer/`, and never writes over
the newest whole one.

Before an attempt every machine asks all others which saves they have. The newest that every machine has, itself or in
the memory of the next one, is the save to continue from; a machine without it fetches it. The ranks then find it as
their own, and still decide themselves which step all of them can load.

The copies have a port of their own, at the address of the data connections (gloo, NCCL): through the coordinator's
port, those of all machines would cross the network of machine 0. Only who knows the secret of the run is answered
(`common.connections`), and no file is used before its checksums were compared.
"""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.connections import Connection, ConnectionListener, dial, listen, read_some
from zero2all.common.errors import BadInputError
from zero2all.common.progress import say
from zero2all.resilience import slots
from zero2all.resilience.member import Order
from zero2all.resilience.slots import PAGE, NoMemoryFolderError, WholeSlot

PEER_FOLDER = "peer"
LOOK_SECONDS, RETRY_SECONDS = 0.2, 2.0
SILENT_SECONDS = 30.0
TOKEN_SECONDS = 10.0
"""How long a question waits until this machine has heard of the attempt, too."""
PROBLEMS = (OSError, ValueError, LookupError, TypeError, OverflowError, BadInputError, NoMemoryFolderError)
"""What can be wrong with a connection, an answer, a file, or the memory here."""

Save = tuple[int, str]
"""Its step, and an id: a step that is trained again has another one."""


_Machine = tuple[int, list[int], tuple[str, int]]
"""Number, ranks, address."""


@dataclass(frozen=True)
class _Ring:
    """The machines of an attempt, seen from the one at `place`; the one at `next` keeps its copies."""

    token: str
    secret: bytes
    place: int
    next: int
    machines: list[_Machine]

    def ranks(self, distance: int) -> list[int]:
        """Of this machine (0) or the one before (-1)."""
        return self.machines[self.place + distance][1]  # -1 is the last one


class Copies:
    """Sends the memory checkpoints of a run on this machine to the next one, and keeps those of the one before."""

    def __init__(self, run: Path, base: Path | None, host: str, secret: bytes, ports: Iterable[int] = (0,)) -> None:
        """`base` is the RAM file system (None: the usual one), `host` the address of this machine for data, `ports`
        those that may be used there."""
        self._run, self._base, self._secret = run, base, secret
        listener = listen(host, ports)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._receiving = threading.Lock()  # two saves at once would take the same buffer
        self._ring: _Ring | None = None
        self._sends_in: _Ring | None = None
        self._is_behind = False
        """Whether the last copy was not finished, which is said once."""
        ConnectionListener(listener, secret, self._answer, _door_at(self.address))
        threading.Thread(target=self._send_new, name="z2a-copies", daemon=True).start()

    def begin(self, order: Order) -> None:
        """Before the ranks of an attempt start: fetch the save that this machine lacks. Then send new ones."""
        machines: list[_Machine] = []
        place = first = 0
        for node, processes, address in order["machines"]:
            if address is None:  # another config there: the ranks will say it
                return
            place = len(machines) if first == order["first"] else place
            machines.append((node, list(range(first, first + processes)), tuple(address)))
            first += processes
        self._sends_in = None
        self._ring = ring = _Ring(order["token"], self._secret, place, (place + 1) % len(machines), machines)
        with suppress(*PROBLEMS):
            for path in (self._folder() / PEER_FOLDER).glob("[ab]-*"):
                if int(path.name[2:]) not in ring.ranks(-1):  # of an attempt with other machines
                    path.unlink()
        if len(machines) > 1:
            self._complete(ring)
            self._sends_in = ring

    def _folder(self) -> Path:
        if (name := slots.run_id(self._run)) is None:
            raise FileNotFoundError(self._run / slots.ID_FILE)
        return slots.ram_home(self._base) / name

    def _complete(self, ring: _Ring) -> None:
        have = [_ask(ring, place) for place in range(len(ring.machines))]
        whole = set.intersection(*(own | held for (own, _), (_, held) in zip(have, have[1:] + have[:1], strict=True)))
        # One that no machine has itself was given up by all of them: a rollback removes those, and not the copies.
        for save in sorted((one for one in whole if any(one in own for own, _ in have)), reverse=True):
            if save in have[ring.place][0]:
                return
            node = ring.machines[ring.next][0]
            try:
                folder = self._folder()
                slots.make_run_folder(folder.parent, folder.name, self._run)
                with _call(ring, ring.next, "get", save) as connection:
                    _receive(connection, folder, ring.ranks(0), save)
            except PROBLEMS as error:
                say(f"z2a: the copy of step {save[0]} in the memory of machine {node} cannot be used: {error}")
            else:
                say(f"z2a: step {save[0]} was fetched from the memory of machine {node}.")
                return

    def _answer(self, connection: Connection) -> None:
        with connection, suppress(*PROBLEMS):  # the other side sees that there is no answer
            connection.socket.settimeout(SILENT_SECONDS)
            asked = connection.hello
            deadline = time.monotonic() + TOKEN_SECONDS
            while (ring := self._ring) is None or ring.token != asked["token"]:
                if time.monotonic() > deadline:
                    return
                time.sleep(LOOK_SECONDS / 10)
            folder = self._folder()
            held = folder / PEER_FOLDER
            save = (int(asked["save"][0]), str(asked["save"][1]))
            if asked["do"] == "list":
                own, others = whole_saves(folder, ring.ranks(0)), whole_saves(held, ring.ranks(-1))
                connection.send({"own": list(own), "held": list(others)})
            elif asked["do"] == "get":
                _send(connection, whole_saves(held, ring.ranks(-1))[save])
            elif asked["do"] == "put":
                slots.own_folder(held)
                with self._receiving:
                    _receive(connection, held, ring.ranks(-1), save)
                connection.send({"done": True})

    def _send_new(self) -> None:
        seen: Any = None
        while True:
            time.sleep(LOOK_SECONDS)
            ring = self._sends_in
            with suppress(*PROBLEMS):  # the ranks have not made their folder yet, or remove it
                if ring is not None and seen != (now := (ring, _heads(self._folder()))):
                    own = whole_saves(self._folder(), ring.ranks(0))
                    is_missing = own and max(own) not in _ask(ring, ring.next)[1]
                    if is_missing and not self._send_copy(ring, max(own), own[max(own)]):
                        time.sleep(RETRY_SECONDS)  # then the same save again
                    else:
                        seen = now

    def _send_copy(self, ring: _Ring, save: Save, group: list[WholeSlot]) -> bool:
        try:
            with _call(ring, ring.next, "put", save) as connection:
                _send(connection, group)
                connection.receive(SILENT_SECONDS)
            self._is_behind = False
        except PROBLEMS as error:
            if not self._is_behind:
                node = ring.machines[ring.next][0]
                say(f"z2a: the copy of step {save[0]} for the memory of machine {node} was not finished: {error}")
            self._is_behind = True
        return not self._is_behind


def whole_saves(folder: Path, ranks: list[int]) -> dict[Save, list[WholeSlot]]:
    """The saves of a machine with these ranks of which a folder has all files, apart from the bytes of the data."""
    found: dict[Save, list[WholeSlot]] = {}
    for each in slots.whole_slots(folder):
        if each.about.get("ranks") == ranks:
            found.setdefault((each.step, each.about["save"]), []).append(each)
    return {save: group for save, group in found.items() if sorted(each.about["rank"] for each in group) == ranks}


def _heads(folder: Path) -> list[bytes]:
    found = []
    for path in sorted(folder.glob("[ab]-*")):
        with open(path, "rb") as file:
            found.append(file.read(PAGE))
    return found


# ---- on the wire: the question is the hello; then per file of a save a message and its bytes ----


def _door_at(address: tuple[str, int]) -> str:
    return f"copies of checkpoints at {address[0]}:{address[1]}"


def _call(ring: _Ring, place: int, do: str, save: Save = (-1, "")) -> Connection:
    address = ring.machines[place][2]
    connection = dial(address, ring.secret, _door_at(address), {"token": ring.token, "do": do, "save": save})
    connection.socket.settimeout(SILENT_SECONDS)
    return connection


def _ask(ring: _Ring, place: int) -> tuple[set[Save], set[Save]]:
    """The saves that a machine has itself, and those of the one before that it keeps."""
    with suppress(*PROBLEMS), _call(ring, place, "list") as connection:
        said = connection.receive(SILENT_SECONDS)
        return {(step, name) for step, name in said["own"]}, {(step, name) for step, name in said["held"]}
    return set(), set()


def _send(connection: Connection, group: Iterable[WholeSlot]) -> None:
    for found in group:
        with open(found.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            connection.send({"rank": found.about["rank"], "size": size})
            if connection.socket.sendfile(file, 0, size) != size:  # it is being written again
                raise BadInputError(f"{found.path}: it has another size than its header says")


def _receive(connection: Connection, folder: Path, ranks: list[int], save: Save) -> None:
    """Take the files of a save, each into the buffer that has no part of the newest whole one. BadInputError when one
    is not what it should be; then it counts as unfinished."""
    kept = max(whole_saves(folder, ranks), default=None)
    for _ in ranks:
        said = connection.receive(SILENT_SECONDS)
        rank, left = ranks[ranks.index(said["rank"])], int(said["size"]) - PAGE
        path = min(slots.slot_paths(folder, rank), key=lambda one: ((held := _save_in(one)) == kept, held))
        path.unlink(missing_ok=True)
        slots.require_room(folder, left + PAGE)
        connection.socket.settimeout(SILENT_SECONDS)
        head = b""
        while len(head) < PAGE:
            head += read_some(connection.socket, PAGE - len(head))
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.seek(PAGE)
            while left > 0:
                left -= file.write(read_some(connection.socket, left))
            file.seek(0)
            file.write(head)  # last: until now it is not valid
        try:
            found = slots.read_slot(path, with_data=True)
            if (found.step, found.about.get("save"), found.about.get("rank")) != (*save, rank):
                raise BadInputError(f"{path}: it is of another save")
        except BadInputError:
            path.unlink()
            raise


def _save_in(path: Path) -> Save:
    with suppress(BadInputError):
        found = slots.read_slot(path)
        return found.step, str(found.about.get("save"))
    return -1, ""
