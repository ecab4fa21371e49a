"""The whole journey in real processes, small: interrupted anywhere it ends with the same bits."""

import os
import random
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from tests.english import english_left, prose_of_page
from tests.processes import Z2A, Program, WarmProcess
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import load_config
from zero2all.infer.chat import choose
from zero2all.infer.load import load_run
from zero2all.quickstart.own_text import look_at
from zero2all.quickstart.pipeline import QuickstartRun, WorldSize, _Timer, clear_workspace, run_quickstart
from zero2all.quickstart.speedrun import Budget, Speedrun
from zero2all.quickstart.summary import next_commands, outlook
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.layout import list_checkpoints, step_of

SMALL = [
    *("--tokenizer.vocab_size=700", "--model.hidden_size=32", "--model.intermediate_size=64", "--model.layers=1"),
    *("--model.heads=2", "--model.kv_heads=1", "--train.steps=40", "--train.tokens_per_step=512"),
    *("--train.micro_batch_samples=2", "--schedule.warmup_steps=4", "--checkpoint.every_steps=7"),
    *("--validation.every_steps=20", "--validation.tokens_per_source=512"),
]
SIZE = WorldSize(bytes_per_language=60_000, code_bytes=150_000)
RUN = f"""
import sys
from pathlib import Path
from zero2all.config import load_config
from zero2all.quickstart.pipeline import WorldSize, run_quickstart
from zero2all.quickstart import raw
from zero2all.quickstart.summary import print_summary
every_probe = raw.probes
raw.probes = lambda language, seed: every_probe(language, seed)[::21]
config, full = load_config("quickstart", {SMALL!r}), "full" in sys.argv
journey = run_quickstart(config, Path(sys.argv[1]), size={SIZE!r}, full=full)
print_summary(journey)
"""


def last_checkpoint(work: Path) -> dict[str, bytes]:
    folder = work / "runs/quickstart/checkpoints/step-00000040"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


def ended_well(warm: WarmProcess, code: str, words: list[str], work: Path) -> tuple[Path, str]:
    program = Program(warm, code, words, work.with_name("output.txt"))
    assert program.wait() == 0, program.text()
    return work, program.text()


@pytest.fixture(scope="module")
def finished(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A journey left alone, and what it printed."""
    work = tmp_path_factory.mktemp("journey") / "work"
    return ended_well(warm, RUN, [str(work)], work)


STAGES = ("raw data", "corpus", "tokenizer", "pack", "probes, untrained", "train", "evaluate", "generate", "export")


def test_it_prints_a_line_for_each_stage_six_for_the_result_and_four_commands(finished):
    (work, output), lines = finished, finished[1].splitlines()
    for stage in (*STAGES, "picture", "chat"):
        assert len([line for line in lines if line.startswith(f"{stage}  ")]) == 1, output
    first = next(number for number, line in enumerate(lines) if line.startswith("Done in "))
    results, commands = lines[first : lines.index("", first)], lines[-4:]
    assert len(results) == 6
    assert results[1].startswith("Held-out text, bits per byte (lower is better): code ")
    assert re.search(r"^Facts asked .*; in a stranger's words: \d+\.\d%; before training \d+\.\d%\.$", results[2])
    assert results[3].startswith("In a chat: facts answered en ")
    assert results[5].startswith(f"In {work}: summary.md (all tables), corpus/report.html, runs/quickstart/curves.png")
    assert len(lines) <= 25, "short enough to be read"
    assert f"z2a chat quickstart-chat --work {work}" in output
    for command, verb in zip(commands, ("chat", "generate", "board", "train"), strict=True):
        program, first_word, *_ = shlex.split(command)
        assert os.access(program, os.X_OK), "z2a is not on the PATH of a fresh shell"
        assert Path(program).is_absolute()
        assert first_word == verb
        assert str(work) in command


def test_all_tables_lie_in_a_file_and_the_chat_the_picture_and_the_exported_model_beside_it(finished):
    work = finished[0]
    text = (work / "summary.md").read_text()
    for heading in ("# Quickstart", "## Held-out text", "## Probes", "## Samples", "## Chat", "## Next"):
        assert f"\n{heading}\n" in f"\n{text}"
    for name in (*STAGES, "picture", "en", "zh", "code", "**en**", "**all facts**", "base", "sft "):
        assert f"\n| {name} " in text
    assert all(words in text for words in ("P(Paris | The capital of France is)", "P(北京 | 中国的首都是)"))
    assert read_json(work / "runs/quickstart/eval/untrained.json")["accuracy"] < 0.1
    answers = read_json(work / "runs/quickstart-chat/eval/sft-chat.json")
    kinds = {(language, kind) for language in ("en", "zh") for kind in ("fact", "sum", "outside")}
    assert {(each["language"], each["kind"]) for each in answers} == kinds
    assert choose(load_run(Workspace(work), "quickstart-chat")).how == "template"
    assert (work / "runs/quickstart/curves.png").read_bytes().startswith(b"\x89PNG")
    assert (work / "hf/model.safetensors").is_file()


def test_every_display_of_the_held_out_loss_shows_the_one_that_training_recorded(finished: tuple[Path, str], z2a):
    work, output = finished
    report = work / "runs/quickstart/eval/step-00000040.json"
    before, recorded = read_json(report), read_run(work / "runs/quickstart").series
    loss = recorded["eval/valid/loss"].value[-1]
    assert f"40 steps, held-out loss {loss:.3f}\n" in output
    section = (work / "summary.md").read_text().partition("## Held-out")[2].partition("\n## ")[0]
    table = {line.split()[1]: line.split()[3::2] for line in section.splitlines() if line.startswith("|")}
    assert table["**all**"][:2] == [f"{loss:.3f}", f"{recorded['eval/valid/bpb'].value[-1]:.3f}"]
    (printed,) = [line for line in output.splitlines() if line.startswith("Held-out text")]
    for channel in ("code", "en", "zh"):
        bits = recorded[f"eval/valid/bpb/{channel}"].value[-1]
        assert f"{channel} {bits:.2f}" in printed
        assert table[channel][1] == f"{bits:.3f}"
        assert before["held_out"][channel]["bits_per_byte"] == bits
    assert re.search(rf"training loss  held-out loss(.*\n)+.* {loss:.4f} ", z2a.done("runs", "--work", work))
    assert re.search(rf"(?m)^  all +{loss:.4f} ", z2a.done("eval", "quickstart", "--work", work))
    assert read_json(report)["held_out"] == before["held_out"], "the same figures, and no report set aside"
    assert not list(report.parent.glob("*earlier*"))


def without_samples(work: Path) -> str:
    return re.sub("```.*?```", "", (work / "summary.md").read_text(), flags=re.DOTALL)


IN_CHINESE = f'import os\nos.environ["Z2A_LANG"] = "zh"\n{RUN}'
KILLED = """
import sys
from pathlib import Path
from tests.moments import signal_when
signal_when(lambda: any(Path(sys.argv[1]).glob({pattern!r})))
"""
MOMENTS = {"while the corpus is built": "corpus/.build", "in training": "runs/quickstart/checkpoints/step-00000007"}


def test_killed_again_and_again_the_journey_ends_with_the_same_bits_and_speaks_chinese(finished, tmp_path, start):
    work, said = tmp_path / "killed", []
    for moment, pattern in MOMENTS.items():
        program = start(work, code=KILLED.format(pattern=pattern) + IN_CHINESE)
        assert program.wait() == -signal.SIGKILL, f"it was to be killed {moment}: {program.text()}"
        said.append(program.text())
    reached = max(map(step_of, list_checkpoints(work / "runs/quickstart")))
    program = start(work, code=IN_CHINESE)
    assert program.wait() == 0, program.text()
    assert last_checkpoint(work) == last_checkpoint(finished[0])
    assert not list(work.rglob("*.partial-*"))
    report, printed = (work / "corpus/report.html").read_text(), "".join([*said, program.text()])
    texts = (re.sub(r"采样：.*", "", printed), without_samples(work), prose_of_page(report))
    assert [english_left(text) for text in texts] == [[], [], []]
    assert f"训练从第 {reached} 步继续（共 40 步）" in program.text()
    assert "语料报告" in report


def test_full_goes_on_from_what_is_there_and_killed_in_either_run_ends_with_a_row_for_each(finished, tmp_path, start):
    work = tmp_path / "full"
    shutil.copytree(finished[0], work)
    for method in ("dpo", "rl"):
        pattern = f"runs/quickstart-{method}/checkpoints/step-00000000"
        program = start(work, "full", code=KILLED.format(pattern=pattern) + RUN)
        assert program.wait() == -signal.SIGKILL, program.text()
    program = start(work, "full", code=IN_CHINESE)
    assert program.wait() == 0, program.text()
    assert re.findall(r"^(\S+) .*无从知道的拒答", program.text(), re.MULTILINE) == ["对话", "dpo", "rl"]
    summary = without_samples(work)
    assert re.findall(r"^\| (\w+) +\| [\d.]+% +\| en", summary, re.MULTILINE) == ["base", "sft", "dpo", "rl"]
    assert english_left(summary) == []
    bases = [read_json(work / f"runs/quickstart-{name}/finetune.json")["base"] for name in ("dpo", "rl")]
    assert bases == ["quickstart-chat"] * 2
    assert "0" in read_json(work / "runs/quickstart-rl/checkpoints/pins.json"), "its base is kept, also after a kill"
    for run in ("quickstart", "quickstart-chat"):
        steps = [sorted((root / "runs" / run / "checkpoints").glob("step-*")) for root in (finished[0], work)]
        before, after = ([(step.name, step.stat().st_mtime_ns) for step in each] for each in steps)
        assert before == after, "neither was trained again"


def test_full_with_text_of_ones_own_is_refused_before_anything_is_written(z2a, novel: Path, tmp_path: Path) -> None:
    said = z2a.refused(2, "quickstart", "--full", "--data", novel, "--work", tmp_path / "work")
    assert "--full tunes the chat model that the quickstart makes of its own text" in said
    assert not (tmp_path / "work").exists()


@pytest.fixture(scope="module")
def novel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One text of 20 KB in a folder of its own."""
    text = "sun moon river stone bird tree house road light dark small great the of and to in that was with"
    words, rng = re.findall(r"\w+", text), random.Random(1)
    sentences = [" ".join(rng.choices(words, k=rng.randint(5, 12))).capitalize() + "." for _ in range(440)]
    folder = tmp_path_factory.mktemp("own") / "novel"
    folder.mkdir()
    (folder / "novel.txt").write_text("\n\n".join(" ".join(sentences[at : at + 4]) for at in range(0, 440, 4)))
    (folder / "all_dropped.py").write_text("repeat = repeat\n" * 40)
    (folder / "cover.jpg").write_bytes(b"\xff\xd8\xff\xe0" + bytes(range(256)) * 8)
    return folder


@pytest.fixture(scope="module")
def own(warm: WarmProcess, novel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The journey of one small text, as a person types it but for the steps, and what it printed."""
    work = tmp_path_factory.mktemp("journey") / "own"
    return ended_well(warm, Z2A, ["quickstart", "--data", str(novel), "--work", str(work), "--train.steps", "15"], work)


def test_what_a_command_took_before_its_first_stage_counts_at_each_start(tmp_path: Path) -> None:
    for before, spent in ((12.0, 12), (5.0, 17)):
        journey = QuickstartRun(open_workspace(tmp_path, create=True), load_config("quickstart"))
        timer = _Timer(journey)
        with timer.stage("start", before) as done:
            done("loaded")
        assert spent <= timer.spent < spent + 5
        assert (journey.stages[0].seconds, journey.stages[0].done_before) == (pytest.approx(spent, abs=5), False)


def test_twenty_kilobytes_of_text_become_a_model_and_it_is_said_what_was_chosen(own: tuple[Path, str]) -> None:
    work, output = own
    looked = ("3 files, 2", "Everything takes 5m00s", "left out: cover.jpg (binary)")  # how much, and how long it takes
    kept = ("code   0 of 1 documents kept",)
    chosen = ("GFLOP/s in matrix products", "15 steps of", "expected on held-out text: ", "gzip -9")
    ends = (f"z2a generate quickstart --work {work} --prompt", f"In {work}: summary.md")
    assert [words for words in (*looked, *kept, *chosen, *ends) if words not in output] == []
    config, report = load_config(work / "runs/quickstart/config.yaml"), read_json(work / "corpus/report.json")
    assert config.tokenizer.vocab_size < 3072
    assert (config.model.hidden_size, config.train.steps) == (64, 15)
    assert config.data.mixture["novel-code"] == 0
    page = (work / "report.html").read_text()
    assert all(words in page for words in ("held-out loss", "expected", "TFLOP/s", "bits per byte"))
    assert list(report["sources"]) == ["novel-code", "novel-en"]
    assert report["sources"]["novel-en"]["valid_records"] >= 1, "it is cut so that some of it is held out"
    assert report["options"]["rules"] == "default"
    assert report["options"]["dedup"]["near"] != "off"
    (evaluation,) = (work / "runs/quickstart/eval").glob("step-*.json")
    assert read_json(evaluation)["held_out"]["en"]["gzip_bits_per_byte"] > 1


def test_the_best_checkpoint_of_ones_own_text_is_kept_and_the_advice_follows_the_held_out_loss(own):
    work, output = own
    run = work / "runs/quickstart"
    points, kept = read_run(run).series["eval/valid/loss"], list_checkpoints(run)
    assert points.step.tolist() == sorted(map(step_of, kept)) == [3, 6, 9, 12, 15]
    assert points.value.argmin() == 4, "the last is the best, after so few steps"
    assert (work / "runs/quickstart/eval/step-00000015.json").is_file()
    (advice,) = [line for line in output.splitlines() if "The held-out loss" in line]
    assert f"to {points.value[-1]:.3f}: more time would help" in advice
    assert "--train.name longer --train.steps 30" in output
    assert "memorise the text" not in output


def test_only_a_held_out_loss_that_still_falls_asks_for_more_steps(tmp_path):
    for curve, best, said, has_longer in (
        ([(119, 6.5), (238, 6.3), (357, 6.1)], 357, "6.300 at step 238 to 6.100: more time would help", True),
        ([(119, 6.176), (238, 6.19), (357, 6.207)], 119, "that of step 119: its held-out loss is 6.176, at the", False),
        ([(119, 6.5), (238, 6.201), (357, 6.2)], 357, "no longer falls (6.200): more text would help", False),
    ):
        config, own_text = load_config("quickstart"), Speedrun(Workspace(tmp_path), Budget(60), "quickstart", (), "cpu")
        journey = QuickstartRun(
            Workspace(tmp_path), config, speedrun=own_text, curve=curve, best_step=best, last_step=357
        )
        (advice,) = outlook(journey)
        commands = next_commands(journey)
        assert said in advice
        assert ("more time would help" in advice) == has_longer
        assert any("--train.steps 714" in command for command in commands) == has_longer
        assert ("--step 119" in commands[0]) == (best == 119)
        assert journey.is_falling == has_longer


def test_the_same_command_again_chooses_the_same_and_finds_everything_done(own, novel, monkeypatch, capsys):
    monkeypatch.setenv("Z2A_LANG", "zh")
    before, words = (own[0] / "runs/quickstart/config.yaml").read_bytes(), ["--train.steps", "15"]
    config = load_config("quickstart", words)
    journey = run_quickstart(config, own[0], look_at(novel), budget=Budget(300), source="quickstart", overrides=words)
    assert {stage.name for stage in journey.stages if stage.done_before} >= {"tokenizer", "pack", "train"}
    assert (own[0] / "runs/quickstart/config.yaml").read_bytes() == before
    assert len(journey.samples) == 2
    said = capsys.readouterr()
    assert english_left(said.out + said.err) == []
    assert "文档" in said.out


def test_other_text_is_not_put_into_a_workspace_that_has_learned_from_some(own, tmp_path):
    (tmp_path / "other.txt").write_text("Another text, which has nothing to do with it.")
    report = own[0] / "corpus/report.json"
    before = report.read_bytes()
    for other in (look_at(tmp_path / "other.txt"), None):
        with pytest.raises(UsageError, match=r"trained on .*novel.*--fresh.*another --work"):
            run_quickstart(load_config("quickstart"), own[0], other, budget=Budget(300) if other else None)
    assert report.read_bytes() == before


def test_a_vocabulary_of_ones_own_that_is_too_large_names_the_flag_the_quickstart_has(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("A few words, however well chosen, do not fill a large vocabulary.")
    words, own = ["--tokenizer.vocab_size", "900"], look_at(tmp_path / "own.txt")
    with pytest.raises(BadInputError, match=r"--tokenizer.vocab_size asks for 900.* set it to \d+ or less") as caught:
        run_quickstart(load_config("quickstart", words), tmp_path / "work", own, budget=Budget(300), overrides=words)
    assert "--vocab-size" not in str(caught.value)
    assert not (tmp_path / "work/tokenizer").exists()


def test_fresh_leaves_a_folder_alone_that_is_no_workspace(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "mine.txt").write_text("do not delete")
    clear_workspace(tmp_path)
    assert (tmp_path / "corpus" / "mine.txt").read_text() == "do not delete"


def test_a_fresh_speedrun_over_packed_text_leaves_that_text_and_other_runs_alone(tmp_path: Path) -> None:
    workspace = open_workspace(tmp_path, create=True)
    kept = [workspace.packed / "report.json", workspace.tokenizer / "tokenizer.json", workspace.run("mine") / "a"]
    gone = [workspace.run(name) / "a" for name in ("first", "first-pilot", "first-chat")]
    for path in (*kept, *gone):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    clear_workspace(tmp_path, "first")
    assert all(path.is_file() for path in kept)
    assert not any(path.exists() for path in gone)
    assert open_workspace(tmp_path).root == tmp_path
