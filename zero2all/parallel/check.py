"""Whether a run can be spread over a mesh: every rule that it breaks, in one message, before anything starts.

Each axis keeps its own rules beside its code (`problems` in `parallel/tensor.py` and so on); here are those that
several axes share. The arithmetic behind most of them:

    processes      = pipeline x replicate x shard x context x tensor
    batch ranks    = replicate x shard = processes / (pipeline x context x tensor): each has rows of its own
    rows of a step = rows of a pass x batch ranks x passes
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from zero2all.common.errors import UsageError
from zero2all.common.progress import counted
from zero2all.parallel import context, expert, pipeline, tensor
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.run_config import SpreadConfig, sequence_lengths

OF_STREAMING = ("fragment_layers", "tau", "alpha")
"""Settings of the section diloco that only its scheme streaming uses."""
Rule = Callable[[SpreadConfig, MeshSizes], list[str]]


def check_spread(config: SpreadConfig, processes: int, more: Sequence[str] = ()) -> MeshSizes:
    """The sizes of the mesh of a run; UsageError with every rule that it breaks, with the arithmetic, and with `more`
    problems that the caller found."""
    sizes = config.parallel.asked_sizes(processes)
    wrong_sizes = config.parallel.size_problems(sizes, processes)
    found = [*more, *wrong_sizes, *spread_problems(config, sizes)]
    if (more or wrong_sizes) and config.parallel.shard == "auto" and sizes.shard == 1:
        # How many share is not known then, so the rules for several are applied too.
        several = replace(sizes, shard=2)
        found += [
            text
            for text in (*pipeline.problems(config, several), *_zero_problems(config, several))
            if text not in found
        ]
    if found:
        lines = "\n".join(f"  {number}. {text}" for number, text in enumerate(found, 1))
        raise UsageError(
            f"The run cannot be spread over {counted(processes, 'rank')} ({counted(len(found), 'problem')}). Nothing "
            f"was started.\n{lines}\n{arithmetic(config, sizes)}"
        )
    return sizes


def spread_problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """Every reason why this run cannot be spread over a mesh of these sizes: rule, numbers, what to do."""
    return [problem for rule in RULES for problem in rule(config, sizes)]


def arithmetic(config: SpreadConfig, sizes: MeshSizes) -> str:
    """How processes, batch ranks and passes follow from the sizes."""
    batch, rows = sizes.replicate * sizes.shard, config.train.tokens_per_step // config.data.seq_len
    micro = config.train.micro_batch_samples
    lines = [
        f"  processes   = pipeline x replicate x shard x context x tensor = {sizes.pipeline} x {sizes.replicate} x "
        f"{sizes.shard} x {sizes.context} x {sizes.tensor} = {sizes.processes}",
        f"  batch ranks = processes / (tensor x pipeline x context) = {sizes.processes} / ({sizes.tensor} x "
        f"{sizes.pipeline} x {sizes.context}) = {batch}",
        f"  rows        = train.tokens_per_step / data.seq_len = {config.train.tokens_per_step} / "
        f"{config.data.seq_len} = {rows} per step",
    ]
    if (groups := config.groups) > 1:
        rows //= groups
        lines.append(f"              = {rows} per group x {groups} groups")
    if micro != "auto":
        own = -(-rows // batch)
        micro = min(micro, own)
        passes = -(-own // micro)
        product = f"              = {micro} per pass x {counted(batch, 'batch rank')}, passes: {passes}"
        lines.append(product if rows == micro * batch * passes else f"{product} (the last is shorter or padded)")
    return "\n".join(lines)


def idle_settings(config: SpreadConfig, processes: int) -> list[str]:
    """A line for each reason why settings that were changed have no effect."""
    diloco = config.diloco
    usual = type(diloco)()
    changed = [one.name for one in fields(diloco) if getattr(diloco, one.name) != getattr(usual, one.name)]
    unused = [name for name in changed if name in OF_STREAMING and diloco.scheme != "streaming"]
    names = ", ".join(f"diloco.{name}" for name in (unused if diloco.groups else changed))
    found = []
    if names:
        why = f"the scheme is {diloco.scheme}" if diloco.groups else "diloco.groups is empty"
        found.append(f"without effect: {names} ({why})")
    if diloco.groups and diloco.every > config.train.steps:
        found.append(
            f"diloco.every {diloco.every} is more than train.steps {config.train.steps}: the groups "
            f"synchronise once, after the last step"
        )
    if config.parallel.compress != "none" and processes == 1:
        found.append("without effect: parallel.compress (there is one process, which sends no gradients)")
    return found


def _rows_problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """A batch rank without a row would compute on padding alone."""
    batch, found = sizes.replicate * sizes.shard, []
    for name, length in sequence_lengths(config):
        rows = config.train.tokens_per_step // length
        if rows < batch:
            found.append(
                f"A step has train.tokens_per_step / {name} = {config.train.tokens_per_step} / {length} = "
                f"{counted(rows, 'row')}, fewer than the {batch} batch ranks (replicate {sizes.replicate} x shard "
                f"{sizes.shard}). Raise train.tokens_per_step to at least {batch * length}, or use the processes for "
                f"another axis."
            )
    return found


def _sequence_problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """Context ranks split every sequence, with `gather` into two chunks each; tensor ranks split what one of them has.
    One rule, so that its advice satisfies both axes."""
    chunks = 2 if sizes.context > 1 and context.method_of(config.model, config.parallel, sizes) == "gather" else 1
    unit = sizes.context * math.lcm(chunks, sizes.tensor)
    why = f"parallel.context {sizes.context} and parallel.tensor {sizes.tensor} cut every sequence into equal parts"
    if chunks == 2:
        why += ", and with context_method gather each context rank has two"
    return [
        f"{name} {length} is not a multiple of {unit}: {why}. {_length_advice(config, name, length, unit)}"
        for name, length in sequence_lengths(config)
        if length % unit
    ]


def _length_advice(config: SpreadConfig, name: str, length: int, unit: int) -> str:
    """A length near this one that no other rule refuses, or that and the tokens of a step that go with it."""
    longest, tokens = max(config.model.max_seq_len, unit), config.train.tokens_per_step
    allowed = range(unit, longest + 1, unit)
    whole = [each for each in allowed if tokens % each == 0 and length <= 2 * each <= 4 * length]
    best = min(whole or allowed, key=lambda each: abs(each - length))
    if whole:
        return f"Set {name} to {best}."
    return f"Set {name} to {best} and train.tokens_per_step to {max(1, round(tokens / best)) * best}."


def _zero_problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """ZeRO-2 sends gradients in every pass, but in a pipeline several passes are under way at once."""
    if config.parallel.zero == 2 and sizes.shard > 1 and sizes.pipeline > 1:
        return [
            f"parallel.zero 2 does not work with parallel.pipeline {sizes.pipeline}: ZeRO-2 sends the gradients of "
            f"each pass, but a pipeline has several passes in flight and sends after the last. Set parallel.zero to 1."
        ]
    return []


def _offload_problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """Offload needs processes that hold all blocks; on the host only AdamW runs."""
    asked, found = config.parallel.offload, []
    if asked == "none":
        return []
    others = [name for name in ("pipeline", "context", "expert") if getattr(sizes, name) > 1]
    if others:
        named = ", ".join(f"{name} {getattr(sizes, name)}" for name in others)
        found.append(
            f"parallel.offload {asked} does not work with {named}, only with replicate/shard/tensor. Set "
            f"parallel.offload to none (each of these axes also makes the states of a process smaller), or these axes "
            f"to 1."
        )
    if config.optim.kind != "adamw":
        found.append(
            f"parallel.offload {asked} does not work with optim.kind {config.optim.kind}: the host updates the "
            f"weights, and only adamw runs there. Set optim.kind to adamw, or parallel.offload to none."
        )
    return found


def _group_problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """Every group gets the same number of rows, and a fragment is in the model before the next one is sent."""
    diloco, groups, found = config.diloco, config.groups, []
    if groups == 1:
        return []
    ranks = sizes.replicate * sizes.shard
    for name, length in sequence_lengths(config):
        rows = config.train.tokens_per_step // length
        if rows % (groups * ranks):
            found.append(
                f"A step has train.tokens_per_step / {name} = {config.train.tokens_per_step} / {length} = "
                f"{counted(rows, 'row')}, which cannot be divided evenly among {groups} groups x {ranks} batch ranks. "
                f"Set train.tokens_per_step to a multiple of {groups * ranks * length}."
            )
    fragments = diloco.fragments(config.model.layers)
    if diloco.every < fragments:
        found.append(
            f"diloco.every {diloco.every} is less than the {fragments} fragments of the model (model.layers "
            f"{config.model.layers} / fragment_layers {diloco.fragment_layers}, and one for embedding and head): each "
            f"is sent at a step of its own. Raise every to at least {fragments}, or fragment_layers."
        )
    elif diloco.scheme == "streaming" and diloco.tau * fragments >= diloco.every:
        found.append(
            f"diloco.tau {diloco.tau} must be less than every / fragments = {diloco.every} / {fragments}: a fragment "
            f"must be back before the next one is sent. Lower tau to at most {(diloco.every - 1) // fragments}, "
            f"or raise every or fragment_layers."
        )
    return found


def _compress_problems(config: SpreadConfig, _sizes: MeshSizes) -> list[str]:
    """FSDP sums by itself."""
    parallel, found = config.parallel, []
    asked = parallel.compress
    if asked == "none":
        return []
    if parallel.zero == 3:
        found.append("zero 3 (FSDP sums its own parts)")
    if not found:
        return []
    return [f"parallel.compress {asked} does not work with {', '.join(found)}. Change these, or set it to none."]


def _cuda_graph_problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """A pass that communicates cannot be captured."""
    others = [name for name in ("pipeline", "context", "tensor", "expert") if getattr(sizes, name) > 1]
    if config.train.cuda_graph != "on" or not others:
        return []
    return [
        f"train.cuda_graph on does not work with parallel.{others[0]} {getattr(sizes, others[0])}: every pass "
        f"communicates, and such a pass cannot be captured. Set train.cuda_graph to auto."
    ]


RULES: tuple[Rule, ...] = (
    tensor.problems,
    pipeline.problems,
    context.problems,
    expert.problems,
    _rows_problems,
    _sequence_problems,
    _zero_problems,
    _offload_problems,
    _cuda_graph_problems,
    _group_problems,
    _compress_problems,
)
"""The rules of single axes, and those that several share."""
