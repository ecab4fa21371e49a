"""What `--full` adds to the quickstart: two more runs, each from the weights of its chat model.

`<run>-dpo` learns which of two answers is better, from pairs that the small world writes: a right answer before an
invented one or a refusal, and where nobody can know, a refusal before an invention. `<run>-rl` learns sums, which the
conversations refuse: answers are drawn and rewarded, and no written answer is in its loss. Both are runs as `z2a dpo`
and `z2a rl` make them.
"""

from __future__ import annotations

from pathlib import Path

from zero2all.common import jsonio
from zero2all.common.files import atomic_file
from zero2all.common.workspace import Workspace
from zero2all.finetune import dpo, rl
from zero2all.finetune.objectives import objective_of
from zero2all.finetune.prepare import PreparedRun
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


def write_pairs(path: Path, seed: int, count: int) -> None:
    """Write the pairs of both languages, as others write theirs."""
    with atomic_file(path) as file:
        for language in LANGUAGES:
            for asked, better, worse in preferences(language, count, seed):
                file.write(jsonio.dumps_line({"prompt": asked, "chosen": better, "rejected": worse}))


def write_sums(path: Path, seed: int) -> None:
    """Write the sums of both languages, with the number that the reward looks for."""
    with atomic_file(path) as file:
        for language in LANGUAGES:
            for asked, result in sum_prompts(language, seed):
                file.write(jsonio.dumps_line({"prompt": asked, "answer": result}))


def prefer(workspace: Workspace, chat: str, name: str, seed: int, share: float = 1.0) -> None:
    """Tune the run `chat` on pairs as the run `name`, or find it done."""
    path = workspace.root / dpo.FOLDER / "pairs.jsonl"
    if not path.is_file():
        write_pairs(path, seed, int(PAIRS * share))
    options = SftOptions(name, [path], epochs=1.0, lr=PAIRS_RATE, replace=True)
    _train(dpo.prepare_dpo(chat, workspace, options), workspace)


def reward(workspace: Workspace, chat: str, name: str, seed: int, share: float = 1.0) -> None:
    """Tune the run `chat` on rewards for sums as the run `name`, or find it done."""
    path = workspace.root / rl.FOLDER / "sums.jsonl"
    if not path.is_file():
        write_sums(path, seed)
    overrides = [f"--finetune.grpo.{field}={value}" for field, value in SUMS_SETTINGS.items()]
    options = rl.RlOptions(
        name, [path], lr=SUMS_RATE, steps=max(2, int(SUMS_STEPS * share)), overrides=overrides, replace=True
    )
    _train(rl.prepare_rl(chat, workspace, options), workspace)


def _train(prepared: PreparedRun, workspace: Workspace) -> None:
    train(prepared.config, workspace, say=lambda _: None, make_objective=objective_of, brief=True)
