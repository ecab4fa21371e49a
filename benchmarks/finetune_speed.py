"""How fast fine-tuning is: against pretraining, the engine alone, transformers' generate and trl.

    python benchmarks/finetune_speed.py                    all parts, z2all-1b with AdamW on an H200 (4 minutes)
    python benchmarks/finetune_speed.py sft grpo           some of them
    python benchmarks/finetune_speed.py --small            the same with a tiny model, on a CPU too; nothing is saved

All runs begin with two steps of pretraining on random words, whose tokenizer has as many ids as the model, so that
every id that random weights draw is a token. Documents and conversations are equally long. Runs are the trainer's own;
only their save at the end is left out, since a checkpoint takes longer to write than the steps to compute.

sft: tokens/s of pretraining (documents one after the other) and of `z2a sft` (whole conversations, packed best-fit, of
which the answers are learned), by turns A B A B, both with data.document_mask. A token is a position of a row on both
sides, padding and prompts included. Seconds are the mean of `time/step` without the first steps (--first).
grpo: `z2a rl --arithmetic 3`. Tokens drawn over the seconds of `time/rollout`, which leave out judging, of steps 2 to
the last; against the engine alone, greedy, with prompts and answers as long, measured before and after.
trl: seconds of transformers' generate for the answers of a step, and of whole steps of trl's GRPOTrainer (loss dapo, no
divergence, AdamW, weights in bfloat16) on the same weights and prompts, beside our steps; in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.generate import ours, random_model
from benchmarks.machine import BILLION, save_result
from zero2all.common.files import read_json, write_json
from zero2all.common.workspace import open_workspace
from zero2all.config import RunConfig, load_config
from zero2all.exchange import export_run
from zero2all.finetune.grpo import Prompts
from zero2all.finetune.objectives import objective_of
from zero2all.finetune.prepare import PreparedRun
from zero2all.finetune.rl import RlOptions, prepare_rl
from zero2all.finetune.sft import SftOptions, prepare_sft
from zero2all.infer.load import load_run
from zero2all.measure.clock import wait_for
from zero2all.parallel.device import pick_device
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.load import load_tokenizer
from zero2all.tokenizer.stage import train_on_files
from zero2all.track.reader import read_run
from zero2all.track.writer import METRICS_FOLDER
from zero2all.train.hooks.checkpointing import Checkpointing
from zero2all.train.run import train

PARTS = ("sft", "grpo", "trl")
WANTED = {"sft": 0.95, "grpo": 0.60}
TURNS, RL_STEPS, TRL_SECONDS = 2, 4, 300
NEVER = ("validation.every_steps", "checkpoint.every_steps", "resilience.memory_every_steps")
QUIET = [f"--{name}=0" for name in NEVER]


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    ids: int
    words: int
    """Different words of the text."""
    longest: int
    """Words of a document, or of a conversation."""
    batch: int
    """Tokens of a step of pretraining and of SFT."""
    prompts: int
    answers: int
    new: int
    """Tokens of an answer."""
    overrides: tuple[str, ...]


LARGE = Size(64320, 60_000, 900, 131072, 8, 8, 256, ("--train.micro_batch_samples=16",))
SMALL = Size(
    *(1024, 2000, 100, 2048, 2, 4, 16),
    (
        *("--model.hidden_size=64", "--model.intermediate_size=128", "--model.layers=2", "--model.heads=4"),
        *("--model.kv_heads=2", "--model.max_seq_len=256", "--data.seq_len=256", "--train.micro_batch_samples=4"),
        *("--model.vocab_size=1024", "--tokenizer.vocab_size=1024"),
    ),
)


class Bench:
    """A workspace with a base run, and what is measured in it."""

    def __init__(self, work: Path, size: Size, steps: int, first: int) -> None:
        self.size, self.steps, self.first, self.work = size, steps, first, work
        self.device, self.workspace = pick_device("auto"), open_workspace(work, create=True)
        self.results: dict[str, Any] = {"steps": steps, "first_steps_left_out": first}

    def config(self, name: str, steps: int) -> RunConfig:
        """A run of pretraining."""
        words = [*QUIET, f"--train.name={name}", f"--train.steps={steps}", f"--train.tokens_per_step={self.size.batch}"]
        words += ["--data.document_mask=true", "--schedule.warmup_steps=1", *self.size.overrides]
        if self.device.type == "cpu":
            words.append("--train.precision=float32")
        return load_config(BILLION, words)

    @functools.cached_property
    def texts(self) -> tuple[list[str], Path]:
        """Documents, and a file of as many equally long conversations; with the tokenizer. Enough for all steps."""
        draw, letters = np.random.default_rng(1), np.array(list("abcdefghijklmnopqrstuvwxyz"))
        vocabulary = np.array(["".join(letters[draw.integers(0, 26, n)]) for n in draw.integers(3, 9, self.size.words)])

        def text(words: int) -> str:
            return " ".join(vocabulary[draw.integers(0, len(vocabulary), words)])

        sample, chats = self.work / "words.txt", self.work / "chats.jsonl"
        sample.write_text("\n".join(text(200) for _ in range(self.size.words // 24)), encoding="utf-8")
        train_on_files([sample], self.workspace.tokenizer, TokenizerConfig(self.size.ids, "hf-bbpe"))
        lengths = draw.integers(
            self.size.longest // 8, self.size.longest, 3 * self.size.batch * self.steps // self.size.longest
        )
        count = int(np.searchsorted(np.cumsum(lengths), 0.7 * self.size.batch * self.steps))
        rows = []
        for length in lengths[:count].tolist():
            turns = [{"role": "user", "content": text(length // 4)}]
            turns.append({"role": "assistant", "content": text(length - length // 4)})
            rows.append(json.dumps({"messages": turns}) + "\n")
        chats.write_text("".join(rows), encoding="utf-8")
        return [text(length) for length in lengths[:count].tolist()], chats

    @functools.cached_property
    def base(self) -> str:
        """The name of the base run: two steps on the documents."""
        documents, _ = self.texts
        tokenizer = load_tokenizer(self.workspace.tokenizer)
        ids = [np.array([*each, tokenizer.end_id], np.uint16) for each in tokenizer.encode_batch(documents)]
        np.save(self.work / "text.npy", np.concatenate(ids))
        words = ["data", "import", f"text={self.work / 'text.npy'}", "--from", "numpy", "--split", "train"]
        subprocess.run([sys.executable, "-m", "zero2all", *words, "--work", str(self.work)], check=True)
        train(self.config("base", 2), self.workspace, say=lambda _: None, brief=True)
        self.free()
        return "base"

    def record(self, config: RunConfig) -> dict[str, list[float]]:
        """Train without the save at the end, and take the run's record away: the next turn begins at the same step."""
        with unsaved():
            train(config, self.workspace, make_objective=objective_of, say=lambda _: None, brief=True)
        run = self.workspace.run(config.train.name)
        found = {name: series.value.tolist() for name, series in read_run(run).series.items()}
        rmtree(run / METRICS_FOLDER)
        self.free()
        return found

    def free(self) -> None:
        """Give back the memory of the GPU."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- parts ---------------------------------------------------------------------------------------------------

    def sft(self) -> dict[str, Any]:
        """Pretraining and SFT by turns."""
        overrides = [*QUIET, f"--train.steps={self.steps}", f"--train.tokens_per_step={self.size.batch}"]
        overrides += ["--schedule.warmup_steps=1", *(each for each in self.size.overrides if "micro_batch" in each)]
        options = SftOptions("sft", [self.texts[1]], valid_share=0.0, overrides=overrides)
        prepared = prepare_sft(self.base, self.workspace, options)
        configs = {"pretraining": self.config("pretraining", self.steps), "sft": prepared.config}
        rates: dict[str, list[float]] = {name: [] for name in configs}
        seconds: dict[str, list[list[float]]] = {name: [] for name in configs}
        for turn in range(TURNS):
            for name, config in configs.items():
                assert config.train.tokens_per_step == self.size.batch, "the same batch"
                spent = self.record(config)["time/step"]
                seconds[name].append(spent)
                rates[name].append(self.size.batch / mean(spent[self.first :]))
                print(f"sft: {name:11} turn {turn + 1}: {rates[name][-1]:11,.0f} tokens/s", flush=True)
        report, length = prepared.report, prepared.config.data.seq_len
        places = report["rows"]["train"] * length
        rows = {
            "length": length,
            "with_loss": report["learned_tokens"]["train"] / places,
            "padding": 1 - report["tokens"]["train"] / (places + report["rows"]["train"]),
        }
        found = {"tokens_per_second": rates, "ratio": mean(rates["sft"]) / mean(rates["pretraining"]), "rows": rows}
        print(
            f"sft: ratio {found['ratio']:.3f} (wanted {WANTED['sft']}); of its positions {rows['with_loss']:.0%} carry "
            f"loss and {rows['padding']:.1%} are padding",
            flush=True,
        )
        return {**found, "wanted": WANTED["sft"], "seconds": seconds}

    @functools.cached_property
    def prepared_rl(self) -> PreparedRun:
        """The run of `z2a rl`, at step 0."""
        size = self.size
        asked = {"prompts": size.prompts, "answers": size.answers, "max_new_tokens": size.new}
        overrides = [*QUIET, *(f"--finetune.grpo.{name}={value}" for name, value in asked.items())]
        overrides.append('--finetune.grpo.rewards={"number": 1.0}')
        options = RlOptions("rl", [], valid_share=0.0, overrides=overrides, steps=RL_STEPS, arithmetic=(3, 3))
        return prepare_rl(self.base, self.workspace, options)

    @functools.cached_property
    def asked(self) -> list[tuple[list[int], dict[str, Any]]]:
        """The prompts of all steps, in their order: ids, and what is known of each."""
        config = self.prepared_rl.config
        assert config.data.packed is not None, "packed for the run"
        prompts, count, seed = Prompts(Path(config.data.packed), "train"), self.size.prompts, config.train.seed
        numbers = [number for step in range(RL_STEPS) for number in prompts.of_step(step, count, seed)]
        return [(prompts.ids(number), prompts.records[number]) for number in numbers]

    @functools.cached_property
    def rl(self) -> dict[str, Any]:
        """What the steps of `z2a rl` took."""
        record = self.record(self.prepared_rl.config)
        tokens = [round(self.size.prompts * self.size.answers * length) for length in record["rollout/length"]]
        seconds = {name: record[f"time/{name}"] for name in ("rollout", "reward", "step")}
        return {"tokens": tokens, "seconds": seconds, "step_seconds": mean(seconds["step"][1:])}

    def engine(self, prompt: int) -> float:
        """Seconds of the engine alone for the answers of a step."""
        batch, new = self.size.prompts * self.size.answers, self.size.new
        model = random_model(self.prepared_rl.config.model, self.device)
        generate, _ = ours(model, batch, prompt + new)
        generator, seconds = torch.Generator().manual_seed(1), []
        for number in range(3):  # the first one warms up
            prompts = torch.randint(model.config.vocab_ids, (batch, prompt), generator=generator)
            began = time.perf_counter()
            generate(prompts, min(new, 8) if number == 0 else new)
            wait_for(self.device)
            seconds.append(time.perf_counter() - began)
        del generate, model
        self.free()
        return mean(seconds[1:])

    def grpo(self) -> dict[str, Any]:
        """Rollouts against the engine alone."""
        prompt = round(mean(len(ids) for ids, _ in self.asked))
        alone = [self.engine(prompt)]
        run = self.rl
        alone.append(self.engine(prompt))
        rates = [tokens / spent for tokens, spent in zip(run["tokens"], run["seconds"]["rollout"], strict=True)]
        engine = self.size.prompts * self.size.answers * self.size.new / mean(alone)
        ratio = sum(run["tokens"][1:]) / sum(run["seconds"]["rollout"][1:]) / engine
        shown = ", ".join(f"{rate:,.0f}" for rate in rates)
        print(f"grpo: rollouts {shown} tokens/s, by step; a whole step {run['step_seconds']:.2f} s", flush=True)
        print(f"grpo: the engine alone {engine:,.0f} tokens/s", flush=True)
        print(f"grpo: ratio of steps 2 to {RL_STEPS} {ratio:.3f} (wanted {WANTED['grpo']})", flush=True)
        return {
            **{"ratio": ratio, "wanted": WANTED["grpo"], "rollout_tokens_per_second": rates, **run},
            **{"engine_tokens_per_second": engine, "engine_seconds": alone, "prompt_tokens": prompt},
        }

    def trl(self) -> dict[str, Any]:
        """transformers' generate and trl's steps, in a process of its own; beside our steps."""
        folder, job, answer = self.work / "exported", self.work / "trl.json", self.work / "trl-answer.json"
        rmtree(folder, ignore_errors=True)
        answer.unlink(missing_ok=True)
        loaded = load_run(self.workspace, self.base)
        export_run(loaded, self.workspace.tokenizer, folder, "bfloat16", "compatible")
        config, size = self.prepared_rl.config, self.size
        del loaded
        mine = self.rl["step_seconds"]
        self.free()
        content = {"model": str(folder), "answer": str(answer), "out": str(self.work / "trl-out"), "new": size.new}
        content |= {"prompts": size.prompts, "answers": size.answers, "lr": config.optim.lr_max}
        asked = [{"ids": ids, "prompt": record["prompt"], "answer": record["answer"]} for ids, record in self.asked]
        write_json(job, {**content, "asked": asked})
        problem = ""
        try:
            subprocess.run([sys.executable, __file__, "--child", str(job)], check=True, timeout=TRL_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            problem = str(error).replace(str(self.work), "FOLDER")
        found = read_json(answer) if answer.is_file() else {}
        found |= {"our_step_seconds": mine}
        if "step_seconds" in found:
            found["times_as_fast"] = found["step_seconds"] / mine
            print(
                f"trl: a whole step {found['step_seconds']:.2f} s ({found['rows_of_a_pass']} rows a pass), ours "
                f"{mine:.2f} s: {found['times_as_fast']:.1f} times as fast",
                flush=True,
            )
        if problem:
            found["problem"] = problem
            print(f"trl: {problem}; the traceback is above", flush=True)
        return found


@contextmanager
def unsaved() -> Iterator[None]:
    """Runs that end in the block leave no checkpoint."""
    save = Checkpointing.save_now

    def skip(_: Checkpointing) -> None:
        """In place of the save."""

    setattr(Checkpointing, save.__name__, skip)
    try:
        yield
    finally:
        setattr(Checkpointing, save.__name__, save)


# ---- the process of transformers and trl -----------------------------------------------------------------------------


def child(job: dict[str, Any]) -> None:
    """Both figures; what is found is written after each."""
    import transformers

    found: dict[str, Any] = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    transformers.utils.logging.disable_progress_bar()
    found["generate_seconds"] = seconds = generate_seconds(job)
    found["generate_tokens_per_second"] = rate = job["prompts"] * job["answers"] * job["new"] / seconds[-1]
    shown = ", ".join(f"{each:.2f}" for each in seconds)
    print(f"trl: transformers' generate {shown} s (the last: {rate:,.0f} tokens/s)", flush=True)
    write_json(Path(job["answer"]), found)
    try:
        import datasets
        import trl

        found["versions"] |= {"trl": trl.__version__, "datasets": datasets.__version__}
        trl.GRPOTrainer  # noqa: B018  imported only now
    except (ImportError, RuntimeError) as error:
        found["left_out"] = f"trl cannot be imported: {error}"
        print(f"trl: {found['left_out']}", flush=True)
    else:
        found |= trl_steps(job)
    write_json(Path(job["answer"]), found)


def their_model(job: dict[str, Any]) -> Any:
    """The exported weights in bfloat16."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    return model.to(pick_device("auto"))


def generate_seconds(job: dict[str, Any]) -> list[float]:
    """transformers' generate for the answers of the first step, twice after a short one; at temperature 1."""
    model, device, longest = their_model(job).eval(), pick_device("auto"), max(len(row["ids"]) for row in job["asked"])
    rows = [row["ids"] for row in job["asked"][: job["prompts"]] for _ in range(job["answers"])]
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    how = {"attention_mask": mask, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    found = []
    for new in (min(8, job["new"]), job["new"], job["new"]):
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, use_cache=True, **how)
        wait_for(device)
        found.append(time.perf_counter() - began)
    return found[1:]


def trl_steps(job: dict[str, Any]) -> dict[str, Any]:
    """Whole steps of trl's GRPOTrainer, with as many rows in a pass as fit."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])
    row = job["asked"][0]
    chat = [{"role": "user", "content": row["prompt"]}]
    theirs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    if theirs != row["ids"]:
        raise ValueError(f"trl would read another prompt: {theirs} instead of {row['ids']}")
    rows = job["prompts"] * job["answers"]
    while True:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            seconds = trl_run(job, tokenizer, rows)
            return {"all_step_seconds": seconds, "step_seconds": mean(seconds[1:]), "rows_of_a_pass": rows}
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2
        print(f"trl: out of memory, now {rows} rows a pass", flush=True)


def trl_run(job: dict[str, Any], tokenizer: Any, rows: int) -> list[float]:
    """Seconds of each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from zero2all.finetune.rewards import last_number

    device, marks = pick_device("auto"), [0.0]
    on_gpu = device.type == "cuda"

    class Watch(TrainerCallback):
        """The time of the device when steps begin and end."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for(device)
            marks[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait_for(device)
            seconds.append(time.perf_counter() - marks[0])

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            float(last_number(text[0]["content"]) == int(right))
            for text, right in zip(completions, answer, strict=True)
        ]

    seconds: list[float] = []
    arguments = GRPOConfig(
        **{"output_dir": job["out"], "max_steps": RL_STEPS, "learning_rate": job["lr"], "bf16": on_gpu},
        **{"per_device_train_batch_size": rows, "num_generations": job["answers"], "use_cpu": not on_gpu},
        gradient_accumulation_steps=job["prompts"] * job["answers"] // rows,
        **{"max_completion_length": job["new"], "temperature": 1.0, "loss_type": "dapo", "beta": 0.0},
        **{"epsilon": 0.2, "epsilon_high": 0.28, "gradient_checkpointing": False, "use_vllm": False},
        **{"report_to": [], "save_strategy": "no", "shuffle_dataset": False, "disable_tqdm": True},
    )
    data = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": str(row["answer"])} for row in job["asked"]
    ]
    trainer: Any = GRPOTrainer(
        their_model(job), reward, arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer,
        callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    return seconds


def main() -> int:
    """Measure the parts, and save after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--small", action="store_true", help="a tiny model; nothing is saved")
    parser.add_argument("--work", type=Path, help="a new folder for about 40 GB (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=12, help="of a run of part sft (default 12)")
    parser.add_argument("--first", type=int, default=4, help="steps of part sft that are left out (default 4)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(read_json(options.child))
        return 0
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; expected some of {', '.join(PARTS)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="z2a-finetune-") as folder:
        bench = Bench(options.work or Path(folder), SMALL if options.small else LARGE, options.steps, options.first)
        for part in options.parts or PARTS:
            began = time.perf_counter()
            try:
                found = getattr(bench, part)()
                failed |= "problem" in found
            except Exception:  # the other parts go on
                failed, found = True, {"problem": traceback.format_exc()}
                print(f"{part}: failed\n{found['problem']}", flush=True)
            bench.free()
            bench.results[part] = {**found, "took_seconds": time.perf_counter() - began}
            print(f"{part}: took {time.perf_counter() - began:.0f} s", flush=True)
            if not options.small:
                save_result("finetune_speed", bench.results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
