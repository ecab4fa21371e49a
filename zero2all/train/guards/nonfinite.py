"""What the loop does with a step whose loss or gradient is not finite."""

from __future__ import annotations

from zero2all.common.errors import AnomalyError
from zero2all.train.config import GuardsConfig


def check_skips(step: int, skips_in_a_row: int, loss: float, grad_norm: float, config: GuardsConfig) -> None:
    """Stop the run when skipping is not allowed, or does not help."""
    if skips_in_a_row == 0:
        return
    what = f"Step {step}: loss {loss}, gradient norm {grad_norm}"
    advice = "Lower optim.lr_max or raise schedule.warmup_steps, and look at the data of this step."
    if config.nonfinite == "stop":
        raise AnomalyError(f"{what}; guards.nonfinite is `stop`, so the run ends here, unharmed. {advice}")
    if skips_in_a_row >= config.max_skips_in_a_row:
        raise AnomalyError(f"{what}; {skips_in_a_row} updates in a row were skipped, so the run ends here. {advice}")
