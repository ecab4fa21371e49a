"""Many prompts as one continuous batch, and their results as JSON values."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from zero2all.common import jsonio
from zero2all.common.errors import RunLockedError, UsageError, UserError
from zero2all.common.files import atomic_file, read_json_object, write_json
from zero2all.infer.job import Choice
from zero2all.infer.prompts import Prompt
from zero2all.infer.service import Service, Ticket
from zero2all.infer.text import Piece, TextRequest
from zero2all.tokenizer.load import Tokenizer

Arrived = queue.SimpleQueue[tuple[tuple[int, int], Piece]]
MOST_AT_ONCE = 2048
"""Requests that the engine knows of: more than fit into any batch, so that it never waits for the next."""


@dataclass(frozen=True)
class BatchPrompt:
    """One text to write: sample `sample` of prompt `index`."""

    index: int
    sample: int
    prompt: Prompt
    request: TextRequest

    @property
    def key(self) -> tuple[int, int]:
        """Which of all texts it is."""
        return self.index, self.sample


@dataclass
class _Running:
    task: BatchPrompt
    ticket: Ticket
    text: str = ""
    choices: list[Choice] = field(default_factory=list)


def tasks_of(prompts: Sequence[Prompt]) -> list[BatchPrompt]:
    """Every text to be written, in the order of the prompts."""
    return [
        BatchPrompt(index, sample, prompt, request)
        for index, prompt in enumerate(prompts)
        for sample, request in enumerate(prompt.samples())
    ]


def results_of(service: Service, tasks: Iterable[BatchPrompt]) -> Iterator[dict[str, Any]]:
    """The result of each task when it is ready, in no order. One that cannot be done has an `error` instead of text."""
    arrived: Arrived = queue.SimpleQueue()
    running: dict[tuple[int, int], _Running] = {}
    left = iter(tasks)
    try:
        while True:
            while len(running) < MOST_AT_ONCE and (task := next(left, None)) is not None:
                try:
                    ticket = service.submit(task.request, _deliver_to(arrived, task.key))
                except UsageError as error:
                    yield {**_head(task), "error": str(error)}
                else:
                    running[task.key] = _Running(task, ticket)
            if not running:
                return
            key, piece = arrived.get()
            one = running[key]
            one.text += piece.text
            one.choices += piece.choices
            if piece.finish is not None:
                del running[key]
                yield _result(one, piece, service.loaded.tokenizer)
    finally:
        for one in running.values():
            service.cancel(one.ticket)


def _deliver_to(arrived: Arrived, key: tuple[int, int]) -> Callable[[Piece], None]:
    return lambda piece: arrived.put((key, piece))


def streams_of(service: Service, tasks: Sequence[BatchPrompt]) -> Iterator[tuple[BatchPrompt, Iterator[Piece]]]:
    """Each task with its pieces as they come, one task after the other, while all of them are computed as one batch."""
    queues: list[queue.SimpleQueue[Piece]] = [queue.SimpleQueue() for _ in tasks]
    tickets = []
    try:
        for task, arrived in zip(tasks, queues, strict=True):
            tickets.append(service.submit(task.request, arrived.put))
        for task, arrived in zip(tasks, queues, strict=True):
            yield task, _until_finish(arrived)
    finally:
        for ticket in tickets:
            service.cancel(ticket)


def _until_finish(arrived: queue.SimpleQueue[Piece]) -> Iterator[Piece]:
    finish = None
    while finish is None:
        piece = arrived.get()
        finish = piece.finish
        yield piece


def _head(task: BatchPrompt) -> dict[str, Any]:
    """What a result says first: which text it is."""
    names = {} if task.prompt.id is None else {"id": task.prompt.id}
    sample = {"sample": task.sample} if task.prompt.n > 1 else {}
    return {"index": task.index, **sample, **names, "prompt": task.request.prompt}


def _result(one: _Running, last: Piece, tokenizer: Tokenizer) -> dict[str, Any]:
    if last.finish == "error":  # no matter of this prompt: another attempt may succeed, so nothing is kept of it
        raise UserError(f"{last.error} What was finished is kept; run the same command again to continue.")
    result = {**_head(one.task), "text": one.text, "finish": last.finish}
    if last.usage is not None:
        result |= {"prompt_tokens": last.usage.prompt_tokens, "new_tokens": last.usage.new_tokens}
    if one.task.request.logprobs is not None:
        result["logprobs"] = [_choice(choice, tokenizer) for choice in one.choices]
    return result


def _choice(choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    likeliest = [_token(number, logprob, tokenizer) for number, logprob in choice.alternatives]
    return {**_token(choice.id, choice.logprob, tokenizer), "likeliest": likeliest}


def _token(number: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token as it is written; half a character shows as U+FFFD."""
    try:
        piece = tokenizer.token_bytes(number).decode("utf-8", "replace")
    except ValueError:  # a padding row of the embedding
        piece = ""
    return {"token": piece, "id": number, "logprob": logprob}


# The results of many prompts on disk, kept as they come.
#
# Each process appends to a file of its own, `OUT.part-0`, `OUT.part-1`, …: first a line that names the job, then a JSON
# line for each text. What a killed job has finished is not done again, also with another number of processes. When
# all texts are there, one process joins them in the order of the prompts and puts `OUT` in its place. Beside it,
# `OUT.job` says which job wrote it, so that the same command knows it is done and another one does not replace it.


Key = tuple[int, int]
"""Number of the prompt, number of the sample."""
LOOK_SECONDS = 0.2


def process_of() -> tuple[int, int]:
    """The rank of this process, and how many there are, as torchrun and other launchers say."""
    try:
        rank, processes = (int(os.environ.get(name, usual)) for name, usual in (("RANK", "0"), ("WORLD_SIZE", "1")))
    except ValueError:
        rank = processes = -1
    if not 0 <= rank < processes:
        raise UsageError(
            f"RANK={os.environ.get('RANK', '')} and WORLD_SIZE={os.environ.get('WORLD_SIZE', '')} do not fit together. "
            f"Unset both, or start the processes with torchrun."
        )
    return rank, processes


def finished(out: Path, job: str) -> int | None:
    """How many errors are in `out`, if it holds all results of `job`; None if there is work to do. A file with
    anything else is not replaced."""
    size = out.stat().st_size if out.exists() else 0
    if not size:
        return None
    try:
        mark = read_json_object(_mark(out))
    except (UserError, OSError):
        mark = {}
    if (mark.get("job"), mark.get("bytes")) == (job, size):
        return int(mark["errors"])
    if any(_job_of(path) == job for path in _parts(out)):
        return None  # killed after `out` appeared and before the parts were removed
    raise UsageError(
        f"--out {out} exists already, and this command did not write it (other prompts, settings or model, or it was "
        f"changed). Choose another name, or delete it."
    )


class Results:
    """The results of one job, as one of its processes writes them."""

    def __init__(self, out: Path, job: str, rank: int = 0) -> None:
        """`job` names prompts, settings and model: results of another job are not mixed with these."""
        self.out, self.job = out, job
        self._known: dict[Key, tuple[Path, int, int]] = {}
        self._errors: set[Key] = set()
        self._read_to: dict[Path, int] = {}
        self._own = _part(out, rank)
        self._own.parent.mkdir(parents=True, exist_ok=True)
        self._file = _opened_alone(self._own)
        self.look()
        self._file.truncate(self._read_to.get(self._own, 0))  # a line that a killed process left half written
        self._file.seek(0, 2)
        if not self._file.tell():
            self._write({"job": job})

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    @property
    def done(self) -> Mapping[Key, Any]:
        """What is finished, as far as this process has looked."""
        return self._known

    def add(self, result: dict[str, Any]) -> None:
        """Keep a result, which names its prompt (`index`) and, beyond the first, its `sample`."""
        self._write(result)

    def look(self) -> None:
        """Read what all processes have added since the last look."""
        for path in _parts(self.out):
            start = self._read_to.get(path, 0)
            with open(path, "rb") as file:
                file.seek(start)
                for line in file:
                    value = _parsed(line)
                    if value is None:
                        break  # still being written
                    if start == 0 and value.get("job") != self.job:
                        raise UsageError(
                            f"{path} holds results of another job (other prompts, settings or model). To finish that "
                            f"one, run its command again; otherwise delete the file, or choose another --out."
                        )
                    if start:
                        key = (value["index"], value.get("sample", 0))
                        self._known[key] = (path, start, len(line))
                        self._errors |= {key} if "error" in value else set()
                    start += len(line)
            self._read_to[path] = start

    def join(self, wanted: list[Key], wait: bool) -> int:
        """Write `OUT` with the results of all of `wanted` and remove the parts; `wait` for other processes. Returns
        how many of them are errors."""
        self.look()
        while wait and not self._known.keys() >= set(wanted):
            time.sleep(LOOK_SECONDS)
            self.look()
        parts = {path: open(path, "rb") for path in self._read_to}  # noqa: SIM115
        try:
            with atomic_file(self.out) as file:
                for key in wanted:
                    path, start, length = self._known[key]
                    parts[path].seek(start)
                    file.write(parts[path].read(length))
        finally:
            for part in parts.values():
                part.close()
        facts = {"job": self.job, "bytes": self.out.stat().st_size, "errors": len(self._errors)}
        write_json(_mark(self.out), facts)
        for path in parts:
            path.unlink(missing_ok=True)
        return len(self._errors)

    def _write(self, value: dict[str, Any]) -> None:
        self._file.write(jsonio.dumps_line(value))
        self._file.flush()


def _part(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.name}.part-{rank}")


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{_escaped(out.name)}.part-*"))


def _mark(out: Path) -> Path:
    return out.with_name(f"{out.name}.job")


def _job_of(part: Path) -> str | None:
    with open(part, "rb") as file:
        return (_parsed(file.readline()) or {}).get("job")


def _escaped(name: str) -> str:
    """A name in which glob finds no pattern."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A whole line of ours; None for one that ends early."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = jsonio.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and ("job" in value or type(value.get("index")) is int) else None


def _opened_alone(path: Path) -> BinaryIO:
    """The file, open for reading and appending, and locked against a second process with the same part."""
    file = open(path, "a+b")  # noqa: SIM115
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RunLockedError(
            f"Another process is writing {path}. Wait for it, stop it, or choose another --out."
        ) from None
    except (ImportError, OSError):  # not on Windows, nor on every file system
        pass
    return file
