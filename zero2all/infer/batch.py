"""Many prompts as one continuous batch, and their results as JSON values."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from zero2all.common import jsonio
from zero2all.common.errors import RunLockedError, UsageError, UserError
from zero2all.common.files import atomic_file, read_json_object, write_json
from zero2all.infer.job import ChosenToken
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
    choices: list[ChosenToken] = field(default_factory=list)


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


def _choice(choice: ChosenToken, tokenizer: Tokenizer) -> dict[str, Any]:
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
# `OUT.part` has first a line that names the job, then a JSON line for each text, in the order in which they are ready.
# What a killed job has finished is not done again. When all texts are there, they are put in the order of the prompts,
# and `OUT` appears. Beside it, `OUT.job` says which job wrote it, so that the same command knows it is done and another
# one does not replace it.


Key = tuple[int, int]
"""Number of the prompt, number of the sample."""


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
    if _part(out).exists() and _job_of(_part(out)) == job:
        return None  # killed after `out` appeared and before the part was removed
    raise UsageError(
        f"--out {out} exists already, and this command did not write it (other prompts, settings or model, or it was "
        f"changed). Choose another name, or delete it."
    )


class BatchResults:
    """The results of one job while they are written."""

    def __init__(self, out: Path, job: str) -> None:
        """`job` names prompts, settings and model: results of another job are not mixed with these."""
        self.out, self.job = out, job
        self.done: dict[Key, tuple[int, int]] = {}
        """Where the line of each finished text begins in the part, and its length."""
        self._errors = self._end = 0
        self._part = _part(out)
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._file = _opened_alone(self._part)
        self._read()

    def __enter__(self) -> BatchResults:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def add(self, result: dict[str, Any]) -> None:
        """Keep a result, which names its prompt (`index`) and, beyond the first, its `sample`."""
        line = jsonio.dumps_line(result)
        self._file.write(line)
        self._file.flush()
        self._note(result, len(line))

    def join(self, wanted: list[Key]) -> int:
        """Write `OUT` with the results of all of `wanted` and remove the part. Returns how many are errors."""
        with atomic_file(self.out) as file:
            for start, length in (self.done[key] for key in wanted):
                self._file.seek(start)
                file.write(self._file.read(length))
        facts = {"job": self.job, "bytes": self.out.stat().st_size, "errors": self._errors}
        write_json(_mark(self.out), facts)
        self._part.unlink()
        return self._errors

    def _read(self) -> None:
        """What an earlier command has finished, without a line that it left half written."""
        self._file.seek(0)
        for line in self._file:
            value = _parsed(line)
            if value is None:
                break
            if not self._end and value.get("job") != self.job:
                raise UsageError(
                    f"{self._part} holds results of another job (other prompts, settings or model). To finish that "
                    f"one, run its command again; otherwise delete the file, or choose another --out."
                )
            self._note(value, len(line))
        self._file.truncate(self._end)
        if not self._end:
            self._end = self._file.write(jsonio.dumps_line({"job": self.job}))

    def _note(self, line: Mapping[str, Any], length: int) -> None:
        if self._end:  # behind the line that names the job
            self.done[line["index"], line.get("sample", 0)] = (self._end, length)
            self._errors += "error" in line
        self._end += length


def _part(out: Path) -> Path:
    return out.with_name(f"{out.name}.part")


def _mark(out: Path) -> Path:
    return out.with_name(f"{out.name}.job")


def _job_of(part: Path) -> str | None:
    with open(part, "rb") as file:
        return (_parsed(file.readline()) or {}).get("job")


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
    """The file, open for reading and appending, and locked against a second process."""
    file = open(path, "a+b")  # noqa: SIM115
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RunLockedError(
            f"Another process is writing {path}. Wait for it, stop it, or choose another --out; to use several GPUs, "
            f"give each process prompts of its own."
        ) from None
    except (ImportError, OSError):  # not on Windows, nor on every file system
        pass
    return file
