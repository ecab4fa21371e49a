"""`z2a track import` and `z2a track export`: to and from other trackers."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.runs import OpenRun, add_run, open_run
from zero2all.cli.verb import Subparsers, add_group, add_verb, add_work, workspace_of
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

KINDS = ("tensorboard", "wandb", "csv")


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    track = add_group(
        verbs,
        "track",
        "import metrics from TensorBoard; export them to TensorBoard, wandb or CSV",
        "z2a track export my-run --work my-workspace --to tensorboard tb --follow",
    )
    taken = add_verb(
        track,
        "import",
        "make runs from TensorBoard's event files",
        "z2a track import logs/experiment --name old --work my-workspace --rename train/loss=loss",
        _import,
    )
    taken.add_argument("source", type=Path, metavar="FOLDER", help="folder with event files, also in its subfolders")
    add_work(taken)
    taken.add_argument("--name", required=True, help="name of the new run")
    taken.add_argument(
        "--rename", action="append", default=[], metavar="TAG=METRIC", help="rename a tag; can be repeated"
    )
    taken.add_argument("--tokens-tag", metavar="TAG", help="the tag that holds the tokens seen so far")

    sent = add_verb(
        track,
        "export",
        "send a run to another tracker, from a separate process that does not slow training",
        "z2a track export my-run --work my-workspace --to wandb --project my-project --follow",
        _export,
    )
    add_run(sent)
    sent.add_argument(
        "--to", nargs="+", required=True, metavar="KIND", help="tensorboard FOLDER, csv FILE, or wandb (with --project)"
    )
    sent.add_argument("--project", metavar="NAME", help="project on wandb")
    sent.add_argument("--name", help="name of the run on wandb (default: its own)")
    sent.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="column of the CSV; can be repeated"
    )
    sent.add_argument("--follow", action="store_true", help="keep sending until the run ends")


def _import(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import counted
    from zero2all.track.importer import import_tensorboard
    from zero2all.track.tensorboard import describe

    rename = {}
    for word in arguments.rename:
        tag, equals, metric = word.partition("=")
        if not (tag and equals and metric):
            raise UsageError(f"--rename {word} is not understood: write TAG=METRIC, for example train/loss=loss.")
        rename[tag] = metric
    runs = workspace_of(arguments, create=True).runs
    for done in import_tensorboard(arguments.source, runs, arguments.name, rename, arguments.tokens_tag):
        counts = {"file": done.files, "row": done.rows, "value": done.values, "text": done.texts}
        print(f"{done.folder}: {', '.join(t(counted(count, noun)) for noun, count in counts.items())}")
        for sentence in describe(done.damage):
            print(t(f"  left out: {sentence}"))


def _export(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import counted

    kind, *place = arguments.to
    if kind not in KINDS:
        raise UsageError(f"--to {kind} is unknown. Use one of: {', '.join(KINDS)}.")
    if kind == "wandb":
        if place or not arguments.project:
            raise UsageError("For wandb give the project, and no path: --to wandb --project NAME.")
    elif len(place) != 1:
        raise UsageError(f"--to {kind} needs one path to write to.")
    if kind == "csv" and arguments.follow:
        raise UsageError("A CSV is written whole, so it cannot be followed. Leave out --follow.")
    if place:
        from zero2all.common.workspace import require_output

        require_output(Path(place[0]), f"--to {kind}", is_folder=kind == "tensorboard")
    with open_run(arguments.run, arguments) as run:
        if kind == "csv":
            from zero2all.track.csv_export import export_csv

            rows = export_csv(run.folder, Path(place[0]), arguments.metric or None)
            print(f"{place[0]}: {t(counted(rows, 'step'))}")
        else:
            _send(run, arguments, Path(place[0]) if place else None)


def _send(run: OpenRun, arguments: argparse.Namespace, folder: Path | None) -> None:
    import hashlib

    from zero2all.common.progress import counted
    from zero2all.track.sidecar import user_cache
    from zero2all.track.sinks import Sink, TensorboardSink, WandbSink, export

    sink: Sink
    if folder is not None:
        sink = TensorboardSink(folder)
        target = str(folder)
    else:
        key = hashlib.sha256(f"{arguments.project} {run.folder.resolve()}".encode()).hexdigest()[:16]
        state = user_cache("wandb") / f"{key}.json"
        sink = WandbSink(arguments.project, run.folder, state, arguments.name)
        target = f"wandb project {arguments.project}"
    sent = export(run.folder, sink, arguments.follow)
    print(t(f"{target}: {counted(sent.rows, 'row')} sent"))
    if sent.skipped_lines:
        print(t(f"  left out: {sent.skipped_lines:,} unreadable lines"))
