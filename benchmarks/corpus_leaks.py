"""What must not get into the training text twice, or at all: how much of it is found, and what it costs.

    python -m benchmarks.corpus_leaks --data DIR                        everything
    python -m benchmarks.corpus_leaks --data DIR --section near,parts   some of it; the rest of the results file stays

    near       copies of Chinese documents with 5 % of the characters changed one by one: share found; records of real
               text that are dropped for one that is less alike than three quarters (edit distance): share of all
    parts      documents that contain 20 to 50 % of another: how many pairs are on both sides of the split
    passages   1 GB with planted passages of 200 characters and more: share found, memory, CPU time
    against    items of three benchmark files planted in documents: dirty items before and after
    personal   personal data planted in sentences: recall; what is masked in real documentation: precision

DIR is that of `benchmarks.corpus`.
"""

import argparse
import csv
import ipaddress
import json
import random
import shutil
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from benchmarks.corpus_builds import Bench, build_measured
from benchmarks.corpus_inputs import real_texts, write_input
from benchmarks.machine import RESULTS, save_result
from benchmarks.planted import shared_bases
from benchmarks.processes import run_measured
from zero2all.common.files import read_json
from zero2all.common.jsonio import dumps_line
from zero2all.common.records import iter_records
from zero2all.corpus.clean.config import Mask
from zero2all.corpus.clean.mask import MARKS, mask_text
from zero2all.corpus.dedup.cluster import find_duplicates
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.index import IndexWriter
from zero2all.corpus.dedup.signatures import describe

CONFIGS = {"as before": DedupConfig(character_ngram=5, character_jaccard=0.8), "now": DedupConfig()}
LIKE = 0.75
"""A dropped record that is less alike to the one kept for it, by edit distance, is a false positive."""
PASSAGE = 200


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--section", default=",".join(SECTIONS))
    parser.add_argument("--passage-mb", type=int, default=1000, help="megabytes of text for the section passages")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="z2a-leaks-"))
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.data.absolute(), work.absolute())
    path = RESULTS / "corpus_leaks.json"
    results = read_json(path) if path.is_file() else {}
    for name in arguments.section.split(","):
        more = (arguments.passage_mb * 1_000_000,) if name == "passages" else ()
        results[name] = SECTIONS[name](bench, *more)
        results.pop("machine", None)
        save_result("corpus_leaks", results)
        print(name, json.dumps(results[name], ensure_ascii=False, indent=1), flush=True)


# ---- near copies ----------------------------------------------------------------------------------------------


def measure_near(bench: Bench) -> dict[str, Any]:
    """Copies with scattered edits, long and short; then real text as it is."""
    rng = random.Random(1)
    bases = shared_bases("zh", bench.data, 3000)
    found: dict[str, Any] = {}
    for name, lengths in (("600 to 6,000 characters", [None]), ("120 to 300 characters", [120, 200, 300])):
        originals = [text[: rng.choice(lengths)] for text in bases]
        copies = [scattered(text, 0.05, rng, bases) for text in originals]
        for title, config in CONFIGS.items():
            drops, _ = _search([*originals, *copies], "zh", bench.work / "near", config)
            both = ~drops[: len(bases)] & ~drops[len(bases) :]
            found[f"{name}, {title}"] = {"copies": len(bases), "found": round(1 - float(both.mean()), 4)}
    for language in ("zh", "en"):
        texts = [text for _, text in real_texts(bench.data, language)]
        for title, config in CONFIGS.items():
            _, kept_for = _search(texts, language, bench.work / "near", config)
            alike = [likeness(texts[one], texts[other]) for one, other in kept_for.items()]
            wrong = sum(each < LIKE for each in alike)
            found[f"real {language}, {title}"] = {
                "records": len(texts),
                "near duplicates": len(alike),
                "less alike than 0.75": wrong,
                "share of all": round(wrong / len(texts), 5),
                "least alike": round(min(alike), 3),
            }
    return found


def scattered(text: str, share: float, rng: random.Random, others: Sequence[str]) -> str:
    """`text` with `share` of its characters inserted, deleted or replaced one by one."""
    units = list(text)
    for _ in range(round(len(units) * share)):
        at = rng.randrange(len(units))
        kind, new = rng.choice(("insert", "delete", "replace")), rng.choice(rng.choice(others))
        if kind == "insert":
            units.insert(at, new)
        elif kind == "delete":
            del units[at]
        else:
            units[at] = new
    return "".join(units)


def _search(texts: Sequence[str], channel: str, work: Path, config: DedupConfig) -> tuple[np.ndarray, dict[int, int]]:
    """Which texts are dropped, and for near copies the text that was kept."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "unit").mkdir(parents=True)
    with IndexWriter(work / "unit", near=True) as writer:
        for start in range(0, len(texts), 500):
            some = texts[start : start + 500]
            writer.add(describe(some, channel, config), np.arange(start, start + len(some)))
    result = find_duplicates([work / "unit"], work / "dedup", config, channels=[channel])
    rows = np.load(work / "dedup" / "clusters.npy")
    near = rows[rows["reason"] == 2]
    return result.drops(0) > 0, dict(zip(near["member"].tolist(), near["kept"].tolist(), strict=True))


def likeness(one: str, other: str) -> float:
    """1 - edit distance / length of the longer, white space left out."""
    first, second = (np.frombuffer("".join(text.split()).encode("utf-32-le"), np.uint32) for text in (one, other))
    return 1 - _distance(first, second) / max(len(first), len(second), 1)


@njit(cache=True)
def _distance(first: np.ndarray, second: np.ndarray) -> int:
    row = np.arange(second.size + 1)
    for at in range(first.size):
        before = row[0]
        row[0] = at + 1
        for to in range(second.size):
            up = row[to + 1]
            row[to + 1] = min(before + (first[at] != second[to]), up + 1, row[to] + 1)
            before = up
    return row[second.size]


# ---- parts in held-out text -----------------------------------------------------------------------------------


def measure_parts(bench: Bench) -> dict[str, Any]:
    """Every second document gets a part of another put into it; a pair on both sides of the split is a leak."""
    found: dict[str, Any] = {}
    for language in ("zh", "en", "code"):
        rng = random.Random(5)
        bases = shared_bases(language, bench.data, 2400)
        half = len(bases) // 2
        hosts = []
        for base, host in zip(bases[:half], bases[half:], strict=False):
            size = round(rng.uniform(0.2, 0.5) * len(base))
            start, at = rng.randrange(len(base) - size), rng.randrange(len(host))
            hosts.append(host[:at] + "\n" + base[start : start + size] + "\n" + host[at:])
        rows = [(str(number), text) for number, text in enumerate([*bases[:half], *hosts])]
        given = write_input(bench.work / "parts" / f"{language}.jsonl", language, rows)
        for share in (0.01, 0.2, 0.5):
            more = ("--valid-share", str(share), "--options.rules", "none", "--workers", "1")
            _, report = build_measured(bench, {language: given.path}, *more)
            corpus = bench.work / "workspace" / "corpus"
            split = {
                record["title"]: name for name in ("train", "valid") for record in iter_records(corpus, language, name)
            }
            sides = [(split.get(str(number)), split.get(str(number + half))) for number in range(len(hosts))]
            found[f"{language}, {share} held out"] = {
                "pairs": sum(None not in pair for pair in sides),
                "leaked": sum(set(pair) == {"train", "valid"} for pair in sides),
                "held out": report["totals"]["valid_records"],
                "counted as leaks by the build": report["sources"][language]["valid_shared_with_train"],
            }
    return found


# ---- repeated passages ----------------------------------------------------------------------------------------


def measure_passages(bench: Bench, text_bytes: int) -> dict[str, Any]:
    """Real text, then characters drawn one by one, with planted passages of 200 to 2,000 characters copied from
    document to document, between marks."""
    rng, dice = random.Random(9), np.random.default_rng(9)
    folder = bench.work / "passages"
    folder.mkdir(parents=True, exist_ok=True)
    planted: dict[str, list[str]] = {}
    sources: dict[str, Path] = {}
    total = documents = 0
    for language in ("zh", "en"):
        sources[language], planted[language] = folder / f"{language}.jsonl", []
        donors: list[str] = []
        size = 0
        with open(sources[language], "wb") as out:
            for text in _texts(bench, language, rng, dice):
                if size > text_bytes // 2:
                    break
                if len(text) > 4 * PASSAGE and rng.random() < 0.02:
                    donors = [*donors[-200:], text]
                elif donors and rng.random() < 0.05:
                    donor = rng.choice(donors)
                    length = rng.randint(PASSAGE, min(2000, len(donor)))
                    start, at = rng.randrange(len(donor) - length + 1), rng.randrange(len(text) + 1)
                    mark = f"⟦{language}{len(planted[language])}⟧"
                    planted[language].append(donor[start : start + length])
                    text = text[:at] + mark + planted[language][-1] + mark + text[at:]
                size += len(text.encode())
                documents += 1
                out.write(dumps_line({"text": text}))
        total += size
    found: dict[str, Any] = {
        "text_gb": total / 1e9,
        "documents": documents,
        "planted": sum(map(len, planted.values())),
        "least": PASSAGE,
    }
    base = ("--options.rules", "none", "--workers", "2", "--dedup.near", "off")
    for name, more in (("without", ()), ("with", ("--dedup.passages.min_chars", str(PASSAGE)))):
        usage, report = build_measured(bench, sources, *base, *more)
        found[name] = {
            "wall_seconds": usage.wall_seconds,
            "cpu_seconds": usage.cpu_seconds,
            "peak_mb": usage.peak_pss_bytes / 1e6,
        }
        print(name, found, flush=True)
    left = 0
    for language, passages in planted.items():
        rows = [
            row
            for split in ("train", "valid")
            for row in iter_records(bench.work / "workspace/corpus", language, split)
        ]
        for row in rows:
            pieces = row["content"].split("⟦" + language)
            for piece in pieces[1:]:
                number, _, text = piece.partition("⟧")
                if not number.isdecimal() or int(number) >= len(passages):
                    continue  # a cut went through the mark
                left += len(text) >= PASSAGE and text.startswith(passages[int(number)][:PASSAGE])
    dropped = {source: values["bytes_dropped"] for source, values in report["sources"].items()}
    return {
        **found,
        "copies_left": left,
        "bytes_cut": {name: each["repeated_passages"] for name, each in dropped.items()},
    }


def _texts(bench: Bench, language: str, rng: random.Random, dice: np.random.Generator) -> Iterator[str]:
    """Real ones of the data folder and, for en, its `docs.jsonl` if there is one; then drawn ones."""
    yield from (text for _, text in real_texts(bench.data, language))
    if language == "en" and (bench.data / "docs.jsonl").is_file():
        with open(bench.data / "docs.jsonl", "rb") as file:
            yield from (json.loads(line)["content"] for line in file)
    sample = np.frombuffer("".join(shared_bases(language, bench.data, 500)).encode("utf-32-le"), "<u4")
    while True:
        block = sample[dice.integers(len(sample), size=1 << 24)].tobytes().decode("utf-32-le")
        at = 0
        while at < len(block):
            length = rng.randint(100, 1500 if language == "zh" else 4500)
            yield block[at : at + length]
            at += length


# ---- benchmarks -----------------------------------------------------------------------------------------------


def measure_against(bench: Bench) -> dict[str, Any]:
    """100 items in each of three files, half of them planted in documents of real text."""
    rng = random.Random(3)
    folder = bench.work / "against"
    folder.mkdir(parents=True, exist_ok=True)
    zh, en = (shared_bases(language, bench.data, 900) for language in ("zh", "en"))
    items = {
        "zh.jsonl": [{"question": text[300:380], "answer": text[400:410]} for text in zh[:100]],
        "en.csv": [{"question": text[300:460], "answer": text[480:500]} for text in en[:100]],
        "lines.txt": [{"question": " ".join(text[100:260].split())} for text in en[100:200]],
    }
    paths = [folder / name for name in items]
    paths[0].write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in items["zh.jsonl"]), encoding="utf-8")
    with open(paths[1], "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(items["en.csv"])
    paths[2].write_text("\n".join(row["question"] for row in items["lines.txt"]), encoding="utf-8")
    texts = {"zh": zh[200:], "en": en[200:]}
    for name, rows in items.items():
        language = name[:2] if name[:2] in texts else "en"
        for number, row in enumerate(rows[::2]):
            host = texts[language][number * 3 + (1 if name == "lines.txt" else 0)]
            at = rng.randrange(len(host))
            texts[language][number * 3 + (1 if name == "lines.txt" else 0)] = (
                f"{host[:at]}\n{row['question']}\n{host[at:]}"
            )
    sources = {
        language: write_input(folder / f"corpus-{language}.jsonl", language, [("", text) for text in rows]).path
        for language, rows in texts.items()
    }
    found: dict[str, Any] = {}
    wanted = ",".join(map(str, paths))
    for name, more in (("before", ()), ("after", ("--against", wanted))):
        _, report = build_measured(bench, sources, "--workers", "1", *more)
        command = [sys.executable, "-m", "zero2all", "eval", "contamination", wanted]
        command += ["--work", str(bench.work / "workspace")]
        run_measured(command, bench.work / "contamination.log", bench.environment)
        tasks = read_json(bench.work / "workspace" / "contamination.json")["tasks"]
        found[name] = {
            "dirty": {Path(task).name: values["dirty"] for task, values in tasks.items()},
            "records_dropped": report["totals"]["dropped"].get("benchmark", 0),
            "records_kept": report["totals"]["records_kept"],
        }
    return found


# ---- personal data --------------------------------------------------------------------------------------------

HOMES = [
    ("浙江省杭州市西湖区", "文三路"), ("广东省深圳市南山区", "科技园路"), ("北京市朝阳区", "建国路"),
    ("成都市武侯区", "人民南路"), ("上海市", "南京西路"), ("江苏省苏州市昆山市", "前进中路"), ("", "学院路"),
    ("四川省成都市郫都区红光镇", "港通北三路"), ("湖北省武汉市洪山区", "珞喻路"), ("", "中山东路"),
    ("陕西省西安市雁塔区", "长安南路"), ("重庆市渝中区", "民生路"),
]  # fmt: skip
FLATS = ["", "3幢2单元501室", "1201室", "6号楼302室", "阳光花园8栋1单元1102", "附5号"]
SENTENCES = [
    "请联系{}，谢谢。",
    "他的资料是{}。",
    "My record is {} as of today.",
    "（{}）",
    "contact: {}\n",
    "见“{}”一栏，",
    "住址：{}；",
]


def _personal(rng: random.Random) -> dict[str, str]:
    digits = lambda count: "".join(rng.choices(string.digits, k=count))  # noqa: E731
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    body = rng.choice(("110105", "330106", "440305")) + f"{rng.randint(1950, 2010)}{rng.randint(1, 12):02}"
    body += f"{rng.randint(1, 28):02}{digits(3)}"
    card = rng.choice(("4", "51", "55", "6222", "6217", "6228"))
    card += digits((19 if card[0] == "6" else 16) - 1 - len(card))
    total = sum(int(d) if at % 2 else sum(divmod(2 * int(d), 10)) for at, d in enumerate(reversed(card)))
    card += str(-total % 10)
    spaced = " ".join(card[at : at + 4] for at in range(0, len(card), 4))
    while not (address := ipaddress.ip_address(rng.getrandbits(32))).is_global or address.is_multicast:
        pass
    sixth = ipaddress.ip_address(
        f"2{rng.choice(('408', '409', '606', 'a00'))}:{rng.getrandbits(16):x}::{rng.getrandbits(16):x}"
    )
    place, road = rng.choice(HOMES)
    flat = rng.choice(FLATS if place else FLATS[1:4])
    name = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10)))
    return {
        "emails": f"{name}{rng.choice(('', '.li', '_88'))}@{rng.choice(('qq.com', 'gmail.com', 'sjtu.edu.cn'))}",
        "phones": rng.choice(
            (
                f"1{rng.randint(3, 9)}{digits(9)}",
                f"+86 138 {digits(4)} {digits(4)}",
                f"010-6{digits(7)}",
                f"(415) 555-{digits(4)}",
            )
        ),
        "id_numbers": body + "10X98765432"[sum(int(d) * w for d, w in zip(body, weights, strict=True)) % 11],
        "bank_cards": rng.choice((card, spaced)),
        "ip_addresses": str(rng.choice((address, address, sixth))),
        "addresses": f"{place}{road}{rng.randint(1, 999)}号{flat}",
    }


def _harmless(rng: random.Random) -> dict[str, str]:
    """What looks like it and is not."""
    small = ".".join(str(rng.randint(0, 19)) for _ in range(4))
    return {
        "versions of four numbers": rng.choice(
            (f"version {small}", f"v{rng.randint(1, 99)}.{rng.randint(20, 99)}.0.1", small)
        ),
        "browser versions": f"Chrome/{rng.randint(90, 130)}.0.{rng.randint(4000, 6500)}.{rng.randint(1, 200)}",
        "private and loop-back addresses": rng.choice(
            (f"192.168.{rng.randint(0, 255)}.{rng.randint(1, 254)}", "127.0.0.1")
        ),
        "numbers of 16 digits": "".join(rng.choices(string.digits, k=16)),
        "times and dates": f"2024-{rng.randint(1, 12):02}-28 12:{rng.randint(10, 59)}:01.{rng.randint(100000, 999999)}",
        "places without a door": rng.choice(
            ("沿着中山路走到3号线", "第18号文件", "北京市朝阳区", "10号楼", "今年5月12号")
        ),
    }


def measure_personal(bench: Bench) -> dict[str, Any]:
    """Recall by kind, what harmless strings are masked, and what is masked in real documentation and code."""
    rng = random.Random(17)
    everything = Mask(**dict.fromkeys(MARKS, True))
    given, found, exact = (Counter[str]() for _ in range(3))
    for _ in range(2000):
        for kind, secret in _personal(rng).items():
            sentence = rng.choice(SENTENCES)
            text, counts = mask_text(sentence.format(secret), everything)
            given[kind] += 1
            found[kind] += not any(secret[at : at + 6] in text for at in range(0, len(secret) - 5))
            exact[kind] += text == sentence.format(MARKS[kind]) and counts == {kind: 1}
    wrong: dict[str, Counter[str]] = {}
    for _ in range(2000):
        for name, harmless in _harmless(rng).items():
            _, counts = mask_text(rng.choice(SENTENCES).format(harmless), everything)
            wrong.setdefault(name, Counter()).update({"given": 1, "masked": bool(counts)})
    real: dict[str, Any] = {}
    for language in ("zh", "en", "code"):
        texts = [text for _, text in real_texts(bench.data, language)]
        counts, samples = Counter[str](), list(_masked_places(texts, everything))
        counts.update(kind for kind, _ in samples)
        for kind in counts:
            print(language, kind, [place for each, place in samples if each == kind][:12], flush=True)
        real[language] = {
            "mb": round(sum(len(text.encode()) for text in texts) / 1e6, 1),
            "masked": dict(counts),
        }
    recall = {kind: {"given": given[kind], "gone": found[kind], "exactly": exact[kind]} for kind in given}
    return {"planted": recall, "harmless": {name: dict(counts) for name, counts in wrong.items()}, "real": real}


def _masked_places(texts: Sequence[str], options: Mask) -> Iterator[tuple[str, str]]:
    for text in texts:
        for line in text.split("\n") if mask_text(text, options)[1] else ():
            masked, counts = mask_text(line, options)
            for kind in counts:
                at = masked.index(MARKS[kind])
                yield kind, f"{masked[max(0, at - 20) : at]}[{line[at : at + 30]}]"


SECTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "near": measure_near,
    "parts": measure_parts,
    "passages": measure_passages,
    "against": measure_against,
    "personal": measure_personal,
}

if __name__ == "__main__":
    main()
