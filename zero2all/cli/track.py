"""`z2a board`, `watch` and `plot`: runs in the browser, their time, in the terminal and as pictures; `z2a
track export`: for other programs."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zero2all.cli.runs import open_run
from zero2all.cli.verb import default_work, group, verb
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import padded
from zero2all.common.language import translate as t
from zero2all.common.progress import counted, tell

if TYPE_CHECKING:
    from zero2all.track.goodput import Goodput

FORMATS = ("png", "svg", "pdf")
KINDS = ("tensorboard", "csv")
BAR_COLUMNS = 40
BLOCKS = " ▏▎▍▌▋▊▉█"


group(
    """
    track: copy the metrics of a run to TensorBoard's files or a CSV

    z2a track export my-run --work my-workspace --to tensorboard tb --follow
    """,
    {"import": "tensorboard --logdir FOLDER"},
)


@verb("""
    track export: copy a run to another format, from a separate process that does not slow training

    ANY_RUN
    --to+! KIND     tensorboard FOLDER or csv FILE
    --metric* NAME  column of the CSV; can be repeated
    --follow        keep sending until the run ends

    z2a track export my-run --work my-workspace --to tensorboard tb --follow
    """)
def _export(arguments: argparse.Namespace) -> None:
    from zero2all.common.workspace import require_output
    from zero2all.track.export import EventFolder, export, export_csv

    kind, *place = arguments.to
    if kind == "wandb":
        raise UsageError("wandb reads TensorBoard's files: use `--to tensorboard FOLDER`, then `wandb sync FOLDER`.")
    if kind not in KINDS:
        raise UsageError(f"--to {kind} is unknown. Use one of: {', '.join(KINDS)}.")
    if len(place) != 1:
        raise UsageError(f"--to {kind} needs one path to write to.")
    if kind == "csv" and arguments.follow:
        raise UsageError("A CSV is written whole, so it cannot be followed. Leave out --follow.")
    target = Path(place[0])
    require_output(target, f"--to {kind}", is_folder=kind == "tensorboard")
    with open_run(arguments.run, arguments) as run:
        if kind == "csv":
            rows = export_csv(run.folder, target, arguments.metric or None)
            print(f"{target}: {t(counted(rows, 'step'))}")
            return
        sent = export(run.folder, EventFolder(target), arguments.follow)
        tell(f"{target}: {counted(sent.rows, 'row')} sent")
        if sent.skipped_lines:
            tell(f"  left out: {sent.skipped_lines:,} unreadable lines")


@verb("""
    watch: watch a run in the terminal, here or on another machine

    ANY_RUN
    --once    print one frame and exit (as with output into a pipe)

    z2a watch my-run --work my-workspace
    z2a watch ssh://me@gpu-box/home/me/work/runs/my-run
    """)
def _watch(arguments: argparse.Namespace) -> None:
    import sys
    from contextlib import suppress

    from rich.console import Console

    from zero2all.track.frame import print_frame, watch
    from zero2all.track.reader import RunReader

    with open_run(arguments.run, arguments, take_newest=True) as run:
        reader = RunReader(run.folder)
        console = Console(highlight=False)
        if arguments.once or not sys.stdout.isatty():
            print_frame(reader, console, run.connection())
        else:
            with suppress(KeyboardInterrupt):  # the usual way to stop watching
                watch(reader, console, run.connection)


@verb("""
    plot: plot the curves of a run, or of several runs together

    ANY_RUNS
    --png FILE:out                     PNG to write (default: curves.png in the run)
    --svg FILE:out                     SVG to write
    --pdf FILE:out                     PDF to write
    --metric* NAME                     plot this metric; can be repeated
    --x step|tokens|time|flops =step   x axis (default: step)
    --smoothing HOW =auto              auto (default), none, or ema:20, an exponential mean over 20 rows to both sides
    --log                              logarithmic y axis
    --title TITLE                      heading (default: the name of the run)
    --width INCHES:float>=2..60 =11.5  width of the picture (default: 11.5)
    --height INCHES:float>=1.5..120    height of the picture (default: as much as the panels need)
    --dpi N:int>=20                    dots per inch of a PNG (default: as many as fit into 200 KB)

    z2a plot my-run --work my-workspace --png run.png
    z2a plot baseline wider --work my-workspace --metric loss --x tokens --pdf figure.pdf
    """)
def _plot(arguments: argparse.Namespace) -> None:
    from contextlib import ExitStack

    from zero2all.track.plot import PlotOptions, plot_runs

    options = PlotOptions(
        title=arguments.title,
        axis=arguments.x,
        smoothing=_smoothing(arguments.smoothing),
        metrics=tuple(arguments.metric),
        width_inches=arguments.width,
        height_inches=arguments.height,
        dpi=arguments.dpi,
        log_y=arguments.log,
    )
    targets: list[Path] = [getattr(arguments, kind) for kind in FORMATS if getattr(arguments, kind)]
    for kind in FORMATS:
        target = getattr(arguments, kind)
        if target is not None and target.suffix.lower() != f".{kind}":
            raise UsageError(f"--{kind} {target}: the name must end with .{kind}.")
    with ExitStack() as opened:
        runs = [opened.enter_context(open_run(word, arguments)) for word in arguments.runs]
        if not targets:
            is_own = len(runs) == 1 and not runs[0].is_remote
            targets = [runs[0].folder / "curves.png" if is_own else Path("curves.png")]
        for target in targets:
            plot_runs([run.folder for run in runs], target, options)
            print(target)


def _smoothing(text: str) -> float | Literal["auto"] | None:
    from zero2all.track.bins import parse_smoothing

    try:
        return "auto" if text == "auto" else parse_smoothing(text)
    except ValueError as error:
        raise UsageError(f"--smoothing {error}. The default is auto.") from None


@verb("""
    board: watch runs in the browser, here or on other machines

    places* PATH =[]        folders that contain runs, at any depth, or ssh://[user@]host/path (default: Z2A_WORK, or
        here)
    --port N:int>=0..65535  port (default: the first free one from 6106)
    --host --token --allow-host*
    --open                  open the page in the browser
    --fetch-charts          fetch the chart library of the page with npm, once, and stop

    z2a board my-workspace
    z2a board runs ssh://me@gpu-box/home/me/work/runs
    """)
def _board(arguments: argparse.Namespace) -> None:
    if arguments.fetch_charts:
        from zero2all.track.chart_library import CHART_LIBRARY, fetch_charts

        print(t(f"fetched {CHART_LIBRARY}") if fetch_charts() else t("The chart library is there already."))
        return
    places = arguments.places or [str(default_work() or ".")]
    _require_folders(places)
    from zero2all.track.api import Board, BoardOptions

    options = BoardOptions(arguments.host, arguments.port, arguments.token, arguments.allow_host)
    board = Board(places, options)
    for note in board.notes():
        tell(note)
    tell(f"The board is at {board.url}   (Ctrl-C ends it)", flush=True)
    if arguments.open:
        import webbrowser

        webbrowser.open(board.url)
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
        board.serve()


def _require_folders(places: list[str]) -> None:
    """A typing mistake would give an empty board."""
    missing = [place for place in places if "://" not in place and not Path(place).expanduser().exists()]
    if missing:
        raise BadInputError(
            f"There is no folder {', '.join(missing)}. Give folders that contain runs, such as a workspace, or make "
            f"them first."
        )


def print_goodput(found: Goodput) -> None:
    """The shares by cause, with bars."""
    tell(
        f"goodput {found.goodput:.1%}: {found.seconds['steps']:,.1f} s of surviving steps in "
        f"{found.total_seconds:,.1f} s"
    )
    tell(
        f"starts {found.starts}, failures with a page {found.incidents}, steps {found.steps:,}, "
        f"lost and repeated {found.lost_steps:,}"
    )
    for cause, seconds in found.seconds.items():
        if seconds > 0:
            share = seconds / found.total_seconds
            print(f"  {padded(t(cause), 12)} {seconds:>12,.1f} s {share:>7.1%} {_bar(share)}")
    tell(f"of the steps, {found.data_wait_seconds:,.1f} s waited for data")
    if found.stopped_seconds:
        tell(f"not counted: {found.stopped_seconds:,.1f} s between an end and the next start")


def _bar(share: float) -> str:
    eighths = round(share * BAR_COLUMNS * 8)
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
