"""Checks before the first step: a minute now instead of a lost night later.

Each is a function of plain values that returns notes for the user, or raises an error that says how to fix what it
found. None of them changes anything; `overfit_one_batch` trains, but writes nothing to disk.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zero2all.common.errors import BadInputError, DiskError
from zero2all.common.files import human_bytes
from zero2all.common.language import padded
from zero2all.common.language import translate as t
from zero2all.common.progress import counted
from zero2all.config import RunConfig
from zero2all.config.training import ScheduleConfig
from zero2all.diloco.config import DilocoConfig
from zero2all.estimate.communication import bytes_sent, communication_per_step
from zero2all.estimate.fit import RECOMPUTATION
from zero2all.estimate.memory import ALLOWANCE, MemorySettings, binary_size, estimate_memory
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.packed.loader import Batch
from zero2all.train.checkpoints.retention import Retention
from zero2all.train.guards.documents import Decode

HIGH_LAST_LOSS = 2.0
"""Nats per token; with usual vocabularies, models that know the world are below it on general text."""

RISEN_SHARE = 0.005
"""How far a held-out loss must be above its lowest value to have risen: the rows are the same, so little is noise."""


def expected_first_loss(model: ModelConfig) -> tuple[float, float]:
    """The range in which the loss of a new model lies, in nats per token.

    Logits of a new model are normal with deviation s = head_std * sqrt(hidden_size), so the softmax has ln(V) + s^2 / 2
    nats; a batch scatters around that by some part of s. With tied embeddings a token's own logit can be as large as
    head_std * hidden_size, because the output of a new model is still close to its input.
    """
    deviation = model.head_std * math.sqrt(model.hidden_size)
    middle = math.log(model.vocab_ids) + deviation**2 / 2
    highest = np.logaddexp(middle, model.head_std * model.hidden_size) if model.tied_embeddings else middle
    scatter = 0.1 + deviation / 2
    return middle - scatter - deviation**2 / 2, float(highest) + scatter


def risen_loss(lowest: tuple[int, float] | None, loss: float) -> list[str]:
    """A note when the held-out loss has risen clearly since its lowest value, at a step before."""
    if lowest is None or not loss > (1 + RISEN_SHARE) * lowest[1]:
        return []
    step, low = lowest
    return [
        f"held-out loss was lowest at step {step:,} ({low:.4f}). It has risen since by {loss - low:.4f}: stop earlier, "
        f"use more text, or more weight decay or dropout."
    ]


def check_last_loss(losses: Mapping[str, float], config: RunConfig, can_train_longer: bool = True) -> list[str]:
    """A note on channels whose held-out loss is above that of a new model at the planned end; or else, unless the loss
    has risen, on those of general text whose loss is still high (code is not judged)."""
    prefix = "eval/valid/loss/"
    found = {name.removeprefix(prefix): loss for name, loss in losses.items() if name.startswith(prefix)}
    untrained = expected_first_loss(config.model)[1]  # not ln(V): a run of a few steps is above that
    worse = [f"{channel} {loss:.2f}" for channel, loss in found.items() if not loss <= untrained]
    if worse:
        return [
            f"warning: at the planned end the held-out loss is above that of an untrained model, at most "
            f"{untrained:.2f}: {', '.join(worse)}. The model has learned nothing that helps: lower optim.lr_max (now "
            f"{config.optim.lr_max:g}) and train again."
        ]
    high = [f"{name} {loss:.2f}" for name, loss in found.items() if name != "code" and loss > HIGH_LAST_LOSS]
    if not high or not can_train_longer:
        return []
    return [
        f"note: the held-out loss is still above {HIGH_LAST_LOSS:g} at the planned end: {', '.join(high)}. Such a "
        f"model knows little of the world yet. If this loss was still falling, train it longer; if not, it needs more "
        f"or better text, or a larger model."
    ]


def check_first_loss(loss: float, model: ModelConfig) -> list[str]:
    """A warning if the first loss of a fresh run is not that of an untrained model."""
    lowest, highest = expected_first_loss(model)
    if lowest <= loss <= highest:
        return []
    found = (
        f"warning: the first loss is {loss:.3f}. A new model should have about ln({model.vocab_ids:,}) = "
        f"{math.log(model.vocab_ids):.2f}, here between {lowest:.2f} and {highest:.2f}."
    )
    if not math.isfinite(loss):
        cause = f"Probable causes: {model.head_std_field} is far too large, or a kernel is wrong (try ops.* eager)."
    elif loss > highest:
        cause = (
            f"Probable causes: {model.head_std_field} ({model.head_std:g}) is too large for a width of "
            f"{model.hidden_size}, or the weights are not the initial ones."
        )
    else:
        cause = (
            "Probable causes: the weights are already trained, the targets are not shifted by one token, or most of "
            "the batch is padding or masked. `z2a train --dry-run` prints what the batch contains."
        )
    return [f"{found} {cause}"]


def preview(batch: Batch, channels: Sequence[str], decode: Decode | None, rows: int = 2, tokens: int = 40) -> list[str]:
    """The beginning of the first rows of a batch, as text where there is a tokenizer, else as ids."""
    lines = []
    ids, channel_of = np.asarray(batch.tokens), np.asarray(batch.channels)
    for row in range(min(rows, len(ids))):
        beginning = [int(token) for token in ids[row, :tokens]]
        text = " ".join(map(str, beginning)) if decode is None else repr(decode(beginning))
        begins = t(f"data: row {row} ({channels[int(channel_of[row])]}) begins:")
        lines.append(f"{begins} {text} …")
    return lines


def check_batch_ids(batches: Iterable[Batch], vocab_size: int) -> None:
    """Raise if one of these batches holds an id that the model has no row for."""
    for batch in batches:
        ids = np.asarray(batch.tokens)
        wrong = (ids < 0) | (ids >= vocab_size)
        if wrong.any():
            row, column = (int(place) for place in np.argwhere(wrong)[0])
            raise BadInputError(
                f"The data contains the token id {int(ids[row, column])} (row {row}, position {column} of the batch at "
                f"token {batch.first_token:,}), but the model has only the ids 0 to {vocab_size - 1}. {REPACK}"
            )


REPACK = (
    "Pack the data with the tokenizer of this model (`z2a pack`), or set model.vocab_size to the size of the tokenizer "
    "that packed it. `z2a data verify` finds damaged files."
)


def saved_steps(first_step: int, last_step: int, every_steps: int) -> list[int]:
    """The steps after `first_step` at which a run saves."""
    due = range((first_step // every_steps + 1) * every_steps, last_step + 1, every_steps) if every_steps else range(0)
    return sorted({*due, last_step} - {first_step}) if last_step > first_step else []


def check_disk(
    run: Path, retention: Retention, coming: Sequence[int], checkpoint_bytes: int, existing_steps: Sequence[int] = ()
) -> str:
    """A note on the disk space for the checkpoints of the whole run, those of the steps `coming` too, after retention;
    raises when it is not free."""
    at_once = retention.most_at_once([*existing_steps, *coming])
    needed = max(0, at_once - len(existing_steps)) * checkpoint_bytes
    free = shutil.disk_usage(nearest_folder(run)).free
    each = human_bytes(checkpoint_bytes)
    if needed > free:
        raise DiskError(
            f"Not enough disk space for the checkpoints of the whole run. {run} will hold up to "
            f"{counted(at_once, 'checkpoint')} of {each} at once: {human_bytes(needed)} more are needed, "
            f"{human_bytes(free)} are free. Free some space, choose another disk with --work, or keep fewer "
            f"checkpoints (checkpoint.keep_last {retention.keep_last}, checkpoint.keep_every_steps "
            f"{retention.keep_every_steps}, checkpoint.keep_best {str(retention.keep_best).lower()})."
        )
    return (
        f"disk: up to {counted(at_once, 'checkpoint')} of {each} at once. They need {human_bytes(needed)} more, "
        f"{human_bytes(free)} are free"
    )


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def memory_notes(model: ModelConfig, settings: MemorySettings, device_bytes: int | None) -> list[str]:
    """The memory estimate as a table, with a warning if the device (None: unknown size) may be too small."""
    estimate = estimate_memory(model, settings)
    needed, samples = binary_size(estimate.total), settings.micro_batch_samples
    if device_bytes is None:
        notes = [f"memory: about {needed} with micro-batches of {samples}"]
    else:
        notes = [f"memory: about {needed} of {binary_size(device_bytes)} with micro-batches of {samples}"]
    if estimate.host:
        notes.append(f"host memory: about {binary_size(estimate.host)}")
    notes += estimate.lines()
    if device_bytes is not None and estimate.total > (1.0 - ALLOWANCE) * device_bytes:
        notes += ["warning: this may not fit into the memory of the device.", *_less_memory(model, settings, "cuda")]
    return notes


def communication_notes(model: ModelConfig, settings: MemorySettings) -> list[str]:
    """What a process exchanges with the others in a step; nothing for a single process."""
    transfers = communication_per_step(model, settings)
    if not transfers:
        return []
    total = human_bytes(bytes_sent(transfers))
    return [
        f"communication: each process sends {total} per step and receives the same amount (ring collectives)",
        *(
            f"  {each.collective:<16}{padded(t(each.what), 19)}{human_bytes(each.whole):>9}  "
            + t(f"over {each.ranks} ranks, {human_bytes(each.sent)} sent")
            for each in transfers
        ),
    ]


def _less_memory(model: ModelConfig, settings: MemorySettings, device: str) -> list[str]:
    """What a run that does not fit could change: only what it does not do yet, and what works with the rest."""
    ways = ["make the model smaller (model.layers, model.hidden_size)", *_smaller_passes(model, settings)]
    offload, has_adamw = settings.offload, settings.optimizer == "adamw"
    if offload == "none" and settings.optimizer not in ("adamw_8bit", "adamw_bf16"):
        ways.append("choose an optimizer with less state (optim.kind adamw_8bit or adamw_bf16)")
    highest = 3 if offload == "none" else 2
    shares = settings.processes > 1 or device != "cpu"  # processes on a CPU have one memory
    if shares and settings.zero < highest:
        ways.append(f"shard over several processes: set parallel.zero to at most {highest} (now {settings.zero})")
    if device == "cpu" and settings.processes > 1:
        ways.append(f"start fewer processes (now {settings.processes}): on a CPU they share one memory")
    if device != "cpu" and settings.zero < 3 and has_adamw and offload == "none":
        ways.append("set parallel.offload to optimizer: masters and states go to host memory")
    return ["To need less memory:", *(f"  - {t(way)}" for way in ways)]


def _smaller_passes(model: ModelConfig, settings: MemorySettings) -> list[str]:
    """What could be changed about the passes of a step."""
    samples, ways = settings.micro_batch_samples, []
    if settings.is_fsdp and settings.passes > 1:
        ways.append(
            f"raise train.micro_batch_samples until a step has one pass (now {settings.passes}): with zero 3 each "
            f"process keeps whole gradients until the last pass. Or set parallel.zero to 2"
        )
    elif samples > 1:
        ways.append(f"lower train.micro_batch_samples (now {samples})")
    ways.append(f"lower data.seq_len (now {settings.seq_len})")
    now = estimate_memory(model, settings).total
    for kind, _, instead_of, _ in RECOMPUTATION:
        can_be = settings.recompute in instead_of
        if can_be and estimate_memory(model, dataclasses.replace(settings, recompute=kind)).total < now:
            ways.append(f"set train.recompute to {kind} (now {settings.recompute})")
    return ways


def _less_host_memory() -> list[str]:
    """What a run whose offloaded part does not fit into the machine could change. Only AdamW can be offloaded."""
    ways = (
        "use fewer layers (model.layers) or a narrower model (model.hidden_size)",
        "shard the states over more processes on more machines (parallel.zero 1 or 2, a larger shard)",
    )
    return ["To need less host memory:", *(f"  - {t(way)}" for way in ways)]


@dataclass(frozen=True)
class FreeMemory:
    """What a machine has free for a run."""

    device: str
    """cpu, or the kind of GPU that each process has for itself."""
    device_bytes: int
    """Of each GPU."""
    host_bytes: int
    """Of the machine, whose processes share them."""
    local_processes: int = 1


def require_memory(model: ModelConfig, settings: MemorySettings, free: FreeMemory, compiled: bool = False) -> None:
    """Raise if a run cannot fit into the free memory, before any is allocated: a full machine may kill other processes.
    `compiled`: only the state is certain."""
    device, local_processes = free.device, free.local_processes
    estimate = estimate_memory(model, settings)
    needed = estimate.state if compiled else estimate.total
    if device == "cpu":
        each = needed + estimate.host
        if each * local_processes > free.host_bytes:
            problem = (
                f"There is not enough memory to train this model here: about {_of_machine(each, local_processes)} are "
                f"needed, {binary_size(free.host_bytes)} are free. Nothing was started."
            )
            raise DiskError(
                "\n".join([problem, *estimate.lines(), *_less_memory(model, settings, device)])
            ) from MemoryError()
        return
    if needed > free.device_bytes:
        problem = (
            f"There is not enough memory on the GPU to train this model: about {binary_size(needed)} are needed, "
            f"{binary_size(free.device_bytes)} are free. Nothing was started."
        )
        raise DiskError(
            "\n".join([problem, *estimate.lines(), *_less_memory(model, settings, device)])
        ) from MemoryError()
    each = estimate.host + drawn_bytes(model)
    if each * local_processes > free.host_bytes:
        of_machine, left = _of_machine(each, local_processes), binary_size(free.host_bytes)
        if estimate.host:
            problem = (
                f"There is not enough host memory for parallel.offload {settings.offload}: about {of_machine} are "
                f"needed, {left} are free. Nothing was started."
            )
            ways = _less_host_memory()
        else:
            problem = (
                f"There is not enough host memory to draw the initial weights: about {of_machine} are needed, {left} "
                f"are free. Nothing was started."
            )
            ways = ["Start fewer processes on this machine (parallel.processes), or make the model smaller."]
        raise DiskError("\n".join([problem, *estimate.lines(), *ways])) from MemoryError()


def drawn_bytes(model: ModelConfig) -> float:
    """Initial weights are drawn on the host in float32, eight parameters at a time: about a table and a block."""
    counts = parameter_counts(model)
    return 4.0 * (counts["embedding"] + counts["blocks"] / model.layers)


def _of_machine(each: float, processes: int) -> str:
    """What all processes of a machine need together, in words."""
    if processes == 1:
        return binary_size(each)
    return f"{binary_size(each * processes)} ({processes} processes of {binary_size(each)})"


UPDATES = 30
FALLS_TO = 0.8
"""A model that sees one batch again and again should have at most this share of its first loss at the end."""


@dataclass(frozen=True)
class Overfit:
    """What happened to the loss of one batch."""

    losses: list[float]  # before each update, and after the last
    falls_to: float

    @property
    def learns(self) -> bool:
        """Whether the loss fell as far as it should."""
        return math.isfinite(self.losses[-1]) and self.losses[-1] <= self.falls_to * self.losses[0]

    def lines(self) -> list[str]:
        """The curve and whether the model learns."""
        last = len(self.losses) - 1
        shown = sorted({0, *(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n < last), last})
        curve = ", ".join(f"{number}: {self.losses[number]:.3f}" for number in shown)
        start, end, updates = self.losses[0], self.losses[-1], counted(last, "update")
        verdict = f"dry run: the loss of one batch fell from {start:.3f} to {end:.3f} in {updates}"
        if not self.learns:
            verdict = (
                f"dry run: warning: the loss of one batch went from {start:.3f} to {end:.3f} in {updates}. It should "
                f"fall to {self.falls_to * start:.3f} or less. Probable causes: optim.lr_max is too small, or so large "
                f"that training diverges, the targets are masked, or the text is noise."
            )
        return [f"dry run: loss by update: {curve}", verdict]


def overfit_one_batch(update: Callable[[], float], updates: int = UPDATES, falls_to: float = FALLS_TO) -> Overfit:
    """Call `update` `updates` times, and once more for the last loss. It makes one update on always the same batch and
    returns the loss before it. Stops early when the loss is not finite."""
    losses: list[float] = []
    for _ in range(updates + 1):
        losses.append(update())
        if not math.isfinite(losses[-1]):
            break
    return Overfit(losses, falls_to)


def dry_run_config(config: RunConfig, updates: int = UPDATES, samples: int = 8) -> RunConfig:
    """A copy of the config for `overfit_one_batch`: one process, one pass per update, full rate after a few updates, no
    dropout."""
    asked = config.train.micro_batch_samples
    rows = min(samples, config.samples_per_step) if asked == "auto" else int(asked)
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(
            config.parallel, replicate="auto", shard="auto", pipeline=1, context=1, tensor=1, expert=1
        ),
        diloco=DilocoConfig(),
        model=dataclasses.replace(config.model, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0),
        train=dataclasses.replace(
            config.train, steps=updates + 1, tokens_per_step=rows * config.data.seq_len, micro_batch_samples=rows
        ),
        schedule=ScheduleConfig(kind="constant", warmup_steps=min(3, updates)),
        stages=[],
    )
