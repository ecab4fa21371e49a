"""`z2a perf plan`: the layout of a run that is predicted to be fastest, why, and a config for it.

A layout says how a step is spread: sizes of the axes of the mesh, ZeRO stage, samples of a pass, recomputation,
schedule of the pipeline. `enumerate_layouts` lists those that a run accepts, by the very checks of its start
(`zero2all.parallel.check`); what the user sets holds. `Search` finds the fastest that fit. A layout takes at least what
its passes compute, which costs next to nothing to know, and by that alone most take longer than the best. Only the
others are predicted in full (`predict_step`, a millisecond each), and the memory of those is estimated that would be
shown if they fit (`estimate_memory`). On one GPU the best few can be measured
(`zero2all.measure.verify`).
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.config import RunConfig
from zero2all.estimate import step
from zero2all.estimate.machine import Machine
from zero2all.estimate.memory import ALLOWANCE, GIB, MemorySettings, estimate_memory
from zero2all.ops.registry import assume_gpu
from zero2all.packed.loader import rank_rows
from zero2all.parallel.check import RULES, check_spread
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.mesh import Mesh
from zero2all.train.micro_batch import memory_settings, stage_settings

MOST_SAMPLES, MOST_CONTEXT = 64, 16
"""Of what is searched; a larger number that the user sets holds."""
FIELDS = {
    **{
        name: f"parallel.{name}"
        for name in ("tensor", "pipeline", "context", "expert", "zero", "shard", "replicate", "schedule", "chunks")
    },
    "samples": "train.micro_batch_samples",
    "recompute": "train.recompute",
}
"""What is searched -> its field of the config."""
OUTER = ("zero", "shard", "replicate")
INNER: tuple[str, ...] = ("matmuls", "attention", "element-wise", "loss", "recompute", "bubble")
INNER += ("communication, tensor", "communication, context", "communication, expert")
"""Parts of a step that do not depend on OUTER."""
VARIED = ("tensor", "pipeline", "context", "expert", "zero", "samples", "recompute", "schedule")
Row = Mapping[str, int | str]


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that fits, with its prediction by the full model."""

    row: Row
    time: step.StepTime
    memory: float  # bytes of the fullest process
    measured: dict[str, Any] = field(default_factory=dict)  # by --measure

    @property
    def tokens_per_second(self) -> float:
        """Predicted, of all processes."""
        return self.time.tokens_per_second


@dataclass(frozen=True)
class LayoutPlan:
    """What `plan_layouts` found."""

    config: RunConfig
    machine: Machine
    gpus: int
    room: float  # bytes of a device that a layout may use
    candidates: tuple[LayoutCandidate, ...]  # the fastest first
    considered: int
    tried: int  # predicted in full
    fitting: int  # of those that were fast enough to look at their memory
    held: dict[str, int | str]  # fields that the user set, which all layouts have
    rejected: dict[str, int]  # rule, in the words of the first layout that breaks it -> layouts
    alternatives: tuple[str, ...]  # what the best with another value of one column costs, in words


def plan_layouts(
    config: RunConfig, gpus: int, machine: Machine, wanted: int = 10, overrides: Sequence[str] = ()
) -> LayoutPlan:
    """The fastest layouts of a config on so many GPUs of a machine. Fields that `overrides` set hold."""
    if gpus > 1 and machine.most_ranks < gpus:
        raise UsageError(
            f"{machine.name} has links for {machine.most_ranks} GPUs, but --gpus is {gpus}. Name a cluster with "
            f"--cluster."
        )
    held = held_columns(config, overrides)
    layouts, rejected = enumerate_layouts(config, gpus, machine.gpus_per_node, held)
    if not layouts and not rejected:  # what the user set makes no mesh of these GPUs, which a run says best
        check_spread(config, gpus)
    search = Search(config, machine, layouts)
    candidates = search.best(wanted)
    alternatives = tuple(explain_alternatives(search, candidates[0])) if candidates else ()
    rule = (
        f"does not fit into {search.room / GIB:.1f} GiB: the {machine.memory_bytes / GIB:.1f} GiB of {machine.name} "
        f"less {ALLOWANCE:.0%} for context, NCCL and gaps"
    )
    found = [candidate for candidate in search.known.values() if candidate is not None]
    rejected[rule] = len(search.known) - len(found)
    if not candidates:
        raise _no_layout(gpus, config.samples_per_step, rejected)
    set_by_user = {FIELDS[name]: value for name, value in held.items()}
    counts = (len(layouts), len(search.times), len(found))
    return LayoutPlan(
        config, machine, gpus, search.room, tuple(candidates), *counts, set_by_user, rejected, alternatives
    )


def _no_layout(gpus: int, rows: int, rejected: Mapping[str, int]) -> BadInputError:
    ranked = sorted(rejected.items(), key=lambda one: -one[1])
    counts = "\n".join(f"  {count:,}: {t(rule)}" for rule, count in ranked if count)
    return BadInputError(
        f"No layout of {rows} samples per step runs on {gpus} GPUs. Rules that layouts break:\n{counts}\n"
        f"Use more GPUs, a smaller model or data.seq_len, another train.tokens_per_step, or an optimizer with less "
        f"state."
    )


# ---- which layouts there are -----------------------------------------------------------------------------------------


def held_columns(config: RunConfig, overrides: Sequence[str]) -> dict[str, int | str]:
    """What the user set on the command line, which holds for all layouts."""
    given = {word.removeprefix("--").partition("=")[0] for word in overrides}
    values = {name: _value(config, path) for name, path in FIELDS.items() if path in given}
    return {name: value for name, value in values.items() if value != "auto"}


def _value(config: RunConfig, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def enumerate_layouts(
    config: RunConfig, gpus: int, most_tensor: int, held: Mapping[str, int | str]
) -> tuple[list[Row], dict[str, int]]:
    """The layouts of a step that a run accepts, and how many others break which of its rules."""
    model, rejected = config.model, dict[str, int]()
    found: list[Row] = []
    first_texts: dict[int, str] = {}  # by the number of the rule
    of_gpus = divisors(gpus)
    options: dict[str, list[Any]] = {
        "tensor": [one for one in of_gpus if one <= most_tensor],
        "context": [one for one in of_gpus if one <= MOST_CONTEXT],
        "pipeline": [one for one in of_gpus if one <= model.layers],
        "expert": divisors(model.moe.experts) if model.moe.experts else [1],
        "zero": [0, 1, 2, 3],
        "shard": of_gpus,
        "recompute": ["none", "selective", "full"],
        "schedule": ["1f1b", "gpipe", "interleaved", "zero_bubble"],
        "chunks": [1, 2, 4],
    }
    options |= {name: [value] for name, value in held.items()}
    for mesh in _meshes(gpus, options, held):
        sizes = sizes_of(mesh)
        own = rank_rows(config.samples_per_step, *config.batch_place(0, sizes.replicate * sizes.shard))[2]
        samples = [min(own, int(held["samples"]))] if "samples" in held else sizes_of_passes(own)
        for recompute in options["recompute"]:
            row = {**mesh, "recompute": recompute}
            spread = config_of(config, row)
            if spread.parallel.problems("parallel"):
                continue  # no config has these fields together, whatever the number of processes
            texts = [spread.parallel.size_problems(sizes, gpus), *(rule(spread, sizes) for rule in RULES)]
            broken = next((number for number, problems in enumerate(texts) if problems), None)
            if broken is not None:
                text = first_texts.setdefault(broken, texts[broken][0])
                rejected[text] = rejected.get(text, 0) + len(samples)
                continue
            found += [{**row, "samples": each, "passes": -(-own // each)} for each in samples]
    return found, rejected


def _meshes(gpus: int, options: Mapping[str, Sequence[Any]], held: Mapping[str, int | str]) -> Iterator[dict[str, Any]]:
    """Sizes of the axes, ZeRO stage and schedule that use all GPUs, each once."""
    for tensor, context, pipeline in itertools.product(*(options[name] for name in ("tensor", "context", "pipeline"))):
        left, rest = divmod(gpus, tensor * context * pipeline)
        if rest:
            continue
        schedules = [
            {"schedule": schedule, "chunks": chunks}
            for schedule, chunks in itertools.product(options["schedule"], options["chunks"])
            if (schedule == "interleaved") == (chunks > 1)
        ][: None if pipeline > 1 else 1]
        for expert, zero, shard in itertools.product(*(options[name] for name in ("expert", "zero", "shard"))):
            replicate, rest = divmod(left, shard)
            if rest or replicate != held.get("replicate", replicate):
                continue
            # Without anything to share, ZeRO is another name for zero 0.
            if bool(zero) != (shard > 1) and not (
                zero and shard == 1 and "zero" in held and (left == 1 or "shard" in held)
            ):
                continue
            mesh = {"tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert, "zero": zero}
            for schedule in schedules:
                yield {**mesh, "shard": shard, "replicate": replicate, **schedule}


def sizes_of(row: Row) -> MeshSizes:
    """The mesh of a layout."""
    return MeshSizes(**{one.name: int(row[one.name]) for one in dataclasses.fields(MeshSizes)})


def divisors(number: int) -> list[int]:
    """The numbers that divide `number`."""
    return [one for one in range(1, number + 1) if number % one == 0]


def sizes_of_passes(rows: int) -> list[int]:
    """Samples of a pass to try, of so many rows of a process: those that leave no pass shorter, and near each power of
    two the one that leaves the least."""
    powers = [1 << power for power in range(MOST_SAMPLES.bit_length())]
    near = {-(-rows // -(-rows // power)) for power in powers}
    return sorted(one for one in near | set(divisors(rows)) if one <= MOST_SAMPLES)


def config_of(config: RunConfig, row: Row) -> RunConfig:
    """The config of a layout, of as much of it as is decided."""
    changes: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}}
    for name, path in FIELDS.items():
        if name in row:
            section, field_name = path.split(".")
            changes[section][field_name] = row[name]
    parallel = dataclasses.replace(config.parallel, **changes["parallel"])
    return dataclasses.replace(config, parallel=parallel, train=dataclasses.replace(config.train, **changes["train"]))


# ---- the fastest that fit --------------------------------------------------------------------------------------------


class Search:
    """The fastest of many layouts that fit, exactly as if all of them had been predicted."""

    def __init__(self, config: RunConfig, machine: Machine, layouts: Sequence[Row]) -> None:
        self.config, self.machine, self.layouts = config, machine, layouts
        self.room = machine.memory_bytes * (1 - ALLOWANCE)
        self.known: dict[int, LayoutCandidate | None] = {}
        """Layouts whose memory was estimated; None: it does not fit."""
        self._ops = assume_gpu(config.ops, config.data.document_mask)
        self._workspace = machine.overhead.get("workspace", 0.0)
        alone = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **ALONE))
        self._settings = memory_settings(alone, self._ops, Mesh(MeshSizes()), 1, self._workspace)
        self._costs: dict[Any, tuple[step.PassCosts, MemorySettings]] = {}
        self._of_pass: dict[Any, tuple[float, float]] = {}
        self.times: dict[int, step.StepTime] = {}
        """Layouts that were predicted in full."""
        self._learned: dict[Any, float] = {}  # layout without OUTER -> seconds of INNER
        self._least = [self._least_seconds(row) for row in layouts]

    def best(self, wanted: int, column: str | None = None, value: int | str | None = None) -> list[LayoutCandidate]:
        """The fastest that fit, among those with this value in a column: taken in the order of their time, of which at
        first only the least is known."""
        found: list[LayoutCandidate] = []
        left = [
            (self.times[number].estimate if number in self.times else self._least[number], number)
            for number, row in enumerate(self.layouts)
            if column is None or row[column] == value
        ]
        heapq.heapify(left)
        while left and len(found) < wanted:
            seconds, number = heapq.heappop(left)
            if number not in self.times:
                alike = tuple(value for name, value in self.layouts[number].items() if name not in OUTER)
                if seconds >= self._learned.get(alike, 0.0):
                    self.times[number] = time = self._predicted(self.layouts[number])
                    inner = (*INNER, "host") if self._is_never_captured(self.layouts[number]) else INNER
                    self._learned[alike] = math.fsum(part.estimate for part in time.parts if part.name in inner)
                    seconds = time.estimate
                heapq.heappush(left, (max(seconds, self._learned[alike]), number))
                continue
            if number not in self.known:
                row, memory = self.layouts[number], self._memory(self.layouts[number])
                self.known[number] = None if memory is None else LayoutCandidate(row, self.times[number], memory)
            candidate = self.known[number]
            found += [] if candidate is None else [candidate]
        return found

    def _pass_costs(self, row: Row) -> tuple[Any, step.PassCosts, MemorySettings]:
        """The costs of a pass; a layout matters to them only by the tokens, context and samples of a process."""
        tokens = int(row["samples"]) * self.config.data.seq_len // int(row["context"])
        key = (row["tensor"], row["expert"], row["recompute"], tokens)
        if key not in self._costs:
            values: dict[str, Any] = {name: row[name] for name in ("tensor", "expert", "recompute", "context")}
            here = dataclasses.replace(self._settings, micro_batch_samples=int(row["samples"]), **values)
            self._costs[key] = step.pass_costs(self.config.model, here, self.machine), here
        return key, *self._costs[key]

    def _least_seconds(self, row: Row) -> float:
        """What the passes compute, or the host queues, and how long a pipeline fills: a step takes no less. A measured
        machine's clock depends on the whole step, so there nothing is known before."""
        if self.machine.draw:
            return 0.0
        key, costs, settings = self._pass_costs(row)
        key = (key, row["pipeline"], row["schedule"], row["chunks"])
        if key not in self._of_pass:
            model, here = self.config.model, dataclasses.replace(settings, pipeline=int(row["pipeline"]))
            slowest = step.slowest_stage(model, here, costs, str(row["schedule"]), int(row["chunks"]))
            seconds = slowest.layers * (costs.block + costs.again.seconds * step.recomputed_share(model, here))
            seconds += slowest.has_embedding * costs.embedding.seconds + slowest.has_head * costs.head.seconds
            queued = step.queueing_seconds(here, self.machine, slowest.layers) if self._is_never_captured(row) else 0.0
            self._of_pass[key] = max(seconds, queued), slowest.fill
        seconds, fill = self._of_pass[key]
        return int(row["passes"]) * seconds + fill

    def _is_never_captured(self, row: Row) -> bool:
        """Whether the host queues every pass, with whatever ZeRO stage."""
        axes = ("tensor", "context", "pipeline", "expert")
        return bool(self.config.model.moe.experts) or max(int(row[name]) for name in axes) > 1

    def _predicted(self, row: Row) -> step.StepTime:
        config, model = config_of(self.config, row), self.config.model
        settings = memory_settings(config, self._ops, Mesh(sizes_of(row)), int(row["samples"]), self._workspace)
        captured = not config.parallel.every_pass_communicates and config.train.cuda_graph != "off"
        order = step.PassOrder(config.parallel.schedule, config.parallel.chunks, captured and not model.moe.experts)
        tokens = config.train.tokens_per_step // config.groups
        return step.predict_step(model, settings, self.machine, order, tokens, self._pass_costs(row)[1])

    def _memory(self, row: Row) -> float | None:
        """Bytes of the fullest process; None: they are not there."""
        config, most = config_of(self.config, row), 0.0
        for settings in stage_settings(config, self._ops, sizes_of(row), int(row["samples"]), self._workspace):
            most = max(most, estimate_memory(config.model, settings).total)
            if most > self.room:
                return None
        return most


ALONE: dict[str, Any] = {
    **dict.fromkeys(("replicate", "shard", "pipeline", "context", "tensor", "expert", "chunks"), 1),
    "schedule": "1f1b",
    "zero": 0,
}


# ---- why -------------------------------------------------------------------------------------------------------------


def explain_alternatives(search: Search, best: LayoutCandidate) -> Iterator[str]:
    """For each column: the best layout that has another value there, how much slower it is, and which part of the
    step grows most; or that none with that value fits."""
    for name in VARIED:
        for value in sorted({row[name] for row in search.layouts} - {best.row[name]}):
            words, found = f"{name} {value}", search.best(1, name, value)
            if not found:
                yield t(f"{words}: no layout with it fits")
                continue
            slower = found[0].time.estimate / best.time.estimate - 1
            part, seconds = max(time_differences(best, found[0]), key=lambda one: one[1])
            yield t(f"{words}: its best layout is {slower:.1%} slower ({t(part)} {1e3 * seconds:+.1f} ms)")


def time_differences(first: LayoutCandidate, second: LayoutCandidate) -> list[tuple[str, float]]:
    """How many seconds longer each part of the second one's step takes, the largest differences first."""
    names = dict.fromkeys(part.name for one in (first, second) for part in one.time.parts)
    gains = {name: second.time.seconds(name) - first.time.seconds(name) for name in names}
    return sorted(gains.items(), key=lambda one: -abs(one[1]))


def compare(first: LayoutCandidate, second: LayoutCandidate) -> str:
    """What makes the first faster, in words."""
    terms = ", ".join(f"{t(name)} {-1e3 * gain:+.1f} ms" for name, gain in time_differences(first, second)[:2])
    return t(f"{second.time.estimate / first.time.estimate - 1:.1%} faster: {terms}")


# ---- measure and write -----------------------------------------------------------------------------------------------


def plan_json(plan: LayoutPlan) -> dict[str, Any]:
    """The plan as JSON values: seconds, bytes, tokens/s of all GPUs."""
    return {
        "machine": plan.machine.name,
        "source": plan.machine.source,
        "gpus": plan.gpus,
        "room_bytes": plan.room,
        "layouts": plan.considered,
        "tried": plan.tried,
        "fitting": plan.fitting,
        "held": plan.held,
        "rejected": plan.rejected,
        "alternatives": list(plan.alternatives),
        "candidates": [
            {
                **candidate.row,
                "seconds": candidate.time.estimate,
                "lower": candidate.time.lower,
                "upper": candidate.time.upper,
                "interval_90": list(candidate.time.interval),
                "tokens_per_second": candidate.tokens_per_second,
                "mfu": candidate.time.mfu,
                "memory_bytes": candidate.memory,
                "parts": [dataclasses.asdict(part) for part in candidate.time.parts],
                "measured": candidate.measured or None,
            }
            for candidate in plan.candidates
        ],
    }


def plan_cells(candidates: Sequence[LayoutCandidate]) -> list[list[str]]:
    """A table of layouts."""
    heading = ["", "tp", "pp", "cp", "ep", "zero", "shard x replicate", "samples x passes", "recompute", "schedule"]
    heading += ["s per step", "90 %", "tokens/s", "MFU", "GiB"]
    with_measured = any(one.measured for one in candidates)
    rows = [heading + (["measured tokens/s"] if with_measured else [])]
    for number, one in enumerate(candidates, 1):
        row, time = one.row, one.time
        schedule = f"{row['schedule']} x{row['chunks']}" if int(row["chunks"]) > 1 else str(row["schedule"])
        cells = [
            *(str(number), str(row["tensor"]), str(row["pipeline"]), str(row["context"]), str(row["expert"])),
            *(str(row["zero"]), f"{row['shard']} x {row['replicate']}", f"{row['samples']} x {row['passes']}"),
            *(str(row["recompute"]), schedule if int(row["pipeline"]) > 1 else "-"),
            *(f"{time.estimate:.4g}", f"{time.interval[0]:.4g} - {time.interval[1]:.4g}"),
            *(f"{time.tokens_per_second:,.0f}", f"{time.mfu['causal']:.1%}", f"{one.memory / GIB:.1f}"),
        ]
        if with_measured:
            cells.append(f"{one.measured['tokens_per_second']:,.0f}" if "tokens_per_second" in one.measured else "-")
        rows.append(cells)
    return rows
