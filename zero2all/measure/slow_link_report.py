"""`z2a perf link`: what every way of training over a slow link costs for one config."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.language import translate as t
from zero2all.common.workspace import Workspace
from zero2all.estimate.answer import said
from zero2all.estimate.run.batch import own_batch, with_vocabulary
from zero2all.estimate.run.models import load_model_config
from zero2all.estimate.slow_link import LinkCost, link_costs, recommended
from zero2all.measure.verify import HERE, Asked, prediction_for
from zero2all.model.config import ModelConfig
from zero2all.parallel.parameter_table import layout_table

FRAGMENT_LAYERS = 3
COMPRESS = {16: "bf16", 8: "int8", 4: "int4"}


@dataclass(frozen=True)
class LinkReport:
    """All schemes, and the one to take."""

    parameters: int
    fragments: int
    step_seconds: float
    how: str  # where the time of a step is from
    costs: Sequence[LinkCost]
    best: LinkCost
    wait_seconds: float  # of the config
    notes: Sequence[str]  # what was assumed

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def link_report(
    source: str,
    overrides: list[str],
    gbit: float,
    groups: int,
    step: float | Asked = HERE,
    workspace: Workspace | None = None,
) -> LinkReport:
    """`step`: the seconds that a group computes in a step, or the machine for which they are predicted, with the tokens
    of a step divided by the groups. Without model.vocab_size the vocabulary is that of the workspace."""
    loaded, assumed = load_model_config(source, overrides)
    config, notes = with_vocabulary(loaded, workspace)
    notes = [*assumed, *notes]
    fragments = fragment_shapes(config.model)
    parameters = sum(math.prod(shape) for part in fragments for shape in part)
    if isinstance(step, Asked):
        batch = own_batch(config, groups)
        without_documents = dataclasses.replace(config.data, document_mask=False)  # as in every prediction
        try:
            found = prediction_for(dataclasses.replace(config, data=without_documents), batch, step)
        except BadInputError as error:  # most often no profile; a step that was timed needs none
            raise BadInputError(f"{error} {t('Or give the measured seconds of a step: --step-seconds N.')}") from error
        seconds, how = found.corrected, f"predicted for {found.machine.name}, batch {batch} in each group"
    else:
        seconds, how = step, "as given"
    costs = link_costs(fragments, groups, 1e9 * gbit, seconds, config.parallel.powersgd_rank)
    best, wait_seconds = recommended(costs, parameters), config.parallel.slow_link.wait_seconds
    return LinkReport(parameters, len(fragments), seconds, how, costs, best, wait_seconds, notes)


def fragment_shapes(model: ModelConfig) -> list[list[tuple[int, ...]]]:
    """Shapes of the parameters by fragment: blocks at equal distances, about three together; the rest is the last."""
    count = math.ceil(model.layers / FRAGMENT_LAYERS)
    found: list[list[tuple[int, ...]]] = [[] for _ in range(count + 1)]
    for one in layout_table(model):
        block = re.match(r"blocks\.(\d+)\.", one.name)
        found[int(block[1]) % count if block else -1].append(one.shape)
    return found


def link_rows(report: LinkReport) -> list[list[str]]:
    """A table with its heading."""
    rows = [["scheme", "bytes/step", "exchange", "link s/step", "waits s/step", "efficiency", "overlapped", "loss"]]
    for cost in report.costs:
        figures = [said(cost.step_bytes, "bytes").partition(" = ")[0], said(cost.exchange_seconds, "s")]
        figures += [f"{cost.link_seconds:.3g}", f"{cost.waited_seconds:.3g}", f"{100 * cost.efficiency:.1f} %"]
        rows.append([t(cost.scheme.name), *figures, t("yes" if cost.is_hidden else "no"), _loss(cost)])
    return rows


def _loss(cost: LinkCost) -> str:
    return "?" if cost.loss_percent is None else f"{cost.loss_percent:+.1f} %"


def link_notes(report: LinkReport) -> list[str]:
    """What to take, what it costs, and how to set it."""
    best = report.best
    lines = [
        *map(t, report.notes),
        t(f"a step computes for {report.step_seconds:.3g} s ({report.how})"),
        t(f"recommended: {best.scheme.name}: {100 * best.efficiency:.1f} % of the speed without a limit"),
    ]
    if best.loss_percent is not None and best.loss_source:
        lines.append(t(f"loss at equal tokens: {best.loss_percent:+.1f} % ({best.loss_source})"))
    elif best.loss_percent is None:
        lines.append(t(f"its loss beside data parallel: {best.loss_source}; try it on a small model first"))
    if best.scheme.scheme in ("local_sgd", "diloco", "streaming", "sparse"):
        flags: dict[str, str | int] = {"scheme": best.scheme.scheme, "every": best.scheme.every}
        if best.scheme.scheme == "streaming":
            flags["tau"] = best.scheme.tau
        if best.scheme.scheme != "sparse":
            flags["compress"] = COMPRESS[best.scheme.bits]
        if best.exchange_seconds > report.wait_seconds:
            flags["wait_seconds"] = math.ceil(2 * best.exchange_seconds)
            lines.append(
                t(
                    f"an exchange takes {best.exchange_seconds:.0f} s, longer than parallel.slow_link.wait_seconds "
                    f"({report.wait_seconds:g} s): a pause of the link could leave a group out, so raise it"
                )
            )
        lines.append(" ".join(f"--parallel.slow_link.{name} {value}" for name, value in flags.items()))
    elif best.scheme.name == "data parallel, bf16":
        lines.append("--parallel.compress bf16")
    elif best.scheme.scheme == "powersgd":
        lines.append("--parallel.compress powersgd")
    return lines
