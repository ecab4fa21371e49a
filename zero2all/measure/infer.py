"""How fast a model writes: the engine on random prompts, over sizes of the batch.

Every sequence of a batch has a prompt and an answer of the same length; no token ends a text. tokens/s are counted
while all sequences write, so without the prompts, which the time to the first token shows.

A decoding pass reads all weights and all keys and values once (`limits.floors.decoding_bytes`). Those bytes, over what
a copy moves per second on this device, are the time it cannot do without; divided by the time it took, that is the
share of the bandwidth. The picture has tokens/s on the left and that share on the right, both over the size of the
batch.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from zero2all.common.errors import UsageError
from zero2all.common.files import write_json
from zero2all.common.language import translate as t
from zero2all.common.progress import Bar, human_count, progress, say
from zero2all.common.workspace import Workspace, is_folder_name
from zero2all.config import RunConfig, find_config, preset_files
from zero2all.estimate.floors import decoding_bytes
from zero2all.estimate.run.batch import load_measured_config
from zero2all.estimate.run.pictures import write_png
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.job import Request
from zero2all.infer.load import READY_OPS, LoadedModel, empty_model, load_model
from zero2all.measure.op_bench import measured_ceilings
from zero2all.measure.step_timer import device_name, peak_bytes, wait_for
from zero2all.model.config import ModelConfig
from zero2all.model.hf import DTYPES
from zero2all.model.z2all import Z2all
from zero2all.parallel.device import pick_device
from zero2all.tokenizer.load import Tokenizer
from zero2all.track.plot import COLORS, FAINT_INK, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEED = 1
WARM_UP_TOKENS = 4
BATCHES = {"cuda": (1, 8, 64, 256), "cpu": (1, 8)}
NEW_TOKENS = {"cuda": 256, "cpu": 32}
PROMPT_TOKENS = 128


@dataclass(frozen=True)
class InferOptions:
    """What is measured; None: as `BATCHES` and `NEW_TOKENS` say for the device."""

    source: str
    """A run, a Hugging Face folder, or a config, which gets random weights."""
    workspace: Workspace | None = None
    overrides: Sequence[str] = ()
    batches: Sequence[int] | None = None
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int | None = None
    device: str = "auto"
    dtype: str | None = None
    """None: bfloat16 on a GPU, float32 on a CPU."""
    with_int8: bool = True
    """Measure every batch with weights in 8 bits, too."""


@dataclass(frozen=True)
class Timing:
    """Of one batch."""

    first_token_seconds: float = 0.0
    """From the request to the first token, on average."""
    tokens_per_second: float = 0.0
    """Of all sequences together, while all of them write."""
    whole_tokens_per_second: float = 0.0
    """The same over the whole time, prompts included."""


@dataclass(frozen=True, kw_only=True)
class InferRow(Timing):
    """One size of the batch."""

    weights: str
    """What the matrices are stored in."""
    batch: int
    problem: str | None = None
    pass_bytes: float = 0.0
    """What a pass must read."""
    bandwidth_percent: float = 0.0
    peak_bytes: int = 0

    @property
    def pass_seconds(self) -> float:
        """Time of one decoding pass."""
        return self.batch / self.tokens_per_second if self.tokens_per_second else 0.0


@dataclass(frozen=True)
class Inference:
    """All rows, and what they were measured with."""

    model: str
    device: str
    prompt_tokens: int
    new_tokens: int
    copy_bytes_per_second: float
    decoder: str
    """The kernels that decode, or why they do not."""
    rows: list[InferRow]


class NoText:
    """In place of a tokenizer: ids that mean nothing and end nothing, so that every answer has the length asked for."""

    end_ids: tuple[int, ...] = ()

    def __init__(self, ids: int) -> None:
        self.text_pieces = dict.fromkeys(range(ids), b"?")


def measure_inference(options: InferOptions, each: Callable[[Inference], object]) -> Inference:
    """Measure; `each` gets the results so far after every row."""
    loaded = _load(options)
    device, config = loaded.device, loaded.model.config
    batches = options.batches or BATCHES[device.type]
    new_tokens = options.new_tokens or min(NEW_TOKENS[device.type], config.max_seq_len - options.prompt_tokens)
    _check_length(config, options.prompt_tokens, new_tokens)
    dtype = loaded.model.embedding.weight.dtype
    say(f"perf infer: {loaded.name} on {device_name(device)}: measuring the copy rate first")
    found = Inference(
        model=loaded.name,
        device=device_name(device),
        prompt_tokens=options.prompt_tokens,
        new_tokens=new_tokens,
        copy_bytes_per_second=measured_ceilings(device, dtype).copy_bytes_per_second,
        decoder="",
        rows=[],
    )
    kinds = (False, True) if options.with_int8 else (False,)
    tokens = len(kinds) * sum(batches) * (new_tokens + WARM_UP_TOKENS)
    with progress("perf infer", total=tokens, unit="tokens") as bar:
        for int8, batch in itertools.product(kinds, batches):
            row, decoder = _row(loaded, batch, int8, found, bar)
            found = dataclasses.replace(found, decoder=decoder or found.decoder, rows=[*found.rows, row])
            each(found)
    return found


def _row(loaded: LoadedModel, batch: int, int8: bool, so_far: Inference, bar: Bar) -> tuple[InferRow, str]:
    device, config = loaded.device, loaded.model.config
    prompt, new, dtype = so_far.prompt_tokens, so_far.new_tokens, loaded.model.embedding.weight.dtype
    name = "int8" if int8 else str(dtype).removeprefix("torch.")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        engine = Engine(loaded, EngineSettings(max_batch=batch, max_len=prompt + new, int8=int8))
        write_tokens(engine, batch, prompt, WARM_UP_TOKENS, seed=SEED, bar=bar)
        timing = write_tokens(engine, batch, prompt, new, seed=SEED + 1, bar=bar)
    except (torch.OutOfMemoryError, UsageError) as error:
        return InferRow(weights=name, batch=batch, problem=str(error).splitlines()[0]), ""
    must_read = decoding_bytes(config, batch, prompt + new / 2, 1 if int8 else dtype.itemsize, dtype.itemsize)
    row = InferRow(
        weights=name,
        batch=batch,
        pass_bytes=must_read,
        bandwidth_percent=100 * must_read / so_far.copy_bytes_per_second * timing.tokens_per_second / batch,
        peak_bytes=peak_bytes(device),
        **vars(timing),
    )
    return row, f"plain passes: {engine.slow_because}" if engine.slow_because else "kernels in CUDA graphs"


def write_tokens(engine: Engine, batch: int, prompt: int, new: int, seed: int, bar: Bar) -> Timing:
    """Times of `batch` sequences of `new` tokens."""
    ids = engine.forward.weights.config.vocab_ids
    prompts = torch.randint(ids, (batch, prompt), generator=torch.Generator().manual_seed(seed)).tolist()
    wait_for(engine.device)
    before, started = engine.generated, time.perf_counter()
    jobs = [engine.submit(Request(each, new)) for each in prompts]
    begin = end = None  # the time while all write, and the tokens by then
    while not engine.is_idle:
        known = engine.generated
        engine.step()
        bar.advance(engine.generated - known)
        now = (time.perf_counter(), engine.generated)
        if begin is None and all(job.first_token for job in jobs):
            begin = now
        if end is None and any(job.finish for job in jobs):
            end = now
    whole = time.perf_counter() - started
    begin, end = begin or (started, before), end or (started + whole, engine.generated)
    is_long = end[1] > begin[1]  # else one pass was all
    return Timing(
        first_token_seconds=sum(job.first_token - job.arrived for job in jobs) / batch,
        tokens_per_second=(end[1] - begin[1]) / (end[0] - begin[0]) if is_long else batch * new / whole,
        whole_tokens_per_second=batch * new / whole,
    )


def _load(options: InferOptions) -> LoadedModel:
    """The model, with ids that never end a text."""
    work, source = options.workspace, options.source
    if _is_model(source, work):
        if options.overrides:
            raise UsageError(
                f"`{options.overrides[0]}` sets a field of a config, but {source} is a model, whose config is fixed. "
                f"Leave it out, or measure a preset."
            )
        loaded = load_model(source, work, device=pick_device(options.device, "--device"), dtype=options.dtype)
    else:
        config, notes = _config(source, work, list(options.overrides))
        for note in notes:
            say(note)
        device = pick_device(options.device, "--device")
        model = random_model(config.model, device, options.dtype)
        loaded = LoadedModel(f"{Path(source).stem}, random weights", 0, model, cast(Tokenizer, None))
    return dataclasses.replace(loaded, tokenizer=cast(Tokenizer, NoText(loaded.model.config.vocab_ids)))


def _is_model(source: str, work: Workspace | None) -> bool:
    """Whether `source` has weights; prints which one is measured if a preset has the same name."""
    is_preset = source in preset_files()
    if work is not None and is_folder_name(source) and work.run(source).is_dir():
        if is_preset:
            say(f"perf infer: {source} is both a run of {work.root.absolute()} and a preset; measuring the run")
        return True
    is_folder = Path(source).expanduser().is_dir()
    if is_folder and is_preset:
        say(f"perf infer: {source} is both a folder and a preset; measuring the preset (for the folder: ./{source})")
    return is_folder and not is_preset


def _config(source: str, work: Workspace | None, overrides: list[str]) -> tuple[RunConfig, list[str]]:
    try:
        find_config(source)
    except UsageError as error:
        runs = sorted(path.name for path in work.runs.glob("*") if path.is_dir()) if work is not None else []
        if work is None or not runs:
            raise
        raise UsageError(f"{error} Or name a run of {work.root.absolute()}: {', '.join(runs)}.") from None
    return load_measured_config(source, overrides)


def random_model(config: ModelConfig, device: torch.device, dtype: str | None = None) -> Z2all:
    """A model with weights as training would start with, drawn on the device; not those that a seed gives a run."""
    kind = DTYPES[dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    model = empty_model(config, READY_OPS, device, kind)
    generator = torch.Generator(device).manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, config.matrix_std, generator=generator)
        else:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


def _check_length(config: ModelConfig, prompt: int, new: int) -> None:
    if new < 1 or prompt + new > config.max_seq_len:
        raise UsageError(
            f"A prompt of {prompt} tokens and {max(new, 1)} new tokens are more than the {config.max_seq_len} tokens "
            f"that the model supports (model.max_seq_len). Use a smaller --prompt or --new."
        )


def as_json(found: Inference) -> dict[str, Any]:
    """The results as values of JSON."""
    values = dataclasses.asdict(found)
    for row, line in zip(found.rows, values["rows"], strict=True):
        line["pass_seconds"] = row.pass_seconds
    return values


def cells(found: Inference) -> list[list[str]]:
    """The table, its heading first."""
    heading = ["weights", "batch", "first token", "tokens/s", "per pass", "bandwidth", "with prompts", "memory"]
    return [heading, *(_cells(row) for row in found.rows)]


def _cells(row: InferRow) -> list[str]:
    if row.problem is not None:
        return [row.weights, str(row.batch), t(row.problem), *[""] * 5]
    return [
        row.weights,
        str(row.batch),
        f"{1e3 * row.first_token_seconds:,.1f} ms",
        f"{row.tokens_per_second:,.1f}" if row.tokens_per_second < 1000 else f"{row.tokens_per_second:,.0f}",
        f"{1e3 * row.pass_seconds:,.2f} ms",
        f"{row.bandwidth_percent:.0f} %",
        f"{row.whole_tokens_per_second:,.0f}",
        f"{row.peak_bytes / 2**30:.2f} GiB",
    ]


def write_results(found: Inference, folder: Path) -> Path:
    """Write the JSON file."""
    write_json(folder / "inference.json", as_json(found))
    return folder / "inference.json"


def write_picture(found: Inference, folder: Path) -> str:
    """Write the picture; returns its path, or why there is none."""
    rows = [row for row in found.rows if row.problem is None]
    if not rows:
        return "no picture: nothing was measured"

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        speed, share = figure.subplots(1, 2)
        _draw_curves(speed, rows, "tokens/s, all sequences", lambda row: row.tokens_per_second, "{:,.0f}")
        _draw_curves(share, rows, "share of the memory bandwidth, %", lambda row: row.bandwidth_percent, "{:.0f} %")
        speed.set_yscale("log")
        speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
        speed.yaxis.set_minor_formatter(NullFormatter())
        share.set_ylim(0, max(100.0, 1.15 * max(row.bandwidth_percent for row in rows)))

    title = f"{found.model} on {found.device}: prompts of {found.prompt_tokens}, {found.new_tokens} new tokens"
    return write_png(folder / "inference.png", (11.0, 4.2), draw, title)


def _draw_curves(axis: Axes, rows: list[InferRow], title: str, value: Any, form: str) -> None:
    kinds = list(dict.fromkeys(row.weights for row in rows))
    for color, kind in zip(COLORS, kinds, strict=False):
        own = [row for row in rows if row.weights == kind]
        batches, values = [row.batch for row in own], [value(row) for row in own]
        axis.plot(batches, values, "o-", color=color, linewidth=2, label=kind)
        for batch, height in zip(batches, values, strict=True):
            axis.annotate(
                form.format(height), (batch, height), xytext=(0, 7), textcoords="offset points", ha="center",
                fontsize=8, color=INK,
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    batches = sorted({row.batch for row in rows})
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.margins(x=0.08, y=0.15)
    axis.set_title(title, color=INK)
    axis.set_xlabel("batch (sequences)", color=FAINT_INK)
    if len(kinds) > 1:
        axis.legend(loc="best")
