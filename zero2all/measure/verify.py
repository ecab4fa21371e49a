"""`z2a perf predict`: the prediction of a config for a machine; with `--verify`, a few real steps beside it."""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import say
from zero2all.config import RunConfig, config_yaml
from zero2all.estimate.machine import Machine
from zero2all.measure.calibrate import machine_for
from zero2all.measure.child import MEASURED, run_child
from zero2all.measure.machine_profiles import named_machine, profile_key, profile_path
from zero2all.parallel.device import pick_device, set_cpu_threads
from zero2all.predict.batch import BatchShape, load_measured_config
from zero2all.predict.layout_search import LayoutCandidate, LayoutPlan, config_of
from zero2all.predict.step_prediction import Prediction, check_asked, operators_for, predict

MILLISECONDS = 1e3
GIB = 2**30
MEASURED_TOKENS = 1 << 17
"""Of a measured iteration, about: a whole step of a large batch takes long and says no more."""
LEAST_SHOWN = 0.002  # of the step: a component smaller than this, predicted and measured, is left out


STEP, MEMORY = "step", "memory"


@dataclass(frozen=True)
class VerifiedPrediction:
    """A prediction and how it ended."""

    prediction: Prediction
    measured: dict[str, Any]  # of a real run (`measure.child`)

    def pairs(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured: seconds of a step, of its components, and bytes at the peak. BadInputError with the
        reason where nothing could be measured."""
        found, prediction = self.measured, self.prediction
        if found["status"] != MEASURED:
            expected = "it was expected to fit" if prediction.fits else "it was not expected to fit"
            raise BadInputError(f"The run could not be measured: {found['status']}: {found['reason']} ({expected}).")
        parts = {("idle" if name.startswith(("idle", "between")) else name): v for name, v in found["parts"].items()}
        components = {name: (prediction.components.get(name, 0.0), seconds) for name, seconds in parts.items()}
        memory = (prediction.peak_bytes, found["peak_bytes"])
        return {STEP: (prediction.step.estimate, found["step_seconds"]), MEMORY: memory, **components}

    def as_json(self) -> dict[str, Any]:
        """Prediction and measurement."""
        return {"prediction": self.prediction.as_json(), "measured": self.measured}


@dataclass(frozen=True)
class PredictionTarget:
    """The machine that a prediction is for: a cluster by name, the profile in a file, or (neither) this machine."""

    cluster: str | None = None
    profile: Path | None = None
    gpus: int = 1
    price: float | None = None
    """Of a GPU for an hour; None: the one of the data sheet."""


HERE = PredictionTarget()


@dataclass(frozen=True)
class ShortRun:
    """The real steps beside a prediction."""

    batch: BatchShape
    seconds: float
    timeout: float
    anatomy: bool = True


def prediction_for(
    config: RunConfig, batch: BatchShape | None, asked: PredictionTarget = HERE, runs_here: bool = False
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
    return predict(config, batch, machine, ops, sizes)


def verify(source: str, overrides: list[str], run: ShortRun, asked: PredictionTarget = HERE) -> VerifiedPrediction:
    """Predict and run."""
    if asked.cluster is not None or asked.gpus != 1:
        raise UsageError("--verify runs steps in one process of this machine: leave --cluster and --gpus out.")
    config, notes = load_measured_config(source, overrides)
    for note in notes:
        say(f"verify: {note}")
    prediction = prediction_for(config, run.batch, asked, runs_here=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = prediction.step.estimate
    say(f"verify: {seconds:.4g} s a step are predicted; real steps follow, for at most {run.timeout:g} s")
    return VerifiedPrediction(prediction, run_apart(source, overrides, run))


def run_apart(source: str, overrides: list[str], run: ShortRun) -> dict[str, Any]:
    """The figures of real steps in a process of their own, or how it ended."""
    words = [source, "--batch", run.batch, "--seconds", run.seconds, *([] if run.anatomy else ["--no-anatomy"])]
    return run_child(words, overrides, run.timeout)


def comparison(verified: VerifiedPrediction) -> list[list[str]]:
    """Predicted, measured and error, of the step, of its components and of the memory."""
    pairs, found = verified.pairs(), verified.measured
    step, memory = pairs.pop(STEP), pairs.pop(MEMORY)
    low, high = verified.prediction.step.interval
    verdict = [f"{100 * found['noise']:.1f} %", t("yes") if low <= step[1] <= high else t("no")]
    rows = [["component", "predicted", "measured", "error", "noise", "inside 90 %"]]
    rows.append([t("step, ms"), *_cells(step, MILLISECONDS, 2), *verdict])
    for name, pair in pairs.items():
        if max(pair) >= LEAST_SHOWN * step[1]:
            rows.append([f"  {t(name)}, ms", *_cells(pair, MILLISECONDS, 2), "", ""])
    rows.append([t("peak allocated, GiB"), *_cells(memory, 1 / GIB, 3), "", ""])
    if reserved := found.get("reserved_bytes"):
        pair = (verified.prediction.reserved_bytes, reserved)
        rows.append([t("peak reserved, GiB"), *_cells(pair, 1 / GIB, 3), "", ""])
    return rows


def _cells(pair: tuple[float, float], scale: float, digits: int) -> list[str]:
    predicted, measured = pair
    error = f"{100 * (predicted / measured - 1):+.1f} %" if measured > 0 else "–"
    return [f"{scale * predicted:,.{digits}f}", f"{scale * measured:,.{digits}f}", error]


def machine_line(machine: Machine) -> str:
    """What a prediction stands on, in one line."""
    return f"{machine.name}, {machine.source}: {len(machine.matmuls)} products, {len(machine.operators)} operators"


def measure_candidates(plan: LayoutPlan, count: int, seconds: float, timeout: float) -> LayoutPlan:
    """The best few on the GPU of this machine, each in its own process, on random tokens."""
    if plan.gpus != 1:
        raise UsageError(
            f"--measure runs steps in one process on one GPU, but --gpus is {plan.gpus}. Write the config of the best "
            f"with --out and run `z2a train` for a few steps instead."
        )
    measured: list[LayoutCandidate] = []
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
        return run_apart(str(source), [], ShortRun(batch, seconds, timeout, anatomy=False))
