"""`z2a eval download`: the files of a public benchmark, from a Hugging Face-style hub into `DATA/NAME`.

Nothing of any data set is part of this package: each keeps the licence its authors gave it. `benchmark.json` beside the
files says where they came from: repository, commit, licence, sizes and checksums. The download itself is that of `z2a
corpus download`: it continues where it was cut off and checks every file.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, UsageError, UserError
from zero2all.common.files import write_json
from zero2all.common.progress import say
from zero2all.common.schema import nearest_hint
from zero2all.corpus.download.fetch import DownloadRequest, download
from zero2all.corpus.download.transfer import digest_of
from zero2all.evals.items import Task
from zero2all.evals.tasks.list import SHARED_FOLDERS, read_task

MANIFEST_NAME = "benchmark.json"
DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.lst", "*.zip")


@dataclass(frozen=True)
class BenchmarkSource:
    """Where a benchmark can be had."""

    repo: str
    """On the hub, as a data set."""
    include: tuple[str, ...] = DATA_FILES
    licence: str = ""
    """As its authors state it; empty: read the repository's card."""


_ARC = BenchmarkSource("allenai/ai2_arc", ("ARC-Easy/*.parquet", "ARC-Challenge/*.parquet"), "CC BY-SA 4.0")
SOURCES = {
    "cmmlu": BenchmarkSource("lmlmcat/cmmlu", ("*.zip",), "CC BY-NC 4.0 on the hub, CC BY-NC-SA 4.0 in its repository"),
    "ceval": BenchmarkSource("ceval/ceval-exam", ("*.zip",), "CC BY-NC-SA 4.0"),
    "mmlu": BenchmarkSource("cais/mmlu", ("all/dev-*", "all/test-*"), "MIT"),
    "arc_easy": _ARC,
    "arc_challenge": _ARC,
    "hellaswag": BenchmarkSource("Rowan/hellaswag", licence="MIT"),
    "piqa": BenchmarkSource("baber/piqa"),
    "winogrande": BenchmarkSource("allenai/winogrande", ("winogrande_xl/*",)),
    "blimp": BenchmarkSource("nyu-mll/blimp", licence="CC BY"),
    "zhoblimp": BenchmarkSource("Junrui1202/zhoblimp"),
    "c3": BenchmarkSource("dataset-org/c3"),
    "cmrc": BenchmarkSource("hfl/cmrc2018", licence="CC BY-SA 4.0"),
    "lambada": BenchmarkSource(
        "EleutherAI/lambada_openai", ("data/lambada_test.jsonl", "data/*_en.jsonl", "default/*")
    ),
    "gsm8k": BenchmarkSource("openai/gsm8k", ("main/*",), "MIT"),
    "humaneval": BenchmarkSource("openai/openai_humaneval", licence="MIT"),
}


def download_benchmark(
    name: str, data: Path, endpoint: str | None = None, announce: Callable[[str], None] = say
) -> Task:
    """Get the files of a benchmark and read them once; the same call again only fetches what is missing.

    `endpoint`: a mirror (None: that of HF_ENDPOINT, or the hub).
    """
    source = SOURCES.get(name)
    if source is None:
        raise UsageError(f"There is no benchmark {name!r} to download. {nearest_hint(name, SOURCES)}")
    folder = data / SHARED_FOLDERS.get(name, name)
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise BadInputError(f"HF_HUB_OFFLINE is set, so nothing is downloaded. {_by_hand(source, folder)}")
    try:
        result = download(
            DownloadRequest(source.repo, folder, include=(*source.include, "README.md"), endpoint=endpoint), announce
        )
    except UserError as error:
        error.args = (f"{error} {_by_hand(source, folder)}",)
        raise
    facts: dict[str, Any] = {
        "name": name,
        "repo": source.repo,
        "commit": result.commit,
        "licence": source.licence or "not known here: read README.md",
        "files": {
            file.name: {"bytes": file.size_bytes, "sha256": digest_of(folder / file.name, "sha256")}
            for file in result.files
        },
    }
    write_json(folder / MANIFEST_NAME, facts)
    return read_task(data, name)


def _by_hand(source: BenchmarkSource, folder: Path) -> str:
    return (
        f"By hand: on a machine with a network, get the files of the data set {source.repo} "
        f"({', '.join(source.include)}) and copy them into {folder}. Files of the benchmark's own repository will do "
        f"as well, and zip files need not be unpacked."
    )
