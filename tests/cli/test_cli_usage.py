"""What the command line refuses before anything is started, and how it says so."""

import pytest

from zero2all import __version__
from zero2all.cli.main import _fail_for_disk_or_path, split_overrides, unknown_field, with_verb
from zero2all.common.files import write_json
from zero2all.common.workspace import LAYOUT, STAMP_NAME, open_workspace
from zero2all.config import load_config


def paragraph(text: str) -> str:
    """The one message of a command that failed: a single line, without a traceback."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("z2a: ")
    return lines[0].removeprefix("z2a: ")


def test_overrides_are_told_from_flags_wherever_they_stand():
    words = ["train", "--optim.lr_max", "3e-4", "quickstart", "--data.mixture={en: 1, zh: 2}", "--fresh"]
    plain, overrides = split_overrides([*words, "--data.seed", "-5"])
    assert plain == ["train", "quickstart", "--fresh"]
    assert overrides == ["--optim.lr_max", "3e-4", "--data.mixture={en: 1, zh: 2}", "--data.seed", "-5"]
    missing = ["train", "x", "--train.steps", "--work", "w"]
    assert split_overrides(missing) == (["train", "x", "--work", "w"], ["--train.steps"])
    behind_dashes = ["tokenizer", "encode", "--", "--a.b", "c"]
    assert split_overrides(behind_dashes) == (behind_dashes, [])


def test_the_name_of_a_run_after_eval_means_to_evaluate_it():
    assert with_verb(["eval", "--work", "w", "my-run"]) == ["eval", "run", "--work", "w", "my-run"]
    assert with_verb(["eval"]) == ["eval", "run"]
    for words in (["eval", "run", "run"], ["eval", "--help"], ["tokenizer", "eval"]):
        assert with_verb(words) == words


def test_print_config_shows_the_resolved_config_which_loads_back_to_an_equal_one(z2a, tmp_path):
    expected = load_config("quickstart", ["--optim.lr_max", "3e-4"])
    for words in (
        "train quickstart --print-config --optim.lr_max 3e-4",
        "train --optim.lr_max=3e-4 quickstart --print-config",
    ):
        (tmp_path / "printed.yaml").write_text(z2a.done(*words.split()), encoding="utf-8")
        assert load_config(tmp_path / "printed.yaml") == expected


def test_missing_or_mistyped_words_end_with_2_and_one_line_that_says_what_to_type(z2a):
    for words, expected in (
        ("trian", "There is no verb `trian`. Did you mean `train`? `z2a --help` lists the verbs."),
        ("corpus", "`z2a corpus` needs a verb: build, show, report, rules, teach, download. See `z2a corpus --help`."),
        ("corpus xyz", "`z2a corpus` has no verb `xyz`. Use one of: build, show, report, rules, teach, download."),
        ("pack --wrok w", "`z2a pack` has no flag `--wrok`. Did you mean `--work`? See `z2a pack --help`."),
        ("pack --wo w", "`z2a pack` has no flag `--wo`."),
        ("pack stray", "`z2a pack` takes no argument `stray`. See `z2a pack --help`."),
        ("pack --optim.lr_max 1", "`z2a pack` reads no config, so `--optim.lr_max` cannot be set here."),
        ("generate r --prompt x --stages []", "`z2a generate` reads no config, so `--stages`"),
        ("train --optm.lr 1", "There is no config field `optm.lr`. Did you mean `--optim.lr_max`?"),
        ("train --optim.lr 1", "There is no config field `optim.lr`. Did you mean `--optim.lr_max`?"),
        ("export r --to x", "--to: got 'x', expected one of hf, gguf, mlx."),
        ("export r --output x", "`z2a export` has no flag `--output`. Did you mean `--out`?"),
        ("completion bash", "`z2a completion` was removed."),
        ("chaos soak quickstart --minutes 3", "`z2a chaos soak` was removed."),
        ("train", "`z2a train` needs CONFIG. See `z2a train --help`."),
        ("generate run", "`z2a generate` needs --prompt or --prompts. See `z2a generate --help`."),
        ("pack --work", "--work needs a value. See `z2a pack --help`."),
        ("train quickstart --fresh=1", "--fresh takes no value, but got '1'."),
        ("eval r --step 1 --all-steps", "--all-steps and --step exclude each other. Give one of them."),
        ("export r --out x --dtype flot32", "--dtype: got 'flot32', expected one of float32, bfloat16, float16. Did"),
        ("tokenizer decode x", "ID: got 'x', expected a whole number. See `z2a tokenizer decode --help`."),
    ):
        assert paragraph(z2a.refused(2, *words.split())).startswith(expected)


def test_a_config_field_that_is_written_as_a_flag_gets_its_section(z2a):
    for flag, field in (("--lr", "--optim.lr_max"), ("--seq-len", "--data.seq_len")):
        assert f"Did you mean `{field}`?" in paragraph(z2a("train", "quickstart", flag, "1").err)
    assert unknown_field(["--data.mixture.en", "2", "--stages", "[]", "--model={heads: 2}"]) is None


def test_a_config_with_problems_ends_with_2_names_the_command_line_and_starts_nothing(z2a, tmp_path):
    open_workspace(tmp_path, create=True)
    words = ("--work", tmp_path, "--optim.lr", "3", "--train.steps", "x", "--model.heads", "7")
    lines = z2a.refused(2, "train", "quickstart", *words).splitlines()
    assert lines[0] == "z2a: The command line has 4 problems; nothing was started."
    assert [line.split()[0] for line in lines[1:]] == ["1.", "2.", "3.", "4."]
    assert sorted(path.name for path in tmp_path.iterdir()) == [STAMP_NAME], "no run folder"


def test_quickstart_takes_overrides_and_refuses_them_before_it_makes_anything(z2a, tmp_path):
    said = z2a.refused(2, "quickstart", "--work", tmp_path / "q", "--train.stepps", "3")
    assert "`train` has no field `stepps`. Did you mean `steps`?" in said
    assert not (tmp_path / "q").exists()


def test_a_data_path_that_is_not_there_ends_with_3_and_makes_no_workspace(z2a, tmp_path):
    said = z2a.refused(3, "corpus", "build", f"a={tmp_path / 'absent.txt'}", "--work", tmp_path / "w")
    assert "absent.txt does not exist" in paragraph(said)
    assert not (tmp_path / "w").exists()
    said = z2a.refused(3, "quickstart", "--data", tmp_path / "absent", "--work", tmp_path / "w")
    assert "absent does not exist. Give a file or a folder" in paragraph(said)
    assert not (tmp_path / "w").exists()


def test_a_data_path_that_may_not_be_read_ends_with_3(tmp_path, z2a_without_rights):
    secret = tmp_path / "secret.txt"
    secret.write_text("text")
    secret.chmod(0o000)
    said = z2a_without_rights.refused(3, "corpus", "build", f"a={secret}", "--work", tmp_path / "w")
    assert f"no permission to read {secret}" in paragraph(said)
    assert not (tmp_path / "w").exists()


def test_an_empty_corpus_ends_with_3_and_no_later_stage_takes_it_for_whole(z2a, tmp_path):
    for content in ("", "  \n \n"):
        (tmp_path / "empty.txt").write_text(content)
        said = z2a.refused(3, "corpus", "build", f"a={tmp_path / 'empty.txt'}", "--work", tmp_path / "w")
        assert "empty" in said or "nothing readable" in said
    for stage in (["tokenizer", "train"], ["pack"], ["corpus", "show", "a"]):
        assert "There is no finished corpus" in paragraph(z2a.refused(3, *stage, "--work", tmp_path / "w"))


def test_a_workspace_of_another_version_ends_with_3_in_every_stage(z2a, tmp_path, raw):
    work = tmp_path / "w"
    write_json(work / STAMP_NAME, {"layout": LAYOUT + 1, "zero2all": "99.0"})
    before = sorted(work.rglob("*"))
    later = ("tokenizer train", "pack", "train quickstart", "plot run", "eval a-run", "generate run --prompt x")
    for words in (f"corpus build a={raw / 'en.jsonl'}", *later, "export run --out somewhere"):
        message = paragraph(z2a.refused(3, *words.split(), "--work", work))
        assert f"written by another version of zero2all (layout {LAYOUT + 1}; this version, {__version__}" in message
    assert sorted(work.rglob("*")) == before


def test_chaos_outside_of_a_workspace_says_so_with_and_without_a_config(z2a, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("Z2A_WORK", raising=False)
    (tmp_path / "plan.yaml").write_text("- {fault: kill, step: 8}")
    said = paragraph(z2a.refused(2, "chaos", "plan.yaml"))
    assert "needs CONFIG" in said
    assert "There is no workspace here: name one with --work DIR." in said
    assert "workspace here" not in z2a("chaos", "plan.yaml", "--work", "x").err
    message = paragraph(z2a("chaos", "plan.yaml", "quickstart").err)
    assert f"{tmp_path} is not a workspace" in message


def test_what_is_no_mistake_of_the_person_keeps_its_traceback():
    for error in (ZeroDivisionError(), FileNotFoundError(2, "No such file or directory", "ours.bin")):
        with pytest.raises(type(error)):
            _fail_for_disk_or_path(error)
