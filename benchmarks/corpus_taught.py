"""What taught models tell apart, and what they cost a build.

    python -m benchmarks.corpus_taught --repositories FOLDER --raw FILE … --work SCRATCH [--save]

FOLDER has the git directories of the repositories named below, as OWNER+NAME/repo. Nothing of them is kept.

    quality    pages that people edited (guides, concepts, tutorials) against pages that programs or routine made
               (generated reference, release notes) of the same sites. Taught on some sites, judged on others. Also the
               edited pages against themselves with their words (Han characters) in random order.
    cost       CPU seconds of a whole build of the raw files, with one worker: without a score, and with each model;
               of each the lesser of two
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine, save_result
from zero2all.common.files import write_json
from zero2all.corpus import Source
from zero2all.corpus.quality import find_model
from zero2all.corpus.teach import make_model

GENERATED = "reference/(kubectl/generated|kubernetes-api|config-api|command-line-tools-reference|setup-tools/kubeadm)/"
GUIDES = "(concepts|tasks|tutorials|setup|contribute|ops|examples|ambient|overview)/"
SITES = {
    "kubernetes": ("kubernetes+website", rf"^content/en/docs/{GUIDES}.*\.md$", rf"^content/en/docs/{GENERATED}.*\.md$"),
    "argo": (
        "argoproj+argo-cd",
        r"^docs/(?!user-guide/commands|operator-manual/server-commands|snyk|assets).*\.md$",
        r"^docs/(user-guide/commands|operator-manual/server-commands|snyk)/.*\.md$",
    ),
    "django": ("django+django", r"^docs/(topics|howto|intro|faq|internals)/.*\.txt$", r"^docs/releases/.*\.txt$"),
    "istio": (
        "istio+istio.io",
        rf"^content/en/docs/{GUIDES}.*\.md$",
        r"^content/en/(news/releases|docs/reference/config)/.*\.(md|html)$",
    ),
    "pandas": (
        "pandas-dev+pandas",
        r"^doc/source/(user_guide|getting_started|development)/.*\.(rst|md)$",
        r"^doc/source/(whatsnew|reference)/.*\.rst$",
    ),
    "kubernetes zh": (
        "kubernetes+website",
        rf"^content/zh-cn/docs/{GUIDES}.*\.md$",
        rf"^content/zh-cn/docs/{GENERATED}.*\.md$",
    ),
    "istio zh": (
        "istio+istio.io",
        rf"^content/zh/docs/{GUIDES}.*\.md$",
        r"^content/zh/(news/releases|docs/reference/config)/.*\.(md|html)$",
    ),
    "matrixorigin zh": (
        "matrixorigin+matrixorigin.io.cn",
        r"^docs/MatrixOne/(?!Release-Notes|Reference).*\.md$",
        r"^docs/MatrixOne/Release-Notes/.*\.md$",
    ),
    "pingcap zh": (
        "pingcap+docs-cn",
        r"^(?!releases|resources|information-schema|scripts|media|templates|\.)(?!.*(release-notes|TOC|glossary|README|error)).*\.md$",
        r"^releases/.*\.md$",
    ),
}
"""Site -> repository, what people edited, what programs or routine made."""
SPLIT = {
    "en": (("kubernetes", "argo", "django"), ("istio", "pandas")),
    "zh": (("kubernetes zh", "istio zh"), ("pingcap zh", "matrixorigin zh")),
}
"""Sites that are learned from, sites that are judged."""
EXAMPLES, LEAST_CHARS, ROUNDS = 1000, 300, 2


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--raw", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    found: dict[str, Any] = {language: quality(arguments, language) for language in SPLIT}
    found["cost"] = cost(arguments)
    print(machine(), found)
    if arguments.save:
        save_result("corpus_taught", found)


def pages(repository: Path, pattern: str) -> list[str]:
    """The pages of the newest commit whose name fits, without their front matter and comments."""
    git = ["git", "--git-dir", str(repository / "repo")]
    listed = subprocess.run([*git, "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\n") if re.search(pattern, name)]
    asked = "".join(f"HEAD:{name}\n" for name in names).encode()
    data = subprocess.run([*git, "cat-file", "--batch"], input=asked, capture_output=True, check=True).stdout
    at, found = 0, []
    for _ in names:
        line = data.index(b"\n", at)
        size, at = data[at:line].split()[-1], line + 1
        if not size.isdigit():
            continue  # a large file that the copy does not have
        text = data[at : at + int(size)].decode("utf-8", "replace")
        at += int(size) + 1
        text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).strip()
        if len(text) >= LEAST_CHARS:
            found.append(text)
    return found


def shuffled(text: str) -> str:
    """The same words in another order; in Chinese, the same characters."""
    parts = re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+|\s+", text)
    words = [part for part in parts if not part.isspace()]
    random.Random(len(text)).shuffle(words)
    order = iter(words)
    return "".join(part if part.isspace() else next(order) for part in parts)


def auc(above: np.ndarray, below: np.ndarray) -> float:
    """How often a score of `above` is larger than one of `below`; a tie counts half."""
    return round(float(np.sign(above[:, None] - below).mean() / 2 + 0.5), 3)


def quality(arguments: argparse.Namespace, language: str) -> dict[str, Any]:
    """AUC on sites that nothing was learned from."""
    learned, judged = SPLIT[language]
    workspace = arguments.work / language
    workspace.mkdir(parents=True)
    both = {
        site: [pages(arguments.repositories / repository, each) for each in kinds]
        for site, (repository, *kinds) in SITES.items()
        if site in learned + judged
    }
    sources = []
    for kind, name in enumerate(("good", "bad")):
        texts = [text for site in learned for text in both[site][kind]]
        chosen = random.Random(1).sample(texts, min(EXAMPLES, len(texts)))
        write_json(workspace / f"{name}.json", [{"text": text} for text in chosen])
        sources.append(Source(name, workspace / f"{name}.json", language))
    _, report = make_model(sources, workspace)
    make_model([Source("reference", workspace / "good.json", language)], workspace)
    found: dict[str, Any] = {"examples": report["examples"], "auc_held_out": report["auc"]}
    classifier, reference = find_model(workspace, "quality"), find_model(workspace, "reference")
    for site in judged:
        good, bad = (np.array(classifier.scores(texts)) for texts in both[site])
        likely, unlikely = (np.array(reference.scores(texts)) for texts in both[site])
        mixed = np.array(reference.scores([shuffled(text) for text in both[site][0]]))
        found[site] = {
            "pages": [len(good), len(bad)],
            "auc": auc(good, bad),
            "auc_perplexity": auc(likely, unlikely),
            "auc_perplexity_words_in_random_order": auc(likely, mixed),
            "bad_dropped_where_1%_of_good_is": round(float((bad < np.quantile(good, 0.01)).mean()), 3),
            "bad_dropped_where_5%_of_good_is": round(float((bad < np.quantile(good, 0.05)).mean()), 3),
        }
    return found


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of whole builds."""
    workspace = arguments.work / "en"
    ways: dict[str, list[str]] = {
        "without": [],
        "quality": ["--quality.model", "quality"],
        "perplexity": ["--quality.model", "reference"],
    }
    sources = [f"raw{number}={path}" for number, path in enumerate(arguments.raw)]
    command = [
        sys.executable,
        "-m",
        "zero2all",
        "corpus",
        "build",
        *sources,
        "--work",
        str(workspace),
        "--workers",
        "1",
    ]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, flags in ways.items():
            shutil.rmtree(workspace / "corpus", ignore_errors=True)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*command, "--accept-drops", *flags], check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    least = {name: min(values) for name, values in seconds.items()}
    return {
        "raw_mb": round(sum(path.stat().st_size for path in arguments.raw) / 1e6, 1),
        "cpu_seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        "share_of_build": {name: round(1 - least["without"] / value, 3) for name, value in least.items()},
    }


if __name__ == "__main__":
    main()
