"""Real processes that train one run together over gloo, and a record of what every step of each of them read.

The processes are forked from the one that has imported torch (warm_process.py), so that a test can start and kill a
dozen of them; each is then a process of its own, started into a world by torchrun's environment variables. `main` is
what runs in them: `z2a` itself, with a notebook on `train_step`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ports import free_port
from tests.processes import Program, WarmProcess

if TYPE_CHECKING:
    from zero2all.config import RunConfig

Moment = tuple[int, int, float]
"""The step after which a process is sent a signal, the signal, and how many seconds after the step."""
AWAITED_SECONDS = 60.0
CODE = "from tests.train import ranks; ranks.main()"


@dataclass(frozen=True)
class StepRecord:
    """A step as one process saw it."""

    step: int
    first_token: int
    rows: list[str]
    """The real rows of this process, in order, as digests of source and tokens."""
    loss: float
    lr: float
    updated: bool
    row_nats: list[float]
    """Of the global batch."""


@dataclass
class Launch:
    """The processes of one attempt."""

    trainers: list[Program]
    records: list[Path]

    def wait(self) -> list[int]:
        """The exit codes by rank, negative for a signal."""
        return [trainer.wait() for trainer in self.trainers]

    def text(self) -> str:
        """What all of them printed."""
        return "\n".join(f"--- rank {rank}\n{each.text()}" for rank, each in enumerate(self.trainers))

    def steps(self, rank: int = 0) -> list[StepRecord]:
        """What a process recorded."""
        path = self.records[rank]
        return [StepRecord(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def global_rows(self) -> dict[int, list[str]]:
        """The rows of each step's global batch by its first token: those of the processes one after the other."""
        found: dict[int, list[str]] = {}
        for rank in range(len(self.trainers)):
            for step in self.steps(rank):
                found.setdefault(step.first_token, []).extend(step.rows)
        return found


@dataclass
class RankStarter:
    """Starts runs in a workspace; `stop` kills what is left."""

    warm: WarmProcess
    root: Path
    """The workspace."""
    folder: Path
    """For outputs and records."""
    launched: list[Launch] = field(default_factory=list)

    def __call__(
        self,
        config: RunConfig,
        processes: int = 1,
        signals: dict[int, Moment] | None = None,
        garbled: tuple[int, ...] = (),
        words: dict[int, list[str]] | None = None,
        spoiled: dict[int, int] | None = None,
        awaited: Path | None = None,
        code: str = CODE,
    ) -> Launch:
        """Start a run, or go on with it. By rank: signals, more words, the step after which one weight is `spoiled`.
        The batches that begin at the tokens `garbled` hold nonsense, the same whichever process reads it. Before a
        signal the processes wait for the file that is `awaited`. `code` ends in CODE."""
        from zero2all.config import config_yaml

        number, port = len(self.launched), free_port()
        path = self.folder / f"config-{number}.yaml"
        path.write_text(config_yaml(config))
        launch = Launch([], [self.folder / f"record-{number}-{rank}.jsonl" for rank in range(processes)])
        self.launched.append(launch)
        for rank, record in enumerate(launch.records):
            job = {
                "words": ["train", str(path), "--work", str(self.root), *(words or {}).get(rank, [])],
                **{"rank": rank, "processes": processes, "port": port, "record": str(record), "garbled": garbled},
                **{"signal": (signals or {}).get(rank), "spoiled": (spoiled or {}).get(rank)},
                "awaited": None if awaited is None else str(awaited),
            }
            output = self.folder / f"output-{number}-{rank}.txt"
            launch.trainers.append(Program(self.warm, code, [json.dumps(job)], output))
        return launch

    def finished(self, *arguments: Any, **options: Any) -> Launch:
        """The same, waiting for a good end."""
        launch = self(*arguments, **options)
        assert set(launch.wait()) == {0}, launch.text()
        return launch

    def stop(self) -> None:
        """Kill what is still running."""
        for launch in self.launched:
            for trainer in launch.trainers:
                trainer.signal(signal.SIGKILL)
                trainer.wait()


# ---- inside a process ----


def main() -> None:
    """Be one process of a run, as sys.argv[1] describes."""
    job = json.loads(sys.argv[1])
    if job["processes"] > 1:
        rank, size = str(job["rank"]), str(job["processes"])
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    _record_steps(Path(job["record"]), job)
    from zero2all.cli import main as z2a

    sys.exit(z2a(job["words"]))


def _record_steps(path: Path, job: dict[str, Any]) -> None:
    """Write a line for every step; send a signal to this process at the moment for it, or change one weight."""
    import torch

    from zero2all.train import trainer
    from zero2all.train.step_stats import PendingStep

    train_step = trainer.train_step

    def recorded(state: Any, batch: Any, *rest: Any) -> PendingStep:
        if batch.first_token in job["garbled"]:
            places = torch.arange(batch.tokens.shape[1])
            batch = replace(batch, tokens=(batch.tokens * 31 + places * places) % 300)
        pending = train_step(state, batch, *rest)
        result = pending.result()
        real = zip(batch.sources[: batch.samples].tolist(), np.asarray(batch.tokens[: batch.samples]), strict=True)
        rows = [hashlib.sha256(bytes([source]) + row.tobytes()).hexdigest()[:16] for source, row in real]
        record = {"step": result.step, "first_token": batch.first_token, "rows": rows, "loss": result.loss}
        record |= {"lr": result.lr, "updated": result.updated, "row_nats": result.row_nats.tolist()}
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if result.step == job["spoiled"]:
            with torch.no_grad():
                state.model.norm.weight[0] += 1e-3  # in every gradient of this rank, and so in the next steps of all
        if job["signal"] is not None and result.step == job["signal"][0]:
            end = time.monotonic() + AWAITED_SECONDS
            while job["awaited"] is not None and not Path(job["awaited"]).exists() and time.monotonic() < end:
                time.sleep(0.01)
            _signal_self(*job["signal"][1:])
        return pending

    trainer.train_step = recorded  # type: ignore[assignment]


def _signal_self(number: int, seconds: float) -> None:
    """Now, or from a thread, which hits this process wherever it is then."""
    if seconds:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
    else:
        os.kill(os.getpid(), number)
