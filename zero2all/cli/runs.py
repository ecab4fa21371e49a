"""The runs of a workspace: which one is meant (by name, folder or ssh:// address), and verbs: list, inspect, anneal."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.terminal import print_table
from zero2all.cli.verb import SHARED, WORK_FLAG, print_json, verb, workspace_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import TEXT_MARKS, counted, say, tell, terminal_safe

if TYPE_CHECKING:
    from pathlib import Path

    from zero2all.config import RunConfig
    from zero2all.track.mirror import Mirror
    from zero2all.train.guards.documents import SampleText

NAMED_RUNS = 10
RUN_HELP = (
    "name of a run in the workspace, a run's folder, or ssh://[user@]host[:port]/path/to/run (default: the one run of "
    "the workspace)"
)
SHARED["ANY_RUN"] = [f"run? RUN  {RUN_HELP}", WORK_FLAG]
SHARED["ANY_RUNS"] = [f"runs* RUN  {RUN_HELP}", WORK_FLAG]


@dataclass(frozen=True)
class LocalRun:
    """A run that can be read on this machine, as long as it is open."""

    folder: Path
    is_remote: bool
    connection: Callable[[], str]  # what to tell a person about the connection; empty for a run on this machine


def fill_in_run(arguments: argparse.Namespace) -> None:
    """Name the one run of the workspace where the command line names none; refuse a workspace in its place."""
    from zero2all.common.workspace import is_folder_name, refuse_workspace

    argument = arguments.run_argument
    given = getattr(arguments, argument)
    for name in [given] if isinstance(given, str) else given or ():
        if not (is_folder_name(name) and (arguments.work / "runs" / name).is_dir()):
            refuse_workspace(name)
    if given:
        return
    workspace = workspace_of(arguments)
    names = [folder.name for folder in run_folders(workspace.runs)]
    if not names:
        raise UsageError(f"The workspace {workspace.root.absolute()} has no runs yet: train one with `z2a train`.")
    if len(names) > 1:
        listed = ", ".join(names[:NAMED_RUNS])
        raise UsageError(
            f"The workspace {workspace.root.absolute()} has {len(names)} runs. Name the one you mean: {listed}. `z2a "
            f"runs` says more about them."
        )
    setattr(arguments, argument, names if argument == "runs" else names[0])


@contextmanager
def open_run(word: str, arguments: argparse.Namespace, take_newest: bool = False) -> Iterator[LocalRun]:
    """Find the run; one on another machine is copied and kept up to date. `take_newest` chooses among several."""
    from zero2all.track.ssh import is_address

    if is_address(word):
        from zero2all.track.columns import user_cache
        from zero2all.track.mirror import Mirror

        with Mirror(word, user_cache("mirror")) as mirror:
            _wait_until_copied(mirror)
            folder = _one_run(mirror.folder, word, take_newest)
            yield LocalRun(folder, True, lambda: f"{mirror.address.host}: {mirror.state}")
        return
    folder = Path(word)
    if not (folder / "metrics").is_dir():
        folder = workspace_of(arguments).existing_run(word)
    yield LocalRun(folder, False, str)


def _wait_until_copied(mirror: Mirror) -> None:
    waited = 0
    while not mirror.wait_synced(0.2):
        waited += 1
        if mirror.state.startswith("broken: "):
            host = mirror.address.host
            raise BadInputError(
                f"{mirror.url} cannot be reached: {mirror.state.removeprefix('broken: ')}. Try `ssh "
                f"{host}` in a terminal. If it asks for a password or a new host key, set up a key or "
                "an agent. Check the path too."
            )
        if waited == 10:
            say(f"copying the metrics of {mirror.url}")


def _one_run(folder: Path, url: str, take_newest: bool) -> Path:
    from zero2all.track.reader import find_runs

    runs = find_runs([folder])
    if not runs:
        raise BadInputError(f"There are no runs in {url}. Give a runs folder, a workspace or one run there.")
    if len(runs) > 1 and not take_newest:
        names = ", ".join(run.name for run in runs[:10])
        raise UsageError(f"{url} has {len(runs)} runs: {names}. Add the name of one to the address.")
    return max(runs, key=lambda run: run.status.last_time or 0.0).folder


@dataclass(frozen=True)
class Run:
    """One run of a workspace."""

    name: str
    state: str
    """As `track.status` judges it, and the board shows it."""
    step: int | None
    steps: int | None
    """The step the run ends with."""
    loss: float | None
    """Of the last training step."""
    held_out_loss: float | None
    """Of the last validation, over all held-out tokens."""
    seconds_ago: float | None
    """Since the last row of its metrics."""
    message: str
    """Why it is in this state, where that needs a sentence."""


def run_folders(runs: Path) -> list[Path]:
    """The runs in a `runs` folder, by name."""
    marks = ("config.yaml", "metrics", "checkpoints")
    found = sorted(path for path in runs.glob("*") if path.is_dir())
    return [path for path in found if any((path / mark).exists() for mark in marks)]


def look_at_run(folder: Path) -> Run:
    """How a run stands, from the head and tail of its metrics."""
    from zero2all.track.listing import last_value, read_status

    status, loss = read_status(folder)
    held_out = last_value(folder, "eval/valid/loss")
    ago = None if status.last_time is None else max(0.0, time.time() - status.last_time)
    return Run(folder.name, status.state, status.last_step, status.total_steps, loss, held_out, ago, status.message)


def human_age(seconds: float) -> str:
    """7300 -> '2 h ago'."""
    if seconds >= 86_400:
        return t(f"{seconds // 86_400:.0f} d ago")
    if seconds >= 3_600:
        return t(f"{seconds // 3_600:.0f} h ago")
    if seconds >= 60:
        return t(f"{seconds // 60:.0f} min ago")
    return t(f"{seconds:.0f} s ago")


@verb("""
    runs: list the runs of a workspace: state, step, training and held-out loss, size

    --work --json

    z2a runs --work my-workspace
    """)
def _runs(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import folder_bytes, human_bytes

    folder = workspace_of(arguments).runs
    runs = [(look_at_run(each), folder_bytes(each)) for each in run_folders(folder)]
    if arguments.json:
        print_json([{**asdict(run), "bytes": size} for run, size in runs])
        return
    if not runs:
        tell(f"There are no runs in {folder}. `z2a train CONFIG` starts one.")
        return

    rows = [["run", "state", "step", "of", "training loss", "held-out loss", "size", "updated"]]
    for run, size in runs:
        counts = ["" if count is None else f"{count:,}" for count in (run.step, run.steps)]
        losses = ["" if loss is None else f"{loss:.4f}" for loss in (run.loss, run.held_out_loss)]
        age = "" if run.seconds_ago is None else human_age(run.seconds_ago)
        rows.append([run.name, t(run.state), *counts, *losses, human_bytes(size), age])
    print_table(rows)
    for run, _ in runs:
        if run.message and run.state in ("crashed", "stalled"):
            print(f"{run.name}: {t(run.message)}")


@verb("""
    inspect: print the documents that a run read in one step

    run? --work
    step STEP:int>=1   the step, as in the metrics: the first is 1
    --sample N:int>=0  only this sample of the step, from 0
    --full             whole texts, not only the first 300 characters
    --json

    z2a inspect my-run 1200 --sample 3 --full --work my-workspace
    """)
def _inspect(arguments: argparse.Namespace) -> None:
    from zero2all.tokenizer import load_tokenizer
    from zero2all.train.guards.documents import EXCERPT_CHARS, Texts, samples_of_step
    from zero2all.train.guards.incident import recorded_row_losses
    from zero2all.train.guards.watch import INCIDENTS_FOLDER
    from zero2all.train.run_data import open_run_data
    from zero2all.train.saved_config import load_run_config

    workspace = workspace_of(arguments)
    run = workspace.existing_run(arguments.run)
    config = load_run_config(run)
    first, end, known = _tokens_of(run, config, arguments.step)
    data, run_end = open_run_data(config, workspace, True)
    if first >= run_end:
        last = arguments.step - 1 - (first - run_end) // config.train.tokens_per_step
        raise UsageError(f"{arguments.run} ends with step {last:,}; there is no step {arguments.step:,}.")
    count = (end - first) // data.segment_at(first).seq_len
    if arguments.sample is not None and arguments.sample >= count:
        raise UsageError(
            f"Step {arguments.step:,} of {arguments.run} has {counted(count, 'sample')}, so there is no sample "
            f"{arguments.sample:,}. Give a number below that."
        )
    tokenizer = load_tokenizer(workspace.tokenizer)
    chars = None if arguments.full else EXCERPT_CHARS
    texts = Texts(workspace.corpus, lambda ids: tokenizer.decode(ids, skip_control=False), chars)
    only_rows = None if arguments.sample is None else [arguments.sample]
    losses = recorded_row_losses(run / INCIDENTS_FOLDER, arguments.step)
    samples = samples_of_step(data, first, count, texts, only_rows, losses)
    facts = {"run": arguments.run, "step": arguments.step, "tokens": [first, end], **known}
    if arguments.json:
        print_json({**facts, "samples": [asdict(sample) for sample in samples]})
    else:
        _print(facts, count, samples)


def _tokens_of(run: Path, config: RunConfig, step: int) -> tuple[int, int, dict[str, Any]]:
    """First and end token of a step (tokens_per_step may have changed), and what the metrics say of the step."""
    from zero2all.track.reader import read_run

    length = config.train.tokens_per_step
    end = step * length
    known: dict[str, Any] = {"loss": None, "trained": False}
    try:
        series = read_run(run).series.get("loss")
    except BadInputError:  # a run that has no metrics has still an order
        series = None
    if series is None or not len(series):
        return end - length, end, known
    at = int(series.step.searchsorted(step, side="right")) - 1
    if at >= 0:
        end = int(series.tokens[at]) + (step - int(series.step[at])) * length
        if int(series.step[at]) == step:
            known["loss"] = float(series.value[at])
    known["trained"] = bool(step <= int(series.step[-1]))
    return max(0, end - length), end, known


def _print(facts: dict[str, Any], count: int, samples: list[SampleText]) -> None:
    loss = "" if facts["loss"] is None else t(f", loss {facts['loss']:.4f}")
    state = "" if facts["trained"] else t(", not trained yet")
    first, end = facts["tokens"]
    rows = counted(count, "sample")
    tell(f"{facts['run']}, step {facts['step']:,}: {rows}, tokens {first:,} to {end - 1:,}{loss}{state}")
    for sample in samples:
        begin, behind = sample.split_tokens or (0, 0)
        where = "" if sample.split_tokens is None else t(f", its tokens {begin:,} to {behind - 1:,}")
        row_loss = "" if sample.loss is None else t(f", loss {sample.loss:.4f}")
        tell(
            f"\n── sample {sample.row}: source {sample.source}, channel {sample.channel}, shard {sample.shard}, "
            f"sample {sample.sample:,} of it{where}, epoch {sample.epoch}, stage {sample.stage}{row_loss}"
        )
        for document in sample.documents:
            last = document.first_column + document.tokens - 1
            title = f"  {terminal_safe(document.title)}" if document.title else ""
            gid = "" if document.gid is None else f"; gid {document.gid}"
            origin = f"; {document.origin}" if document.origin else gid
            tokens = t(f"tokens {document.first_column:,} to {last:,}")
            tell(f"   document {document.number:,}, {tokens}{terminal_safe(origin)}{title}")
            print(terminal_safe(document.text, keep=TEXT_MARKS) + (" …" if document.is_cut else ""))


DEFAULT_SHARE = 0.2
"""Of the steps made so far."""


@verb("""
    anneal: anneal a run: lower its learning rate from where it is now, and end the run there

    run? --work
    --steps N:int>=1             steps over which the rate falls; the run ends after them (default: a fifth of the steps
        so far)
    --shape linear|1-sqrt|cosine =1-sqrt  shape of the decay (default 1-sqrt)
    --to-share S:float>=0..1 =0  final rate as a share of the current rate (default 0)
    --mixture WEIGHTS            weights of the sources from there on, as in data.mixture: '{en: 1, zh: 2}' (default: as
        before)

    z2a anneal my-run --steps 500 --work my-workspace
    """)
def _anneal(arguments: argparse.Namespace) -> None:
    from zero2all.common.schema import Problem, build
    from zero2all.config.schedule import learning_rate
    from zero2all.config.training import AnnealConfig
    from zero2all.packed.config import mixture_problems
    from zero2all.train.anneal import ANNEAL_FILE, begun_anneal, request_anneal
    from zero2all.train.checkpoints.find import newest_checkpoint
    from zero2all.train.run_data import check_anneal
    from zero2all.train.saved_config import load_run_config

    workspace = workspace_of(arguments)
    run = workspace.existing_run(arguments.run)
    config = load_run_config(run)
    begun = begun_anneal(run)
    if begun is not None:
        raise UsageError(
            f"{run.name} has been annealing since step {begun.from_step:,}, over "
            f"{counted(begun.steps, 'step')} (see {run / ANNEAL_FILE}). A run can be annealed only "
            "once. To try another decay, train a run with another name."
        )
    made = _steps_made(run)
    if made == 0:
        raise UsageError(f"{run.name} has no steps yet, so there is no learning rate to lower. Train it first.")
    rate = learning_rate(made - 1, config.train.steps, config.optim.lr_max, config.schedule, config.stages)
    if rate == 0.0:
        raise UsageError(
            f"The learning rate of {run.name} is already 0 at step {made:,}, so there is nothing to anneal."
        )
    steps = arguments.steps or max(1, round(DEFAULT_SHARE * made))
    values = {"from_step": made, "steps": steps, "shape": arguments.shape, "to_share": arguments.to_share}
    problems: list[Problem] = []
    asked = build(AnnealConfig, {**values, "mixture": _mixture(arguments.mixture)}, "", problems)
    problems += [] if problems else mixture_problems(asked.mixture, "--mixture")
    if problems:
        raise UsageError(" ".join(str(problem) for problem in problems))
    check_anneal(config, workspace, newest_checkpoint(run), asked)
    if (run / ANNEAL_FILE).is_file():
        tell("This replaces an earlier request, which has not begun.")
    request_anneal(run, steps, arguments.shape, arguments.to_share, asked.mixture)
    tell(
        f"{run.name}, at step {made:,} of {config.train.steps:,}: the learning rate will fall from "
        f"{rate:.3g} to {rate * arguments.to_share:.3g} over {counted(steps, 'step')} ({arguments.shape}), "
        "and the run ends there. If it is training now, this starts within a few steps. Otherwise it "
        "starts when you continue the run with `z2a train`."
    )
    if asked.mixture is not None:
        tell(f"The mixture from there on: {arguments.mixture}")


def _mixture(text: str | None) -> object:
    """What was given as --mixture; its content is checked with the rest."""
    from zero2all.common.yamlio import YamlError, loads

    try:
        found = None if text is None else loads(text)
        if text is not None and found is None:
            raise UsageError("--mixture is empty. Write it like '{en: 1, zh: 2}', or leave it out.")
        return found
    except YamlError as error:
        raise UsageError(f"--mixture is not YAML: {error}. Write it like '{{en: 1, zh: 2}}'.") from error


def _steps_made(run: Path) -> int:
    """As far as metrics and checkpoints tell."""
    from zero2all.track.reader import read_run
    from zero2all.train.checkpoints.layout import list_checkpoints, step_of

    saved = max((step_of(folder) for folder in list_checkpoints(run)), default=0)
    try:
        series = read_run(run).series.get("loss")
    except BadInputError:  # no metrics
        return saved
    return max(saved, int(series.step[-1])) if series is not None and len(series) else saved
