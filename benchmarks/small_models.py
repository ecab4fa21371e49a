"""Small models on one GPU: tokens/s and MFU of a training step, and what each change to it gives.

    python benchmarks/small_models.py                     both sizes and the kernels alone, about two minutes of an H200
    python benchmarks/small_models.py --only steps        or kernels
    python benchmarks/small_models.py --save              also benchmarks/results/small_models.json

42.5 M parameters (16,384 ids) and 126 M (configs/z2all-100m.yaml with 6 heads of 128), 131,072 random tokens a step in
one pass, Muon. The step is the trainer's own (`zero2all.measure.short_run`). All variants are measured in turn, and
then again in the same order (A B C A B C), with watts and clocks by nvidia-smi.

MFU by PaLM's count: tokens/s x (6 x parameters in matmuls + 12 x layers x heads x head size x context) / peak of the
GPU in bfloat16, also where the matmuls are in float8.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from zero2all.config import load_config
from zero2all.estimate.flops import flops_per_token, peak_flops
from zero2all.measure.clock import watched_gpu
from zero2all.measure.short_run import ReadyRun
from zero2all.ops import linear_cross_entropy
from zero2all.predict.batch import BatchShape

BATCH = BatchShape(64, 2048, 1)
ROUNDS, SECONDS, WARM_UP = 2, 1.6, 3  # long enough for a few samples by nvidia-smi
FIRST_STEPS = 6  # kernels are compiled, and a CUDA graph is captured after two passes
COMMON = ["--train.precision=bfloat16", "--optim.kind=muon", "--train.tokens_per_step=131072"]
COMMON += ["--train.micro_batch_samples=64"]
SIZES = {
    "42.5 M": [
        *("--model.hidden_size=512", "--model.layers=8", "--model.heads=4", "--model.kv_heads=4"),
        *("--model.intermediate_size=1408", "--model.vocab_size=16384", "--tokenizer.vocab_size=16384"),
    ],
    "126 M": ["--model.heads=6", "--model.kv_heads=2"],
}
LOSS_SETTINGS = {
    16384: [
        *((16384, 16384, 4), (16384, 16384, 8), (16384, 16384, 16)),
        *((0, 16384, 32), (0, 16384, 16), (0, 8192, 16), (0, 4096, 8)),
    ],
    32768: [
        *((32768, 32768, 8), (32768, 32768, 16)),
        *((0, 16384, 32), (0, 16384, 16), (0, 8192, 16), (0, 8192, 8), (0, 4096, 8)),
    ],
}
"""(columns up to which a row is held in registers, columns of a block, warps)."""
LOSS_ROWS, NORM_ROWS = 8192, 131072
NORM_WARPS = (6, 12, 24, 32, 48)


class Variant(NamedTuple):
    """One change: config fields, and constants of modules."""

    overrides: tuple[str, ...] = ()
    constants: tuple[tuple[Any, str, Any], ...] = ()


def variants() -> dict[str, Variant]:
    """By name; the first is what a run takes by default."""
    from zero2all.ops.kernels import cross_entropy, rms_norm

    blocks, few_warps = (cross_entropy, "WHOLE_ROW", 0), (rms_norm, "WARPS_PER_PROCESSOR", 6)
    short_chunks = (linear_cross_entropy, "CHUNK_ROWS", 8192)
    return {
        "default": Variant(),
        "loss in blocks": Variant(constants=(blocks,)),
        "norm with few warps, as before": Variant(constants=(few_warps,)),
        "loss in blocks, norm with few warps": Variant(constants=(blocks, few_warps)),
        "head in chunks of 8,192 rows": Variant(constants=(short_chunks,)),
        "CUDA graph": Variant(("--train.cuda_graph=on",)),
        "float8 linear layers": Variant(("--ops.linear=fp8",)),
    }


@contextmanager
def constants_set(variant: Variant) -> Iterator[None]:
    """The constants of a variant, in the block."""
    before = [(module, name, getattr(module, name)) for module, name, _ in variant.constants]
    for module, name, value in variant.constants:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def steps_of(size: str, device: torch.device) -> dict[str, Any]:
    """All variants of one size."""
    found: dict[str, Any] = {}
    made: dict[tuple[str, ...], ReadyRun] = {}
    for number in range(ROUNDS):
        for name, variant in variants().items():
            row = found.setdefault(name, {"seconds": [], "gpu": []})
            if "problem" in row:
                continue
            key = variant.overrides
            try:
                with constants_set(variant):
                    if key not in made:
                        made[key] = _made(size, variant, device)
                    run = made[key]
                    seconds, gpu = _timed(run, device)
            except Exception as error:  # a variant that this machine does not have is one row that says so
                row["problem"] = f"{type(error).__name__}: {error}"
                print(f"{size:7} {name:34} {row['problem'][:120]}", flush=True)
                continue
            row["seconds"].append(seconds)
            row["gpu"].append(gpu)
            rate = BATCH.tokens / seconds
            flops, peak = (
                flops_per_token(run.config.model, BATCH.seq_len)["palm"],
                peak_flops(torch.cuda.get_device_name()),
            )
            row |= {
                "tokens_per_second": BATCH.tokens / statistics.mean(row["seconds"]),
                "palm_flops_per_token": flops,
                "captured": run.is_captured,
                "ops": run.ops.taken,
                "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            }
            if peak is not None:
                row["mfu_palm"] = row["tokens_per_second"] * flops / peak
            mfu = f"{100 * rate * flops / peak:5.1f} %" if peak else "   ?"
            heat = f"{gpu.get('watts', 0):.0f} W {gpu.get('sm_mhz', 0):.0f} MHz"
            print(f"{size:7} {name:34} {number + 1} {1e3 * seconds:7.2f} ms {rate:11,.0f}/s {mfu} {heat}", flush=True)
    return found


def _made(size: str, variant: Variant, device: torch.device) -> ReadyRun:
    run = ReadyRun(load_config("z2all-100m", [*COMMON, *SIZES[size], *variant.overrides]), BATCH, device)
    run.steps(FIRST_STEPS)
    return run


def _timed(run: ReadyRun, device: torch.device) -> tuple[float, dict[str, Any]]:
    """Seconds of a step, and the medians of watts and clocks meanwhile."""
    torch.cuda.reset_peak_memory_stats(device)
    run.steps(WARM_UP)
    with watched_gpu(device) as gpu:
        seconds = run.timed_steps(SECONDS)
    return statistics.mean(seconds), gpu


# ---- kernels alone ---------------------------------------------------------------------------------------------------


def kernels(device: torch.device) -> list[dict[str, Any]]:
    """The loss and the norm's backward pass in several settings; bytes are those that must be moved."""
    from zero2all.ops.kernels import cross_entropy, rms_norm

    found: list[dict[str, Any]] = []
    for columns, settings in LOSS_SETTINGS.items():
        logits = torch.randn(LOSS_ROWS, columns, device=device, dtype=torch.bfloat16)
        targets = torch.randint(0, columns, (LOSS_ROWS,), device=device)
        weights = torch.ones(LOSS_ROWS, device=device)
        for held, block, warps in settings:
            names = {"WHOLE_ROW": held, "BLOCK": block, "WHOLE_WARPS": warps, "WARPS": warps}
            changed = Variant((), tuple((cross_entropy, name, value) for name, value in names.items()))
            with constants_set(changed):
                ms = _kernel_ms(lambda: cross_entropy.cross_entropy_in_place(logits, targets, weights, columns))  # noqa: B023
            what = f"loss, {columns} columns, {'held' if held else f'blocks of {block}'}, {warps} warps"
            found.append(_kernel_row(what, ms, 2 * logits.nbytes))
    for width in (512, 768):
        x = torch.randn(NORM_ROWS, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for warps in NORM_WARPS:
            with constants_set(Variant((), ((rms_norm, "WARPS_PER_PROCESSOR", warps),))):
                normed, total = rms_norm.triton_add_rms_norm(x, x, weight, 1e-5)
                gradients = (torch.ones_like(normed), torch.ones_like(total))
                # The sum x + x adds both gradients once more: three tensors of the same size beside the kernel's four.
                ms = _kernel_ms(lambda: torch.autograd.grad((normed, total), (x, weight), gradients, retain_graph=True))  # noqa: B023
            found.append(_kernel_row(f"norm backward and one addition, width {width}, {warps} warps", ms, 7 * x.nbytes))
    return found


def _kernel_ms(call: Callable[[], object]) -> float:
    """The median of some calls."""
    times = []
    for number in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _kernel_row(what: str, ms: float, moved: int) -> dict[str, Any]:
    print(f"{what:60} {ms:7.3f} ms {moved / ms / 1e9:6.2f} TB/s", flush=True)
    return {"kernel": what, "ms": ms, "bytes": moved}


def main() -> None:
    """Measure and print; with --save also write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("kernels", "steps"))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark measures a GPU, and torch finds none here.")
    device = torch.device("cuda", torch.cuda.current_device())
    formula = "tokens/s x (6 x parameters in matmuls + 12 x layers x heads x head size x context) / bfloat16 peak"
    print(f"MFU by PaLM's count: {formula}", flush=True)
    found: dict[str, Any] = {"mfu": formula, "batch": {"samples": BATCH.samples, "seq_len": BATCH.seq_len}}
    if args.only != "steps":
        found["kernels"] = kernels(device)
    for size in SIZES if args.only != "kernels" else ():
        found[size] = steps_of(size, device)
        if args.save:
            save_result("small_models", found)  # what is there, should the time end
        gc.collect()
        torch.cuda.empty_cache()
    if args.save:
        save_result("small_models", found)


if __name__ == "__main__":
    main()
