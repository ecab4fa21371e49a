"""Draws the explaining pictures of these docs from the workspace of a finished quickstart.

    python docs/pictures.py --work quickstart            all of them
    python docs/pictures.py --work quickstart bpe mask   two of them
    python docs/pictures.py --list                       names and captions

Every picture shows real data: texts and packed rows of the workspace, the run's own measurements, answers of its model,
or what a function of the package returns. Each is written twice, docs/images/NAME-light.png and NAME-dark.png, with at
most 200 KB. A font with Chinese characters must be installed.

The curves of `result` have one point per checkpoint and per validation. Its run is the one that the READMEs show:
docs/images/quickstart_run.py.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"
THEME_NAMES = ("light", "dark")


@dataclass(frozen=True)
class Caption:
    """The words that belong to a picture."""

    drawn_by: str
    """Module in docs/images with a function of the picture's name."""
    caption: str
    alt: str


CAPTIONS = {
    "cleaning": Caption(
        "draw_corpus",
        "Each step of `z2a corpus build` drops what later steps need not see, and keeps count of it.",
        "Web pages pass four steps of cleaning; beside each step stand the number of dropped records and an example",
    ),
    "near-copies": Caption(
        "draw_corpus",
        "MinHash: two texts that share most of their shingles agree in most of the 256 bytes of their signatures.",
        "Two texts with their different words marked, the grid of equal signature bytes, and the curve of LSH bands",
    ),
    "bpe": Caption(
        "draw_tokenizer",
        "BPE joins neighbouring bytes in the order in which it learned the pairs, in English and Chinese alike.",
        "The merges of an English and a Chinese word drawn as trees, and two sentences after more and more merges",
    ),
    "packing": Caption(
        "draw_packed",
        "Documents lie end to end and are cut into rows of equal length; best-fit packing cuts none and pads instead.",
        "A stream of documents cut into rows, once as windows and once by best fit, and the tokens at one border",
    ),
    "order": Caption(
        "draw_packed",
        "The mixture decides which source comes next, a permutation which of its rows; both are pure functions.",
        "The rows of the first four steps coloured by source, and the rows of each source over the whole run",
    ),
    "mask": Caption(
        "draw_model",
        "A causal mask hides later tokens; with a document mask a token sees only its own document.",
        "Two attention masks over real tokens at the border of two documents, causal alone and with documents",
    ),
    "rope": Caption(
        "draw_model",
        "RoPE turns each pair of a head by an angle that grows with the position, so scores depend on distances only.",
        "Four clocks that turn at different speeds with the position, and scores that depend on the distance alone",
    ),
    "fused": Caption(
        "draw_costs",
        "A fused kernel reads its inputs once and writes its outputs once; one operation at a time moves far more.",
        "Reads and writes of each operation of RMSNorm beside those of one fused kernel, and totals of three operators",
    ),
    "memory": Caption(
        "draw_costs",
        "Where the memory of a run goes: weights, gradients and optimizer are fixed, activations grow with the batch.",
        "Stacked bars: the memory of a large model in four settings and of the quickstart, part by part",
    ),
    "step": Caption(
        "draw_costs",
        "What one training step spends its time on, as the run measured it.",
        "The parts of a training step on a line of time, with their measured milliseconds",
    ),
    "schedule": Caption(
        "draw_training",
        "The learning rate is a function of the step: cosine, or warmup, stable, decay, from which anneals can branch.",
        "Learning rate over steps for the cosine schedule of the quickstart, for WSD, and for an anneal",
    ),
    "branches": Caption(
        "draw_training",
        "Trials are judged by branches that decay, while trunks go on at a constant rate; a third of them is kept.",
        "Learning rate of a trial with two branches that decay, and how many of nine trials are trained over the steps",
    ),
    "commit": Caption(
        "draw_training",
        "A checkpoint exists only after the rename: a process killed before it leaves the previous one as the newest.",
        "The file operations of a save in order, and which checkpoint is found after a kill before each of them",
    ),
    "phases": Caption(
        "draw_limits",
        "Memory is not one number: the peak of a step is what is there all the time plus its worst phase.",
        "Bars: the memory of 1.26 B with AdamW in seven phases of a step, with and without recomputation, and two GPUs",
    ),
    "roofline": Caption(
        "draw_limits",
        "A matmul with few tokens waits for memory; one whose last wave is not full leaves SMs idle.",
        "The roofline of an H200 with matmuls of few and of many tokens; the waves of a matmul as a staircase",
    ),
    "goodput": Caption(
        "draw_limits",
        "The best time between two checkpoints follows from what a save costs and how often something fails.",
        "Goodput over the time between two checkpoints, three curves, each with a mark at Daly's interval",
    ),
    "bits": Caption(
        "draw_results",
        "The bits that each token of a held-out sentence costs the model, before and after training.",
        "Tokens of an English and a Chinese sentence with bars of their bits before and after training",
    ),
    "result": Caption(
        "draw_results",
        "Minutes on two CPU cores, from raw text to a model that knows facts in English and Chinese.",
        "The same prompts continued before and after training, the share of facts it knows and its held-out loss",
    ),
}
"""By name, in the order of the chapters."""

MADE_ELSEWHERE = {
    "parallel-tensor": ["parallel.py"],
    "engine": ["engine.py"],
    "corpus-report": ["corpus_report.py"],
    "board": ["board.py", "{work}"],
    "serve": ["serve.py", "quickstart", "--work", "{work}"],
}
"""Pictures with a maker of their own, and how it is called. They are drawn only when named."""


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and draw; returns the exit code."""
    from zero2all.common.errors import UserError

    options = _parser().parse_args(arguments)
    if options.list:
        for name, words in CAPTIONS.items():
            print(f"{name:<12} {words.caption}")
        return 0
    unknown = [name for name in options.names if name not in CAPTIONS and name not in MADE_ELSEWHERE]
    if unknown:
        known = ", ".join([*CAPTIONS, *MADE_ELSEWHERE])
        print(f"error: There is no picture {unknown[0]}. There are: {known}.", file=sys.stderr)
        return 2
    try:
        _draw_all(options.names or list(CAPTIONS), options.work, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def function_name(name: str) -> str:
    """What the function that draws a picture is called."""
    return name.replace("-", "_")


def picture_path(name: str, theme: str, folder: Path = IMAGES) -> Path:
    """Where a picture is stored."""
    return folder / f"{name}-{theme}.png"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CAPTIONS)}; default: all of these")
    parser.add_argument("--work", type=Path, default=Path("quickstart"), help="workspace (default: ./quickstart)")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures (default: docs/images)")
    parser.add_argument("--list", action="store_true", help="print names and captions, draw nothing")
    return parser


def _draw_all(names: list[str], work: Path, out: Path) -> None:
    sys.path.insert(0, str(IMAGES))  # the drawing modules import each other by name
    from example import Example

    example = Example(work)
    out.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        started = time.monotonic()
        if name in MADE_ELSEWHERE:
            script, *words = [word.format(work=work) for word in MADE_ELSEWHERE[name]]
            subprocess.run([sys.executable, IMAGES / script, *words], check=True)
            continue
        sizes = [f"{path.name} {path.stat().st_size / 1000:.0f} KB" for path in _draw(name, example, out)]
        print(f"      {', '.join(sizes)}, {time.monotonic() - started:.0f} s", flush=True)


def _draw(name: str, example: Any, out: Path) -> list[Path]:
    """Draw one picture in both themes; returns the files."""
    from canvas import THEMES

    draw = getattr(importlib.import_module(CAPTIONS[name].drawn_by), function_name(name))
    paths = []
    for theme in THEMES:
        paths.append(picture_path(name, theme.name, out))
        draw(example, theme).save(paths[-1])
    return paths


if __name__ == "__main__":
    sys.exit(main())
