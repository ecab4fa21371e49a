"""Forward and backward of a micro-batch as one recording (a CUDA graph), where the host would be the limit.

Queueing a pass takes the host some thousand calls, 2.5 ms a block and more. With small micro-batches the device is done
sooner than that and waits. A recording is queued by one call: the device has the list of kernels and runs down it. The
kernels are the same, so are their results, bit for bit; only where their tensors lie is decided once. Hence what must
stay put: the shape of the batch (another one is recorded anew), the weights (they do), the tables of positions (looked
at), and float8 copies of weights, which are brought up to date before a replay instead of inside it.

What a pass decides on the host cannot be recorded: `why_not_recorded` says where that is.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.common.progress import say
from zero2all.config import RunConfig
from zero2all.limits.flops import flops_per_token, peak_flops
from zero2all.model.z2all import Z2all
from zero2all.ops.registry import Ops

EAGER_PASSES = 2
"""Before a recording: kernels must be compiled and loaded by then."""
HOST_SECONDS_PER_BLOCK = {"fp8": 5e-3}
OTHER_HOST_SECONDS_PER_BLOCK = 3e-3
"""To queue forward and backward of a block, by `ops.linear`: measured at 4.7 and 2.6 ms beside an H200."""
USUAL_UTILISATION = {"fp8": 0.85}
OTHER_UTILISATION = 0.6
"""Of the device's bfloat16 peak, while it is busy."""


def why_not_recorded(config: RunConfig, device: torch.device, processes: int, ops: Ops) -> str | None:
    """What stands against recording passes of this run; None: nothing."""
    model, taken = config.model, ops.taken
    dropouts = (model.attention_dropout, model.residual_dropout, model.embedding_dropout)
    theirs = sorted(operator for operator, name in taken.items() if name == "liger")
    problems = {
        "it needs a CUDA device": device.type != "cuda",
        "processes exchange gradients within a pass": processes > 1,
        "ops.compile keeps recordings of its own": ops.compile != "none",
        f"train.recompute: {config.train.recompute} looks at the device's random state": config.train.recompute
        != "none",
        "float16 scales the loss": config.train.precision == "float16",
        "micro_batch_samples: auto and cuda_graph: on would both want the memory": config.train.cuda_graph == "on"
        and config.train.micro_batch_samples == "auto",
        "dropout draws numbers anew in every pass": any(dropouts),
        "data.document_mask gives every pass another shape of attention": config.data.document_mask,
        "ops.attention: flex is compiled": taken["attention"] == "flex",
        f"liger-kernel's {', '.join(theirs)} may wait for the device": bool(theirs),
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


def is_worth_it(config: RunConfig, device_name: str, tokens: int, ops: Ops) -> bool:
    """Whether the host is likely to need longer than the device for a pass of so many tokens."""
    peak = peak_flops(device_name)
    if peak is None:
        return False
    linear = ops.taken["linear"]
    busy = USUAL_UTILISATION.get(linear, OTHER_UTILISATION) * peak
    device_seconds = tokens * flops_per_token(config.model, config.data.seq_len)["seed"] / busy
    host_seconds = config.model.layers * HOST_SECONDS_PER_BLOCK.get(linear, OTHER_HOST_SECONDS_PER_BLOCK)
    return device_seconds < host_seconds


class RecordedPasses:
    """Runs passes of one model; the first ones of a shape as they come, the others from a recording."""

    def __init__(self, model: Z2all, z_loss: float, device: torch.device, insists: bool = False) -> None:
        self._model, self._z_loss, self._device, self._insists = model, z_loss, device, insists
        # A recording is made in a stream of its own, and what autograd keeps for each weight belongs to the stream of
        # its first backward pass. Of another priority than those that copy batches, so that it is none of them.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._key: tuple[object, ...] | None = None
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ids, self._shares, self._losses = (torch.empty(0),) * 3
        self.problem = ""
        """Why recording failed, where it did."""

    @property
    def is_recorded(self) -> bool:
        """Whether there is a recording."""
        return self._graph is not None

    def __call__(self, ids: Tensor, shares: Tensor) -> Tensor:
        """Ids (B, T + 1) and what each position counts (B, T) -> losses (B, T), which the next pass overwrites. The
        gradient is added where the weights keep it."""
        model = self._model
        key = (ids.shape, shares.dtype, model.cos.data_ptr(), model.sin.data_ptr(), model.training)
        if key != self._key:
            self._key, self._seen, self._graph, self._losses = key, 0, None, torch.empty(0)
        if self.problem:
            return self._forward_backward(ids, shares)
        if self._graph is None and self._seen >= EAGER_PASSES:
            self._record(ids, shares)
        if self._graph is None:
            self._seen += 1
            return self._as_it_comes(ids, shares)
        self._ids.copy_(ids)
        self._shares.copy_(shares)
        _renew_float8(model)
        self._graph.replay()
        return self._losses

    def _as_it_comes(self, ids: Tensor, shares: Tensor) -> Tensor:
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

    def _record(self, ids: Tensor, shares: Tensor) -> None:
        _renew_float8(self._model)
        self._ids, self._shares = ids.clone(), shares.clone()
        graph, pool, here = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        try:
            # Other threads (a checkpoint being written) go on meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                self._losses = self._forward_backward(self._ids, self._shares)
        except Exception as error:  # the packages' compilers have errors of their own
            torch.cuda.set_stream(here)  # torch leaves the recording's stream in force when its end fails
            with contextlib.suppress(RuntimeError):  # and its allocator in the belief that the recording goes on
                torch._C._cuda_endAllocateToPool(here.device_index, pool)
            if self._insists:
                raise
            self.problem = str(_first(error)).splitlines()[0]
            say(f"a pass could not be recorded ({self.problem}); passes are queued kernel by kernel, as before")
            return
        self._graph = graph


def _first(error: BaseException) -> BaseException:
    """What went wrong before everything that went wrong because of it."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def recorded_passes(
    config: RunConfig, model: Z2all, device: torch.device, processes: int, samples: int, samples_per_step: int
) -> RecordedPasses | None:
    """As `train.cuda_graph` says, for passes of so many samples; None: passes are not recorded."""
    asked, ops = config.train.cuda_graph, model.ops
    if asked == "off":
        return None
    problem = why_not_recorded(config, device, processes, ops)
    if problem is None and samples_per_step % samples:
        problem = f"passes of {samples} samples do not divide a step of {samples_per_step}: the last differs"
    if problem is not None and asked == "on":
        raise UsageError(f"train.cuda_graph = on: a pass of this run cannot be recorded: {problem}. Use auto or off.")
    if problem is not None:
        return None
    if asked == "auto" and not is_worth_it(
        config, torch.cuda.get_device_name(device), samples * config.data.seq_len, ops
    ):
        return None
    return RecordedPasses(model, config.train.z_loss, device, insists=asked == "on")


def _renew_float8(model: Z2all) -> None:
    for parameter in model.parameters():
        if hasattr(parameter, "float8"):
            from zero2all.ops.kernels.linear import float8_weight

            float8_weight(parameter)
