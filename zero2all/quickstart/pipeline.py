"""All stages in one workspace: raw text, corpus, tokenizer, packed data, model, evaluation, export, picture.

Each stage is the same as its own verb; this file only runs them in order and keeps their times in `quickstart.json`. A
stage that finds its work done does nothing, so an interrupted quickstart continues where it stopped. The text is the
small world (`raw.py`), with the settings of its preset, or your own: then it is a speedrun, for which settings are
chosen (`speedrun.py`).
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import crc32c_of, folder_bytes, human_bytes, read_json, write_json
from zero2all.common.language import columns, language, padded
from zero2all.common.language import translate as t
from zero2all.common.manifest import fingerprint
from zero2all.common.progress import brief_progress, counted, human_seconds, say
from zero2all.common.records import corpus_sources, iter_records, text_template, training_text
from zero2all.common.workspace import STAMP_NAME, Workspace, open_workspace
from zero2all.config import RunConfig
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.report import striking_drops
from zero2all.evals.options import EvalOptions, kept_report
from zero2all.evals.probes import run_probes, summarize
from zero2all.evals.question_files import read_probes
from zero2all.evals.report import evaluate_run, log_report
from zero2all.exchange import export_run
from zero2all.finetune import dpo, rl, sft
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.load import LoadedModel, load_run, untrained
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import generate
from zero2all.measure.clock import watched_gpu
from zero2all.model.config import parameter_counts
from zero2all.packed.remote import packed_root
from zero2all.packed.writer import pack_corpus
from zero2all.parallel.device import pick_device
from zero2all.quickstart.chat import ANSWERS_NAME, CONVERSATIONS, ChatScore, completed_facts, judge, teach, tune
from zero2all.quickstart.choose import PRESETS
from zero2all.quickstart.own_text import OwnText, corpus_in_words, cutting, refuse_other_text, too_little_in_words
from zero2all.quickstart.raw import CHINESE_NAME, CODE_NAME, ENGLISH_NAME, PAIRS_NAME, PROBES_NAME, write_raw
from zero2all.quickstart.speedrun import (
    PLAN_NAME,
    REPORT_NAME,
    Budget,
    Deadline,
    Speedrun,
    chat_files,
    unique_tokens,
)
from zero2all.tokenizer.stage import train_on_corpus
from zero2all.tokenizer.text import TooFewPiecesError
from zero2all.track.plot import cjk_fonts, plot_runs
from zero2all.track.reader import RunReader
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.manifest import best_step
from zero2all.train.run import train
from zero2all.train.validate import held_out_scores, open_valid_splits, valid_sources

WORLD_SEED = 1
STILL_FALLING = 0.002
"""A held-out loss that fell by this share from one validation to the next, or by more, has not reached its lowest."""
WORLD_OPTIONS = BuildOptions(
    valid_share=0.02,
    # The small world is short sentences, many of them alike, and needs no cleaning.
    rules="none",
    dedup=DedupConfig(near="off"),
)
NAME_COLUMNS = 17
PROMPT_LETTERS = 4
PROMPT_COLUMNS = 32
"""How much of a document of one's own a sample begins with; a Chinese character takes two columns."""
TIMES_NAME = "quickstart.json"
SUMMARY_NAME = "summary.md"
CHAT_REPLAY = 0.15
SAMPLE_PROMPTS: dict[str, tuple[str, ...]] = {
    "en": ("The capital of France is", "On a rainy morning,"),
    "zh": ("中国的首都是", "那是一个凉爽的中午，"),
    "code": ("def main():\n", "def count_"),
}
SAMPLE_TOKENS = 40
GREEDY_SAMPLE_TOKENS = 16
"""A greedy text of a tiny model soon repeats itself; its first words are what matters."""
SHOWN_PROBES = (("en", "The capital of France is"), ("zh", "中国的首都是"))


@dataclass(frozen=True)
class WorldSize:
    """How much text of each language, and how much code."""

    bytes_per_language: int = 3_300_000
    code_bytes: int = 1_000_000


@dataclass
class StageTime:
    """One row of the table of stages."""

    name: str
    seconds: float
    result: str
    done_before: bool = False
    """The work was found done; the seconds are those of the time it was done."""

    def in_words(self) -> str:
        """The result, and whether it was there before."""
        return f"{self.result} (done before)" if self.done_before else self.result


@dataclass
class QuickstartRun:
    """Everything the summary shows."""

    workspace: Workspace
    config: RunConfig
    stages: list[StageTime] = field(default_factory=list)
    before: dict[str, Any] | None = None
    """Probes of the untrained model."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    shown_probes: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(prompt, answer, P before, P after) of the probes that are shown by name."""
    samples: list[tuple[str, str, str]] = field(default_factory=list)
    """(channel, prompt, continuation)."""
    parameters: int = 0
    speedrun: Speedrun | None = None
    """Of your own text."""
    watts: float | None = None
    """Of the GPU while it trained."""
    chat: dict[str, dict[str, ChatScore]] = field(default_factory=dict)
    """What is answered in a chat, by language: of the base model (`base`), the chat model (`sft`), `dpo` and `rl`."""
    chat_held_out: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """The held-out text of the base model, scored with each of the others."""
    chat_probes: dict[str, float] = field(default_factory=dict)
    """The share of the probes that each completes."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out loss), in the order of steps."""
    last_step: int = 0
    best_step: int = 0
    """The checkpoint with the lowest held-out loss: the one that is judged, written with and exported."""
    losses: list[str] = field(default_factory=list)
    """The rules that dropped much of it, in words."""

    @property
    def own_data(self) -> bool:
        """Whether it is a text of your own."""
        return self.speedrun is not None

    @property
    def chat_name(self) -> str:
        """The run that answers in a chat."""
        return f"{self.config.train.name}-chat"

    @property
    def is_falling(self) -> bool:
        """Whether the held-out loss still fell at the end, so that more steps would help."""
        if len(self.curve) < 2:
            return bool(self.curve)
        (_, before), (_, last) = self.curve[-2:]
        return last <= min(loss for _, loss in self.curve) and before - last >= STILL_FALLING * before


@brief_progress()
def run_quickstart(
    config: RunConfig,
    work: Path,
    own: OwnText | None = None,
    size: WorldSize | None = None,
    accept_changes: bool = False,
    full: bool = False,
    budget: Budget | None = None,
    source: str | None = None,
    overrides: Sequence[str] = (),
) -> QuickstartRun:
    """Run or continue the quickstart in `work`.

    `own` replaces the small world, which has `size`; settings are then chosen for it and for the time of `budget`,
    beginning with the config `source` (None: the preset for the device), except those that `overrides` set. With a
    budget and without `own`, the packed data that the workspace has is taken.
    `accept_changes` continues a run although its settings changed. `full` adds two runs (`chat.tune`), without `own`.
    """
    workspace = open_workspace(work, create=True)
    run = QuickstartRun(workspace, config)
    timer = _Timer(run)
    if budget is not None:
        device = pick_device(config.parallel.device).type
        chats = () if own is None else chat_files(Path(own.source.location))
        run.speedrun = Speedrun(workspace, budget, source or preset_for(config), overrides, device, chats)
        run.config = config = run.speedrun.config
        if budget.began is not None:
            with timer.stage("start", time.time() - budget.began) as done:
                done("Python and its libraries are loaded")
    if own is not None or not run.own_data:
        refuse_other_text(workspace, config.train.name, _sources(workspace, own))
    if not run.own_data:
        with timer.stage("raw data") as done:
            size = size or WorldSize()
            write_raw(workspace.raw, WORLD_SEED, size.bytes_per_language, size.code_bytes)
            done(f"en.jsonl, zh.json, code.parquet: {human_bytes(folder_bytes(workspace.raw))}")
    report = _build_data(run, timer, own) if own is not None or not run.own_data else None
    if run.speedrun is not None:
        if own is None:
            run.speedrun.take_packed(packed_root(workspace.packed, run.config.data))
        _choose(run, run.speedrun, timer)
    _train(run, timer, accept_changes)
    with timer.stage("evaluate") as done:
        loaded = load_run(workspace, config.train.name, run.best_step)
        if own is None and run.own_data:  # packed elsewhere: there are no documents
            run.evaluation = {"held_out": _held_out(loaded, workspace)}
        else:
            run.evaluation = _evaluation(loaded, workspace, None if run.own_data else workspace.raw / PROBES_NAME)
        run.shown_probes = _shown_probes(run)
        channels = run.evaluation["held_out"]
        bits = ", ".join(f"{channel} {values['bits_per_byte']:.2f}" for channel, values in channels.items())
        done(f"bits per byte: {bits}" if bits else "no held-out text to score")
    with timer.stage("generate") as done:
        run.samples = _samples(
            loaded, SAMPLE_PROMPTS if own is None or report is None else _own_prompts(workspace, report)
        )
        done(counted(len(run.samples), "sample"))
    with timer.stage("export") as done:
        exported = workspace.root / "hf"
        shutil.rmtree(exported, ignore_errors=True)
        export_run(loaded, workspace.tokenizer, exported)
        run.parameters = parameter_counts(loaded.model.config)["total"]
        done(f"{run.parameters / 1e6:.2f} M parameters, {human_bytes(folder_bytes(exported))}")
    with timer.stage("picture") as done:
        picture = workspace.run(config.train.name) / "curves.png"
        plot_runs([workspace.run(config.train.name)], picture)
        is_english = language() == "zh" and not cjk_fonts()
        said = human_bytes(picture.stat().st_size)
        done(f"{said}, in English: no Chinese font is installed" if is_english else said)
    if run.speedrun is not None and run.speedrun.chats:
        with timer.stage("chat") as done:
            done(_own_chat(run, run.speedrun, loaded, timer))
    if not run.own_data:
        with timer.stage("chat") as done:
            _chat(run, loaded, size or WorldSize())
            facts, refused = (by_language(run.chat["sft"], kind) for kind in ("known_fact", "outside"))
            done(f"facts answered: {facts}; refused what it cannot know: {refused}")
    for method in ("dpo", "rl") if full else ():
        with timer.stage(method) as done:
            name = f"{config.train.name}-{method}"
            share = min(1.0, (size or WorldSize()).bytes_per_language / WorldSize().bytes_per_language)
            tune(workspace, method, run.chat_name, name, WORLD_SEED, share)
            _ask(run, loaded, method, name)
            facts, refused, sums = (by_language(run.chat[method], kind) for kind in ("known_fact", "outside", "sum"))
            done(f"facts answered: {facts}; refused what it cannot know: {refused}; sums right: {sums}")
    return run


def _chat(run: QuickstartRun, base: LoadedModel, size: WorldSize) -> None:
    """Teach the model to answer, and ask before and after."""
    count = min(CONVERSATIONS, max(50, size.bytes_per_language // 800))
    teach(run.workspace, base.name, run.chat_name, WORLD_SEED, count, base.step)
    answers = run.workspace.run(run.chat_name) / "eval" / f"base-{ANSWERS_NAME}"
    run.chat["base"] = judge(base, WORLD_SEED, completed_facts(run.evaluation), answers)
    _ask(run, base, "sft", run.chat_name)


def _own_chat(run: QuickstartRun, speedrun: Speedrun, base: LoadedModel, timer: _Timer) -> str:
    """Fine-tune on the conversations among a person's files, in the time that is left."""
    options = sft.SftOptions(run.chat_name, speedrun.chats, replay=CHAT_REPLAY, step=base.step, replace=True)
    prepared = sft.prepare_sft(base.name, run.workspace, options)
    ends_at = time.monotonic() + speedrun.chat_seconds(timer.spent)
    watch = Deadline(prepared.run, prepared.config, ends_at, prepared.config.train.steps)
    summary = train(prepared.config, run.workspace, say=lambda _: None, brief=True, watch=watch)
    return (
        f"{counted(prepared.report['kept'], 'conversation')}, {counted(summary.step, 'step')}: z2a chat {run.chat_name}"
    )


def _ask(run: QuickstartRun, base: LoadedModel, row: str, name: str) -> None:
    """Ask a run in a chat, let it complete the probes, and score the held-out text of its base."""
    workspace, loaded = run.workspace, load_run(run.workspace, name)
    answers = workspace.run(name) / "eval" / f"{row}-{ANSWERS_NAME}"
    run.chat[row] = judge(loaded, WORLD_SEED, completed_facts(run.evaluation), answers)
    run.chat_held_out[row] = _held_out(loaded, workspace, base)
    probes = read_probes(workspace.raw / PROBES_NAME)
    run.chat_probes[row] = summarize(run_probes(Engine(loaded), probes))["accuracy"]


def _held_out(loaded: LoadedModel, workspace: Workspace, base: LoadedModel | None = None) -> dict[str, Any]:
    """The scores of a model on the held-out text of a run: its own, or that of its base."""
    config = (base or loaded).config
    assert config is not None, "it is a run"
    packed = packed_root(workspace.packed, config.data)
    return held_out_scores(loaded.model, open_valid_splits(packed, valid_sources(packed, config)), config)


def by_language(scores: Mapping[str, ChatScore], kind: str) -> str:
    """The share of right answers of a kind, by language."""
    return ", ".join(f"{language} {score.share(kind):.0%}" for language, score in scores.items())


def _build_data(run: QuickstartRun, timer: _Timer, own: OwnText | None) -> dict[str, Any]:
    """Corpus, tokenizer and packed data. Returns the corpus report."""
    workspace, config, speedrun = run.workspace, run.config, run.speedrun
    options, announce = WORLD_OPTIONS, None
    if own is not None and speedrun is not None:
        minutes = human_seconds(speedrun.budget.seconds)
        print(t(f"{own.in_words()}. Everything takes {minutes} in all (--minutes)."), flush=True)
        with timer.stage("machine") as done:
            done(speedrun.speed.in_words())
        # Damage and rules that drop much are named, and do not stop the build.
        options = BuildOptions(**cutting(own.size_bytes), max_damaged_share=1.0, accept_drops=True)
        announce = say
    with timer.stage("corpus") as done:
        report = build_corpus(workspace.corpus, _sources(workspace, own), options, announce=announce)
        totals = report["totals"]
        kept, seen = totals["records_kept"], totals["records_in"]
        if own is not None:
            _print_lines(corpus_in_words(report, workspace))
            run.losses = striking_drops(report, workspace.root)
        done(f"{kept:,} of {counted(seen, 'record')}, {human_bytes(totals['bytes_kept'])} of text")
    with timer.stage("tokenizer") as done:
        if speedrun is not None:
            config = _with_vocabulary(speedrun, workspace, totals["bytes_kept"])
        vocabulary = train_on_corpus(workspace.corpus, workspace.tokenizer, config.tokenizer)
        done(f"{vocabulary['vocab_size']:,} token ids")
    with timer.stage("pack") as done:
        packed = pack_corpus(workspace.corpus, workspace.tokenizer, workspace.packed)
        tokens = {key: split["tokens"] for key, split in packed.items()}
        done(f"{sum(tokens.values()):,} tokens, {human_bytes(folder_bytes(workspace.packed))}")
    if speedrun is not None:
        tokens = {key.removesuffix("/train"): count for key, count in tokens.items() if key.endswith("/train")}
        speedrun.values |= {"model.vocab_size": vocabulary["vocab_size"], **speedrun.rows_for(tokens)}
        _print_lines(too_little_in_words(totals["bytes_kept"]))
    run.config = config
    return report


def _choose(run: QuickstartRun, speedrun: Speedrun, timer: _Timer) -> None:
    """Train the model that seems best for a moment, and choose the run."""
    with timer.stage("pilot") as done:
        speedrun.pilot(unique_tokens(speedrun.config, run.workspace), timer.spent)
        done(speedrun.speed.in_words())
    run.config = speedrun.decide(timer.spent)


def _train(run: QuickstartRun, timer: _Timer, accept_changes: bool) -> None:
    """Ask the untrained model, and train it."""
    workspace, config = run.workspace, run.config
    folder = workspace.run(config.train.name)
    if not run.own_data:
        with timer.stage("probes, untrained") as done:
            run.before = _untrained_probes(workspace, config, workspace.raw / PROBES_NAME)
            done(f"{run.before['accuracy']:.1%} right")
    reached = max(map(step_of, list_checkpoints(folder)), default=0)
    if 0 < reached < config.train.steps:
        _print_lines([f"training continues from step {reached:,} of {config.train.steps:,}"])
    with timer.stage("train") as done:
        with watched_gpu(pick_device(config.parallel.device)) as gpu:
            watch = (lambda _step: None) if run.speedrun is None else run.speedrun.deadline(config, timer.spent)
            summary = train(config, workspace, accept_changes=accept_changes, say=say, brief=True, watch=watch)
        run.watts = gpu.get("watts")
        points = RunReader(folder).series("eval/valid/loss")
        run.curve = list(zip(points.step.tolist(), points.value.tolist(), strict=True))
        run.last_step, run.best_step = summary.step, best_step(folder) or summary.step
        loss = f"held-out loss {run.curve[-1][1]:.3f}" if run.curve else "no held-out text"
        done(f"{summary.tokens:,} tokens in {counted(summary.step, 'step')}, {loss}")


def preset_for(config: RunConfig) -> str:
    """The preset of a speedrun, by the device that the config takes."""
    return PRESETS[pick_device(config.parallel.device).type]


def clear_workspace(work: Path, run: str | None = None) -> None:
    """Remove the folders of a quickstart; other files stay. `run`: of a speedrun over text that other commands packed;
    only what belongs to this run is removed."""
    if not (work / STAMP_NAME).is_file():
        return
    workspace = Workspace(work)
    folders = [workspace.raw, workspace.corpus, workspace.tokenizer, workspace.packed, workspace.runs]
    folders += [work / each.FOLDER for each in (sft, dpo, rl)]
    if run is not None:
        folders = [workspace.run(f"{run}{end}") for end in ("", "-pilot", "-chat")]
        folders.append(work / sft.FOLDER / f"{run}-chat")
    for folder in (*folders, work / "hf"):
        shutil.rmtree(folder, ignore_errors=True)
    for name in (TIMES_NAME, SUMMARY_NAME, REPORT_NAME, PLAN_NAME, *([STAMP_NAME] if run is None else [])):
        (work / name).unlink(missing_ok=True)


def _sources(workspace: Workspace, own: OwnText | None) -> list[Source]:
    if own is not None:
        return [own.source]
    names = {"en": ENGLISH_NAME, "zh": CHINESE_NAME, "code": CODE_NAME}
    return [Source(channel, workspace.raw / name, channel) for channel, name in names.items()]


def _with_vocabulary(speedrun: Speedrun, workspace: Workspace, text_bytes: int) -> RunConfig:
    """The config with a vocabulary that this text can support, which is also trained."""
    most = speedrun.config.tokenizer.vocab_size
    speedrun.values |= speedrun.vocabulary_settings(text_bytes)
    config = speedrun.config
    try:
        train_on_corpus(workspace.corpus, workspace.tokenizer, config.tokenizer)
    except TooFewPiecesError as error:
        if "tokenizer.vocab_size" in speedrun.given:
            raise BadInputError(
                f"This text has pieces for at most {error.largest:,} token ids, but "
                f"--tokenizer.vocab_size asks for {most:,}. Leave it out to let the quickstart choose, "
                f"or set it to {error.largest} or less."
            ) from None
        _print_lines([f"this text has pieces for at most {error.largest:,} token ids: training again with that number"])
        speedrun.values["tokenizer.vocab_size"] = error.largest
    return speedrun.config


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        print(f"   {t(line)}", flush=True)


def _untrained_probes(workspace: Workspace, config: RunConfig, probes: Path) -> dict[str, Any]:
    """What the model scores before its first step; kept, since asking again would give the same."""
    model = untrained(workspace, config)
    shape = asdict(model.model.config)
    key = fingerprint([shape, config.train.seed, model.tokenizer.fingerprint, crc32c_of(probes)])
    path = workspace.run(config.train.name) / "eval" / "untrained.json"
    if path.is_file():
        kept: dict[str, Any] = read_json(path)
        if kept["inputs"] == key:
            return kept
    asked = run_probes(Engine(model), read_probes(probes))
    summary = {"inputs": key, **summarize(asked), "probe_results": [asdict(result) for result in asked.results]}
    write_json(path, summary)
    log_report(path.parent.parent, {"step": 0, "probes": summary})
    return summary


def _evaluation(loaded: LoadedModel, workspace: Workspace, probes: Path | None) -> dict[str, Any]:
    pairs = None if probes is None else workspace.raw / PAIRS_NAME
    options = EvalOptions(probes=probes, pairs=pairs)
    kept = kept_report(workspace.run(loaded.name), loaded.step, options)
    return kept or evaluate_run(loaded, workspace, options)


def _shown_probes(journey: QuickstartRun) -> list[tuple[str, str, float, float]]:
    if journey.before is None:
        return []
    found = []
    for before, after in zip(journey.before["probe_results"], journey.evaluation["probe_results"], strict=True):
        probe = after["probe"]
        if (probe["channel"], probe["prompt"]) in SHOWN_PROBES:
            found.append((probe["prompt"], probe["answer"], before["probability"], after["probability"]))
    return found


def _own_prompts(workspace: Workspace, report: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The beginnings of two documents of your own text, held-out ones first."""
    prompts = {}
    templates = {name: text_template(manifest) for name, manifest in corpus_sources(workspace.corpus).items()}
    for name, source in report["sources"].items():
        streams = (iter_records(workspace.corpus, name, split) for split in ("valid", "train"))
        records = itertools.islice(itertools.chain.from_iterable(streams), 2)
        prompts[source["channel"]] = tuple(_beginning(training_text(record, templates[name])) for record in records)
    return prompts


def _beginning(text: str) -> str:
    """Some words of the first line that has any, so that they can be typed as a prompt."""
    lines = text.strip().split("\n")
    line = next((line.strip() for line in lines if sum(map(str.isalpha, line)) >= PROMPT_LETTERS), lines[0])
    widths = itertools.accumulate(map(columns, line))
    taken = line[: sum(width <= PROMPT_COLUMNS for width in widths)]
    words = taken.rpartition(" ")[0]
    return words if len(taken) < len(line) and words else taken


def _samples(loaded: LoadedModel, prompts: dict[str, tuple[str, ...]]) -> list[tuple[str, str, str]]:
    engine, samples = Engine(loaded, EngineSettings(max_batch=1)), []
    for channel, texts in prompts.items():
        for index, prompt in enumerate(texts):
            # The first is the model's best guess, the second shows its imagination.
            if index == 0:
                text = generate(engine, prompt, GREEDY_SAMPLE_TOKENS)
            else:
                text = generate(engine, prompt, SAMPLE_TOKENS, Sampling(temperature=0.7, top_p=0.9, seed=index))
            samples.append((channel, prompt, text))
    return samples


class _Timer:
    """Times stages and remembers, over interruptions, what each took."""

    def __init__(self, journey: QuickstartRun) -> None:
        self.journey = journey
        self.path = journey.workspace.root / TIMES_NAME
        self.known: dict[str, dict[str, Any]] = read_json(self.path) if self.path.is_file() else {}
        self.began = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds of all stages so far, of earlier starts too, with the one that runs."""
        return sum(stage["seconds"] for stage in self.known.values()) + time.perf_counter() - self.began

    @contextmanager
    def stage(self, name: str, before: float = 0.0) -> Iterator[Callable[[str], None]]:
        """Time a stage; the block says its result through what is yielded. `before`: seconds that it took already, at
        each start anew."""
        results: list[str] = []
        started = self.began = time.perf_counter() - before
        spent_before = float(self.known.get(name, {}).get("seconds", 0.0))
        finished_before = bool(self.known.get(name, {}).get("finished", False))
        try:
            yield results.append
        finally:
            seconds = time.perf_counter() - started
            finished = bool(results)
            # A stage that was finished before only looks up its result now: keep the time the work itself took.
            looks_up = finished and finished_before and not before and seconds < spent_before
            total = spent_before if looks_up else spent_before + seconds
            self.known[name] = {"seconds": total, "finished": finished or finished_before}
            write_json(self.path, self.known)
            self.began = time.perf_counter()
        stage = StageTime(name, total, results[0], done_before=looks_up)
        self.journey.stages.append(stage)
        print(f"{padded(t(name), NAME_COLUMNS)} {human_seconds(total):>6}  {t(stage.in_words())}", flush=True)
