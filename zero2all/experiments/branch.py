"""A branch: a new run from a checkpoint of another one, whose learning rate falls from there.

One run at a constant rate (its trunk) so gives a finished model at several budgets: only the decay of each is trained
again. The checkpoint is linked, not copied, and `anneal.json` asks for the decay, as `z2a anneal` does.
"""

from dataclasses import dataclass, replace
from typing import Literal

from zero2all.common.files import link_or_copy, staged_folder, write_json
from zero2all.common.workspace import Workspace
from zero2all.train.anneal import request_anneal
from zero2all.train.checkpoints.layout import checkpoint_folder, require_checkpoint
from zero2all.train.saved_config import load_run_config, save_run_config

BRANCH_FILE = "branch.json"


@dataclass(frozen=True)
class Branch:
    """Where a branch begins, and its decay."""

    of: str
    step: int
    steps: int
    shape: Literal["linear", "1-sqrt", "cosine"]
    to_share: float
    mixture: dict[str, float] | None = None
    """Weights of the sources during the decay; None: those of the trunk."""


def begin_branch(workspace: Workspace, name: str, branch: Branch) -> None:
    """Write the run `name`, which the trainer then continues; one that is there stays."""
    run, trunk = workspace.run(name), workspace.run(branch.of)
    if run.exists():
        return
    require_checkpoint(trunk, branch.step)
    config = load_run_config(trunk)
    with staged_folder(run) as partial:
        save_run_config(replace(config, train=replace(config.train, name=name)), partial)
        target = checkpoint_folder(partial, branch.step)
        target.mkdir(parents=True)
        for file in checkpoint_folder(trunk, branch.step).iterdir():
            link_or_copy(file, target / file.name)
        request_anneal(partial, branch.steps, branch.shape, branch.to_share, branch.mixture)
        write_json(partial / BRANCH_FILE, {"of": branch.of, "from_step": branch.step})
