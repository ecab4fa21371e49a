"""Your own file or folder in the quickstart: checked before anything starts, and what the corpus made of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import human_bytes
from zero2all.common.language import translate as t
from zero2all.common.progress import counted
from zero2all.common.records import corpus_sources
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.corpus import Source, source_from_path
from zero2all.corpus.listing import list_files
from zero2all.corpus.report import counts_in_words, mapping_in_words, summary_notes
from zero2all.model.config import parameter_counts

NAMED_FILES = 4
"""Files named for each reason why they were left out; the others are counted."""
LEAST_BYTES = 1000
"""Less than this cannot be 20 KB of text, even compressed."""
WANTED_BYTES = 20_000
KINDS = "text, code, JSON, CSV or parquet files, plain, compressed or in archives"


@dataclass(frozen=True)
class OwnText:
    """What `--data` names."""

    source: Source
    files: int
    size_bytes: int

    def in_words(self) -> str:
        """How much there is."""
        return f"{self.source.path}: {t(counted(self.files, 'file'))}, {human_bytes(self.size_bytes)}"


def look_at(data: Path, mapping: Mapping[str, str] | None = None) -> OwnText:
    """List what there is; an error, before anything is written, when there is nothing."""
    if not data.exists():
        raise BadInputError(f"--data {data} does not exist. Give a file or a folder of {KINDS}.")
    listing = list_files(data)
    size = sum(file.size_bytes for file in listing.files)
    if not size:
        counts = {reason: len(names) for reason, names in listing.skipped.items()}
        empty = t(counted(len(listing.files), "empty file")) if listing.files else ""
        if counts or empty:
            words = ", ".join(filter(None, (counts_in_words(counts), empty)))
            why = f"--data {data} contains only files that are not read ({words})."
        else:
            why = f"--data {data} contains no files."
        raise BadInputError(
            f"{why} Put {KINDS} into it, 20 KB or more, or name another folder. `z2a quickstart` without --data makes "
            "its own text."
        )
    named = source_from_path(data)
    return OwnText(Source(named.name, named.path, "auto", mapping), len(listing.files), size)


def refuse_too_little(own: OwnText) -> None:
    """An error for a few words, before anything is written."""
    if own.size_bytes < LEAST_BYTES:
        raise BadInputError(
            f"--data {own.source.path} has {human_bytes(own.size_bytes)}. That is too little to learn from: the "
            f"quickstart needs 20 KB of text or more. Give more text, or leave out --data: then the quickstart makes "
            f"its own."
        )


def too_little_in_words(text_bytes: int) -> list[str]:
    """What to expect of less text than the quickstart is made for."""
    small = human_bytes(text_bytes)
    said = f"{small} of text is too little: the model will write garbage. Give at least 20 KB, better 1 MB or more."
    return [said] if text_bytes < WANTED_BYTES else []


def refuse_other_text(workspace: Workspace, name: str, sources: Sequence[Source]) -> None:
    """A workspace whose run learned from something else would fail at training, its corpus replaced already.

    Sources are told apart by file name: a folder that was moved is still the same text.
    """
    if not (workspace.run(name) / "checkpoints").is_dir():
        return
    try:
        before = {str(manifest["path"]) for manifest in corpus_sources(workspace.corpus).values()}
    except BadInputError:  # an interrupted build: there is nothing to lose
        return
    if {Path(path).name for path in before} != {Path(source.location).name for source in sources}:
        raise UsageError(
            f"{workspace.root} contains a quickstart that was trained on {', '.join(sorted(before))}. "
            "Add --fresh to replace it, or use another --work to keep both."
        )


def corpus_in_words(report: Mapping[str, Any], workspace: Workspace) -> list[str]:
    """What was found in each channel, dropped, and left out, a line each."""
    lines = []
    for name, source in report["sources"].items():
        kept = t(
            f"{source['records_kept']:,} of {source['records_in'] - source['quarantined']:,} documents kept, "
            f"{human_bytes(source['bytes_kept'])}; {source['valid_records']:,} held out ({name})"
        )
        lines.append(f"{source['channel']:<6} {kept}")
    lines += _fields_in_words(report)
    lines += summary_notes(report, workspace.root, brief=True)
    return lines + [f"left out: {line}" for line in _left_out(report, workspace.corpus)]


def _fields_in_words(report: Mapping[str, Any]) -> list[str]:
    """Which fields of records were taken for the text; the parts of one source share them."""
    found = [mapping_in_words(each) for source in report["sources"].values() for each in source["mappings"]]
    return [f"fields of the records: {words} (--map sets others)" for words in dict.fromkeys(found)]


def _left_out(report: Mapping[str, Any], corpus: Path) -> Iterator[str]:
    """Files that were not read, and damaged or textless parts of those that were, each with its reason."""
    for name, manifest in corpus_sources(corpus).items():
        for reason, count in report["sources"][name]["skipped_files"].items():
            named = manifest["skipped_file_names"].get(reason, [])[:NAMED_FILES]
            more = t(f" and {count - len(named):,} more") if count > len(named) else ""
            yield f"{', '.join(named)}{more} ({t(reason)})"
        for (file, reason), (count, detail) in _quarantined(corpus / "quarantine" / f"{name}.jsonl").items():
            hint = t("; if one is the text: --map content=FIELD") if reason == "no_text_field" else ""
            yield f"{file}: {t(counted(count, 'record'))} ({t(reason.replace('_', ' '))}: {t(detail)}{hint})"


def _quarantined(path: Path) -> dict[tuple[str, str], tuple[int, str]]:
    """(file, reason) -> how many items, and the first detail; only the commonest."""
    counts: Counter[tuple[str, str]] = Counter()
    details: dict[tuple[str, str], str] = {}
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                item = jsonio.loads(line)
                key = (item["file"], item["reason"])
                counts[key] += 1
                details.setdefault(key, item["detail"])
    return {key: (count, details[key]) for key, count in counts.most_common(NAMED_FILES)}


# What the quickstart chooses for your own text: how it is cut, vocabulary, samples, model and steps.
#
# The preset is made for some megabytes. With less text the same settings fail (no such vocabulary can be learned) or
# memorise the text (hundreds of epochs), so everything shrinks with it, down to some kilobytes. The smallest sizes were
# measured: fewest bits per byte on held-out text of 20 KB of English and 40 KB of Chinese verse. The largest are the
# preset's; the others lie between.
#
# Everything here depends on amounts only: run again, the quickstart chooses the same and continues. What is set on the
# command line is never changed.


DOCUMENTS_WANTED = 60
"""Documents that a single text file is cut into, at least: of fewer than 20, none could be held out."""
DOCUMENT_BYTES = (300, 8_000)
VALID_SHARES = ((4_000_000, 0.1), (15_000_000, 0.05))
"""(below this many bytes, share held out): little text needs a larger share to judge by. Above: 2 %."""

BYTES_PER_TOKEN_ID = 25
SMALLEST_VOCABULARY = 320
VOCABULARY_MULTIPLE = 64

VOCABULARY_TEXT_BYTES = 20_000_000
"""More text than this does not improve so small a vocabulary, and costs memory."""

SMALLEST_SAMPLE = 32
SECONDS_PER_STEP = 0.015
SECONDS_PER_TOKEN_AND_PARAMETER = 1.7e-10
"""Of the parameters in matmuls. Measured on two ARM cores with AdamW (1.1 M tokens through 1.4 M parameters in 3 min
50 s), plus the products of Muon, which are a tenth of the work. Only for the forecast."""
SECONDS_BESIDE_TRAINING = 40
CORPUS_BYTES_PER_SECOND = 1_000_000


@dataclass(frozen=True)
class Scale:
    """Settings for training text of fewer than `below_tokens`."""

    below_tokens: float
    seq_len: int
    tokens_per_step: int
    hidden_size: int
    epochs: float
    """How often the text is read at most; beyond that the model memorises it."""


SCALES = (
    Scale(30_000, 64, 512, 64, 10),
    Scale(120_000, 64, 1024, 96, 8),
    Scale(400_000, 128, 2048, 128, 6),
    Scale(float("inf"), 128, 2048, 192, 4),
)
"""The last is the preset's."""
HEAD_SIZE = 32


def cutting(raw_bytes: int) -> dict[str, Any]:
    """Options of the corpus: how to cut text files of `raw_bytes` together, and which share to hold out."""
    shortest, longest = DOCUMENT_BYTES
    size = min(max(raw_bytes // DOCUMENTS_WANTED, shortest), longest)
    share = next((share for below, share in VALID_SHARES if raw_bytes < below), 0.02)
    return {"split_text_above_bytes": 3 * size, "text_piece_bytes": size, "valid_share": share}


def vocabulary_size(text_bytes: int, most: int) -> int:
    """Token ids for a text of this size: a piece that is seen only a few times teaches nothing."""
    wanted = text_bytes // BYTES_PER_TOKEN_ID // VOCABULARY_MULTIPLE * VOCABULARY_MULTIPLE
    return min(max(wanted, SMALLEST_VOCABULARY), most)


def vocabulary_settings(text_bytes: int, config: RunConfig, given: Collection[str] = ()) -> dict[str, Any]:
    """Field -> value for a tokenizer learned from a text of this size; fields in `given` are left alone."""
    chosen: dict[str, Any] = {"tokenizer.vocab_size": vocabulary_size(text_bytes, config.tokenizer.vocab_size)}
    if text_bytes > VOCABULARY_TEXT_BYTES:
        chosen["tokenizer.take"] = f"{VOCABULARY_TEXT_BYTES // 1_000_000}MB"
    return {name: value for name, value in chosen.items() if name not in given}


def run_settings(tokens: Mapping[str, int], config: RunConfig, given: Collection[str] = ()) -> dict[str, Any]:
    """Field -> value for a run over sources with these training tokens; fields in `given` are left alone."""
    total = sum(tokens.values())
    scale = next(scale for scale in SCALES if total < scale.below_tokens)
    chosen: dict[str, Any] = {}

    def choose(values: Mapping[str, Any]) -> None:
        """All of them or, where one is given, none: they must fit together."""
        if not any(name in given for name in values):
            chosen.update(values)

    seq_len = scale.seq_len
    while seq_len > SMALLEST_SAMPLE and total < 8 * seq_len:
        seq_len //= 2
    samples = scale.tokens_per_step // seq_len
    choose(
        {
            "data.seq_len": seq_len,
            "train.tokens_per_step": scale.tokens_per_step,
            "train.micro_batch_samples": min(samples, 16),
        }
    )
    heads = scale.hidden_size // HEAD_SIZE
    choose(
        {
            "model.hidden_size": scale.hidden_size,
            "model.intermediate_size": scale.hidden_size * 2,
            "model.heads": heads,
            "model.kv_heads": heads // 3 if heads % 3 == 0 else heads // 2,
        }
    )
    step_tokens = chosen.get("train.tokens_per_step", config.train.tokens_per_step)
    budget = config.train.steps * config.train.tokens_per_step
    if "train.steps" in given:
        steps = config.train.steps
    else:
        steps = chosen["train.steps"] = max(1, round(min(scale.epochs * total, budget) / step_tokens))
    choose({"schedule.warmup_steps": min(20, -(-steps // 10))})
    # Every state that is validated is kept, so that the best of them is there at the end.
    every = -(-steps // 5)
    choose({"validation.every_steps": every, "checkpoint.every_steps": every, "checkpoint.keep_every_steps": every})
    length = chosen.get("data.seq_len", config.data.seq_len)
    if "data.mixture" not in given:
        too_small = any(count <= length for count in tokens.values())
        chosen["data.mixture"] = {n: float(c if c > length else 0) for n, c in tokens.items()} if too_small else None
    return chosen


def with_settings(config: RunConfig, chosen: Mapping[str, Any]) -> RunConfig:
    """`config` with the chosen fields in their places."""
    for name, value in chosen.items():
        section, _, field = name.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def given_fields(overrides: Collection[str]) -> frozenset[str]:
    """The fields that `--section.field value` overrides set."""
    return frozenset(word.removeprefix("--").partition("=")[0] for word in overrides if word.startswith("--"))


def vocabulary_in_words(config: RunConfig, most: int, given: Collection[str]) -> str:
    """What was chosen, and why."""
    size, take = config.tokenizer.vocab_size, config.tokenizer.take
    if "tokenizer.vocab_size" in given:
        line = f"vocabulary of {size:,} token ids, as you asked"
    elif size == most:
        line = f"vocabulary of {size:,} token ids: enough for a model this small"
    else:
        line = f"vocabulary of {size:,} token ids: the text is too short to learn more"
    return f"{line} (from {take} of the text)" if take else line


def epochs_of(tokens: Mapping[str, int], config: RunConfig) -> float:
    """How often a run reads its text."""
    return config.train.steps * config.train.tokens_per_step / max(1, sum(_used(tokens, config).values()))


def _used(tokens: Mapping[str, int], config: RunConfig) -> dict[str, int]:
    """The sources that a run reads."""
    mixture = config.data.mixture
    return {name: count for name, count in tokens.items() if mixture is None or mixture.get(name, 1)}


def settings_in_words(tokens: Mapping[str, int], config: RunConfig, given: Collection[str]) -> list[str]:
    """The run that was chosen, and why, a line each."""
    data, run, model = config.data, config.train, config.model
    used = _used(tokens, config)
    total = sum(used.values())
    epochs = epochs_of(tokens, config)
    size = f"model of {parameter_counts(model)['total'] / 1e6:.2f} M parameters, {model.layers} layers"
    steps = f"{counted(run.steps, 'step')}, reading the text {epochs:.1f} times"
    if model.hidden_size >= SCALES[-1].hidden_size:
        model_line = f"{size}: as large as fits into minutes on a CPU"
    else:
        model_line = f"{size}: with so little text, a larger one would only learn it by heart"
    if "train.steps" in given:
        step_line = f"{steps}, as you asked"
    elif epochs < next(scale.epochs for scale in SCALES if total < scale.below_tokens) - 0.1:
        step_line = f"{steps}: as often as fits into minutes on a CPU (--train.steps sets more)"
    else:
        step_line = f"{steps}: the usual number for so little text"
    per_step = run.tokens_per_step // data.seq_len
    lines = [f"samples of {data.seq_len} tokens, {per_step} per step, {total:,} tokens in all", model_line, step_line]
    left = {name: count for name, count in tokens.items() if name not in used}
    return lines + [
        f"not trained on: {name}, {counted(count, 'token')}, less than one sample" for name, count in left.items()
    ]


def forecast(raw_bytes: int, config: RunConfig, given: Collection[str]) -> str:
    """About how long everything takes on two CPU cores, before anything is read."""
    size = vocabulary_size(raw_bytes, config.tokenizer.vocab_size)
    settings = run_settings({"": raw_bytes * 2 // 5}, config, given)
    likely = with_settings(config, {**settings, "model.vocab_size": size, "data.mixture": None})
    steps, parameters = likely.train.steps, parameter_counts(likely.model)["matmul"]
    per_step = SECONDS_PER_STEP + likely.train.tokens_per_step * parameters * SECONDS_PER_TOKEN_AND_PARAMETER
    seconds = SECONDS_BESIDE_TRAINING + raw_bytes / CORPUS_BYTES_PER_SECOND + steps * per_step
    minutes = max(1, round(seconds / 60))
    return "one or two minutes" if minutes == 1 else f"{minutes:,} minutes"
