"""Files and folders appear whole or not at all, whatever happens to the process that writes them."""

import errno
import itertools
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from zero2all.common import checksum
from zero2all.common import files as module
from zero2all.common.errors import BadInputError, DiskError, exceeded_limit, is_disk_full, is_out_of_memory
from zero2all.common.files import crc32c_of, human_bytes, joined_crc32c, require_writable, staged_folder, write_atomic

WRITER_THAT_STOPS_IN_THE_MIDDLE = """
    import sys, time
    from pathlib import Path
    from zero2all.common.files import staged_folder

    with staged_folder(Path(sys.argv[1])) as staging:
        (staging / "new.txt").write_text("half of the new one")
        print("in the middle", flush=True)
        time.sleep(60)
"""


def start_writer(final: Path) -> subprocess.Popen[str]:
    """A process that stands in the middle of writing `final`."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER_THAT_STOPS_IN_THE_MIDDLE), str(final)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    return process


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_killed_writer_leaves_the_folder_of_another_and_the_next_one_sweeps_its_leftover_once_it_is_dead(tmp_path):
    final = tmp_path / "artifact"
    process = start_writer(final)
    assert not final.exists()
    for text in ("older", "the faster of two"):
        with staged_folder(final) as staging:
            (staging / f"{text}.txt").write_text(text)
    assert names(tmp_path) == ["artifact", f"artifact.partial-{process.pid}"], "what a living process writes stays"
    process.kill()
    process.communicate()
    assert names(final) == ["the faster of two.txt"], "nothing of the older one stays"
    module.sweep_partials(final)
    assert names(tmp_path) == ["artifact"]


def test_an_error_in_the_block_leaves_everything_as_it_was(tmp_path):
    final = tmp_path / "deep" / "artifact"
    with staged_folder(final) as staging:
        (staging / "a").write_text("1")
    with suppress(KeyboardInterrupt), staged_folder(final) as staging:
        (staging / "a").write_text("2")
        raise KeyboardInterrupt
    assert (names(final.parent), (final / "a").read_text()) == (["artifact"], "1")


def test_the_sweep_touches_only_leftovers_of_this_name_even_with_odd_characters(tmp_path):
    module.sweep_partials(tmp_path / "absent" / "artifact")
    final = tmp_path / "run [1]*"
    (tmp_path / "run [1]*.partial-trash").mkdir()
    (tmp_path / "run [1]*.partial-old-4194304999").write_text("a file")
    (tmp_path / "run 1.partial-4194304999").mkdir()
    module.sweep_partials(final)
    assert names(tmp_path) == ["run 1.partial-4194304999"]


def test_write_atomic_makes_the_folders_above_and_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, b"a longer first text")
    write_atomic(path, b"second")
    assert (path.read_bytes(), names(path.parent)) == (b"second", ["b.txt"])


def test_a_write_that_the_disk_refuses_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_atomic(path, bytes(100_000))
        assert "at most 1,000 bytes" in exceeded_limit(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["file"])


def test_json_comes_back_as_it_was_written_and_is_readable_for_people(tmp_path):
    value = {"名": "北京", "list": [1, 2.5, None, True]}
    module.write_json(tmp_path / "x.json", value)
    assert module.read_json(tmp_path / "x.json") == value
    assert "北京" in (tmp_path / "x.json").read_text(encoding="utf-8")
    assert len((tmp_path / "x.json").read_text(encoding="utf-8").splitlines()) > 4
    with pytest.raises(FileNotFoundError):
        module.read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe", b"[NaN]"], ids=["empty", "cut", "not utf-8", "nan"])
def test_damaged_json_names_the_file_and_says_what_to_do(tmp_path, content):
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"report\.json cannot be read as JSON .*Delete it and run its stage again"):
        module.read_json(path)


def test_crc32c_is_the_one_of_the_standard_and_that_of_parts_joins_to_it(tmp_path):
    (tmp_path / "x").write_bytes(b"123456789")
    assert crc32c_of(tmp_path / "x") == "e3069283"  # the check value of CRC-32C (Castagnoli)
    (tmp_path / "empty").write_bytes(b"")
    assert crc32c_of(tmp_path / "empty") == joined_crc32c([]) == "00000000"
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 40)
    cuts = [0, 0, 1, 2, 700, 701, 9000, 10240]
    parts = [(crc32c_of(path, start, end), end - start) for start, end in itertools.pairwise(cuts)]
    assert joined_crc32c(parts) == crc32c_of(path)


@pytest.mark.parametrize("is_native", [True, False])
def test_crc32c_in_threads_is_the_number_of_the_whole(monkeypatch, is_native):
    monkeypatch.setattr(checksum, "PIECE_BYTES", 64)
    if not is_native:
        monkeypatch.setattr(checksum, "_native", lambda: None)
    elif sys.platform == "linux" and google_crc32c.implementation == "c":  # other wheels keep their library elsewhere
        assert checksum._native() is not None, "the library that needs no interpreter is found"
    for count in (0, 1, 64, 1000, 4096):
        data = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
        assert checksum.crc32c(data, 3) == google_crc32c.value(data.tobytes())
        extended = checksum.extended(checksum.extended(0, data[: count // 3]), data[count // 3 :])
        assert extended == checksum.crc32c(data, 1)


def test_asking_for_more_room_than_the_disk_has_names_both_figures_in_words(tmp_path):
    place = tmp_path / "not" / "yet" / "there"
    free = human_bytes(shutil.disk_usage(tmp_path).free).split()[1]
    with pytest.raises(DiskError, match=rf"for the corpus: .* 1000000\.0 TB under {place}, and .* {free} are free"):
        module.require_free_space(place, 10**18, "the corpus")
    assert not place.exists()
    module.require_free_space(place, 1000, "enough room is no news")
    counts = {0: "0 B", 999: "999 B", 1536: "1.5 KB", 999_999: "1.0 MB", 3.2e9: "3.2 GB", 5e15: "5000.0 TB"}
    assert {count: human_bytes(count) for count in counts} == counts


def test_a_result_can_be_put_into_new_folders_and_over_older_files(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "old.json")
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nothing")
    for name in ("old.json", "new.json", "a/b/c/new.json", "link.json", "dangling.json"):
        require_writable(tmp_path / name, "--json")
    for name in ("new", "a/b/c", "."):
        require_writable(tmp_path / name, "--out", is_folder=True)
    assert not (tmp_path / "a").exists(), "a check writes nothing"


def test_a_result_that_could_not_be_put_there_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "nowhere").symlink_to(tmp_path / "nothing")
    for path, is_folder, words in (
        ("file/a/b/c", True, "is a file, so nothing can be written below it"),
        (".", False, "is not a regular file"),
        ("file", True, "is not a folder"),
        ("fifo", False, "is not a regular file"),
        ("nowhere", True, "a broken link"),
        ("n" * 250, False, "longer than 200 bytes"),
    ):
        with pytest.raises(BadInputError, match=words) as caught:
            require_writable(tmp_path / path, "--out", is_folder)
        assert str(caught.value).startswith(f"--out {tmp_path}")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_result_in_a_folder_of_the_kernel_is_refused_before_the_work(is_folder):
    for place in ("/proc", "/proc/self/net/below"):
        with pytest.raises(BadInputError, match=r"cannot be written to|nothing can be written below"):
            require_writable(Path(place) / "out", "--out", is_folder)


def test_want_of_memory_is_recognised_in_the_shapes_libraries_give_it():
    wrapped = ValueError("something")
    wrapped.__cause__ = MemoryError()
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried …"),
        RuntimeError("unable to mmap 128 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        wrapped,
    ):
        assert is_out_of_memory(error), error
    for error in (ValueError("out of memory"), RuntimeError("shapes differ"), OSError(errno.ENOENT, "x")):
        assert not is_out_of_memory(error), error
        assert exceeded_limit(error) is None


def test_a_full_disk_and_a_limit_of_the_process_are_recognised_where_a_library_passes_them_on():
    assert is_disk_full(OSError(28, "No space left on device"))
    assert is_disk_full(Exception("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert is_disk_full(OSError("10 requested and 4 written"))
    assert not is_disk_full(Exception("Permission denied (os error 13)"))
    gloo = RuntimeError("[enforce fail at gloo/transport/tcp/loop.cc:105] fd_ != -1. epoll_create: Too many open files")
    assert "`ulimit -n 4096`" in exceeded_limit(gloo)
    assert exceeded_limit(OSError(errno.ENOSPC, "No space left on device")) is None
    assert not is_disk_full(OSError(errno.EFBIG, "File too large"))
