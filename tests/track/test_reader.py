"""All attempts of a run read as one run, whatever state its files are in."""

import itertools
import json
import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.track import MetricsWriter
from zero2all.track.columns import MetricNames, ParsedRows
from zero2all.track.metrics_file import parse_rows
from zero2all.track.reader import RunReader, read_run


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write(folder: Path, steps: range, value: float, writer: str = "train", key: str = "loss") -> None:
    with MetricsWriter(folder, writer=writer) as run:
        for step in steps:
            run.log({key: value + step}, step=step, tokens=10 * step)


def test_attempts_read_back_as_written_whatever_their_order_and_number(tmp_path):
    write(tmp_path / "small", range(5), 0.5)
    run = read_run(tmp_path / "small")
    loss = run.series["loss"]
    assert run.name == "small"
    assert (loss.step.tolist(), loss.tokens.tolist()) == ([0, 1, 2, 3, 4], [0, 10, 20, 30, 40])
    assert loss.value.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert (np.diff(loss.time) >= 0).all()
    assert (loss.step.dtype, loss.value.dtype, loss.tokens.dtype) == (np.int64, np.float64, np.int64)
    assert (run.rows, run.skipped_lines, run.problems) == (5, 0, [])
    for attempt in range(1, 11):  # ten is later than nine
        write(tmp_path / "small", range(2), 100.0 * attempt)
    with MetricsWriter(tmp_path / "small") as writer:
        writer.event("start", step=0, data={})  # an attempt that wrote no rows takes nothing back
    assert read_run(tmp_path / "small").series["loss"].value.tolist() == [1000.0, 1001.0]
    with MetricsWriter(tmp_path / "mixed") as writer:
        for step in (0, 3, 1, 2):
            writer.log({"loss": float(step)}, step=step, tokens=step)
    assert read_run(tmp_path / "mixed").series["loss"].value.tolist() == [0, 1, 2, 3]


def test_the_throughput_of_an_ended_run_is_that_of_all_its_time_but_the_pauses(tmp_path):
    (tmp_path / "metrics").mkdir()
    row = '{"step":%d,"time":%f,"tokens":%d,"values":{"tokens_per_second":%f}}\n'
    for attempt, steps in ((1, range(1, 51)), (2, range(51, 101))):
        begin = attempt * 86_400.0
        rows = [row % (step, begin + step / 4, 100 * step, 126.0 if step == 100 else 395.0) for step in steps]
        (tmp_path / f"metrics/train-{attempt}.jsonl").write_text("".join(rows))
    reader = RunReader(tmp_path)
    assert reader.status.state != "running"
    assert reader.tokens_per_second == pytest.approx(400.0)


def test_late_evaluations_replace_only_their_own_step_and_erase_no_loss(tmp_path):
    write(tmp_path, range(50), 0.0)
    with MetricsWriter(tmp_path) as run:
        run.log({"eval/valid/bpb/en": 1.5}, step=49, tokens=490)
    for step, value in ((40, 1.0), (10, 2.0), (40, 3.0)):
        with MetricsWriter(tmp_path, writer="eval") as run:
            run.log({"eval/set/score": value}, step=step, tokens=0)
    series = read_run(tmp_path).series
    assert (series["eval/set/score"].step.tolist(), series["eval/set/score"].value.tolist()) == ([10, 40], [2.0, 3.0])
    assert (series["eval/valid/bpb/en"].step.tolist(), len(series["loss"])) == ([49], 50)


def test_half_a_last_line_and_garbage_are_skipped_counted_and_named(tmp_path):
    write(tmp_path, range(3), 0.0)
    path = tmp_path / "metrics" / "train-1.jsonl"
    good = path.read_bytes()
    garbage = [b"\x00\xff\xfe binary", b"[1, 2, 3]", "{'python': 中文}".encode()]
    path.write_bytes(b"\n".join(garbage) + b"\n\n" + good + b'{"step":3,"time":1.5,"tokens":30,"val')
    assert read_run(tmp_path).skipped_lines == len(garbage), "the last line may still be in the making"
    long_ago = time.time() - 100
    os.utime(path, (long_ago, long_ago))
    run = read_run(tmp_path)
    assert (run.series["loss"].step.tolist(), run.skipped_lines) == ([0, 1, 2], len(garbage) + 1)
    assert run.problems == ["train-1.jsonl: unreadable lines: 3", "train-1.jsonl: incomplete last line: 1"]


def test_events_of_all_attempts_are_kept_in_order_of_time(tmp_path):
    for step in (9, 8):
        with MetricsWriter(tmp_path) as run:
            run.event("start", step, {"at": step})
    found = [(event.step, event.attempt, event.writer, event.data) for event in read_run(tmp_path).events]
    assert found == [(9, 1, "train", {"at": 9}), (8, 2, "train", {"at": 8})]


def test_foreign_files_are_left_alone_a_folder_without_metrics_can_be_watched_and_none_is_a_clear_error(tmp_path):
    with pytest.raises(BadInputError, match="no run in"):
        read_run(tmp_path / "absent")
    reader = RunReader(tmp_path / "later")
    assert (reader.metrics(), reader.events(), reader.status.state) == ([], [], "unknown")
    (tmp_path / "later" / "metrics" / "train-1.jsonl").mkdir(parents=True)
    (tmp_path / "later" / "metrics" / "notes.txt").write_text("hello")
    found = read_run(tmp_path / "later")
    assert (found.series, found.skipped_lines) == ({}, 0)
    write(tmp_path / "later", range(5), 0.0)
    assert reader.refresh()
    assert len(reader.series("loss")) == 5


def test_a_reader_follows_a_run_row_by_row_and_says_when_something_is_new(tmp_path):
    run = MetricsWriter(tmp_path)
    reader = RunReader(tmp_path)
    for step in range(3):
        version = reader.version
        run.log({"loss": float(step)}, step=step, tokens=step)
        run.event("note", step=step)
        while not any((event.kind, event.step) == ("note", step) for event in reader.events()):
            reader.refresh()
        assert reader.version > version
        assert reader.series("loss").step.tolist() == list(range(step + 1))
    version = reader.version
    assert reader.refresh() is False
    assert reader.version == version
    seen = len(reader.events())
    run.close()
    assert reader.refresh() is True
    assert [event.kind for event in reader.events(after=seen)] == ["end"]


def test_half_a_line_is_waited_for(tmp_path):
    write(tmp_path, range(3), 0.0)
    path = tmp_path / "metrics" / "train-1.jsonl"
    reader = RunReader(tmp_path)
    row = b'{"step":7,"time":1.5,"tokens":30,"values":{"loss":4.0}}\n'
    for byte in range(len(row)):
        with open(path, "ab") as file:
            file.write(row[byte : byte + 1])
        reader.refresh()
        assert len(reader.series("loss")) == (4 if byte == len(row) - 1 else 3)
    assert reader.problems == {}


def test_a_resume_takes_back_all_after_its_checkpoint_even_what_it_has_not_repeated(tmp_path):
    with MetricsWriter(tmp_path) as run:
        for step in range(10, 60, 10):
            run.log({"loss": 1.0}, step=step)
            run.log({"eval/score": 1.0}, step=step - 5)
    with MetricsWriter(tmp_path, resumed_from=20) as run:
        run.log({"loss": 2.0}, step=40)
    reader = RunReader(tmp_path)
    assert (read_run(tmp_path).resumed_at_steps, reader.series("loss").step.tolist()) == ([40], [10, 20, 40])
    assert reader.series("eval/score").step.tolist() == [5, 15]
    assert reader.ghosts("eval/score").step.tolist() == [25, 35, 45]


def test_a_rollback_within_a_process_takes_back_what_it_left(tmp_path):
    with MetricsWriter(tmp_path) as run:
        for step in range(31):
            run.log({"loss": float(step), "other": 1.0}, step=step)
        run.event("rollback", step=20, data={"from_step": 30, "to_step": 20})
        for step in range(21, 26):
            run.log({"loss": 100.0 + step}, step=step)
        run.event("rollback", step=22, data={"from_step": 25, "to_step": 22})
        run.log({"loss": 200.0}, step=23)
    reader = RunReader(tmp_path)
    assert reader.series("loss").value.tolist() == [*range(21), 121, 122, 200]
    assert reader.series("other").step.tolist() == list(range(21))
    assert reader.ghosts("loss").step.tolist() == [*range(21, 24), 23, 24, 24, 25, 25, *range(26, 31)]


def test_a_replaced_file_is_read_anew_and_counted(tmp_path):
    write(tmp_path, range(50), 0.0)
    reader = RunReader(tmp_path)
    path = tmp_path / "metrics" / "train-1.jsonl"
    changed = path.read_bytes().replace(b'"loss":', b'"cost":')
    path.write_bytes(changed + changed[-200:].split(b"\n", 1)[1])  # the same inode, longer, other bytes
    assert reader.refresh()
    assert reader.metrics() == ["cost"]
    shutil.rmtree(tmp_path / "metrics")
    write(tmp_path, range(5), 7.0)
    assert reader.refresh()
    assert reader.metrics() == ["loss"]
    assert reader.problems["train-1.jsonl: replaced by another file"] >= 1


def test_a_run_folder_that_disappears_leaves_what_was_read_and_may_come_back(tmp_path):
    write(tmp_path / "run", range(5), 0.0)
    reader = RunReader(tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    assert ([reader.refresh() for _ in range(2)], len(reader.series("loss"))) == ([True, False], 5)
    assert (reader.status.state, reader.problems) == ("unknown", {"the metrics folder disappeared": 1})
    shutil.move(tmp_path / "elsewhere", tmp_path / "run")
    assert reader.refresh() is True
    assert (reader.problems, reader.status.state) == ({}, "finished")


def test_a_line_longer_than_memory_should_hold_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("zero2all.track.metrics_file.CHUNK_BYTES", 1000)
    monkeypatch.setattr("zero2all.track.metrics_file.MAX_LINE_BYTES", 4000)
    write(tmp_path, range(40), 0.0)
    path = tmp_path / "metrics" / "train-1.jsonl"
    path.write_bytes(path.read_bytes() + b"x" * 50_000 + b"\n" + path.read_bytes())
    reader = RunReader(tmp_path)
    assert (len(reader.series("loss")), reader.skipped_lines) == (40, 1)


def test_more_events_than_memory_should_hold_are_counted_and_the_end_is_still_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("zero2all.track.metrics_file.MAX_EVENTS", 50)
    monkeypatch.setattr("zero2all.track.metrics_file.MAX_TEXT_CHARACTERS", 10_000)
    with MetricsWriter(tmp_path) as run:
        for step in range(20):
            run.event("text", step, {"text": "x" * 1000})
        for step in range(60):
            run.event("note", step=step)
    reader = RunReader(tmp_path)
    assert (sum(event.kind == "text" for event in reader.events()), len(reader.events())) == (10, 50)
    assert (reader.problems, reader.status.state) == ({"train-1.jsonl: events beyond the limit": 32}, "finished")


def test_threads_may_ask_while_the_run_grows(tmp_path):
    run = MetricsWriter(tmp_path)
    reader = RunReader(tmp_path)

    def watch() -> None:
        for _ in range(100):
            reader.refresh()
            assert (np.diff(reader.series("loss").step) > 0).all()

    with ThreadPoolExecutor() as pool:
        watching = [pool.submit(watch) for _ in range(3)]
        for step in range(2000):
            run.log({"loss": 1.0}, step=step)
    run.close()
    reader.refresh()
    assert ([each.exception() for each in watching], len(reader.series("loss"))) == ([None] * 3, 2000)


def test_every_axis_has_its_own_x(tmp_path):
    with MetricsWriter(tmp_path) as run:
        for step in range(1, 11):
            run.log({"loss": 1.0, "flops": 1e18 * step}, step=step, tokens=100 * step)
        run.log({"eval/score": 0.5}, step=5, tokens=500)
    reader = RunReader(tmp_path)
    assert reader.bins("loss", axis="tokens").x.tolist() == list(range(100, 1100, 100))
    assert reader.bins("eval/score", axis="flops").x.tolist() == [5e18]
    assert reader.bins("loss", axis="time").x.tolist() == reader.series("loss").time.tolist()
    assert (reader.bins("loss", low=3, high=5).x.tolist(), len(reader.bins("absent"))) == ([3, 4, 5], 0)
    with pytest.raises(ValueError, match="axis"):
        reader.bins("loss", axis="weight")  # type: ignore[arg-type]


def long_run(folder: Path, rows: int = 12_000) -> Path:
    (folder / "metrics").mkdir(parents=True)
    path = folder / "metrics" / "train-1.jsonl"
    with open(path, "w") as file:
        file.write(json.dumps({"step": 0, "time": 0.0, "kind": "segment", "data": {"pid": 1, "host": "x"}}) + "\n")
        for step in range(rows):
            values = {"loss": step / 7, "lr": 1e-3} | ({"eval": step / 3} if step % 10 == 0 else {})
            row = {"step": step, "time": 0.5 * step, "tokens": step, "values": values}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return path


@pytest.fixture
def opened(tmp_path):
    return lambda name="run", cache="cache": RunReader(tmp_path / name, cache=tmp_path / cache)


def same(first: RunReader, second: RunReader) -> bool:
    return first.metrics() == second.metrics() and all(
        getattr(first.series(metric), column).tolist() == getattr(second.series(metric), column).tolist()
        for metric, column in itertools.product(first.metrics(), ("step", "value", "tokens", "time"))
    )


def test_a_long_run_is_kept_as_a_sidecar_outside_the_run_and_opened_from_it(tmp_path, monkeypatch, opened):
    path = long_run(tmp_path / "run")
    first = opened()
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["metrics"]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr("zero2all.track.metrics_file.parse_rows", None)  # nothing is parsed
    second = opened()
    assert same(first, second)
    assert ([event.kind for event in second.events()], second.status.state) == (["segment"], first.status.state)
    monkeypatch.undo()
    with open(path, "ab") as file:
        file.write(b'{"step":12000,"time":1.5,"tokens":30,"values":{"loss":4.0}}\n')
    for reader in (second, opened()):
        reader.refresh()
        assert (reader.series("loss").step.tolist(), reader.series("loss").value[-1]) == (list(range(12_001)), 4.0)


def test_a_sidecar_of_another_or_a_changed_file_is_not_used(tmp_path, opened):
    path = long_run(tmp_path / "run")
    opened()
    changed = path.read_bytes().replace(b'"lr":0.001', b'"lr":0.002')
    path.write_bytes(changed)  # as long as before
    assert set(opened().series("lr").value.tolist()) == {0.002}
    path.write_bytes(changed.replace(b"loss", b"cost") + changed[-500:].split(b"\n", 1)[1])
    assert "cost" in opened().metrics()


def test_a_damaged_sidecar_and_an_unwritable_cache_cost_only_time(tmp_path, opened):
    long_run(tmp_path / "run")
    expected = opened()
    (sidecar,) = (tmp_path / "cache").iterdir()
    good = sidecar.read_bytes()
    for bad in (b"", b"z2acols1", good[:-1], good[: len(good) // 2], b"\0" * len(good), good[:20] + b"!" + good[21:]):
        sidecar.write_bytes(bad)
        assert same(opened(), expected)
    (tmp_path / "file").write_text("in the way")
    assert same(opened(cache="file"), expected)


def test_sidecars_not_used_for_longest_make_room(tmp_path, monkeypatch, opened):
    sizes = []
    for number in range(3):
        long_run(tmp_path / f"run{number}")
        opened(f"run{number}")
        sizes.append(sum(file.stat().st_size for file in (tmp_path / "cache").iterdir()))
        monkeypatch.setattr("zero2all.track.columns.MAX_CACHE_BYTES", int(2.5 * sizes[0]))
    assert sizes[1] > sizes[0]
    assert sizes[2] <= 2.5 * sizes[0]


def parsed(lines: list[bytes]) -> ParsedRows:
    return parse_rows(b"".join(line + b"\n" for line in lines), MetricNames())


def row(step: int, values: dict, time: float = 1.5, tokens: int = 7) -> bytes:
    return jsonio.dumps_line({"step": step, "time": time, "tokens": tokens, "values": values})[:-1]


def test_every_double_comes_back_to_the_last_bit():
    rng = random.Random(0)
    numbers = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-320, 300) for _ in range(3000)]
    numbers += [0.0, -0.0, 5e-324, 1.7976931348623157e308, 1e22, 1e23, 2**53 + 1, -7]
    lines = [row(step, {"a": number, "b/c": -number}, time=abs(number)) for step, number in enumerate(numbers)]
    block = parsed(lines)
    assert block.metrics["a"][1].tolist() == [float(number) for number in numbers]


def test_only_numbers_and_the_three_words_for_what_is_not_finite_are_values():
    for value in ("NaN", "Infinity", "-Infinity", 2**63, 2**64 - 1):
        block = parsed([row(1, {"odd": value})])
        assert (block.skipped_values, len(block.metrics["odd"][1])) == (0, 1), value
    for value in ("text", "1.5", None, True, [1], {"x": 1}):
        block = parsed([row(1, {"loss": 1.25, "odd": value})])
        assert (len(block.step), block.skipped_values, list(block.metrics)) == (1, 1, ["loss"]), value


def test_one_damaged_line_costs_only_itself():
    odd = [{"step": 1.5}, {"step": -1}, {"step": 2**63}, {"time": "NaN"}, {"tokens": True}, {"tokens": None}]
    odd += [{"values": 5}, {"kind": 7, "data": {}}, {"kind": "x", "data": 5}]
    lines = [json.dumps({"step": 1, "time": 1.5, "tokens": 7, "values": {"a": 9.0}, **each}).encode() for each in odd]
    for damage in (b"\x00\xff\xfe", b"[" * 100_000, b"[1, 2, 3]", *lines):
        block = parsed([row(5, {"a": 1.5}), damage, b"  ", row(6, {"a": 2.5})])
        assert (block.step.tolist(), block.metrics["a"][1].tolist()) == ([5, 6], [1.5, 2.5]), damage[:99]
        assert (block.skipped_lines, block.events) == (1, []), damage[:99]


def test_a_million_names_are_counted_and_not_kept():
    names = MetricNames(limit=100)
    lines = [row(step, {f"metric {step}/{number}": 1.0 for number in range(50)}) for step in range(200)]
    block = parse_rows(b"\n".join(lines) + b"\n", names)
    assert (len(block.metrics), names.left_out_values) == (100, 200 * 50 - 100)


def test_rows_of_json_without_orjson_are_read_too(monkeypatch):
    monkeypatch.setattr(jsonio, "orjson", None)
    lines = [json.dumps({"step": n, "time": 1.5, "tokens": 1, "values": {"a": n / 3}}).encode() for n in range(50)]
    assert parsed(lines).metrics["a"][1].tolist() == [n / 3 for n in range(50)]
