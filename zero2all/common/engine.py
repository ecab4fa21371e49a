"""Where the work of a stage runs: in this process, in worker processes on this machine, or as Ray tasks on many.

    with open_engine(EngineConfig(workers=8)) as engine:
        for number, result in engine.run(function, tasks, on_bytes=bar.advance):
            ...

A task is a picklable value, `function` a module-level function of one task. Results come as they are finished, each
with the position of its task. A task may be done twice (a killed worker has its task redone), so what it writes must
depend on the task alone and appear whole or not at all.

Local workers come from a fork server that has imported what they need once, and end when their parent is gone. One
worker means none: the tasks run in the calling process. A script must call from under `if __name__ == "__main__":`. On
Ray every node must have zero2all installed and see inputs and workspace under the same paths.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Literal, Protocol, TypeVar

from zero2all.common.cores import usable_cores
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.progress import Bar

Task = TypeVar("Task")
Result = TypeVar("Result")
OnBytes = Callable[[int], None] | None
Done = Iterator[tuple[int, Result]]
EngineKind = Literal["local", "ray"]

RETRIES = 3  # how often work is tried again when a worker dies without any task having been finished in between
POLL_SECONDS = 0.2
WAITING_BYTES = 16 << 10  # a second task may wait in a worker's socket if it is no larger
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
"""Threads of numerical libraries inside worker processes only cost memory."""


@dataclass(frozen=True)
class EngineConfig:
    """What runs the tasks."""

    kind: EngineKind = "local"
    """`local`: worker processes on this machine. `ray`: Ray Core tasks."""
    workers: int | None = None
    """How many tasks run at a time. None: one per core (local), one per CPU of the cluster (ray)."""
    address: str | None = None
    """Address of a Ray cluster, such as `auto` or `10.0.0.1:6379`. None: Ray is started on this machine."""

    def problems(self) -> list[str]:
        """Everything wrong with these settings, one sentence each."""
        found = []
        if self.kind not in ("local", "ray"):
            found.append(f"the engine is '{self.kind}'; expected local or ray")
        if self.workers is not None and self.workers < 1:
            found.append(f"workers is {self.workers}; expected at least 1")
        if self.address is not None and self.kind != "ray":
            found.append(f"the address {self.address} needs the ray engine: add --engine ray")
        return found


class TaskEngine(Protocol):
    """Runs a function over tasks."""

    workers: int

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task], on_bytes: OnBytes = None) -> Done[Result]:
        """Results with the position of their task, as they are finished; `on_bytes` hears what `advance` is told."""


class Shown:
    """An engine whose finished tasks move a bar; for steps that do not count bytes."""

    def __init__(self, engine: TaskEngine, bar: Bar) -> None:
        self.workers = engine.workers
        self._engine, self._bar = engine, bar

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task], on_bytes: OnBytes = None) -> Done[Result]:
        """As the engine does."""
        for number, result in self._engine.run(function, tasks, on_bytes):
            self._bar.advance(1)
            yield number, result


def open_engine(config: EngineConfig, preloaded: Sequence[str] = ()) -> AbstractContextManager[TaskEngine]:
    """The engine of `config`; processes start with the first tasks, from a fork server that imported `preloaded`."""
    problems = config.problems()
    if problems:
        raise UsageError(f"The engine cannot be started: {'; '.join(problems)}.")
    if config.kind == "ray":
        return _RayEngine(config)
    workers = config.workers or usable_cores()
    return contextlib.nullcontext(_InProcess()) if workers == 1 else contextlib.closing(_Processes(workers, preloaded))


# ---- inside a worker ------------------------------------------------------------------------------------------


class TaskStoppedError(Exception):
    """The build ends; a worker in the middle of a task need not finish it."""


_advance: OnBytes = None


def advance(amount: int) -> None:
    """Called by a running task: so many more raw bytes are done. Raises when the build has been stopped meanwhile."""
    if _advance is not None:
        _advance(amount)


@contextlib.contextmanager
def _advancing(report: OnBytes) -> Iterator[None]:
    global _advance
    before, _advance = _advance, report
    try:
        yield
    finally:
        _advance = before


# ---- in this process ------------------------------------------------------------------------------------------


class _InProcess:
    workers = 1

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task], on_bytes: OnBytes = None) -> Done[Result]:
        for number, task in enumerate(tasks):
            with _advancing(on_bytes):
                result = function(task)
            yield number, result


# ---- worker processes -----------------------------------------------------------------------------------------


class _Processes:
    """Worker processes with a socket each; one that was killed is replaced and its tasks are given out again.

    Unlike the pool of `concurrent.futures` they share no semaphores, which stay in /dev/shm when a build is killed.
    """

    def __init__(self, workers: int, preloaded: Sequence[str]) -> None:
        self.workers, self._preloaded = workers, preloaded
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self._board = self._context.RawArray("q", 1 + workers)
        """Whether to stop, then the bytes of each worker; one writer each, so no lock."""
        self._started: list[_Worker] = []
        self._leaving: list[_Worker] = []  # of a run that was given up: they end with the task they are at
        self._told = 0

    def close(self) -> None:
        """End the workers."""
        self._board[0] = 1
        for worker in self._started:
            worker.connection.close()
        for worker in (*self._started, *self._leaving):
            worker.process.join()

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task], on_bytes: OnBytes = None) -> Done[Result]:
        todo = deque(range(len(tasks)))
        failures = 0
        rounds = 0  # deaths of workers that were started in the same round have one cause, and count once
        try:
            while todo or any(worker.numbers for worker in self._started):
                self._give_out(function, tasks, todo, rounds)
                ready = connection.wait([worker.connection for worker in self._started if worker.numbers], POLL_SECONDS)
                self._tell(on_bytes)
                for worker in [worker for worker in self._started if worker.connection in ready]:
                    try:
                        is_result, answer = worker.connection.recv()
                    except (EOFError, OSError) as error:
                        todo.extendleft(reversed(worker.numbers))
                        self._started.remove(worker)
                        worker.connection.close()
                        worker.process.join()
                        if worker.round == rounds:
                            rounds, failures = rounds + 1, failures + 1
                        if failures > RETRIES:
                            raise _workers_die(failures) from error
                        continue
                    number = worker.numbers.popleft()
                    if not is_result:
                        raise answer
                    failures = 0
                    self._give_out(function, tasks, todo, rounds)  # the caller may take a while with the result
                    yield number, answer
        finally:
            for worker in [worker for worker in self._started if worker.numbers]:
                self._started.remove(worker)
                self._leaving.append(worker)
                worker.connection.close()
        self._tell(on_bytes)

    def _give_out(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], todo: deque[int], rounds: int
    ) -> None:
        """A task for every worker that has none, and a second one that waits in the socket."""
        while todo:
            worker = min(self._started, key=lambda each: len(each.numbers), default=None)
            if (worker is None or worker.numbers) and len(self._started) < self.workers:
                worker = self._start(rounds)
            if worker is None or len(worker.numbers) > 1:
                return
            frozen = pickle.dumps((function, tasks[todo[0]]))
            if worker.numbers and len(frozen) > WAITING_BYTES:  # sending would wait for a worker that waits for us
                return
            worker.numbers.append(todo.popleft())
            with contextlib.suppress(OSError):  # it is dead, as the next look at its socket will tell
                worker.connection.send_bytes(frozen)

    def _start(self, rounds: int) -> _Worker:
        if self._context.get_start_method() == "forkserver":
            self._context.set_forkserver_preload(list(self._preloaded))
        slot = next(n for n in range(1, self.workers + 1) if n not in {worker.slot for worker in self._started})
        ours, theirs = self._context.Pipe()
        with theirs, _one_thread():
            process = self._context.Process(target=_work, args=(theirs, self._board, slot), daemon=True)
            process.start()
        self._started.append(_Worker(process, ours, slot, rounds))
        return self._started[-1]

    def _tell(self, on_bytes: OnBytes) -> None:
        done = sum(self._board[1:])
        if on_bytes is not None and done > self._told:
            on_bytes(done - self._told)
        self._told = done


@dataclass
class _Worker:
    process: Any
    connection: connection.Connection
    slot: int  # its place on the board
    round: int
    numbers: deque[int] = field(default_factory=deque)  # tasks it was given and has not answered


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Processes started inside the block see ONE_THREAD in their environment; this process, which may train next, does
    not."""
    missing = [name for name in ONE_THREAD if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _work(tasks: connection.Connection, board: Any, slot: int) -> None:
    """In a worker process: answer until the parent closes the socket or is gone."""
    global _advance
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then tells us to stop
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()

    def report(amount: int) -> None:
        board[slot] += amount
        if board[0]:
            raise TaskStoppedError("the build was stopped")

    _advance = report
    with contextlib.suppress(EOFError, OSError):
        while True:
            frozen = tasks.recv_bytes()
            tasks.send_bytes(_answer(frozen))


def _answer(frozen: bytes) -> bytes:
    """(True, result) or (False, error), pickled."""
    try:
        function, task = pickle.loads(frozen)
        return pickle.dumps((True, function(task)))
    except Exception as error:
        seen = traceback.format_exc()
        error.add_note(f"In a worker process:\n{seen}")
        try:
            answer = pickle.dumps((False, error))
            pickle.loads(answer)
        except Exception:  # an exception that does not survive the way
            return pickle.dumps((False, RuntimeError(seen)))
        return answer


def _end_with(parent_sentinel: int) -> None:
    """Wait for the parent to disappear, and go too: an orphan would go on writing beside the next build."""
    connection.wait([parent_sentinel])
    os._exit(1)


def _workers_die(times: int) -> BadInputError:
    return BadInputError(
        f"Worker processes were killed {times} times in a row without finishing a task. The machine has most "
        "likely run out of memory: use a smaller --workers. Finished work is kept; run the same command to "
        "continue."
    )


# ---- Ray ------------------------------------------------------------------------------------------------------


class _RayEngine:
    """Ray Core tasks."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ray: Any = None
        self._started = False
        self._counter: Any = None
        self._told = 0
        self.workers = config.workers or 1

    def __enter__(self) -> _RayEngine:
        self._ray = ray = _import_ray()
        if not ray.is_initialized():
            local = {} if self._config.address else {"num_cpus": self._config.workers or usable_cores()}
            try:
                ray.init(
                    address=self._config.address or "local",
                    log_to_driver=False,
                    include_dashboard=False if local else None,
                    logging_level="warning",
                    **local,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise BadInputError(
                    f"Cannot reach Ray at {self._config.address or 'local'}: {error}. Start a cluster with "
                    "`ray start --head` and give its address with --address, or leave --address out."
                ) from error
            self._started = True
        self.workers = self._config.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._counter = ray.remote(num_cpus=0)(_Counter).remote()
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._ray.shutdown()

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task], on_bytes: OnBytes = None) -> Done[Result]:
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_call)
        todo = deque(range(len(tasks)))
        running: dict[Any, int] = {}
        try:
            while todo or running:
                while todo and len(running) < (self._config.workers or 2 * self.workers):
                    number = todo.popleft()
                    running[remote.remote(function, tasks[number], self._counter)] = number
                finished, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS * 5)
                self._tell(on_bytes)
                for reference in finished:
                    try:
                        result = ray.get(reference)
                    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
                        raise _workers_die(RETRIES + 1) from error
                    except ray.exceptions.RayTaskError as error:
                        raise (error.cause if isinstance(error.cause, Exception) else error) from error
                    yield running.pop(reference), result
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
        self._tell(on_bytes)

    def _tell(self, on_bytes: OnBytes) -> None:
        done = self._ray.get(self._counter.read.remote())
        if on_bytes is not None and done > self._told:
            on_bytes(done - self._told)
        self._told = done


class _Counter:
    """Counts bytes for all nodes; becomes a Ray actor."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int) -> None:
        """Count more bytes as done."""
        self.total += amount

    def read(self) -> int:
        """Bytes done so far."""
        return self.total


def _call(function: Callable[[Task], Result], task: Task, counter: Any) -> Result:
    """Runs on a Ray worker."""
    with _advancing(lambda amount: counter.add.remote(amount)):
        return function(task)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "The ray engine needs Ray, which is not installed: pip install 'zero2all[ray]', or leave --engine out."
        ) from error
    return ray
