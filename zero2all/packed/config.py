"""Which data a run reads, in which proportion, how it is cut into samples, and how it is fetched."""

from dataclasses import dataclass
from typing import Literal

from zero2all.common.schema import NaturalFloat, PositiveFloat, PositiveInt, Problem


@dataclass(frozen=True)
class DataConfig:
    """The packed sources of a run, mixed by tokens."""

    seq_len: PositiveInt = 2048
    """Tokens per training sample."""
    mixture: dict[str, NaturalFloat] | None = None
    """Weight of each source. The name of a channel gives its weight to its sources, shared by their tokens.
    None weighs sources by their tokens. Weights are rounded to n/65536 and need not sum to one."""
    seed: int = 1234
    """Seed of the shuffle. The sample at each position depends only on this seed, the mixture and the position."""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: windows over the documents in a row, without padding. best_fit: no document is cut unless
    it is longer than a sample; rows are padded, and an index for seq_len must have been built."""
    document_mask: bool = False
    """Attention stops at document borders, and positions begin at 0 with each document."""
    max_epochs: dict[str, PositiveFloat] | None = None
    """How often a source (or each source of a channel) may be read in the whole run. None sets no limit."""
    when_used_up: Literal["error", "share"] = "error"
    """When a source would be read more often than max_epochs. error: stop before step 0; share: from that position on
    the other sources share its weight."""
    prefetch_steps: PositiveInt = 2
    """How many steps to read ahead."""
    readers: PositiveInt = 1
    """Threads (or processes) that read ahead."""
    reader_kind: Literal["thread", "process"] = "thread"
    """Read in threads, or in processes where reading competes with the trainer for Python's lock (rare)."""
    verify_shards: bool = True
    """Check the size and crc32c of every file that is read, once per start, in the background (32 MB per second and
    process). The run stops when a file is damaged."""

    packed: str | None = None
    """Folder or fsspec address (such as s3://bucket/packed) of the packed data. None: that of the workspace."""
    cache: str | None = None
    """Folder for what is fetched from an address. None: packed-cache in the workspace."""
    cache_bytes: PositiveInt = 50_000_000_000
    """Most bytes of remote token shards that the cache holds; the least recently used are removed first."""

    question_frames: dict[str, str] | None = None
    """How the text itself writes a question and its answer, by language: {en: 'Q: {question} A: {answer}'}. In this
    form `z2a chat` asks a model that was not trained on conversations. None: not known; chat continues your text."""

    def problems(self, place: str) -> list[Problem]:
        """A mixture must leave something to read; a frame must end with the answer."""
        expected = "a text such as 'Q: {question} A: {answer}', with {question} in it and {answer} at its end"
        wrong = {
            name: frame
            for name, frame in (self.question_frames or {}).items()
            if isinstance(frame, str) and not ("{question}" in frame and frame.endswith("{answer}"))
        }
        found = [Problem(f"{place}.question_frames.{name}", frame, expected) for name, frame in wrong.items()]
        return found + mixture_problems(self.mixture, f"{place}.mixture")


FREE_ON_RESUME = (
    *("question_frames", "prefetch_steps", "readers", "reader_kind", "verify_shards", "packed", "cache", "cache_bytes"),
)
"""Fields that do not say which samples are read."""


def mixture_problems(mixture: dict[str, float] | None, place: str) -> list[Problem]:
    """What is wrong with a table of weights."""
    if mixture is None or any(weight for weight in mixture.values() if weight):
        return []
    return [Problem(place, mixture, "at least one weight above 0")]
