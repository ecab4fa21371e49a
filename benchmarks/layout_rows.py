"""How well the A100 profile ranks layouts that others measured: Megatron-DeepSpeed GPT on 2, 4 or 8 A100 of one node.

    python -m benchmarks.layout_rows --rows layout_times.csv

The rows: GPT with a GELU MLP of 4 h, learned positions, 50,257 ids, fp16 with dropout, full recompute, 1F1B, under
tensor x data x pipeline splits. A row's time comes from the profile `a100-80g` of `estimate.machine` (published
peaks, bandwidths and efficiency curves) and from what the program does, counted here:

    layer      products by tiles and waves; bytes of every kernel that is not fused; tensor ranks wait for two
               all-reduces in each of forward, second forward and backward. The host queues kernel by kernel: a layer
               takes no less than that, which is what limits small micro-batches
    ends       embedding on the first stage; logits and loss on the last. One tensor rank has all 50,257 columns, which
               are not aligned; several pad them
    pipeline   1F1B, played action by action; hidden states are sent between stages
    step       gradients all-reduced after the last backward, then norm, overflow check and Adam over float32 states

Three constants of the profile are fitted, on the rows in FITTED alone: seconds of the host for one operator, seconds of
one round of a collective, and by how much a tensor group waits longer for the slowest of its hosts. Errors are those of
all other rows. Spearman and regret: within groups of equal model, GPUs and global batch.

The other rows were not fitted, but they were seen while this was written: the counts of operators, the vocabulary that
is not aligned, FILL_DEPTH of the profile (64, of 64, 96 and 128) and how device and host overlap (the slower of the
two; a smooth maximum has a smaller mean error and a larger regret) were chosen with all rows at hand. Rows of other
models are the fairer test.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import save_result
from zero2all.estimate.machine import Machine, named_cluster

IDS = 50_257
PAD = 128
"""Tensor ranks pad the vocabulary to a multiple of this each."""
FORWARD_OPS, RECOMPUTE_OPS, BACKWARD_OPS = 36, 40, 50
"""Operators that the host queues for a layer; those of the second forward also restore the random state."""
COLLECTIVE_OPS = 2
"""An all-reduce is queued on a stream of its own, with an event before and after."""
STATE_BYTES = 36
"""Of a step, for each parameter: overflow check and norm 4, gradient 4, master and two moments 24, weight 2, zeroing
2."""


@dataclass(frozen=True)
class Row:
    """One measured layout."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden_size: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    iteration_ms: float = 0.0

    @property
    def group(self) -> tuple[int, ...]:
        """Rows with the same are alternatives to each other."""
        return (self.gpus, self.global_batch, self.hidden_size, self.heads, self.layers, self.seq_len)

    @property
    def key(self) -> tuple[int, ...]:
        """How FITTED names it."""
        return (*self.group[:3], self.layers, self.micro_batch, self.tp, self.dp, self.pp)

    @property
    def micros(self) -> int:
        """Micro-batches of a pipeline in a step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.seq_len


FITTED: frozenset[tuple[int, ...]] = frozenset(
    {
        # gpus, global batch, hidden size, layers, micro-batch, tensor, data, pipeline
        (2, 16, 1024, 12, 1, 1, 2, 1),
        (2, 16, 1024, 20, 1, 2, 1, 1),
        (2, 16, 1024, 20, 4, 2, 1, 1),
        (2, 32, 1024, 24, 8, 1, 2, 1),
        (4, 16, 1024, 16, 2, 4, 1, 1),
        (4, 16, 1024, 16, 8, 4, 1, 1),
        (4, 8, 1024, 24, 1, 1, 1, 4),
        (8, 8, 1024, 12, 2, 8, 1, 1),
        (8, 32, 1024, 24, 8, 2, 2, 2),
        (8, 4, 1024, 20, 1, 4, 1, 2),
        (2, 16, 2048, 16, 2, 1, 2, 1),
        (2, 16, 2048, 16, 8, 1, 1, 2),
        (2, 8, 2048, 20, 1, 2, 1, 1),
        (2, 8, 2048, 20, 4, 2, 1, 1),
        (4, 16, 2048, 20, 1, 4, 1, 1),
        (4, 16, 2048, 20, 8, 4, 1, 1),
        (4, 8, 2048, 12, 2, 2, 1, 2),
        (8, 16, 2048, 12, 4, 8, 1, 1),
        (8, 32, 2048, 20, 4, 1, 2, 4),
        (8, 128, 2048, 24, 1, 1, 8, 1),
    }
)


@dataclass(frozen=True)
class Fit:
    """The constants that are fitted."""

    host_op_seconds: float = 24e-6
    round_seconds: float = 6e-6
    skew: float = 0.04
    """A tensor group waits in every collective for the slowest of its hosts: share of the host's time per further
    rank."""

    def machine(self) -> Machine:
        """The profile with these constants."""
        profile = named_cluster("a100-80g")
        nvlink = profile.link("nvlink")
        links = (dataclasses.replace(nvlink, latency=self.round_seconds),)
        return dataclasses.replace(profile, host_op_seconds=self.host_op_seconds, links=links)


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch in one stage, and of the message to the next."""

    forward: float
    backward: float


def predict(row: Row, fit: Fit) -> float:
    """Seconds of a step."""
    machine = fit.machine()
    layer = layer_pass(row, machine, fit.skew)
    first, last = embedding_pass(row, machine), head_pass(row, machine)
    each, stages = row.layers // row.pp, []
    for stage in range(row.pp):
        forward, backward = each * layer.forward, each * layer.backward
        if stage == 0:
            forward, backward = forward + first.forward, backward + first.backward
        if stage == row.pp - 1:
            forward, backward = forward + last.forward, backward + last.backward
        stages.append(Pass(forward, backward))
    message = machine.collective_seconds("send", 2.0 * row.tokens * row.hidden_size, 2, "nvlink")
    return play_1f1b(stages, row.micros, message) + step_seconds(row, machine)


def layer_pass(row: Row, machine: Machine, skew: float) -> Pass:
    """A layer: `backward` begins with the second forward."""
    t = row.tp
    softmax = _plain_softmax_bytes(row)
    forward = _products(machine, _layer_products(row), "forward") + _moved(machine, [*_forward_bytes(row), *softmax])
    backward = _products(machine, _layer_products(row), "backward") + _moved(machine, [*_backward_bytes(row), *softmax])
    message = machine.collective_seconds("all-reduce", 2.0 * row.tokens * row.hidden_size, t, "nvlink")
    forward, backward = forward + 2 * message, backward + 2 * message
    queue = machine.host_op_seconds * (1 + skew * (t - 1))
    ops = len(softmax) + (2 * COLLECTIVE_OPS if t > 1 else 0)
    # The device works while the host queues ahead of it: the slower of the two sets the pace.
    return Pass(
        max(forward, queue * (FORWARD_OPS + ops)),
        max(forward + backward, queue * (RECOMPUTE_OPS + BACKWARD_OPS + 2 * ops)),
    )


def _plain_softmax_bytes(row: Row) -> list[float]:
    """Kernels beside those of the fused softmax, which Megatron takes only where samples x heads of a rank are a
    multiple of 4: conversion, scale, mask, softmax in float32, conversion back."""
    batch = row.micro_batch * row.heads // row.tp
    return _each(float(batch * row.seq_len**2), 6, 8, 9, 8, 6) if batch % 4 else []


def _layer_products(row: Row) -> list[tuple[int, int, int]]:
    S, h, t, s, d = row.tokens, row.hidden_size, row.tp, row.seq_len, row.hidden_size // row.heads
    batch = row.micro_batch * row.heads // t
    scores = [(batch * s, s, d), (batch * s, d, s)]
    return [(S, 3 * h // t, h), *scores, (S, h, h // t), (S, 4 * h // t, h), (S, h, 4 * h // t)]


def _products(machine: Machine, shapes: Sequence[tuple[int, int, int]], kind: str) -> float:
    if kind == "forward":
        return sum(machine.matmul_seconds(m, n, k, "forward", "float16") for m, n, k in shapes)
    return sum(
        machine.matmul_seconds(m, k, n, "dgrad", "float16") + machine.matmul_seconds(k, n, m, "wgrad", "float16")
        for m, n, k in shapes
    )


def _moved(machine: Machine, kernels: Sequence[float]) -> float:
    return sum(machine.operator_seconds("", size) for size in kernels)


def _forward_bytes(row: Row) -> list[float]:
    """Bytes of each kernel that multiplies no matrices."""
    states, inner = float(row.tokens * row.hidden_size), row.tokens * row.hidden_size / row.tp
    scores = row.micro_batch * row.heads / row.tp * row.seq_len**2
    norms, sums = [4 * states] * 2, [7 * states] * 2  # bias, dropout with its mask, residual
    return [*norms, *sums, 4 * inner, 16 * inner, 4 * scores, 5 * scores]


def _backward_bytes(row: Row) -> list[float]:
    states, inner = float(row.tokens * row.hidden_size), row.tokens * row.hidden_size / row.tp
    scores = row.micro_batch * row.heads / row.tp * row.seq_len**2
    weights = 12.0 * row.hidden_size**2 / row.tp
    norms, sums, residual = [10 * states] * 2, [7 * states] * 2, [6 * states] * 2
    # GELU with its bias, context, qkv gathered with its bias; dropout and softmax; gradients added to fp16 ones
    return [*norms, *sums, *residual, 32 * inner, 4 * inner, 18 * inner, 5 * scores, 6 * scores, *[1.5 * weights] * 4]


def columns(row: Row) -> int:
    """Of the logits of one tensor rank."""
    return IDS if row.tp == 1 else math.ceil(IDS / (PAD * row.tp)) * PAD


def embedding_pass(row: Row, machine: Machine) -> Pass:
    """Ids to hidden states with dropout; back: the rows are sorted and added to a table of zeros, and that to the
    gradient."""
    states, table = float(row.tokens * row.hidden_size), columns(row) * row.hidden_size
    message = machine.collective_seconds("all-reduce", 2 * states, row.tp, "nvlink")
    forward = _moved(machine, [4 * states, 6 * states, 5 * states]) + message
    backward = _moved(machine, [5 * states, 8 * states, 2.0 * table, 6.0 * table])
    return Pass(max(forward, 12 * machine.host_op_seconds), max(backward, 12 * machine.host_op_seconds))


def head_pass(row: Row, machine: Machine) -> Pass:
    """Last norm, logits and loss. Of a logit: written and copied in another order 6, made float32 6, maximum 4,
    difference 8, exponential 8, sum 4, quotient 8; back: scaled 8, made fp16 6, copied 4."""
    states, logits = float(row.tokens * row.hidden_size), float(row.tokens * columns(row))
    shape = [(row.tokens, columns(row), row.hidden_size)]
    message = machine.collective_seconds("all-reduce", 2 * states, row.tp, "nvlink")
    losses = 3 * machine.collective_seconds("all-reduce", 4.0 * row.tokens, row.tp, "nvlink")
    forward = _products(machine, shape, "forward") + _moved(machine, [4 * states, *_each(logits, 4, 6, 4, 8, 8, 4, 8)])
    backward = _products(machine, shape, "backward") + _moved(machine, [10 * states, *_each(logits, 8, 6, 4)])
    backward += _moved(machine, [6.0 * columns(row) * row.hidden_size])
    ops = 30 * machine.host_op_seconds
    return Pass(max(forward + losses, ops), max(backward + message, ops))


def _each(values: float, *sizes: float) -> list[float]:
    return [size * values for size in sizes]


def step_seconds(row: Row, machine: Machine) -> float:
    """After the last backward: gradients over the data ranks, the two copies of the table, the update."""
    table = columns(row) * row.hidden_size
    held = 12.0 * row.hidden_size**2 * row.layers / (row.pp * row.tp) + table
    reduced = machine.collective_seconds("all-reduce", 2 * held, row.dp, "nvlink")
    tied = machine.collective_seconds("all-reduce", 2.0 * table, 2, "nvlink") if row.pp > 1 else 0.0
    return reduced + tied + STATE_BYTES * held / machine.stream_bytes_per_second


def play_1f1b(stages: Sequence[Pass], micros: int, message: float) -> float:
    """Seconds until all micro-batches have passed all stages forward and back."""
    count = len(stages)
    orders = []
    for stage in range(count):
        filling = min(count - 1 - stage, micros)
        order = [("f", micro) for micro in range(filling)]
        for micro in range(micros):
            if filling + micro < micros:
                order.append(("f", filling + micro))
            order.append(("b", micro))
        orders.append(order)
    ended: dict[tuple[str, int, int], float] = {}
    clocks, at = [0.0] * count, [0] * count
    while any(at[stage] < len(orders[stage]) for stage in range(count)):
        for stage in range(count):
            while at[stage] < len(orders[stage]):
                kind, micro = orders[stage][at[stage]]
                before = stage - 1 if kind == "f" else stage + 1
                if 0 <= before < count and (kind, before, micro) not in ended:
                    break
                ready = ended[kind, before, micro] + message if 0 <= before < count else 0.0
                seconds = stages[stage].forward if kind == "f" else stages[stage].backward
                clocks[stage] = ended[kind, stage, micro] = max(clocks[stage], ready) + seconds
                at[stage] += 1
    return max(clocks)


# ---- fit and score ---------------------------------------------------------------------------------------------------


def errors(rows: Sequence[Row], fit: Fit) -> list[float]:
    """Predicted / measured - 1."""
    return [predict(row, fit) * 1e3 / row.iteration_ms - 1 for row in rows]


def fit_constants(rows: Sequence[Row]) -> Fit:
    """Coordinate descent on the mean absolute logarithm over the rows in FITTED."""

    def loss(fit: Fit) -> float:
        return statistics.fmean(abs(math.log1p(error)) for error in errors(rows, fit))

    best = Fit()
    for step in (1.3, 1.1, 1.03, 1.01):
        improved = True
        while improved:
            improved = False
            for name, factor in itertools.product((one.name for one in dataclasses.fields(Fit)), (step, 1 / step)):
                tried = dataclasses.replace(best, **{name: getattr(best, name) * factor})
                if loss(tried) < loss(best) - 1e-9:
                    best, improved = tried, True
    return best


def ranks(values: Sequence[float]) -> list[float]:
    """Place of each value, smallest first; equal ones share the mean of their places."""
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of the places."""
    return statistics.correlation(ranks(first), ranks(second))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies, between two interpolated."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def score(rows: Sequence[Row], fit: Fit) -> dict[str, float]:
    """Errors of time over the rows, and of the order within groups of at least two rows."""
    found = [abs(error) for error in errors(rows, fit)]
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    correlations, regrets = [], []
    for group in (each for each in groups.values() if len(each) > 1):
        times, predicted = [row.iteration_ms for row in group], [predict(row, fit) for row in group]
        correlations.append(spearman(times, predicted))
        regrets.append(times[predicted.index(min(predicted))] / min(times) - 1)
    return {
        "rows": len(rows),
        "groups": len(correlations),
        "mean_absolute_error": statistics.fmean(found),
        "median_absolute_error": statistics.median(found),
        "worst_absolute_error": max(found),
        "mean_error": statistics.fmean(errors(rows, fit)),
        "spearman_median": statistics.median(correlations),
        "spearman_lowest": min(correlations),
        "regret_median": statistics.median(regrets),
        "regret_95th": percentile(regrets, 0.95),
        "regret_worst": max(regrets),
    }


def read_rows(path: Path) -> list[Row]:
    """The rows of the CSV."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    names = [one.name for one in dataclasses.fields(Row) if one.name != "iteration_ms"]
    return [
        Row(**{name: int(line[name]) for name in names}, iteration_ms=float(line["iteration_ms"])) for line in lines
    ]


def main() -> None:
    """Print and keep the scores."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, required=True, help="CSV: gpus, global_batch, micro_batch, ...")
    parser.add_argument("--no-save", action="store_true", help="only print")
    parser.add_argument("--groups", action="store_true", help="also print the groups in which the choice was wrong")
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    known = [row for row in rows if row.key in FITTED]
    others = [row for row in rows if row.key not in FITTED]
    fit = fit_constants(known) if known else Fit()
    figures = score(others, fit)
    print(f"fitted on {len(known)} rows: {fit}")
    for name, value in figures.items():
        print(f"{name:24} {value:.4f}")
    without = score(others, Fit())
    print(f"without any fit: mean absolute error {without['mean_absolute_error']:.4f}")
    if arguments.groups:
        print_wrong_choices(others, fit)
    if not arguments.no_save:
        save_result(
            "layout_rows",
            {"fitted": dataclasses.asdict(fit), "fitted_rows": len(known), "others": figures, "without_fit": without},
        )


def print_wrong_choices(rows: Sequence[Row], fit: Fit) -> None:
    """The groups whose first choice is not the fastest."""
    for group in sorted({row.group for row in rows}):
        members = [row for row in rows if row.group == group]
        best, chosen = min(members, key=lambda row: row.iteration_ms), min(members, key=lambda row: predict(row, fit))
        if chosen != best:
            regret = chosen.iteration_ms / best.iteration_ms - 1
            print(f"{regret:6.1%}  chosen {chosen}, predicted {predict(chosen, fit) * 1e3:.0f}")
            print(f"        best   {best}, predicted {predict(best, fit) * 1e3:.0f}")


if __name__ == "__main__":
    main()
