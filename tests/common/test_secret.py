"""The secret of a run: a file that only its user reads, or a variable."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from zero2all.common.errors import UsageError
from zero2all.common.secret import VARIABLE, given_secret, make_secret, shared_secret


def test_all_who_share_a_folder_get_the_one_that_the_first_makes(tmp_path):
    path = tmp_path / "runs" / "run.secret"
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: shared_secret(path), range(64)))
    assert len(set(found)) == 1
    assert len(found[0]) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert shared_secret(tmp_path / "another") != found[0], "two are never alike"


def test_the_file_goes_before_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert given_secret(None) is None
    monkeypatch.setenv(VARIABLE, "of the variable, long enough")
    assert given_secret(None) == b"of the variable, long enough"
    make_secret(tmp_path / "file")
    assert given_secret(tmp_path / "file") == (tmp_path / "file").read_bytes().strip()


def test_a_file_that_others_may_read_is_refused_with_the_remedy(tmp_path):
    make_secret(tmp_path / "file")
    (tmp_path / "file").chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        given_secret(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_that_another_user_has_planted_is_refused(tmp_path):
    make_secret(tmp_path / "file")
    os.chown(tmp_path / "file", 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another user"):
        given_secret(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "short", "x" * 5000], ids=["empty", "short", "long"])
def test_what_is_no_secret_is_refused_with_the_command_that_makes_one(tmp_path, monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match="z2a launch secret"):
        given_secret(None)
    (tmp_path / "file").write_text(text)
    (tmp_path / "file").chmod(0o600)
    with pytest.raises(UsageError, match="z2a launch secret"):
        given_secret(tmp_path / "file")


def test_a_missing_file_a_folder_and_a_fifo_are_named(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("missing", ".", "fifo"):
        with pytest.raises(UsageError, match="secret"):
            given_secret(tmp_path / name)


def test_a_link_is_never_followed_to_write(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        make_secret(tmp_path / "link")
    assert not (tmp_path / "target").exists()
