"""`z2a eval download` against a small hub on this machine."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile

import pytest

from tests.corpus.hub_server import HubServer
from zero2all.cli import main
from zero2all.common.errors import BadInputError, UsageError, UserError
from zero2all.evals.download import SOURCES, download_benchmark
from zero2all.evals.tasks.list import READERS

TABLE = ",Question,A,B,C,D,Answer\n0,天？,蓝,绿,红,黄,A\n".encode()


@pytest.fixture
def archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("test/agronomy.csv", TABLE)
        packed.writestr("dev/agronomy.csv", TABLE)
    return file.getvalue()


@pytest.fixture
def hub(monkeypatch, archive):
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with HubServer() as server:
        files = {"cmmlu_v1_0_1.zip": archive, "README.md": b"licence: see here", "cmmlu.py": b"a script"}
        server.put(SOURCES["cmmlu"].repo, files)
        yield server


def test_every_benchmark_that_can_be_read_can_be_fetched():
    assert SOURCES.keys() == READERS.keys()


def test_a_benchmark_is_fetched_read_and_described(hub, tmp_path, archive, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    assert main(["eval", "download", "cmmlu", "--data", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "cmmlu: 1 items, 1 examples; licence: CC BY-NC" in said
    assert f"next: z2a eval RUN --tasks cmmlu --data {tmp_path}" in said
    facts = json.loads((tmp_path / "cmmlu/benchmark.json").read_bytes())
    assert (facts["repo"], facts["commit"]) == ("lmlmcat/cmmlu", hub.repos["lmlmcat/cmmlu"].head)
    assert facts["files"].keys() == {"cmmlu_v1_0_1.zip", "README.md"}, "scripts are not wanted"
    digest = hashlib.sha256(archive).hexdigest()
    assert facts["files"]["cmmlu_v1_0_1.zip"] == {"bytes": len(archive), "sha256": digest}
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


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no benchmark 'cmlu' to download. Did you mean `cmmlu`\?"):
        download_benchmark("cmlu", tmp_path)


def test_the_verbs_of_before_are_answered(capsys):
    for words, now in (("eval fetch cmmlu", "eval download"), ("eval export-tasks lm-tasks", "eval RUN --tasks NAMES")):
        assert main(words.split()) == 2
        assert f"is now `z2a {now}`." in capsys.readouterr().err
