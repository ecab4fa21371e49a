"""`z2a dpo`: a run on pairs of answers. What it learns is in `preference`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from zero2all.common.workspace import Workspace
from zero2all.config.finetune import PAIRS
from zero2all.config.training import OptimConfig
from zero2all.finetune.data import DataOptions
from zero2all.finetune.prepare import PreparedRun, TuneOptions, begin_run, open_base, run_length, tuned_config
from zero2all.finetune.sft import packed_for

FOLDER = "dpo"
"""Below the workspace: packed pairs, by run."""
RATES = ((2e9, 1e-6), (math.inf, 5e-7))
"""By parameters, of AdamW: published runs of 0.1 to 13 B."""
WARMUP_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class DpoOptions(TuneOptions):
    """`seq_len`: tokens of an answer with its prompt; a row has room for two."""

    epochs: float = 1.0


def prepare_dpo(base: str, workspace: Workspace, options: DpoOptions) -> PreparedRun:
    """Pack the pairs and write the run, or find it begun with the same pairs and settings."""
    loaded, known = open_base(base, workspace, options)
    longest = options.seq_len or min(known.data.seq_len, known.model.max_seq_len)
    folder = (workspace.root / FOLDER / options.name).resolve()
    report = packed_for(workspace, loaded, options, folder, DataOptions(2 * longest, options.valid_share, pairs=True))
    length = run_length(known, report["rows"]["train"] * options.epochs, 2 * longest)
    optim = {} if known.optim.kind.startswith("adamw") else asdict(OptimConfig())  # Muon's rates are others
    lr = options.lr or next(rate for most, rate in RATES if loaded.parameters <= most)
    changes: dict[str, dict[str, Any]] = {
        "data": {
            **{"packed": str(folder), "mixture": {PAIRS: 1.0}, "seq_len": 2 * longest, "max_epochs": None},
            **{"packing": "best_fit", "document_mask": True},
        },
        "model": dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0),
        "train": {**length, "z_loss": 0.0},
        "optim": {**optim, "lr_max": float(f"{lr:.4g}"), "weight_decay": 0.0},
        "schedule": {
            "kind": "linear",
            "warmup_steps": max(1, int(WARMUP_SHARE * length["steps"])),
            "min_lr_ratio": 0.0,
        },
        "finetune": {"method": "dpo"},
        "guards": {"loss_spike": "log"},  # what the answers cost rises as the rejected ones become less likely
    }
    return begin_run(workspace, loaded, tuned_config(known, changes, options), report, options)
