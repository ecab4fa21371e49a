"""Many runs for one question: a plan and a ledger on disk, and workers that train several runs at once.

    WORK/studies/NAME/plan.json      what was asked: the same command continues it, another one is refused
    WORK/studies/NAME/ledger.jsonl   a line for every task that has ended; tables and pictures are computed from it
    WORK/runs/NAME-007               an ordinary run: exact resume, guards, curves on the board

A task trains a run to its end, or to a step of it, or lets a branch of it decay (`Branch`). A study that was killed at
any moment ends with the same ledger but for times, because every run ends with the same bits.
"""

import ctypes
import gc
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from zero2all.common.errors import AnomalyError, PreemptedError, UsageError, UserError, is_out_of_memory
from zero2all.common.files import link_or_copy, read_json_object, staged_folder, write_json
from zero2all.common.jsonio import append_line, whole_lines
from zero2all.common.lock import folder_lock
from zero2all.common.workspace import FOLDER_NAME_WORDS, Workspace, is_folder_name, open_workspace
from zero2all.config import RunConfig, config_from_values, config_values
from zero2all.model.config import parameter_counts
from zero2all.train.anneal import request_anneal
from zero2all.train.checkpoints.layout import checkpoint_folder, list_checkpoints, require_checkpoint
from zero2all.train.saved_config import load_run_config, save_run_config

PLAN_NAME, LEDGER_NAME, LOG_NAME = "plan.json", "ledger.jsonl", "workers.log"
BRANCH_FILE = "branch.json"
DIED_AT_MOST = 2
"""A task whose worker was killed more often has failed."""
SECONDS_TO_SAVE = 10.0
"""After a worker was killed, for another to save its run; it goes on with the same bits without that, too."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Branch:
    """A new run from a checkpoint of another one, whose learning rate falls from there: where it begins, and its decay.

    One run at a constant rate (its trunk) so gives a finished model at several budgets: only the decay of each is
    trained again. The checkpoint is linked, not copied, and `anneal.json` asks for the decay, as `z2a anneal` does.
    """

    of: str
    step: int
    steps: int
    shape: Literal["linear", "1-sqrt", "cosine"]
    to_share: float
    mixture: dict[str, float] | None = None
    """Weights of the sources during the decay; None: those of the trunk."""


@dataclass(frozen=True)
class Task:
    """A run, and how far it is trained."""

    run: str
    config: dict[str, Any]
    """The resolved values of its config."""
    steps: int
    """That are left to train, where none were trained yet."""
    until: int | None = None
    """The step to train to; None: the end."""
    branch: Branch | None = None
    share: float = 1.0
    """What it takes of the device: tasks run at once while their shares add up to 1 or less."""

    @property
    def key(self) -> str:
        """Its name in the ledger."""
        return self.run if self.until is None else f"{self.run}@{self.until}"


@dataclass
class Study:
    """The folder of a study."""

    workspace: Workspace
    name: str
    results: dict[str, Result] = field(default_factory=dict)
    """By the key of the task."""

    @property
    def folder(self) -> Path:
        """Where plan and ledger lie."""
        return self.workspace.root / "studies" / self.name

    def record(self, task: Task, result: Result) -> None:
        """Write the end of a task."""
        line = {"task": task.key, **result}
        append_line(self.folder / LEDGER_NAME, line)
        self.results[task.key] = line

    def drop_checkpoints(self, run: str) -> None:
        """Delete the weights of a run that is not needed any more; its curves stay."""
        shutil.rmtree(self.workspace.run(run) / "checkpoints", ignore_errors=True)


@contextmanager
def open_study(workspace: Workspace, name: str, plan: Mapping[str, Any]) -> Iterator[Study]:
    """Begin a study, or continue the one with this plan. Two processes cannot work at one study. An error of the
    person's in the first task leaves no plan behind: the next one may be another."""
    if not is_folder_name(name):
        raise UsageError(f"--name: got {name!r}, expected {FOLDER_NAME_WORDS}.")
    study = Study(workspace, name)
    path = study.folder / PLAN_NAME
    study.folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(study.folder, f"{study.folder} is being worked on by another process. Wait for it, or end it."):
        if is_begun := path.is_file():
            before = read_json_object(path)
            changed = [key for key in {**before, **plan} if before.get(key) != plan.get(key)]
            if changed:
                raise UsageError(
                    f"The study {name} was begun with other values of: {', '.join(changed)}. Choose another --name, "
                    f"or delete {study.folder} and the runs {name}-*."
                )
        else:
            taken = sorted(each.name for each in workspace.runs.glob(f"{name}-*"))
            if taken:
                raise UsageError(f"The workspace already has runs named {taken[0]} and so on. Choose another --name.")
            write_json(path, dict(plan))
        study.results = {line["task"]: line for line in whole_lines(study.folder / LEDGER_NAME) if "task" in line}
        try:
            yield study
        except UserError:
            if not is_begun and not study.results:  # the plan may be what was wrong, and nothing was trained by it
                for run in workspace.runs.glob(f"{name}-*"):
                    if not list_checkpoints(run):
                        shutil.rmtree(run)
                path.unlink()
            raise


def run_tasks(study: Study, tasks: list[Task], then: Callable[[Task, Result], list[Task]], at_once: int) -> None:
    """Do all tasks that are not in the ledger, and those that `then` makes of each result, in the order in which they
    may begin. At most `at_once` workers."""
    ready, running = list(tasks), dict[Future[Result], Task]()
    died: dict[str, int] = {}
    pool: ProcessPoolExecutor | None = None
    try:
        while ready or running:
            for task in [each for each in ready if each.key in study.results]:
                ready.remove(task)
                ready += then(task, study.results[task.key])
            if any(each.key in study.results for each in ready):
                continue
            pool = pool or _workers(study, at_once)
            try:
                for task in sorted(ready, key=lambda each: -each.share):
                    if not running or (
                        len(running) < at_once and task.share + sum(each.share for each in running.values()) <= 1 + 1e-6
                    ):
                        if task.branch is not None:  # before its trunk goes on
                            begin_branch(study.workspace, task.run, task.branch)
                        running[pool.submit(_train_task, study.workspace.root, task)] = task
                        ready.remove(task)
                done = wait(running, return_when=FIRST_COMPLETED).done
                for future in sorted(done, key=lambda each: running[each].key):
                    result = future.result()
                    task = running.pop(future)
                    if result.get("out_of_memory") and task.share < 1:
                        ready.append(replace(task, share=1.0))
                        continue
                    study.record(task, result)
                    ready += then(task, result)
            except BrokenProcessPool:
                for worker in multiprocessing.active_children():  # one that was idle may have died with their lock
                    worker.join(SECONDS_TO_SAVE)
                    worker.kill()
                pool.shutdown(wait=True, cancel_futures=True)
                pool = None
                for task in running.values():
                    died[task.key] = died.get(task.key, 0) + 1
                    if died[task.key] > DIED_AT_MOST:
                        study.record(task, {"failed": "its process was killed, perhaps for lack of memory"})
                ready += [replace(task, share=1.0) for task in running.values()]  # alone: which of them is it?
                running = {}
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _workers(study: Study, count: int) -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawn, _begin_worker, (str(study.folder / LOG_NAME), os.getpid()))


def _begin_worker(log: str, parent: int) -> None:
    """A worker ends with the process that started it, and writes what it says to a file."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL (Linux)
    os.environ["OMP_NUM_THREADS"] = "1"  # of libraries; the trainer sets its own number
    if os.getppid() != parent:
        os._exit(1)
    file = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = file, file


_last_shape: Any = None


def _train_task(root: Path, task: Task) -> Result:
    """Train in a worker."""
    import torch

    from zero2all.train.run import train
    from zero2all.train.validate import all_rows

    global _last_shape
    config, workspace = config_from_values(task.config, task.run), open_workspace(root)
    shape = (config.model, config.data.seq_len, config.train.micro_batch_samples)
    if shape != _last_shape:
        torch.compiler.reset()  # compiled code of other shapes counts against a limit
        _last_shape = shape
    try:
        summary = train(config, workspace, until=task.until, say=print, brief=True)
    except PreemptedError:
        os._exit(1)  # it is saved, and a broken pool waits for its workers to end (Python 3.12)
    except Exception as error:
        if not isinstance(error, AnomalyError) and not is_out_of_memory(error):
            raise
        problem = str(error).partition("\n")[0] or "out of memory"
        return {"failed": problem, "out_of_memory": is_out_of_memory(error)}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    counts = parameter_counts(config.model)
    return {
        **all_rows(summary.held_out_scores),
        "channels": summary.held_out_scores,
        "step": summary.step,
        "steps": task.steps,
        "trained_tokens": summary.tokens,
        "seconds": summary.seconds,
        "parameters": {"total": counts["total"], "matmul": counts["matmul"]},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def task_of(
    config: RunConfig, steps: int, share: float, until: int | None = None, branch: Branch | None = None
) -> Task:
    """The task that trains a config."""
    return Task(config.train.name, config_values(config), steps, until, branch, share)


def plan_values(plan: Any) -> dict[str, Any]:
    """A plan as it is kept: as JSON gives it back."""
    import json

    values: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    return values


def begin_branch(workspace: Workspace, name: str, branch: Branch) -> None:
    """Write the run `name`, which the trainer then continues; one that is there stays."""
    run, trunk = workspace.run(name), workspace.run(branch.of)
    if run.exists():
        return
    require_checkpoint(trunk, branch.step)
    config = load_run_config(trunk)
    with staged_folder(run) as partial:
        save_run_config(replace(config, train=replace(config.train, name=name)), partial)
        target = checkpoint_folder(partial, branch.step)
        target.mkdir(parents=True)
        for file in checkpoint_folder(trunk, branch.step).iterdir():
            link_or_copy(file, target / file.name)
        request_anneal(partial, branch.steps, branch.shape, branch.to_share, branch.mixture)
        write_json(partial / BRANCH_FILE, {"of": branch.of, "from_step": branch.step})
