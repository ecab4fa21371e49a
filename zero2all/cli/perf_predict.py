"""`z2a perf calibrate` and `predict`, which also checks a prediction by real steps."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.verb import share, verb, write_json_result
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.estimate.machine import Machine
    from zero2all.measure.calibrate import Calibration
    from zero2all.predict.step_prediction import Prediction

GIB = 2**30


share(
    """
    --batch BxTxA  samples per pass x tokens x passes per step, in each data-parallel process (default: its share of
        the config's)
    """,
    "BATCH",
)


@verb("""
    perf calibrate: measure what this machine can do, under sustained load, and keep it as a profile

    configs* CONFIG  models whose own shapes are measured: a preset, a YAML file, a run's folder, or a published model:
        llama-3.1-8b, mixtral-8x7b, … (default: z2all-1b, on a CPU quickstart)
    --seconds TIME:duration =180  begin no figure after this (default 180); the same command continues
    BATCH
    --again  measure everything again
    --profile FILE:out  file of the profile (default: by device in ~/.cache/zero2all/profiles)
    JSON
    --section.field

    z2a perf calibrate z2all-1b
    z2a perf calibrate z2all-1b z2all-moe --seconds 240
    """)
def _calibrate(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.measure.calibrate import calibrate, default_config
    from zero2all.predict.batch import check_batch, load_measured_config, own_batch, parse_batch

    configs = []
    for source in arguments.configs or [default_config()]:
        config, _ = load_measured_config(source, arguments.overrides)
        batch = own_batch(config) if arguments.batch is None else parse_batch(arguments.batch)
        check_batch(batch, config)
        configs.append((config, batch))
    found = calibrate(configs, arguments.seconds, arguments.again, arguments.profile)
    told = {"left": found.left, "failed": found.failed, "gpu": found.gpu, "anchors": found.anchors}
    if write_json_result(arguments.json, {"profile": str(found.path), **told}):
        return
    print_table(_profile_rows(found.machine), f"{found.machine.name}: {found.measured} figures measured")
    print("\n".join(_calibration_notes(found)))


def _profile_rows(machine: Machine) -> list[list[str]]:
    """The most telling figures of a profile."""
    rows = [
        ["what", "value"],
        [t("copy bandwidth (read and written)"), f"{machine.stream_bytes_per_second / 1e9:,.1f} GB/s"],
    ]
    for dtype in machine.peak_flops:
        own = [one for one in machine.matmuls if one.dtype == dtype]
        for kind in ("forward", "dgrad", "wgrad"):
            rates = [2e-12 * one.m * one.n * one.k / one.seconds for one in own if one.kind == kind]
            if rates:
                cells = f"{max(rates):,.4g} / {sum(rates) / len(rates):,.4g} TFLOPS, {len(rates)}"
                rows.append([t(f"{dtype} {kind}: best / mean, shapes"), cells])
    spreads = sorted(one.spread for one in machine.matmuls)
    rows.append([t("spread of a figure (IQR / median), median"), f"{100 * spreads[len(spreads) // 2]:.1f} %"])
    rows.append([t("shortest kernel"), f"{1e6 * machine.launch_seconds:.1f} µs"])
    rows.append([t("host, per operator"), f"{1e6 * machine.host_op_seconds:.1f} µs"])
    rows.append([t("rate under load / in a burst"), f"{machine.hot_over_cold:.3f}"])
    for name, curve in machine.copy.items():
        size, seconds = curve.points[-1]
        rows.append([t(f"copy {name}"), f"{size / seconds / 1e9:.1f} GB/s"])
    rows += [[t(f"memory: {name}"), f"{size / 2**20:,.0f} MiB"] for name, size in machine.overhead.items()]
    return [*rows, [t("power under load"), f"{machine.watts:.0f} W"]] if machine.watts else rows


def _calibration_notes(found: Calibration) -> list[str]:
    from zero2all.measure.calibrate import reasons

    lines = [t(f"profile: {found.path}")]
    for one in found.anchors.values():
        if one["sm_mhz"]:
            lines.append(t(f"clock in real steps: {one['sm_mhz']:.0f} MHz, {one['celsius']:.0f} °C"))
        lines.append(
            t(f"a real step: {one['seconds']:.4f} s; the sum of its figures before its clock: {one['predicted']:.4f} s")
        )
    lines += [t(f"not measured: {line}") for line in reasons(found.failed)]
    if found.left:
        lines.append(
            t(f"{len(found.left)} figures are left, from {found.left[0]} on. Run the same command again to continue.")
        )
    return lines


@verb("""
    perf predict: predict step time, tokens/s, MFU, memory, energy and cost of a run, from the profile of a machine

    MODEL_CONFIG
    BATCH
    MACHINE
    --gpus N:int>=1 =1  processes, one GPU each (default 1)
    --price USD:float>=0  price of a GPU for an hour, for the cost
    --verify  run a few real steps too, and compare
    --seconds TIME:duration =6  with --verify: measure about this long (default 6)
    --timeout TIME:duration =300  with --verify: stop the run after this (default 5m)
    JSON
    --section.field

    z2a perf predict z2all-1b --batch 16x2048x16
    z2a perf predict z2all-1b --cluster h100 --gpus 16 --parallel.zero 1 --price 2.5
    z2a perf predict z2all-1b --batch 16x2048x4 --verify
    """)
def _predict(arguments: argparse.Namespace) -> None:
    if arguments.verify:
        _verify(arguments)
        return
    from zero2all.cli.table import print_table
    from zero2all.measure.verify import PredictionTarget, prediction_for
    from zero2all.predict.batch import load_measured_config, parse_batch, precision_notes

    config, notes = load_measured_config(arguments.config, arguments.overrides)
    batch = None if arguments.batch is None else parse_batch(arguments.batch)
    asked = PredictionTarget(arguments.cluster, arguments.profile, arguments.gpus, arguments.price)
    found = prediction_for(config, batch, asked)
    if write_json_result(arguments.json, found.as_json()):
        return
    machine = found.machine
    if machine.multiprocessors:
        notes += precision_notes(config, arguments.config, arguments.overrides)
    on = f"{arguments.gpus} x {machine.name} ({t(machine.source)})"
    title = f"{arguments.config} on {on}, {config.train.precision}, batch {found.batch}"
    print_table(_prediction_rows(found), title)
    print_table(_part_rows(found), "seconds of a step by part, of one process")
    print("\n".join([*map(t, notes), *_prediction_notes(found)]))


def _prediction_rows(found: Prediction) -> list[list[str]]:
    from zero2all.common.progress import human_seconds

    step = found.step
    low, high = step.interval
    rows = [
        ["what", "value", "how"],
        [t("step, estimate"), f"{step.estimate:.4f} s", t("sum of the parts below")],
        [t("90 % interval"), f"{low:.4f} – {high:.4f} s", ""],
        [t("lower bound"), f"{step.lower:.4f} s", t("peak arithmetic and bandwidth, nothing waits")],
        [t("upper bound"), f"{step.upper:.4f} s", t("nothing hidden, slow kernels")],
        [t("tokens/s"), f"{step.tokens_per_second:,.0f}", t(f"{step.tokens:,} tokens a step, all processes")],
    ]
    for name, value in found.mfu.items():
        rows.append([t(f"MFU, {name}"), f"{100 * value:.1f} %", t("model FLOPs / (time x processes x peak)")])
    capacity = found.machine.memory_bytes
    run = f"{found.steps:,} steps, {found.budget_tokens / 1e9:.2f} B tokens; no failures, checkpoints, evaluation"
    rows += [
        [t("peak allocated"), f"{found.peak_bytes / GIB:.2f} GiB", t("per process, on the device")],
        [t("peak reserved"), f"{found.reserved_bytes / GIB:.2f} GiB", t("with what the allocator keeps")],
        [t("device in use"), f"{found.needed_bytes / GIB:.2f} GiB", t(f"of {capacity / GIB:.1f} GiB; with context")],
        [t("whole run"), human_seconds(found.run_seconds), t(run)],
    ]
    if found.machine.watts:
        power = t(f"{found.machine.watts:.0f} W x {found.settings.processes}, GPUs alone")
        rows.append([t("energy"), f"{found.joules / 3.6e6:,.1f} kWh", power])
    if found.cost is not None:
        hours = found.run_seconds / 3600 * found.settings.processes
        rows.append([t("cost"), f"{found.cost:,.2f} USD", f"{hours:,.1f} h x {found.machine.price_per_hour:g} USD"])
    return rows


def _part_rows(found: Prediction) -> list[list[str]]:
    rows = [["part", "lower", "estimate", "upper", "hidden time", "share", "TFLOP", "GB"]]
    for part in found.step.parts:
        figures = [f"{value:.4f}" for value in (part.lower, part.estimate, part.upper, part.hidden)]
        share = f"{100 * part.estimate / found.step.estimate:.1f} %"
        work = [f"{part.flops / 1e12:,.1f}" if part.flops else "", f"{part.bytes / 1e9:,.2f}" if part.bytes else ""]
        rows.append([t(part.name), *figures, share, *work])
    return rows


def _prediction_notes(found: Prediction) -> list[str]:
    lines = []
    if not found.fits:
        short = (found.needed_bytes - found.machine.memory_bytes) / GIB
        lines.append(t(f"It does not fit: {short:.1f} GiB are missing. `z2a perf memory` says what would make it fit."))
    if found.cost is None:
        lines.append(t("No cost: the price of a GPU is not known. Give it with --price."))
    if found.machine.left:
        lines.append(
            t(
                f"The profile is incomplete: {found.machine.left} figures were not measured, so the interval is wide. "
                f"Run `z2a perf calibrate` again."
            )
        )
    if found.machine.source != "measured":
        lines.append(t("From data sheets: within 10 to 20 %. `z2a perf calibrate` on the machine makes it closer."))
    return lines


def _verify(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.measure.verify import PredictionTarget, ShortRun, comparison, machine_line, verify
    from zero2all.predict.batch import load_measured_config, own_batch, parse_batch

    config, _ = load_measured_config(arguments.config, arguments.overrides)
    batch = own_batch(config) if arguments.batch is None else parse_batch(arguments.batch)
    asked = PredictionTarget(arguments.cluster, arguments.profile, arguments.gpus)
    run = ShortRun(batch, arguments.seconds, arguments.timeout)
    found = verify(arguments.config, arguments.overrides, run, asked)
    rows = comparison(found)
    if not write_json_result(arguments.json, found.as_json()):
        print_table(rows, f"{arguments.config}, batch {batch}: {machine_line(found.prediction.machine)}")
