"""Checkpoints made to do harm, with seals and checksums that are right: refused before code runs or memory is taken."""

import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.config import load_config
from zero2all.train.checkpoints.layout import latest_noted
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.retention import pins
from zero2all.train.checkpoints.run_lock import hold_run
from zero2all.train.guards.ledger import DamagedLedgerError, SkipLedger, keep_damaged
from zero2all.train.saved_config import load_run_config

MODEL = "model-00000-00000.safetensors"
HUGE = 1 << 42


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


# ---- pickles ----


@pytest.mark.parametrize(
    "name", ["index.json", "state.json", "manifest.json", MODEL, "optimizer-00000-00000.safetensors"]
)
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_pickle_in_any_file_is_refused_and_its_code_does_not_run(folder, tmp_path, reseal, name, is_sealed):
    trap = tmp_path / "trap"
    bomb = pickle.dumps(Malice(trap))
    (folder / name).write_bytes(bomb)
    if is_sealed and name != "manifest.json":
        reseal(folder)
    refused(
        folder, r"not a readable safetensors|cannot be read as JSON|its checksum differs|bytes, but the manifest says"
    )
    assert not trap.exists()
    pickle.loads(bomb)
    assert trap.exists()  # the trap itself works


@pytest.mark.parametrize("name", ["model.pt", ".metadata", "__0_0.distcp", "code.py", "config.json"])
def test_files_that_no_checkpoint_has_are_refused(folder, reseal, name):
    (folder / name).write_bytes(b"x")
    refused(reseal(folder), "which is not a file of a checkpoint")


# ---- names ----


@pytest.mark.parametrize("name", ["../../lock", "/etc/passwd", "model/../x.safetensors", "a\x00b", "..", "x" * 500, ""])
def test_names_that_lead_elsewhere_are_refused(folder, reseal, name):
    reseal(folder, files={name: {"bytes": 1, "crc32c": "00000000"}})
    refused(folder, "which is not a file of a checkpoint")


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    index = json.loads((folder / "index.json").read_bytes())
    change(index["tensors"])
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("file", ["../step-00000010/" + MODEL, "/etc/passwd", "index.json", 7, None])
def test_an_index_that_points_elsewhere_is_refused(folder, reseal, file):
    def change(tensors):
        tensors["model/mask"]["boxes"][0]["file"] = file

    refused(reseal(edit_index(folder, change)), "which is not a file of a checkpoint")


@pytest.mark.parametrize(
    "name", ["model/../../x", "/etc/passwd", "model", "model/a\nb", "../model/a", "model/a\\b", "model//a"]
)
def test_tensor_names_that_could_be_paths_are_refused(folder, reseal, name):
    def change(tensors):
        tensors[name] = tensors.pop("model/mask")

    refused(reseal(edit_index(folder, change)), "names a tensor")


# ---- sizes ----


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("shape", [HUGE], "do not fill its shape"),
        ("shape", [1 << 61, 1 << 61], "which is too large"),
        ("shape", [1 << 200], "impossible shape"),
        ("shape", [-7], "impossible shape"),
        ("shape", [7.0], "impossible shape"),
        ("shape", [True], "impossible shape"),
        ("shape", "7", "impossible shape"),
        ("shape", [1] * 17, "impossible shape"),
        ("shape", None, "impossible shape"),
        ("shape", [8], "do not fill"),
        ("shape", [6], "reaches beyond"),
        ("dtype", "F128", "the unknown dtype 'F128'"),
        ("dtype", "os.system", "unknown dtype"),
        ("dtype", ["U8"], "unknown dtype"),
        ("dtype", "F64", "header and the index differ"),
        ("boxes", [], "do not fill"),
        ("boxes", None, "no list of boxes"),
        ("boxes", [3], "has no key"),
    ],
)
def test_an_index_with_impossible_sizes_is_refused(folder, reseal, name, value, match):
    def change(tensors):
        tensors["model/mask"][name] = value

    refused(reseal(edit_index(folder, change)), match)


def box(offset: int, length: int, **other: Any) -> dict[str, Any]:
    return {"offsets": [offset], "shape": [length], "file": MODEL, "key": "mask", **other}


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([box(0, 4), box(3, 3)], "overlap"),
        ([box(0, 4), box(0, 3)], "overlap"),
        ([box(0, 3), box(4, 3)], "do not fill"),
        ([box(0, 7), box(7, 0)], "is empty"),
        ([box(3, 7)], "reaches beyond"),
        ([box(0, 4), box(4, 3)], "have the same key 'mask'"),
        ([box(0, 4, key="a"), box(4, 3, key="b")], "header and the index differ"),
        ([box(0, 7, offsets=[0, 0], shape=[7, 1])], "another number of dimensions"),
        ([box(0, 7, key=["mask"])], "has no key"),
    ],
)
def test_boxes_that_do_not_fill_their_tensor_once_are_refused(folder, reseal, boxes, match):
    def change(tensors):
        tensors["model/mask"]["boxes"] = boxes

    refused(reseal(edit_index(folder, change)), match)


def forge_header(folder: Path, change: Callable[[dict[str, Any]], None], tail: bytes = b"") -> Path:
    path = folder / MODEL
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] + tail)
    return folder


@pytest.mark.parametrize(
    ("slot", "match"),
    [
        ({"dtype": "BOOL", "shape": [HUGE], "data_offsets": [74, 74 + HUGE]}, "describes .* bytes of data"),
        ({"dtype": "BOOL", "shape": [HUGE], "data_offsets": [74, 81]}, "which cannot be"),
        ({"dtype": "BOOL", "shape": [1 << 62, 1 << 62], "data_offsets": [74, 81]}, "which cannot be"),
        ({"dtype": "BOOL", "shape": [7], "data_offsets": [0, 7]}, "overlap, or leave a hole"),
        ({"dtype": "BOOL", "shape": [7], "data_offsets": [75, 82]}, "overlap, or leave a hole"),
        ({"dtype": "BOOL", "shape": [7], "data_offsets": [-7, 0]}, "which cannot be"),
        ({"dtype": "BOOL", "shape": [-7], "data_offsets": [81, 74]}, "which cannot be"),
        ({"dtype": "BOOL", "shape": [7, 1], "data_offsets": [74, 81]}, "header and the index differ"),
        ({"dtype": "EVIL", "shape": [7], "data_offsets": [74, 81]}, "which cannot be"),
        ({"dtype": "U8", "shape": [7], "data_offsets": [74, 81]}, "header and the index differ"),
        ({"dtype": "BOOL", "shape": [7]}, "which cannot be"),
        ([], "which cannot be"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(folder, reseal, slot, match):
    refused(reseal(forge_header(folder, lambda header: header.update(mask=slot))), match)


def test_tensors_beyond_the_index_and_bytes_beyond_the_tensors_are_refused(folder, reseal):
    extra = {"dtype": "U8", "shape": [3], "data_offsets": [81, 84]}
    good = (folder / MODEL).read_bytes()
    refused(reseal(forge_header(folder, lambda header: header.update(extra=extra), b"abc")), "differ in 'extra'")
    (folder / MODEL).write_bytes(good + b"abc")
    refused(reseal(folder), "describes 81 bytes of data, the file holds 84")


@pytest.mark.parametrize("length", [1 << 63, 1 << 40, 101_000_000, 0])
def test_a_header_length_that_cannot_be_is_refused(folder, reseal, length):
    data = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(length.to_bytes(8, "little") + data[8:])
    refused(reseal(folder), "not a readable safetensors")


@pytest.mark.parametrize("name", ["index.json", "state.json"])
def test_json_without_end_in_depth_or_length_is_refused(folder, reseal, name):
    (folder / name).write_bytes(b"[" * 200_000)
    refused(reseal(folder), "cannot be read as JSON")
    with open(folder / name, "wb") as file:
        file.truncate(300 << 20)  # a hole: nothing is on the disk
    refused(reseal(folder, files={name: {"bytes": 300 << 20, "crc32c": "00000000"}}), "no JSON file of a checkpoint")


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"x": NaN}'])
def test_a_document_must_be_a_json_object(folder, reseal, text):
    (folder / "state.json").write_text(text)
    refused(reseal(folder), "not a JSON object|cannot be read as JSON")


@pytest.mark.parametrize(
    "facts", [{"bytes": -1}, {"bytes": 1 << 70}, {"bytes": True}, {"crc32c": "zz"}, {"bytes": "9"}]
)
def test_a_manifest_that_says_nothing_usable_about_a_file_is_refused(folder, reseal, facts):
    reseal(folder, files={MODEL: {"bytes": 1, "crc32c": "00000000", **facts}})
    refused(folder, f"has no valid size and checksum of {MODEL}")


def test_a_file_a_thousand_times_longer_than_the_disk_is_refused_by_its_size(folder, reseal):
    os.truncate(folder / MODEL, HUGE)  # a hole
    refused(reseal(folder, files={MODEL: {"bytes": 100, "crc32c": "00000000"}}), f"has {HUGE} bytes")
    reseal(folder, files={MODEL: {"bytes": HUGE, "crc32c": "00000000"}})
    refused(folder, r"bytes of data, the file holds")


def test_whatever_is_put_into_the_json_ends_in_a_refusal_or_a_checkpoint(folder, reseal):
    rng = random.Random(7)
    refusals = 0
    for name in ("index.json", "state.json", MODEL):
        good = (folder / name).read_bytes()
        for _ in range(150):
            bad = bytearray(good)
            place = rng.randrange(min(len(bad), 600))
            bad[place : place + rng.randint(0, 3)] = rng.choice(
                [b"", b"null", b"[", b'"', b"-1", b"9" * 30, b"{}", b"e9", b"0"]
            )
            (folder / name).write_bytes(bad)
            try:
                verified_checkpoint(reseal(folder)).tensors("model/")
            except BadInputError:
                refusals += 1
        (folder / name).write_bytes(good)
    assert refusals > 200


# ---- links and devices ----


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "state.json", MODEL])
def test_links_and_pipes_in_place_of_files_are_refused_even_with_the_right_content(folder, tmp_path, reseal, name):
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


# ---- the state, sealed anew ----


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"step": 21}, "`step` is '21'"),
        ({"step": "20"}, "`step` is '20'"),
        ({"step": None}, "`step` is 'None'"),
        ({"tokens": -1}, "`tokens` is '-1'"),
        ({"tokens": 10**30}, "`tokens` is"),
        ({"tokens": [1]}, "`tokens` is"),
        ({"guards": 5}, "`guards` is '5'"),
        ({"guards": [{}]}, "`guards` is"),
        ({"stage": {"a": 1}}, "`stage` is"),
    ],
)
def test_a_state_that_no_run_would_save_is_refused(folder, reseal, change, match):
    state = json.loads((folder / "state.json").read_bytes())
    (folder / "state.json").write_text(json.dumps({**state, **change}))
    refused(reseal(folder), match)


def test_a_name_that_stands_twice_in_the_state_is_refused(folder, reseal):
    (folder / "state.json").write_text('{"step": 20, "tokens": 1, "tokens": 2}')
    refused(reseal(folder), "'tokens' is listed twice")


# ---- files that are none ----


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
