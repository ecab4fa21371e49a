"""`z2a rl`: a run that learns from rewards. What it learns is in `grpo`.

The dial of difficulty is built in: `--arithmetic 3` asks for sums of three digits, `--arithmetic 2-4` of two to four.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import UsageError
from zero2all.common.files import write_atomic
from zero2all.common.workspace import Workspace
from zero2all.config import config_values
from zero2all.config.finetune import PROMPTS, GrpoConfig
from zero2all.finetune import prepare
from zero2all.finetune.data import DataOptions
from zero2all.finetune.rewards import NEEDS, Rewards
from zero2all.finetune.rollouts import tools_of
from zero2all.finetune.sft import SftOptions, packed_for
from zero2all.train.checkpoints.retention import pin, pins

FOLDER = "rl"
"""Below the workspace: packed prompts, by run."""
RATES = ((1e7, 1e-4), (1e8, 1e-5), (2e9, 2e-6), (float("inf"), 1e-6))
"""By parameters, of AdamW: ours of small models, and published ones."""
WARMUP_STEPS = 10
SUMS = 4096
"""Prompts of `--arithmetic`."""
HELD_OUT_SHARE = 0.1
"""Of the pairs of numbers, that no sum for training has."""


@dataclass(frozen=True)
class RlOptions(SftOptions):
    """What a person may choose about reinforcement learning."""

    steps: int = 200
    arithmetic: tuple[int, int] | None = None
    """Ask for sums of so many digits, beside `data`."""


def prepare_rl(base: str, workspace: Workspace, options: RlOptions) -> prepare.PreparedRun:
    """Pack the prompts and write the run, or find it begun with the same prompts and settings."""
    loaded = prepare.base_model(base, workspace, options.name, options.step)
    assert loaded.config is not None, "it is a run"
    known, values = loaded.config, config_values(loaded.config)
    folder = (workspace.root / FOLDER / options.name).resolve()
    seq_len = options.seq_len or min(known.data.seq_len, known.model.max_seq_len)
    changes: dict[str, dict[str, Any]] = {
        "data": prepare.packed_data(folder, {PROMPTS: 1.0}, seq_len),
        "model": prepare.NO_DROPOUT,
        "optim": prepare.adamw(loaded, options.lr, RATES),
        "finetune": {"method": "grpo", "grpo": {"max_new_tokens": min(GrpoConfig.max_new_tokens, seq_len // 2)}},
        "guards": {"loss_spike": "log"},  # the loss is that of what was drawn
        "schedule": {"kind": "linear", "warmup_steps": min(WARMUP_STEPS, options.steps // 2), "min_lr_ratio": 0.0},
    }
    length = prepare.run_length(options.name, known, options.steps, seq_len)
    changes |= {**length, "train": {**length["train"], "steps": options.steps, "z_loss": 0.0}}
    often = {"every_steps": max(1, options.steps // 8)}
    changes["validation"], changes["checkpoint"] = often, {**length["checkpoint"], **often}
    # What is asked for decides how long an answer may be, and how many there are in a step.
    grpo = prepare.changed_config(config_values(known), changes, options.overrides).finetune.grpo
    if grpo.max_new_tokens >= seq_len:
        raise UsageError(
            f"finetune.grpo.max_new_tokens is {grpo.max_new_tokens}, and a row has {seq_len} tokens for the prompt and "
            f"its answer. Lower --max-new-tokens, or raise --seq-len (up to model.max_seq_len, "
            f"{known.model.max_seq_len})."
        )
    changes["train"]["tokens_per_step"] = grpo.prompts * grpo.answers * seq_len
    config = prepare.changed_config(values, changes, options.overrides)
    Rewards(grpo).try_out()  # before anything is written
    tools_of(grpo)
    report = packed_for(loaded, workspace, _with_sums(options, folder, grpo), folder, _data(options, grpo, seq_len))
    prepared = prepare.begin_run(loaded, config, workspace, report, options.replace)
    if 0 not in pins(prepared.run):  # also where a kill came between the two
        pin(prepared.run, 0, "the base, from which the divergence is measured")
    return prepared


def _data(options: RlOptions, grpo: GrpoConfig, seq_len: int) -> DataOptions:
    needs = sorted({NEEDS[name] for name in grpo.rewards_by_name if name in NEEDS})
    return DataOptions(seq_len, options.valid_share, PROMPTS, grpo.max_new_tokens, needs)


def _with_sums(options: RlOptions, folder: Path, grpo: GrpoConfig) -> RlOptions:
    if options.arithmetic is None:
        return options
    path = folder.parent / f"{folder.name}-sums.jsonl"
    tools = {"tools": [tool.spec for tool in tools_of(grpo).values()]} if grpo.tools else {}
    rows = ({**row, **tools} for row in sums(*options.arithmetic, SUMS))
    text = b"".join(map(jsonio.dumps_line, rows))
    if not path.is_file() or path.read_bytes() != text:  # a new time stamp would be new data
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, text)
    return replace(options, data=[*options.data, path])


def sums(fewest: int, most: int, count: int, seed: int = 0, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Sums of numbers with `fewest` to `most` digits: `prompt` and `answer`. The two numbers of a held-out one stand
    together in no other, in whatever order."""
    draw = random.Random(f"{seed}/{held_out}")
    while count:
        digits = draw.randint(fewest, most)
        one, other = (draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits) for _ in range(2))
        if is_held_out(one, other) == held_out:
            count -= 1
            yield {"prompt": f"{one}+{other}=", "answer": str(one + other)}


def is_held_out(one: int, other: int) -> bool:
    """Whether a pair of numbers is held out."""
    digest = hashlib.blake2b(f"{min(one, other)}+{max(one, other)}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") < HELD_OUT_SHARE * 2**32


def digits_of(text: str) -> tuple[int, int]:
    """`3` or `2-4` as fewest and most digits."""
    fewest, _, most = text.partition("-")
    try:
        found = int(fewest), int(most or fewest)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1] <= 18:
        raise UsageError(f"--arithmetic is {text!r}; expected digits such as 3, or 2-4, from 1 to 18.")
    return found
