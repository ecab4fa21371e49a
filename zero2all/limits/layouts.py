"""The time and the memory of many layouts at once, with numpy: a hundred thousand in about a second.

A layout says how a step is spread: sizes of the axes of the mesh, ZeRO stage, samples of a pass, recomputation,
schedule of the pipeline. `enumerate_layouts` lists those that the rules of `zero2all.parallel.check` allow and counts
the others by the rule they break. `predict_layouts` adds time and memory. What a pass costs
(`zero2all.limits.step.pass_costs`) and needs (`estimate_memory`) is computed once for each combination of what it
depends on; the rest is arithmetic on columns:

    step    = passes x blocks of the slowest stage + fill of the pipeline + communication + update + host
    memory  = at zero 0, bilinear in the blocks of a stage and the micro-batches in flight, + what ZeRO changes

Collectives are priced by the formulas of links, without measured curves, copies of norms are not told apart, and
nothing is captured in a graph: so `predict_step` and `estimate_memory` have the last word about the layouts that are
shown.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zero2all.limits.flops import recomputed_blocks
from zero2all.limits.held import HeldStage, expert_values
from zero2all.limits.machine import Machine, link_seconds
from zero2all.limits.memory import WIDTHS, MemorySettings
from zero2all.limits.pass_memory import PassMemory, pass_memory
from zero2all.limits.state_memory import state_parts
from zero2all.limits.step import (
    BUBBLE_KEPT,
    HOST_OPS_PER_BLOCK,
    OVERLAP_COST,
    again_cost,
    head_in_blocks,
    pass_costs,
    stage_blocks,
)
from zero2all.model.config import ModelConfig, parameter_counts

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
RECOMPUTES = ("none", "selective", "full")
COLUMNS = (
    *("tensor", "context", "pipeline", "expert", "zero", "shard", "replicate", "samples", "passes"),
    *("recompute", "schedule", "chunks"),
)
TOKEN_NODES = (4096, 16384)
"""Tokens of a pass at which memory is computed, beside the fewest and the most that occur."""
UPDATE_BYTES = 28.0 + 4.0 + 4.0
"""AdamW, norm and clearing of the gradients, for each parameter."""


@dataclass(frozen=True)
class Layouts:
    """Columns of equal length; `recompute` and `schedule` are places in RECOMPUTES and SCHEDULES."""

    columns: Mapping[str, Whole]

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    def __getitem__(self, name: str) -> Whole:
        return self.columns[name]

    def only(self, which: npt.NDArray[np.bool_] | Whole) -> Layouts:
        """Some of them."""
        return Layouts({name: column[which] for name, column in self.columns.items()})

    def row(self, number: int) -> dict[str, int | str]:
        """One of them, with names."""
        found: dict[str, int | str] = {name: int(column[number]) for name, column in self.columns.items()}
        found["recompute"] = RECOMPUTES[int(self["recompute"][number])]
        found["schedule"] = SCHEDULES[int(self["schedule"][number])]
        return found


def settings_of(settings: MemorySettings, row: Mapping[str, int | str], model: ModelConfig) -> MemorySettings:
    """The settings of one layout; of a pipeline, those of all of the model."""
    values = {name: row[name] for name in ("tensor", "context", "pipeline", "expert", "shard", "replicate", "passes")}
    heads = model.heads // int(row["tensor"])
    return dataclasses.replace(
        settings,
        **values,  # type: ignore[arg-type]
        micro_batch_samples=int(row["samples"]),
        zero=int(row["zero"]) if int(row["shard"]) > 1 else 0,
        recompute=str(row["recompute"]),
        context_method="gather" if heads % int(row["context"]) else "ulysses",
        stage=None,
        owned=None,
    )


# ---- which layouts there are -----------------------------------------------------------------------------------------


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`."""
    return [1 << power for power in range(max(1, limit).bit_length())]


def divisors(number: int) -> list[int]:
    """The numbers that divide `number`."""
    return [one for one in range(1, number + 1) if number % one == 0]


def enumerate_layouts(
    model: ModelConfig,
    gpus: int,
    rows: int,
    seq_len: int,
    most_tensor: int,
    fixed: Mapping[str, Iterable[int]] | None = None,
) -> tuple[Layouts, dict[str, int]]:
    """The layouts of a step of `rows` samples on so many GPUs, and how many others break which rule. `fixed`: the only
    values of a column to try. Micro-batches and experts are tried at the divisors of what they divide."""
    given = {name: list(values) for name, values in (fixed or {}).items()}
    options = {
        "tensor": powers(min(gpus, 2 * most_tensor)),
        "context": powers(min(gpus, 16)),
        "pipeline": [one for one in divisors(gpus) if one <= 2 * model.layers],
        "expert": divisors(model.moe.experts) if model.moe.experts else [1],
        "zero": [0, 1, 2, 3],
        "shard": divisors(gpus),
        "samples": [one for one in divisors(rows) if one <= 64],
        "recompute": list(range(len(RECOMPUTES))),
        "schedule": list(range(len(SCHEDULES))),
        "chunks": [1, 2, 4],
    } | given
    meshes, rejected = _meshes(model, gpus, rows, seq_len, most_tensor, options)
    inner = ("samples", "recompute", "schedule", "chunks")
    tail = np.array(list(itertools.product(*(options[name] for name in inner))), dtype=np.int64).T
    count = tail.shape[1]
    columns = {name: np.repeat(column, count) for name, column in meshes.items()}
    columns |= {name: np.tile(values, len(meshes["tensor"])) for name, values in zip(inner, tail, strict=True)}
    batch = columns["replicate"] * columns["shard"]
    columns["passes"] = np.maximum(1, rows // (batch * columns["samples"]))
    is_piped, interleaves = columns["pipeline"] > 1, columns["schedule"] == SCHEDULES.index("interleaved")
    zero_bubble = columns["schedule"] == SCHEDULES.index("zero_bubble")
    rules: list[tuple[str, npt.NDArray[np.bool_]]] = [
        ("", ~is_piped & ((columns["schedule"] > 0) | (columns["chunks"] > 1))),
        ("", is_piped & (interleaves != (columns["chunks"] > 1))),
        (
            "samples of a step are not a multiple of batch ranks x samples of a pass",
            (rows % (batch * columns["samples"])) != 0,
        ),
        ("more stages than blocks (pipeline x chunks)", columns["pipeline"] * columns["chunks"] > model.layers),
        ("zero_bubble does not work with zero 3", is_piped & zero_bubble & (columns["zero"] == 3)),
        ("fewer micro-batches than stages leave a pipeline idle", is_piped & (columns["passes"] < columns["pipeline"])),
    ]
    keep = _apply(rules, rejected, np.ones(len(columns["tensor"]), dtype=bool))
    return Layouts({name: columns[name][keep] for name in COLUMNS}), rejected


def _apply(
    rules: Sequence[tuple[str, npt.NDArray[np.bool_]]], rejected: dict[str, int], keep: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """What breaks no rule; a layout counts for the first that it breaks. Rules without a name only avoid repetition."""
    for rule, broken in rules:
        count = int((keep & broken).sum())
        if rule and count:
            rejected[rule] = rejected.get(rule, 0) + count
        keep = keep & ~broken
    return keep


def _meshes(
    model: ModelConfig, gpus: int, rows: int, seq_len: int, most_tensor: int, options: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Whole], dict[str, int]]:
    """Sizes of the axes and ZeRO stage."""
    names = ("tensor", "context", "pipeline", "expert", "zero", "shard")
    grid = np.array(list(itertools.product(*(options[name] for name in names))), dtype=np.int64).T
    t, c, p, e, zero, shard = grid
    of_model = t * c * p
    left = np.maximum(1, gpus // of_model)
    sizes = [("heads", model.heads)] + (
        [("inner width", model.intermediate_size)] if model.expert_layers < model.layers else []
    )
    rejected: dict[str, int] = {}
    rules = [
        ("", (gpus % of_model != 0) | (left % shard != 0)),  # other numbers of GPUs
        ("", ((zero == 0) & (shard > 1)) | ((zero > 0) & (shard == 1))),
        *((f"{name} of the model is not a multiple of tensor", size % t != 0) for name, size in sizes),
        ("fewer kv heads than tensor ranks", model.kv_heads % t != 0),
        ("rows of the vocabulary are not a multiple of tensor", model.vocab_rows % t != 0),
        ("tensor ranks would talk over the network", t > most_tensor),
        ("a sequence is not a multiple of 2 x context x tensor", seq_len % (2 * c * t) != 0),
        ("tied embeddings do not work with a pipeline", (p > 1) & model.tied_embeddings),
        ("expert does not divide shard x context x tensor", (shard * c * t) % e != 0),
        ("zero 2 does not work with a pipeline", (zero == 2) & (p > 1)),
        ("zero 3 does not work with expert or tensor in a model with experts", _zero3_with_experts(model, zero, e, t)),
        ("fewer samples in a step than batch ranks", rows < left),
    ]
    keep = _apply(rules, rejected, np.ones(len(t), dtype=bool))
    found = {name: column[keep] for name, column in zip(names, grid, strict=True)}
    found["replicate"] = (left // shard)[keep]
    return found, rejected


def _zero3_with_experts(model: ModelConfig, zero: Whole, expert: Whole, tensor: Whole) -> npt.NDArray[np.bool_]:
    if not model.moe.experts:
        return np.zeros(len(zero), dtype=bool)
    return np.asarray((zero == 3) & (np.maximum(expert, tensor) > 1))


# ---- time and memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutTimes:
    """Of every layout, in its order."""

    layouts: Layouts
    seconds: Floats  # of a step
    memory: Floats  # bytes of the fullest process
    parts: Mapping[str, Floats]  # seconds
    tokens: int  # of a step

    @property
    def tokens_per_second(self) -> Floats:
        """Of all processes."""
        return self.tokens / self.seconds


def predict_layouts(model: ModelConfig, settings: MemorySettings, machine: Machine, layouts: Layouts) -> LayoutTimes:
    """Time and memory; `settings` gives precision, operators, optimizer and sequence length."""
    given, layouts = layouts, _with_derived(model, settings, layouts)
    costs = _by_key(layouts, PASS_KEYS, lambda row: _pass_row(model, settings, machine, row))
    forward, backward, embedding, head, *agains = costs.T
    again = np.choose(layouts["recompute"], agains)
    stages = _by_key(layouts, ("pipeline", "chunks"), lambda row: _stage_row(model, settings, row))
    others, last = stages.T
    v, p, m = layouts["chunks"], layouts["pipeline"], layouts["passes"]
    share = np.array([recomputed_blocks(model, kind, 1) / model.layers for kind in RECOMPUTES])[layouts["recompute"]]
    block = forward + backward + again * share
    at_last, at_first = last * block + head + (v - 1) * others * block, v * others * block + embedding
    whole = model.layers * block + head + embedding
    is_piped, ends_last = p > 1, at_last >= at_first
    of_pass = np.where(is_piped, np.maximum(at_last, at_first), whole)
    layers = np.where(is_piped, np.where(ends_last, last + (v - 1) * others, v * others), model.layers)
    kept = np.array([BUBBLE_KEPT[name] for name in SCHEDULES])[layouts["schedule"]]
    bubble = np.where(is_piped, np.maximum(0.0, whole - of_pass) / v * kept, 0.0)
    device = m * of_pass
    tables = np.where(is_piped, 1, 1 if model.tied_embeddings else 2)
    windows = _Windows(device, m * layers * forward, device - m * layers * forward, layers)
    parts = {"compute": device, "bubble": bubble}
    parts |= _communication(model, settings, machine, layouts, windows, layers, tables)
    dense, experts = _values(model, layouts, layers, tables)
    shard = np.where(layouts["zero"] > 0, layouts["shard"], 1)
    expert_shard = np.where(layouts["zero"] > 0, _expert_shard(layouts), 1)
    owned = dense / shard + experts / expert_shard
    parts["optimizer"] = UPDATE_BYTES * owned / (0.9 * machine.stream_bytes_per_second)
    queueing = machine.host_op_seconds * HOST_OPS_PER_BLOCK * layers * m
    queueing = queueing * np.array([1.0, 1.2, 1.5])[layouts["recompute"]]
    captured = ~is_piped & (layouts["tensor"] * layouts["context"] * layouts["expert"] == 1) & (layouts["zero"] < 2)
    captured &= model.moe.experts == 0
    parts["host"] = np.where(captured, 0.0, np.maximum(0.0, queueing - device))
    tokens = int(m[0] * layouts["samples"][0] * layouts["replicate"][0] * layouts["shard"][0]) * settings.seq_len
    return LayoutTimes(given, sum(parts.values()), _memory(model, settings, layouts), parts, tokens)


PASS_KEYS = ("tensor", "expert", "tokens")
"""What a pass depends on: of context and samples only the tokens of a process."""


def _with_derived(model: ModelConfig, settings: MemorySettings, layouts: Layouts) -> Layouts:
    """With columns of what several combinations have in common."""
    context, kv_heads = layouts["context"], np.maximum(1, model.kv_heads // layouts["tensor"])
    is_gather = (model.heads // layouts["tensor"]) % context != 0
    copies = np.where(is_gather, context, np.lcm(kv_heads, context) // kv_heads)
    owners = _expert_shard(layouts) if model.moe.experts else np.ones_like(context)
    tokens = layouts["samples"] * settings.seq_len // context
    return Layouts({**layouts.columns, "tokens": tokens, "kv_copies": copies, "expert_shard": owners})


def _by_key(layouts: Layouts, names: Sequence[str], find: Callable[[dict[str, int | str]], Sequence[float]]) -> Floats:
    """`find` for each different combination of these columns, then one row per layout."""
    keys = np.zeros(len(layouts), dtype=np.int64)
    for name in names:
        keys = keys * (int(layouts[name].max(initial=0)) + 1) + layouts[name]
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    table = np.array([find(layouts.row(int(number))) for number in first], dtype=np.float64)
    return table[inverse.reshape(-1)]


def _pass_row(
    model: ModelConfig, settings: MemorySettings, machine: Machine, row: Mapping[str, int | str]
) -> list[float]:
    here = settings_of(settings, {**row, "recompute": "none"}, model)
    costs = pass_costs(model, here, machine)
    sums = [sum(cost.seconds for cost in kind.values()) for kind in (costs.forward, costs.backward)]
    kinds = [dataclasses.replace(here, recompute=kind) for kind in RECOMPUTES]
    again = [again_cost(model, kind, costs.forward, machine).seconds for kind in kinds]
    return [*sums, costs.embedding.seconds, costs.head.seconds, *again]


def _stage_row(model: ModelConfig, settings: MemorySettings, row: Mapping[str, int | str]) -> tuple[float, float]:
    stages = int(row["pipeline"]) * int(row["chunks"])
    return stage_blocks(model.layers, stages, head_in_blocks(model, settings.seq_len))


@dataclass(frozen=True)
class _Windows:
    """Seconds of a step beside which collectives can run."""

    device: Floats
    forward: Floats
    backward: Floats
    layers: Floats


def _expert_shard(layouts: Layouts) -> Whole:
    return np.maximum(1, layouts["shard"] * layouts["context"] * layouts["tensor"] // layouts["expert"])


def _values(model: ModelConfig, layouts: Layouts, layers: Floats, tables: Whole) -> tuple[Floats, Floats]:
    """Parameters that a process holds: without experts, and those of experts."""
    counts = parameter_counts(model)
    experts = expert_values(model) / model.layers
    block = (counts["blocks"] - expert_values(model)) / model.layers
    dense = (layers * block + tables * counts["embedding"]) / layouts["tensor"]
    return dense, layers * experts / layouts["expert"]


def _communication(
    model: ModelConfig,
    settings: MemorySettings,
    machine: Machine,
    layouts: Layouts,
    windows: _Windows,
    layers: Floats,
    tables: Whole,
) -> dict[str, Floats]:
    """Exposed seconds by axis (`zero2all.limits.communication` has the formulas)."""
    if (
        not machine.links
        or max(int(layouts[name].max()) for name in ("tensor", "context", "pipeline", "shard", "replicate")) == 1
    ):
        return {}
    t, c, p, e = (layouts[name] for name in ("tensor", "context", "pipeline", "expert"))
    shard, replicate, zero, m = (layouts[name] for name in ("shard", "replicate", "zero", "passes"))
    width = WIDTHS[settings.precision]
    tokens = layouts["samples"] * settings.seq_len // c
    again = np.array([recomputed_blocks(model, kind, 1) / model.layers for kind in RECOMPUTES])[layouts["recompute"]]
    most = 1 - 1 / np.maximum(2, layers)
    dense, experts = _values(model, layouts, layers, tables)
    is_fsdp = zero == 3
    dense = np.where(is_fsdp, dense + experts, dense)

    def spent(kind: str, whole: Floats, calls: Any, ranks: Whole, span: Whole, window: Any) -> Floats:
        rate, latency = _links(machine, ranks, span)
        one = link_seconds(kind, whole / calls, ranks, rate, latency, _log2, np.minimum) + machine.launch_seconds
        seconds = np.where((ranks > 1) & (whole > 0), calls * one, 0.0)
        hidden = np.minimum(np.maximum(0.0, seconds - one), window) * (1 - OVERLAP_COST)
        return np.asarray(seconds - hidden)

    def calls_of(whole: Floats) -> Floats:
        piece = np.where(is_fsdp, np.maximum(1.0, whole / np.maximum(1.0, layers * m)), settings.bucket_bytes)
        return np.maximum(1.0, whole / piece)

    span_shard, span_replicate = t * c * shard, t * c * shard * replicate
    gradients = settings.gradient_bytes * dense * np.where(zero == 2, m, 1)
    last = np.where(p > 1, 0.0, most * windows.backward / np.where(zero == 2, 1, m)) * settings.overlap
    own = gradients / np.where(zero > 0, shard, 1)
    outer = replicate * c
    found = {
        "shard": spent(
            "reduce-scatter", np.where(zero > 0, gradients, 0.0), calls_of(gradients), shard, span_shard, last
        )
        + spent(
            "all-gather",
            np.where(zero > 0, width * dense * np.where(is_fsdp, 2 * m, 1), 0.0),
            calls_of(width * dense * np.where(is_fsdp, 2 * m, 1)),
            shard,
            span_shard,
            np.where(is_fsdp, most * windows.device, most * windows.forward / m),
        ),
        "replicate": spent(
            "all-reduce", own, calls_of(own), outer, np.where(replicate > 1, span_replicate, t * c), last
        ),
    }
    states = (tokens * model.hidden_size * width).astype(np.float64)
    dense_share = 1 - model.expert_layers / model.layers
    rounds = layers * (2 + 2 * dense_share + again * (1 + dense_share)) + 1
    found["tensor"] = spent("all-gather", rounds * m * states, rounds * m, t, t, 0.0) + spent(
        "reduce-scatter", (rounds - layers * again * dense_share) * m * states, rounds * m, t, t, 0.0
    )
    of_head = m * layers * (2 + again) * tokens * model.head_size * width
    keys = 2.0 * np.maximum(model.kv_heads // t, 1) * layouts["kv_copies"]
    is_gather = (model.heads // t) % c != 0
    found["context"] = np.where(
        is_gather,
        spent("all-gather", of_head * keys, 2.0 * m * layers, c, t * c, 0.0),
        spent("all-to-all", of_head * (2.0 * model.heads / t + keys), 4.0 * m * layers, c, t * c, 0.0),
    )
    if model.expert_layers:
        pairs = m * tokens / t * model.moe.experts_per_token * layers * model.expert_layers / model.layers
        found["expert"] = spent(
            "all-to-all", (2 + again) * pairs * (2 * model.hidden_size * width + 4), 4.0 * m * layers, e, e, 0.0
        )
        of_experts = np.where(is_fsdp, 0.0, settings.gradient_bytes * experts * np.where(zero == 2, m, 1))
        owners = _expert_shard(layouts)
        found["expert"] = found["expert"] + spent(
            "all-reduce", of_experts, calls_of(of_experts), owners, owners * e, last
        )
    sends = np.maximum(1, 2 * layouts["chunks"] - 1)
    sent = m * sends * states / t
    window = np.where(m > p, most * windows.device, 0.0)
    found["pipeline"] = np.where(p > 1, spent("send", sent, m * sends * 1.0, p, span_replicate * p, window), 0.0)
    return found


def _log2(ranks: Whole) -> Floats:
    return np.log2(np.maximum(2, ranks))


def _links(machine: Machine, ranks: Whole, span: Whole) -> tuple[Floats, Floats]:
    """Bytes/s and latency of the link that joins processes which lie so far apart (`Machine.link_of`)."""
    inside, outside = machine.links[0], machine.links[-1]
    is_inside = (span <= inside.ranks) | (inside.ranks == 0)
    together = np.maximum(1, inside.ranks // np.maximum(1, span // np.maximum(1, ranks)))
    rate = np.where(
        is_inside, inside.bytes_per_second, np.minimum(inside.bytes_per_second, together * outside.bytes_per_second)
    )
    return rate, np.where(is_inside, inside.latency, outside.latency)


# ---- memory ----------------------------------------------------------------------------------------------------------


def in_flight(schedule: str, pipeline: int, chunks: int, passes: int, is_last: bool) -> float:
    """Micro-batches whose activations the first or the last process keeps, counted in all of its blocks."""
    if schedule == "gpipe":
        return float(passes)
    if schedule == "interleaved":
        filling = (chunks - 1) * pipeline + 1 + (0 if is_last else 2 * (pipeline - 1))
        return min(filling / chunks, float(passes))
    kept = pipeline if schedule == "zero_bubble" or not is_last else 1
    return float(min(kept, passes))


def _memory(model: ModelConfig, settings: MemorySettings, layouts: Layouts) -> Floats:
    """Of the first and the last process of a pipeline, the fuller one: what is there all the time, and what a pass
    needs (as `estimate_memory` adds them)."""
    if not len(layouts):
        return np.zeros(0)
    stages = _by_key(layouts, ("pipeline", "chunks"), lambda row: _stage_row(model, settings, row))
    found = np.zeros(len(layouts))
    for is_last in (True, False):
        which = np.arange(len(layouts)) if is_last else np.flatnonzero(layouts["pipeline"] > 1)
        if not len(which):
            continue
        piped = (layouts["pipeline"][which] > 1).astype(np.int64)
        accumulates = ((layouts["passes"][which] > 1) & (layouts["zero"][which] == 3)).astype(np.int64)
        here = Layouts({**layouts.only(which).columns, "piped": piped, "accumulates": accumulates})
        chunks, (others, last) = here["chunks"], stages[which].T
        layers = np.where(piped, last + (chunks - 1) * others if is_last else chunks * others, model.layers)
        more = layers - np.where(piped, 1, model.layers)  # blocks beyond those of the tables
        found[which] = np.maximum(
            found[which],
            _states(model, settings, here, more, is_last) + _passes(model, settings, here, more, is_last),
        )
    return found


def _ends(row: Mapping[str, int | str], is_last: bool) -> tuple[bool, bool]:
    """Whether a process has the embedding and the head."""
    return not row["piped"] or not is_last, not row["piped"] or is_last


def _held(
    model: ModelConfig, settings: MemorySettings, row: Mapping[str, int | str], is_last: bool
) -> list[MemorySettings]:
    """The settings of a process with one and with two blocks; without a pipeline, with all of them."""
    here = settings_of(settings, {**row, "pipeline": 1}, model)
    if not row["piped"]:
        return [here]
    return [
        dataclasses.replace(here, pipeline=2, stage=HeldStage(layers, *_ends(row, is_last), sends=2))
        for layers in (1, 2)
    ]


def _states(model: ModelConfig, settings: MemorySettings, layouts: Layouts, more: Floats, is_last: bool) -> Floats:
    """Weights, masters, gradients and states: a + b / shard + c / processes with the same experts, each linear in the
    blocks. Three meshes determine a, b and c."""

    def terms(row: dict[str, int | str]) -> list[float]:
        experts, found = int(row["expert"]), []
        meshes = [(64 * experts, 1), (256 * experts, 1), (64 * experts, 4)] if row["zero"] else [(1, 1)]
        passes = 2 if row["accumulates"] else 1
        for shard, context in meshes:
            plain = {**row, "samples": 1, "passes": passes, "replicate": 1, "shard": shard, "context": context}
            found.append([_state_bytes(model, held) for held in _held(model, settings, plain, is_last)])
        if not row["zero"]:
            coefficients = [[size, 0.0, 0.0] for size in found[0]]
        else:
            share, owners = 1 / (64 * experts), 1 / (64 * int(row["tensor"]))
            coefficients = []
            for first, fewer, spread in zip(*found, strict=True):
                by_shard, by_owner = (spread - fewer) / (0.75 * share), (first - spread) / (0.75 * owners)
                coefficients.append([first - by_shard * share - by_owner * owners, by_shard, by_owner])
        one, two = coefficients[0], coefficients[-1]
        return [*one, *(after - before for before, after in zip(one, two, strict=True))]

    table = _by_key(layouts, ("tensor", "expert", "zero", "accumulates", "piped"), terms)
    whole = table[:, :3] + more[:, None] * table[:, 3:]
    return np.asarray(whole[:, 0] + whole[:, 1] / layouts["shard"] + whole[:, 2] / _expert_shard(layouts))


def _state_bytes(model: ModelConfig, settings: MemorySettings) -> float:
    return sum(part.bytes for part in state_parts(settings.held(model), settings) if part.place == "device")


def _peaks(memory: PassMemory, nodes: Sequence[int]) -> Floats:
    """The most that a pass over each number of tokens needs, its inputs included: `PassMemory.phases` on columns."""
    pairs = [(line.saved, moment) for line in memory.lines for moment in line.moments]
    terms = [(saved + one.per_token, one.per_row, one.per_second_row, one.fixed) for saved, one in pairs]
    tokens = np.array(nodes, dtype=np.float64)
    first = tokens if memory.chunk_rows is None else np.minimum(tokens, memory.chunk_rows)
    amounts = np.stack([tokens, first, np.minimum(tokens - first, first), np.ones(len(tokens))])
    return np.asarray((np.array(terms) @ amounts).max(axis=0) + [memory.input_bytes(node) for node in nodes])


def _passes(model: ModelConfig, settings: MemorySettings, layouts: Layouts, more: Floats, is_last: bool) -> Floats:
    """What a pass needs: bilinear in the blocks and the micro-batches in flight, at a few numbers of tokens, between
    which it is interpolated. It is a straight line bent where the logits fill a chunk or another phase becomes the
    worst, so that this says a little too much rather than too little. So it is over the experts of a process."""
    tokens, expert = layouts["tokens"], layouts["expert"]
    nodes = sorted({int(tokens.min()), *TOKEN_NODES, int(tokens.max())})
    spreads = sorted({int(expert.min()), int(expert.max())})

    def corners(row: dict[str, int | str]) -> list[float]:
        found: list[float] = []
        for spread in spreads:
            plain = {**row, "samples": 1, "passes": 1, "replicate": 1, "shard": 1, "zero": 0, "expert": spread}
            lines = [pass_memory(held.held(model), held) for held in _held(model, settings, plain, is_last)]
            # A further micro-batch in flight adds what all blocks save, which is there before the loss.
            saved = [line.lines[0].saved for line in lines]
            peaks = [_peaks(line, nodes) for line in lines]
            for number, node in enumerate(nodes):
                at = [each[number] for each in peaks]
                found += [at[0], at[-1] - at[0], saved[0] * node, (saved[-1] - saved[0]) * node]
        return found

    tables = _by_key(layouts, ("tensor", "recompute", "kv_copies", "piped"), corners)
    tables = tables.reshape(len(layouts), len(spreads), len(nodes), 4)
    right = np.clip(np.searchsorted(nodes, tokens), 1, len(nodes) - 1)
    every, places = np.arange(len(layouts)), np.array(nodes, dtype=np.float64)
    of_most = np.interp(-1 / expert, [-1 / one for one in spreads], range(len(spreads)))[:, None, None]
    table = tables[:, 0] * (1 - of_most) + tables[:, -1] * of_most
    share = ((tokens - places[right - 1]) / (places[right] - places[right - 1]))[:, None]
    base, by_layer, by_flight, by_both = (table[every, right - 1] * (1 - share) + table[every, right] * share).T
    flying = _by_key(
        layouts,
        ("pipeline", "chunks", "passes", "schedule"),
        lambda row: [
            in_flight(str(row["schedule"]), int(row["pipeline"]), int(row["chunks"]), int(row["passes"]), is_last)
        ],
    )[:, 0]
    extra = np.where(layouts["piped"], flying - 1, 0.0)
    return np.asarray(base + more * by_layer + extra * by_flight + more * extra * by_both)
