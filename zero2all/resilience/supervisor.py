"""Starts the processes of a run on this machine, watches them, and starts them again after a failure.

Each attempt has fresh processes, a fresh rendezvous and fresh heartbeats. A rank that dies, or whose phase lasts longer
than its limit, ends the attempt: stacks are taken, all ranks get SIGKILL, a page is written, and the command is started
again; it continues from its newest checkpoint. Errors that a person must mend are passed on, and so is a run that was
asked to stop. The supervisor gives up when the same error comes at the same step twice, or after `restarts` attempts in
a row without progress. It never imports torch, so that it costs a run a fraction of a second.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from zero2all.common.errors import MANY_FILES, NEVER_AGAIN, DiskError, PreemptedError, says_out_of_memory
from zero2all.common.language import message
from zero2all.common.progress import counted, say
from zero2all.common.signals import Handler, signals_to, stop_signals_to
from zero2all.resilience import member as machines
from zero2all.resilience.config import ResilienceConfig
from zero2all.resilience.diagnosis import (
    CLEAR_CRASHES,
    VICTIM,
    MemoryKills,
    RankFacts,
    culprit,
    process_state,
    signal_words,
    take_stacks,
)
from zero2all.resilience.failure_page import Failure, same_error, write_page
from zero2all.resilience.heartbeat import ATTEMPT_NUMBER, WARM_UP_STEPS, Beat
from zero2all.resilience.member import Member, Order, Report
from zero2all.resilience.ranks import Environment, RankProcesses
from zero2all.resilience.restarts import DISK_FULL, Notices, Restarts
from zero2all.resilience.warm import Warm, WarmRank

FINAL_CODES = (*NEVER_AGAIN, PreemptedError.exit_code, 128 + signal.SIGINT)
"""Ends after which there is no further attempt."""
ABSENT = "AbsentGroupsError"
"""Other groups (DiLoCo) did not come, which a person must mend."""
CURED = "ReplicasDifferError"
"""A bit has flipped: the checkpoint is whole, and from there all ranks have the same bits again."""
GRACE_SECONDS = 60.0
"""How long the others may continue after one has ended with such an error; they may be waiting for it forever."""
ENDS_IN_TIME = (None, 0, PreemptedError.exit_code)
"""Exit codes after which the others may take as long as they need: after a signal all of them save."""
SETTLE_SECONDS = 1.0
"""How long the errors of the other ranks are awaited: the first cause may be the last to end."""
POLL_SECONDS = 0.05
UNKNOWN_LIMIT_SECONDS, LEAST_LIMIT_SECONDS, LIMIT_FACTOR = 1800.0, 60.0, 5.0
LEAST_FIRST_STEP_SECONDS = 300.0
"""More than for other phases: on another number of machines, or in another stage, a restart compiles anew."""
KNOWN_AFTER = {"step": 10, "data": 10}
"""How often a phase must have been seen before its limit is learned; others: twice."""
PAUSED_SECONDS = 5.0
"""A longer pause between two looks means that this process was stopped or frozen, and perhaps the ranks with it."""
COLLECTIVES_SECONDS = 1.0

SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "A user sent it, or the system because memory ran out.",
    signal.SIGABRT: "NCCL sends it when another process has died or does not answer within parallel.timeout_seconds.",
}


@dataclass(frozen=True)
class Watch:
    """What the supervisor does besides starting and waiting. By default nothing: a failure is passed on."""

    settings: ResilienceConfig = field(default_factory=lambda: ResilienceConfig(restarts=0))
    run: Path | None = None
    """Where pages go."""
    watches_phases: bool = False
    once: tuple[str, ...] = ()
    """Words of the command that are left out once training has begun (`--fresh`)."""
    preload: str = ""
    """The module that takes the ranks of a `z2a` command seconds to import: they start warm (resilience/warm.py)."""
    grace_seconds: float = GRACE_SECONDS
    at_good_end: Callable[[], None] = lambda: None


def supervise(
    command: Sequence[str],
    environments: Callable[[ExitStack], list[Environment]],
    watch: Watch | None = None,
    member: Member | None = None,
) -> int:
    """Run the command once per environment, as one group, until it ends well or for good; returns the exit code. With
    other machines, `member` says when an attempt begins and ends."""
    supervisor = _Supervisor(list(command), environments, watch or Watch(), member)
    window: dict[int, Handler] = {signal.SIGWINCH: supervisor.resize, signal.SIGTSTP: supervisor.suspend}
    with stop_signals_to(supervisor.pass_on), signals_to(window):
        try:
            return supervisor.run() if member is None else supervisor.run_with_others()
        finally:
            if supervisor.warm is not None:
                supervisor.warm.close()


class _Supervisor:
    def __init__(
        self,
        command: list[str],
        environments: Callable[[ExitStack], list[Environment]],
        watch: Watch,
        member: Member | None = None,
    ) -> None:
        self.command, self.environments, self.watch, self.member = command, environments, watch, member
        self.failure: Failure | None = None
        """Of the last attempt, until the machines have agreed on its cause; also where another machine's ended it."""
        self.supervises = watch.run is not None or watch.settings.restarts > 0
        self.notices = Notices(watch.settings)
        self.asked: list[int] = []
        self.has_notice = False
        """Whether it was asked by a notice or a deadline, which was said, and not by a signal."""
        self.started: RankProcesses | None = None
        """The ranks of this attempt; None before the first one."""
        self.resumed = 0.0
        self.attempt = 0
        self.restarts = Restarts(watch.settings.restarts)
        self.seen: dict[str, tuple[int, float]] = {}
        self.warm: Warm | None = None

    def run(self) -> int:
        """All attempts."""
        while True:
            self.attempt += 1
            code, failure = self._one_attempt()
            if code == 0:
                self.watch.at_good_end()
            if failure is None or self.asked:
                return code
            ends = self._gives_up(failure)
            failure.done = ends or message(f"The supervisor restarts the run (attempt {self.attempt + 1}).")
            self._tell(failure)
            if ends:
                return self.restarts.end_code(code)
            if self._wait_before_restart():
                self._say_stopped()
                return _stopped_by(self.asked[0])

    def run_with_others(self) -> int:
        """All attempts, as the machines of the run agree on them."""
        assert self.member is not None
        code = 0
        try:
            while (order := self.member.next_order(lambda: bool(self.asked), self._tell_agreed))["do"] == "start":
                self.attempt, self.restarts.best_step = order["attempt"], order["step"]
                if self.member.node:
                    say(
                        f"z2a: joined {self.member.where} as machine {self.member.node}: attempt {self.attempt} on "
                        f"{counted(len(order['machines']), 'machine')}. Machine 0 shows the progress."
                    )
                code, failure = self._one_attempt()
                self.member.ended(self._report(code, failure))
            if order.get("text"):
                say(f"z2a: {order['text']}")
            elif self.member.node and order["code"] not in (0, machines.SAVED):
                say(f"z2a: the run has ended with code {order['code']}. Machine 0 shows why, if no cause is above.")
            if order["code"] == 0:
                self.watch.at_good_end()
            if self.asked:
                return code or _stopped_by(self.asked[0])
            return int(order["code"])
        finally:
            self.member.close()

    def _report(self, code: int, failure: Failure | None) -> Report:
        if self.asked and code == 128 + signal.SIGINT:  # before training: the others go on, as after SIGTERM
            code = PreemptedError.exit_code
        report: Report = {"code": code, "leaves": bool(self.asked), "step": self.reached[0], "began": self.reached[1]}
        if failure is not None:
            first = next(facts for facts in failure.ranks if facts.rank == failure.rank)
            is_victim = failure.kind == "lost" or first.error.startswith(VICTIM)
            doubt = machines.VICTIM if is_victim else machines.SURE if failure.is_sure else machines.UNSURE
            report |= {"text": failure.text, "error": failure.error, "doubt": doubt}
        return report

    def _tell_agreed(self, order: Order) -> None:
        """The cause that the machines agreed on. Its page is written where it happened."""
        assert self.member is not None
        failure, self.failure = self.failure, None
        if failure is None or order["node"] != self.member.node:
            say(f"z2a: {order['text']}")
            say(f"z2a: {order['done']}")
            return
        failure.text, failure.done = order["text"], order["done"]
        failure.kind = "lost" if order["is_lost"] else failure.kind
        self._tell(failure)

    def pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        """A signal to stop: the ranks get it too."""
        self.asked.append(number)
        if self.started is not None:
            self.started.send_signal(number)

    def resize(self, _number: int, _frame: FrameType | None) -> None:
        """The window has another size."""
        if self.started is not None:
            self.started.resize()

    def suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z."""
        if self.started is not None:
            self.started.suspend()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.resumed = time.monotonic()

    # ---- one attempt ----

    def _one_attempt(self) -> tuple[int, Failure | None]:
        """The exit code, and the failure where it may be tried again."""
        with ExitStack() as stack:
            until_started = stack.enter_context(ExitStack())
            environments = self.environments(until_started)
            self.memory_kills, self.began = MemoryKills(), time.monotonic()
            self.looked, self.resumed, self.is_signalled = self.began, self.began, False
            self.started = ranks = RankProcesses(len(environments), stack)
            if self.watch.preload and (self.warm is None or self.warm.is_lost):
                self.warm = Warm(self.command, {**os.environ, **environments[0][0]}, self.watch.preload)
                self.warm.wait(self._start_seconds(), lambda: bool(self.asked))
            command = [word for word in self.command if self.restarts.best_step < 0 or word not in self.watch.once]
            streams = (2,) if self.supervises else ()
            for variables, inherited in environments:
                if self.asked:  # between two starts
                    break
                variables = {**variables, ATTEMPT_NUMBER: str(self.attempt)}
                ranks.start(command, (variables, inherited), streams, self._start_warm)
            until_started.close()
            if self.asked and ranks:  # it came while the last one was started, so that one did not get it
                ranks[-1].process.send_signal(self.asked[0])
            if self.supervises:
                ranks.start_guard([] if self.warm is None else [self.warm.pid])
            code, failure = self._wait()
            ranks.drain(0.0)
            beats = [ranks.slots.beat(place) for place in range(len(ranks))]
            if self.member is not None and ranks:
                facts = self._facts()
                self.failure = failure or self._failure("lost", facts[0], "", "", facts)
            self.reached = (
                max((beat.step for beat in beats), default=-1),
                max((beat.first_step for beat in beats), default=-1),
            )
            ends = [-(rank.process.returncode or 0) for rank in ranks[:1]]
            if self.watch.preload and self.asked and self.reached[0] < 0 and all(end in self.asked for end in ends):
                self._say_stopped()
            if self.asked and len(ranks) < len(environments):
                return _stopped_by(self.asked[0]), None
            return code, failure

    def _say_stopped(self) -> None:
        """Report a signal or notice that came before any rank could report it."""
        name = signal.Signals(self.asked[0]).name
        if self.has_notice:
            say("z2a: stopped before the run had started. Run the same command to continue.")
        elif self.attempt == 1:
            say(f"z2a: got {name} before the run had started. Nothing was changed. Run the same command to start it.")
        else:
            say(f"z2a: got {name} before the run had started again. Run the same command to continue it.")

    def _start_warm(
        self, command: Sequence[str], variables: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> WarmRank | None:
        if self.warm is None or self.warm.is_lost:
            return None
        words = command[command.index("zero2all") + 1 :]
        return self.warm.start(words, variables, descriptors, self._start_seconds())

    def _start_seconds(self) -> float:
        return self.watch.settings.limits.get("start", UNKNOWN_LIMIT_SECONDS)

    @property
    def ranks(self) -> RankProcesses:
        """Those of this attempt."""
        assert self.started is not None, "no attempt has begun"
        return self.started

    # ---- watching ----

    def _wait(self) -> tuple[int, Failure | None]:
        """Wait for all ranks, until one fails or hangs."""
        deadline, first = float("inf"), None
        while None in (codes := self._codes()) and time.monotonic() < deadline:
            failed = [code for code in codes if code not in ENDS_IN_TIME]
            if failed and first is None:
                first = failed
                again = self._may_restart(failed)
                clear = any(code < 0 for code in failed)  # killed: nobody's error is awaited, only who else was
                seconds = (2 * POLL_SECONDS if clear else SETTLE_SECONDS) if again else self.watch.grace_seconds
                deadline = time.monotonic() + seconds
                facts = self._facts()
                if again and -signal.SIGKILL not in failed:  # then it is clear who died, and stacks take a second
                    self._look_closer(facts)
            elif failed and self._only_stopped_are_left():
                break
            elif not failed and (over := self._over()):
                return self._hang(over)
            elif self.member is not None and (
                wish := self.member.wish((beat := self.ranks.slots.beat(0)).step > beat.first_step)
            ):
                if wish == "end":
                    return self._end_for_others()
                self._save_for_others()
            elif not self.asked and (reason := self.notices.due()):
                self.has_notice = True
                if self.ranks.slots.beat(0).step < 0:
                    say(f"z2a: {reason}. The run ends.")
                else:
                    say(f"z2a: {reason}. The run saves and ends.")
                self.pass_on(signal.SIGTERM)
            self.ranks.drain(POLL_SECONDS)
        self.ranks.drain(0.0)
        codes = self._codes()
        failed = [code for code in codes if code not in (None, 0)] or first or []
        code = _cause(first or failed)
        if self._may_restart(failed):
            return code, self._crash(codes, facts if first else self._facts())
        for line in self._lost_peers():
            say(f"z2a: {line}")
        waited = self.watch.grace_seconds if time.monotonic() >= deadline else 0.0
        for line in unusual_ends(codes, waited, self.ranks[0].name if self.ranks else 0):
            say(f"z2a: {line}")
        return code, None

    def _only_stopped_are_left(self) -> bool:
        """Whether SIGSTOP holds all that are left: they will not end by themselves."""
        return all(process_state(rank.process.pid) == "T" for rank in self.ranks.living())

    def _lost_peers(self) -> list[str]:
        """The messages of ranks that only noticed that another had died: printed once, after the cause."""
        errors = [self.ranks.slots.error(number)[1] for number in range(len(self.ranks))]
        said = {rank.name: text for rank, text in zip(self.ranks, errors, strict=True) if text.startswith(VICTIM)}
        others = ", ".join(str(name) for name in list(said)[1:])
        lines = [text.partition(": ")[2] for text in list(said.values())[:1]]
        return [*lines, message(f"Rank {others} says the same.")] if others else lines

    def _may_restart(self, failed: Sequence[int]) -> bool:
        """Whether another attempt may help: no rank ended with an error that a person must mend."""
        is_cured = any(self._is_cured(place) for place in range(len(self.ranks)))
        hopeless = (128 + signal.SIGINT,) if is_cured else FINAL_CODES
        if self.attempt == 1 and any(self.ranks.slots.error(at)[1].startswith(ABSENT) for at in range(len(self.ranks))):
            return False  # only at first: after a failure, other groups may be restarting too
        return bool(failed) and not self.asked and self.supervises and not any(code in hopeless for code in failed)

    def _is_cured(self, place: int) -> bool:
        """Whether a rank had an error that a restart may cure, although its exit code says otherwise: steps had fitted
        into memory before, or a restart found the disk full."""
        text, beat = self.ranks.slots.error(place)[1], self.ranks.slots.beat(place)
        has_stepped = beat.step > beat.first_step
        is_full = self._finds_disk_full(self.ranks[place].process.returncode, text, has_stepped)
        return text.startswith(CURED) or (has_stepped and says_out_of_memory(text)) or is_full

    def _finds_disk_full(self, code: int | None, error: str, has_stepped: bool) -> bool:
        """Whether a rank of a restart ended before its first step for want of disk space: there was enough before."""
        is_restart = self.attempt > 1 and not has_stepped
        return is_restart and code == DiskError.exit_code and not (says_out_of_memory(error) or MANY_FILES in error)

    def _codes(self) -> list[int | None]:
        """Exit codes. One that our own signal killed was still loading and had nothing to save."""
        codes = []
        for rank in self.ranks:
            code = rank.process.poll()
            if code is not None and not rank.ended:
                rank.ended = time.monotonic()
            codes.append(_stopped_by(-code) if code is not None and -code in self.asked else code)
        return codes

    def _over(self) -> list[int]:
        """Ranks whose heartbeat exceeded its limit at two checks in a row."""
        now = time.monotonic()
        if now - self.looked > PAUSED_SECONDS:
            self.resumed = now
        self.looked = now
        found = []
        for number, rank in enumerate(self.ranks):
            if rank.process.returncode is not None:
                continue
            beat = self.ranks.slots.beat(number)
            silent, limit = self._silence(beat, now)
            if limit is not None and silent > limit and rank.beats == beat.beats:
                found.append(number)
            rank.beats = beat.beats
        return found

    def _silence(self, beat: Beat, now: float) -> tuple[float, float | None]:
        """How long a rank has been silent, and its limit."""
        limit = phase_limit(beat, self.watch.settings.limits, self.seen) if self.watch.watches_phases else None
        return now - max(beat.since, self.resumed), limit

    # ---- failures ----

    def _facts(self) -> list[RankFacts]:
        now = time.monotonic()
        facts = []
        for number, rank in enumerate(self.ranks):
            beat = self.ranks.slots.beat(number)
            silent, limit = self._silence(beat, now)
            when, error = self.ranks.slots.error(number)
            one = RankFacts(rank.name, rank.process.pid, rank.process.returncode, beat=beat, silent_seconds=silent)
            one.limit_seconds, one.error, one.failed_at = limit, error, when or rank.ended
            facts.append(one)
        return facts

    def _look_closer(self, facts: Sequence[RankFacts]) -> None:
        """Stacks and collectives of the ranks that live."""
        for rank in self.ranks:
            with suppress(OSError):
                os.write(rank.pipe, b"?")
        take_stacks(facts, {rank.name: rank.stacks.fileno() for rank in self.ranks})
        end = time.monotonic() + COLLECTIVES_SECONDS
        living = [place for place, one in enumerate(facts) if one.code is None and one.beat.beats and one.state != "T"]
        while time.monotonic() < end and not all(self.ranks.slots.has_answered(place) for place in living):
            time.sleep(POLL_SECONDS)
        for place in living:
            facts[place].collectives = self.ranks.slots.collectives(place)
            facts[place].device = self.ranks.slots.device(place)

    def _hang(self, over: Sequence[int]) -> tuple[int, Failure | None]:
        facts = self._facts()
        for place in over:
            facts[place].is_over = True
        self._look_closer(facts)
        first, evidence = culprit(facts)
        limit = first.limit_seconds or 0.0
        text = message(
            f"Rank {first.rank} hangs in phase {first.beat.phase} after step {max(first.beat.step, 0)}: silent for "
            f"{first.silent_seconds:.1f} s, allowed {limit:g} s."
        )
        text = f"{text} {evidence}".strip()
        failure = self._failure("hang", first, text, "hang", facts)
        failure.is_sure = bool(evidence)
        self.ranks.end()
        if not self.supervises or self.asked:
            say(f"z2a: {text}")
            return 128 + signal.SIGKILL, None
        return 128 + signal.SIGKILL, failure

    def _end_for_others(self) -> tuple[int, Failure]:
        """Another machine has failed, or the connection to the coordinator is lost."""
        facts = self._facts()
        failure = self._failure("lost", facts[0], "", "", facts)
        self.ranks.end()
        return 128 + signal.SIGKILL, failure

    def _save_for_others(self) -> None:
        """Let the ranks of all machines save and end, once they train: a signal to one is enough."""
        if not self.is_signalled and self.ranks.slots.beat(0).phase in ("data", "step", "save", "validate"):
            self.is_signalled = True
            self.ranks[0].process.send_signal(signal.SIGTERM)

    def _crash(self, codes: Sequence[int | None], facts: list[RankFacts]) -> Failure:
        for one, code, now in zip(facts, codes, self._facts(), strict=True):
            one.code, one.error, one.failed_at = code, now.error, now.failed_at
        self._keep_output(facts)
        first, _ = culprit(facts)
        code = first.code if first.code is not None else 1
        error = first.failure()
        text = message(
            f"Rank {first.rank} ended in phase {first.beat.phase} after step {max(first.beat.step, 0)}: "
            f"{signal_words(code)}."
        )
        text = f"{text} {error}".strip()
        # Somebody else's SIGKILL at the same step twice may be chance; the others are the program's own.
        kind = error if code > 0 else f"signal {code}" if -code in CLEAR_CRASHES else ""
        if self._finds_disk_full(code, first.error, first.beat.step > first.beat.first_step):
            kind = DISK_FULL
        return self._failure("crash", first, text, same_error(kind), facts)

    def _failure(self, kind: str, first: RankFacts, text: str, error: str, facts: list[RankFacts]) -> Failure:
        self._keep_output(facts)
        step = first.beat.step
        kernel = self.memory_kills.evidence()
        failure = Failure(kind, first.rank, step, first.beat.phase, text, error, self.attempt, facts, kernel)
        failure.waited_seconds = first.silent_seconds
        for one in facts:  # what is learned about phases outlives the attempt
            for phase, (count, longest) in one.beat.seen.items():
                known = self.seen.get(phase, (0, 0.0))
                self.seen[phase] = (max(count, known[0]), max(longest, known[1]))
        return failure

    def _keep_output(self, facts: Sequence[RankFacts]) -> None:
        for one, rank in zip(facts, self.ranks, strict=True):
            one.output = [line.rstrip("\n") for line in rank.lines]

    def _gives_up(self, failure: Failure) -> str:
        """Why there is no further attempt, in words; empty: there is one."""
        began = next(facts.beat.first_step for facts in failure.ranks if facts.rank == failure.rank)
        return self.restarts.reason_to_end(failure.step, began, failure.error)

    def _tell(self, failure: Failure) -> None:
        say(f"z2a: {failure.text}")
        if self.watch.run is not None:
            try:
                page = write_page(self.watch.run, failure)
                say(f"z2a: {failure.done} The page: {page}")
                return
            except OSError as error:
                say(f"z2a: The page of this failure could not be written: {error}")
        say(f"z2a: {failure.done}")

    def _wait_before_restart(self) -> bool:
        """Longer after every attempt without progress; whether a signal came meanwhile."""
        end = time.monotonic() + self.restarts.pause_seconds
        while time.monotonic() < end and not self.asked:
            time.sleep(POLL_SECONDS)
        return bool(self.asked)


def phase_limit(beat: Beat, limits: Mapping[str, float], seen: Mapping[str, tuple[int, float]]) -> float:
    """How long this phase may last: as set, else learned from this run, here and in attempts before (`seen`)."""
    phase, (count, longest) = beat.phase, beat.seen.get(beat.phase, (0, 0.0))
    if phase == "step" and count == 0:  # it compiles, or its shapes are new
        known, longest = seen.get("first_step", (0, 0.0))
        # Only as this process begins, with what an attempt before has compiled; a later stage compiles something else.
        is_known = known >= WARM_UP_STEPS and beat.step < beat.first_step + WARM_UP_STEPS
        learned = max(LEAST_FIRST_STEP_SECONDS, LIMIT_FACTOR * longest) if is_known else UNKNOWN_LIMIT_SECONDS
        return limits.get("first_step", learned)
    # Imports, waiting for other machines, and a load from the disk or, much faster, from memory: the start before says
    # little about the next. So it is with waiting for other groups, which the link itself ends in time.
    if phase in ("start", "groups"):
        return limits.get(phase, UNKNOWN_LIMIT_SECONDS)
    if phase in limits:
        return limits[phase]
    before = seen.get(phase, (0, 0.0))
    if count + before[0] < KNOWN_AFTER.get(phase, 2):
        return UNKNOWN_LIMIT_SECONDS
    return max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * max(longest, before[1]))


def unusual_ends(codes: Sequence[int | None], grace_seconds: float, first: int = 0) -> list[str]:
    """Messages about processes that could not report themselves. `codes` by rank, from rank `first`; None for one that
    still runs after `grace_seconds`, or is stopped if there were none."""
    lines = []
    for rank, code in enumerate(codes, first):
        if code is not None and code < 0:
            name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
            killed = f"Rank {rank} was killed by {name}."
            lines.append(f"{killed} {SIGNAL_HINTS[-code]}" if -code in SIGNAL_HINTS else killed)
    silent = [str(rank) for rank, code in enumerate(codes, first) if code is None]
    if silent and grace_seconds:
        lines.append(f"Rank {', '.join(silent)} did not end within {grace_seconds:g} s and was killed.")
    elif silent:
        lines.append(f"Rank {', '.join(silent)} was stopped by a signal (SIGSTOP), and was killed.")
    if lines:
        lines.append(
            "What was saved is intact. Run the same command again: it continues from the newest checkpoint, or starts "
            "over if there is none."
        )
    return lines


def _cause(codes: Sequence[int]) -> int:
    """The exit code of the root cause: of processes that ended between two checks, one that did not die because of
    another."""
    if not codes:
        return 0
    code = next((code for code in codes if code != 1), codes[0])
    return code if code >= 0 else 128 - code  # killed by a signal, as a shell says it


def _stopped_by(number: int) -> int:
    return 128 + number if number == signal.SIGINT else PreemptedError.exit_code
