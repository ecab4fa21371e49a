"""`z2a perf predict`: the prediction of a config for a machine; with `--verify`, a few real steps beside it.

Prediction and measurement go to the ledger, from which the next prediction is corrected.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.jsonio import append_line
from zero2all.common.language import translate as t
from zero2all.common.progress import say
from zero2all.config import RunConfig, config_yaml
from zero2all.estimate.ledger import MEMORY, STEP, Entry, Score, read_entries, scoreboard
from zero2all.estimate.machine import Machine
from zero2all.estimate.run.batch import BatchShape, load_measured_config
from zero2all.estimate.run.plan import Candidate, LayoutPlan, config_of
from zero2all.estimate.run.predict import Prediction, check_asked, ledger_entry, operators_for, predict
from zero2all.measure.calibrate import machine_for
from zero2all.measure.child import MEASURED, run_child
from zero2all.measure.machine_profiles import ledger_path, named_machine, profile_key, profile_path
from zero2all.measure.variants import ANCHOR
from zero2all.parallel.device import pick_device, set_cpu_threads

MILLISECONDS = 1e3
MEASURED_TOKENS = 1 << 17
"""Of a measured iteration, about: a whole step of a large batch takes long and says no more."""
LEAST_SHOWN = 0.002  # of the step: a component smaller than this, predicted and measured, is left out


@dataclass(frozen=True)
class Verified:
    """A prediction and how it ended."""

    prediction: Prediction
    entry: Entry | None  # None: it could not be measured
    measured: dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The machine that a prediction is for: a cluster by name, the profile in a file, or (neither) this machine."""

    cluster: str | None = None
    profile: Path | None = None
    gpus: int = 1
    price: float | None = None
    """Of a GPU for an hour; None: the one of the data sheet."""
    ledger: Path | None = None
    """Of earlier predictions; None: the one beside the profiles."""


HERE = Asked()


@dataclass(frozen=True)
class ShortRun:
    """The real steps beside a prediction."""

    batch: BatchShape
    seconds: float
    timeout: float
    anatomy: bool = True


def prediction_for(
    config: RunConfig, batch: BatchShape | None, asked: Asked = HERE, runs_here: bool = False
) -> Prediction:
    """What `runs_here` needs a profile of this machine. `batch`: of each process of the batch axes; None: its share of
    the config's."""
    set_cpu_threads(config.parallel.cpu_threads, None)
    device = pick_device(config.parallel.device)
    machine = named_machine(asked.cluster, asked.profile, device, runs_here)
    sizes = check_asked(config, batch, machine, asked.gpus)
    ops = operators_for(config, machine, batch.seq_len if batch else config.data.seq_len)
    if machine.key and machine.key == profile_key(device):
        machine = machine_for(machine, asked.profile or profile_path(machine.key), ops.taken, device)
    if asked.price is not None:
        machine = dataclasses.replace(machine, price_per_hour=asked.price)
    return predict(config, batch, machine, ops, sizes, read_entries(asked.ledger or ledger_path()))


def scores(path: Path | None, all_machines: bool) -> tuple[int, list[Score]]:
    """How many verified predictions the ledger has, of this machine or of all, and their errors."""
    ledger = path or ledger_path()
    entries = read_entries(ledger)
    if not all_machines:  # with any number of threads: a config may set it
        here = {**profile_key(pick_device("auto")), "threads": ""}
        entries = [entry for entry in entries if {**entry["profile"], "threads": ""} == here]
    if not entries:
        raise UsageError(
            f"{ledger} has no verified predictions of this machine. Make one: `z2a perf predict CONFIG --verify`, "
            f"or show those of other machines with --all-machines."
        )
    return len(entries), scoreboard(entries)


def verify(source: str, overrides: list[str], run: ShortRun, asked: Asked = HERE) -> Verified:
    """Predict, run, compare, and append to the ledger."""
    if asked.cluster is not None or asked.gpus != 1:
        raise UsageError("--verify runs steps in one process of this machine: leave --cluster and --gpus out.")
    config, notes = load_measured_config(source, overrides)
    for note in notes:
        say(f"verify: {note}")
    prediction = prediction_for(config, run.batch, asked, runs_here=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    say(f"verify: {prediction.corrected:.4g} s a step are predicted; real steps follow, for at most {run.timeout:g} s")
    measured = run_apart(source, overrides, run)
    if measured["status"] != MEASURED:
        return Verified(prediction, None, measured)
    entry = ledger_entry(prediction, source, overrides, measured, datetime.now(UTC).isoformat(timespec="seconds"))
    append_line(asked.ledger or ledger_path(), entry)
    return Verified(prediction, entry, measured)


def run_apart(source: str, overrides: list[str], run: ShortRun) -> dict[str, Any]:
    """The figures of real steps in a process of their own, or how it ended."""
    words = [source, "--batch", run.batch, "--seconds", run.seconds, *([] if run.anatomy else ["--no-anatomy"])]
    return run_child(words, overrides, run.timeout)


def require_measured(verified: Verified) -> Entry:
    """The entry; BadInputError with the reason where nothing could be measured."""
    if verified.entry is None:
        expected = "it was expected to fit" if verified.prediction.fits else "it was not expected to fit"
        found = verified.measured
        raise BadInputError(f"The run could not be measured: {found['status']}: {found['reason']} ({expected}).")
    return verified.entry


def comparison(verified: Verified) -> list[list[str]]:
    """Predicted, measured and error, of the step, of its components and of the memory."""
    entry = require_measured(verified)
    rows = [["component", "predicted", "corrected", "measured", "error", "noise", "inside 90 %"]]
    low, high = entry["intervals"][STEP]
    step = entry["measured"][STEP]
    times = [f"{MILLISECONDS * each:,.2f}" for each in (entry["predicted"][STEP], entry["corrected"][STEP], step)]
    verdict = [_error(entry, STEP), f"{100 * entry['noise']:.1f} %", t("yes") if low <= step <= high else t("no")]
    rows.append([t("step, ms"), *times, *verdict])
    names = [name for name in entry["measured"] if name not in (STEP, MEMORY)]
    for name in names:
        predicted, measured = entry["predicted"].get(name, 0.0), entry["measured"][name]
        if max(predicted, measured) < LEAST_SHOWN * step:
            continue
        cells = [f"{MILLISECONDS * predicted:,.2f}", "", f"{MILLISECONDS * measured:,.2f}"]
        rows.append([f"  {t(name)}, ms", *cells, _error(entry, name), "", ""])
    sizes = [("peak allocated, GiB", entry["predicted"][MEMORY], entry["measured"][MEMORY], _error(entry, MEMORY))]
    reserved = entry["reserved"]
    if reserved["measured"]:
        error = f"{100 * (reserved['predicted'] / reserved['measured'] - 1):+.1f} %"
        sizes.append(("peak reserved, GiB", reserved["predicted"], reserved["measured"], error))
    rows += [[t(name), f"{a / 2**30:.3f}", "", f"{b / 2**30:.3f}", error, "", ""] for name, a, b, error in sizes]
    return rows


def _error(entry: Entry, name: str) -> str:
    predicted, measured = entry["predicted"].get(name, 0.0), entry["measured"][name]
    return f"{100 * (predicted / measured - 1):+.1f} %" if measured > 0 else "–"


def score_rows(scores: Sequence[Score]) -> list[list[str]]:
    """The scoreboard as a table."""
    heading = ["component", "runs", "median", "95th percentile", "worst", "bias", "corrected median"]
    rows = [[*heading, "corrected 95th", "inside 90 %"]]
    for score in scores:
        shares = (score.median, score.percentile_95, score.worst, score.bias)
        more = (score.corrected_median, score.corrected_percentile_95)
        cells = [f"{100 * value:.1f} %" for value in shares] + [f"{100 * value:.1f} %" for value in more]
        inside = "–" if score.inside is None else f"{100 * score.inside:.0f} %"
        rows.append([t(score.component), str(score.entries), *cells, inside])
    return rows


def machine_line(machine: Machine) -> str:
    """What a prediction stands on, in one line."""
    return f"{machine.name}, {machine.source}: {len(machine.matmuls)} products, {len(machine.operators)} operators"


# ---- the best layouts of a plan ------------------------------------------------------------------------------------


def measure_candidates(plan: LayoutPlan, count: int, seconds: float, timeout: float) -> LayoutPlan:
    """The best few on the GPU of this machine, each in its own process, on random tokens."""
    if plan.gpus != 1:
        raise UsageError(
            f"--measure runs steps in one process on one GPU, but --gpus is {plan.gpus}. Write the config of the best "
            f"with --out and run `z2a train` for a few steps instead."
        )
    measured: list[Candidate] = []
    for candidate in plan.candidates[:count]:
        config = config_of(plan.config, candidate.row)
        samples, passes = int(candidate.row["samples"]), int(candidate.row["passes"])
        cut = max(1, MEASURED_TOKENS // (samples * config.data.seq_len))
        batch = BatchShape(samples, config.data.seq_len, min(passes, cut))
        found = _measure(config, batch, seconds, timeout)
        speed = found.get("tokens_per_second")
        what = found.get("status", "") if speed is None else f"{speed:,.0f} tokens/s"
        name = f"{samples} x {passes}, recompute {candidate.row['recompute']}"
        say(f"plan: {len(measured) + 1} of {min(count, len(plan.candidates))}: {name}: {what}")
        measured.append(dataclasses.replace(candidate, measured=found))
    rest = plan.candidates[count:]
    ranked = sorted(measured, key=lambda one: -one.measured.get("tokens_per_second", 0.0))
    return dataclasses.replace(plan, candidates=(*ranked, *rest))


def _measure(config: RunConfig, batch: BatchShape, seconds: float, timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="z2a-plan-") as folder:
        source = Path(folder) / "config.yaml"
        source.write_text(config_yaml(config), encoding="utf-8")
        return run_child([source, "--row", ANCHOR, "--batch", batch, "--seconds", seconds], [], timeout)
