"""Packed data at an address is read as if it lay here, through a cache that keeps within its bound."""

import json
import os
import random
import subprocess
import sys
import uuid

import fsspec
import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.config import DataConfig
from zero2all.packed.loader import Loader, LoaderOptions, read_batch
from zero2all.packed.mixture import open_training_data
from zero2all.packed.remote import BlockCache, open_address, packed_root
from zero2all.packed.shard_format import open_split
from zero2all.packed.stages import Stage

BLOCK = 1024
LIMIT = 40 * BLOCK


@pytest.fixture
def made(by_hand, tmp_path):
    """About 300 blocks of tokens."""
    return by_hand(tmp_path / "packed", {"a": [700] * 100, "talk": [500] * 60}, masked=["talk"])


def upload(made, url):
    for path in made.packed.rglob("*"):
        if path.is_file():
            fsspec.filesystem("memory").pipe_file(f"{url}/{path.relative_to(made.packed)}", path.read_bytes())


@pytest.fixture
def address(made):
    """The same in memory, which is as far away as tests can go."""
    url = f"memory://{uuid.uuid4().hex}/packed"
    upload(made, url)
    return url


def block_bytes(cache):
    return sum(path.stat().st_size for path in (cache / "blocks").glob("*/*"))


def opened(address, cache, source="a"):
    return open_split(open_address(address, cache, LIMIT, BLOCK), source, "train")


def batches(packed, **options):
    data = open_training_data(packed, DataConfig(seq_len=32), [Stage("main", 0, None, 32)])
    loader = Loader(data, 32 * 20, 0, 25, LoaderOptions(documents=True, **options))
    found = [(batch.tokens.copy(), batch.weights.copy(), batch.documents.numbers) for batch in loader]
    loader.close()
    return data.fingerprint, found


def test_tokens_masks_and_borders_are_those_of_the_data_itself(made, address, tmp_path):
    near, far = open_split(made.packed, "talk", "train"), opened(address, tmp_path / "cache", "talk")
    assert far.fingerprint == near.fingerprint
    rng = random.Random(1)
    for _ in range(120):
        start = rng.randrange(near.tokens - 1)
        count = rng.randint(1, min(3000, near.tokens - start))
        assert (far.read(start, count) == near.read(start, count)).all()
        assert (far.read_mask(start, count) == near.read_mask(start, count)).all()
        assert (far.documents_in(start, count)[1] == near.documents_in(start, count)[1]).all()
        assert block_bytes(tmp_path / "cache") <= LIMIT


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_loader_hands_out_the_same_batches(made, tmp_path, kind):
    folder = open_address(f"file://{made.packed}", tmp_path / "cache", LIMIT, BLOCK)  # memory:// ends with its process
    near, far = batches(made.packed), batches(folder, readers=2, reader_kind=kind)
    assert far[0] == near[0]
    for ours, theirs in zip(far[1], near[1], strict=True):
        assert all((one == other).all() for one, other in zip(ours, theirs, strict=True))
    assert 0 < block_bytes(tmp_path / "cache") <= LIMIT


def test_only_what_is_touched_is_fetched_once_and_data_packed_anew_again(by_hand, address, tmp_path, monkeypatch):
    kind, asked = type(fsspec.filesystem("memory")), []
    plain = kind.cat_file
    monkeypatch.setattr(kind, "cat_file", lambda self, path, **how: asked.append(path) or plain(self, path, **how))
    split = opened(address, tmp_path / "cache")
    assert not [path for path in asked if path.endswith((".bin", ".idx"))]
    split.read(100, 200)
    split.read(100, 200)
    assert [path.rsplit("/", 1)[1] for path in asked if path.endswith((".bin", ".idx"))] == ["tokens-00000.bin"]
    assert block_bytes(tmp_path / "cache") == BLOCK
    before = split.read(0, 500)
    other = by_hand(tmp_path / "other", {"a": [700] * 100, "talk": [500] * 60}, masked=["talk"], seed=5)
    upload(other, address)
    after = opened(address, tmp_path / "cache").read(0, 500)
    assert (after == other.tokens["a"][:500]).all()
    assert (after != before).any()


def test_the_blocks_used_last_stay(tmp_path):
    cache = BlockCache(tmp_path, 10 * 100)
    for number in range(10):
        cache.put("key", number, bytes(100))
        os.utime(tmp_path / f"blocks/key/{number:06d}", (number, number))
    assert cache.read("key", 0, 0, 5) == bytes(5)
    cache.put("key", 10, bytes(100))
    kept = {number for number in range(11) if cache.read("key", number, 0, 1) is not None}
    assert {0, 10} <= kept
    assert 1 not in kept
    assert block_bytes(tmp_path) <= 900


WRITER = """
import sys, random
from pathlib import Path
from zero2all.packed.remote import BlockCache
cache = BlockCache(Path(sys.argv[1]), 20_000)
rng = random.Random(int(sys.argv[2]))
for turn in range(250):
    number = rng.randrange(60)
    data = cache.read("key", number, 0, 1000)
    assert data in (None, bytes([number]) * 1000), "never half a block"
    if data is None:
        cache.put("key", number, bytes([number]) * 1000)
"""


def test_processes_share_a_cache_and_a_killed_one_leaves_it_whole(tmp_path):
    def start(seed):
        return subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(seed)])

    first, second = start(1), start(2)
    while not (tmp_path / "blocks/total").exists() and first.poll() is None:
        pass
    first.kill()
    first.wait()
    assert second.wait() == 0
    leftover = tmp_path / "blocks/key/000059.partial-1"
    leftover.write_bytes(b"half")
    assert start(3).wait() == 0
    assert block_bytes(tmp_path) <= 20_000
    assert not leftover.exists()


def test_a_best_fit_index_comes_along(made, tmp_path):
    build_best_fit(open_split(made.packed, "a", "train"), 64)
    folder = open_address(f"file://{made.packed}", tmp_path / "cache", LIMIT, BLOCK)
    config = DataConfig(seq_len=64, packing="best_fit", mixture={"a": 1.0})
    stages = [Stage("main", 0, config.mixture, 64)]
    near, far = (read_batch(open_training_data(each, config, stages), 0, 5).tokens for each in (made.packed, folder))
    assert (near == far).all()


def test_a_changed_index_is_named_when_it_is_fetched_and_a_missing_shard_when_opened(address, made, tmp_path):
    data = bytearray((made.packed / "a/train/docs-00000.idx").read_bytes())
    data[9] ^= 1
    fsspec.filesystem("memory").pipe_file(f"{address}/a/train/docs-00000.idx", bytes(data))
    split = opened(address, tmp_path / "cache")
    with pytest.raises(BadInputError, match=r"a/train/docs-00000\.idx is damaged: .*crc32c differs"):
        split.documents_in(0, 10)
    fsspec.filesystem("memory").rm(f"{address}/a/train/tokens-00003.bin")
    with pytest.raises(BadInputError, match=r"a/train/tokens-00003\.bin is missing"):
        opened(address, tmp_path / "again")


def test_an_address_without_data_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"no finished packed data at memory://nothing"):
        open_address("memory://nothing/here", tmp_path, LIMIT, BLOCK)
    with pytest.raises(UsageError, match="nosuch"):
        open_address("nosuch://nothing/here", tmp_path, LIMIT, BLOCK)


def test_a_network_that_fails_once_is_asked_again(address, tmp_path, monkeypatch):
    files = fsspec.filesystem("memory")
    plain, failures = type(files).cat_file, iter([True, False] * 1000)

    def flaky(self, path, **how):
        if next(failures):
            raise ConnectionError("reset by peer")
        return plain(self, path, **how)

    monkeypatch.setattr("zero2all.packed.remote.FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(type(files), "cat_file", flaky)
    assert len(opened(address, tmp_path / "cache").read(0, 3000)) == 3000


def test_the_config_says_where_the_data_lies(made, tmp_path):
    own = tmp_path / "work/packed"
    assert packed_root(own, DataConfig()) == own
    assert packed_root(own, DataConfig(packed=str(made.packed))) == made.packed
    folder = packed_root(own, DataConfig(packed=f"file://{made.packed}"))
    assert folder.parent == tmp_path / "work/packed-cache"
    assert open_split(folder, "a", "train").tokens == 70000


@pytest.mark.parametrize("report", [{"sources": {"../../up": {}}}, {"sources": {"/abs": {}}}, {"sources": 5}, [], 5])
def test_an_address_whose_report_leads_elsewhere_is_refused_and_writes_nothing(report, tmp_path):
    url = f"memory://{uuid.uuid4().hex}/packed"
    fsspec.filesystem("memory").pipe_file(f"{url}/report.json", json.dumps(report).encode())
    with pytest.raises(BadInputError, match="does not list sources by name"):
        open_address(url, tmp_path / "a/b/cache", LIMIT, BLOCK)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
