"""The valid split: a record is held out when its digest falls below `valid_share`.

The choice depends on the text only, so it is the same in every build, and a text can never be on both sides.
"""

from __future__ import annotations

from pathlib import Path

from zero2all.corpus.shards import LineAt, ShardWriter, cut_line

MIN_RECORDS_FOR_VALID = 20
"""A source with fewer records holds none out; one with at least as many holds out at least one."""


class SplitWriter:
    """Sends each record to train or valid by its digest.

    The first records are held back until it is known that there are enough of them to hold some out; and should
    no digest fall below the share, the train record with the smallest one is moved at the end.
    """

    def __init__(self, staging: Path, valid_share: float, shard_bytes: int) -> None:
        self.train = ShardWriter(staging / "train", shard_bytes)
        self.valid = ShardWriter(staging / "valid", shard_bytes)
        self.below = int(valid_share * (1 << 64))
        self.smallest = 1 << 64
        self.smallest_at: LineAt | None = None
        self.held_back: list[tuple[bytes, int]] | None = []

    def write(self, line: bytes, digest: bytes) -> None:
        """Take one record."""
        value = int.from_bytes(digest[:8], "big")
        if self.held_back is None:
            self._place(line, value)
            return
        self.held_back.append((line, value))
        if len(self.held_back) == MIN_RECORDS_FOR_VALID:
            held_back, self.held_back = self.held_back, None
            for pair in held_back:
                self._place(*pair)

    def finish(self) -> None:
        """Write what was held back and make sure that valid is not empty where it should not be."""
        for line, _ in self.held_back or []:
            self.train.write(line)
        self.close()
        if self.held_back is None and self.below and not self.valid.records and self.smallest_at is not None:
            self.valid.write(cut_line(self.smallest_at))
            self.train.records -= 1
            self.close()

    def close(self) -> None:
        """Close both shards."""
        self.train.close()
        self.valid.close()

    def _place(self, line: bytes, value: int) -> None:
        if value < self.below:
            self.valid.write(line)
            return
        place = self.train.write(line)
        if value < self.smallest:
            self.smallest, self.smallest_at = value, place
