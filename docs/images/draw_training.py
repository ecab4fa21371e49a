"""`schedule`, `branches` and `commit`: rates over a run and its branches, and how a checkpoint comes to exist."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from canvas import MARGIN, SMALL, WIDTH, Canvas, Theme, font_families
from example import Example

from zero2all.common.files import PARTIAL_MARK
from zero2all.config.schedule import learning_rate
from zero2all.config.training import AnnealConfig
from zero2all.experiments.sweep import HALVING_RUNGS, Sweep, SweepPlan, parse_axis
from zero2all.packed.shard_format import open_split, packed_sources
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import write_checkpoint

# ---- schedule --------------------------------------------------------------------------------------------------------


def schedule(example: Example, theme: Theme) -> Canvas:
    """The quickstart's rate as it was logged, and the same run under WSD, with an anneal from its middle."""
    config = example.config
    steps, top = config.train.steps, config.optim.lr_max
    wsd = dataclasses.replace(config.schedule, kind="wsd", decay_share=0.2)
    anneal = AnnealConfig(from_step=steps * 4 // 10, steps=steps // 5)
    logged = example.metrics.series("lr")
    canvas = Canvas(
        theme,
        492,
        "The learning rate is a function of the step",
        "Step, number of steps, top rate and schedule decide it, so a checkpoint need not store it.",
    )
    first = canvas.chart(84, 96, WIDTH - MARGIN - 84, 140)
    rates = [learning_rate(step, steps, top, config.schedule) for step in range(steps)]
    first.plot(range(1, steps + 1), rates, color=theme.blue, linewidth=2.5)
    first.plot(logged.step[::15], logged.value[::15], "o", color=theme.blue, markersize=4)
    canvas.text(84, 80, f"{config.schedule.kind}: the quickstart (dots: what the run logged)", weight="bold")
    warmup = config.schedule.warmup_steps
    canvas.label(first, warmup + 8, 0.12 * top, f"warmup: {warmup} steps", ha="left")
    lowest = f"ends at {config.schedule.min_lr_ratio:.0%} of the top"
    canvas.label(first, steps, 0.28 * top, lowest, ha="right")

    second = canvas.chart(84, 302, WIDTH - MARGIN - 84, 140)
    stable = [learning_rate(step, steps, top, wsd) for step in range(steps)]
    second.plot(range(1, steps + 1), stable, color=theme.green, linewidth=2.5)
    end = anneal.from_step + anneal.steps
    branch = [learning_rate(step, steps, top, wsd, anneal=anneal) for step in range(anneal.from_step - 1, end)]
    second.plot(range(anneal.from_step, end + 1), branch, color=theme.orange, linewidth=2.5)
    second.plot([anneal.from_step], [top], "o", color=theme.orange, markersize=7)
    canvas.text(84, 286, "wsd: warmup, stable, decay, with an anneal from its middle", weight="bold")
    canvas.label(second, 0.55 * steps, 1.1 * top, "stable: the run can go on from any checkpoint", colour=theme.green)
    canvas.label(
        second,
        anneal.from_step - 12,
        0.62 * top,
        f"z2a anneal at step {anneal.from_step}:",
        colour=theme.orange,
        ha="right",
    )
    canvas.label(
        second, anneal.from_step - 12, 0.46 * top, "a finished model on the way", colour=theme.orange, ha="right"
    )
    canvas.label(second, 0.83 * steps, 0.35 * top, f"decay ({wsd.decay_shape})", colour=theme.green, ha="right")
    for axes in (first, second):
        axes.set(xlim=(0, steps * 1.01), ylim=(0, 1.2 * top), yticks=[0, top / 2, top])
        axes.set_yticklabels(["0", f"{top / 2:g}", f"{top:g}"])
    second.set_xlabel("step", fontsize=SMALL, color=theme.faint, family=font_families())
    return canvas


# ---- branches --------------------------------------------------------------------------------------------------------

FACTORS = "x0.25,x0.35,x0.5,x0.7,x1,x1.4,x2,x2.8,x4"


def branches(example: Example, theme: Theme) -> Canvas:
    """The rate of a trial that is judged on the way, and how many trials of a sweep with halving go on."""
    axes, given = (parse_axis(f"optim.lr_max={FACTORS}"),), ("--schedule.kind=wsd",)
    plan = SweepPlan("quickstart", given, axes, rungs=HALVING_RUNGS, halving=True)
    packed = example.workspace.packed
    sweep = Sweep(plan, "sweep", example.workspace, [open_split(packed, packed_sources(packed)[0], "train")])
    trial, count = sweep.trials[0], len(sweep.trials)
    steps, schedule, top = trial.config.train.steps, trial.config.schedule, 1.0
    canvas = Canvas(
        theme,
        508,
        "A rate on its plateau cannot be judged: branches decay, the trunk goes on",
        f"Halving with {count} settings of the quickstart, as z2a sweep --halving plans it.",
    )
    first = canvas.chart(84, 96, WIDTH - MARGIN - 84, 150)
    canvas.text(84, 80, "learning rate of one trial, as a share of its highest", weight="bold")
    rates = [learning_rate(step, steps, top, schedule) for step in range(steps)]
    first.plot(range(1, steps + 1), rates, color=theme.green, linewidth=2.5)
    ends = []
    for begin, falls in sweep.judged_at(trial):
        fall = AnnealConfig(begin, falls, schedule.decay_shape, schedule.min_lr_ratio)
        branch = [learning_rate(step, steps, top, schedule, anneal=fall) for step in range(begin - 1, begin + falls)]
        first.plot(range(begin, begin + falls + 1), branch, color=theme.orange, linewidth=2.5)
        first.plot([begin], [top], "o", color=theme.orange, markersize=7)
        ends.append(begin + falls)
        canvas.label(first, ends[-1] + 6, 0.12, f"judged at step {ends[-1]}", colour=theme.orange, ha="left")
    canvas.label(first, 0.5 * steps, 1.1, "trunk: constant rate, so that it can go on", colour=theme.green)
    canvas.label(first, ends[-1] + 6, 0.5, "branch: a new run from the trunk's", colour=theme.orange, ha="left")
    canvas.label(first, ends[-1] + 6, 0.36, "checkpoint, with the decay of a whole run", colour=theme.orange, ha="left")
    first.set(ylim=(0, 1.2), yticks=[0, 0.5, 1])

    second = canvas.chart(84, 312, WIDTH - MARGIN - 84, 150)
    canvas.text(84, 296, "how many trials are trained", weight="bold")
    second.fill_between([0, steps], [count] * 2, color=theme.blend(theme.blue, 0.15), linewidth=0)
    begun, alive = 0, count
    for end in [*(begin for begin, _ in sweep.judged_at(trial)), steps]:
        second.fill_between([begun, end], [alive] * 2, color=theme.blue, linewidth=0)
        canvas.label(second, begun + 6, alive + 0.6 if begun else count + 0.6, f"{alive}", weight="bold", ha="left")
        begun, alive = end, sweep.kept_of(alive)
    share = sweep.planned_steps() / (count * steps)
    words = f"{sweep.planned_steps():,} steps with the branches: {share:.0%} of the {count * steps:,} of a full grid"
    canvas.label(second, steps * 0.99, 0.7 * count, words, ha="right")
    second.set(ylim=(0, 1.2 * count), yticks=[0, count // 3, count])
    for chart in (first, second):
        chart.set(xlim=(0, steps * 1.01))
    second.set_xlabel("step", fontsize=SMALL, color=theme.faint, family=font_families())
    return canvas


# ---- commit ----------------------------------------------------------------------------------------------------------

KILLED = 137
STEPS = (450, 525)
"""Of the checkpoint that exists, and of the one that is being saved."""


class Killed(NamedTuple):
    """A save that was killed before one of its file operations."""

    before: str
    """The operation that did not happen any more."""
    files: list[str]
    """What lies in the folder of the new checkpoint."""
    newest: int
    """The step that a restart finds."""


def commit(_: Example, theme: Theme) -> Canvas:
    """A line for each operation of a save; beside it, what a restart finds after a kill at this point."""
    outcomes = _killed_everywhere()
    canvas = Canvas(
        theme,
        128 + 30 * len(outcomes) + 62,
        "A checkpoint exists from the rename on, whole or not at all",
        "A process that saves a checkpoint was killed before each of its file operations, then restarted.",
    )
    columns = (MARGIN, 384.0, 586.0)
    for x, heading in zip(columns, ("killed before it could …", "on disk", "a restart finds"), strict=True):
        canvas.text(x, 86, heading, weight="bold")
    canvas.line([(MARGIN, 100), (WIDTH - MARGIN, 100)])
    for number, outcome in enumerate(outcomes):
        y = 120 + 30 * number
        is_new = outcome.newest == STEPS[1]
        colour = theme.green if is_new else theme.blue
        if outcome.before.startswith("rename step-"):
            canvas.box(MARGIN - 8, y - 14, WIDTH - 2 * MARGIN + 16, 28, theme.blend(theme.orange, 0.18))
        canvas.text(columns[0], y, outcome.before)
        _draw_files(canvas, outcome.files, is_new, columns[1], y)
        canvas.box(columns[2], y - 11, 110, 22, colour, f"step {outcome.newest}", weight="bold")
    bottom = canvas.height - 44
    x = float(MARGIN)
    for colour, words in ((theme.line, "file in the temporary folder"), (theme.green, "file of the checkpoint")):
        canvas.box(x, bottom - 6, 12, 12, colour, round_by=2)
        x = canvas.text(x + 18, bottom, words, size=SMALL, colour=theme.faint) + 20
    canvas.text(
        MARGIN, bottom + 22, "The next start deletes what an unfinished save left.", size=SMALL, colour=theme.faint
    )
    return canvas


def _draw_files(canvas: Canvas, files: list[str], is_new: bool, x: float, y: float) -> None:
    """A square for each file, and how many."""
    theme = canvas.theme
    if not files:
        canvas.text(x, y, "nothing new", size=SMALL, colour=theme.faint)
        return
    for number in range(len(files)):
        canvas.box(x + number * 20, y - 8, 16, 16, theme.green if is_new else theme.line, round_by=2)
    counted = "1 file" if len(files) == 1 else f"{len(files)} files"
    canvas.text(x + len(files) * 20 + 6, y, counted, size=SMALL, colour=theme.faint)


@cache
def _killed_everywhere() -> list[Killed]:
    """Save in a child process that dies before its first file operation, before its second, and so on."""
    outcomes: list[Killed] = []
    while True:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            _save(run, STEPS[0])
            operation = _save_and_die(run, len(outcomes))
            names = [path.name for path in sorted(run.glob(f"checkpoints/step-{STEPS[1]:08d}*/*"))]
            newest = newest_checkpoint(run)
            assert newest is not None, "the first checkpoint is never touched"
            outcomes.append(Killed(operation or "(the save ends: not killed)", names, newest.step))
        if operation is None:
            return outcomes


def _save(run: Path, step: int) -> None:
    tensors = {"model/weight": torch.ones(8), "optimizer/exp_avg": torch.zeros(8)}
    write_checkpoint(run, step, Snapshot.of_tensors(tensors, {"step": step}), {})


def _save_and_die(run: Path, after: int) -> str | None:
    """Save, and die after so many file operations; returns the one that was not done, None where the save ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            """Python calls this before every file operation."""
            nonlocal seen
            operation = _in_words(event, arguments, run)
            if operation is None:
                return
            if seen == after:
                os.write(writer, operation.encode())
                os._exit(KILLED)  # as kill -9 does: nothing is cleaned up
            seen += 1

        sys.addaudithook(watch)
        _save(run, STEPS[1])
        os._exit(0)
    os.close(writer)
    operation = b"".join(iter(lambda: os.read(reader, 1000), b"")).decode()
    os.close(reader)
    os.waitpid(child, 0)
    return operation or None


def _in_words(event: str, arguments: tuple[object, ...], run: Path) -> str | None:
    """A file operation in the folder of the run that changes something; None for any other event."""
    if event not in ("open", "os.mkdir", "os.rename") or not str(arguments[0]).startswith(str(run)):
        return None
    path, flags = Path(str(arguments[0])), arguments[2] if event == "open" else 0
    name = path.name.partition(PARTIAL_MARK)[0] + (".partial" if PARTIAL_MARK in path.name else "")
    if event == "open":
        return f"write {name}" if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) else None
    if event == "os.mkdir":
        return None if path.exists() else f"make the folder {name}"
    return f"rename {name} to {Path(str(arguments[1])).name}"
