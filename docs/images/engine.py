"""Draws `engine.png`: what the engine does in each step for a few requests, recorded from the engine itself.

python docs/images/engine.py          needs matplotlib
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.job import Job, Request
from zero2all.infer.load import LoadedModel
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights
from zero2all.tokenizer import load_tokenizer, train_tokenizer

PICTURE = Path(__file__).with_name("engine.png")
REQUESTS = ((100, 18, 0), (20, 30, 0), (64, 12, 1), (100, 20, 3), (10, 24, 5), (40, 14, 8), (100, 16, 14), (16, 10, 18))
"""Tokens of the prompt, tokens to write, the step it arrives at."""
COLOURS = {"reads": "#2a7de1", "shares": "#9fc5f3", "writes": "#36a866", "waits": "#dddddd"}


def main() -> None:
    """A line for each request, a column for each step."""
    engine = Engine(_model(), EngineSettings(max_batch=5, prefill_tokens=64))
    marks = _record(engine)
    figure, axes = plt.subplots(figsize=(11, 3.6), dpi=110)
    for (line, step), (kind, count) in marks.items():
        axes.barh(line, 0.92, left=step, color=COLOURS[kind], height=0.8)
        if count:
            axes.text(step + 0.46, line, str(count), ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(range(len(REQUESTS)), [f"request {number + 1}" for number in range(len(REQUESTS))])
    axes.invert_yaxis()
    axes.set_xlabel("step of the engine")
    for kind, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.legend(loc="upper right", fontsize=8)
    axes.set_title("5 at once, 64 prompt tokens a step; the numbers are prompt tokens read, or found in the cache")
    figure.tight_layout()
    figure.savefig(PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def _record(engine: Engine) -> dict[tuple[int, int], tuple[str, int]]:
    """(request, step) -> what was done for it in this step."""
    draw = random.Random(0)
    shared = [draw.randrange(250) for _ in range(100)]
    jobs: list[Job] = []
    marks: dict[tuple[int, int], tuple[str, int]] = {}
    step = 0
    while len(jobs) < len(REQUESTS) or not engine.is_idle:
        for length, new, arrives in REQUESTS:
            if arrives == step:
                text = (
                    [*shared[:96], len(jobs), 1, 2, 3]
                    if length == 100
                    else [draw.randrange(250) for _ in range(length)]
                )
                jobs.append(engine.submit(Request(text, new)))
        before = [(job.done, len(job.new_ids)) for job in jobs]
        engine.step()
        for number, (job, (done, written)) in enumerate(zip(jobs, before, strict=True)):
            fresh = min(job.done, len(job.request.ids)) - done
            if job.reused_tokens and done == 0 and fresh > 0:
                marks[number, step] = ("shares", job.reused_tokens)
            elif fresh > 1:
                marks[number, step] = ("reads", fresh)
            elif len(job.new_ids) > written:
                marks[number, step] = ("writes", 0)
            elif job.finish is None:
                marks[number, step] = ("waits", 0)
        step += 1
    return marks


def _model() -> LoadedModel:
    folder = Path(tempfile.mkdtemp()) / "tokenizer"
    train_tokenizer(["hello world"] * 50, 272, folder, "picture", kind="hf-bbpe")
    tokenizer = load_tokenizer(folder)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        layers=1,
        heads=2,
        kv_heads=1,
        max_seq_len=256,
    )
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    init_weights(model, 0)
    return LoadedModel("picture", 0, model.eval(), tokenizer)


if __name__ == "__main__":
    main()
