"""`z2a eval download` against a small hub on this machine."""

import hashlib
import json

import pytest

from tests.corpus.hub_server import hub_alone
from tests.corpus.readers.reader_samples import zip_of
from zero2all.cli import main
from zero2all.common.errors import BadInputError, UsageError, UserError
from zero2all.evals.download import SOURCES, download_benchmark
from zero2all.evals.tasks.list import READERS

TABLE = ",Question,A,B,C,D,Answer\n0,天？,蓝,绿,红,黄,A\n".encode()


ARCHIVE = zip_of({f"{split}/agronomy.csv": TABLE for split in ("test", "dev")})


@pytest.fixture
def hub(monkeypatch):
    files = {"cmmlu_v1_0_1.zip": ARCHIVE, "README.md": b"licence: see here", "cmmlu.py": b"a script"}
    with hub_alone(monkeypatch) as server:
        server.put(SOURCES["cmmlu"].repo, files)
        yield server


def test_a_benchmark_is_fetched_read_and_described(hub, tmp_path, monkeypatch, capsys):
    assert SOURCES.keys() == READERS.keys(), "every benchmark that can be read can be fetched"
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    assert main(["eval", "download", "cmmlu", "--data", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "cmmlu: 1 items, 1 examples; licence: CC BY-NC" in said
    assert f"next: z2a eval RUN --tasks cmmlu --data {tmp_path}" in said
    facts = json.loads((tmp_path / "cmmlu/benchmark.json").read_bytes())
    assert (facts["repo"], facts["commit"]) == ("lmlmcat/cmmlu", hub.repos["lmlmcat/cmmlu"].head)
    assert facts["files"].keys() == {"cmmlu_v1_0_1.zip", "README.md"}, "scripts are not wanted"
    digest = hashlib.sha256(ARCHIVE).hexdigest()
    assert facts["files"]["cmmlu_v1_0_1.zip"] == {"bytes": len(ARCHIVE), "sha256": digest}
    asked = len(hub.asked("cmmlu_v1_0_1.zip"))
    download_benchmark("cmmlu", tmp_path, hub.endpoint, lambda _: None)
    assert len(hub.asked("cmmlu_v1_0_1.zip")) == asked, "what is here is not fetched again"


def test_without_the_hub_it_says_what_to_put_where(hub, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"has no dataset cais/mmlu.* By hand: .*all/test-\*.* copy them into .*/mmlu"):
        download_benchmark("mmlu", tmp_path, hub.endpoint, lambda _: None)
    assert not (tmp_path / "mmlu").exists()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInputError, match=r"HF_HUB_OFFLINE is set, so nothing is downloaded\. By hand: "):
        download_benchmark("mmlu", tmp_path, hub.endpoint, lambda _: None)


def test_an_unknown_name_is_refused_and_the_verbs_of_before_are_answered(tmp_path, capsys):
    with pytest.raises(UsageError, match=r"no benchmark 'cmlu' to download. Did you mean `cmmlu`\?"):
        download_benchmark("cmlu", tmp_path)
    for words, now in (("eval fetch cmmlu", "eval download"), ("eval export-tasks lm-tasks", "eval RUN --tasks NAMES")):
        assert main(words.split()) == 2
        assert f"is now `z2a {now}`." in capsys.readouterr().err
