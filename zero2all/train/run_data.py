"""The data of a run: which text it reads from which token on, by its stages, its checkpoint and its anneal."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.progress import counted
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.config.schedule import steps_with_anneal
from zero2all.config.training import AnnealConfig
from zero2all.packed.mixture import RunProgress, TrainingData, open_training_data
from zero2all.packed.remote import packed_root
from zero2all.packed.stages import Stage, stages_from_records
from zero2all.train.anneal import ANNEAL_STAGE, begun_anneal
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.load import Checkpoint, reading_record
from zero2all.train.state import TrainState


@dataclass(frozen=True)
class Position:
    """Where a run is in its data."""

    step: int = 0
    token: int = 0
    stages: Sequence[Mapping[str, Any]] = ()
    """Those so far, as recorded."""


def open_data(
    config: RunConfig, workspace: Workspace, checkpoint: Checkpoint | None, anneal: AnnealConfig | None = None
) -> tuple[TrainingData, int]:
    """The data of the run, as recorded up to `checkpoint` and configured from there on, and the token where it ends."""
    if checkpoint is None:
        return _plan_data(config, workspace, Position(), anneal)
    counters, recorded = checkpoint.record, checkpoint.manifest.get("order")
    with reading_record(checkpoint):
        step, tokens = int(counters["step"]), int(counters["tokens"])
        stages = recorded["stages"] if recorded else ()
        stages_from_records(stages)
    return _plan_data(config, workspace, Position(step, tokens, stages), anneal)


def _plan_data(
    config: RunConfig, workspace: Workspace, at: Position, anneal: AnnealConfig | None = None
) -> tuple[TrainingData, int]:
    def token_of(step: int) -> int:
        return max(0, at.token + (step - at.step) * config.train.tokens_per_step)

    stages = [Stage("main", 0, config.data.mixture, config.data.seq_len)]
    for stage in config.stages:
        if stage.from_step == 0:
            stages.clear()
        mixture = config.data.mixture if stage.mixture is None else stage.mixture
        seq_len = stage.seq_len or config.data.seq_len
        stages.append(Stage(stage.name, token_of(stage.from_step), mixture, seq_len))
    if anneal is not None and anneal.mixture is not None:
        start = token_of(anneal.from_step)
        before = [stage for stage in stages if stage.from_token <= start]
        stages = [stage for stage in before if stage.from_token < start]
        stages.append(Stage(ANNEAL_STAGE, start, anneal.mixture, before[-1].seq_len))
    progress = RunProgress(at.token, at.stages) if at.stages else RunProgress()
    end = token_of(max(at.step, steps_with_anneal(config.train.steps, anneal)))
    return open_training_data(packed_root(workspace.packed, config.data), config.data, stages, progress, end), end


def open_run_data(config: RunConfig, workspace: Workspace, resumed: bool) -> tuple[TrainingData, int]:
    """The data as a run of this config reads it (`resumed`: from its newest checkpoint on), and its last token."""
    run = workspace.run(config.train.name)
    return open_data(config, workspace, *((newest_checkpoint(run), begun_anneal(run)) if resumed else (None, None)))


def data_with_anneal(config: RunConfig, workspace: Workspace, state: TrainState, anneal: AnnealConfig) -> TrainingData:
    """The data from here to the end of `anneal`; UsageError when data.max_epochs does not allow that much."""
    if not config.data.max_epochs and anneal.mixture is None:
        return state.data  # only limits depend on the end of the run
    position = Position(state.step, state.tokens, state.data.record["stages"])
    with _explained(anneal, config):
        return _plan_data(config, workspace, position, anneal)[0]


def check_anneal(config: RunConfig, workspace: Workspace, checkpoint: Checkpoint | None, anneal: AnnealConfig) -> None:
    """An error when a run from `checkpoint` to the end of `anneal` would exceed data.max_epochs, or its mixture has
    sources that are not packed."""
    if config.data.max_epochs or anneal.mixture is not None:
        with _explained(anneal, config) if config.data.max_epochs else nullcontext():
            open_data(config, workspace, checkpoint, anneal)


@contextmanager
def _explained(anneal: AnnealConfig, config: RunConfig) -> Iterator[None]:
    """Explain that an error about the data comes from the length of an anneal, and what to do."""
    try:
        yield
    except UsageError as error:
        name = config.train.name
        raise UsageError(
            f"{name} cannot anneal over {counted(anneal.steps, 'step')} from step {anneal.from_step:,}. {error}\n"
            f"For an anneal, ask for fewer steps (`z2a anneal {name} --steps N`). To change a setting instead, stop "
            f"the run and start it again with the new setting and --accept-changes."
        ) from error
