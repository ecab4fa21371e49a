"""crc32c in threads: the same number as in one piece."""

from __future__ import annotations

import sys

import google_crc32c
import numpy as np
import pytest

from zero2all.common import checksum


@pytest.mark.parametrize("count", [0, 1, 64, 1000, 4096])
@pytest.mark.parametrize("is_native", [True, False])
def test_pieces_give_the_number_of_the_whole(monkeypatch, count, is_native):
    monkeypatch.setattr(checksum, "PIECE_BYTES", 64)
    if not is_native:
        monkeypatch.setattr(checksum, "_native", lambda: None)
    data = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    assert checksum.crc32c(data, 3) == google_crc32c.value(data.tobytes())
    assert checksum.extended(checksum.extended(0, data[: count // 3]), data[count // 3 :]) == checksum.crc32c(data, 1)


def test_the_library_that_needs_no_interpreter_is_found_where_the_package_brings_it():
    if sys.platform == "linux" and google_crc32c.implementation == "c":  # wheels of other systems keep it elsewhere
        assert checksum._native() is not None
