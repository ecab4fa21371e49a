"""A manifest says that a folder is whole, what it was made from, and what every file of it must look like."""

import os
from pathlib import Path

import pytest

from zero2all import __version__
from zero2all.common import manifest as module
from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json, write_json
from zero2all.common.manifest import fingerprint, is_current, read_manifest, verify_files, write_manifest

COMMAND = "z2a pack"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = tmp_path / "artifact"
    (folder / "inner").mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(b"0123456789")
    (folder / "inner" / "docs.idx").write_bytes(b"abc")
    write_manifest(folder, "packed", "made-from-this", {"tokens": 5})
    return folder


def change(folder: Path, **values: object) -> None:
    write_json(folder / module.MANIFEST_NAME, {**read_json(folder / module.MANIFEST_NAME), **values})


def refused(folder: Path, kind: str = "packed") -> str:
    with pytest.raises(BadInputError) as caught:
        read_manifest(folder, kind, COMMAND)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_manifest_describes_every_file_and_keeps_what_the_stage_adds(artifact):
    manifest = read_manifest(artifact, "packed", COMMAND)
    assert (manifest["tokens"], manifest["inputs"], manifest["zero2all"]) == (5, "made-from-this", __version__)
    assert manifest["format"] == module.FORMATS["packed"]
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == {"inner/docs.idx": 3, "tokens.bin": 10}


def test_an_absent_manifest_and_that_of_another_kind_name_the_command_and_half_of_one_is_damaged(artifact, tmp_path):
    assert f"no finished packed in {tmp_path} (no manifest.json). Run `{COMMAND}` first" in refused(tmp_path)
    message = refused(artifact, kind="checkpoint")
    assert "does not describe a checkpoint (kind: packed)" in message
    assert f"`{COMMAND}`" in message
    for foreign in ([1, 2, 3], {"name": "somebody's package"}):
        write_json(artifact / module.MANIFEST_NAME, foreign)
        assert "(kind: None)" in refused(artifact)
    (artifact / module.MANIFEST_NAME).write_bytes(b'{"kind": "pac')
    assert "cannot be read as JSON" in refused(artifact)


def test_another_format_version_says_both_versions_and_what_to_do(artifact):
    change(artifact, format=99, zero2all="7.8.9")
    message = refused(artifact)
    assert "written by zero2all 7.8.9 in packed format 99" in message
    assert f"this is zero2all {__version__}, which reads format {module.FORMATS['packed']}" in message
    assert f"Run `{COMMAND}` again" in message


def test_a_whole_folder_from_the_same_inputs_is_current_and_one_of_other_inputs_kind_or_format_is_not(artifact):
    assert is_current(artifact, "packed", "made-from-this")
    assert not is_current(artifact, "packed", "made-from-that")
    assert not is_current(artifact, "corpus", "made-from-this")
    change(artifact, format=99)
    assert not is_current(artifact, "packed", "made-from-this")
    (artifact / module.MANIFEST_NAME).write_bytes(b"{")
    assert not is_current(artifact, "packed", "made-from-this")
    assert not is_current(artifact / "nowhere", "packed", "made-from-this")


def test_a_missing_file_a_changed_size_and_one_flipped_bit_are_all_found_and_only_the_bit_leaves_it_current(artifact):
    def problems() -> list[str]:
        return verify_files(artifact, read_manifest(artifact, "packed", COMMAND))

    assert problems() == []
    (artifact / "tokens.bin").write_bytes(b"0123456788")
    assert "tokens.bin has changed since it was written (crc32c differs)" in problems()[0]
    assert is_current(artifact, "packed", "made-from-this")
    (artifact / "tokens.bin").write_bytes(b"01234567891")
    assert "tokens.bin has 11 bytes, its manifest says 10" in problems()[0]
    assert not is_current(artifact, "packed", "made-from-this"), "so that its stage mends it"
    (artifact / "tokens.bin").unlink()
    assert problems()[0].endswith("tokens.bin is missing")
    assert not is_current(artifact, "packed", "made-from-this")


def test_a_fingerprint_depends_on_the_value_and_not_on_the_order_of_its_keys():
    assert fingerprint({"a": 1, "b": [1, "中"]}) == fingerprint({"b": [1, "中"], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert fingerprint([1, 2]) != fingerprint([2, 1])
    assert len(fingerprint({})) == 16
    assert fingerprint({"a": 1, "b": "中"}) == "2831299868169bc5", "the same over versions"


def test_a_name_that_stands_twice_is_refused_and_a_fifo_in_place_of_a_manifest_is_not_waited_for(artifact):
    path = artifact / module.MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"tokens": 5,', b'"tokens": 5, "tokens": 6,'))
    assert "'tokens' is listed twice in one object" in refused(artifact)
    assert not is_current(artifact, "packed", "made-from-this")
    (artifact / module.MANIFEST_NAME).unlink()
    os.mkfifo(artifact / module.MANIFEST_NAME)
    assert "not a regular file" in refused(artifact)


FACTS = {"bytes": 10, "crc32c": "00000000"}


@pytest.mark.parametrize(
    "odd",
    [
        {"inputs": 5},
        {"files": ["tokens.bin"]},
        *({"files": {name: FACTS}} for name in ("../outside", "/etc/passwd", "a\0b")),
        *({"files": {"tokens.bin": {**FACTS, "bytes": odd}}} for odd in (-1, "10", 10**20, True)),
        *({"files": {"tokens.bin": odd}} for odd in (10, {**FACTS, "crc32c": None})),
    ],
)
def test_a_manifest_of_odd_types_sizes_or_paths_is_refused_in_words(artifact, odd):
    change(artifact, **odd)
    assert "is damaged: " in refused(artifact)
    assert not is_current(artifact, "packed", "made-from-this")
