"""A real, very small training: a table of next-letter logits, fitted to a sentence by gradient descent in numpy.

Started by the browser tests as a process of its own. Each line of input asks for that many steps; the step it has come
to is printed when they are done. At the end of the input it closes its run and exits.

    python small_training.py RUN_FOLDER
"""

import sys
from pathlib import Path

import numpy as np

from zero2all.track import MetricsWriter

TEXT = "the quick brown fox jumps over the lazy dog. 敏捷的棕色狐狸跳过懒狗。" * 20


def main(folder: Path) -> None:
    letters = sorted(set(TEXT))
    ids = np.array([letters.index(letter) for letter in TEXT])
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(len(letters), len(letters)))
    step = 0
    with MetricsWriter(folder) as run:
        for line in sys.stdin:
            for _ in range(int(line)):
                step += 1
                at = rng.integers(0, len(ids) - 1, 64)
                before, after = ids[at], ids[at + 1]
                scores = logits[before]
                chances = np.exp(scores - scores.max(1, keepdims=True))
                chances /= chances.sum(1, keepdims=True)
                loss = float(-np.log(chances[np.arange(64), after]).mean())
                gradient = chances.copy()
                gradient[np.arange(64), after] -= 1
                np.add.at(logits, before, -0.5 * gradient / 64 * len(letters))
                run.log({"loss": loss, "grad_norm": float(np.linalg.norm(gradient))}, step=step, tokens=64 * step)
            print(step, flush=True)


main(Path(sys.argv[1]))
