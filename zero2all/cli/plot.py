"""`z2a plot`: pictures of runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zero2all.cli.runs import add_run, open_run
from zero2all.cli.verb import Subparsers, add_output, add_verb, real, whole
from zero2all.common.errors import UsageError

if TYPE_CHECKING:
    from zero2all.track.smoothing import Smoothing

FORMATS = ("png", "svg", "pdf")


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    plot = add_verb(
        verbs,
        "plot",
        "plot the curves of a run, or of several runs together",
        "z2a plot my-run --work my-workspace --png run.png\n"
        "  z2a plot baseline wider --work my-workspace --metric loss --x tokens --pdf figure.pdf",
        _plot,
    )
    add_run(plot, several=True)
    for kind in FORMATS:
        about = f"{kind.upper()} to write"
        add_output(plot, f"--{kind}", help=f"{about} (default: curves.png in the run)" if kind == "png" else about)
    plot.add_argument("--metric", action="append", default=[], metavar="NAME", help="plot this metric; can be repeated")
    plot.add_argument("--x", choices=("step", "tokens", "time", "flops"), default="step", help="x axis (default: step)")
    plot.add_argument(
        "--smoothing",
        default="auto",
        metavar="HOW",
        help="auto (default), none, or a kind and its width in rows: ema:20, window:50, gaussian:5, median:9",
    )
    plot.add_argument("--log", action="store_true", help="logarithmic y axis")
    plot.add_argument("--title", help="heading (default: the name of the run)")
    plot.add_argument(
        "--width", type=real(2, 60), default=11.5, metavar="INCHES", help="width of the picture (default: 11.5)"
    )
    plot.add_argument(
        "--height",
        type=real(1.5, 120),
        metavar="INCHES",
        help="height of the picture (default: as much as the panels need)",
    )
    plot.add_argument(
        "--dpi", type=whole(20), metavar="N", help="dots per inch of a PNG (default: as many as fit into 200 KB)"
    )


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


def _smoothing(text: str) -> Smoothing | Literal["auto"] | None:
    from zero2all.track.smoothing import parse_smoothing

    try:
        return "auto" if text == "auto" else parse_smoothing(text)
    except ValueError as error:
        raise UsageError(f"--smoothing {error}. The default is auto.") from None
