"""The same model and batch through Hugging Face and through zero2all, one after the other in one process.

    python benchmarks/peers.py                       z2all-1b with AdamW on one GPU, 30 s each: about ten minutes
    python benchmarks/peers.py --list                what would run, and what is skipped and why
    python benchmarks/peers.py --only ours,liger     some of it

Ours stands first and last, so that a card that slows down in between is seen (A/B/A); ratios take the mean of the two.
Peers: transformers' Llama from the same shape, plain, under torch.compile and with Liger's kernels; in pure bfloat16
(weights, gradients and AdamW's states: less work and memory than ours, which keeps float32 masters), and with float32
weights under bfloat16 autocast, which is what its Trainer does. Liger runs at two micro-batches with equally many
tokens an iteration; the better one counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.machine import BILLION, environment, machine, save_result
from zero2all.common.errors import is_out_of_memory
from zero2all.common.files import write_json
from zero2all.common.progress import say, show_log
from zero2all.config import RunConfig
from zero2all.estimate.flops import compute_mfu, flops_per_token
from zero2all.measure.clock import device_name, wait_for, watched_gpu
from zero2all.measure.short_run import measure_steps
from zero2all.parallel.device import pick_device
from zero2all.predict.batch import BatchShape, load_measured_config, own_batch, parse_batch
from zero2all.train.step_timer import scheduled_garbage_collection

LEARNING_RATE = 1e-4
SLOTS = 4  # different micro-batches of random tokens, used in turn
Iterate = Callable[[int], Tensor]
"""(number of micro-batches) -> forward and backward over them, an update; returns the summed loss, on the device."""

OURS, EAGER, COMPILED, LIGER = "ours", "eager", "compiled", "liger"
PURE, AUTOCAST = "pure bf16", "fp32 + autocast"


@dataclass(frozen=True)
class Entry:
    """One thing to measure."""

    kind: str
    precision: str
    """Ours: the `linear` implementation. Peers: PURE or AUTOCAST."""
    batch: BatchShape
    turn: str = ""
    """first or last, of ours."""

    @property
    def name(self) -> str:
        """For the table and the results."""
        return " ".join(word for word in (self.kind, self.precision, str(self.batch), self.turn) if word)


def entries(config: RunConfig, batch: BatchShape) -> list[Entry]:
    """Everything, in the order it runs: Liger patches transformers for good, so it comes after the plain ones."""
    wider = dataclasses.replace(batch, samples=2 * batch.samples, accumulation=max(1, batch.accumulation // 2))
    precisions = ("auto", "fp8") if config.train.precision == "bfloat16" else ("auto",)
    ours = [Entry(OURS, precision, batch) for precision in precisions]
    peers = [Entry(EAGER, PURE, batch), Entry(COMPILED, PURE, batch)]
    peers += [Entry(LIGER, precision, shape) for precision in (PURE, AUTOCAST) for shape in (batch, wider)]
    return [
        *(dataclasses.replace(entry, turn="first") for entry in ours),
        *peers,
        *(dataclasses.replace(entry, turn="last") for entry in ours),
    ]


def why_not(entry: Entry, device: torch.device) -> str | None:
    """The reason for which an entry cannot run here."""
    if entry.kind == OURS:
        return None
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if entry.kind == LIGER and importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    if entry.kind == LIGER and device.type != "cuda":
        return "Liger's kernels need a CUDA device"
    return None


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=BILLION, help="a preset or the path of a YAML file")
    parser.add_argument("--batch", default=None, help="SAMPLESxSEQUENCExACCUMULATION (default: the config's own)")
    parser.add_argument("--seconds", type=float, default=30.0, help="least steady state of each (default 30)")
    parser.add_argument("--warm-up-seconds", type=float, default=5.0, help="least time before that (default 5)")
    parser.add_argument("--only", default=None, metavar="KIND,…", help=f"of {OURS}, {EAGER}, {COMPILED}, {LIGER}")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write results here as they come")
    parser.add_argument("--list", action="store_true", help="show what would run and stop")
    parser.add_argument("--no-save", action="store_true", help="leave benchmarks/results alone")
    arguments = parser.parse_args()
    config, notes = load_measured_config(arguments.config, [])
    for note in notes:
        say(note)
    device = pick_device(config.parallel.device)
    batch = own_batch(config) if arguments.batch is None else parse_batch(arguments.batch)
    kinds = (OURS, EAGER, COMPILED, LIGER) if arguments.only is None else arguments.only.split(",")
    results: dict[str, Any] = {"config": arguments.config, "environment": environment(), "entries": {}, "skipped": {}}
    for entry in entries(config, batch):
        reason = why_not(entry, device)
        if entry.kind not in kinds:
            continue
        if arguments.list:
            print(f"{entry.name:<48} {reason or 'runs'}")
            continue
        if reason is not None:
            say(f"peers: {entry.name}: skipped: {reason}")
            results["skipped"][entry.name] = reason
            continue
        say(f"peers: {entry.name} …")
        found = run_entry(entry, config, device, arguments.seconds, arguments.warm_up_seconds)
        named = {"kind": entry.kind, "precision": entry.precision, "batch": str(entry.batch)}
        results["entries"][entry.name] = named | found
        print(f"{entry.name:<44} {in_short(found)}", flush=True)
        if arguments.json is not None:
            write_json(arguments.json, {"machine": machine(), **results})
    if arguments.list:
        return
    results["ratios"] = ratios(results["entries"])
    for line in ratio_lines(results["ratios"]):
        print(line)
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine(), **results})
    if not arguments.no_save:
        save_result("peers", results)


def run_entry(
    entry: Entry, config: RunConfig, device: torch.device, seconds: float, warm_up_seconds: float
) -> dict[str, Any]:
    """Figures, or the reason why there are none; leaves nothing on the device."""
    try:
        if entry.kind == OURS:
            linear: Any = entry.precision
            chosen = dataclasses.replace(config, ops=dataclasses.replace(config.ops, linear=linear))
            found = measure_steps(chosen, entry.batch, seconds, warm_up_seconds=warm_up_seconds)
            return {**found, **shares(config, entry.batch, found["tokens_per_second"], device)}
        return measure_peer(entry, config, device, seconds, warm_up_seconds)
    except Exception as error:
        if not is_out_of_memory(error):
            traceback.print_exc()
        first = str(error).splitlines()[0] if str(error) else ""
        return {"reason": "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {first}"}
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure_peer(
    entry: Entry, config: RunConfig, device: torch.device, seconds: float, warm_up_seconds: float
) -> dict[str, Any]:
    """The figures of one peer: a first step, a warm-up, then whole iterations until the time is over."""
    model = llama(config, entry, device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=(config.optim.beta1, config.optim.beta2),
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        fused=True,
    )
    forward = torch.compile(model) if entry.kind == COMPILED else model
    iterate = peer_iterations(forward, model, optimizer, config, entry, device)
    timed = timed_iterations(iterate, entry.batch.accumulation, device, seconds, warm_up_seconds)
    speed = entry.batch.tokens / timed["step_seconds"]
    return {**timed, "tokens_per_second": speed, **shares(config, entry.batch, speed, device)}


def timed_iterations(
    iterate: Iterate, passes: int, device: torch.device, seconds: float, warm_up_seconds: float
) -> dict[str, Any]:
    """Times of iterations; the host waits for each, and Python's garbage collector is off, as in a run."""
    with scheduled_garbage_collection() as after_step:
        started = time.perf_counter()
        iterate(1)
        wait_for(device)
        first = time.perf_counter() - started
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        while time.perf_counter() - started < first + warm_up_seconds:
            iterate(min(2, passes))
            wait_for(device)
        found: list[float] = []
        with watched_gpu(device) as gpu:
            while not found or sum(found) < seconds:
                started = time.perf_counter()
                loss = iterate(passes)
                wait_for(device)
                found.append(time.perf_counter() - started)
                after_step(len(found))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    times = {"step_seconds": sum(found) / len(found), "all_seconds": found, "first_step_seconds": first}
    return {**times, "loss": float(loss), "peak_bytes": peak, "gpu": gpu}


def shares(config: RunConfig, batch: BatchShape, tokens_per_second: float, device: torch.device) -> dict[str, Any]:
    """MFU in every convention; none where the peak of the device is not known."""
    flops = flops_per_token(config.model, batch.seq_len)
    return {"mfu": compute_mfu(flops, tokens_per_second, device_name(device))}


def llama(config: RunConfig, entry: Entry, device: torch.device) -> Any:
    """transformers' Llama of the same shape, with random weights in the entry's dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if entry.kind == LIGER:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=True
        )
    shape = config.model
    theirs = LlamaConfig(
        vocab_size=shape.vocab_rows,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.max_seq_len,
        rms_norm_eps=shape.rms_norm_eps,
        initializer_range=shape.matrix_std,
        tie_word_embeddings=shape.tied_embeddings,
        use_cache=False,
    )
    theirs._attn_implementation = "sdpa"
    dtype = torch.bfloat16 if entry.precision == PURE else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(theirs)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def peer_iterations(
    forward: Callable[..., Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    entry: Entry,
    device: torch.device,
) -> Iterate:
    """Forward and backward over the micro-batches, clipping, AdamW."""
    batch = entry.batch
    shape = (min(SLOTS, batch.accumulation), batch.samples, batch.seq_len)
    tokens = torch.randint(0, config.model.vocab_ids, shape, device=device)

    def region() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if entry.precision == AUTOCAST else nullcontext()

    def iterate(micro_batches: int) -> Tensor:
        total = torch.zeros((), device=device)
        for number in range(micro_batches):
            rows = tokens[number % len(tokens)]
            with region():
                loss = forward(input_ids=rows, labels=rows).loss / batch.accumulation
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return iterate


def in_short(found: dict[str, Any]) -> str:
    """One line."""
    if "reason" in found:
        return str(found["reason"])
    share = f"{100 * found['mfu']['seed']:5.1f} % MFU (seed)  " if found["mfu"] else ""
    clocks = f"  {found['gpu']['watts']:.0f} W {found['gpu']['sm_mhz']:.0f} MHz" if found["gpu"] else ""
    return (
        f"{found['tokens_per_second']:10,.0f} tokens/s  {share}peak {found['peak_bytes'] / 2**30:6.1f} GiB  "
        f"first {found['first_step_seconds']:5.1f} s  loss {found['loss']:.5}"
        f"{clocks}"
    )


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours (mean of first and last) over the best of each peer."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for entry in found.values():
        if "tokens_per_second" in entry:
            speeds.setdefault((entry["kind"], entry["precision"]), []).append(entry["tokens_per_second"])
    ours = {precision: list(values) for (kind, precision), values in speeds.items() if kind == OURS}
    return {
        "ours": {
            precision: {"tokens_per_second": sum(values) / len(values), "last_over_first": values[-1] / values[0]}
            for precision, values in ours.items()
        },
        "over_peers": {
            f"ours {precision} / {kind} {theirs}": sum(values) / len(values) / max(speed)
            for precision, values in ours.items()
            for (kind, theirs), speed in speeds.items()
            if kind != OURS
        },
    }


def ratio_lines(found: dict[str, Any]) -> list[str]:
    """For the terminal."""
    lines = [
        f"ours {precision}: {mean['tokens_per_second']:,.0f} tokens/s; last / first {mean['last_over_first']:.4f}"
        for precision, mean in found["ours"].items()
    ]
    return lines + [f"{name:<44} {ratio:.3f}" for name, ratio in found["over_peers"].items()]


if __name__ == "__main__":
    show_log()
    main()
