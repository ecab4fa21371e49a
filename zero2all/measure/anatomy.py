"""Where the time of a training step goes, from the trace of torch's profiler (Chrome's format, which Perfetto reads).

Steps, and in them the loss and the update, are annotations in the trace. On a GPU every instant of a step belongs to
one kernel, so the groups and the idle time add up to the step: kernels that overlap share nothing, the one that began
first has the time, and communication and copies have only what no computing kernel covers (what is hidden costs
nothing). A kernel belongs to the phase in which the host queued it. On a CPU an operator has the time that none of
those inside it took; what is between operators is Python and torch's own work.

The update of the weights is one group, whatever its kernels do; so is the loss, but for the products of the head.
"""

import bisect
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from zero2all.estimate.floors import Work
from zero2all.estimate.kernel_groups import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    GEMM,
    GROUPS,
    LOSS,
    OPTIMIZER,
    kernel_of,
    operator_group,
)

STEP, PHASE = "z2a step", "z2a phase: "
"""Names of the annotations."""
UPDATE = "update"
IDLE = {"cuda": "idle between kernels", "cpu": "between operators"}
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
WRAPPERS = ("autograd::", "torch::autograd::", "Torch-Compiled Region", "TorchDynamo")
HOW_OFTEN = {"cross_entropy": "pass", "embedding": "pass", "optimizer": "step"}
"""Operators whose work is known for a whole pass or step, in however many kernels; of others, for each kernel."""
LEAST_LINKED = 0.99
"""Share of the calls of a kernel whose arithmetic must be known for a floor."""

Span = tuple[float, float]


@dataclass
class Row:
    """All calls of one kernel (on a CPU: of one operator), per step."""

    name: str
    group: str
    calls: float = 0.0
    seconds: float = 0.0
    linked: float = 0.0  # calls whose arithmetic is known
    flops: float = 0.0
    floor_seconds: float | None = None

    @property
    def floor_percent(self) -> float | None:
        """Floor / time; 100 is the best there can be."""
        return None if self.floor_seconds is None or not self.seconds else 100 * self.floor_seconds / self.seconds


@dataclass
class Anatomy:
    """A step, taken apart; the groups, idle time included, add up to its seconds."""

    kind: str  # cuda or cpu
    steps: int
    seconds: float  # of a step, the profiler's own cost included
    groups: dict[str, float]
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class _TimedPiece:
    """A kernel or an operator's own time."""

    name: str
    group: str
    span: Span
    seconds: float
    flops: float | None


def inside(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls are a phase of the trace."""

    def annotated(*given: Any, **named: Any) -> Any:
        with record_function(PHASE + phase):
            return function(*given, **named)

    return annotated


def read_trace(path: Path) -> list[Mapping[str, Any]]:
    """The events of a trace, packed or not."""
    data = path.read_bytes()
    events: list[Mapping[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


def anatomy_of(events: Iterable[Mapping[str, Any]]) -> Anatomy:
    """The steps of a trace; ValueError if there is none in it."""
    complete = sorted((one for one in events if one.get("ph") == "X"), key=lambda one: (one["ts"], -one["dur"]))
    notes = [one for one in complete if one.get("cat") == "user_annotation"]
    steps = [_span(one) for one in notes if one["name"] == STEP]
    if not steps:
        raise ValueError(f"the trace has no annotation {STEP!r}")
    phases = [(*_span(one), one["name"].removeprefix(PHASE)) for one in notes if one["name"].startswith(PHASE)]
    is_gpu = any(one.get("cat") in GPU_CATEGORIES for one in complete)
    pieces = (_kernels if is_gpu else _operators)(complete, lambda at: _phase_at(phases, at))
    return _summed("cuda" if is_gpu else "cpu", pieces, steps)


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _phase_at(phases: list[tuple[float, float, str]], at: float) -> str:
    """The phase that runs then; empty: none."""
    last = bisect.bisect_right(phases, (at, math.inf, "")) - 1
    return phases[last][2] if last >= 0 and at <= phases[last][1] else ""


def _group_in(phase: str, group: str) -> str:
    """The group of a kernel, where the phase knows more than its name."""
    if phase == UPDATE and group not in (COMMUNICATION, COPIES):
        return OPTIMIZER
    return LOSS if phase == LOSS and group == ELEMENTWISE else group


def _summed(kind: str, pieces: list[_TimedPiece], steps: list[Span]) -> Anatomy:
    seconds = sum(end - start for start, end in steps) / len(steps)
    groups: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    rows: dict[tuple[str, str], Row] = {}
    starts = [start for start, _ in steps]
    for piece in pieces:
        index = bisect.bisect_right(starts, piece.span[0]) - 1
        if index < 0 or piece.span[0] > steps[index][1]:
            continue  # warm-up, or the gap between two steps
        groups[piece.group] += piece.seconds / len(steps)
        row = rows.setdefault((piece.name, piece.group), Row(piece.name, piece.group))
        row.calls += 1 / len(steps)
        row.seconds += piece.seconds / len(steps)
        if piece.flops is not None:
            row.linked += 1 / len(steps)
            row.flops += piece.flops / len(steps)
    groups[IDLE[kind]] = max(0.0, seconds - sum(groups.values()))
    ordered = sorted(rows.values(), key=lambda row: -row.seconds)
    return Anatomy(kind, len(steps), seconds, groups, ordered)


def _kernels(events: list[Mapping[str, Any]], phase_at: Callable[[float], str]) -> list[_TimedPiece]:
    calls = [one for one in events if one.get("cat") in LAUNCHES and "correlation" in one.get("args", {})]
    launched = {one["args"]["correlation"]: one["ts"] / 1e6 for one in calls}
    named = [one for one in events if _is_operator(one) and "External id" in one["args"]]
    operators = {one["args"]["External id"]: one for one in named}
    found: list[tuple[Mapping[str, Any], str]] = []
    for one in events:
        if one.get("cat") in GPU_CATEGORIES:
            arguments = one.get("args", {})
            phase = phase_at(launched.get(arguments.get("correlation"), one["ts"] / 1e6))
            found.append((one, _group_in(phase, kernel_of(one["name"]).group)))
    covered: list[Span] = []
    pieces = []
    for hidden_behind in (False, True):  # first what computes, then what can hide behind it
        level = [one for one in found if (one[1] in (COMMUNICATION, COPIES)) is hidden_behind]
        ends = -math.inf
        for event, group in level:
            start, end = _span(event)
            own = _uncovered((max(start, ends), end), covered)
            ends = max(ends, end)
            operator = operators.get(event.get("args", {}).get("External id"))
            does_it = group == GEMM and "splitk" not in event["name"].lower()  # not what sums the parts of a product up
            flops = product_flops(operator) if operator is not None and does_it else None
            pieces.append(_TimedPiece(event["name"], group, (start, end), own, flops))
        covered = _merged([_span(event) for event, _ in level])
    return pieces


def _merged(spans: list[Span]) -> list[Span]:
    """Spans by their start -> the same without overlaps."""
    found: list[Span] = []
    for start, end in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _uncovered(span: Span, covered: list[Span]) -> float:
    """The part of a span that lies in none of the sorted spans."""
    start, end = span
    left = max(0.0, end - start)
    index = max(0, bisect.bisect_right(covered, (start, math.inf)) - 1)
    while left and index < len(covered) and covered[index][0] < end:
        left -= max(0.0, min(end, covered[index][1]) - max(start, covered[index][0]))
        index += 1
    return max(0.0, left)


def _operators(events: list[Mapping[str, Any]], phase_at: Callable[[float], str]) -> list[_TimedPiece]:
    """Operators with their own time; the events come by their start, an outer one before those inside it."""
    own: dict[int, float] = {}
    open_ones: dict[Any, list[int]] = defaultdict(list)  # by thread
    for number, one in enumerate(events):
        if not _is_operator(one):
            continue
        stack = open_ones[one["tid"]]
        while stack and events[stack[-1]]["ts"] + events[stack[-1]]["dur"] <= one["ts"]:
            stack.pop()
        own[number] = one["dur"] / 1e6
        if stack:
            own[stack[-1]] -= one["dur"] / 1e6
        stack.append(number)
    pieces = []
    for number, seconds in own.items():
        one = events[number]
        if _computes(one["name"]):
            span = _span(one)
            group = _group_in(phase_at(span[0]), operator_group(one["name"]))
            pieces.append(_TimedPiece(one["name"], group, span, max(0.0, seconds), product_flops(one)))
    return pieces


def _computes(name: str) -> bool:
    """Whether it is an operator (`aten::mm`) or what a compiler made, and not a function around some of them."""
    return (":" in name or "fused" in name or "CompiledFx" in name) and not name.startswith(WRAPPERS)


def _is_operator(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "cpu_op"


def product_flops(operator: Mapping[str, Any]) -> float | None:
    """FLOPs of a matrix product, from the shapes of its inputs; None for any other operator."""
    at = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1}.get(operator["name"])
    shapes = operator.get("args", {}).get("Input Dims")
    if at is None or shapes is None or len(shapes) < at + 2 or len(shapes[at]) < 2 or len(shapes[at + 1]) < 2:
        return None
    left, right = shapes[at], shapes[at + 1]
    return 2.0 * math.prod(left) * right[-1]


def add_floors(
    anatomy: Anatomy, work: Mapping[str, Work], passes: int, copy_bytes_per_second: float, flops_per_second: float
) -> None:
    """Give every row whose work is known the least time that its calls could take. `work`: of one pass, by operator
    (`zero2all.estimate.floors.operator_work`)."""
    for row in anatomy.rows:
        kernel = kernel_of(row.name)  # also of the one operator that is all of attention on a CPU
        one = work.get(kernel.operator or "")
        if one is not None and (anatomy.kind == "cuda" or kernel.group == ATTENTION):
            flops, moved = (one.forward_flops, one.backward_flops), (one.forward_bytes, one.backward_bytes)
            amounts = flops if one.is_matmul else moved
            amount = sum(amounts) if kernel.is_backward is None else amounts[int(kernel.is_backward)]
            times = {"pass": float(passes), "step": 1.0}.get(HOW_OFTEN.get(kernel.operator or "", ""), row.calls)
            row.floor_seconds = times * amount / (flops_per_second if one.is_matmul else copy_bytes_per_second)
        elif row.flops and row.linked >= LEAST_LINKED * row.calls:
            row.floor_seconds = row.flops / flops_per_second
