"""Raw files to clean records: the first stage. docs/architecture.md names its files, one line each.

numba, pyarrow and ray are imported only when they are needed.
"""

# ruff: noqa: F401 - what other rooms import from here

from zero2all.common.engine import EngineConfig
from zero2all.corpus.build import build_corpus, check_sources
from zero2all.corpus.finish import find_record, iter_dropped
from zero2all.corpus.report import read_report, summary_notes, summary_rows
from zero2all.corpus.settings import BuildOptions, BuildSettings, load_settings
from zero2all.corpus.sources import Source, parse_mapping, parse_source, source_from_path
