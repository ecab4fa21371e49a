"""How long a step of our trainer takes on a machine, part by part, before it runs.

The slowest process of a pipeline is followed through a step:

    matmuls         the matrices of its blocks: forward, gradient of the input, gradient of the weight
    attention       fused, causal
    element-wise    norms, rotary positions, SwiGLU, embedding, what experts do beside their products
    loss            head and cross-entropy, where this process has them
    recompute       the second forward of blocks that saved too little (`zero2all.estimate.flops` says which)
    communication   per axis of the mesh; what computation hides costs only the share of the device that it takes away
    bubble          a pipeline fills and drains: every stage but the slowest once, less what its schedule saves
    optimizer       norm, update and clearing of the gradients: bytes
    offload         copies and the update on the host, where states lie there
    host            queueing that takes longer than the device computes; nothing inside a CUDA graph

A part has three numbers. `estimate`; `lower`, what the same work takes at the peaks of the data sheet with nothing
waiting; `upper`, with nothing hidden and every kernel at SLOWEST of its expected rate. The step is the sum of its
parts. The 90 % interval around it adds the doubt of each part in squares: measured parts are doubted less.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zero2all.estimate.communication import Transfer, communication_per_step
from zero2all.estimate.floors import linear_shapes, operator_work, optimizer_work
from zero2all.estimate.flops import WHOLE_FORWARD, flops_per_token, recomputed_blocks, stopped_blocks
from zero2all.estimate.machine import GpuLink, Kind, Machine
from zero2all.estimate.memory_settings import WIDTHS, HeldStage, MemorySettings, expert_values
from zero2all.model.config import ModelConfig, parameter_counts

SLOWEST = 0.7
"""In an upper bound kernels reach this share of the rate that is expected of them."""
OVERLAP_COST = 0.1
"""A collective that runs beside computation takes multiprocessors and bandwidth from it: this share of its time."""
HOST_OPS_PER_BLOCK = 600
"""Small operators that the host could queue in the time it takes for forward and backward of a block: 2.9 ms were
measured for a block where a small operator takes about 5 microseconds (`zero2all.train.cuda_graph`)."""
HOST_ADAMW_SECONDS = 0.215e-9
"""Of one parameter on the host, all cores, where no profile knows it."""
QUANTISE_BYTES = 6
"""float8: an input is read twice and written once plain and once transposed; per value."""
LOSS_BYTES_PER_LOGIT = 2.0
"""Of the fused head: logits of a chunk are written and read twice while they are in the cache."""
DOUBT_OF_WAITING = 0.3
"""Of communication, bubble and host."""
COMMON_DOUBT = 0.015
"""Of everything at once: cards differ, clocks drift."""
NINETY_PERCENT = 1.645


@dataclass(frozen=True)
class Cost:
    """Time of some work, and the least that any device of this kind needs for it."""

    seconds: float = 0.0
    least: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    matmul: float = 0.0  # seconds of products among them
    attention: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(times * value for value in self.values))

    @property
    def values(self) -> tuple[float, ...]:
        """All numbers."""
        return (self.seconds, self.least, self.flops, self.bytes, self.matmul, self.attention)

    def at_clock(self, factor: float) -> Cost:
        """With arithmetic that takes `factor` times as long; what memory limits does not follow the clock."""
        seconds = self.seconds + (factor - 1) * (self.matmul + self.attention)
        return dataclasses.replace(self, seconds=seconds, least=min(self.least, seconds))


@dataclass(frozen=True)
class StepPart:
    """One line of a step, in seconds of the whole step."""

    name: str
    lower: float
    estimate: float
    upper: float
    flops: float = 0.0
    bytes: float = 0.0
    hidden: float = 0.0  # seconds that run beside other parts, not in the estimate
    doubt: float = 0.0  # standard deviation of the estimate, as a share of it


@dataclass(frozen=True)
class StepTime:
    """The time of a step."""

    parts: tuple[StepPart, ...]
    tokens: int  # of the whole step, in all processes
    processes: int
    flops: Mapping[str, float]  # model FLOPs of the step by convention
    peak_flops: float  # of one device

    @property
    def lower(self) -> float:
        """Seconds that no device of this kind can beat."""
        return math.fsum(part.lower for part in self.parts)

    @property
    def estimate(self) -> float:
        """Expected seconds."""
        return math.fsum(part.estimate for part in self.parts)

    @property
    def upper(self) -> float:
        """Seconds with nothing hidden and slow kernels."""
        return math.fsum(part.upper for part in self.parts)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the time lies with 90 % probability, between the bounds."""
        squares = math.fsum((part.doubt * part.estimate) ** 2 for part in self.parts)
        spread = NINETY_PERCENT * math.sqrt(squares + (COMMON_DOUBT * self.estimate) ** 2)
        return max(self.lower, self.estimate - spread), min(self.upper, self.estimate + spread)

    @property
    def tokens_per_second(self) -> float:
        """Of all processes."""
        return self.tokens / self.estimate

    @property
    def mfu(self) -> dict[str, float]:
        """Model FLOPs utilisation in the three conventions of `zero2all.estimate.flops`."""
        return {name: value / (self.estimate * self.processes * self.peak_flops) for name, value in self.flops.items()}

    def seconds(self, name: str) -> float:
        """The estimate of a part; 0 where it has none."""
        return math.fsum(part.estimate for part in self.parts if part.name == name)


# ---- the work of one pass --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassCosts:
    """What one pass costs on one process: of a block (the mean, where some have experts) and of the two ends."""

    forward: Mapping[str, Cost]  # of a block, by part
    backward: Mapping[str, Cost]
    again: Cost  # of a block whose forward runs twice
    embedding: Cost
    head: Cost

    @property
    def block(self) -> float:
        """Seconds of a block without recomputation."""
        return sum(cost.seconds for costs in (self.forward, self.backward) for cost in costs.values())

    def at_clock(self, factor: float) -> PassCosts:
        """Everything with arithmetic that takes `factor` times as long."""
        forward = {name: cost.at_clock(factor) for name, cost in self.forward.items()}
        backward = {name: cost.at_clock(factor) for name, cost in self.backward.items()}
        again, embedding, head = (cost.at_clock(factor) for cost in (self.again, self.embedding, self.head))
        return PassCosts(forward, backward, again, embedding, head)


def pass_costs(model: ModelConfig, settings: MemorySettings, machine: Machine) -> PassCosts:
    """Forward and backward of one micro-batch."""
    whole = dataclasses.replace(settings, stage=None)
    held = whole.held(model)
    price = _Prices(machine, settings)
    share = model.expert_layers / model.layers
    forward, backward = price.attention_half(held)
    dense = price.feed_forward(held.intermediate_size, model.hidden_size, settings.tokens)
    experts = price.experts(held) if share else ({}, {})
    for total, of_dense, of_experts in ((forward, dense[0], experts[0]), (backward, dense[1], experts[1])):
        for name in {*of_dense, *of_experts}:
            mixed = of_dense.get(name, Cost()) * (1 - share) + of_experts.get(name, Cost()) * share
            total[name] = total.get(name, Cost()) + mixed
    again = again_cost(model, settings, forward, machine)
    return PassCosts(forward, backward, again, price.embedding(held), price.head(held))


def again_cost(model: ModelConfig, settings: MemorySettings, forward: Mapping[str, Cost], machine: Machine) -> Cost:
    """The second forward of a recomputed block."""
    if settings.recompute == "none":
        return Cost()
    held, price = dataclasses.replace(settings, stage=None).held(model), _Prices(machine, settings)
    elementwise, attention = forward["element-wise"], forward["attention"]
    if settings.recompute == "selective":
        shapes = linear_shapes(held)
        qkv = price.product("forward", settings.tokens, *shapes["qkv"])
        found = elementwise + (qkv if settings.operators["rope"].overwrites(model.qk_norm) else Cost())
        is_kept = settings.operators["attention"].is_fused and not model.attention_dropout
        return found if is_kept else found + attention
    runs_whole = settings.operators["feed_forward"].is_fused or model.moe.experts
    down = Cost() if runs_whole else price.product("forward", settings.tokens, *linear_shapes(held)["down"])
    recomputed = recomputed_blocks(model, settings.recompute, settings.recompute_every)
    stopped = stopped_blocks(model, settings.recompute, settings.recompute_every) / recomputed
    return forward["matmuls"] + elementwise + attention + down * -stopped


_work = functools.lru_cache(operator_work)


class _Prices:
    """The cost of work on a machine under some settings."""

    def __init__(self, machine: Machine, settings: MemorySettings) -> None:
        self.machine, self.settings = machine, settings
        self.width = WIDTHS[settings.precision]
        self.is_float8 = settings.operators["linear"].weight_copy_bytes > 0
        wide = "float32" if settings.precision in ("float32", "float64") else settings.precision
        self.dtype = wide if wide in machine.peak_flops else "float32"

    def product(self, kind: Kind, tokens: float, rows: int, columns: int, dtype: str | None = None) -> Cost:
        """One of the three products of a linear layer, as the profile names their sizes."""
        sizes = {"forward": (tokens, rows, columns), "dgrad": (tokens, columns, rows)}
        m, n, k = sizes.get(kind, (rows, columns, tokens))
        dtype = dtype or ("float8" if self.is_float8 else self.dtype)
        flops = 2.0 * tokens * rows * columns
        seconds = self.machine.matmul_seconds(m, n, k, kind, dtype)
        if dtype == "float8" and not any(one.dtype == "float8" for one in self.machine.matmuls):
            moved = 0.0 if kind == "wgrad" else QUANTISE_BYTES * m * k
            seconds += moved / self.machine.stream_bytes_per_second
        return Cost(seconds, min(seconds, flops / self.machine.peak_of(dtype)), flops, matmul=seconds)

    def linear(self, tokens: float, rows: int, columns: int, dtype: str | None = None) -> tuple[Cost, Cost]:
        """Forward, and both products of the backward pass."""
        price = functools.partial(self.product, tokens=tokens, rows=rows, columns=columns, dtype=dtype)
        return price("forward"), price("dgrad") + price("wgrad")

    def moved(self, name: str, size: float) -> Cost:
        """An operator that moves so many bytes."""
        if size <= 0:
            return Cost()
        seconds = self.machine.operator_seconds(name, size)
        return Cost(seconds, min(seconds, size / (1.15 * self.machine.stream_bytes_per_second)), 0.0, size)

    def attention_half(self, held: ModelConfig) -> tuple[dict[str, Cost], dict[str, Cost]]:
        """Norms of the block, projections and attention; with context parallelism a process has all pairs of its
        tokens, which is as much as whole sequences of fewer tokens."""
        settings, tokens, shapes = self.settings, self.settings.tokens, linear_shapes(held)
        forward, backward = Cost(), Cost()
        for name in ("qkv", "out"):
            one, both = self.linear(tokens, *shapes[name])
            forward, backward = forward + one, backward + both
        work = _work(held, tokens, settings.seq_len, self.width)
        share = 1 / settings.tensor  # tensor ranks share the tokens of norms
        norm, rope = work["rms_norm"], work["rope"]
        norms = [
            self.moved("rms_norm", norm.forward_bytes * share) * 2,
            self.moved("rms_norm/backward", norm.backward_bytes * share) * 2,
        ]
        ropes = [self.moved("rope", rope.forward_bytes), self.moved("rope/backward", rope.backward_bytes)]
        sizes = (tokens, settings.seq_len, held.heads, held.kv_heads, held.head_size)
        peak = self.machine.peak_flops[self.dtype]
        price = functools.partial(self.machine.attention_seconds, *sizes, dtype=self.dtype)
        times = [price(backward=False), price(backward=True)]
        flops = [work["attention"].forward_flops, work["attention"].backward_flops]
        attention = [
            Cost(time, min(time, done / peak), done, attention=time) for time, done in zip(times, flops, strict=True)
        ]
        return (
            {"matmuls": forward, "attention": attention[0], "element-wise": norms[0] + ropes[0]},
            {"matmuls": backward, "attention": attention[1], "element-wise": norms[1] + ropes[1]},
        )

    def feed_forward(self, inner: int, hidden: int, tokens: float) -> tuple[dict[str, Cost], dict[str, Cost]]:
        """SwiGLU with its three matrices."""
        up, down = self.linear(tokens, 2 * inner, hidden), self.linear(tokens, hidden, inner)
        one = float(tokens * inner * self.width)
        return (
            {"matmuls": up[0] + down[0], "element-wise": self.moved("swiglu", 3 * one)},
            {"matmuls": up[1] + down[1], "element-wise": self.moved("swiglu/backward", 5 * one)},
        )

    def experts(self, held: ModelConfig) -> tuple[dict[str, Cost], dict[str, Cost]]:
        """Router, sorting, experts, shared experts. They see the tokens that a tensor rank has in the residual; experts
        that are spread get those of all processes they are spread over."""
        moe, tokens = held.moe, self.settings.tokens / self.settings.tensor
        each = max(1.0, tokens * moe.experts_per_token * self.settings.expert / max(1, held.router_rows))
        rows = each * moe.experts
        forward, backward = Cost(), Cost()
        for height, columns in ((2 * moe.expert_size, held.hidden_size), (held.hidden_size, moe.expert_size)):
            one = self.machine.matmul_seconds(rows, height, columns, "forward", "grouped")
            both = self.machine.matmul_seconds(rows, columns, height, "dgrad", "grouped")
            both += self.machine.matmul_seconds(height * moe.experts, columns, each, "wgrad", "grouped")
            flops, peak = 2.0 * rows * height * columns, self.machine.peak_of("grouped")
            # Every expert has tiles of its own: a few rows cost as much as a tile of them.
            padding = 1.0 if self.machine.matmuls else math.ceil(each / 64) * 64 / each
            forward += Cost(one * padding, min(one, flops / peak), flops, matmul=one * padding)
            backward += Cost(both * padding, min(both, 2 * flops / peak), 2 * flops, matmul=both * padding)
        router = self.linear(tokens, held.router_rows, held.hidden_size, self.dtype)
        moved = float(rows * held.hidden_size * self.width)
        # Beside the products: rows are gathered, weighted and added up again; gates and ups.
        apart = moved if "moe" in self.machine.operators else 6 * moved + 3.0 * rows * moe.expert_size * self.width
        ahead = {"matmuls": forward + router[0], "element-wise": self.moved("moe", apart)}
        apart = moved if "moe/backward" in self.machine.operators else 1.5 * apart
        back = {"matmuls": backward + router[1], "element-wise": self.moved("moe/backward", apart)}
        if held.shared_size:
            shared = self.feed_forward(held.shared_size, held.hidden_size, tokens)
            ahead = {name: ahead[name] + shared[0][name] for name in ahead}
            back = {name: back[name] + shared[1][name] for name in back}
        return ahead, back

    def embedding(self, held: ModelConfig) -> Cost:
        """Rows of the ids, and their gradients."""
        work = _work(held, self.settings.tokens, self.settings.seq_len, self.width)["embedding"]
        return self.moved("embedding", work.forward_bytes) + self.moved("embedding/backward", work.backward_bytes)

    def head(self, held: ModelConfig) -> Cost:
        """Last norm, head and cross-entropy, forward and backward."""
        tokens, rows = self.settings.tokens, held.vocab_rows
        forward, backward = self.linear(tokens, rows, held.hidden_size, self.dtype)
        logits = float(tokens * rows * self.width)
        if "linear_cross_entropy" not in self.machine.operators:
            logits *= LOSS_BYTES_PER_LOGIT
        return forward + backward + self.moved("linear_cross_entropy", logits)


# ---- the step --------------------------------------------------------------------------------------------------------


def head_in_blocks(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of the head, in those of a block (the mean over blocks)."""
    head = 6.0 * model.vocab_rows * model.hidden_size
    return head / ((flops_per_token(model, seq_len)["causal"] - head) / model.layers)


def stage_blocks(layers: int, stages: int, head: float) -> tuple[int, int]:
    """Blocks of the largest stage but the last, and of the last, which also has a head worth `head` blocks: the cut
    whose dearest stage is cheapest (`zero2all.parallel.pipeline.make_stages`)."""
    if stages == 1:
        return 0, layers
    options = range(1, layers - stages + 2)
    last = min(options, key=lambda blocks: (max(-(-(layers - blocks) // (stages - 1)), blocks + head), -blocks))
    return -(-(layers - last) // (stages - 1)), last


BUBBLE_KEPT = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "zero_bubble": 1 / 3}
"""Of the bubble of 1f1b; interleaved also divides it by its chunks. Where forward, backward by inputs and backward by
weights take as long each, zero_bubble keeps f + b - w of f + b + w."""


@dataclass(frozen=True)
class Slowest:
    """The process of a pipeline that all others wait for, and how long the pipeline fills."""

    layers: int
    has_embedding: bool
    has_head: bool
    fill: float  # seconds


def slowest_stage(
    model: ModelConfig, settings: MemorySettings, costs: PassCosts, schedule: str, chunks: int
) -> Slowest:
    """Of the stages with most blocks, and of the last one."""
    stages = settings.pipeline * chunks
    if settings.pipeline == 1:
        return Slowest(model.layers, True, True, 0.0)
    others, last = stage_blocks(model.layers, stages, head_in_blocks(model, settings.seq_len))
    block = costs.block + costs.again.seconds * recomputed_share(model, settings)
    at_last = last * block + costs.head.seconds + (chunks - 1) * others * block
    at_first = chunks * others * block + costs.embedding.seconds
    whole = model.layers * block + costs.head.seconds + costs.embedding.seconds
    dearest = max(at_last, at_first)
    fill = max(0.0, whole - dearest) / chunks * BUBBLE_KEPT[schedule]
    if at_last >= at_first:
        return Slowest(last + (chunks - 1) * others, False, True, fill)
    return Slowest(chunks * others, True, False, fill)


def recomputed_share(model: ModelConfig, settings: MemorySettings) -> float:
    """Of the blocks, those whose forward runs twice."""
    return recomputed_blocks(model, settings.recompute, settings.recompute_every) / model.layers


class PassOrder(NamedTuple):
    """How the passes of a step are started."""

    schedule: str = "1f1b"
    """In which order the stages of a pipeline compute."""
    chunks: int = 1
    """Parts of the model in each stage."""
    cuda_graph: bool = False
    """Passes that do not communicate are captured (`zero2all.train.cuda_graph`)."""


ONE_STAGE = PassOrder()


def predict_step(
    model: ModelConfig,
    settings: MemorySettings,
    machine: Machine,
    order: PassOrder = ONE_STAGE,
    tokens: int | None = None,
    costs: PassCosts | None = None,
) -> StepTime:
    """The time of a step; `settings.passes` micro-batches in each process. `settings.stage` is not used: the slowest
    stage is found here. `tokens` of the step, where some are padding; None: those of all micro-batches. `costs`:
    `pass_costs` of these settings, if they are known already."""
    schedule, chunks, cuda_graph = order
    costs = costs or pass_costs(model, settings, machine)
    costs = costs.at_clock(_clock_factor(model, settings, machine, costs))
    slowest = slowest_stage(model, settings, costs, schedule, chunks)
    passes, layers = settings.passes, slowest.layers
    doubt = machine.doubt
    names = dict.fromkeys([*costs.forward, *costs.backward])
    both = {name: costs.forward.get(name, Cost()) + costs.backward.get(name, Cost()) for name in names}
    computed = {name: cost * (passes * layers) for name, cost in both.items()}
    if slowest.has_embedding:
        computed["element-wise"] += costs.embedding * passes
    computed["loss"] = costs.head * (passes * slowest.has_head)
    computed["recompute"] = costs.again * (passes * layers * recomputed_share(model, settings))
    parts = [_computed(name, cost, doubt) for name, cost in computed.items()]
    device = math.fsum(cost.seconds for cost in computed.values())
    forward = passes * layers * math.fsum(cost.seconds for cost in costs.forward.values())
    held_stage = None
    if settings.pipeline > 1:
        sends = 2 * chunks - slowest.has_embedding - slowest.has_head if settings.pipeline * chunks > 1 else 0
        held_stage = HeldStage(layers, slowest.has_embedding, slowest.has_head, 1.0, max(1, sends))
    held = dataclasses.replace(settings, stage=held_stage)
    windows = _Windows(device, forward, device - forward, passes, layers)
    parts += _communication(model, held, machine, windows)
    if settings.pipeline > 1:
        parts.append(_waiting("bubble", slowest.fill))
    parts += _update(model, held, machine, doubt)
    parts += _host(settings, machine, device, layers, cuda_graph)
    if tokens is None:
        tokens = settings.micro_batch_samples * settings.seq_len * passes * settings.replicate * settings.shard
    flops = {name: value * tokens for name, value in flops_per_token(model, settings.seq_len).items()}
    dtype = settings.precision if settings.precision in machine.peak_flops else "float32"
    shown = tuple(part for part in parts if part.upper > 0)
    return StepTime(shown, tokens, settings.processes, flops, machine.peak_of(dtype))


def _clock_factor(model: ModelConfig, settings: MemorySettings, machine: Machine, costs: PassCosts) -> float:
    """Of a whole step, the update included: the clock follows the power over many kernels."""
    if not machine.draw:
        return 1.0
    blocks = sum([*costs.forward.values(), *costs.backward.values()], Cost())
    a_pass = (blocks + costs.again * recomputed_share(model, settings)) * model.layers + costs.embedding + costs.head
    update = sum(part.estimate for part in _update(model, settings, machine, 0.0))
    whole = a_pass.seconds * settings.passes + update
    return machine.clock_factor(a_pass.matmul * settings.passes, a_pass.attention * settings.passes, whole)


def _computed(name: str, cost: Cost, doubt: float) -> StepPart:
    return StepPart(name, cost.least, cost.seconds, cost.seconds / SLOWEST, cost.flops, cost.bytes, 0.0, doubt)


def _waiting(name: str, seconds: float, least: float = 0.0, hidden: float = 0.0, sent: float = 0.0) -> StepPart:
    upper = (seconds + hidden) / SLOWEST
    return StepPart(name, min(least, seconds), seconds, upper, 0.0, sent, hidden, DOUBT_OF_WAITING)


@dataclass(frozen=True)
class _Windows:
    """Seconds of computation of a step that a collective can run beside."""

    device: float
    forward: float
    backward: float
    passes: int
    layers: int

    def of(self, transfer: Transfer, zero: int) -> float:
        """By what hides it; the first or the last piece always waits."""
        most = 1 - 1 / max(2, self.layers)
        if transfer.hidden_by == "last backward":
            return most * self.backward / (1 if zero == 2 else self.passes)
        if transfer.hidden_by == "next forward":
            return most * self.forward / self.passes
        return most * self.device if transfer.hidden_by else 0.0


def axis_link(settings: MemorySettings, machine: Machine, axis: str, ranks: int) -> GpuLink:
    """What the processes of an axis talk over. Numbers count along tensor first, then context, shard, replicate and
    pipeline (`zero2all.parallel.mesh`); experts are spread over the innermost."""
    strides = {"tensor": 1, "expert": 1, "context": settings.tensor, "shard": settings.tensor * settings.context}
    strides["expert_shard"] = settings.expert
    strides["replicate"] = strides["shard"] * settings.shard
    strides["pipeline"] = strides["replicate"] * settings.replicate
    spans = [strides[name] * getattr(settings, name) for name in axis.split(" x ") if name in strides]
    return machine.link_of(ranks, max(1, max(spans, default=ranks) // ranks))


def transfer_calls(transfer: Transfer, model: ModelConfig, settings: MemorySettings) -> float:
    """Collectives of a step that move a transfer: each costs its latency."""
    held = settings.held(model)
    states = settings.tokens * model.hidden_size * WIDTHS[settings.precision]
    if transfer.axis == "pipeline":
        return settings.passes * max(1, settings.stage.sends if settings.stage else 1)
    if transfer.what == "hidden states":
        return max(1.0, transfer.whole / states)
    if transfer.what in ("gradients", "weights"):
        piece = settings.bucket_bytes
        if settings.is_fsdp:
            width = 4 if transfer.what == "gradients" else WIDTHS[settings.precision]
            piece = width * parameter_counts(held)["total"] / max(1, held.layers)
        return max(1.0, transfer.whole / piece)
    if transfer.what == "keys and values":
        return float(settings.passes * held.layers)
    if transfer.what in ("attention heads", "tokens"):
        return 4.0 * settings.passes * held.layers
    return 1.0


def _communication(model: ModelConfig, settings: MemorySettings, machine: Machine, windows: _Windows) -> list[StepPart]:
    """One part for each axis."""
    found: dict[str, StepPart] = {}
    for transfer in communication_per_step(model, settings):
        link = axis_link(settings, machine, transfer.axis, transfer.ranks)
        calls = transfer_calls(transfer, model, settings)
        one = machine.collective_seconds(transfer.collective, transfer.whole / calls, transfer.ranks, link)
        seconds, window = calls * one, windows.of(transfer, settings.zero)
        hidden = min(max(0.0, seconds - one), window) * (1 - OVERLAP_COST)
        least = 0.0 if transfer.hidden_by else transfer.sent / max(link.bytes_per_second / 0.8, 1.0)
        part = _waiting(f"communication, {transfer.axis}", seconds - hidden, least, hidden, transfer.sent)
        known = found.get(part.name)
        found[part.name] = part if known is None else _joined(known, part)
    return list(found.values())


def _joined(first: StepPart, second: StepPart) -> StepPart:
    names = ("lower", "estimate", "upper", "bytes", "hidden")
    return dataclasses.replace(first, **{name: getattr(first, name) + getattr(second, name) for name in names})


def owned_values(model: ModelConfig, settings: MemorySettings) -> float:
    """Parameters that one process updates."""
    held = settings.held(model)
    experts = expert_values(held)
    dense = parameter_counts(held)["total"] - experts
    if not settings.zero:
        return float(dense + experts)
    return dense / settings.shard + experts / max(1, settings.expert_shard)


def _update(model: ModelConfig, settings: MemorySettings, machine: Machine, doubt: float) -> list[StepPart]:
    """Norm, update and clearing on the device; or copies, and the update on the host, piece by piece."""
    values = owned_values(model, settings)
    price = _Prices(machine, settings)
    norm, zero = (price.moved(name, 4 * values) for name in ("grad_norm", "zero"))
    update = price.moved("adamw", optimizer_work(1).forward_bytes * values)
    if settings.offload == "none":
        return [_computed("optimizer", norm + update + zero, doubt)]
    width = WIDTHS[settings.precision]
    known = machine.operators.get("host_adamw")
    host = known.seconds(optimizer_work(1).forward_bytes * values) if known else HOST_ADAMW_SECONDS * values
    down = machine.copy_seconds("d2h", settings.gradient_bytes * values)
    up = machine.copy_seconds("h2d", width * values)
    # Pieces come, are updated and go at once: the slowest of the three counts.
    return [_computed("optimizer", norm, doubt), _waiting("offload", max(down, host, up), max(down, up))]


def queueing_seconds(settings: MemorySettings, machine: Machine, layers: int) -> float:
    """What the host takes to queue a pass."""
    again = 0.5 if settings.recompute in WHOLE_FORWARD else 0.2 if settings.recompute == "selective" else 0.0
    return machine.host_op_seconds * HOST_OPS_PER_BLOCK * layers * (1 + again)


def _host(settings: MemorySettings, machine: Machine, device: float, layers: int, cuda_graph: bool) -> list[StepPart]:
    """What queueing takes longer than the device."""
    one = queueing_seconds(settings, machine, layers)
    queued = one * (settings.passes if not cuda_graph else 1 if settings.processes > 1 else 0)
    window = device if not cuda_graph else device / settings.passes
    return [_waiting("host", max(0.0, queued - window))]
