"""Each verb once on a tiny workspace, then what happens when the journey goes wrong."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until
from zero2all.common.errors import BadInputError
from zero2all.common.files import PARTIAL_MARK
from zero2all.common.manifest import read_manifest, verify_files
from zero2all.tokenizer.train import SCRATCH_MARK

Z2A = Path(sys.executable).with_name("z2a")


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if PARTIAL_MARK in path.name]


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """A real limit of the system: a write beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_corpus_show_prints_records_and_knows_its_sources(journey, z2a):
    assert z2a.done("corpus", "show", "zh", "--count", "2", "--split", "valid", "--work", journey).count("── gid ") == 2
    said = z2a.refused(2, "corpus", "show", "em", "--work", journey)
    assert said == "z2a: There is no source `em`. Did you mean `en`?\n"


def test_pack_prints_what_it_packed_and_packs_nothing_twice(copy, z2a):
    out = z2a.done("pack", "--work", copy)
    *lines, encoder = out.splitlines()
    assert [line.split()[0] for line in lines] == ["en/train", "en/valid", "zh/train", "zh/valid"]
    assert "encoded by tokenizers" in encoder
    assert all("tokens" in line and "bytes/token" in line for line in lines)
    before = {path: path.stat().st_mtime_ns for path in (copy / "packed").rglob("*")}
    assert z2a("pack", "--work", copy).out == out
    assert {path: path.stat().st_mtime_ns for path in (copy / "packed").rglob("*")} == before


def test_eval_prints_bits_per_byte_and_probes_and_writes_its_report(copy, z2a):
    probe = {"id": "1", "channel": "en", "family": "capital", "prompt": "ka lo", "answer": " mi", "foils": [" ter"]}
    (copy / "probes.jsonl").write_text(json.dumps(probe) + "\n")
    asked = ("--probes", copy / "probes.jsonl", "--pairs", "none")
    out = z2a.done("eval", "tiny", "--work", copy, "--max-bytes", "2000", *asked)
    assert out.startswith("tiny at step 4\n")
    _, number, table, *_ = out.split("\n\n")
    assert re.fullmatch(r"held-out loss \d\.\d{4} nats per token, .* 416 tokens in contiguous rows of 32", number)
    assert table.startswith("contiguous rows")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[1:]}
    assert "capital" in out
    report = json.loads((copy / "runs/tiny/eval/step-00000004.json").read_text())
    assert f"{report['held_out']['zh']['bits_per_byte']:.4f}" == rows["zh"][1]
    trained = z2a("train", copy / "runs" / "tiny" / "config.yaml", "--work", copy).out
    assert number in trained, "one value, wherever it is shown"
    shown = {line.split()[0]: line.split()[1] for line in trained.splitlines() if "eval/valid" in line}
    for channel, name in {"en": "/en", "zh": "/zh", "all": ""}.items():
        assert rows[channel][:2] == [shown[f"eval/valid/{kind}{name}"] for kind in ("loss", "bpb")]
    listed = json.loads(z2a("runs", "--work", copy, "--json").out)
    assert f"{listed[0]['held_out_loss']:.4f}" == rows["all"][0]
    older = ("--step", "2", "--max-bytes", "500", "--probes", "none", "--pairs", "none")
    assert z2a.done("eval", "tiny", "--work", copy, *older).startswith("tiny at step 2\n")


def test_export_writes_a_hugging_face_folder_and_import_makes_a_run_of_it(journey, tmp_path, z2a):
    folder = tmp_path / "hf"
    out = z2a.done("export", "tiny", "--work", journey, "--out", folder)
    assert out == f"{folder}: tiny at step 4, for transformers.AutoModelForCausalLM\n"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert f"{folder} already exists" in z2a.refused(2, "export", "tiny", "--work", journey, "--out", folder)
    said = z2a.refused(3, "import", tmp_path / "nowhere", "--work", tmp_path / "new", "--name", "x")
    assert "nowhere is not a Hugging Face model folder" in said
    assert not (tmp_path / "new").exists()
    out = z2a.done("import", folder, "--work", tmp_path / "new", "--name", "continued")
    assert f"z2a train {tmp_path / 'new' / 'runs' / 'continued' / 'config.yaml'} --work {tmp_path / 'new'}" in out


def test_a_run_that_is_not_there_ends_with_3_and_names_those_that_are(journey, z2a):
    for verb in (["plot"], ["eval"], ["generate", "--prompt", "x"], ["export", "--out", "hf"]):
        assert "tiny" in z2a.refused(3, *verb, "tinny", "--work", journey).replace("tinny", "")


def test_each_stage_names_the_stage_that_is_missing(raw, tmp_path, z2a, tiny):
    def said(*words: str) -> str:
        return z2a.refused(3, *words, "--work", tmp_path)

    assert z2a("corpus", "build", f"en={raw / 'en.jsonl'}", "--work", tmp_path).code == 0
    assert "Run `z2a tokenizer train` first" in said("pack")
    assert "Run `z2a tokenizer train` first" in said("tokenizer", "encode", "x")
    assert "Run `z2a pack` first" in said("train", "quickstart", *tiny)
    assert z2a("eval", "tiny", "--work", tmp_path).code == 3, "an attempt that never began is no run"


def test_a_limit_of_the_file_size_ends_every_stage_with_4_and_leaves_nothing_half_written(copy, raw, z2a, tiny):
    for folder in ("corpus", "tokenizer", "packed", "runs"):
        (copy / folder).rename(copy / f"kept-{folder}")

    def fails_for_want_of_room(size_bytes: int, *words: str | Path) -> None:
        with files_up_to(size_bytes):
            ended = z2a(*words, "--work", copy)
        assert ended.code == 4, ended.err
        assert f"this process may write files of at most {size_bytes:,} bytes" in ended.err
        assert "raise the limit (`ulimit -f unlimited`" in ended.err
        assert "Traceback" not in ended.err
        assert leftovers(copy) == []

    fails_for_want_of_room(8_000, "corpus", "build", f"en={raw / 'en.jsonl'}:en", f"zh={raw / 'zh.json'}")
    assert z2a("tokenizer", "train", "--vocab-size", "400", "--work", copy).code == 3, "there is no corpus"
    shutil.rmtree(copy / "corpus")
    (copy / "kept-corpus").rename(copy / "corpus")
    fails_for_want_of_room(4_000, "tokenizer", "train", "--vocab-size", "400")
    assert not (copy / "tokenizer").exists()
    (copy / "kept-tokenizer").rename(copy / "tokenizer")
    fails_for_want_of_room(10_000, "pack")
    assert not (copy / "packed" / "en" / "train").exists()
    assert z2a("pack", "--work", copy).code == 0
    fails_for_want_of_room(30_000, "train", "quickstart", *tiny)
    assert list((copy / "runs" / "tiny" / "checkpoints").iterdir()) == []
    assert z2a("train", "quickstart", *tiny, "--work", copy).code == 0
    fails_for_want_of_room(30_000, "export", "tiny", "--out", copy / "hf")
    assert not (copy / "hf").exists()
    picture = copy / "runs" / "tiny" / "curves.png"
    fails_for_want_of_room(5_000, "plot", "tiny")
    assert not picture.exists()
    assert z2a.done("plot", "tiny", "--work", copy) == f"{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_workspace_that_may_no_longer_be_written_ends_with_3_and_the_path(copy, z2a_without_rights):
    (copy / "tokenizer").rename(copy / "tokenizer-before")
    copy.chmod(0o555)
    ended = z2a_without_rights("tokenizer", "train", "--vocab-size", "400", "--work", copy)
    copy.chmod(0o755)
    assert ended.code == 3, ended.err
    assert f"z2a: {copy / 'tokenizer'}{SCRATCH_MARK}" in ended.err
    assert "Permission denied. Check the path" in ended.err


def test_output_that_finds_no_room_ends_with_4(journey):
    """A reader that leaves is no error (test_cli_streams.py); a full disk under the output is one."""
    command = f"{Z2A} corpus show en --count 100 --work {journey} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, "the disk is full (No space left on device)" in done.stderr) == (4, True)


def as_from_a_terminal() -> None:
    """A shell that runs tests in the background has its children ignore Ctrl-C; a person's terminal does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.nice(19)  # so that on a busy machine, too, the test comes in time to interrupt


def test_ctrl_c_during_a_corpus_build_ends_with_130_and_the_same_command_finishes(tmp_path):
    line = '{{"text": "{} some words that make this line a little longer than it would be without them"}}\n'
    (tmp_path / "big.jsonl").write_text("".join(line.format(number) for number in range(5_000)))
    command = [Z2A, "corpus", "build", f"big={tmp_path / 'big.jsonl'}", "--work", tmp_path / "w", "--dedup.near", "off"]
    quiet = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, **quiet, preexec_fn=as_from_a_terminal)
    corpus = tmp_path / "w" / "corpus"
    wait_until(lambda: (corpus / ".build").exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGINT), said  # a shell shows 130 for both
    last = said.strip().splitlines()[-1]
    assert last == "z2a: interrupted. Finished work is kept; run the same command again to continue."
    assert leftovers(corpus) == []
    assert not (corpus / "report.json").exists()
    with pytest.raises(BadInputError):
        read_manifest(corpus / "big", "corpus", "z2a corpus build")

    assert subprocess.run(command, capture_output=True).returncode == 0
    manifest = read_manifest(corpus / "big", "corpus", "z2a corpus build")
    assert (manifest["report"]["records_kept"], verify_files(corpus / "big", manifest)) == (5_000, [])
