"""Forward and backward of a micro-batch as one CUDA graph, where the host might limit the step.

Queueing a pass takes the host 3 ms a block and more, on slow hosts twice that; with small micro-batches the device is
done sooner and waits. A graph is queued by one call, but keeps the memory of a pass for itself: where the host is not
the likely limit, it is captured only if the process has taken little of the device's memory. The kernels and their
results are the same, bit for bit; only the addresses of tensors are fixed at capture: the shape of the batch (another
one is captured again), the weights, the tables of positions (compared before each replay), and float8 copies of
weights, which are updated before a replay instead of inside it.

A pass that communicates or decides something on the host cannot be captured: `why_no_cuda_graph` lists the cases. With
several processes the last pass of a step sends the gradients, and runs eagerly; so does a last pass of fewer samples.
"""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.config import RunConfig
from zero2all.estimate.flops import flops_per_token, peak_flops
from zero2all.model.z2all import Z2all
from zero2all.ops.linear import fp8_linear
from zero2all.ops.registry import Ops

EAGER_PASSES = 2
"""Passes before a capture: kernels must be compiled and loaded by then."""
MOST_CAPTURES = 16
"""Stages change the shape of a pass a few times; where every step changes it, a graph does not pay."""
HOST_SECONDS_PER_BLOCK = {"fp8": 5e-3}
OTHER_HOST_SECONDS_PER_BLOCK = 3e-3
"""To queue forward and backward of a block, by `ops.linear`: measured at 4.4 and 2.9 ms beside an H200."""
USUAL_UTILISATION = {"fp8": 0.85}
OTHER_UTILISATION = 0.6
"""Of the device's bfloat16 peak, while it is busy."""
ROOMY_SHARE = 0.25
"""Of the device's memory: a process that has taken at most this much has room for a second pass."""


def choose_cuda_graph(
    config: RunConfig, model: Z2all, device: torch.device, processes: int, samples: int, rows: int
) -> CudaGraphPasses | None:
    """As `train.cuda_graph` says, for passes of `samples` of the `rows` samples that a process has in a step; None:
    without a graph."""
    asked, ops = config.train.cuda_graph, model.ops
    if asked == "off":
        return None
    problem = why_no_cuda_graph(config, device, processes, ops)
    if problem is None and processes > 1 and rows <= samples:
        problem = "the only pass of a step sends gradients to other processes"
    if problem is not None and asked == "on":
        raise _refusal(problem)
    if problem is not None:
        return None
    tokens = min(samples, rows) * config.data.seq_len
    needs_room = asked == "auto" and not is_worth_it(config, torch.cuda.get_device_name(device), tokens, ops)
    return CudaGraphPasses(model, config.train.z_loss, device, insists=asked == "on", needs_room=needs_room)


def check_cuda_graph(config: RunConfig, device: torch.device, processes: int, ops: Ops) -> None:
    """Refuse `train.cuda_graph: on` where it is impossible, before any long work begins."""
    problem = why_no_cuda_graph(config, device, processes, ops)
    if config.train.cuda_graph == "on" and problem is not None:
        raise _refusal(problem)


def why_no_cuda_graph(config: RunConfig, device: torch.device, processes: int, ops: Ops) -> str | None:
    """Why passes of this run cannot be captured; None: they can."""
    model, taken = config.model, ops.taken
    dropouts = (model.attention_dropout, model.residual_dropout, model.embedding_dropout)
    problems = {
        "it needs a CUDA device": device.type != "cuda",
        "with parallel.zero 2 or 3, and with pipeline, context, tensor or expert, every pass communicates": (
            processes > 1 and config.parallel.every_pass_communicates
        ),
        "with parallel.offload new weights arrive during a pass": config.parallel.offload != "none",
        "experts need train.precision bfloat16 for it": (
            model.moe.experts > 0 and config.train.precision != "bfloat16"
        ),
        "ops.compile captures its own graphs": ops.compile != "none",
        f"train.recompute {config.train.recompute} reads the device's random state": config.train.recompute != "none",
        "float16 scales the loss, and the scale changes": config.train.precision == "float16",
        "dropout draws new numbers in every pass": any(dropouts),
        "data.document_mask changes the shape of attention in every pass": config.data.document_mask,
        "ops.attention flex is compiled": taken["attention"] == "flex",
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


def is_worth_it(config: RunConfig, device_name: str, tokens: int, ops: Ops) -> bool:
    """Whether the host is likely to need longer than the device for a pass of this many tokens."""
    peak = peak_flops(device_name)
    if peak is None:
        return False
    linear = ops.taken["linear"]
    busy = USUAL_UTILISATION.get(linear, OTHER_UTILISATION) * peak
    device_seconds = tokens * flops_per_token(config.model, config.data.seq_len)["seed"] / busy
    host_seconds = config.model.layers * HOST_SECONDS_PER_BLOCK.get(linear, OTHER_HOST_SECONDS_PER_BLOCK)
    return device_seconds < host_seconds


class CudaGraphPasses:
    """Runs passes of one model: the first ones of a shape eagerly, the others by replaying a graph."""

    def __init__(
        self, model: Z2all, z_loss: float, device: torch.device, insists: bool = False, needs_room: bool = False
    ) -> None:
        self._model, self._z_loss, self._device = model, z_loss, device
        self._insists, self.needs_room = insists, needs_room
        # A priority of its own, so that it is not one of the streams that copy batches.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._key: tuple[object, ...] | None = None
        self._seen, self._captures = 0, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ids, self._shares, self._losses = (torch.empty(0),) * 3
        self.problem = ""
        """Why passes are no longer captured; empty while they are."""

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def __call__(self, ids: Tensor, shares: Tensor) -> Tensor:
        """Ids (B, T + 1) and the weight of each position (B, T) -> losses (B, T), which the next pass overwrites. The
        gradient is added to that of the weights."""
        model = self._model
        key = (ids.shape, shares.dtype, model.cos.data_ptr(), model.sin.data_ptr(), model.training)
        if key != self._key:
            self._forget()
            self._key, self._seen = key, 0
        if not self.problem and self._graph is None and self._seen >= EAGER_PASSES and self._has_room():
            self._capture_or_leave(ids, shares)
        if self._graph is None:
            self._seen += 1
            return self._eager(ids, shares)
        self._ids.copy_(ids)
        self._shares.copy_(shares)
        fp8_linear.renew_copies(model.parameters())
        self._graph.replay()
        return self._losses

    def _has_room(self) -> bool:
        """Whether the device's memory allows a graph that is only useful if the host is slow."""
        if not self.needs_room:
            return True
        total = torch.cuda.get_device_properties(self._device).total_memory
        return torch.cuda.max_memory_reserved(self._device) <= ROOMY_SHARE * total

    def _eager(self, ids: Tensor, shares: Tensor) -> Tensor:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            losses = self._forward_backward(ids, shares)
        here.wait_stream(self._stream)
        for given in (ids, shares):
            given.record_stream(self._stream)
        losses.record_stream(here)
        return losses

    def _forward_backward(self, ids: Tensor, shares: Tensor) -> Tensor:
        total, losses = self._model.loss(ids[:, :-1], ids[:, 1:], shares, None, self._z_loss)
        total.backward()
        return losses

    def _capture_or_leave(self, ids: Tensor, shares: Tensor) -> None:
        self._captures += 1
        if self._captures > MOST_CAPTURES:
            self.problem = f"the shape of a pass has changed {MOST_CAPTURES} times"
            return
        fp8_linear.renew_copies(self._model.parameters())
        self._ids, self._shares = ids.clone(), shares.clone()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        self._capture()
        kept = torch.cuda.memory_reserved(self._device) - before
        if self._graph is not None and not self._insists and torch.cuda.mem_get_info(self._device)[0] < kept:
            # Validation and the optimizer used the memory of a pass between passes. They still need it.
            self.problem = f"it would reserve {kept / 2**30:.1f} GiB, and less than that would stay free"
            self._forget()

    def _capture(self) -> None:
        graph, pool, here = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        drawn = torch.cuda.get_rng_state(self._device)
        try:
            # Other threads (a checkpoint being written) continue meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                self._losses = self._forward_backward(self._ids, self._shares)
        except Exception as error:  # each package's compiler has errors of its own
            torch.cuda.set_stream(here)  # torch keeps the capture's stream current when the end of the capture fails
            _renew_generator(drawn, self._device)
            self.problem = reason_of(error)
            if self._insists:
                raise _refusal(self.problem) from error
        else:
            self._graph = graph
            return
        del graph
        gc.collect()  # frees what the frames of the error held
        _give_back(pool, self._device)

    def _forget(self) -> None:
        self._graph, self._losses = None, torch.empty(0)


def _refusal(problem: str) -> UsageError:
    """The error for a graph that was asked for."""
    return UsageError(
        f"train.cuda_graph is on, but the passes of this run cannot be captured: {problem}. Use auto or off."
    )


def reason_of(error: BaseException) -> str:
    """The first line of the root cause."""
    while error.__context__ is not None:
        error = error.__context__
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _renew_generator(state: Tensor, device: torch.device) -> None:
    """Give the device's generator another state with the same numbers: when the end of a capture fails, torch leaves
    the old one as captured, and every later draw raises."""
    fresh = torch.Generator(device)
    fresh.set_state(state)
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())


def _give_back(pool: tuple[int, int], device: torch.device) -> None:
    """Free the memory of a capture that failed: when its end fails, torch's allocator still counts it as running."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)
    torch.cuda.empty_cache()
    with contextlib.suppress(RuntimeError):
        if torch.cuda.memory_snapshot(pool):
            torch._C._cuda_releasePool(index, pool)
            torch.cuda.empty_cache()
