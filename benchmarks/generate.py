"""Our engine beside transformers' generate: the same weights, prompts and lengths, greedy, in one process.

    python benchmarks/generate.py                            z2all-1b on a GPU (about five minutes on an H200);
                                                             quickstart and z2all-100m on a CPU
    python benchmarks/generate.py --config z2all-100m --batch 1,8 --prompt 64 --new 32
    python benchmarks/generate.py --only ours,dynamic        without the compiled one

Weights are random: speed does not depend on them. They are exported once with `write_hf_folder` and read back by
transformers. Prompts are random ids, new ones for every run, and no token ends a text. tokens/s are all new tokens over
the whole time, prompts included. Ours stands first and last of each size, so that a machine that slows down in between
is seen; ratios take the mean of the two. Results are written after every figure.

Peers: `generate` with its dynamic cache, and on a GPU with a static cache, which transformers compiles. Beside them,
ours with weights in 8 and in 4 bits (int8, int4). `--warm-up-only` compiles what is measured and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.machine import BILLION, machine, save_result
from zero2all.common.progress import say, show_log
from zero2all.infer import WeightKind
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.job import Request
from zero2all.infer.load import READY_OPS, LoadedModel, empty_model
from zero2all.measure.clock import wait_for
from zero2all.model.config import ModelConfig
from zero2all.model.hf import DTYPES, write_hf_folder
from zero2all.model.z2all import Z2all
from zero2all.parallel.device import pick_device
from zero2all.predict.batch import load_measured_config
from zero2all.tokenizer.load import Tokenizer

OURS, INT8, INT4, DYNAMIC, STATIC = "ours", "int8", "int4", "dynamic", "static"
KINDS = {"cuda": (OURS, DYNAMIC, STATIC, INT8, INT4), "cpu": (OURS, DYNAMIC, INT8, INT4)}
CONFIGS = {"cuda": (BILLION,), "cpu": ("quickstart", "z2all-100m")}
BATCHES = {"cuda": (1, 64, 256), "cpu": (1, 8)}
LENGTHS = {"cuda": (128, 256), "cpu": (64, 48)}
"""Tokens of a prompt and of an answer."""
REPEATS = {"cuda": 2, "cpu": 3}
"""Measured runs after the warm-up; the fastest counts."""
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

Generate = Callable[[Tensor, int], Tensor]
"""(prompts (B, T), new tokens) -> the new tokens (B, new)."""


class NoText:
    """In place of a tokenizer: ids that mean nothing and end nothing, so that every answer has the length asked for."""

    end_ids: tuple[int, ...] = ()

    def __init__(self, ids: int) -> None:
        self.text_pieces = dict.fromkeys(range(ids), b"?")


def random_model(config: ModelConfig, device: torch.device, dtype: str | None = None) -> Z2all:
    """A model with weights as training would start with, drawn on the device; not those that a seed gives a run."""
    kind = DTYPES[dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    model = empty_model(config, READY_OPS, device, kind)
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, config.matrix_std, generator=generator)
        else:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def ours(model: Z2all, batch: int, max_len: int, weights: WeightKind = "plain") -> tuple[Generate, str]:
    """The engine, as it decodes a batch of this size, and what it decodes with."""
    tokenizer = cast(Tokenizer, NoText(model.config.vocab_ids))
    settings = EngineSettings(max_batch=batch, max_len=max_len, weights=weights)
    engine = Engine(LoadedModel("ours", 0, model, tokenizer), settings)

    def generate(prompts: Tensor, new: int) -> Tensor:
        jobs = [engine.submit(Request(row, new)) for row in prompts.tolist()]
        while not engine.is_idle:
            engine.step()
        return torch.tensor([job.new_ids for job in jobs])

    return generate, engine.slow_because or "kernels in CUDA graphs"


def theirs(model: Any, kind: str) -> Generate:
    """transformers' generate."""
    more = {"cache_implementation": "static"} if kind == STATIC else {}

    @torch.inference_mode()
    def generate(prompts: Tensor, new: int) -> Tensor:
        ids = prompts.to(model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            **more,
        )
        written: Tensor = out[:, ids.shape[1] :].cpu()
        return written

    return generate


class Comparison:
    """All figures of one config."""

    def __init__(self, config: str, overrides: list[str], given: argparse.Namespace, device: torch.device) -> None:
        loaded, _ = load_measured_config(config, overrides)
        self.config, self.device, self.given = loaded.model, device, given
        default_prompt, default_new = LENGTHS[device.type]
        self.prompt, self.new = given.prompt or default_prompt, given.new or default_new
        self.model = random_model(self.config, device, given.dtype)
        self.dtype = self.model.embedding.weight.dtype
        self.rows: list[dict[str, Any]] = []

    @functools.cached_property
    def exported(self) -> Any:
        """The same model in transformers."""
        from transformers import AutoModelForCausalLM

        tensors = LoadedModel("ours", 0, self.model, cast(Tokenizer, None)).weights()
        with tempfile.TemporaryDirectory(prefix="z2a-generate-") as folder:
            write_hf_folder(Path(folder), self.config, tensors, str(self.dtype).removeprefix("torch."), NO_TOKENS)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
        return model.to(self.device).eval()

    def measure(self, kind: str, batch: int, turn: str = "") -> Tensor:
        """Add a row; returns the tokens that were written to the last prompts."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        by = ""
        if kind in (OURS, INT8, INT4):
            weights = cast(WeightKind, "plain" if kind == OURS else kind)
            generate, by = ours(self.model, batch, self.prompt + self.new, weights)
        else:
            generate = theirs(self.exported, kind)
        began = time.perf_counter()
        # The static cache is compiled for its length, so that even its warm-up must have the whole one.
        written = generate(self._prompts(batch, 0), self.new if kind == STATIC else min(8, self.new))
        wait_for(self.device)
        warm_up, seconds = time.perf_counter() - began, []
        if self.given.warm_up_only:
            return written
        for repeat in range(REPEATS[self.device.type]):
            prompts = self._prompts(batch, 1 + repeat + (10 if turn == "last" else 0))
            began = time.perf_counter()
            written = generate(prompts, self.new)
            wait_for(self.device)
            seconds.append(time.perf_counter() - began)
        row = {
            "kind": kind,
            "turn": turn,
            "batch": batch,
            "tokens_per_second": batch * self.new / min(seconds),
            "seconds": seconds,
            "warm_up_seconds": warm_up,
            "peak_gib": peak_bytes(self.device) / 2**30,
            "by": by,
        }
        self.rows.append(row)
        note = f"; {by}" if by else ""
        say(
            f"{kind:8}{turn:6} batch {batch:4}: {row['tokens_per_second']:10,.1f} tokens/s; warm-up {warm_up:.1f} s, "
            f"peak {row['peak_gib']:.1f} GiB{note}"
        )
        return written

    def agreement(self, batch: int) -> float:
        """The share of sequences that ours and theirs write alike, token by token (they part at near ties, which
        random weights have many of, and more in bfloat16)."""
        prompts = self._prompts(batch, 99)
        one = ours(self.model, batch, self.prompt + self.new)[0](prompts, self.new)
        other = theirs(self.exported, DYNAMIC)(prompts, self.new)
        return float((one == other).all(dim=1).double().mean())

    def _prompts(self, batch: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * batch + seed)
        return torch.randint(self.config.vocab_ids, (batch, self.prompt), generator=generator)

    def values(self) -> dict[str, Any]:
        """For the results file."""
        return {
            "prompt_tokens": self.prompt,
            "new_tokens": self.new,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rows": self.rows,
            "ratios": ratios(self.rows),
        }


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ours (the mean of first and last) over each peer."""
    found: dict[str, float] = {}
    for row in rows:
        mine = [one["tokens_per_second"] for one in rows if one["kind"] == OURS and one["batch"] == row["batch"]]
        if row["kind"] != OURS and mine:
            name = f"batch {row['batch']}: ours / {row['kind']}"
            found[name] = sum(mine) / len(mine) / row["tokens_per_second"]
    return found


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a preset or YAML; default: as above")
    parser.add_argument("--batch", help="such as 1,64")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--new", type=int, help="tokens of an answer")
    parser.add_argument("--only", help=f"some of {OURS},{DYNAMIC},{STATIC},{INT8},{INT4}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--warm-up-only", action="store_true", help="compile, measure nothing")
    parser.add_argument("--agree", action="store_true", help="also compare what is written")
    parser.add_argument("--budget-seconds", type=float, default=420.0, help="begin no figure after this")
    parser.add_argument("--name", default="generate", help="of the results file")
    given, overrides = parser.parse_known_args()
    device = pick_device(given.device, "--device")
    kinds = given.only.split(",") if given.only else list(KINDS[device.type])
    batches = [int(size) for size in given.batch.split(",")] if given.batch else list(BATCHES[device.type])
    until = time.perf_counter() + given.budget_seconds
    values: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    say(f"{machine()['gpu'] or machine()['cpu']}, torch {torch.__version__}")
    for config in [given.config] if given.config else CONFIGS[device.type]:
        found = Comparison(config, overrides, given, device)
        say(f"{config}: prompts of {found.prompt}, {found.new} new tokens, {found.dtype}")
        for batch in batches:
            for kind, turn in _turns(kinds):
                if time.perf_counter() > until:
                    say(f"left out, the time is over: {kind} at batch {batch}")
                    continue
                try:
                    found.measure(kind, batch, turn)
                except (ImportError, RuntimeError) as error:  # one that cannot run is a line, not the end
                    say(f"{kind} at batch {batch} failed: {error!r}"[:300])
                values[config] = found.values()
                if not given.warm_up_only:
                    save_result(given.name, values)
        if given.agree:
            values[config]["written_alike"] = found.agreement(batches[-1])
            say(f"{values[config]['written_alike']:.1%} of the texts at batch {batches[-1]} are the same")
            save_result(given.name, values)
        for name, ratio in found.values()["ratios"].items():
            say(f"{config} {name:32} {ratio:7.2f}")


def _turns(kinds: list[str]) -> list[tuple[str, str]]:
    peers = [(kind, "") for kind in kinds if kind != OURS]
    return [(OURS, "first"), *peers, *([(OURS, "last")] if peers else [])] if OURS in kinds else peers


if __name__ == "__main__":
    show_log()
    main()
