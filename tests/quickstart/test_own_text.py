"""A person's own folder: looked at before anything starts, and what became of it in words."""

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from zero2all.cli import main
from zero2all.common.errors import BadInputError
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.corpus import BuildOptions, build_corpus
from zero2all.corpus.report import striking_drops
from zero2all.quickstart.own_text import corpus_in_words, look_at, too_little_in_words
from zero2all.quickstart.pipeline import _with_vocabulary
from zero2all.quickstart.speedrun import Budget, Speedrun
from zero2all.quickstart.summary import verdicts

ENGLISH = re.findall(r"\w+", "the of and to in a is that it was for on are with as I his they be at one have this from")
NOUNS = re.findall(r"\w+", "river stone bird tree house road light winter morning letter garden window teacher")


def english(rng: random.Random) -> str:
    sentences = ([rng.choice(ENGLISH if place % 2 else NOUNS) for place in range(9)] for _ in range(8))
    return " ".join(" ".join(words).capitalize() + "." for words in sentences)


def chinese(rng: random.Random) -> str:
    words = re.findall("..", "我们他们自己什么没有知道时候可以这个因为所以现在问题工作学生老师朋友先生")
    return "".join("".join(rng.choices([*words, *"的是在了" * 3], k=12)) + "。" for _ in range(6))


def write_lines(path: Path, texts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def corpus_of(folder: Path, texts: Iterable[str]) -> tuple[Workspace, dict[str, Any]]:
    """That of a file of these texts, and its report."""
    write_lines(folder / "a.jsonl", texts)
    workspace, source = open_workspace(folder / "work", create=True), look_at(folder / "a.jsonl").source
    return workspace, build_corpus(workspace.corpus, [source], BuildOptions(accept_drops=True))


def test_too_little_text_ends_with_3_and_the_way_on_before_anything_is_written(tmp_path: Path, z2a) -> None:
    texts, words = tmp_path / "texts", ["quickstart", "--work", tmp_path / "work", "--data"]
    texts.mkdir()
    assert re.search("contains no files.*`z2a quickstart` without --data", z2a.refused(3, *words, texts), re.DOTALL)
    (texts / "a.txt").write_text("")
    (texts / ".b.txt").write_text("hidden")
    with pytest.raises(BadInputError, match=r"only files that are not read \(1 hidden, 1 empty file\)"):
        look_at(texts)
    (tmp_path / "short.txt").write_text("hi!")
    said = z2a.refused(3, *words, tmp_path / "short.txt")
    assert "short.txt has 3 B. That is too little to learn from: the quickstart needs 20 KB" in said
    assert not (tmp_path / "work").exists()
    assert re.fullmatch("7.6 KB of text is too little.*at least 20 KB.*", *too_little_in_words(7_600))
    assert too_little_in_words(20_000) == []


def test_a_mixed_folder_becomes_channels_and_what_was_left_out_is_named_with_its_reason(tmp_path: Path) -> None:
    rng = random.Random(5)
    folder = tmp_path / "mixed"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number:02}.txt").write_text(english(rng))
        (folder / f"{number:02}.md").write_text(chinese(rng))
    (folder / "tool.py").write_text("def tool(items):\n    return [item for item in items if item]\n")
    reviews = [(number, english(rng)) for number in range(5)]
    figures = [(number, number * 0.5) for number in range(200)]
    for name, rows in {"reviews": [("stars", "text"), *reviews], "figures": [("x", "y"), *figures]}.items():
        (folder / f"{name}.csv").write_text("".join(f"{one},{other}\n" for one, other in rows))
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0" + rng.randbytes(3000))
    write_lines(folder / "notes.jsonl", (english(rng) for _ in range(5)))

    own, workspace = look_at(folder), open_workspace(tmp_path / "work", create=True)
    assert (own.files, own.source.channel) == (55, "auto")
    options = BuildOptions(valid_share=0.1, max_damaged_share=1.0, accept_drops=True)
    report = build_corpus(workspace.corpus, [own.source], options)
    assert list(report["sources"]) == ["mixed-code", "mixed-en", "mixed-zh"]
    said = "\n".join(corpus_in_words(report, workspace))
    for words in (
        "code   1 of 1 documents kept",
        "en     35 of 35 documents kept",
        "zh     25 of 25 documents kept",
        "content from 'text'",
        "left out: photo.jpg (binary)",
        "left out: figures.csv: 200 records (no text field: fields: x, y; if one is the text: --map content=FIELD)",
    ):
        assert words in said, words
    assert striking_drops(report, workspace.root) == []


def test_a_rule_that_drops_much_is_named_with_a_command_that_works_here(tmp_path: Path) -> None:
    rng = random.Random(6)
    rows = [*(english(rng) for _ in range(60)), *["Menu"] * 30]
    workspace, report = corpus_of(tmp_path, (f"{row} {n}" for n, row in enumerate(rows)))
    (loss,) = striking_drops(report, workspace.root)
    assert "dropped 33.3% of the records" in loss
    rule = loss.split(": ")[1].split()[0]
    assert loss.endswith(f"z2a corpus show --work {workspace.root} a-en --dropped {rule}")
    assert main(loss.split("z2a ")[1].split()) == 0


def test_a_second_training_of_the_tokenizer_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(7)
    workspace, _ = corpus_of(tmp_path, (english(rng) for _ in range(60)))
    speedrun = Speedrun(workspace, Budget(600), "quickstart", (), "cpu")
    speedrun.keep(speed={"host": 0.0, "each": 35e-6, "flops": 1e11})
    config = _with_vocabulary(speedrun, workspace, 100_000)
    told = re.search(r"has pieces for at most (\d+) token ids: training again", capsys.readouterr().out)
    assert told is not None
    assert config.tokenizer.vocab_size == int(told[1])


def test_bits_per_byte_are_put_into_words_beside_gzip() -> None:
    for bits, is_falling, words in (
        (2.0, True, "en: 2.00, 50% less than gzip -9 (4.00). It learned from your text."),
        (4.5, True, "en: 4.50, more than gzip -9 (4.00). It needs more time (--minutes)."),
        (4.5, False, "en: 4.50, more than gzip -9 (4.00). It needs more text."),
    ):
        assert words in "\n".join(verdicts({"en": {"bits_per_byte": bits, "gzip_bits_per_byte": 4.0}}, is_falling))
        assert "No text was held out" in "\n".join(verdicts({}, is_falling))
