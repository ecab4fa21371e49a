"""What `--full` adds to the quickstart: two more runs, each from the weights of its chat model.

`<run>-dpo` learns which of two answers is better, from pairs that the small world writes: a right answer before an
invented one or a refusal, and where nobody can know, a refusal before an invention. `<run>-rl` is to learn the sums
that the conversations refuse: answers are drawn and rewarded, and no written answer is in its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from zero2all.common import jsonio
from zero2all.common.files import atomic_file
from zero2all.common.workspace import Workspace
from zero2all.finetune import dpo, rl
from zero2all.finetune.objectives import objective_of
from zero2all.finetune.sft import SftOptions
from zero2all.quickstart.world.conversations import preferences, sum_prompts
from zero2all.quickstart.world.language import LANGUAGES
from zero2all.train.run import train

PAIRS, PAIRS_RATE = 1000, 1e-4
"""Of each language, and the highest learning rate: at five times as much both answers of a pair become unlikely."""
SUMS_STEPS, SUMS_RATE = 40, 3e-4
SUMS_SETTINGS = {"rewards": "{number: 1, format: 0.2}", "format": "[0-9]+[.。]?", "max_new_tokens": 8}
"""Of `finetune.grpo`. By `number` alone a model that refuses every sum earns nothing, and learns nothing: of 960 drawn
answers none was right. So a number by itself earns a little, too."""


def tune(workspace: Workspace, method: str, chat: str, name: str, seed: int, share: float = 1.0) -> None:
    """Tune the run `chat` by dpo or rl as the run `name`, or find it done. `share`: of the pairs, or of the steps."""
    if method == "dpo":
        path, count = workspace.root / dpo.FOLDER / "pairs.jsonl", int(PAIRS * share)
        data = _written(path, lambda each: preferences(each, count, seed))
        prepared = dpo.prepare_dpo(chat, workspace, SftOptions(name, [data], epochs=1.0, lr=PAIRS_RATE, replace=True))
    else:
        path, steps = workspace.root / rl.FOLDER / "sums.jsonl", max(2, int(SUMS_STEPS * share))
        data = _written(path, lambda each: sum_prompts(each, seed))
        overrides = [f"--finetune.grpo.{field}={value}" for field, value in SUMS_SETTINGS.items()]
        options = rl.RlOptions(name, [data], lr=SUMS_RATE, steps=steps, overrides=overrides, replace=True)
        prepared = rl.prepare_rl(chat, workspace, options)
    train(prepared.config, workspace, say=lambda _: None, make_objective=objective_of, brief=True)


def _written(path: Path, rows: Callable[[str], Iterator[dict[str, str]]]) -> Path:
    """Rows of both languages, in a file as others write theirs; one that is there stays."""
    if not path.is_file():
        with atomic_file(path) as file:
            file.writelines(jsonio.dumps_line(row) for language in LANGUAGES for row in rows(language))
    return path
