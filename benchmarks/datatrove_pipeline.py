"""datatrove's Gopher repetition and quality filters and its four MinHash steps over one JSONL file.

    python datatrove_pipeline.py INPUT.jsonl FOLDER zh|en filters-first|minhash-first

Runs in the virtual environment that `corpus_datatrove` makes: datatrove is no dependency of zero2all. All stages run
one after the other in this process; the last line of output is a JSON object with the CPU seconds of each and the
documents that were left. The order matters for the time: the filters drop most English documentation (words without
letters), so behind them MinHash has little to do; before them it sees the whole text, as ours does. For zh the word
rules, made for English, are set so that they do not drop every text.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
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
from datatrove.utils.word_tokenizers import load_word_tokenizer

LANGUAGES = {"zh": "cmn", "en": "eng"}
QUALITY = {
    "zh": {"min_avg_word_length": 1, "stop_words": list("的是在了不有和人这为"), "min_stop_words": 2},
    "en": {},
}


def main() -> None:
    """Run all stages."""
    source, folder, language, order = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    filtered, final = folder / "filtered" / "00000.jsonl", folder / "final" / "00000.jsonl"
    seconds: dict[str, float] = {}
    if order == "filters-first":
        _run(folder, seconds, "filters", [_reader(source), *_filters(language), _writer(filtered)])
        removed = _minhash(filtered, folder, language, seconds)
        _run(folder, seconds, "write", [_reader(filtered), MinhashDedupFilter(removed), _writer(final)])
    else:
        removed = _minhash(source, folder, language, seconds)
        blocks = [_reader(source), MinhashDedupFilter(removed), *_filters(language), _writer(final)]
        _run(folder, seconds, "filters", blocks)
    left = final.read_bytes().count(b"\n") if final.exists() else 0
    print("\n" + json.dumps({"stage_cpu_seconds": seconds, "documents_left": left}))


def _minhash(source: Path, folder: Path, language: str, seconds: dict[str, float]) -> str:
    """Signatures, buckets, clusters; returns the folder that says which documents to remove."""
    signed, buckets, removed = (str(folder / name) for name in ("signatures", "buckets", "remove"))
    config = MinhashConfig()
    load_word_tokenizer.cache_clear()  # a splitter that has been used cannot be copied, and the executor copies it
    signature = MinhashDedupSignature(signed, config=config, language=LANGUAGES[language])
    _run(folder, seconds, "signatures", [_reader(source), signature])
    _run(folder, seconds, "buckets", [MinhashDedupBuckets(signed, buckets, config=config)], config.num_buckets)
    _run(folder, seconds, "clusters", [MinhashDedupCluster(buckets, removed, config=config)])
    return removed


def _run(folder: Path, seconds: dict[str, float], name: str, blocks: list[PipelineStep], tasks: int = 1) -> None:
    """One stage; notes its CPU time."""
    started = time.process_time()
    LocalPipelineExecutor(blocks, tasks=tasks, workers=1, logging_dir=str(folder / "logs" / name)).run()
    seconds[name] = round(time.process_time() - started, 3)


def _filters(language: str) -> list[PipelineStep]:
    code = LANGUAGES[language]
    return [GopherRepetitionFilter(language=code), GopherQualityFilter(language=code, **QUALITY[language])]


def _writer(path: Path) -> JsonlWriter:
    return JsonlWriter(str(path.parent), output_filename="${rank}.jsonl", compression=None)


def _reader(source: Path) -> JsonlReader:
    return JsonlReader(str(source.parent), glob_pattern=source.name, compression=None)


if __name__ == "__main__":
    main()
