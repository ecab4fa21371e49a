"""Downloads, against a small hub on this machine that drops connections, lies, limits and forgets."""

import json
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.corpus_helpers import tree
from tests.corpus.hub_server import HubServer, hub_alone
from tests.waiting import wait_until
from zero2all.common.errors import BadInputError, DiskError, RunLockedError, UsageError, UserError
from zero2all.corpus.download import fetch as download_module
from zero2all.corpus.download.fetch import DownloadRequest, DownloadResult, download
from zero2all.corpus.listing import list_files

KB = 1000
REPO = "me/texts"
noise = [random.Random(seed).randbytes(800 * KB) for seed in range(6)]
FILES = {"README.md": "# 一些文字\n".encode(), "empty.txt": b"", "zh/part 1.parquet": noise[1][: 300 * KB]}
FILES |= {"zh/part-2.parquet": noise[2][: 200 * KB], "en/part-1.parquet": noise[3][: 100 * KB]}
BIG = "zh/part 1.parquet"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_alone(monkeypatch) as server:
        server.put(REPO, FILES)
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "raw"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def fetch(hub: HubServer, folder: Path, said: list[str]) -> Callable[..., DownloadResult]:
    """Download `REPO`, with waits too short to notice."""

    def run(**changes: Any) -> DownloadResult:
        wanted = {"repo": REPO, "folder": folder, "endpoint": hub.endpoint, "first_wait_seconds": 0.001, **changes}
        return download(DownloadRequest(**wanted), said.append)

    return run


def files_asked(hub: HubServer) -> list[str]:
    return [request.name for request in hub.requests if request.name]


def content(folder: Path) -> dict[str, bytes]:
    """The files a person sees: all but our own records."""
    return {name: data for name, data in tree(folder).items() if not name.startswith(".download")}


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / ".download/download.json").read_bytes())


def test_every_file_arrives_and_the_manifest_says_what_it_is(fetch, hub, folder, said, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.endpoint}/")
    hub.page_entries = 2
    result = fetch(endpoint=None)
    assert content(folder) == FILES
    assert {file.name for file in list_files(folder).files} == FILES.keys(), "our records are no text for the corpus"
    facts = manifest(folder)
    assert (facts["repo"], facts["type"], facts["endpoint"]) == (REPO, "dataset", hub.endpoint)
    assert facts["commit"] == result.commit == hub.repos[REPO].head
    assert facts["files"].keys() == FILES.keys()
    assert (facts["files"][BIG]["bytes"], len(facts["files"][BIG]["sha256"])) == (300 * KB, 64)
    assert len(facts["files"]["README.md"]["git_sha1"]) == 40
    assert [path.name for path in (folder / ".download").iterdir()] == ["download.json"]
    assert "5 of 5 files selected, 600.0 KB" in said[0]


def test_patterns_choose_the_files_and_models_come_from_their_own_addresses(fetch, hub, folder, tmp_path):
    fetch(include=("zh/*", "*.md"), exclude=("*part-2*",))
    assert content(folder).keys() == {BIG, "README.md"}
    fetch(include=("en/*",))
    assert content(folder).keys() == manifest(folder)["files"].keys() == {BIG, "README.md", "en/part-1.parquet"}
    hub.put("me/model", {"config.json": b"{}"}, kind="model")
    fetch(repo="me/model", kind="model", folder=tmp_path / "model")
    assert content(tmp_path / "model") == {"config.json": b"{}"}


def test_a_dry_run_lists_and_touches_nothing(hub, folder, z2a):
    words = ["corpus", "download", REPO, "--include", "zh/*", "--endpoint", hub.endpoint, "--out", folder]
    out = z2a.done(*words, "--dry-run")
    assert "part-1.parquet" not in out
    assert "zh/part-2.parquet" in out
    assert "would fetch 2 files, 500.0 KB" in out
    assert not folder.exists()
    assert hub.content_bytes_sent == 0


def test_a_second_run_costs_only_the_listing_and_what_was_removed_or_changed(fetch, hub, folder, said):
    fetch()
    before = tree(folder)
    hub.requests.clear()
    assert fetch().missing == []
    assert files_asked(hub) == []
    assert tree(folder) == before
    (folder / BIG).unlink()
    fetch()
    assert (content(folder), files_asked(hub)) == (FILES, [BIG])
    assert any("changed or removed since" in line for line in said)
    (folder / BIG).write_bytes(bytes(300 * KB))
    assert fetch().missing == [], "its size is the same"
    assert [file.name for file in fetch(verify=True).missing] == [BIG]
    assert content(folder) == FILES
    assert fetch(verify=True).missing == []


def test_files_copied_here_by_hand_are_known_by_their_checksum_and_others_not_overwritten(fetch, hub, folder):
    (folder / "zh").mkdir(parents=True)
    (folder / BIG).write_bytes(FILES[BIG])
    (folder / "README.md").write_text("my own notes")
    with pytest.raises(BadInputError, match=r"zero2all did not download.*README\.md"):
        fetch()
    assert (folder / "README.md").read_text() == "my own notes"
    (folder / "README.md").unlink()
    fetch()
    assert content(folder) == FILES
    assert not hub.asked(BIG)


def test_a_dropped_connection_is_taken_up_in_the_middle_of_the_file(fetch, hub, folder):
    hub.drop_after[BIG] = [100 * KB, 50 * KB, 0, 60 * KB]
    result = fetch(retries=2)  # in a row, and each connection but one brings something
    assert (content(folder), result.interruptions) == (FILES, 4)
    resumed = [f"bytes={start * KB}-{300 * KB - 1}" for start in (100, 150, 150, 210)]
    assert [request.range for request in hub.asked(BIG)] == [None, *resumed]
    assert hub.content_bytes_sent == sum(map(len, FILES.values()))


def test_files_on_another_host_are_resumed_there_and_the_token_is_not_handed_on(fetch, hub, folder, monkeypatch):
    monkeypatch.setenv("MINE", "secret")
    hub.redirects, hub.needs_token = True, "secret"
    hub.drop_after[BIG] = [100 * KB]
    fetch(token_env="MINE")
    assert content(folder) == FILES
    there = [request for request in hub.asked(BIG) if request.path.startswith("/cdn/")]
    assert [request.range for request in there] == [None, f"bytes={100 * KB}-{300 * KB - 1}"]
    assert {request.authorization for request in there} == {None}


def test_a_hub_that_falls_silent_is_asked_again(fetch, hub, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    hub.silent_after[BIG] = 100 * KB
    assert (fetch().interruptions, content(folder)) == (1, FILES)
    assert hub.asked(BIG)[1].range == f"bytes={100 * KB}-{300 * KB - 1}"


def test_a_server_without_ranges_starts_the_file_again_and_says_so(fetch, hub, folder, said):
    hub.has_ranges = False
    hub.drop_after[BIG] = [100 * KB]
    fetch(connections=1)
    assert content(folder) == FILES
    assert [line for line in said if "no Range" in line and BIG in line and "100.0 KB lost" in line]
    assert [request.bytes_sent for request in hub.asked(BIG)] == [100 * KB, 300 * KB]


def test_passing_errors_are_waited_out_as_long_as_the_hub_asks_but_for_hours(fetch, hub, folder, said):
    hub.statuses = {"api": [(503, {}), (502, {})], BIG: [(500, {}), (504, {}), (429, {"Retry-After": "1"})]}
    started = time.monotonic()
    fetch()
    assert time.monotonic() - started >= 1
    assert content(folder) == FILES
    assert any("429" in line and "waiting 1s, as the hub asks" in line for line in said)
    hub.statuses["api"] = [(429, {"RateLimit": '"api";r=0;t=7200'})]
    with pytest.raises(UserError, match="asks to wait 2h00m"):
        fetch()


@pytest.mark.parametrize("name", ["README.md", BIG])
def test_a_wrong_checksum_is_mended_by_fetching_once_more(fetch, hub, folder, said, name):
    hub.corrupt[name] = 1
    fetch()
    assert (content(folder), len(hub.asked(name))) == (FILES, 2)
    assert any(f"{name}: wrong checksum" in line for line in said)


def test_a_file_that_stays_wrong_is_an_error_and_not_left_under_its_name(fetch, hub, folder):
    hub.corrupt[BIG] = 9
    with pytest.raises(BadInputError, match=r"1 of 5 files.*part 1\.parquet: it arrived twice with a wrong checksum"):
        fetch()
    assert len(hub.asked(BIG)) == 2
    assert content(folder).keys() == FILES.keys() - {BIG}
    assert not list((folder / ".download").glob("*.part"))
    assert not (folder / ".download/download.json").exists()
    hub.corrupt.clear()
    hub.statuses[BIG] = [(404, {"X-Error-Code": "EntryNotFound"})]
    with pytest.raises(BadInputError, match=r"part 1\.parquet: the hub lists it but does not have it"):
        fetch()
    hub.requests.clear()
    fetch()
    assert (content(folder), files_asked(hub)) == (FILES, [BIG])


def test_a_hub_that_brings_nothing_is_given_up_and_a_resumed_download_stays_with_its_commit(fetch, hub, folder, said):
    old = hub.repos[REPO].head
    hub.drop_after[BIG] = [100 * KB] + [0] * 10
    with pytest.raises(UserError, match=r"3 tries in a row brought nothing new.*run the same command again"):
        fetch(retries=2)
    assert not (folder / BIG).exists()
    assert not (folder / ".download/download.json").exists()
    hub.drop_after.clear()
    hub.requests.clear()
    new = hub.put(REPO, {name: data + b"new" for name, data in FILES.items()})
    assert fetch().commit == old
    assert content(folder) == FILES
    assert hub.asked(BIG)[0].range == f"bytes={100 * KB}-{300 * KB - 1}"
    assert any(f"main has moved from {old[:12]} to {new[:12]}" in line for line in said)


def test_update_replaces_what_changed_and_keeps_the_rest(fetch, hub, folder):
    fetch()
    newer = {**FILES, "README.md": b"another", "new.txt": b"new"}
    del newer["en/part-1.parquet"]
    new = hub.put(REPO, newer)
    assert fetch().missing == []
    hub.requests.clear()
    fetch(update=True)
    assert (content(folder), manifest(folder)["commit"]) == (newer, new)
    assert set(files_asked(hub)) == {"README.md", "new.txt"}


def test_another_revision_or_repo_is_not_mixed_into_a_folder(fetch, hub):
    first = fetch().commit
    second = hub.put(REPO, {"a": b"b"})
    hub.put("me/others", FILES)
    with pytest.raises(UsageError, match=f"holds commit {first[:12]}.*--update"):
        fetch(revision=second)
    with pytest.raises(UsageError, match="holds the dataset me/texts"):
        fetch(repo="me/others")
    assert fetch(revision=first).missing == []


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"repo": "me/nothing"}, BadInputError, r"has no dataset me/nothing.*--type model"),
        ({"revision": "v9"}, BadInputError, r"has no such revision.*--revision"),
        ({"repo": "a/b/c"}, UsageError, r"is not a valid repo name"),
        ({"endpoint": "http://127.0.0.1:9", "retries": 1}, UserError, r"to http://127\.0\.0\.1:9 failed.*--endpoint"),
        ({"endpoint": "mirror.example"}, UsageError, "is not an address"),
    ],
)
def test_what_is_not_there_says_what_to_check(fetch, folder, asked, error, words):
    with pytest.raises(error, match=words):
        fetch(**asked)
    assert not folder.exists()


def test_a_gated_repo_asks_for_a_token_which_a_mirror_gets_only_by_name(fetch, hub, folder, monkeypatch):
    hub.needs_token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(UserError, match=r"gated.*--token-env"):
        fetch()
    assert {request.authorization for request in hub.requests} == {None}
    with pytest.raises(UsageError, match="MINE, which is not set"):
        fetch(token_env="MINE")
    monkeypatch.setenv("MINE", "wrong")
    with pytest.raises(UserError, match="refuses me/texts with this token"):
        fetch(token_env="MINE")
    fetch(token_env="HF_TOKEN")
    assert content(folder) == FILES


def test_patterns_that_match_nothing_show_what_there_is(fetch):
    with pytest.raises(UsageError) as error:
        fetch(include=("fr/*",), exclude=("*.md",))
    for said in ("matches --include fr/* --exclude *.md", "zh/ (2 files, 500.0 KB)", "README.md"):
        assert said in str(error.value)


@pytest.mark.parametrize(
    "name", ["../outside", "a/../../outside", "/absolute", "a//b", "a\\b", "./a", ".download/plan.json", "a\nb"]
)
def test_names_that_lead_outside_the_folder_are_refused(fetch, hub, folder, tmp_path, name):
    hub.put(REPO, {**FILES, name: b"evil"})
    with pytest.raises(BadInputError, match="outside the folder"):
        fetch()
    assert not content(folder)
    fetch(exclude=(name.replace("\\", "?").replace("\n", "?"),))
    assert content(folder) == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"raw"}


def test_a_disk_without_the_room_is_refused_before_anything_is_fetched(fetch, hub, monkeypatch):
    small = shutil.disk_usage("/")._replace(free=500 * KB)
    monkeypatch.setattr(download_module.shutil, "disk_usage", lambda _: small)
    with pytest.raises(DiskError, match=r"600\.0 KB are left to download, 500\.0 KB are free.*--out"):
        fetch()
    assert hub.content_bytes_sent == 0
    fetch(include=("en/*",))


@pytest.mark.parametrize("size", [-1, 10**17, "5", None, True, 1.5])
def test_a_size_that_cannot_be_is_a_wrong_answer(fetch, hub, folder, size):
    hub.stated_sizes[BIG] = size
    with pytest.raises(UserError, match=r"does not answer like a Hugging Face hub \(ValueError: zh/part 1"):
        fetch()
    assert not folder.exists()


def test_a_server_that_is_no_hub_is_recognised(fetch, hub):
    hub.endless_listing = True
    with pytest.raises(UserError, match="a listing whose pages lead back to themselves"):
        fetch()
    hub.statuses["api"] = [(200, {})]
    with pytest.raises(UserError, match="does not answer like a Hugging Face hub"):
        fetch()


def test_two_downloads_into_one_folder_are_kept_apart(fetch, hub, folder):
    hub.may_send.clear()
    first = threading.Thread(target=fetch, kwargs={"include": (BIG,)})
    first.start()
    wait_until(lambda: hub.asked(BIG))
    with pytest.raises(RunLockedError, match="Another process is downloading"):
        fetch()
    hub.may_send.set()
    first.join()
    assert content(folder) == {BIG: FILES[BIG]}


def arrived(folder: Path) -> list[int]:
    counts = []
    for path in (folder / ".download").glob("*.part"):
        with suppress(FileNotFoundError):  # it is whole now
            counts.append(path.stat().st_size)
    return counts


def test_a_killed_command_goes_on_in_the_middle_of_its_files(hub, folder, start, z2a):
    files = {"a.bin": noise[4], "b.bin": noise[5], "c.txt": b"small"}
    hub.put("me/large", files)
    hub.seconds_per_chunk = 0.05
    words = ["corpus", "download", "me/large", "--out", folder, "--endpoint", hub.endpoint, "--connections", "3"]
    victim = start(*words)
    victim.wait_until(lambda: len(arrived(folder)) == 2 and min(arrived(folder), default=0) >= 200 * KB)
    victim.wait_until((folder / "c.txt").exists)
    victim.signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert content(folder).keys() == {"c.txt"}
    hub.seconds_per_chunk = 0.0
    hub.requests.clear()
    again = z2a(*words)
    assert again.code == 0, again.err
    assert content(folder) == files
    for name in ("a.bin", "b.bin"):
        (request,) = hub.asked(name)
        position = int(request.range.removeprefix("bytes=").split("-")[0])
        assert position >= 200 * KB  # what came later than our last look is kept as well
        assert request.bytes_sent == 800 * KB - position
    assert not hub.asked("c.txt")
    assert "continuing:" in again.err
    assert "3 files, 1.6 MB" in again.out
    assert "nothing to do" in z2a.done(*words)


def test_an_interrupted_command_ends_at_once_and_says_how_to_go_on(hub, folder, start):
    hub.may_send.clear()
    program = start("corpus", "download", REPO, "--out", folder, "--endpoint", hub.endpoint)
    program.wait_until(lambda: bool(hub.asked(BIG)))
    program.signal(signal.SIGINT)
    assert program.wait() == 130, "and the hub has sent nothing"
    hub.may_send.set()
    assert "run the same command again to continue" in program.text()


def test_offline_mode_and_a_missing_library_are_told(hub, folder, monkeypatch, z2a):
    words = ["corpus", "download", REPO, "--out", folder, "--endpoint", hub.endpoint]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "Offline mode is on" in z2a.refused(3, *words)
    assert not hub.requests
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'huggingface_hub" in z2a.refused(3, *words)
