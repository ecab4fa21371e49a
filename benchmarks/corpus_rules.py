"""What the rules of cleaning drop of good text, by rule, with samples to read.

    python -m benchmarks.corpus_rules verse=FOLDER:zh docs=FOLDER:en --work SCRATCH

Every source (NAME=PATH:CHANNEL, as in `z2a corpus build`) should be text of one kind that is known to be good: a folder
of poems, of classical prose, of documentation. It is built with the default rules and without the search for
duplicates. Printed is the share of documents that each rule dropped; 40 samples a rule, with what it measured, go to
SCRATCH/samples/NAME.RULE.txt. Read them: the shares count whatever was dropped, not whether that was right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from zero2all.common.files import read_json
from zero2all.corpus.clean.config import RULES
from zero2all.corpus.clean.rules import JUDGES

SAMPLES = 40


def main() -> None:
    """Build, print the shares, write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="NAME=PATH:CHANNEL")
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    workspace = arguments.work / "workspace"
    shutil.rmtree(workspace, ignore_errors=True)
    command = [sys.executable, "-m", "zero2all", "corpus", "build", *arguments.sources, "--work", str(workspace)]
    subprocess.run([*command, "--dedup.exact", "false", "--dedup.near", "off"], check=True, stdout=subprocess.DEVNULL)
    report = read_json(workspace / "corpus" / "report.json")
    for name, source in sorted(report["sources"].items()):
        print(in_words(name, source))
        for rule in source["dropped"]:
            write_samples(workspace / "corpus" / name / "dropped" / f"{rule}.jsonl", arguments.work, name, rule)


def in_words(name: str, source: dict[str, Any]) -> str:
    """One line: documents, the share dropped, and that of each rule."""
    records = max(1, source["records_in"])
    dropped = {rule: number for rule, number in source["dropped"].items() if rule in RULES}
    shares = ", ".join(
        f"{rule} {number / records:.2%}" for rule, number in sorted(dropped.items(), key=lambda x: -x[1])
    )
    return f"{name:16} {records:7,} documents, {sum(dropped.values()) / records:6.2%} dropped: {shares or 'none'}"


def write_samples(dropped: Path, work: Path, name: str, rule: str) -> None:
    """The first samples of a rule, each with what the rule compared."""
    if not dropped.exists():
        return
    lines = dropped.read_text(encoding="utf-8").splitlines()[:SAMPLES]
    folder = work / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.{rule}.txt").open("w", encoding="utf-8") as file:
        for line in lines:
            sample = json.loads(line)
            measures = sample.get("measures") or {}
            names = JUDGES[rule].compared.split() if rule in JUDGES else []
            compared = " ".join(f"{each} {measures.get(each, 0):.4g}" for each in names)
            file.write(f"── {compared}\n{sample['excerpt']}\n\n")


if __name__ == "__main__":
    main()
