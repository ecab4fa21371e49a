"""For a person whose locale is Chinese no English sentence is left: help, overview and errors."""

import io
import re
from itertools import pairwise

import pytest

from tests.cli.conftest import parsers
from tests.english import english_left, prose_of_page
from zero2all.cli.main import build_parser

pytestmark = pytest.mark.usefixtures("chinese")


@pytest.fixture
def chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Z2A_LANG", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    monkeypatch.setenv("COLUMNS", "100")


def test_english_is_found_among_chinese_but_code_and_names_are_not():
    assert english_left("已完成。the run has ended. 请继续") == ["the run has ended", "the run", "has ended"]
    assert english_left("超过 99.9% of text") == ["of text"]
    names = "用 `z2a train the model` 或 z2a corpus build --work my-workspace，见 docs/the file.md；Hugging Face 文件夹"
    assert english_left(names) == []
    page = "<p title='x'>报告</p><pre>The sun shines on us.</pre><p>not one sentence</p>"
    assert english_left(prose_of_page(page)) == ["not one sentence", "not one"]


def test_help_of_every_verb_and_the_overview(z2a, tmp_path, monkeypatch):
    left = {parser.prog: english_left(parser.format_help()) for parser in parsers(build_parser())}
    assert len(left) > 40
    assert {verb: words for verb, words in left.items() if words} == {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("Z2A_WORK", raising=False)
    for words in ("", "help", "help train", "--help"):
        assert english_left(z2a.done(*words.split())) == []


def test_overview_and_runs_of_a_workspace(z2a, copy, monkeypatch):
    monkeypatch.chdir(copy)
    of_stages = ("corpus report", "corpus rules zh", "data stats", "data verify")
    for words in ("", "runs", *of_stages, "eval tiny --probes none --pairs none"):
        ended = z2a(*words.split())
        assert ended.code == 0
        said = re.sub(r"(?m)^ {20,}.*$", "", ended.out)  # settings of the rules
        assert english_left(said + ended.err) == [], words
        headings = [line for line, below in pairwise(said.splitlines()) if below.startswith(" ──")]
        assert re.findall("[a-z]{3,}", " ".join(headings)) == [], words


ERRORS = (
    *("trian", "corpus buidl", "train", "train quickstart --fresh=1", "pack --work", "eval r --step 1 --all-steps"),
    *("tokenizer decode x", "export r --out x --dtype flot32", "--lang fr", "corpus build a=b --valid-share 0.9"),
    *("train quickstart --optm.lr 1", "train quickstart --optim.lr_max many", "train missing.yaml"),
    *("runs", "quickstart --data empty", "import missing --name a", "corpus show --work file.txt", "watch"),
)


def test_errors(z2a, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("Z2A_WORK", raising=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("text")
    for words in ERRORS:
        ended = z2a(*words.split())
        assert ended.code in (2, 3)
        assert english_left(ended.err) == []
        assert any("\u4e00" <= char <= "\u9fff" for char in ended.err), words


CALCULATED = {
    "perf predict z2all-1b --cluster h100 --gpus 16 --parallel.zero 1": ("被掩盖", "16 x h100 (数据手册)", "下界"),
    "perf model z2all-1b --gpu h200": ("用时：矩阵乘法", "用时：交叉熵", "受算力限制"),
    "perf shapes --gpu h100 --matmul 8192,14336,4096": ("3,584 个", "28 个", "受算力限制"),
    "train z2all-1b --plan-only --parallel.tensor 2": ("GPU 的算子", "损失"),
    "perf cost --help": ("层数", "模型宽度"),
}


@pytest.mark.parametrize("words", CALCULATED)
def test_what_is_calculated(words, z2a, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = z2a.done(*words.split())
    formulas = r"[a-z]+( x [a-z]+)+|2 m n k"
    assert english_left(re.sub(formulas, "", out)) == []
    assert [word for word in CALCULATED[words] if word not in out] == []


def test_names_in_a_list_and_commands_in_an_error_are_not_translated(z2a, copy, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"/foo\n")))
    assert "reset, tokens, thinking, template, frame" in z2a("chat", "tiny", "--work", copy).err
    for words in ("runs extra", "generate --temperature hot"):
        assert f"`z2a {words.split()[0]} --help`" in z2a(*words.split()).err
