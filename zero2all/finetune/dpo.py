"""`z2a dpo`: a run on pairs of answers. What it learns is in `preference`."""

import math
from typing import Any

from zero2all.common.workspace import Workspace
from zero2all.config import config_values
from zero2all.config.finetune import PAIRS
from zero2all.finetune import prepare
from zero2all.finetune.data import DataOptions
from zero2all.finetune.sft import SftOptions, packed_for

FOLDER = "dpo"
"""Below the workspace: packed pairs, by run."""
RATES = ((2e9, 1e-6), (math.inf, 5e-7))
"""By parameters, of AdamW: published runs of 0.1 to 13 B."""
WARMUP_SHARE = 0.1


def prepare_dpo(base: str, workspace: Workspace, options: SftOptions) -> prepare.PreparedRun:
    """Pack the pairs and write the run, or find it begun with the same pairs and settings. `options.seq_len`: tokens of
    an answer with its prompt; a row has room for two."""
    loaded = prepare.base_model(base, workspace, options.name, options.step)
    assert loaded.config is not None, "it is a run"
    known, values = loaded.config, config_values(loaded.config)
    seq_len = 2 * (options.seq_len or min(known.data.seq_len, known.model.max_seq_len))
    folder = (workspace.root / FOLDER / options.name).resolve()
    data = DataOptions(seq_len, options.valid_share, PAIRS)
    report = packed_for(loaded, workspace, options, folder, data)
    changes: dict[str, dict[str, Any]] = {
        **prepare.run_length(options.name, known, report["rows"]["train"] * options.epochs, seq_len),
        "data": prepare.packed_data(folder, {PAIRS: 1.0}, seq_len),
        "model": prepare.NO_DROPOUT,
        "optim": prepare.adamw(loaded, options.lr, RATES),
        "finetune": {"method": "dpo"},
        "guards": {"loss_spike": "log"},  # the loss of all answers rises as the rejected ones become less likely
    }
    changes["train"]["z_loss"] = 0.0
    warmup = max(1, int(WARMUP_SHARE * changes["train"]["steps"]))
    changes["schedule"] = {"kind": "linear", "warmup_steps": warmup, "min_lr_ratio": 0.0}
    return prepare.begin_run(
        loaded, prepare.changed_config(values, changes, options.overrides), workspace, report, options.replace
    )
