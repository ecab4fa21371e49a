"""Raw files to clean records: the first stage.

    readers  any mix of JSON lines, JSON arrays, parquet and plain text -> rows, or damaged items with their place
    sources  what the user named: path, channel, and which raw field is the text
    clean    repair, drop reasons, exact duplicates
    shards   `part-00000.jsonl` files of about 200 MB
    report   what came in, what was kept, what was dropped and why
    build    all of it, source by source, resumable

pyarrow and ijson are imported only when a file needs them.
"""

from zero2all.corpus.build import BuildOptions, build_corpus, check_sources
from zero2all.corpus.record import Record
from zero2all.corpus.report import read_report, summary_notes, summary_rows
from zero2all.corpus.sources import Source, parse_mapping, parse_source, source_from_path

__all__ = [
    "BuildOptions",
    "Record",
    "Source",
    "build_corpus",
    "check_sources",
    "parse_mapping",
    "parse_source",
    "read_report",
    "source_from_path",
    "summary_notes",
    "summary_rows",
]
