"""This machine as a member of a run: what the coordinator (`resilience.coordinator`) tells it, and what it reports.

A thread keeps the connection. When it is lost, or the coordinator is silent, the ranks of this machine are ended:
others may have gone on without it. The thread then connects again and again, because machine 0 may come back there.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from zero2all.common.connections import Connection, NotOfThisRunError, OtherSecretError, dial
from zero2all.common.errors import PeerFailureError, PreemptedError, UsageError
from zero2all.common.language import message
from zero2all.common.progress import say
from zero2all.common.secret import SHARE_ONE
from zero2all.resilience.config import ResilienceConfig

LOOPBACK = "127.0.0.1"
BEAT_SECONDS = 1.0
NOTICE_SECONDS = 10.0
"""After so long it is said which machines are missing."""
GRACE_SECONDS = 60.0
"""How long others may take to end by themselves after an error that a person must mend: they may be saving."""
PAUSED_SECONDS = 5.0
"""A longer pause between two looks means that this process was stopped, and says nothing about the others."""
POLL_SECONDS = 0.05
CONNECT_SECONDS = 5.0
LEAVE_SECONDS = 5.0
"""How long a machine that leaves waits for an answer. The one that runs the coordinator waits for the others."""

Order = dict[str, Any]
"""`do` is start (with `attempt`, `token`, `first` rank, `world` size, `step`, `machines`, on machine 0 `store`), stop
(`code`, `text`), failed, end, save or beat. `machines`: number, processes, address for copies of each."""
SAVED = PreemptedError.exit_code
SURE, LOST, UNSURE, VICTIM = range(4)
"""How a failure is judged when several machines have one: the least is the cause. Ranks crash or hang also because
another machine is lost, but then nothing shows that they began it."""
Report = dict[str, Any]
"""How the ranks of a machine ended: `code`, `step`, `began`, `leaves`; after a failure `text`, `error`, `doubt` too."""


@dataclass(frozen=True)
class Rules:
    """With which machines a run may go on."""

    run: str
    least: int
    most: int
    fits: Callable[[int], bool]
    """Whether the run can be spread over this many processes."""
    settings: ResilienceConfig
    join_seconds: float
    has_memory: bool
    """Whether there may be checkpoints in memory."""
    secret: bytes = field(repr=False)
    """Of the run (`common.secret`)."""
    ports: Sequence[int] = (0,)
    """That may be listened on besides the coordinator's; 0: any."""


class Member:
    """The machine with the number `node`. Machine 0 runs the coordinator, and ends it with `end_coordinator`."""

    def __init__(
        self,
        address: tuple[str, int],
        node: int,
        processes: int,
        rules: Rules,
        end_coordinator: Callable[[], None] = lambda: None,
        copies: tuple[str, int] | None = None,
    ) -> None:
        """`copies`: where this machine takes copies of memory checkpoints."""
        self.node, self.order = node, Order()
        self.where = f"{address[0]}:{address[1]}"
        self._address, self._rules, self._end_coordinator = address, rules, end_coordinator
        hello = {"run": rules.run, "node": node, "host": socket.gethostname(), "processes": processes}
        hello["process"] = os.getpid()
        self._hello = {**hello, "token": secrets.token_hex(8), "copies": copies}
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._next: Order | None = None
        self._ends = self._saves = self._trains = 0
        """The attempts that are to end, to save, and in which the ranks here have done a step."""
        self._failures: list[Order] = []
        self._is_connected = self._was_connected = self._has_left = self._is_closed = False
        self._problem = ""
        threading.Thread(target=self._run, name="z2a-member", daemon=True).start()

    def next_order(self, is_asked: Callable[[], bool], tell: Callable[[Order], None]) -> Order:
        """Wait for the next attempt or for the end; `tell` gets failures meanwhile."""
        begun, asked_at, noticed = time.monotonic(), 0.0, False
        limit = self._rules.settings.below_minimum_seconds if self._was_connected else self._rules.join_seconds
        while True:
            with self._lock:
                order, failures = self._next, self._failures
                self._failures = []
                if order is not None and order["do"] == "start":
                    self._next, self.order = None, order
            for failure in failures:
                tell(failure)
            if order is not None:
                return order
            now = time.monotonic()
            if self._is_connected:
                begun, noticed = now, False
                limit = self._rules.settings.below_minimum_seconds
            if is_asked():
                asked_at = asked_at or now
                if not self._has_left:
                    self.ended({"attempt": -1, "leaves": True})
                if not self._is_connected or now - asked_at > (LEAVE_SECONDS if self.node else GRACE_SECONDS):
                    return {"do": "stop", "code": SAVED}
            if now - begun > limit:
                text = message(
                    f"Machine 0 was not reached at {self.where} within {limit:g} s: {self._problem}. Check that it "
                    f"was started and that no firewall blocks the port, and start this machine again."
                )
                return {"do": "stop", "code": PeerFailureError.exit_code, "text": text}
            if now - begun > NOTICE_SECONDS and not noticed:
                noticed = True
                say(f"z2a: machine 0 is not reached at {self.where} ({self._problem}). Trying for {limit:g} s.")
            time.sleep(POLL_SECONDS)

    def wish(self, has_stepped: bool) -> Literal["", "end", "save"]:
        """What is to be done with the attempt that runs here, and whose ranks have done a step, or not yet."""
        with self._lock:
            number = self.order["attempt"]
            self._trains = number if has_stepped else 0
            if self._next is not None and self._next["do"] == "stop":  # the run ends; these ranks do so by themselves
                return ""
            if self._ends == number:
                return "end"
            return "save" if self._saves == number else ""

    def ended(self, report: Report) -> None:
        """Report how the ranks of this machine ended."""
        self._has_left = report["leaves"]
        self._send({"attempt": self.order.get("attempt", 0), **report})

    def close(self) -> None:
        """The end of the run here."""
        self._is_closed = True
        self._end_coordinator()

    def _send(self, message: dict[str, Any]) -> None:
        if (connection := self._connection) is not None:
            with suppress(OSError):  # it is lost, which the thread sees too
                connection.send(message)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                with dial(
                    self._address, self._rules.secret, "coordinator", self._hello, CONNECT_SECONDS
                ) as self._connection:
                    self._listen(self._connection)
            except NotOfThisRunError as error:
                self._problem = str(error)
                if not self._was_connected:
                    self._refuse(isinstance(error, OtherSecretError))
            except OSError as error:
                self._problem = error.strerror or str(error)
            except (ValueError, TypeError, KeyError):
                self._problem = message("it sends what this version of zero2all does not understand")
            with self._lock:
                self._connection, self._is_connected = None, False
                self._ends = self.order.get("attempt", 0)
                if self._next is not None and self._next["do"] == "stop":
                    return
                self._next = None
            time.sleep(10 * POLL_SECONDS)

    def _refuse(self, is_other_secret: bool) -> None:
        """End at once with an error that only a person can mend."""
        if is_other_secret:
            text = message(f"Machine 0 at {self.where} has another secret than this machine; {SHARE_ONE}.")
        else:
            text = message(
                f"Something answers at {self.where}, but it is not a z2a machine: the port is wrong. Give all "
                f"machines the same --rendezvous, with a port that no other program uses."
            )
        with self._lock:
            self._next = {"do": "stop", "code": UsageError.exit_code, "text": text}

    def _listen(self, connection: Connection) -> None:
        heard = beat = looked = time.monotonic()
        while not self._is_closed:
            with suppress(TimeoutError):
                self._take(connection.receive(BEAT_SECONDS / 2))
                heard = time.monotonic()
            now = time.monotonic()
            if now - looked > PAUSED_SECONDS:  # this process was stopped
                heard = now
            looked = now
            if self.node and now - heard > self._rules.settings.node_silence_seconds:
                self._problem = message("no answer")
                return
            if now - beat >= BEAT_SECONDS:
                beat = now
                self._send({"trains": self._trains})

    def _take(self, order: Order) -> None:
        with self._lock:
            self._is_connected = self._was_connected = True
            if order["do"] in ("start", "stop"):
                self._next, self._ends, self._saves = order, 0, 0
            elif order["do"] == "failed":
                self._failures.append(order)
            elif order["do"] == "end":
                self._ends = order["attempt"]
            elif order["do"] == "save":
                self._saves = order["attempt"]
