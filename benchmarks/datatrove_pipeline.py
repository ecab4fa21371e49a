"""datatrove's four MinHash steps and its Gopher repetition and quality filters over one JSONL file.

    python datatrove_pipeline.py INPUT.jsonl FOLDER zh|en

Runs in the virtual environment that `corpus_datatrove` makes: datatrove is no dependency of zero2all. All stages run
one after the other in this process; the last line of output is a JSON object with the CPU seconds of each and the
documents that were left. The filters come last, since they drop most English documentation (words without letters), and
MinHash is to see the whole text, as ours does. For zh the word rules, made for English, are set so that they do not
drop every text.
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
    signed, buckets, removed, final = (str(folder / name) for name in ("signatures", "buckets", "remove", "final"))
    stages = {
        "signatures": [_reader(source), MinhashDedupSignature(signed, config=config, language=code)],
        "buckets": [MinhashDedupBuckets(signed, buckets, config=config)],
        "clusters": [MinhashDedupCluster(buckets, removed, config=config)],
        "filters": [
            _reader(source),
            MinhashDedupFilter(removed),
            GopherRepetitionFilter(language=code),
            GopherQualityFilter(language=code, **QUALITY[language]),
            JsonlWriter(final, output_filename="${rank}.jsonl", compression=None),
        ],
    }
    seconds = {}
    for name, pipeline in stages.items():
        started = time.process_time()
        tasks = config.num_buckets if name == "buckets" else 1
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(folder / "logs" / name)).run()
        seconds[name] = round(time.process_time() - started, 3)
    left = sum(path.read_bytes().count(b"\n") for path in Path(final).glob("*.jsonl"))
    print("\n" + json.dumps({"stage_cpu_seconds": seconds, "documents_left": left}))


def _reader(source: Path) -> JsonlReader:
    return JsonlReader(str(source.parent), glob_pattern=source.name, compression=None)


if __name__ == "__main__":
    main()
