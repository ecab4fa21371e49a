"""The ends of the runs of a workspace, what the scaling law through them says, and a picture of it."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json_object, write_atomic
from zero2all.common.progress import human_count
from zero2all.common.workspace import Workspace
from zero2all.config.schedule import steps_with_anneal
from zero2all.experiments.law import Fit, Point, at, best_for, held_out_check, predicted, table_for_budget
from zero2all.experiments.study import BRANCH_FILE
from zero2all.model.config import parameter_counts
from zero2all.packed.mixture import source_weights
from zero2all.packed.remote import packed_root
from zero2all.packed.shard_format import open_split, packed_sources
from zero2all.track.plot import COLORS, INK, STYLE, png_bytes
from zero2all.track.reader import RunReader
from zero2all.train.anneal import begun_anneal
from zero2all.train.saved_config import FINETUNE_FILE, load_run_config


def read_points(workspace: Workspace, patterns: Sequence[str]) -> tuple[list[Point], dict[str, str]]:
    """The ends of the runs of these names, and why others are left out; UsageError where losses do not compare."""
    found = (list(workspace.runs.glob(pattern)) or [workspace.existing_run(pattern)] for pattern in patterns)
    points, left_out, of_text = [], dict[str, str](), dict[str, list[str]]()
    for run in sorted({run for runs in found for run in runs if run.is_dir()}):
        try:
            point, text = _point(workspace, run)
            points.append(point)
            of_text.setdefault(text, []).append(run.name)
        except BadInputError as error:
            left_out[run.name] = str(error)
    if len(of_text) > 1:
        groups = "\n".join(f"  {', '.join(names)}: {text}" for text, names in of_text.items())
        raise UsageError(f"These losses are of different tokens: compare bits per byte, or fit one group.\n{groups}")
    return sorted(points, key=lambda point: (point.n, point.tokens)), left_out


def _point(workspace: Workspace, run: Path) -> tuple[Point, str]:
    """The end of a run, and of which text its loss is; BadInputError for a run that has no such end."""
    config, anneal = load_run_config(run), begun_anneal(run)
    kinds = [config.schedule.kind, *(each.schedule.kind for each in config.stages if each.schedule)]
    if anneal is None and [kind for kind in kinds if kind][-1] in ("constant", "inverse_sqrt"):
        raise BadInputError("its learning rate does not fall: end it with `z2a anneal`")
    losses, end = RunReader(run).series("eval/valid/loss"), steps_with_anneal(config.train.steps, anneal)
    if not len(losses) or losses.step[-1] < end or not math.isfinite(losses.value[-1]):
        raise BadInputError(f"it has no held-out loss of its end, step {end:,}: let `z2a train` finish it")
    if (run / FINETUNE_FILE).is_file():
        raise BadInputError("it was fine-tuned")
    packed = packed_root(workspace.packed, config.data)
    splits = [open_split(packed, name, "train") for name in packed_sources(packed)]
    mixtures = [config.data.mixture, *(each.mixture for each in (*config.stages, anneal) if each and each.mixture)]
    weights = np.sum([source_weights(splits, mixture) for mixture in mixtures], axis=0)
    read = [split for split, weight in zip(splits, weights, strict=True) if weight]
    trunk, n, unique = run, parameter_counts(config.model)["matmul"], sum(split.tokens for split in read)
    while (trunk / BRANCH_FILE).is_file():
        trunk = workspace.run(read_json_object(trunk / BRANCH_FILE)["of"])
    tokenizer = f"tokenizer {read[0].manifest['tokenizer'][:8]} of {config.model.vocab_ids:,} ids"
    text = f"{', '.join(split.name for split in read)}, {config.validation.tokens_per_source:,} each, {tokenizer}"
    return Point(trunk.name, n, int(losses.tokens[-1]), unique, float(losses.value[-1]), run.name), text


def tables(fit: Fit, budgets: Sequence[float], unique: float) -> dict[str, list[dict[str, Any]]]:
    """What the law says, as rows by column: its constants, the runs, what budgets buy and what other sizes cost."""
    best = {flops: fit.intervals(partial(best_for, flops=flops, unique=unique)) for flops in budgets}
    without: dict[Point, float] = {}
    with suppress(UsageError):  # too few sizes
        without = {point: point.loss / expected - 1 for point, expected in held_out_check(fit.points)}
    off = {point: point.loss / predicted(fit.law, point) - 1 for point in fit.points}
    rows = [{**asdict(p), "off the law": off[p], "off the law of smaller": without.get(p)} for p in fit.points]
    buys = [{"flops": flops, **each, "beyond the runs": fit.within(each)} for flops, each in best.items()]
    sizes = [{"flops": flops, **asdict(each)} for flops in budgets for each in table_for_budget(fit.law, flops, unique)]
    return {"law": [fit.intervals(lambda law: law)], "runs": rows, "budgets": buys, "sizes": sizes}


def draw(fit: Fit, target: Path, budgets: Sequence[float], unique: float) -> None:
    """Loss over FLOPs: the runs, the law at each size, and the best that each budget buys with its interval."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", {**STYLE, "text.parse_math": True}]):
        figure = Figure(figsize=(9, 5.5), facecolor="white", layout="constrained")
        axis = figure.add_subplot(xscale="log", xlabel="6 N D (FLOPs)", ylabel="loss")
        for n, color in zip(sorted({point.n for point in fit.points}), COLORS * 9, strict=False):
            flops, losses = np.array([(point.flops, point.loss) for point in fit.points if point.n == n]).T
            axis.plot(flops, losses, "o", color=color, label=human_count(n))
            along = np.geomspace(flops.min() / 2, flops.max() * 2)
            axis.plot(along, [at(fit.law, n, each / (6 * n), unique).loss for each in along], color=color)
        along = np.geomspace(min(point.flops for point in fit.points), max(budgets), 20)
        best = np.array([fit.intervals(partial(best_for, flops=each, unique=unique))["loss"] for each in along]).T
        axis.plot(along, best[0], "--", color=INK)
        axis.fill_between(along, best[1], best[2], color=INK, alpha=0.12)
        axis.legend(title="N")
        write_atomic(target, png_bytes(figure))
