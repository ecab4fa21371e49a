"""The quickstart workspace that the explaining pictures are drawn from, opened with the package's own functions."""

from __future__ import annotations

import itertools
from functools import cached_property
from pathlib import Path

from zero2all.common.errors import BadInputError
from zero2all.common.records import iter_records, training_text
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import RunConfig
from zero2all.infer.engine import Engine
from zero2all.infer.load import load_run, untrained
from zero2all.packed.mixture import TrainingData, open_training_data
from zero2all.packed.stages import Stage
from zero2all.tokenizer import Tokenizer, load_tokenizer
from zero2all.track.reader import RunReader
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.saved_config import load_run_config

RUN = "quickstart"


class Example:
    """A workspace after `z2a quickstart`. Everything is read when it is first needed, and kept."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "runs" / RUN / "config.yaml").is_file():
            raise BadInputError(
                f"{folder} has no run `{RUN}`; the pictures are drawn from the workspace of a finished quickstart. "
                f"Make one with `z2a quickstart --work {folder}`, or name another with --work."
            )
        self.workspace: Workspace = open_workspace(folder)
        self.run = self.workspace.run(RUN)

    @cached_property
    def config(self) -> RunConfig:
        """The settings of the run."""
        return load_run_config(self.run)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the quickstart trained."""
        return load_tokenizer(self.workspace.tokenizer)

    @cached_property
    def metrics(self) -> RunReader:
        """What the run measured."""
        return RunReader(self.run)

    @cached_property
    def data(self) -> TrainingData:
        """The packed rows, and the order in which the run reads them."""
        config = self.config.data
        stage = Stage("main", 0, config.mixture, config.seq_len)
        return open_training_data(self.workspace.packed, config, [stage])

    @cached_property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, rising."""
        return sorted(map(step_of, list_checkpoints(self.run)))

    def engine(self, step: int) -> Engine:
        """The model at a step, ready to score and to write; step 0 is the untrained one."""
        if step == 0:
            return Engine(untrained(self.workspace, self.config))
        return Engine(load_run(self.workspace, RUN, step))

    @cached_property
    def untrained(self) -> Engine:
        """The model before its first step."""
        return self.engine(0)

    @cached_property
    def trained(self) -> Engine:
        """The model after its last step."""
        return self.engine(self.steps[-1])

    def texts(self, source: str, split: str, most: int | None = None) -> list[str]:
        """Documents of the corpus, as the tokenizer reads them."""
        records = itertools.islice(iter_records(self.workspace.corpus, source, split), most)
        return [training_text(record) for record in records]
