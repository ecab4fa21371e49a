"""What keeps a run alive: its supervisor, and what it does when it is asked to stop."""

import math
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from zero2all.common.schema import NaturalFloat, NaturalInt, PositiveFloat, PositiveInt, Problem

LIMITS = ("start", "first_step", "data", "step", "save", "validate", "end", "groups")
"""What `limits` may name: the phases of a run, and the first steps, which compile."""


@dataclass(frozen=True)
class ResilienceConfig:
    """Restarts, limits, and reactions to signals and notices."""

    save_on_signal: bool = True
    """On Ctrl-C, SIGTERM or SIGHUP finish the step, save a checkpoint and exit with code 10; false: do not save."""
    save_timeout_seconds: PositiveFloat = 600.0
    """How long a run waits at its end for a checkpoint that is still being written."""
    supervise: bool = True
    """Whether a supervisor starts the processes of this machine, watches them and restarts them after a failure."""
    restarts: NaturalInt = 3
    """Restarts in a row without progress before the supervisor gives up; a run that makes progress has them again."""
    limits: dict[str, PositiveFloat] = field(default_factory=dict)
    """Seconds after which a silent process counts as hung, by phase: start, first_step, data, step, save, validate,
    end, groups (waiting for other groups of DiLoCo). A phase that is absent gets 5 times the longest seen in this
    run, at least 60, and 1800 until it is known. start and groups always get 1800; first_step gets 1800,
    after a restart 5 times the longest before, at least 300."""
    preempt_file: str | None = None
    """A file whose appearance means that this machine will be taken away: the run saves and ends with code 10."""
    preempt_url: str | None = None
    """An address that is asked every 5 s for the same, such as the metadata service of a cloud."""
    deadline: float | str | None = None
    """When to save and end with code 10: seconds after the start, a time of day (06:30), or a date with time."""

    node_silence_seconds: PositiveFloat = 15.0
    """Several machines: one that says nothing for so long is lost, and the run goes on without it."""
    node_multiple: PositiveInt = 1
    """Several machines: go on with a multiple of this many of them (`z2a train --nodes MIN:MAX`)."""
    join_after_seconds: NaturalFloat = 60.0
    """Several machines: train at least so long after the first step of an attempt before it is interrupted for a
    machine that has come. One that is lost 3 times in a row within that time is left out for a while."""
    below_minimum: Literal["wait", "stop"] = "wait"
    """When fewer than --nodes are left. wait: until enough are there again; stop: save what memory holds and end."""
    below_minimum_seconds: PositiveFloat = 3600.0
    """How long to wait then, and for machine 0 if that one is lost, before the command ends with code 1."""

    memory_every_steps: NaturalInt | Literal["auto"] = "auto"
    """Save the state to memory after this many steps, for a restart that loses few of them; 0: never. auto: a 25th of
    checkpoint.every_steps, at least 10, on a GPU 50; never with diloco."""
    memory_folder: str | None = None
    """The RAM file system for these; none: /dev/shm. Where it is missing or too small, only the disk is used."""
    peers: Literal[0, 1] = 0
    """Several machines under supervisors. 1: send each save to memory to the memory of the next machine too. A machine
    that lost its memory, or one in its place, then continues from there. 0: no copies."""
    replica_check_every_steps: NaturalInt = 0
    """Compare the replicas of the weights bit by bit after this many steps; 0: only before a save."""
    rerun_every_steps: NaturalInt = 0
    """Once in this many steps compute a step twice and compare loss and gradient norm bit by bit; 0: never. Only for
    operators that are bit-exact."""

    health_check: Literal["off", "start", "failure"] = "off"
    """Check all processes before the run begins: a matrix product in each, and an exchange in pairs. start: at every
    start; failure: at a restart after a failure. Needs more than one process."""
    exclude_bad: bool = False
    """What the health check finds bad or slow: its machine ends with exit code 16, and the others go on without it.
    false: a bad one ends the run with exit code 16, and a slow one is only named."""
    isolate_command: str | None = None
    """A command that is run with the name of a machine that the health check found bad, for example to drain it."""

    def memory_steps(self, checkpoint_every_steps: int, on_cpu: bool) -> int:
        """How many steps lie between two saves to memory; 0: there are none."""
        if self.memory_every_steps == "auto":
            least = 10 if on_cpu else 50  # steps of a GPU may be short, and every save costs some milliseconds
            return max(least, checkpoint_every_steps // 25) if checkpoint_every_steps else 2 * least
        return self.memory_every_steps

    def problems(self, place: str) -> list[Problem]:
        """What is wrong with these fields."""
        found = [
            Problem(f"{place}.limits.{name}", value, f"a phase: {', '.join(LIMITS)}")
            for name, value in self.limits.items()
            if name not in LIMITS
        ]
        try:
            if self.deadline is not None and self.seconds_left() <= 0:
                found.append(Problem(f"{place}.deadline", self.deadline, "a moment in the future"))
        except ValueError:
            expected = "seconds, a time of day such as 06:30, or a date with time such as 2026-12-01T06:30"
            found.append(Problem(f"{place}.deadline", self.deadline, expected))
        if self.peers and self.memory_every_steps == 0:
            found.append(Problem(f"{place}.peers", self.peers, "0, or resilience.memory_every_steps above 0"))
        if self.preempt_url is not None and not self.preempt_url.startswith(("http://", "https://")):
            found.append(Problem(f"{place}.preempt_url", self.preempt_url, "an address that begins with http://"))
        return found

    def seconds_left(self) -> float:
        """From now to the deadline; infinite without one."""
        if self.deadline is None:
            return math.inf
        if isinstance(self.deadline, float):
            return self.deadline
        now = datetime.now()
        if len(self.deadline) <= 5:
            moment = datetime.combine(now.date(), datetime.strptime(self.deadline, "%H:%M").time())
            return (moment + timedelta(days=moment <= now) - now).total_seconds()
        return datetime.fromisoformat(self.deadline).timestamp() - time.time()
