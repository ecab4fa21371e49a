"""What a fine-tuned run learns, by `finetune.method`."""

from zero2all.train.context import RunContext
from zero2all.train.objective import Objective


def objective_of(context: RunContext) -> Objective | None:
    """The objective of a run; None: the mean loss of the tokens that count."""
    method = context.config.finetune.method
    if method == "dpo":
        from zero2all.finetune.preference import Preference

        return Preference(context)
    if method == "distill":
        from zero2all.finetune.distill import Distillation

        return Distillation(context)
    if method == "grpo":
        from zero2all.finetune.grpo import PolicyGradient

        return PolicyGradient(context)
    return None
