"""`z2a serve` as people start it: a process, its words, its signals, a folder that is deleted under it."""

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.processes import Program, Start
from zero2all.common.workspace import Workspace

Serve = Callable[..., tuple[Program, openai.OpenAI]]


@pytest.fixture
def serve(start: Start, trained_workspace: Workspace, tmp_path: Path) -> Serve:
    """Start the command over a copy of the workspace, and wait until it says where it is."""

    def begin(*words: object) -> tuple[Program, openai.OpenAI]:
        work = tmp_path / "work"
        shutil.copytree(trained_workspace.root, work)
        program = start("serve", "tiny", "--work", work, "--port", 0, "--device", "cpu", *words)
        program.wait_until(lambda: "model=" in program.text() or program.poll() is not None)
        address = re.search(r"base_url=(\S+), (?:any )?api_key(?:=(\S+))?, model=tiny", program.text())
        assert address, program.text()
        return program, openai.OpenAI(base_url=address[1], api_key=address[2] or "none", max_retries=0)

    return begin


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(model="tiny", prompt="The capital of China is", temperature=0, **fields)


def is_ending(client: openai.OpenAI) -> bool:
    try:
        client.completions.create(model="tiny", prompt=[1])
    except openai.InternalServerError as error:
        return error.code == "draining"
    return False


def test_it_says_where_it_is_outlives_its_folder_and_ends_with_sigterm(serve: Serve, tmp_path):
    program, client = serve("--weights", "int8", "--max-len", 100_000)
    assert "--max-len 100000 is reduced to 128" in program.text()
    assert "http://127.0.0.1:" in program.text()
    before = ask(client).choices[0].text
    shutil.rmtree(tmp_path / "work")
    assert ask(client).choices[0].text == before
    assert client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    facts = client.models.list().data[0].model_dump()["z2a"]
    assert (facts["step"], facts["max_len"], facts["dtype"]) == (30, 128, "int8")
    assert facts["parameters"] > 100_000
    program.signal(signal.SIGTERM)
    assert program.wait() == 0


def test_the_first_signal_waits_for_what_runs_and_the_second_does_not(serve: Serve):
    program, client = serve("--token", "--grace", 60, "--max-batch", 1)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    stream = ask(client, max_tokens=100, n=100, stream=True)  # one after the other
    next(iter(stream))
    program.signal(signal.SIGINT)
    program.wait_until(lambda: is_ending(client))
    program.wait_until(lambda: "requests, up to 60 s; Ctrl-C again ends at once." in program.text())
    assert program.poll() is None
    program.signal(signal.SIGINT)
    assert program.wait() == 130


def test_what_cannot_be_served_is_said_before_and_after_loading(start: Start, trained_workspace: Workspace, tmp_path):
    work = ("--work", trained_workspace.root, "--port", 0)
    (tmp_path / "short").write_text("abc\n")
    (tmp_path / "open").write_text("a-token-that-others-read\n")
    (tmp_path / "open").chmod(0o644)
    expected = (
        (("nobody", *work), 3, "nobody"),
        (("tiny", *work, "--token-file", tmp_path / "short"), 3, "at least 16"),
        (("tiny", *work, "--token-file", tmp_path / "none"), 3, "cannot be read"),
        (("tiny", *work, "--token-file", tmp_path / "open"), 3, "chmod 600"),
        (("tiny", *work, "--cors", "*"), 2, "one site"),
        (("tiny", *work, "--host", "no.such.host.example"), 2, "not an address of this machine"),
        (("tiny", *work, "--cache-gb", "0.000001"), 2, "too small"),
    )
    for program, (_, code, said) in [(start("serve", *each[0]), each) for each in expected]:
        assert program.wait() == code, program.text()
        assert said in program.text()
