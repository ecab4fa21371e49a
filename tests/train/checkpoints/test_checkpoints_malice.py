"""Checkpoints made to do harm, with seals and checksums that are right: refused before code runs or memory is taken."""

import json
import os
import pickle
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.checkpoints.conftest import MODEL, reseal
from zero2all.common.errors import BadInputError, UsageError
from zero2all.config import load_config
from zero2all.train.checkpoints.layout import latest_noted
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.retention import pins
from zero2all.train.checkpoints.run_lock import hold_run
from zero2all.train.guards.ledger import DamagedLedgerError, SkipLedger, keep_damaged
from zero2all.train.saved_config import load_run_config

HUGE = 1 << 42
FILES = ("../step-00000010/" + MODEL, "/etc/passwd", "index.json", 7, None)
NAMES = ("model/../../x", "/etc/passwd", "model", "model/a\nb", "../model/a", "model/a\\b", "model//a")


class Malice:
    """Unpickling this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.target, "code was run"))


@pytest.fixture
def folder(run: Path) -> Path:
    return run / "checkpoints/step-00000020"


def refused(folder: Path, match: str) -> None:
    """The checkpoint is refused, and next to no memory was taken for that."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInputError, match=match):
        verified_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "took more than 64 MB"


@pytest.mark.parametrize(
    ("name", "is_sealed", "match"),
    [
        ("index.json", True, "cannot be read as JSON"),
        ("state.json", True, "cannot be read as JSON"),
        (MODEL, True, "not a readable safetensors"),
        ("manifest.json", False, "its checksum differs"),
        (MODEL, False, "bytes, but the manifest says"),
    ],
)
def test_a_pickle_in_any_file_is_refused_and_its_code_does_not_run(folder, tmp_path, name, is_sealed, match):
    trap = tmp_path / "trap"
    bomb = pickle.dumps(Malice(trap))
    (folder / name).write_bytes(bomb)
    refused(reseal(folder) if is_sealed else folder, match)
    assert not trap.exists()
    pickle.loads(bomb)
    assert trap.exists()  # the trap itself works


@pytest.mark.parametrize("name", ["../../lock", "/etc/passwd", "a\x00b", "..", "x" * 500, "", "model.pt", "code.py"])
def test_names_that_lead_elsewhere_are_refused(folder, name):
    reseal(folder, files={name: {"bytes": 1, "crc32c": "00000000"}})
    refused(folder, "which is not a file of a checkpoint")


def box(offset: int, length: int, **other: Any) -> dict[str, Any]:
    return {"offsets": [offset], "shape": [length], "file": MODEL, "key": "mask", **other}


def edit_index(folder: Path, name: str = "model/mask", **facts: Any) -> Path:
    """Give model/mask this name and these facts."""
    index = json.loads((folder / "index.json").read_bytes())
    index["tensors"][name] = {**index["tensors"].pop("model/mask"), **facts}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        *(({"boxes": [box(0, 7, file=file)]}, "which is not a file of a checkpoint") for file in FILES),
        *(({"name": name}, "names a tensor") for name in NAMES),
        ({"shape": [HUGE]}, "do not fill its shape"),
        ({"shape": [1 << 61, 1 << 61]}, "which is too large"),
        *(({"shape": shape}, "impossible shape") for shape in ([1 << 200], [-7], [True], "7", [1] * 17)),
        ({"shape": [8]}, "do not fill"),
        ({"shape": [6]}, "reaches beyond"),
        ({"dtype": "F128"}, "the unknown dtype 'F128'"),
        ({"dtype": ["U8"]}, "unknown dtype"),
        ({"dtype": "F64"}, "header and the index differ"),
        ({"boxes": []}, "do not fill"),
        ({"boxes": None}, "no list of boxes"),
        ({"boxes": [3]}, "has no key"),
        ({"boxes": [box(0, 4), box(3, 3)]}, "overlap"),
        ({"boxes": [box(0, 3), box(4, 3)]}, "do not fill"),
        ({"boxes": [box(0, 7), box(7, 0)]}, "is empty"),
        ({"boxes": [box(3, 7)]}, "reaches beyond"),
        ({"boxes": [box(0, 4), box(4, 3)]}, "have the same key 'mask'"),
        ({"boxes": [box(0, 4, key="a"), box(4, 3, key="b")]}, "header and the index differ"),
        ({"boxes": [box(0, 7, offsets=[0, 0], shape=[7, 1])]}, "another number of dimensions"),
        ({"boxes": [box(0, 7, key=["mask"])]}, "has no key"),
    ],
)
def test_an_index_with_impossible_names_sizes_or_boxes_is_refused(folder, facts, match):
    refused(reseal(edit_index(folder, **facts)), match)


def slot(shape: list[int], *offsets: int, dtype: str = "BOOL") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("slots", "tail", "match"),
    [
        ({"mask": slot([HUGE], 74, 74 + HUGE)}, b"", "describes .* bytes of data"),
        ({"mask": slot([1 << 62, 1 << 62], 74, 81)}, b"", "which cannot be"),
        ({"mask": slot([7], 0, 7)}, b"", "overlap, or leave a hole"),
        ({"mask": slot([7], -7, 0)}, b"", "which cannot be"),
        ({"mask": slot([-7], 81, 74)}, b"", "which cannot be"),
        ({"mask": slot([7, 1], 74, 81)}, b"", "header and the index differ"),
        ({"mask": slot([7], 74, 81, dtype="EVIL")}, b"", "which cannot be"),
        ({"mask": {"dtype": "BOOL", "shape": [7]}}, b"", "which cannot be"),
        ({"mask": []}, b"", "which cannot be"),
        ({"extra": slot([3], 81, 84, dtype="U8")}, b"abc", "differ in 'extra'"),
        ({}, b"abc", "describes 81 bytes of data, the file holds 84"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(folder, slots, tail, match):
    data = (folder / MODEL).read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps({**json.loads(data[8 : 8 + size]), **slots}).encode()
    text += b" " * (-len(text) % 8)
    (folder / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] + tail)
    refused(reseal(folder), match)


@pytest.mark.parametrize("length", [1 << 63, 101_000_000, 0])
def test_a_header_length_that_cannot_be_is_refused(folder, length):
    data = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(length.to_bytes(8, "little") + data[8:])
    refused(reseal(folder), "not a readable safetensors")


@pytest.mark.parametrize("name", ["index.json", "state.json"])
def test_json_without_end_in_depth_or_length_is_refused(folder, name):
    (folder / name).write_bytes(b"[" * 200_000)
    refused(reseal(folder), "cannot be read as JSON")
    with open(folder / name, "wb") as file:
        file.truncate(300 << 20)  # a hole: nothing is on the disk
    refused(reseal(folder, files={name: {"bytes": 300 << 20, "crc32c": "00000000"}}), "no JSON file of a checkpoint")


@pytest.mark.parametrize("facts", [{"bytes": each} for each in (-1, 1 << 70, True, "9")] + [{"crc32c": "zz"}], ids=str)
def test_a_manifest_that_says_nothing_usable_about_a_file_is_refused(folder, facts):
    reseal(folder, files={MODEL: {"bytes": 1, "crc32c": "00000000", **facts}})
    refused(folder, f"has no valid size and checksum of {MODEL}")


def test_a_file_a_thousand_times_longer_than_the_disk_is_refused_by_its_size(folder):
    os.truncate(folder / MODEL, HUGE)  # a hole
    refused(reseal(folder, files={MODEL: {"bytes": 100, "crc32c": "00000000"}}), f"has {HUGE} bytes")
    reseal(folder, files={MODEL: {"bytes": HUGE, "crc32c": "00000000"}})
    refused(folder, r"bytes of data, the file holds")


def test_whatever_is_put_into_the_json_ends_in_a_refusal_or_a_checkpoint(folder):
    rng, refusals = random.Random(7), 0
    for name in ("index.json", "state.json", MODEL):
        good = (folder / name).read_bytes()
        for _ in range(100):
            bad = bytearray(good)
            place, cut = rng.randrange(min(len(bad), 600)), rng.randint(0, 3)
            bad[place : place + cut] = rng.choice((b"", b"null", b"[", b'"', b"-1", b"9" * 30, b"{}", b"e9", b"0"))
            (folder / name).write_bytes(bad)
            try:
                verified_checkpoint(reseal(folder)).tensors("model/")
            except BadInputError:
                refusals += 1
        (folder / name).write_bytes(good)
    assert refusals > 130


@pytest.mark.parametrize("name", ["manifest.json", "state.json", MODEL])
def test_links_and_pipes_in_place_of_files_are_refused_even_with_the_right_content(folder, tmp_path, name):
    shutil.copy(folder / name, tmp_path / "elsewhere")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "elsewhere")
    refused(folder, "is not a regular file")
    (folder / name).unlink()
    os.mkfifo(folder / name)  # opening it would wait for ever
    refused(folder, "is not a regular file")


def test_a_linked_folder_is_refused(run):
    (run / "checkpoints/step-00000020").rename(run / "elsewhere")
    (run / "checkpoints/step-00000020").symlink_to(run / "elsewhere")
    refused(run / "checkpoints/step-00000020", "is not a folder")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"step": 21, "tokens": 1}', "`step` is '21'"),
        ('{"step": "20", "tokens": 1}', "`step` is '20'"),
        ('{"step": 20, "tokens": -1}', "`tokens` is '-1'"),
        ('{"step": 20, "tokens": 1000000000000000000000000000000}', "`tokens` is"),
        ('{"step": 20, "tokens": [1]}', "`tokens` is"),
        ('{"step": 20, "tokens": 1, "guards": [{}]}', "`guards` is"),
        ('{"step": 20, "tokens": 1, "stage": {"a": 1}}', "`stage` is"),
        ('{"step": 20, "tokens": 1, "tokens": 2}', "'tokens' is listed twice"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"x": NaN}', "cannot be read as JSON"),
    ],
)
def test_a_state_that_no_run_would_save_is_refused(folder, text, match):
    (folder / "state.json").write_text(text)
    refused(reseal(folder), match)


def test_a_fifo_in_a_run_folder_is_refused_or_passed_over_and_never_waited_for(run):
    checkpoints = run / "checkpoints"
    (run / "incidents").mkdir(exist_ok=True)
    hints = [run / "last_saved.json", *(checkpoints / f"{name}.json" for name in ("latest", "pins", "proven"))]
    for path in (*hints, run / "incidents/skipped.json", run / "lock"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert latest_noted(run) is None
    with pytest.raises(BadInputError, match=r"pins\.json is not a regular file"):
        pins(run)
    with pytest.raises(DamagedLedgerError, match=r"not a regular file"):
        SkipLedger.load(run / "incidents")
    keep_damaged(run / "incidents/skipped.json")
    with pytest.raises(BadInputError, match=r"lock is not a regular file"), hold_run(run):
        pass
    os.mkfifo(run / "config.yaml")
    with pytest.raises(BadInputError, match=r"(?s)config\.yaml.* is not a regular file"):
        load_run_config(run)
    with pytest.raises(UsageError, match=r"config\.yaml is a pipe or a device"):
        load_config(run / "config.yaml")
