"""Was an item of a benchmark in the training text? Its n-grams (`ngrams.py`) against every training document.

    z2a corpus build … --against cmmlu,questions.jsonl         drops the documents that make an item dirty
    z2a pack --against cmmlu,arc_easy --data eval-data         with the packing of the corpus
    z2a eval contamination cmmlu --data eval-data              later, for other benchmarks

Compared is what identifies an item: its question, its passage, and options that are long enough. Each is *found* if at
least a fifth of its n-grams are in the text; n-grams that stand in several texts of a benchmark identify none of them.
A question shorter than an n-gram (女的是什么意思？) says little: it counts if its options, or its answer, follow it.
Without them it is a *weak* hit, listed apart and in no share.
`contamination.json` lists the dirty items, each with a document (its gid) it was found in; evaluations then show
accuracy over all, clean and dirty items.

Memory: 8 bytes a gram, 12 for what was found of it, and a filter of at most 64 MB, in every worker process.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from zero2all.common.engine import EngineConfig, OnBytes, TaskEngine, open_engine
from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json, write_json
from zero2all.common.language import cells, table_lines
from zero2all.common.language import translate as t
from zero2all.common.manifest import fingerprint
from zero2all.common.progress import progress, say
from zero2all.common.records import corpus_sources, text_template
from zero2all.common.workspace import Workspace
from zero2all.evals.items import Item, Task
from zero2all.evals.ngrams import (
    RUN_LENGTHS,
    STRETCH_CHARACTERS,
    Kind,
    Units,
    kind_for,
    run_hashes,
    run_hashes_at,
    runs_within,
    stretches,
    units_of,
)
from zero2all.packed.pieces import PIECE_BYTES, UnencodedDocument, cut_part, document_batches
from zero2all.packed.shard_format import NO_GID

REPORT_NAME = "contamination.json"
RULES = 3
"""Raised when other items count as found: a report of earlier rules is not used."""
GRAMS_FOLDER, ANCHORS_FOLDER, FOLLOWING_NAME = "grams", "anchors", "following.json"
ROOM_UNITS = 24
"""After a short question, beside twice its length, for each of the texts that must follow: labels, names of fields."""
FILTER_BITS = range(16, 27)
"""The filter has 2^n entries: at least 16 for every gram, where memory allows."""
SMALL_BYTES = 8_000_000
"""Below this much text one process is faster than starting several."""
PRELOADED = ("zero2all.evals.contamination",)


class GramKey(NamedTuple):
    """Grams that are looked for in the same way."""

    kind: Kind
    length: int
    """WHOLE: not a gram, but a short question that its options follow."""


WHOLE = 0
LEAST_SHARE = 0.2
"""Of the n-grams of a text, to count as found."""


class CorpusPart(NamedTuple):
    """What an item is looked for by."""

    name: str
    """question, passage, options or answer."""
    key: GramKey
    places: np.ndarray
    """Of its grams in `ItemGrams.hashes`."""
    is_weak: bool = False
    """It may well stand in a text by chance."""


class Following(NamedTuple):
    """The texts that make a short question the item that it is, wherever they follow it."""

    item: int
    """Its place among those of this kind."""
    runs: tuple[tuple[int, int], ...]
    """Length and hash of each text."""


@dataclass(frozen=True)
class ItemGrams:
    """The grams of all items, by kind and length."""

    hashes: dict[GramKey, np.ndarray]
    """Sorted, each once."""
    anchors: dict[GramKey, np.ndarray]
    """The runs that grams begin with, by the key that `anchor_of` gives; what a filter is made of."""
    of_item: list[list[CorpusPart]]
    following: dict[GramKey, dict[int, list[Following]]]
    """By the key and the hash of a short question."""


def grams_of_items(benchmarks: Sequence[Sequence[Item]]) -> ItemGrams:
    """Hash all items. One without any letter or digit has no grams and is never found."""
    parts: list[tuple[int, list[CorpusPart]]] = []
    anchors: dict[GramKey, list[np.ndarray]] = {}
    texts: dict[GramKey, list[dict[int, np.ndarray]]] = {}  # by benchmark, each different text once, by its hash
    following: dict[GramKey, dict[int, list[Following]]] = {}
    wholes: Counter[Kind] = Counter()
    for benchmark, item in ((number, item) for number, items in enumerate(benchmarks) for item in items):
        question, options, rest = item.question, item.choices or (item.answer,), "options" if item.choices else "answer"
        if not question.strip():  # a pair of sentences
            question, options = options[0], options[1:]
        mine = []
        for name, text in [("question", question), ("passage", item.context), *((rest, each) for each in options)]:
            kind = kind_for(text, item.language)
            units = units_of([text], kind)
            key = GramKey(kind, min(RUN_LENGTHS[kind], len(units.hashes)))
            is_short = key.length < RUN_LENGTHS[kind]
            if not key.length or (is_short and name != "question"):
                continue
            found = np.unique(run_hashes(units, key.length))
            mine.append(CorpusPart(name, key, found, is_short))
            texts.setdefault(key, [{} for _ in benchmarks])[benchmark][_hash(units)] = found
            anchor = anchor_of(key)
            anchors.setdefault(anchor, []).append(found if anchor == key else run_hashes(units, anchor.length)[:1])
            if is_short and (runs := _runs_after(units, options, kind)):
                whole = Following(wholes[kind], runs)
                following.setdefault(key, {}).setdefault(_hash(units), []).append(whole)
                mine.append(CorpusPart(name, GramKey(kind, WHOLE), np.array([whole.item])))
                wholes[kind] += 1
        parts.append((benchmark, mine))
    hashes = {GramKey(kind, WHOLE): np.arange(count) for kind, count in wholes.items()}
    common: list[dict[GramKey, np.ndarray]] = [{} for _ in benchmarks]
    for key, of_benchmarks in sorted(texts.items()):
        hashes[key] = np.unique(np.concatenate([found for of_texts in of_benchmarks for found in of_texts.values()]))
        for number, of_texts in enumerate(of_benchmarks):
            grams, counts = np.unique(np.concatenate([hashes[key][:0], *of_texts.values()]), return_counts=True)
            common[number][key] = np.isin(hashes[key], grams[counts > 1])
    of_item = [[_placed(part, hashes, common[benchmark]) for part in mine] for benchmark, mine in parts]
    return ItemGrams(
        hashes, {key: np.unique(np.concatenate(found)) for key, found in anchors.items()}, of_item, following
    )


def _placed(part: CorpusPart, hashes: Mapping[GramKey, np.ndarray], common: Mapping[GramKey, np.ndarray]) -> CorpusPart:
    """The part with the places of its grams; without those that are in several texts, or weak where none is left."""
    if part.key.length == WHOLE or part.is_weak:
        return part._replace(places=np.searchsorted(hashes[part.key], part.places))
    places = np.searchsorted(hashes[part.key], part.places)
    own = places[~common[part.key][places]]
    return part._replace(places=own) if len(own) else part._replace(places=places, is_weak=True)


def _hash(units: Units) -> int:
    """The hash of a whole text."""
    return int(run_hashes_at(units, np.zeros(1, np.intp), len(units.hashes))[0])


def _runs_after(units: Units, options: Sequence[str], kind: Kind) -> tuple[tuple[int, int], ...]:
    """Length and hash of each option after a question; none where both together are too short to identify an item."""
    found = [each for each in (units_of([option], kind) for option in options) if len(each.hashes)]
    total = len(units.hashes) + sum(len(each.hashes) for each in found)
    return tuple((len(each.hashes), _hash(each)) for each in found) if 2 * total >= RUN_LENGTHS[kind] else ()


def anchor_of(key: GramKey) -> GramKey:
    """Full-length grams are looked up by themselves; shorter ones by the largest power of two within them, so that
    many lengths do not take as many passes."""
    is_full = key.length == RUN_LENGTHS[key.kind]
    return key if is_full else GramKey(key.kind, 1 << (key.length.bit_length() - 1))


@dataclass(frozen=True)
class ScanTask:
    """Some bytes of a corpus shard."""

    part: Path
    start: int
    end: int
    source: str
    template: str
    """How its records become training text."""
    grams: Path
    """Where the hashes lie."""
    first: int | None = None
    """Documents without gids are numbered from here on."""


Pairs = dict[GramKey, np.ndarray]
"""(2, n) uint64 for each key: the places of grams, rising, and the documents they are in."""


class Matcher:
    """Looks grams of one kind up whose lengths have the same anchor, a run they begin with: a filter tells nearly all
    anchors apart, and only what passes it is looked up at its full length."""

    def __init__(self, anchor: GramKey, hashes: Mapping[GramKey, np.ndarray], anchors: np.ndarray) -> None:
        self.anchor, self.hashes = anchor, hashes
        bits = next((bits for bits in FILTER_BITS if 1 << bits >= 16 * len(anchors)), FILTER_BITS[-1])
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, bool)
        self._filter[anchors >> self._shift] = True

    def find(self, units: Units) -> Iterator[tuple[GramKey, np.ndarray, np.ndarray]]:
        """For each length: the grams that were found, and the units they begin with."""
        passed = np.flatnonzero(self._filter.take(run_hashes(units, self.anchor.length) >> self._shift))
        passed = passed if units.starts is None else units.starts[passed]
        for key, hashes in self.hashes.items():
            places = runs_within(units, passed, key.length)
            runs = run_hashes_at(units, places, key.length)
            at = np.minimum(np.searchsorted(hashes, runs), len(hashes) - 1)
            is_equal = hashes[at] == runs
            if is_equal.any():
                yield key, at[is_equal], places[is_equal]


def _text_of(units: Units, places: np.ndarray) -> np.ndarray:
    """The number of the text that each unit is in."""
    return np.searchsorted(units.bounds, places, side="right") - 1


def _followed(
    units: Units, key: GramKey, hashes: np.ndarray, places: np.ndarray, following: Mapping[int, Sequence[Following]]
) -> tuple[np.ndarray, np.ndarray]:
    """Among short questions, found at some units: the items whose other texts all follow soon, and those units."""
    found = []
    for short, place in zip(hashes.tolist(), places.tolist(), strict=True):
        begin = place + key.length
        end_of_text = int(units.bounds[_text_of(units, np.array([place]))[0] + 1])
        for whole in following.get(short, ()):
            room = sum(2 * length + ROOM_UNITS for length, _ in whole.runs)
            end = min(begin + room, end_of_text)
            if all(
                (run_hashes_at(units, np.arange(begin, max(begin, end - length + 1)), length) == run).any()
                for length, run in whole.runs
            ):
                found.append((whole.item, place))
    return (np.array([item for item, _ in found], np.int64), np.array([place for _, place in found], np.int64))


def scan_piece(task: ScanTask) -> Pairs:
    """Look for all grams in some documents."""
    matchers, following = _matchers(task.grams)
    hits: dict[GramKey, list[tuple[np.ndarray, np.ndarray]]] = {}
    numbers = itertools.count(task.first or 0)
    for batch in document_batches(task.part, task.start, task.end, task.source, task.template):
        if task.first is not None:
            batch = [document._replace(gid=next(numbers)) for document in batch]
        for all_texts, all_gids in _groups(batch):
            for kind in sorted({matcher.anchor.kind for matcher in matchers}):
                texts, gids = all_texts, all_gids
                if kind == "characters":  # half of the work is saved where most text is English
                    places = [place for place, text in enumerate(all_texts) if not text.isascii()]
                    texts, gids = [all_texts[place] for place in places], all_gids[places]
                units = units_of(texts, kind)
                for matcher in (matcher for matcher in matchers if matcher.anchor.kind == kind):
                    for key, grams, begins in matcher.find(units):
                        hits.setdefault(key, []).append((grams, gids[_text_of(units, begins)]))
                        if key in following:
                            hashes = matcher.hashes[key][grams]
                            wholes, begins = _followed(units, key, hashes, begins, following[key])
                            whole_key = GramKey(kind, WHOLE)
                            hits.setdefault(whole_key, []).append((wholes, gids[_text_of(units, begins)]))
    return {key: _pairs(found) for key, found in hits.items() if any(len(grams) for grams, _ in found)}


def _groups(batch: Sequence[UnencodedDocument]) -> Iterator[tuple[list[str], np.ndarray]]:
    """The documents in groups of about STRETCH_CHARACTERS, long ones in stretches; and the gid of each text."""
    texts: list[str] = []
    gids: list[int] = []
    characters = 0
    for document in batch:
        for text in stretches("\n".join(document.texts)):
            texts.append(text)
            gids.append(document.gid)
            characters += len(text)
            if characters >= STRETCH_CHARACTERS:
                yield texts, np.array(gids, np.uint64)
                texts, gids, characters = [], [], 0
    if texts:
        yield texts, np.array(gids, np.uint64)


def _pairs(found: Sequence[tuple[np.ndarray, np.ndarray] | np.ndarray]) -> np.ndarray:
    """All pairs, sorted, each once."""
    pairs = np.stack([np.concatenate([part[side].astype(np.uint64) for part in found]) for side in (0, 1)])
    pairs = pairs[:, np.lexsort(pairs[::-1])]
    is_new = np.concatenate([[True], (np.diff(pairs.astype(np.int64), axis=1) != 0).any(axis=0)])
    return pairs[:, is_new]


@lru_cache(maxsize=1)  # making the filters takes longer than a small piece
def _matchers(folder: Path) -> tuple[list[Matcher], dict[GramKey, dict[int, list[Following]]]]:
    """Of this process."""
    hashes, anchors = _load_grams(folder / GRAMS_FOLDER), _load_grams(folder / ANCHORS_FOLDER)
    matchers = [
        Matcher(anchor, {key: found for key, found in hashes.items() if anchor_of(key) == anchor}, beginnings)
        for anchor, beginnings in anchors.items()
    ]
    following: dict[GramKey, dict[int, list[Following]]] = {}
    for kind, length, short, item, runs in read_json(folder / FOLLOWING_NAME):
        whole = Following(item, tuple((length, run) for length, run in runs))
        following.setdefault(GramKey(kind, length), {}).setdefault(short, []).append(whole)
    return matchers, following


def _load_grams(folder: Path) -> dict[GramKey, np.ndarray]:
    paths = [(kind, path) for kind in RUN_LENGTHS for path in sorted(folder.glob(f"{kind}-*.npy"))]
    return {GramKey(kind, int(path.stem.partition("-")[2])): np.load(path, mmap_mode="r") for kind, path in paths}


def find_contamination(
    workspace: Workspace, tasks: Sequence[Task], engine: EngineConfig | None = None
) -> dict[str, Any]:
    """Look for the items of all tasks in the training text of a corpus; writes `contamination.json` beside it and
    returns it. Tasks that an earlier pass over the same corpus looked for stay in it."""
    items = [item for task in tasks for item in task.items]
    if not items:
        raise BadInputError(
            "The tasks have no items to search for in the corpus. Name at least one task that has items."
        )
    sources = corpus_sources(workspace.corpus)
    grams = grams_of_items([task.items for task in tasks])
    started = time.monotonic()
    with _saved(grams, workspace.root) as folder:
        parts = {
            workspace.corpus / name / part: (name, text_template(manifest), int(file["bytes"]))
            for name, manifest in sources.items()
            for part, file in sorted(manifest["files"].items())
            if part.startswith("train/")
        }
        scans = [
            ScanTask(part, start, end, source, template, folder)
            for part, (source, template, size) in parts.items()
            for start, end in cut_part(part, size, PIECE_BYTES)
        ]
        total = sum(size for *_, size in parts.values())
        config = engine or EngineConfig()
        if config.kind == "local" and config.workers is None and total < SMALL_BYTES:
            config = EngineConfig("local", 1)
        with progress("contamination", total=total, unit="B") as bar, open_engine(config, PRELOADED) as opened:
            pairs = _scan(scans, opened, bar.advance)
    report: dict[str, Any] = {
        "rules": RULES,
        "corpus": _corpus_fingerprint(sources),
        "bytes": total,
        "seconds": round(time.monotonic() - started, 3),
        "grams": sum(len(each) for key, each in grams.hashes.items() if key.length != WHOLE),
        "tasks": _of_tasks(tasks, grams, pairs, workspace.corpus),
    }
    before = read_contamination(workspace)
    if before is not None:
        report["tasks"] = {**before["tasks"], **report["tasks"]}
    write_json(workspace.root / REPORT_NAME, report)
    return report


@contextmanager
def _saved(grams: ItemGrams, root: Path) -> Iterator[Path]:
    """A folder below `root` with the grams, for the workers."""
    with TemporaryDirectory(prefix=".grams-", dir=root) as name:
        folder = Path(name)
        for below, of_keys in ((GRAMS_FOLDER, grams.hashes), (ANCHORS_FOLDER, grams.anchors)):
            (folder / below).mkdir()
            for key, values in of_keys.items():
                if key.length != WHOLE:
                    np.save(folder / below / f"{key.kind}-{key.length}.npy", values)
        rows = [
            [*key, short, *whole]
            for key, of_key in grams.following.items()
            for short, wholes in of_key.items()
            for whole in wholes
        ]
        write_json(folder / FOLLOWING_NAME, rows)
        yield folder
        _matchers.cache_clear()


def _scan(scans: Sequence[ScanTask], engine: TaskEngine, on_bytes: OnBytes = None) -> Pairs:
    """Every gram that is in the texts, with the documents that contain it."""
    pairs: dict[GramKey, list[np.ndarray]] = {}
    for _, piece in engine.run(scan_piece, scans, on_bytes):
        for key, found in piece.items():
            pairs.setdefault(key, []).append(found)
    return {key: _pairs(found) for key, found in pairs.items()}


def against(tasks: Sequence[Task]) -> tuple[str, Callable[..., tuple[np.ndarray, Any]]]:
    """For a corpus that shall not contain items of these tasks (`Against` of `corpus/duplicates.py`).

    Dropped is every document with an n-gram of a text by which an item is dirty. So none of it is left, and a later
    search for the same items finds no dirty one.
    """
    items = [[task.name, task_fingerprint(task)] for task in tasks]
    return fingerprint([RULES, items]), partial(_contaminated, tasks)


def _contaminated(
    tasks: Sequence[Task],
    parts: Sequence[tuple[Path, str, str, int]],
    stays: np.ndarray,
    gids: np.ndarray,
    folder: Path,
    engine: TaskEngine,
) -> tuple[np.ndarray, dict[str, Any]]:
    grams = grams_of_items([task.items for task in tasks])
    with _saved(grams, folder) as saved:
        scans = [ScanTask(part[0], 0, part[0].stat().st_size, *part[1:3], saved, part[3]) for part in parts]
        pairs = {key: found[:, stays[found[1]]] for key, found in _scan(scans, engine).items()}
    report: dict[str, Any] = {task.name: {} for task in tasks}
    dropped = [np.zeros(0, np.int64)]
    items = ((task, item) for task in tasks for item in task.items)
    for (task, item), of_item in zip(items, grams.of_item, strict=True):
        hits = [_hit(part, pairs) for part in of_item if not part.is_weak]
        if strong := [hit.documents for hit in hits if hit.share >= LEAST_SHARE]:
            dropped.append(np.unique(np.concatenate(strong)).astype(np.int64))
            report[task.name][item.id] = {"records": len(dropped[-1]), "gids": gids[dropped[-1][:20]].tolist()}
    contaminated = np.unique(np.concatenate(dropped))
    return contaminated, {"rules": RULES, "records": len(contaminated), "dirty_items": report}


def _of_tasks(tasks: Sequence[Task], grams: ItemGrams, pairs: Pairs, corpus: Path) -> dict[str, Any]:
    numbers: dict[str, int] = read_json(corpus / "sources.json")
    names = {number: name for name, number in numbers.items()}
    result: dict[str, Any] = {}
    of_items = iter(grams.of_item)
    for task in tasks:
        dirty: dict[str, dict[str, Any]] = {}
        weak: dict[str, dict[str, Any]] = {}
        for item in task.items:
            hits = [_hit(part, pairs) for part in next(of_items)]
            strong = [hit for hit in hits if hit.share >= LEAST_SHARE and not hit.part.is_weak]
            if counted := strong or [hit for hit in hits if hit.share and hit.part.is_weak]:
                gid = min(int(hit.documents.min()) for hit in counted)
                (dirty if strong else weak)[item.id] = {
                    "gid": None if gid == NO_GID else gid,
                    "source": names.get(gid >> 40),
                    "documents": max(hit.most_documents for hit in counted),
                    "found": sorted({hit.part.name for hit in counted}),
                    "share": round(max(hit.share for hit in counted), 4),
                    **({} if strong else {"weak": True}),
                }
        result[task.name] = {
            "items": len(task.items),
            "dirty": len(dirty),
            "weak": len(weak),
            "fingerprint": task_fingerprint(task),
            "dirty_items": dirty,
            "weak_items": weak,
        }
    return result


class Hit(NamedTuple):
    """A part of an item in the text."""

    part: CorpusPart
    share: float
    """Of its grams, those that were found."""
    most_documents: int
    """That contain the same gram."""
    documents: np.ndarray


def _hit(part: CorpusPart, pairs: Pairs) -> Hit:
    places, documents = pairs.get(part.key, np.zeros((2, 0), np.uint64))
    first, end = (np.searchsorted(places, part.places.astype(np.uint64), side) for side in ("left", "right"))
    found = np.concatenate([documents[one:other] for one, other in zip(first, end, strict=True)])
    return Hit(part, float((end > first).mean()), int((end - first).max()), found)


def task_fingerprint(task: Task) -> str:
    """Names the items of a task: others under the same ids are noticed."""
    return fingerprint([[item.id, item.question, item.context, item.choices, item.answer] for item in task.items])


def _corpus_fingerprint(sources: Mapping[str, Mapping[str, Any]]) -> str:
    return fingerprint({name: manifest["files"] for name, manifest in sources.items()})


def read_contamination(workspace: Workspace) -> dict[str, Any] | None:
    """What the last pass over this corpus found; None where there was none, or the corpus is another one now."""
    path = workspace.root / REPORT_NAME
    if not path.is_file():
        return None
    report: dict[str, Any] = read_json(path)
    corpus = _corpus_fingerprint(corpus_sources(workspace.corpus))
    if not isinstance(report, dict) or (report.get("corpus"), report.get("rules")) != (corpus, RULES):
        say(
            f"{path} was made for another corpus, or with the rules of an earlier version, so it is not used. "
            f"Search again: z2a pack --against"
        )
        return None
    return report


def contaminated_ids(report: Mapping[str, Any] | None, task: Task) -> dict[str, set[str]] | None:
    """The ids of a task's `dirty` items, and of its `weak` hits; None where it was never looked for, or has other items
    now."""
    found = None if report is None else report["tasks"].get(task.name)
    if found is None or found["fingerprint"] != task_fingerprint(task):
        return None
    return {"dirty": set(found["dirty_items"]), "weak": set(found["weak_items"])}


def split_accuracy(correct: Mapping[str, bool], found: Mapping[str, set[str]]) -> dict[str, Any]:
    """Accuracy over all, clean and dirty items, and over weak hits if there are any, by whether each item was answered
    right."""
    hit = set().union(*found.values())
    groups = {"all": set(correct), "clean": set(correct) - hit, **{name: set(correct) & found[name] for name in found}}
    return {
        name: {"items": len(group), "accuracy": sum(correct[item] for item in group) / len(group) if group else None}
        for name, group in groups.items()
        if group or name != "weak"
    }


def split_words(split: Mapping[str, Any]) -> str:
    """The accuracies in a line."""
    parts = []
    for name, group in split.items():
        share = "" if group["accuracy"] is None else f" {group['accuracy']:.1%}"
        parts.append(f"{name}{share} ({group['items']:,})")
    return f"in the training text: {', '.join(parts)}"


def contamination_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for a terminal."""
    rows = []
    for name, found in report["tasks"].items():
        share = found["dirty"] / found["items"] if found["items"] else 0.0
        rows.append(
            [name, *cells({**found, "share": share}, {"items": ",", "dirty": ",", "share": ".1%", "weak": ","})]
        )
    return table_lines(t("contamination | items | dirty | share | weak hits"), rows)
