"""datatrove's Gopher repetition and quality filters and its four MinHash steps over one JSONL file, as its examples do.

    python datatrove_pipeline.py INPUT.jsonl FOLDER zh|en

Runs in the virtual environment that `corpus_datatrove` makes: datatrove is no dependency of zero2all. All stages run
one after the other in this process; the last line of output is a JSON object with the CPU seconds of each and the
documents that were left. For zh the word rules of the English filters are set so that they do not drop every text.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

LANGUAGES = {"zh": "cmn", "en": "eng"}
QUALITY = {
    "zh": {"min_avg_word_length": 1, "stop_words": list("的是在了不有和人这为"), "min_stop_words": 2},
    "en": {},
}


def main() -> None:
    """Run all stages."""
    source, folder, language = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    code = LANGUAGES[language]
    config = MinhashConfig()
    filtered, signed, buckets, removed, final = (
        str(folder / name) for name in ("filtered", "signatures", "buckets", "remove", "final")
    )
    stages = {
        "filters": [
            _reader(source.parent, source.name),
            GopherRepetitionFilter(language=code),
            GopherQualityFilter(language=code, **QUALITY[language]),
            _writer(filtered),
        ],
        "signatures": [_reader(filtered), MinhashDedupSignature(signed, config=config, language=code)],
        "buckets": [MinhashDedupBuckets(signed, buckets, config=config)],
        "clusters": [MinhashDedupCluster(buckets, removed, config=config)],
        "write": [_reader(filtered), MinhashDedupFilter(removed), _writer(final)],
    }
    seconds = {}
    for name, pipeline in stages.items():
        started = time.process_time()
        tasks = config.num_buckets if name == "buckets" else 1
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(folder / "logs" / name)).run()
        seconds[name] = round(time.process_time() - started, 3)
    documents = {name: _count(folder / name) for name in ("filtered", "final")}
    print("\n" + json.dumps({"stage_cpu_seconds": seconds, "documents": documents}))


def _reader(folder: Path | str, name: str = "*.jsonl") -> JsonlReader:
    return JsonlReader(str(folder), glob_pattern=name, compression=None)


def _writer(folder: str) -> JsonlWriter:
    return JsonlWriter(folder, output_filename="${rank}.jsonl", compression=None)


def _count(folder: Path) -> int:
    return sum(1 for path in folder.glob("*.jsonl") for _ in open(path, "rb"))


if __name__ == "__main__":
    main()
