"""The whole journey in real processes, small: interrupted anywhere it ends with the same bits."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zero2all.common.errors import BadInputError, DiskError, UsageError
from zero2all.common.files import read_json
from zero2all.config import load_config
from zero2all.quickstart.journey import WorldSize, run_journey
from zero2all.quickstart.summary import print_summary

SMALL = [
    *("--tokenizer.vocab_size", "700"),
    *("--model.hidden_size", "32", "--model.intermediate_size", "64", "--model.layers", "1"),
    *("--model.heads", "2", "--model.kv_heads", "1"),
    *("--train.steps", "40", "--train.tokens_per_step", "512", "--train.micro_batch_samples", "2"),
    *("--schedule.warmup_steps", "4", "--checkpoint.every_steps", "7"),
    *("--eval.every_steps", "20", "--eval.valid_tokens_per_source", "512"),
]
SIZE = WorldSize(bytes_per_language=120_000, code_bytes=400_000)
RUN = f"""
import sys
from pathlib import Path
from zero2all.config import load_config
from zero2all.quickstart.journey import WorldSize, run_journey
from zero2all.quickstart.summary import print_summary
journey = run_journey(load_config("quickstart", {SMALL!r}), Path(sys.argv[1]), size={SIZE!r})
print_summary(journey)
"""


def start(work: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(work)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def last_checkpoint(work: Path) -> dict[str, bytes]:
    folder = work / "runs/quickstart/checkpoints/step-00000040"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A journey left alone, and what it printed."""
    work = tmp_path_factory.mktemp("journey") / "work"
    process = start(work)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return work, output


def test_summary_shows_stages_channels_probes_samples_picture_and_what_to_try_next(finished: tuple[Path, str]) -> None:
    work, output = finished
    for stage in ("raw data", "corpus", "tokenizer", "pack", "train", "evaluate", "generate", "export", "picture"):
        assert f"│ {stage} " in output
    for channel in ("en", "zh", "code"):
        assert f"│ {channel} " in output
    assert "P(Paris | The capital of France is)" in output
    assert "P(北京 | 中国的首都是)" in output
    assert output.count("z2a ") >= 3
    assert (work / "runs/quickstart/curves.png").read_bytes().startswith(b"\x89PNG")
    assert (work / "hf/model.safetensors").is_file()


def test_untrained_model_knows_no_fact(finished: tuple[Path, str]) -> None:
    assert read_json(finished[0] / "runs/quickstart/eval/untrained.json")["accuracy"] < 0.1


def test_killed_again_and_again_the_journey_ends_with_the_same_bits(finished: tuple[Path, str], tmp_path: Path) -> None:
    work = tmp_path / "killed"
    delays = random.Random(7)
    kills = 0
    while True:
        process = start(work)
        try:
            _, errors = process.communicate(timeout=delays.uniform(2, 7) if kills < 4 else 240)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0, errors
        break
    assert kills >= 2, "the journey ended before it could be killed twice"
    assert last_checkpoint(work) == last_checkpoint(finished[0])
    assert not list(work.rglob("*.partial-*"))


def test_a_second_run_finds_everything_done(finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    before = last_checkpoint(finished[0])
    journey = run_journey(load_config("quickstart", SMALL), finished[0], size=SIZE)
    print_summary(journey)
    assert {stage.name for stage in journey.stages if stage.done_before} >= {"raw data", "tokenizer", "pack", "train"}
    assert last_checkpoint(finished[0]) == before
    assert "(done before)" in capsys.readouterr().out


def test_own_text_takes_the_place_of_the_small_world(tmp_path: Path) -> None:
    own = tmp_path / "texts"
    own.mkdir()
    words = ["sun", "moon", "river", "stone", "bird", "tree", "house", "road", "light", "dark", "small", "great"]
    rng = random.Random(1)
    for number in range(60):
        sentences = (" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(30))
        (own / f"{number}.txt").write_text(" ".join(sentences))
    config = load_config("quickstart", [*SMALL, "--tokenizer.vocab_size", "300"])
    journey = run_journey(config, tmp_path / "work", data=own)
    print_summary(journey)
    assert list(journey.evaluation["held_out"]) == ["en"]
    assert journey.before is None
    assert len(journey.samples) == 2


def test_missing_data_path_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"does not exist"):
        run_journey(load_config("quickstart"), tmp_path / "work", data=tmp_path / "nowhere")
    assert not (tmp_path / "work").exists()


def test_text_too_small_for_the_vocabulary_says_the_largest_possible(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("A few words are not enough. " * 3)
    with pytest.raises(BadInputError, match=r"vocab"):
        run_journey(load_config("quickstart", SMALL), tmp_path / "work", data=tmp_path / "own.txt")
    assert not (tmp_path / "work/tokenizer").exists()


def test_fresh_leaves_a_folder_alone_that_is_no_workspace(tmp_path: Path) -> None:
    precious = tmp_path / "corpus" / "mine.txt"
    precious.parent.mkdir()
    precious.write_text("do not delete")
    with pytest.raises((BadInputError, UsageError, DiskError)):
        run_journey(load_config("quickstart"), tmp_path, data=tmp_path / "nowhere", fresh=True)
    assert precious.read_text() == "do not delete"
