"""`z2a corpus build`, `show`, `report`, `rules`, `teach` and `download`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.evaluate import named_tasks
from zero2all.cli.terminal import print_table, wrapped
from zero2all.cli.verb import group, verb, workspace_of
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import TEXT_MARKS, counted, human_seconds, say, tell, terminal_safe

if TYPE_CHECKING:
    from zero2all.corpus.download.fetch import DownloadRequest, DownloadResult

group("""
    corpus: turn raw files into clean records

    z2a corpus build news=raw/news.jsonl --work my-workspace
    """)


@verb(
    r"""
    corpus build: read raw files, clean them, drop duplicates, hold out a valid split

    sources+ NAME=PATH[:CHANNEL[:KIND]]  name and path of a file or folder; optionally its channel such as zh, en or
        code (default: guessed; auto: split by the channel of each document) and the kind of a known data set; or one
        YAML file that lists them all
    --work
    --map FIELD=RAW,…                  raw fields to use: content=body,title=name
    --encoding NAME                    of files that are not UTF-8, such as big5 or shift_jis (default: found file by
        file)
    --training-text TEMPLATE           text that a model sees, such as '{title}\n{desc}\n{content}' (default: by what
        the source has)
    --format FORMAT                    shards as jsonl, jsonl.zst, parquet or txt (default jsonl)
    --shard-bytes N:int>=1             size of a shard (default 200 MB)
    --valid-share SHARE:float>=0..0.5  share held out (default 0.01)
    --max-damaged-share SHARE:float>=0..1  stop when a larger share of a source is damaged (default 0.01)
    --accept-drops =None               continue even if a rule drops more than a fifth of a source whose channel was
        guessed
    --engine local|ray                 where tasks run (default local)
    --workers --address
    --against NAME,…:names =()         drop documents that contain items of these benchmarks, or of files with questions
    --data
    --filter FILE.py:FUNCTION          your own filter: it gets each record, and says whether to keep it
    --keep-build                       keep corpus/.build, so that the next build reads only new files

    z2a corpus build news=raw/news.json:zh wiki=raw/wiki.parquet:en --work my-workspace
    z2a corpus build qa=raw/baike::baike2018qa --work my-workspace --format jsonl.zst --dedup.near off
    z2a corpus build corpus.yaml --work my-workspace --engine ray --address auto

    each cleaning rule has a name and thresholds (see z2a corpus rules); set them after the sources:
    z2a corpus build news=raw/news.json --clean.too_short.min_chars 20 --clean.zh.digits.on false
    """,
    defaults={"takes_overrides": True},
)
def _build(arguments: argparse.Namespace) -> None:
    from zero2all.corpus import build_corpus, check_sources, load_settings, parse_mapping

    names = ("format", "shard_bytes", "valid_share", "max_damaged_share", "accept_drops")
    flags = {
        "quality": {"filter": arguments.filter},
        "options": {name: getattr(arguments, name) for name in names},
        "engine": {"kind": arguments.engine, "workers": arguments.workers, "address": arguments.address},
    }
    mapping = parse_mapping(arguments.map) if arguments.map else None
    template = None if arguments.training_text is None else arguments.training_text.replace("\\n", "\n")
    settings = load_settings(arguments.sources, arguments.overrides, mapping, flags, template, arguments.encoding)
    # Before a mistyped path makes a workspace of this folder.
    check_sources(settings.sources, settings.options, settings.engine)
    dropped = None
    if arguments.against:
        from zero2all.evals.contamination import against

        dropped = against(named_tasks(arguments.against, arguments.data))
    corpus = workspace_of(arguments, create=True).corpus
    build = (corpus, settings.sources, settings.options, settings.engine, arguments.keep_build, say, dropped)
    report = build_corpus(*build)
    _print_report(report, arguments)
    tell(f"report: {corpus / 'report.html'}")


def _print_report(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    from zero2all.corpus import summary_notes, summary_rows

    print_table(summary_rows(report))
    for note in summary_notes(report, _work_flag(arguments)):
        _print_wrapped(note)


def _work_flag(arguments: argparse.Namespace) -> Path | None:
    """What --work must be in a command that is shown; None where the default does."""
    return arguments.work if arguments.work != Path() else None


@verb("""
    corpus show: print records of a source, or samples of what a rule dropped

    source?                     name of the source (default: all)
    --work
    --split train|valid =train  which split (default train)
    --count N:int>=1 =3         records of each source (default 3)
    --dropped? RULE             show samples of what RULE dropped; without RULE, of what every rule dropped
    --gid N:int>=0              show the record with this gid, if it was kept
    --chars N:int>=1            characters of each text (default: 1,000 on a terminal, else all)

    z2a corpus show news --count 3 --work my-workspace
    z2a corpus show --dropped digits --work my-workspace
    z2a corpus show --gid 1099511627785 --work my-workspace
    """)
def _show(arguments: argparse.Namespace) -> None:
    from zero2all.common.records import corpus_sources
    from zero2all.common.schema import nearest_hint

    corpus = workspace_of(arguments).corpus
    known = corpus_sources(corpus)
    if arguments.source is not None and arguments.source not in known:
        raise UsageError(f"There is no source `{arguments.source}`. {nearest_hint(arguments.source, known)}")
    names = [arguments.source] if arguments.source is not None else list(known)
    if arguments.gid is not None:
        _show_gid(corpus, known, arguments)
    elif arguments.dropped is not None:
        _show_dropped(corpus, names, arguments)
    else:
        _show_records(corpus, {name: known[name] for name in names}, arguments)


@verb("""
    corpus report: print the report of the last build again

    --work

    z2a corpus report --work my-workspace
    """)
def _report(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import as_written
    from zero2all.corpus import read_report

    corpus = workspace_of(arguments).corpus
    with as_written(corpus / "report.json", "Run `z2a corpus build` again."):
        _print_report(read_report(corpus), arguments)
    tell(f"report: {corpus / 'report.html'}")


def _show_gid(corpus: Any, known: dict[str, Any], arguments: argparse.Namespace) -> None:
    from zero2all.common.records import text_template
    from zero2all.corpus import find_record

    found = find_record(corpus, {name: manifest["number"] for name, manifest in known.items()}, arguments.gid)
    if found is None:
        work = _work_flag(arguments)
        in_work = "" if work is None else f" --work {shlex.quote(str(work))}"
        raise UsageError(
            f"No record with gid {arguments.gid} was kept. It may have been dropped (see z2a corpus "
            f"show --dropped{in_work}), damaged (see {corpus / 'quarantine'}), or part of another "
            "corpus. Shards of plain text have no gids."
        )
    split, record = found
    tell(f"── gid {arguments.gid}  {record['data_src']}, {split}  {_in_a_line(record['title'])}")
    template = text_template(known[record["data_src"]])
    shown = template.replace("\n", "\\n")
    tell(f"training text {shown}")
    print(_cut(_seen_text(record, template), arguments))


def _seen_text(record: dict[str, Any], template: str) -> str:
    """The title stands in the heading; other templates are shown as the model sees them."""
    from zero2all.common.records import TITLE_AND_TEXT, training_text

    content: str = record["content"]
    return content if template == TITLE_AND_TEXT else training_text(record, template)


def _show_records(corpus: Any, manifests: dict[str, Any], arguments: argparse.Namespace) -> None:
    from zero2all.common.records import iter_records, text_template

    for name, manifest in manifests.items():
        template = text_template(manifest)
        shown = template.replace("\n", "\\n")
        tell(f"══ {name}: training text {shown}")
        records = iter_records(corpus, name, arguments.split)
        first = next(records, None)
        if first is None:
            tell(f"The {arguments.split} split of `{name}` is empty.")
            continue
        for record in itertools.islice(itertools.chain([first], records), arguments.count):
            number = f"gid {record['gid']}" if "gid" in record else name
            text = _cut(_seen_text(record, template), arguments)
            print(f"── {number}  {_in_a_line(record['title'])}\n{text}\n")


def _show_dropped(corpus: Any, names: list[str], arguments: argparse.Namespace) -> None:
    from zero2all.common.files import as_written
    from zero2all.common.schema import nearest_hint
    from zero2all.corpus import iter_dropped, read_report
    from zero2all.corpus.clean.config import RULES
    from zero2all.corpus.clean.rules import JUDGES
    from zero2all.corpus.report import OTHER_REASONS

    sources = read_report(corpus)["sources"]
    with as_written(corpus / "report.json", "Run `z2a corpus build` again."):
        dropped = {rule: None for name in names for rule in sources[name]["dropped"]}
    if arguments.dropped and arguments.dropped not in dropped:
        if arguments.dropped in RULES or arguments.dropped in OTHER_REASONS:
            tell(f"{arguments.dropped} dropped nothing.")
            return
        raise UsageError(f"No rule `{arguments.dropped}` dropped anything. {nearest_hint(arguments.dropped, dropped)}")
    if not dropped:
        tell(f"Nothing was dropped from {', '.join(names)}.")
    for rule in [arguments.dropped] if arguments.dropped else dropped:
        for name in names:
            count = sources[name]["dropped"].get(rule, 0)
            if count:
                tell(f"══ {name}: {count:,} dropped by {rule}")
            for sample in itertools.islice(iter_dropped(corpus, name, rule), arguments.count):
                facts = [f"gid {sample['gid']}", t(f"{sample['chars']:,} characters")]
                if "file" in sample:
                    facts.insert(1, _in_a_line(f"{sample['file']}, {sample['place']}"))
                if sample.get("kept_gid") is not None:
                    facts.append(t(f"kept for it: gid {sample['kept_gid']}"))
                measures = sample.get("measures", {})
                compared = JUDGES[rule].compared.split() if rule in JUDGES else []
                facts += [f"{measure} {measures.get(measure, 0):g}" for measure in compared]
                facts += [f"score {measures['score']:g}"] if "score" in measures else []
                excerpt = sample["excerpt"][: arguments.chars]
                more = " …" if sample["chars"] > len(excerpt) else ""
                print(f"── {', '.join(facts)}\n{terminal_safe(excerpt, keep=TEXT_MARKS)}{more}\n")


@verb("""
    corpus rules: list the cleaning rules and their settings

    channel? =en  channel whose defaults are shown (default en)

    z2a corpus rules zh
    """)
def _rules(arguments: argparse.Namespace) -> None:
    from zero2all.corpus.clean.config import EDITS, RULES, default_config

    channel = arguments.channel
    config = default_config(channel)
    tell(f"The rules of channel {channel} and their settings. Change them with overrides, for all channels or one:")
    tell(f"  --clean.too_short.min_chars 20   --clean.{channel}.digits.on false")
    for title, wanted in (("edits, which never drop a text", True), ("drops, in this order", False)):
        print(f"\n{t(title)}")
        for name, description in RULES.items():
            if (name in EDITS) == wanted:
                _print_rule(name, description, getattr(config, name))


def _print_rule(name: str, description: str, settings: Any) -> None:
    values = dataclasses.asdict(settings)
    is_on = values.pop("on", True)
    words = [f"{key} {_setting_in_words(value)}" for key, value in values.items()]
    label = f"  {name:<24}"
    _print_wrapped(f"{'' if is_on else t('(off) ')}{t(description)}", label, len(label))
    if words:
        _print_wrapped(", ".join(words), " " * len(label), len(label))


def _setting_in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return t(f"({len(value)} phrases)") if isinstance(value, list) else str(value)


@verb("""
    corpus teach: make a model from examples that gives every text a score

    examples+ NAME=PATH  good=PATH bad=PATH: a classifier of quality; reference=PATH: perplexity, how much a text is
        like this one. Files or folders of any kind that corpus build reads
    --work

    z2a corpus teach good=raw/edited bad=raw/machine-made --work my-workspace
    z2a corpus build news=raw/news.jsonl --quality.model quality --quality.min_score 0.3 --work my-workspace
    """)
def _teach(arguments: argparse.Namespace) -> None:
    from zero2all.corpus import parse_source
    from zero2all.corpus.teach import make_model

    sources = [parse_source(word) for word in arguments.examples]
    folder, report = make_model(sources, workspace_of(arguments, create=True).root)
    for label, counts in report["examples"].items():
        tell(f"{label}: {', '.join(f'{count:,} {t(name)}' for name, count in counts.items())}")
    if "auc" in report:
        tell(f"AUC on held-out examples: {report['auc']:.3f} (0.5: no better than chance, 1: all told apart)")
    else:
        tell(f"perplexity of held-out examples: {report['perplexity']:,.1f}")
    lines = report["thresholds"]
    rows = [[f"{line['min_score']:g}", *(f"{share:.1%}" for share in line["dropped"].values())] for line in lines]
    print_table([["min_score", *(t(f"{label} dropped") for label in lines[0]["dropped"])], *rows])
    tell(f"model: {folder}; texts on both sides of each threshold: {folder / 'report.json'}")


SHOWN_CHARS = 1000
LINE_COLUMNS = 110
"""Longer lines are hard to read, however wide the terminal is."""
LEAST_COLUMNS = 30
"""Text beside a label needs at least these; otherwise it goes below the label."""


def _print_wrapped(line: str, label: str = "", indent: int = 4) -> None:
    """Print a line behind its label, broken at blanks where the terminal ends; whole where there is no terminal."""
    if not sys.stdout.isatty():
        print(f"{label}{line}")
        return
    columns = min(shutil.get_terminal_size().columns, LINE_COLUMNS)
    if columns < indent + LEAST_COLUMNS:
        label, indent = f"{label.rstrip()}\n    " if label.strip() else "    ", 4
    print(label + f"\n{' ' * indent}".join(wrapped(line, columns - indent)))


def _in_a_line(text: str) -> str:
    return terminal_safe(text, " ")


def _cut(text: str, arguments: argparse.Namespace) -> str:
    text = terminal_safe(text, keep=TEXT_MARKS)
    limit = arguments.chars or (SHOWN_CHARS if sys.stdout.isatty() else len(text))
    if len(text) <= limit:
        return text
    more = t(f"({len(text) - limit:,} more characters; --chars {len(text)} shows all)")
    return f"{text[:limit]} … {more}"


@verb("""
    corpus download: fetch a data set or a model from a Hugging Face-style hub

    repo OWNER/NAME                repository on the hub
    --type dataset|model =dataset  kind of the repository (default dataset)
    --include* PATTERN             only files such as 'data/*.parquet', where * also matches slashes; may be repeated
        (default: all)
    --exclude* PATTERN             skip files that match this; may be repeated
    --out DIR:outdir                folder to write to (default: raw/NAME, for models models/NAME)
    --revision REVISION =main      branch, tag or commit (default main)
    --endpoint
    --token-env VARIABLE           environment variable that holds the token; without it, mirrors get no token (default:
        HF_TOKEN or `hf auth login`)
    --connections N:int>=1 =4      files fetched in parallel (default 4)
    --verify                       also verify files that are already here
    --update                       replace local files with the current ones of the revision
    --dry-run                      list the files and stop

    z2a corpus download wikimedia/wikipedia --include '20231101.zh/*' --out raw/wiki_zh
    z2a corpus download OWNER/MODEL --type model --exclude '*.bin' --endpoint https://mirror.example
    z2a corpus download OWNER/DATASET --dry-run

    run the same command again to resume an interrupted download; every file is checked
    """)
def _download(arguments: argparse.Namespace) -> None:
    from zero2all.corpus.download.fetch import DownloadRequest, download

    name = arguments.repo.rstrip("/").rpartition("/")[2]
    folder = arguments.out or Path("models" if arguments.type == "model" else "raw") / name
    same = ("repo", "revision", "endpoint", "token_env", "connections", "verify", "update", "dry_run")
    request = DownloadRequest(
        folder=folder,
        kind=arguments.type,
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        **{name: getattr(arguments, name) for name in same},
    )
    result = download(request, announce=say)
    if request.dry_run:
        _print_files(result)
    else:
        _print_summary(request, result)


def _print_files(result: DownloadResult) -> None:
    from zero2all.common.files import human_bytes
    from zero2all.corpus.download.fetch import in_words

    missing = {file.name for file in result.missing}
    rows = [
        [file.name, human_bytes(file.size_bytes), "no" if file.name in missing else "yes", file.algorithm]
        for file in result.files
    ]
    print_table([["file", "size", "here", "checked by"], *rows])
    tell(f"would fetch {in_words(result.missing)}")


def _print_summary(request: DownloadRequest, result: DownloadResult) -> None:
    from zero2all.common.files import human_bytes
    from zero2all.corpus.download.fetch import MANIFEST_NAME, STATE_FOLDER, in_words

    if result.missing:
        tell(
            f"fetched {counted(len(result.missing), 'file')}, {human_bytes(result.bytes_fetched)} in "
            f"{human_seconds(result.seconds)}, all checksums match"
        )
        if result.interruptions:
            tell(f"lost connections that were resumed: {result.interruptions:,}")
    elif request.verify:
        tell("nothing to do: all files are here, and their checksums match")
    else:
        tell("nothing to do: all files are here, and their sizes match (--verify also checks their content)")
    tell(f"{request.folder}: {in_words(result.files)}, commit {result.commit[:12]}")
    tell(f"manifest: {request.folder / STATE_FOLDER / MANIFEST_NAME}")
    if request.kind == "dataset":
        tell(f"next: z2a corpus build {request.folder.name}={request.folder} --work my-workspace")
    else:
        tell(f"next: z2a import {request.folder} --work my-workspace --name NAME")
