"""The page of a failure: `<run>/incidents/<step>-<kind>.md` and `.json`, and an event for the board.

The event is in a metrics file of its own writer, `supervisor`, because the trainer that would write it is dead.
"""

import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import says_out_of_memory
from zero2all.common.files import write_atomic
from zero2all.common.language import message
from zero2all.common.language import translate as t
from zero2all.common.progress import TEXT_MARKS, terminal_safe
from zero2all.resilience.diagnosis import VICTIM, RankFacts, signal_words, stack_groups
from zero2all.track.writer import FILE_NAME, METRICS_FOLDER, MetricsWriter

FOLDER = "incidents"
WRITER = "supervisor"
SHOWN_METRICS = ("loss", "grad_norm", "lr", "tokens_per_second", "time/step")
METRIC_ROWS = 3
TAIL_BYTES = 64 << 10
XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
XIDS_OF_PROGRAMS = {13, 31, 43, 45}
"""Illegal instruction or address, page fault, stopped after an error, cleaned up after one."""


@dataclass
class Failure:
    """One failure of one attempt."""

    kind: str
    """crash, hang or lost (a machine)."""
    rank: int
    step: int
    phase: str
    text: str
    """What happened, in one line."""
    error: str
    """What tells this failure from others: the same at the same step means that a restart does not help."""
    attempt: int
    ranks: list[RankFacts]
    kernel: list[str] = field(default_factory=list)
    done: str = ""
    """What the supervisor did."""
    waited_seconds: float = 0.0
    """From the last sign of life to the end of the processes."""
    is_sure: bool = True
    """Whether something shows that this rank began it."""
    node: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)

    def advice(self) -> list[str]:
        """What a person can do."""
        first = next(facts for facts in self.ranks if facts.rank == self.rank)
        number = -first.code if first.code is not None and first.code < 0 else 0
        if self.kind == "lost":
            return [message("See whether that machine and its network are up. Start the same command there: it joins.")]
        if any("memory" in line.lower() for line in self.kernel) and number == signal.SIGKILL:
            return [message("Memory of the machine ran out. Give the job more memory, or start fewer data readers.")]
        if re.search(r"Assertion .* failed|device-side assert", first.failure()):
            return [message("A check in a kernel failed: often an index outside its tensor, such as a token id.")]
        xids = [int(number) for line in self.kernel for number in XID.findall(line)]
        if xids and set(xids) <= XIDS_OF_PROGRAMS:
            return [message("The GPU driver reported an error (Xid) that programs cause, rarely the GPU itself.")]
        if any("Xid" in line for line in self.kernel):
            return [message("The GPU driver reported an error (Xid). If it comes back, take this machine out of use.")]
        if number == signal.SIGKILL:
            return [
                message("Somebody sent SIGKILL, or the system because memory ran out: see `dmesg` and the scheduler.")
            ]
        if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
            return [message("Native code crashed. If it comes back at the same step, see the rank's last lines below.")]
        if self.kind == "hang" and first.state == "T":
            return [message("It was stopped from outside (SIGSTOP, a debugger, a frozen container): find by whom.")]
        if self.kind == "hang" and first.device is not None:
            return [
                message("Look for errors of the GPU (Xid) in `dmesg`; if it is this one again, take it out of use.")
            ]
        if self.kind == "hang":
            return [
                message("Look at the stack of this rank below: it shows where it waits."),
                message(f"If this phase may take so long, raise resilience.limits.{self.phase}."),
            ]
        if says_out_of_memory(first.error):
            return [
                message("See which other programs use this GPU or machine (`nvidia-smi`, `top`)."),
                message("If it comes back, lower train.micro_batch_samples, or set train.recompute."),
            ]
        return [message("Look at the error and the last lines of this rank below.")]


def write_page(run: Path, failure: Failure) -> Path:
    """Write page, JSON and event; returns the page. A name that is taken gets a number behind it."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = stem = f"{max(failure.step, 0)}-{failure.kind}"
    number = 1
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{stem}-{number}"
    page = folder / f"{name}.md"
    values = {"run": run.name, **asdict(failure), "advice": failure.advice(), "samples": []}
    write_atomic(page.with_suffix(".json"), jsonio.dumps_pretty(values))
    text = terminal_safe("\n".join(_lines(run, failure)) + "\n", keep=TEXT_MARKS)
    write_atomic(page, text.encode(errors="replace"))
    with MetricsWriter(run, writer=WRITER) as events:
        about = ("text", "kind", "rank", "node", "phase", "error", "attempt", "done", "waited_seconds", "kernel")
        data = {name: getattr(failure, name) for name in about}
        events.event("incident", max(failure.step, 0), {**data, "page": page.name, "advice": failure.advice()})
    return page


def _lines(run: Path, failure: Failure) -> Iterator[str]:
    yield f"# {t(failure.text)}"
    yield ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
    yield t(f"Run {run.name}, attempt {failure.attempt}, on {failure.node}, {when}.")
    yield f"**{t(failure.done)}**"
    yield ""
    yield f"## {t('What to do')}"
    yield from (f"- {t(line)}" for line in failure.advice())
    yield ""
    yield f"## {t('Ranks')}"
    yield ""
    yield "| " + " | ".join(t(word) for word in ("rank", "process", "phase", "step", "silent", "state")) + " |"
    yield "|---|---|---|---|---|---|"
    for facts in failure.ranks:
        mark = "**" if facts.rank == failure.rank else ""
        state = t(_state(facts.state)) if facts.code is None else t(signal_words(facts.code))
        silent = f"{facts.silent_seconds:.1f} s"
        cells = (f"{mark}{facts.rank}{mark}", facts.pid, t(facts.beat.phase), max(facts.beat.step, 0), silent, state)
        yield f"| {' | '.join(map(str, cells))} |"
    yield from _errors(failure)
    yield from _stacks(failure)
    yield from _collectives(failure.ranks)
    if failure.kernel:
        yield from _section(message("What the system says"), failure.kernel)
    if rows := last_metrics(run):
        yield from _section(message("Last metrics"), rows)
    for facts in failure.ranks:
        if facts.output:
            yield from _section(message(f"Last lines of rank {facts.rank}"), facts.output)


def _state(letter: str) -> str:
    """What the kernel's letter means."""
    if letter == "T":
        return message("stopped")
    return message("waits for a device or disk") if letter == "D" else message("busy" if letter == "R" else "waits")


def _errors(failure: Failure) -> Iterator[str]:
    """Of all ranks, the first cause first."""
    failed = [facts for facts in failure.ranks if facts.error or facts.code not in (None, 0)]
    failed.sort(key=lambda facts: (facts.rank != failure.rank, facts.error.startswith(VICTIM), facts.failed_at))
    if failed:
        yield from ("", f"## {t('Errors, the first cause first')}")
    for place, facts in enumerate(failed, 1):
        text = t(facts.error) or facts.failure() or t(signal_words(facts.code or 0))
        yield f"{place}. {t(f'rank {facts.rank}')}: {text}"


def _stacks(failure: Failure) -> Iterator[str]:
    for ranks, stack in stack_groups(failure.ranks):
        names = ", ".join(map(str, ranks))
        odd = ranks == [failure.rank] and len(failure.ranks) > 1
        title = message(f"Stack of rank {names}, the odd one" if odd else f"Stack of rank {names}")
        yield from _section(title, [stack])


def _collectives(ranks: Sequence[RankFacts]) -> Iterator[str]:
    rows = [
        t(f"rank {facts.rank}, process group {group}: begun {begun}, ended {ended} ({name})")
        for facts in ranks
        for group, (begun, ended, name) in sorted(facts.collectives.items())
    ]
    if rows:
        yield from _section(message("Collectives (number of the last one)"), rows)


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield from ("", f"## {t(title)}", "", "```", *(t(line) for line in lines), "```")


def last_metrics(run: Path) -> list[str]:
    """The last rows of the newest metrics file of training, a few figures each."""
    files = {
        int(found["attempt"]): path
        for path in (run / METRICS_FOLDER).glob("train-*.jsonl")
        if (found := FILE_NAME.fullmatch(path.name))
    }
    rows: list[str] = []
    for _, path in sorted(files.items(), reverse=True):
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
        for line in reversed(lines):
            row = _metric_row(line)
            if row and "loss" in row["values"]:
                shown = [f"{name} {row['values'][name]}" for name in SHOWN_METRICS if name in row["values"]]
                rows.insert(0, f"step {row['step']}: {', '.join(shown)}")
            if len(rows) == METRIC_ROWS:
                return rows
    return rows


def _metric_row(line: bytes) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = jsonio.loads(line)
        return row if "values" in row else None
    except (ValueError, TypeError):
        return None


def same_error(text: str) -> str:
    """An error without what differs between two times: numbers, addresses, paths."""
    return re.sub(r"0x[0-9a-f]+|\d+|/\S+", "#", text)[:300]
