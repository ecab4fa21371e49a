"""Small checkpoints, forged ones, and ranks to save them with."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zero2all.common import jsonio
from zero2all.common.peers import Peers
from zero2all.train.checkpoints import store as store_module
from zero2all.train.checkpoints.manifest import OWN_FIELDS, manifest_bytes
from zero2all.train.checkpoints.run_lock import Fence, no_fence
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore, write_checkpoint

MODEL = "model-00000-00000.safetensors"
RANK = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from zero2all.parallel.parts import Box, TensorPart
from zero2all.parallel.shards import box as box_of, local as local_part
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore
rank, world, meeting, run = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
)
def part_of(tensor):
    place = box_of(tensor)
    box = Box(tuple(along.start for along in place), tuple(along.stop - along.start for along in place))
    return TensorPart(local_part(tensor), tuple(tensor.shape), box)
def parts(tensors):
    return {name: part_of(tensor) for name, tensor in tensors.items()}
"""
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc")


def make_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)
    return {
        "model/blocks.0.weight": weight,
        "model/blocks.0.bias": bias.bfloat16(),
        "model/mask": bias > 0,
        "model/nothing": torch.empty(0, 4),
        "optimizer/exp_avg/blocks.0.weight": weight * 0.5,
        "optimizer/step/blocks.0.weight": torch.tensor(float(seed)),
    }


def snapshot(seed: int, record: dict[str, Any] | None = None) -> Snapshot:
    return Snapshot.of_tensors(make_tensors(seed), record)


@pytest.fixture(scope="session")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 10 and 20. Read only: see `run`."""
    run = tmp_path_factory.mktemp("checkpoints") / "run"
    details = {"inputs": "i", "environment": {"cpu_threads": 1, "machine": "机器"}}
    for step in (10, 20):
        write_checkpoint(run, step, snapshot(step, {"step": step, "tokens": step * 64}), details)
    return run


@pytest.fixture
def run(good_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(good_run, tmp_path / "run")
    return tmp_path / "run"


def reseal(folder: Path, **fields: Any) -> Path:
    """Make a manifest that is right about whatever the files hold now; `fields` replace some of its own."""
    old = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").unlink()
    files = {
        path.name: {"bytes": path.stat().st_size, "crc32c": f"{google_crc32c.value(path.read_bytes()):08x}"}
        for path in folder.iterdir()
        if path.is_file() and path.stat().st_size < 1 << 24
    }
    files = {**files, **fields.pop("files", {})}
    details = {name: value for name, value in old.items() if name not in OWN_FIELDS}
    data = manifest_bytes(old["step"], old["world_size"], files, details)
    if fields:
        body = jsonio.dumps_exact({**json.loads(data), **fields})
        content = {name: value for name, value in json.loads(body).items() if name != "seal"}
        text = jsonio.dumps_exact(content).removesuffix(b"\n}\n")
        data = text + f',\n "seal": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()
    (folder / "manifest.json").write_bytes(data)
    return folder


def set_value(run: Path, step: int, file: str, name: str, value: float, seals: bool = True) -> None:
    """Change one value of a checkpoint, and seal it again: nothing tells that it was not written so."""
    folder = run / f"checkpoints/step-{step:08d}"
    tensors = load_file(folder / file)
    tensors[name].view(-1)[0] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})
    if seals:
        reseal(folder)


class ThreadPeers(Peers):
    """Peers that are threads, with a list in which they gather their values and a barrier."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier, self.control = rank, len(values), values, barrier, None

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = jsonio.loads_exact(jsonio.dumps_exact(value), "what a thread said")
        self._barrier.wait()
        said = list(self._values)
        self._barrier.wait()
        return said


@pytest.fixture
def together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Call work(rank, store) in `world` ranks that share a run; returns what each returned."""
    monkeypatch.setattr(store_module, "open_peers", lambda peers, _timeout: next(peers))

    def call(world: int, work: Callable[[int, CheckpointStore], Any], fences: Sequence[Fence] = ()) -> list[Any]:
        meetings = [([None] * world, threading.Barrier(world, timeout=120)) for _ in range(2)]

        def one_rank(rank: int) -> Any:
            peers = iter([ThreadPeers(rank, *meeting) for meeting in meetings])
            fence = fences[rank] if fences else no_fence
            store = CheckpointStore(tmp_path / "run", peers, say=lambda _: None, fence=fence)  # type: ignore[arg-type]
            try:
                return work(rank, store)
            finally:
                store.close()

        with ThreadPoolExecutor(world) as threads:
            return list(threads.map(one_rank, range(world)))

    return call


@pytest.fixture
def ranks(start: Callable[..., Any], tmp_path: Path) -> Callable[..., list[str]]:
    """Run code in `world` gloo ranks; returns what each printed. `exits` are the exit codes they must end with."""
    meetings = iter(range(100))

    def run_ranks(world: int, run: Path, code: str, exits: tuple[int, ...] | None = None) -> list[str]:
        meeting = tmp_path / f"meeting-{next(meetings)}"
        processes = [start(rank, world, meeting, run, code=RANK + code + "\nos._exit(0)") for rank in range(world)]
        for process, expected in zip(processes, exits or (0,) * world, strict=True):
            assert process.wait() == expected, "\n".join(other.text() for other in processes)
        return [process.text() for process in processes]

    return run_ranks


class Container:
    """A process in a PID namespace of its own, as in a container with the host's network."""

    def __init__(self, code: str, *arguments: object) -> None:
        words = [*UNSHARE, sys.executable, "-c", code, *map(str, arguments)]
        self.outside = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.outside.stdout is not None
        assert self.outside.stdout.readline() == "held\n"

    def kill(self) -> None:
        """Returns when it is gone."""
        for process in psutil.Process(self.outside.pid).children() if self.outside.poll() is None else ():
            process.kill()
        self.outside.wait()


@pytest.fixture
def in_pid_namespace() -> Iterator[Callable[..., Container]]:
    """Starts code in another PID namespace; it prints `held` when it is ready."""
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this system does not allow a PID namespace of its own (`unshare --pid` needs root)")
    started: list[Container] = []

    def start(code: str, *arguments: object) -> Container:
        started.append(Container(code, *arguments))
        return started[-1]

    yield start
    for container in started:
        container.kill()
