"""Whether a run records its passes: what stands against it, and where it pays."""

from __future__ import annotations

import torch

from zero2all.config import RunConfig
from zero2all.limits.flops import flops_per_token, peak_flops
from zero2all.model.z2all import Z2all
from zero2all.ops.registry import Ops
from zero2all.train.recorded import RecordedPasses, refusal

HOST_SECONDS_PER_BLOCK = {"fp8": 5e-3}
OTHER_HOST_SECONDS_PER_BLOCK = 3e-3
"""To queue forward and backward of a block, by `ops.linear`: measured at 4.4 and 2.9 ms beside an H200."""
USUAL_UTILISATION = {"fp8": 0.85}
OTHER_UTILISATION = 0.6
"""Of the device's bfloat16 peak, while it is busy."""


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
        raise refusal(problem)
    if problem is not None:
        return None
    if asked == "auto" and not is_worth_it(
        config, torch.cuda.get_device_name(device), samples * config.data.seq_len, ops
    ):
        return None
    return RecordedPasses(model, config.train.z_loss, device, insists=asked == "on")


def check_recording(config: RunConfig, device: torch.device, processes: int, ops: Ops) -> None:
    """Refuse a recording that is asked for and cannot be, before anything long is begun."""
    problem = why_not_recorded(config, device, processes, ops)
    if config.train.cuda_graph == "on" and problem is not None:
        raise refusal(problem)


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
