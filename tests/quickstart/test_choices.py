"""What a speedrun chooses for how much text, time and speed, as tables."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.machine import RESULTS
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json
from zero2all.common.workspace import open_workspace
from zero2all.config import RunConfig, load_config
from zero2all.experiments.law import Point, fit
from zero2all.experiments.shapes import shapes
from zero2all.model.config import parameter_counts
from zero2all.quickstart.choose import (
    LAWS,
    Speed,
    batch_for,
    choices,
    measured_speed,
    most_epochs,
    settings_of,
    vocabulary,
)
from zero2all.quickstart.own_text import cutting
from zero2all.quickstart.speedrun import Budget, Deadline, Speedrun, chat_files
from zero2all.train.anneal import read_anneal

LAPTOP, CARD = Speed(0.0, 35e-6, 110e9), Speed(0.0045, 0.0, 400e12)
SMALL = load_config("quickstart", ["--model.vocab_size=2048", "--data.mixture=null"])
LARGE = load_config("z2all-100m", ["--model.vocab_size=16384", "--data.seq_len=1024"])


def speedrun(folder: Path, seconds: float = 600, overrides: tuple[str, ...] = ()) -> Speedrun:
    return Speedrun(open_workspace(folder, create=True), Budget(seconds), "quickstart", overrides, "cpu")


def test_a_single_text_is_cut_into_enough_documents_to_hold_some_out() -> None:
    table = {2_000: (300, 0.1), 20_000: (333, 0.1), 300_000: (5_000, 0.1), 8_000_000: (8_000, 0.05)}
    for raw_bytes, (piece_bytes, valid_share) in (table | {10**9: (8_000, 0.02)}).items():
        chosen = cutting(raw_bytes)
        assert (chosen["text_piece_bytes"], chosen["valid_share"]) == (piece_bytes, valid_share)
        assert chosen["split_text_above_bytes"] == 3 * piece_bytes


def test_the_vocabulary_grows_with_the_text_and_with_the_work() -> None:
    for text_bytes, flops, ids in (
        (5_000, 1e14, 320),
        (41_000, 1e14, 1_600),
        (10**8, 3e13, 2_496),
        (10**9, 1e17, 19_136),
    ):
        assert vocabulary(text_bytes, flops) == ids
        assert ids % 64 == 0


@pytest.mark.parametrize(("config", "device", "speed"), [(SMALL, "cpu", LAPTOP), (LARGE, "cuda", CARD)])
def test_more_time_buys_a_larger_model_and_a_lower_loss(config: RunConfig, device: str, speed: Speed) -> None:
    best = [choices(config, 1e9, seconds, speed, LAWS[device])[0] for seconds in (60, 600, 6000)]
    assert all(small.size < large.size and small.loss > large.loss for small, large in pairwise(best))
    for choice in best:
        chosen = load_config(
            "quickstart" if device == "cpu" else "z2all-100m",
            [
                f"--{name}={'null' if value is None else value}"
                for name, value in settings_of(config, choice, device).items()
            ]
            + [
                f"--model.vocab_size={config.model.vocab_size}",
                f"--data.seq_len={config.data.seq_len}",
                "--data.mixture=null",
            ],
        )
        assert (chosen.train.steps, chosen.train.tokens_per_step) == (choice.steps, choice.tokens_per_step)
        assert chosen.schedule.kind == "wsd"
        assert chosen.optim.lr_max > 0


@pytest.mark.parametrize("device", LAWS)
def test_the_law_is_that_of_the_runs_we_measured(device: str) -> None:
    found = read_json(RESULTS / "laws.json")[device]
    runs = [each for each in found["points"] if each["tokens"] >= found["least_tokens"]]
    names, unique = ("run", "parameters", "tokens"), found["unique_tokens"]
    law = fit([Point(*(each[name] for name in names), unique, each["loss"]) for each in runs], resamples=0).law
    assert dataclasses.astuple(LAWS[device]) == pytest.approx(dataclasses.astuple(law), rel=1e-3)


def test_little_text_is_not_read_more_often_than_helps_and_not_by_a_model_that_would_learn_it_by_heart() -> None:
    for unique in (8_000, 60_000, 300_000, 2_000_000):
        best = choices(SMALL, unique, 36_000, LAPTOP, LAWS["cpu"])[0]
        assert best.tokens <= 1.25 * most_epochs(unique) * unique
        assert best.size <= 4 * unique or best.model == next(shapes(SMALL.model))


def test_a_time_in_which_nothing_can_be_trained_is_refused_with_the_time_that_is_needed(tmp_path: Path) -> None:
    run = speedrun(tmp_path, 30)
    run.keep(unique_tokens=100_000, speed=dataclasses.asdict(LAPTOP))
    run.values["model.vocab_size"] = 512
    with pytest.raises(BadInputError, match=r"30s are too little here: 25s went into the text.*Give at least 1m"):
        run.choose(spent=25)
    more = speedrun(tmp_path, 600)
    assert more.kept == {"seconds": 600, "speed": run.kept["speed"]}, "that time can be given in the same workspace"
    more.keep(run={})
    with pytest.raises(UsageError, match="has a speedrun of 10m00s"):
        speedrun(tmp_path, 40)


def test_the_vocabulary_stays_when_the_pilot_corrects_the_speed(tmp_path: Path) -> None:
    run = speedrun(tmp_path)
    run.keep(speed=dataclasses.asdict(LAPTOP))
    chosen = run.vocabulary_settings(10**8)
    run.keep(speed=dataclasses.asdict(LAPTOP.scaled(3.0)))
    assert speedrun(tmp_path).vocabulary_settings(10**8) == chosen, "or its tokenizer is not that of the run"


def test_a_speed_in_which_noise_hides_the_products_is_not_absurd(monkeypatch) -> None:
    monkeypatch.setattr("zero2all.quickstart.choose.measured_step", lambda config, *_: 100 / config.model.hidden_size)
    assert measured_speed(SMALL, "cpu", 60.0).flops < 2e12


def test_the_batch_of_a_preset_grows_with_the_tokens_in_whole_rows() -> None:
    batches = [batch_for(SMALL, tokens, ()) for tokens in (1e5, 1.3e6, 5e6, 5e7)]
    assert batches == [512, 2048, 4096, 16384]
    assert batch_for(SMALL, 5e7, {"train.tokens_per_step"}) == 2048


def test_what_a_person_sets_stays(tmp_path: Path) -> None:
    run = speedrun(
        tmp_path, overrides=("--model.hidden_size=96", "--model.heads=3", "--model.kv_heads=1", "--train.steps=7")
    )
    run.values["model.vocab_size"] = 512
    (choice,) = choices(run.config, 1e6, 600, LAPTOP, LAWS["cpu"], run.given)
    config = run.run_config(choice)
    assert (config.model.hidden_size, config.model.heads, config.train.steps) == (96, 3, 7)
    assert run.deadline(config, 0.0)(3) is None


def test_rows_are_shorter_for_little_text_and_a_source_smaller_than_one_is_left_out(tmp_path: Path) -> None:
    run = speedrun(tmp_path)
    assert run.rows_for({"own-en": 2_000_000}) == {"data.seq_len": 128}
    assert run.rows_for({"own-en": 500, "own-other": 20}) == {
        "data.seq_len": 64,
        "data.mixture": {"own-en": 500.0, "own-other": 0.0},
    }


@pytest.mark.parametrize(("pace", "end"), [(1.0, None), (2.0, 190), (0.5, 61)])
def test_the_decay_gets_the_end_that_the_pace_asks_for(
    tmp_path: Path, monkeypatch, pace: float, end: int | None
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    config = load_config("quickstart", ["--train.steps=100"])
    deadline = Deadline(tmp_path, config, ends_at=200.0, most_steps=400)
    record, step = None, 0
    while step < (record.from_step + record.steps if record else 100):
        step, clock[0] = step + 1, clock[0] + 1 / pace
        deadline(step)
        if (tmp_path / "anneal.json").exists():
            record = read_anneal(tmp_path, step, before=record if record and record.from_step < step else None)
    if end is None:
        assert record is None
    else:
        assert step == pytest.approx(100 * pace, abs=2), "it ends when the time is over"
        assert step == pytest.approx(end, abs=12)


def test_a_run_that_begins_after_its_end_stops_at_the_next_look(tmp_path: Path, monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    deadline = Deadline(tmp_path, load_config("quickstart", ["--train.steps=100"]), ends_at=90.0, most_steps=100)
    for step in (1, 2):  # the first step has taken until now
        deadline(step)
        clock[0] += 1
    assert read_anneal(tmp_path, 2).steps == 1


def test_conversations_get_the_time_that_is_left_and_their_loading_is_kept_back(tmp_path: Path) -> None:
    run, alone = speedrun(tmp_path, 600), speedrun(tmp_path, 600)
    run.chats = [tmp_path / "chat.jsonl"]
    run.keep(loading=7.0)
    assert run.reserve == alone.reserve + 14
    after = 600 - run.reserve - run.left(100) - 100  # of the time, when the run has ended: a tenth of it
    assert run.chat_seconds(600 - after) == pytest.approx(after - 0.02 * 600)
    assert run.chat_seconds(700) == 0


def test_parameters_of_shapes_grow_by_small_factors() -> None:
    sizes = [parameter_counts(model)["matmul"] for model in shapes(LARGE.model)]
    assert all(1 < large / small < 2.2 for small, large in pairwise(sizes))


def test_conversations_among_the_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "text.jsonl").write_text('{"text": "messages"}\n')
    (tmp_path / "messages.txt").write_text('"messages"')
    assert chat_files(tmp_path) == [tmp_path / "chat.jsonl"]
