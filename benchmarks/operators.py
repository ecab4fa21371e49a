"""Each operator and implementation alone: time, share of the floor, error against float64.

    python benchmarks/operators.py                                      z2all-1b with AdamW, on a GPU
    python benchmarks/operators.py --only rms_norm --json norm.json     one operator
    python benchmarks/operators.py --config quickstart --rows 512       on a CPU

Tokens are those of a micro-batch of the config (few on a CPU). An operator that fails is one row with the reason.
Backward is the time of forward and backward less that of forward alone, because some implementations overwrite their
inputs, so a backward cannot be repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import BILLION
from zero2all.cli.terminal import print_table
from zero2all.common.errors import UsageError
from zero2all.common.files import write_json
from zero2all.common.progress import say, show_log
from zero2all.common.schema import nearest_hint
from zero2all.config import RunConfig
from zero2all.estimate.floors import Work, linear_shapes, operator_work, optimizer_work
from zero2all.measure.clock import Ceilings, device_name, measured_ceilings, seconds_of
from zero2all.measure.operators import Case, Function, context_here, forward_and_both, make_case, random_flat
from zero2all.model.config import parameter_counts
from zero2all.ops import linear_cross_entropy
from zero2all.ops.config import OpsConfig
from zero2all.ops.cross_entropy import eager_cross_entropy
from zero2all.ops.implementation import Implementation, OpContext
from zero2all.ops.optimizer import AdamWConstants, Flat, eager_adamw
from zero2all.ops.registry import OPERATORS, resolve
from zero2all.ops.split_master import join
from zero2all.parallel.device import pick_device
from zero2all.predict.batch import load_measured_config, own_batch
from zero2all.train.state import DTYPES

EXACT_ROWS = {"cuda": 512, "cpu": 64}  # tokens of the comparison with float64: few, so that it fits in memory
CPU_TOKENS, CPU_PARAMETERS = 256, 2_000_000  # default sizes where a full micro-batch would take minutes
EXACT_PARAMETERS = 65_536
EXACT = {
    "attention": "math",
    "rope": "eager",
    "rms_norm": "eager",
    "swiglu": "eager",
    "linear": "plain",
    "embedding": "torch",
    "cross_entropy": "eager",
}
"""The implementation that is compared with in float64: the formula in plain torch."""


@dataclass(frozen=True)
class BenchRow:
    """One implementation of one operator."""

    operator: str
    implementation: str
    taken_by_auto: bool
    problem: str | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    rate: float | None = None  # bytes or FLOPs of the floor per second, forward and backward together
    is_matmul: bool = False
    floor_ms: float | None = None
    floor_percent: float | None = None  # floor / time: 100 is the best there can be
    error: float | None = None  # largest relative error (L2) of an output or gradient against float64


@dataclass(frozen=True)
class Bench:
    """All rows, and the limits they are compared with."""

    device: str
    dtype: str
    samples: int
    seq_len: int
    ceilings: Ceilings
    rows: list[BenchRow]


def operator_names(config: RunConfig) -> list[str]:
    """What can be measured; each linear layer of a block is one entry."""
    names: list[str] = []
    for operator in OPERATORS:
        names += [f"linear/{part}" for part in linear_shapes(config.model)] if operator == "linear" else [operator]
    return names


def bench_operators(
    config: RunConfig, tokens: int | None, only: str | None, least_seconds: float, each: Callable[[Bench], None]
) -> Bench:
    """Measure; `each` gets the results so far after every operator."""
    device, dtype = pick_device(config.parallel.device), DTYPES[config.train.precision]
    names = operator_names(config)
    wanted = [name for name in names if only is None or only in (name, name.partition("/")[0])]
    if not wanted:
        hint = nearest_hint(only or "", names)
        problem = f"There is no operator {only}. The operators are: {', '.join(names)}."
        raise UsageError(f"{problem} {hint}" if hint else problem)
    samples, seq_len = batch_of(config, tokens, device)
    say(f"operators: {device_name(device)}: measuring copy and matmul rates first")
    ceilings = measured_ceilings(device, dtype, least_seconds)
    bench = Bench(device_name(device), str(dtype).removeprefix("torch."), samples, seq_len, ceilings, [])
    automatic = resolve(type(config.ops)(), context_here(config)).taken
    for name in wanted:
        operator = name.partition("/")[0]
        say(f"operators: {name}")
        for implementation in OPERATORS[operator]:
            taken = automatic[operator] == implementation.name
            bench.rows.append(_row(name, implementation, taken, config, bench, least_seconds))
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
        each(bench)
    return bench


def batch_of(config: RunConfig, tokens: int | None, device: torch.device) -> tuple[int, int]:
    """Samples and their length: the config's micro-batch, or what makes about `tokens`."""
    seq_len = config.data.seq_len
    if tokens is None:
        tokens = own_batch(config).samples * seq_len
        tokens = tokens if device.type == "cuda" else min(tokens, CPU_TOKENS)
    return max(1, tokens // seq_len), min(seq_len, tokens)


def _row(
    name: str, implementation: Implementation, taken: bool, config: RunConfig, bench: Bench, least_seconds: float
) -> BenchRow:
    where, device, dtype = context_here(config), pick_device(config.parallel.device), DTYPES[config.train.precision]
    if (problem := implementation.check(where)) is not None:
        return BenchRow(name, implementation.name, taken, problem)
    try:
        torch.manual_seed(0)
        if name == "optimizer":
            work, forward, backward, error = _optimizer(implementation, config, device, dtype, least_seconds)
        else:
            function = _function(name, implementation, where)
            work = operator_work(config.model, bench.samples * bench.seq_len, bench.seq_len, dtype.itemsize)[name]
            case = make_case(name, config.model, bench.samples, bench.seq_len, device)
            forward, backward = _times(function, case, device, dtype, least_seconds)
            del case
            error = _error(name, function, config, bench.seq_len, device, dtype)
    except Exception as failure:
        first = str(failure).splitlines()[0] if str(failure) else ""
        return BenchRow(name, implementation.name, taken, f"{type(failure).__name__}: {first}"[:200])
    ceiling = bench.ceilings.matmul_flops_per_second if work.is_matmul else bench.ceilings.copy_bytes_per_second
    floor = work.total / ceiling
    return BenchRow(
        operator=name,
        implementation=implementation.name,
        taken_by_auto=taken,
        forward_ms=1e3 * forward,
        backward_ms=1e3 * backward,
        rate=work.total / (forward + backward),
        is_matmul=work.is_matmul,
        floor_ms=1e3 * floor,
        floor_percent=100 * floor / (forward + backward),
        error=error,
    )


def _function(name: str, implementation: Implementation, where: OpContext) -> Function:
    """The implementation as the model calls it."""
    if name == "linear_cross_entropy" and implementation.name == "off":
        return linear_cross_entropy.through_cross_entropy(resolve(OpsConfig(), where).cross_entropy)
    return implementation.function


def _times(
    function: Function, case: Case, device: torch.device, dtype: torch.dtype, least_seconds: float
) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    forward, both = forward_and_both(function, case, dtype)
    alone = seconds_of(forward, device, least_seconds)
    together = seconds_of(both, device, least_seconds)
    return alone, max(together - alone, 0.0)


def _error(
    name: str, function: Function, config: RunConfig, seq_len: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Largest relative error of outputs and gradients on a few tokens."""
    operator = name.partition("/")[0]
    if operator == "linear_cross_entropy":
        exact = linear_cross_entropy.through_cross_entropy(eager_cross_entropy)
    else:
        exact = {one.name: one.function for one in OPERATORS[operator]}[EXACT[operator]]
    case = make_case(name, config.model, 1, min(seq_len, EXACT_ROWS[device.type]), device)
    rounded = [value.to(dtype) for value in case.inputs]  # both sides start from the same values
    found = list(_outputs_and_gradients(function, case, rounded))
    wanted = list(_outputs_and_gradients(exact, case, [value.double() for value in rounded]))
    return max(_relative(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def _outputs_and_gradients(function: Function, case: Case, given: list[Tensor]) -> Iterator[Tensor]:
    leaves = [value.clone().requires_grad_() for value in given]
    outputs = case.call(function, [leaf.clone() for leaf in leaves])  # an implementation may overwrite its inputs
    yield from (output.detach() for output in outputs)
    generator = torch.Generator(given[0].device).manual_seed(7)
    total = torch.zeros((), dtype=torch.float64, device=given[0].device)
    for output in outputs:
        direction = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
        total = total + (output * direction).sum(dtype=torch.float64)
    yield from torch.autograd.grad(total, leaves)


def _relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-300))


# ---- the optimizer, which has no backward ----------------------------------------------------------------------------


def _optimizer(
    implementation: Implementation, config: RunConfig, device: torch.device, dtype: torch.dtype, least_seconds: float
) -> tuple[Work, float, float, float]:
    """Work, seconds of forward and of backward (0), error of the change of the weights."""
    whole = parameter_counts(config.model)["total"]
    parameters = whole if device.type == "cuda" else min(whole, CPU_PARAMETERS)
    constants = AdamWConstants(config.optim.beta1, config.optim.beta2, config.optim.eps)
    split_masters = implementation.footprint.splits_masters and dtype == torch.bfloat16
    group = random_flat(parameters, config, device, torch.float32, dtype, split_masters)
    function, updates = implementation.function, torch.ones((), device=device)
    scale, skip = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)
    seconds = seconds_of(lambda: function([group], updates, scale, skip, constants), device, least_seconds)
    error = _optimizer_error(function, config, device, dtype, split_masters)
    return optimizer_work(parameters), seconds, 0.0, error


def _optimizer_error(
    function: Function, config: RunConfig, device: torch.device, dtype: torch.dtype, split_masters: bool
) -> float:
    constants = AdamWConstants(config.optim.beta1, config.optim.beta2, config.optim.eps)
    changes = []
    for update, wide, narrow in ((function, torch.float32, dtype), (eager_adamw, torch.float64, torch.float64)):
        group = random_flat(EXACT_PARAMETERS, config, device, wide, narrow, split_masters and update is function)
        before = _masters_of(group).clone()
        group.lr = 1.0  # so that the change is not lost in the rounding of the weight
        updates, scale = torch.full((), 3.0, device=device), torch.full((), 0.5, dtype=wide, device=device)
        update([group], updates, scale, torch.zeros((), dtype=torch.bool, device=device), constants)
        changes.append(_masters_of(group) - before)
    return _relative(*changes)


def _masters_of(group: Flat) -> Tensor:
    return join(group.weights, group.masters) if group.masters.dtype == torch.int16 else group.masters


# ---- the table -------------------------------------------------------------------------------------------------------


def bench_cells(bench: Bench) -> list[list[str]]:
    """Heading and rows."""
    rows = []
    before = ""
    for row in bench.rows:
        shown = row.operator if row.operator != before else ""
        before = row.operator
        name = f"{row.implementation}{' (auto)' if row.taken_by_auto else ''}"
        if row.problem is not None:
            rows.append([shown, name, "", "", "", "", "", row.problem])
            continue
        assert row.rate is not None
        rate = f"{row.rate / 1e12:.3g} TFLOPS" if row.is_matmul else f"{row.rate / 1e9:.4g} GB/s"
        figures = [f"{row.forward_ms:.3f}", f"{row.backward_ms:.3f}", rate, f"{row.floor_percent:.1f}"]
        rows.append([shown, name, *figures, f"{row.error:.1e}", ""])
    heading = ["operator", "implementation", "forward ms", "backward ms", "rate", "% of floor", "error", "problem"]
    return [heading, *rows]


def main() -> None:
    """Measure and print; the file of --json has what was found after every operator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=BILLION, help="a preset or the path of a YAML file")
    parser.add_argument("--rows", type=int, help="tokens (default: a micro-batch; few on a CPU)")
    parser.add_argument("--only", help="one operator: rms_norm, linear/qkv, …")
    parser.add_argument("--seconds", type=float, default=0.2, help="at least, for each figure")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments, overrides = parser.parse_known_args()
    config, _ = load_measured_config(arguments.config, overrides)

    def keep(bench: Bench) -> None:
        if arguments.json is not None:
            write_json(arguments.json, dataclasses.asdict(bench))

    bench = bench_operators(config, arguments.rows, arguments.only, arguments.seconds, keep)
    copy, matmul = bench.ceilings.copy_bytes_per_second / 1e9, bench.ceilings.matmul_flops_per_second / 1e12
    title = f"{bench.device}, {bench.dtype}, {bench.samples} x {bench.seq_len} tokens"
    print_table(bench_cells(bench), f"{title}; copy {copy:,.0f} GB/s, matmul {matmul:.3g} TFLOPS")


if __name__ == "__main__":
    show_log()
    main()
