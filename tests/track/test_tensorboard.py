"""TensorBoard's event files: read, written, imported, damaged."""

from __future__ import annotations

import base64
import math
import sys
from pathlib import Path

import pytest

from zero2all.cli import main
from zero2all.common.errors import BadInputError, UsageError
from zero2all.track.reader import RunReader
from zero2all.track.sinks import TensorboardSink
from zero2all.track.tensorboard import (
    Damage,
    EventFile,
    TensorboardEvent,
    event_files,
    import_tensorboard,
    masked_crc,
    read_events,
)

WRITTEN_BY_TENSORBOARD = base64.b85decode(
    "NB{r;00000{*p+Y2_?cDlUu&pK^hHWa$#w1E=6`_Zge^_QZ5QCbY*UHZ*pR9VRB?Hb9HTPVRCsccXDZTWpXZMc4cmKUuJ1+WnXu4"
    "X>?_BU32h`ZvX%Q00000Y%zh}2><{90A<b1K`LYl5ef=)a$#w1FKlmfa}@vpAV3Ns3Ic3$LJkN55&$v?00000006*0N(%}J3I}sz"
    "VQgV?a|#d&1!He@ZgfHi2niAZQUL%88VUq(VQF$g5(ohj1QG%W0wM?i0DwOL002NLc)Pcj000000000?33g2h004jhWzEe&5DF@Y"
    "0SXZc3UqQ|X>KoUZ*y}M006*03KR+gY;r;l2m%rSG6(<w00000@;?e03I$_tb#8P*5C{np08$G7|NsC0|NsC00SX!l1aM(#azYXa"
    "0TKif0tf;k2mk<pKL7v#Knf-b26JI;aBO8l5(ozp0749CWo&G3Amq5M=9Y&_2nq%Y1axJ1bPl{~Z~"
)
"""A file that TensorBoard 2.21's own writer wrote: `train/loss` as simple value, `lr` as double tensor whose plugin is
named only the first time, `count` as int64 tensor, `pair` as tensor of two elements, `sample` as text."""


def put(folder: Path, data: bytes, name: str = "events.out.tfevents.1000000000.host") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


def read(path: Path) -> tuple[list[TensorboardEvent], Damage]:
    damage = Damage()
    return list(read_events(path, damage)), damage


# ---- reading ----


def test_what_tensorboard_wrote_is_read(tmp_path):
    events, damage = read(put(tmp_path, WRITTEN_BY_TENSORBOARD))
    scalar = [("train/loss", 2.5), ("lr", 0.125), ("count", 0.0)]
    later = [("train/loss", 1.5), ("lr", 1.125), ("count", -1.0)]
    assert events == [
        TensorboardEvent(1e9, 0, tuple(scalar)),
        TensorboardEvent(1e9 + 1, 10, (*later, ("sample", "hello 中文"))),
    ]
    assert damage == Damage(values={"other": 2}), "the pairs"


@pytest.mark.parametrize("lost", [1, 3, 12, 60, 150])
def test_a_torn_end_is_counted_and_everything_before_it_is_read(tmp_path, lost):
    events, damage = read(put(tmp_path, WRITTEN_BY_TENSORBOARD[:-lost]))
    assert [event.step for event in events] == [0]
    assert damage.tail_bytes > 0
    assert damage.records == 0


def test_a_damaged_record_is_skipped_and_a_damaged_length_ends_the_file(tmp_path):
    assert len(WRITTEN_BY_TENSORBOARD) == 381
    in_data = bytearray(WRITTEN_BY_TENSORBOARD)
    in_data[150] ^= 1
    events, damage = read(put(tmp_path, bytes(in_data), "tfevents-data"))
    assert [event.step for event in events] == [10], "the records behind it are found"
    assert (damage.records, damage.tail_bytes) == (1, 0)
    in_length = bytearray(WRITTEN_BY_TENSORBOARD)
    in_length[0] ^= 1
    events, damage = read(put(tmp_path, bytes(in_length), "tfevents-length"))
    assert events == []
    assert damage.tail_bytes == 381


@pytest.mark.parametrize("data", [b"", b"x", b"garbage " * 100, bytes(100)])
def test_garbage_gives_no_events_and_no_error(tmp_path, data):
    events, damage = read(put(tmp_path, data))
    assert events == []
    assert damage.tail_bytes == len(data)


def test_a_record_whose_checksum_is_right_but_whose_content_is_nonsense_is_skipped(tmp_path):
    import struct

    nonsense = b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"
    length = struct.pack("<Q", len(nonsense))
    record = length + struct.pack("<I", masked_crc(length)) + nonsense + struct.pack("<I", masked_crc(nonsense))
    events, damage = read(put(tmp_path, record + WRITTEN_BY_TENSORBOARD))
    assert len(events) == 2
    assert damage.records == 1


# ---- writing ----


def test_what_we_write_is_read_back(tmp_path):
    file = EventFile(tmp_path)
    file.scalars(12.5, 7, {"loss": 2.5, "nan": math.nan, "huge": 1e300, "中文": -0.5})
    file.restart(13.0, -3)
    file.text(14.0, 2**40, "sample", "one\ntwo")
    file.text(15.0, 9, "sample", "again")
    file.close()
    events, damage = read(file.path)
    assert damage == Damage()
    values = dict(events[0].values)
    assert (events[0].time, events[0].step) == (12.5, 7)
    assert math.isnan(float(values.pop("nan")))
    assert values == {"loss": 2.5, "huge": math.inf, "中文": -0.5}
    assert (events[1].is_restart, events[1].step) == (True, -3)
    assert events[2] == TensorboardEvent(14.0, 2**40, (("sample", "one\ntwo"),))
    assert events[3].values == (("sample", "again"),)


def test_histograms_and_images_are_records_that_a_reader_skips_by_kind(tmp_path):
    file = EventFile(tmp_path)
    file.histogram(1.0, 1, "weights", [0.0, 1.0, 2.0], [3, 4])
    file.image(1.0, 1, "picture", b"png", 4, 5)
    file.close()
    assert read(file.path) == ([], Damage(values={"histogram": 1, "image": 1}))


def test_two_files_in_the_same_second_have_two_names(tmp_path):
    first, second = EventFile(tmp_path), EventFile(tmp_path)
    assert first.path != second.path
    assert set(event_files(tmp_path)) == {first.path, second.path}
    first.close()
    second.close()


# ---- importing ----


def test_an_imported_run_has_the_curves_the_texts_and_an_end(tmp_path):
    put(tmp_path / "logs", WRITTEN_BY_TENSORBOARD)
    rename = {"train/loss": "loss"}
    [done] = import_tensorboard(tmp_path / "logs", tmp_path / "runs", "old", rename, tokens_tag="lr")
    assert (done.folder, done.files, done.rows, done.values, done.texts) == (tmp_path / "runs" / "old", 1, 2, 6, 1)
    run = RunReader(done.folder)
    assert run.metrics() == ["count", "loss", "lr"]
    loss = run.series("loss")
    assert (loss.step.tolist(), loss.value.tolist(), loss.time.tolist()) == ([0, 10], [2.5, 1.5], [1e9, 1e9 + 1])
    assert loss.tokens.tolist() == [0, 1], "0.125 and 1.125 of the tag that was named"
    [text] = [event for event in run.events() if event.kind == "text"]
    assert (text.step, text.data) == (10, {"name": "sample", "text": "hello 中文"})
    assert run.status.state == "finished"
    assert run.problems == {}


def write_scalars(folder: Path, number: int, tag: str, steps: range, value: float) -> None:
    file = EventFile(folder)
    for step in steps:
        file.scalars(1000.0 * number + step, step, {tag: value})
    file.close()
    file.path.rename(folder / f"events.out.tfevents.{number:010d}.host")


def test_a_restart_takes_back_what_came_after_it_and_another_writer_does_not(tmp_path):
    write_scalars(tmp_path / "logs", 1, "loss", range(0, 10), 1.0)
    write_scalars(tmp_path / "logs", 2, "eval", range(0, 10, 5), 0.5)
    write_scalars(tmp_path / "logs", 3, "loss", range(6, 8), 2.0)
    [done] = import_tensorboard(tmp_path / "logs", tmp_path / "runs", "old")
    run = RunReader(done.folder)
    assert run.series("loss").value.tolist() == [1.0] * 6 + [2.0] * 2, "steps 8 and 9 were taken back"
    assert run.series("eval").step.tolist() == [0, 5]
    names = sorted(path.name for path in (done.folder / "metrics").iterdir())
    assert names == ["import2-1.jsonl", "train-1.jsonl", "train-2.jsonl"]


def test_folders_below_become_runs_of_their_own_and_nan_survives(tmp_path):
    write_scalars(tmp_path / "logs", 1, "loss", range(2), 1.0)
    write_scalars(tmp_path / "logs" / "valid", 1, "loss", range(3), math.nan)
    first, second = import_tensorboard(tmp_path / "logs", tmp_path / "runs", "old")
    assert [first.folder.name, second.folder.name] == ["old", "old-valid"]
    assert all(math.isnan(value) for value in RunReader(second.folder).series("loss").value)


def test_nothing_to_import_and_a_name_that_is_taken_are_clear_errors(tmp_path):
    with pytest.raises(BadInputError, match="no TensorBoard event files"):
        import_tensorboard(tmp_path, tmp_path / "runs", "x")
    with pytest.raises(BadInputError, match="is not a folder"):
        import_tensorboard(tmp_path / "absent", tmp_path / "runs", "x")
    put(tmp_path / "logs", WRITTEN_BY_TENSORBOARD)
    (tmp_path / "runs" / "x").mkdir(parents=True)
    with pytest.raises(UsageError, match="another name"):
        import_tensorboard(tmp_path / "logs", tmp_path / "runs", "x")


def test_without_the_package_both_ways_say_what_to_install_and_write_nothing(tmp_path, monkeypatch):
    put(tmp_path / "logs", WRITTEN_BY_TENSORBOARD)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(UsageError, match=r"zero2all\[tensorboard\]"):
        import_tensorboard(tmp_path / "logs", tmp_path / "runs", "old")
    with pytest.raises(UsageError, match=r"zero2all\[tensorboard\]"):
        TensorboardSink(tmp_path / "tb")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["events.out.tfevents.1000000000.host", "logs"]


def test_the_command_line_says_what_was_left_out(tmp_path, capsys):
    put(tmp_path / "logs", WRITTEN_BY_TENSORBOARD[:-5])
    work = tmp_path / "work"
    assert main(["track", "import", str(tmp_path / "logs"), "--name", "old", "--work", str(work)]) == 0
    out = capsys.readouterr().out
    assert "1 file, 1 row, 3 values, 0 texts" in out
    assert "bytes of an incomplete last record" in out
    assert "1 value of kind other" in out
    assert (work / "runs" / "old" / "metrics" / "train-1.jsonl").is_file()
