"""Reading processes: replaced when killed, gone when the trainer is, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.waiting import wait_until
from zero2all.common.errors import BadInputError
from zero2all.packed import readers as readers_module
from zero2all.packed.config import DataConfig
from zero2all.packed.loader import Loader, LoaderOptions, read_batch
from zero2all.packed.mixture import open_training_data
from zero2all.packed.stages import Stage

SEQ_LEN = 16
SAMPLES = 4
STEP = SAMPLES * SEQ_LEN


def open_data(made):
    return open_training_data(made.packed, DataConfig(seq_len=SEQ_LEN), [Stage("main", 0, None, SEQ_LEN)])


@pytest.fixture(scope="module")
def data(by_hand, tmp_path_factory):
    return open_data(by_hand(tmp_path_factory.mktemp("readers"), {"a": [30] * 200}))


def reading_processes(of: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(of).children() if "zero2all.packed.readers" in " ".join(child.cmdline())]


def test_a_reader_that_is_killed_is_replaced_and_no_batch_is_lost_or_changed(data):
    said: list[str] = []
    options = LoaderOptions(reader_kind="process", prefetch_steps=1)
    loader = Loader(data, STEP, 0, 6, options, on_problem=said.append)
    killed = 0
    for number, batch in enumerate(loader):
        assert np.array_equal(batch.tokens, read_batch(data, number * STEP, SAMPLES).tokens)
        if number in (1, 3):
            (reader,) = reading_processes(os.getpid())
            reader.kill()
            killed += 1
    loader.close()
    assert killed == 2
    assert said == ["a reader process ended (SIGKILL); another one takes over"] * 2
    assert reading_processes(os.getpid()) == []


def test_readers_that_keep_dying_end_the_run_with_the_way_on(data, monkeypatch):
    monkeypatch.setattr(readers_module, "START", "import os; os.kill(os.getpid(), 9)")
    said: list[str] = []
    loader = Loader(data, STEP, 0, 6, LoaderOptions(reader_kind="process"), on_problem=said.append)
    with pytest.raises(BadInputError, match=r"4 times in a row .*SIGKILL.*data\.reader_kind to thread"):
        next(iter(loader))
    assert len(said) == readers_module.RETRIES
    loader.close()


def test_an_error_in_a_reader_reaches_the_trainer(by_hand, tmp_path):
    data = open_data(by_hand(tmp_path, {"a": [30] * 20}))
    for shard in (tmp_path / "a/train").glob("tokens-*.bin"):
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    loader = Loader(data, STEP, 0, 6, LoaderOptions(reader_kind="process"))
    with pytest.raises(BadInputError, match="has the id 65535"):
        next(iter(loader))
    loader.close()


TRAINER = """
import pickle, sys, time
from zero2all.packed.loader import Loader, LoaderOptions
if __name__ == "__main__":
    data = pickle.load(open(sys.argv[1], "rb"))
    options = LoaderOptions(reader_kind="process", readers=2, prefetch_steps=4)
    batches = iter(Loader(data, 64, 0, 10**9, options))
    for _ in range(8):
        next(batches)
    print("reading", flush=True)
    for _ in batches:
        time.sleep(0.002)
"""


def test_readers_of_a_trainer_that_is_killed_end_by_themselves_and_leave_nothing_in_shared_memory(data, tmp_path):
    (tmp_path / "data.pickle").write_bytes(pickle.dumps(data))
    script = tmp_path / "trainer.py"  # a file, for processes that import their parent's main module
    script.write_text(TRAINER)
    trainer = subprocess.Popen([sys.executable, script, tmp_path / "data.pickle"], stdout=subprocess.PIPE)
    assert trainer.stdout.readline() == b"reading\n"
    processes = reading_processes(trainer.pid)
    assert len(processes) == 2
    mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in (trainer.pid, *(each.pid for each in processes))]
    trainer.send_signal(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
    trainer.stdout.close()
    wait_until(lambda: not any(each.is_running() for each in processes))
    assert not any("/dev/shm/" in text for text in mapped)
