"""The coordinator of a run over several machines: who takes part in each attempt, and its end for all when one fails.

The supervisor of machine 0 runs it, at the rendezvous address, in a thread. Every supervisor, its own too, is
a member (`resilience.member`) and says once a second that it is alive. A machine that fails, whose connection is closed
or that falls silent ends the attempt on all machines; the next one begins with those that are there. A machine that
comes later waits; the run saves, and the next attempt has it.

There is one port, because containers forward few, and all who connect to it prove the secret of the run first
(`common.connections`). The store that rank 0 holds, a new one in every attempt, asks for no proof: it listens on
loopback only, and the connections of ranks on other machines come through this port (`parallel.launch`).

Only the coordinator starts attempts, and rank 0, which alone commits checkpoints, is always on its machine. So when the
network breaks, the side without it ends its ranks and waits: two sides never train at the same time.
"""

import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from zero2all.common.connections import Connection, ConnectionListener, Message, join, listen
from zero2all.common.errors import PeerFailureError, UnhealthyError, UsageError
from zero2all.common.language import message
from zero2all.common.progress import counted, say
from zero2all.resilience.member import (
    BEAT_SECONDS,
    GRACE_SECONDS,
    LOOPBACK,
    LOST,
    NOTICE_SECONDS,
    PAUSED_SECONDS,
    SAVED,
    Report,
    Rules,
)
from zero2all.resilience.restarts import Restarts

LOOK_SECONDS = 0.1
MOST_PROCESSES = 1 << 12
"""Of one machine."""
START_SECONDS = 30.0
"""How long the first attempt waits for more machines once there are enough."""
SETTLE_SECONDS = 3.0
"""How long the reports of other machines are awaited after a failure: the first cause may be the last to be seen."""
NEWCOMER_SECONDS = 5.0
"""How long a machine must be there before the run is interrupted for it."""
FLAPS, FLAP_SECONDS, LONGEST_FLAP_SECONDS = 3, 60.0, 3600.0
"""After how many losses in a row a machine is left out, and for how long: twice as long each time."""


HELLO = {"run": str, "node": int, "host": str, "processes": int, "token": str, "process": int}
REPORT, FAILURE = {"code": int, "step": int, "began": int, "leaves": bool}, {"text": str, "error": str, "doubt": int}


@dataclass(eq=False)
class _Seat:
    """A machine that is connected."""

    node: int
    host: str
    processes: int
    token: str
    process: int
    """The number of its supervisor: two on one host have the same name."""
    copies: list[Any] | None
    """Where it takes copies of memory checkpoints."""
    connection: Connection
    heard: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    report: Report | None = None
    """How its ranks of this attempt ended."""

    @property
    def name(self) -> str:
        return f"{self.node} ({self.host})"

    def send(self, **message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:  # it is gone, or has read nothing for long
            self.connection.close()


class MachineCoordinator:
    """Run by machine 0, at a listening socket."""

    def __init__(self, listener: socket.socket, rules: Rules) -> None:
        self._rules = rules
        self._is_elastic = rules.least < rules.most
        self._restarts = Restarts(rules.settings.restarts)
        self._lock = threading.RLock()
        """Of all that follows: each connection has its thread."""
        self._seats: dict[int, _Seat] = {}
        self._members: list[_Seat] = []
        """Those in the attempt that runs; none: there is none."""
        self._number = 0
        self._store: tuple[str, int] | None = None
        self._is_over = self._is_saving = self._is_last = False
        """Whether the run has ended; whether it saves to begin again; whether it ends after that."""
        self._waits_since: float | None = None
        self._trains_since: float | None = None
        """When the attempt that runs had done its first step."""
        self._flaps: dict[int, tuple[int, float]] = {}
        """By machine: how often in a row it was lost soon after it had come, and until when it is left out."""
        self._not_before = self._beat = 0.0
        self._looked = time.monotonic()
        self._deadline = float("inf")
        """When ranks that are left of a failed attempt are ended."""
        self._said = ""
        self._door = ConnectionListener(listener, rules.secret, self._take, "coordinator")
        self._thread = threading.Thread(target=self._hold, name="z2a-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the others have read how the run ended."""
        self._is_over = True
        self._thread.join(2 * BEAT_SECONDS)

    def _hold(self) -> None:
        while not self._is_over:
            with self._lock:
                self._look(time.monotonic())
            time.sleep(LOOK_SECONDS)
        self._door.close()
        time.sleep(LOOK_SECONDS)  # what the system still holds is sent after the end of this process too

    def _take(self, connection: Connection) -> None:
        """Serve a connection that has proved the secret, in a thread of its own."""
        with connection:
            if connection.hello.get("service") != "store":
                self._listen(connection)
            elif (store := self._store) is not None:
                with suppress(OSError):  # rank 0 has ended
                    join(connection.socket, socket.create_connection(store))

    def _listen(self, connection: Connection) -> None:
        """One machine, until its connection ends."""
        hello = _checked(connection.hello, HELLO)
        place = hello.get("copies")
        shape = [type(part) for part in place] if isinstance(place, list) else place
        if not 0 < hello["processes"] <= MOST_PROCESSES or shape not in (None, [str, int]):
            raise ValueError("a hello with wrong values")
        who = hello["node"], hello["host"], hello["processes"], hello["token"], hello["process"]
        seat = _Seat(*who, place, connection)
        with self._lock:
            if problem := self._refusal(seat, hello["run"]):
                seat.send(do="stop", code=UsageError.exit_code, text=problem)
                return
            if before := self._seats.get(seat.node):
                self._lose(before, message("it has connected again"))
            self._seats[seat.node] = seat
            seat.send(do="beat")
        try:
            while True:
                with suppress(TimeoutError):  # so that a send waits no longer than this either
                    said = connection.receive(BEAT_SECONDS)
                    with self._lock:
                        self._hear(seat, said)
        except OSError:
            pass  # said below
        finally:
            with self._lock:
                if self._seats.get(seat.node) is seat:
                    self._lose(seat, message("its connection was closed"))

    def _hear(self, seat: _Seat, said: Message) -> None:
        seat.heard = time.monotonic()
        if said.get("trains") == self._number and self._trains_since is None:
            self._trains_since = seat.heard
        if "leaves" in said and said.get("attempt") == self._number and seat in self._members:
            seat.report = _checked(said, {**REPORT, **FAILURE} if "text" in said else REPORT)
        elif said.get("leaves"):  # while it waited
            self._stop(SAVED) if seat.node == 0 else self._dismiss([seat])

    def _refusal(self, seat: _Seat, run: str) -> str:
        """Why this machine cannot take part; empty: it can."""
        before = self._seats.get(seat.node)
        if run != self._rules.run:
            return message(
                f"Another run meets at this address: {self._rules.run}, not {run}. Give each run a port of its own "
                f"(--rendezvous)."
            )
        if not 0 <= seat.node < self._rules.most:
            return message(f"--node-rank is {seat.node}, but machine 0 was started with --nodes {self._rules.most}.")
        if before and before.token != seat.token and time.monotonic() - before.heard < 3 * BEAT_SECONDS:
            return message(
                f"Machine {seat.node} connected twice: from {before.host} (process {before.process}) and from "
                f"{seat.host} (process {seat.process}). Give each machine its own --node-rank."
            )
        return ""

    def _lose(self, seat: _Seat, why: str) -> None:
        del self._seats[seat.node]
        seat.connection.close()
        if self._is_over:
            return
        if seat in self._members and seat.report is None:
            seat.report = {"code": 1, "step": -1, "began": -1, "leaves": False, "doubt": LOST, "text": why, "error": ""}
        else:
            say(f"z2a: machine {seat.name} was lost: {why}.")

    def _look(self, now: float) -> None:
        own = self._seats.get(0)  # of this process: its silence says something about this machine, not about the others
        if now - self._looked > PAUSED_SECONDS or (own is not None and now - own.heard > 3 * BEAT_SECONDS):
            for seat in self._seats.values():
                seat.heard = now
        self._looked = now
        silence = self._rules.settings.node_silence_seconds
        for seat in [seat for seat in self._seats.values() if now - seat.heard > silence]:
            self._lose(seat, message(f"silent for {silence:g} s (resilience.node_silence_seconds)"))
        if now - self._beat >= BEAT_SECONDS:
            self._beat = now
            for seat in self._seats.values():
                seat.send(do="beat")
        if self._members:
            self._watch(now)
        else:
            self._begin(now)

    def _choose(self, least: int) -> list[_Seat]:
        """The most machines with which the run can go on, machine 0 among them; none: it cannot."""
        all_there = [self._seats[node] for node in sorted(self._seats)]
        now = time.monotonic()
        steady = [seat for seat in all_there if self._flaps.get(seat.node, (0, 0.0))[1] <= now]
        for there in (steady, all_there):  # without the others the run might have to wait
            for count in range(len(there), least - 1, -1):
                chosen = there[:count]
                fits = count % self._rules.settings.node_multiple == 0 and self._rules.fits(_processes(chosen))
                if fits and chosen[0].node == 0:
                    return chosen
        return []

    def _begin(self, now: float) -> None:
        """Start an attempt, if there are enough machines."""
        rules, settings = self._rules, self._rules.settings
        chosen, there = self._choose(rules.least), len(self._seats)
        self._waits_since = now if self._waits_since is None else self._waits_since
        waited = now - self._waits_since
        if chosen:
            if now >= self._not_before and (self._number or there == rules.most or waited > START_SECONDS):
                self._start(chosen)
            return
        limit = settings.below_minimum_seconds if self._number else rules.join_seconds
        missing = ", ".join(str(node) for node in range(rules.most) if node not in self._seats)
        if self._number and settings.below_minimum == "stop":
            if rules.has_memory and not self._is_last and (chosen := self._choose(1)):
                self._say_once(
                    message("z2a: too few machines are left: what memory holds is saved, then the run ends.")
                )
                self._is_last = self._is_saving = True
                self._start(chosen)
                chosen[0].send(do="save", attempt=self._number)
            else:
                self._stop(PeerFailureError.exit_code, message(f"Too few machines are left; missing: {missing}."))
        elif waited > limit:
            self._stop(
                PeerFailureError.exit_code,
                message(
                    f"These machines of {rules.most} did not come within {limit:g} s: {missing}. Look for their "
                    f"errors, check that they were started with the same --rendezvous, and start them again."
                ),
            )
        elif waited > NOTICE_SECONDS:
            self._say_once(
                message(
                    f"z2a: waiting for machine {missing} of {rules.most}, at most {limit:g} s. At least {rules.least} "
                    f"are needed (--nodes). Were they started, each with its own --node-rank?"
                )
            )

    def _start(self, chosen: list[_Seat]) -> None:
        listener = listen(LOOPBACK)
        self._store = listener.getsockname()
        self._number += 1
        self._members, self._waits_since, self._deadline = chosen, None, float("inf")
        self._trains_since = None
        world, first, token = _processes(chosen), 0, secrets.token_hex(8)
        machines = [[seat.node, seat.processes, seat.copies] for seat in chosen]
        idle = len(self._seats) - len(chosen)
        say(
            f"z2a: attempt {self._number} begins on {counted(len(chosen), 'machine')}, with {counted(world, 'rank')}."
            + (f" {counted(idle, 'machine')} must wait: the run does not fit on so many." if idle else "")
        )
        for seat in chosen:
            seat.report = None
            order = {"attempt": self._number, "token": token, "first": first, "world": world, "machines": machines}
            store = {"store": listener.detach()} if seat.node == 0 else {}  # of this same process
            seat.send(do="start", step=self._restarts.best_step, **order, **store)
            first += seat.processes

    def _watch(self, now: float) -> None:
        """See whether the attempt must end, or the run can grow."""
        reports = [seat.report for seat in self._members]
        if all(reports):
            self._judge(now)
            return
        for report in reports:
            if report is not None and report["code"] != 0:
                wait = GRACE_SECONDS
                if report["leaves"] and report["step"] < 0:  # before training: the others cannot know of it
                    wait = 0.0
                elif "text" in report:
                    wait = 0.0 if report["doubt"] == LOST else SETTLE_SECONDS
                self._deadline = min(self._deadline, now + wait)
        if now >= self._deadline:
            self._deadline = float("inf")
            for seat in self._members:
                if seat.report is None:
                    seat.send(do="end", attempt=self._number)
        new = [
            seat for seat in self._seats.values() if seat not in self._members and now - seat.since > NEWCOMER_SECONDS
        ]
        is_due = self._trained_seconds(now) >= self._rules.settings.join_after_seconds and not self._is_saving
        if new and is_due and not any(reports) and len(self._choose(1)) > len(self._members):
            say(f"z2a: machine {', '.join(seat.name for seat in new)} has joined: the run saves and goes on with it.")
            self._is_saving = True
            self._members[0].send(do="save", attempt=self._number)

    def _judge(self, now: float) -> None:
        """The attempt has ended on all machines: decide whether there is another one."""
        found = [(seat, seat.report) for seat in self._members if seat.report is not None]
        was_saving, self._members, self._store, self._is_saving = self._is_saving, [], None, False
        failed = [(seat, report) for seat, report in found if report.get("text")]  # empty: ended for another's sake
        # A machine that the health check has found bad ends with this code; the others can do without it.
        bad = [seat for seat, report in found if report["code"] == UnhealthyError.exit_code and seat.node > 0]
        bad = bad if self._is_elastic else []
        final = [
            report["code"]
            for seat, report in found
            if report["code"] not in (0, SAVED) and "text" not in report and seat not in bad
        ]
        leaving = [seat for seat, report in found if report["leaves"]]
        step, began = (max(report[name] for _, report in found) for name in ("step", "began"))
        if final:
            self._stop(final[0])
        elif failed:
            self._after_failure(*min(failed, key=lambda one: one[1]["doubt"]), step, began, now)
        elif all(report["code"] == 0 for _, report in found):
            self._stop(0)
        elif bad or (was_saving and not self._is_last) or (leaving and leaving[0].node > 0 and self._is_elastic):
            self._restarts.saved_at(step)
        else:
            self._stop(SAVED)
        self._dismiss(leaving)
        self._dismiss(bad, UnhealthyError.exit_code)

    def _after_failure(self, seat: _Seat, report: Report, step: int, began: int, now: float) -> None:
        if report["doubt"] != LOST:  # else nobody knows its step, and the others' were the same
            step, began = report["step"], report["began"]
        ends = self._restarts.reason_to_end(step, began, report["error"])
        done = ends or message(f"The supervisors start the run again (attempt {self._number + 1}).")
        text = message(f"Machine {seat.name}: {report['text']}")
        is_lost = report["doubt"] == LOST
        if is_lost and self._is_elastic:
            self._count_flap(seat, now)
        if (0 if is_lost else seat.node) not in self._seats:  # the machine that would write the page has gone too
            say(f"z2a: {text}")
            say(f"z2a: {done}")
        for other in self._seats.values():
            other.send(do="failed", node=0 if is_lost else seat.node, is_lost=is_lost, text=text, done=done)
        if ends:
            self._stop(self._restarts.end_code(report["code"]))
        self._not_before = now + self._restarts.pause_seconds

    def _trained_seconds(self, now: float) -> float:
        """How long the attempt trains."""
        return -1.0 if self._trains_since is None else now - self._trains_since

    def _count_flap(self, seat: _Seat, now: float) -> None:
        """A machine was lost: leave it out for a while if that happens again and again before the run has advanced."""
        count, until = self._flaps.get(seat.node, (0, 0.0))
        count = 0 if self._trained_seconds(now) >= self._rules.settings.join_after_seconds else count + 1
        if count >= FLAPS and seat.node > 0:
            seconds = min(FLAP_SECONDS * 2.0 ** (count - FLAPS), LONGEST_FLAP_SECONDS)
            until = now + seconds
            say(
                f"z2a: machine {seat.name} was lost {count} times soon after it had come. It is left out for "
                f"{seconds:g} s, unless the run cannot go on without it."
            )
        self._flaps[seat.node] = (count, until)

    def _dismiss(self, leaving: Iterable[_Seat], code: int = SAVED) -> None:
        for seat in leaving:
            seat.send(do="stop", code=code)
            self._seats.pop(seat.node, None)

    def _stop(self, code: int, text: str = "") -> None:
        """The end of the run, on all machines."""
        for seat in self._seats.values():
            seat.send(do="stop", code=code, text=text)
        self._is_over = True

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            say(text)


def _checked(said: Message, kinds: Mapping[str, type]) -> Message:
    if wrong := [name for name, kind in kinds.items() if type(said.get(name)) is not kind]:
        raise ValueError(f"a message without {', '.join(wrong)}")
    return said


def _processes(seats: Iterable[_Seat]) -> int:
    return sum(seat.processes for seat in seats)
