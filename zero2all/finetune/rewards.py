"""Rewards: numbers that say how good an answer is.

    exact    1 where the answer is the right one, without spaces around both
    number   1 where the last number of the answer equals the last one of the right answer ("1,000" = "1000.0")
    format   1 where the whole answer, thoughts and calls included, matches `finetune.grpo.format`
    code     1 where the program in the answer passes the record's `tests`, in the sandbox
    calls    how many functions the answer has called: with a negative weight, the price of a call
    FILE.py:FUNCTION    what FUNCTION(answer, record) returns

A reward that cannot be computed is not 0: it is None, and the answer is left out of the mean of its prompt and of the
loss. A function of the user runs in a process of its own (`reward_child`), which is killed when its time is up.
"""

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from zero2all.common.cores import usable_cores
from zero2all.common.errors import UsageError
from zero2all.config.finetune import GrpoConfig
from zero2all.evals.sandbox import SandboxLimits, run_program

CHILD = Path(__file__).with_name("reward_child.py")
START_SECONDS = 120.0
"""For the imports of a user's file."""
LONGEST_LINE = 1 << 16
MOST_HANGS = 3
"""In a step: then the other answers are not tried."""
NEEDS = {"exact": "answer", "number": "answer", "code": "tests"}
"""What the record of a prompt must have."""
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
BLOCK = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)


class JudgedAnswer(NamedTuple):
    """What a reward sees of an answer."""

    text: str
    """The last turn, without thought and calls."""
    whole: str
    """All that was written, turn after turn."""
    calls: int
    record: Mapping[str, Any]


Reward = Callable[[JudgedAnswer], float | None]


class Rewards:
    """The weighted sum of some rewards."""

    def __init__(self, config: GrpoConfig) -> None:
        """UsageError where one is not known."""
        self.weights = config.rewards_by_name
        self.functions: dict[str, Reward] = {name: _reward(name, config) for name in self.weights}
        self.failures: Counter[str] = Counter()
        """How often answers of the last call of `values` could not be judged, by what was wrong."""

    def try_out(self) -> None:
        """UsageError where a function of the user cannot be loaded."""
        for function in self.functions.values():
            if isinstance(function, UserFunction):
                function.start()
                function.close()

    def values(
        self, answers: Sequence[JudgedAnswer], alive: Callable[[], None] = lambda: None
    ) -> list[dict[str, float | None]]:
        """Each reward of each answer. `alive` is called again and again."""

        def value(name: str, answer: JudgedAnswer) -> float | None:
            alive()
            try:
                return self.functions[name](answer)
            except RewardError as error:
                self.failures[f"{name}: {error}"] += 1
                return None

        self.failures.clear()
        for function in self.functions.values():
            if isinstance(function, UserFunction):
                function.hangs = 0
        found: dict[str, list[float | None]] = {}
        for name in self.functions:
            if name == "code":  # each program is a process
                with ThreadPoolExecutor(usable_cores()) as pool:
                    found[name] = list(pool.map(lambda answer: value("code", answer), answers))
            else:
                found[name] = [value(name, answer) for answer in answers]
        return [{name: values[number] for name, values in found.items()} for number in range(len(answers))]

    def total(self, values: Mapping[str, float | None]) -> float | None:
        """Their weighted sum; None where one is missing."""
        parts = [None if value is None else self.weights[name] * value for name, value in values.items()]
        return None if None in parts else math.fsum(part for part in parts if part is not None)

    def is_right(self, values: Mapping[str, float | None]) -> bool | None:
        """Whether the first reward is at least 1; None: the answer could not be judged."""
        first = values[next(iter(self.weights))]
        return None if None in values.values() or first is None else first >= 1


class RewardError(ValueError):
    """An answer that could not be judged."""


def _reward(name: str, config: GrpoConfig) -> Reward:
    if name == "format":
        try:
            pattern = re.compile(config.format or "", re.DOTALL)
        except re.error as error:
            raise UsageError(f"finetune.grpo.format is no regular expression: {error}.") from error
        if config.format is None:
            raise UsageError("The reward `format` needs finetune.grpo.format, a regular expression for the answer.")
        return lambda answer: float(pattern.fullmatch(answer.whole) is not None)
    known: dict[str, Reward] = {"exact": _exact, "number": _number, "code": _code, "calls": lambda a: float(a.calls)}
    if name in known:
        return known[name]
    path, mark, function = name.rpartition(":")
    if not mark or not path.endswith(".py") or not function.isidentifier():
        names = ", ".join([*known, "format"])
        raise UsageError(f"There is no reward {name!r}. Expected: {names}, or FILE.py:FUNCTION.")
    if not Path(path).expanduser().is_file():
        raise UsageError(f"There is no file {path}, which reward {name} names. Give its path from the current folder.")
    return UserFunction(Path(path).expanduser(), function, config.reward_seconds)


def _exact(answer: JudgedAnswer) -> float:
    return float(answer.text.strip() == str(answer.record["answer"]).strip())


def _number(answer: JudgedAnswer) -> float:
    right, given = last_number(str(answer.record["answer"])), last_number(answer.text)
    if right is None:
        raise RewardError(f"the right answer {str(answer.record['answer'])[:80]!r} has no number")
    return float(given == right)


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly; None: it has none."""
    for found in reversed(NUMBER.findall(text)):
        try:
            return Fraction(found.replace(",", ""))
        except (ValueError, ZeroDivisionError):
            continue
    return None


def _code(answer: JudgedAnswer) -> float:
    blocks = BLOCK.findall(answer.text)
    program = blocks[-1] if blocks else answer.text
    return float(run_program(f"{program}\n\n{answer.record['tests']}\n", SandboxLimits()) == "passed")


class UserFunction:
    """A function in a file of the user, in a process of its own."""

    def __init__(self, path: Path, function: str, seconds: float) -> None:
        self.path, self.function, self.seconds = path, function, seconds
        self.hangs = 0
        """How often it has hung since the answers of a step began."""
        self._child: subprocess.Popen[bytes] | None = None
        self._asked, self._unread = 0, b""

    def __call__(self, answer: JudgedAnswer) -> float | None:
        """Its value for an answer. RewardError where it raises, hangs, or returns no number."""
        if self.hangs >= MOST_HANGS:
            raise RewardError(f"it hung on {MOST_HANGS} answers before in the same step")
        if self._child is None:
            self.start()
        self._asked += 1
        record = {**answer.record, "whole": answer.whole, "calls": answer.calls}
        written = json.dumps([self._asked, answer.text, record]).encode("utf-8", "replace")
        return self._exchanged(written + b"\n", self._asked, self.seconds)

    def start(self) -> None:
        """Start its process. UsageError where the file or the function cannot be loaded."""
        command = [sys.executable, "-u", str(CHILD), str(self.path), self.function]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._unread = b""
        self._end = weakref.finalize(self, _end_process, self._child)  # at the latest when this program ends
        try:
            self._exchanged(b"", 0, START_SECONDS)
        except RewardError as error:
            self.close()
            raise UsageError(f"The reward function of {self.path} cannot be used: {error}.") from error

    def _exchanged(self, line: bytes, number: int, seconds: float) -> float | None:
        """Send a line, and read the answer with this number; a function that forks may answer twice."""
        child, deadline = self._child, time.monotonic() + seconds
        assert child is not None, "it was started"
        assert child.stdin is not None, "it has a pipe"
        assert child.stdout is not None, "and another"
        try:
            child.stdin.write(line)
            child.stdin.flush()
            while True:
                while b"\n" not in self._unread:
                    if not select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                        self.hangs += 1
                        self.close()
                        raise RewardError(f"it took longer than {seconds:g} s (finetune.grpo.reward_seconds)")
                    more = child.stdout.read1(LONGEST_LINE)  # type: ignore[attr-defined]
                    if not more or len(self._unread) > LONGEST_LINE:
                        raise BrokenPipeError
                    self._unread += more
                text, _, self._unread = self._unread.partition(b"\n")
                try:
                    of, value, problem = json.loads(text)
                except (ValueError, TypeError) as error:
                    self.close()  # processes that it has forked write over each other
                    raise RewardError(f"its process wrote {text[:80]!r} into the protocol") from error
                if of != number:
                    continue
                if problem is not None:
                    raise RewardError(problem)
                return None if value is None else float(value)
        except OSError as error:
            self.close()
            raise RewardError("its process has ended") from error

    def close(self) -> None:
        """Kill the process, and what the function has started; the next answer starts another."""
        if self._child is not None:
            self._end()
            self._child = None


def _end_process(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
