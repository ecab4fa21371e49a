"""`z2a generate`: one text in the terminal, many into a file, and what becomes of a command that is killed."""

import json
import signal
import sys

import pytest

from tests.processes import Z2A

SHARED = ("generate", "tiny", "--max-new-tokens", "8", "--device", "cpu")
PROMPT = "The capital of France is"


@pytest.fixture
def generate(z2a, trained_workspace):
    return lambda *words: z2a(*SHARED, "--work", trained_workspace.root, *words)


@pytest.fixture
def lines_file(tmp_path):
    def write(*values):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    return write


def parsed(text):
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_are_continued_one_after_the_other_and_the_seed_decides_the_draws(generate):
    alone = [generate("--prompt", prompt).out.strip("\n") for prompt in (PROMPT, "中国的")]
    assert alone[0].startswith(PROMPT)
    assert len(alone[0]) > len(PROMPT) + 5
    assert generate("--prompt", PROMPT, "--prompt", "中国的").out == "\n\n".join(alone) + "\n"
    drawing = ("--prompt", PROMPT, "--temperature", "1.5", "--top-p", "0.9", "--seed")
    drawn = [generate(*drawing, seed).out for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


def test_control_characters_do_not_reach_a_terminal(generate, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert generate("--prompt", "\x1b[2J中").out.startswith("\N{REPLACEMENT CHARACTER}[2J中")


def test_a_line_may_have_settings_samples_and_a_name_of_its_own(generate, lines_file):
    first = {"prompt": "The", "id": "x", "n": 3, "temperature": 2, "seed": 5}
    last = {"prompt": PROMPT, "max_new_tokens": 5}
    path = lines_file(first, {"prompt": PROMPT, "stop": [" ", "。"]}, last)
    *drawn, stopped, short = parsed(generate("--prompts", path).out)
    found = [(result["index"], result["sample"], result["id"], result["prompt"]) for result in drawn]
    assert (found, len({result["text"] for result in drawn})) == ([(0, number, "x", "The") for number in range(3)], 3)
    assert (stopped["index"], stopped["finish"], " " in stopped["text"]) == (1, "stop", False)
    assert PROMPT + short["text"] + "\n" == generate("--prompt", PROMPT, "--max-new-tokens", "5").out


def test_log_probabilities_come_with_the_likeliest_tokens_and_8_bits_change_them_a_little(generate):
    (result,) = parsed(generate("--prompt", PROMPT, "--logprobs", "3").out)
    first, *_ = tokens = result["logprobs"]
    assert (result["new_tokens"], "".join(token["token"] for token in tokens)) == (len(tokens), result["text"])
    for token in tokens:
        assert len(token["likeliest"]) == 3
        assert token["likeliest"][0]["id"] == token["id"], "the greedy choice is the likeliest"
        assert token["logprob"] <= 0
    for kind, most in (("int8", 0.1), ("int4", 0.5)):
        done = generate("--prompt", PROMPT, "--logprobs", "0", "--weights", kind)
        rounded = parsed(done.out)[0]["logprobs"][0]["logprob"]
        assert rounded != first["logprob"]
        assert rounded == pytest.approx(first["logprob"], abs=most)


def test_prompt_over_the_models_length_is_named_and_the_others_are_done(generate, lines_file, tmp_path):
    path = lines_file({"prompt": "x" * 500}, {"prompt": PROMPT}, {"prompt": "y" * 500, "n": 2})
    done = generate("--prompts", path, "--out", tmp_path / "out.jsonl")
    assert done.code == 3
    assert "prompts.jsonl line 1: The prompt has 501 tokens" in done.err
    assert "3 texts of 4 could not be generated" in done.err
    results = parsed((tmp_path / "out.jsonl").read_text())
    assert ["error" in result for result in results] == [True, False, True, True]
    assert results[1]["text"]


def test_prompts_are_not_replaced_and_bad_lines_are_named_before_a_model_is_looked_for(z2a, generate, lines_file):
    path = lines_file({"prompt": "x"})
    assert "would be overwritten" in generate("--prompts", path, "--out", path).err
    assert json.loads(path.read_text()) == {"prompt": "x"}
    path = lines_file({"prompt": 1}, {"prompt": "good"}, {"n": 0})
    said = z2a.refused(3, "generate", "no-such-run", "--prompts", path)
    assert all(words in said for words in ("2 lines of prompts.jsonl", "line 1:", "line 3:"))


def test_what_cannot_be_done_is_said(generate):
    for words, said in (
        ((), "needs --prompt or --prompts"),
        (("--prompt", "x", "--prompts", "p.txt"), "--prompts and --prompt exclude each other"),
        (("--prompts", "no/such.txt"), "no/such.txt cannot be read"),
        (("--prompt", "x", "--temperature", "-1"), "got '-1', expected a number, at least 0"),
        (("--prompt", "x", "--n", "10001"), "got '10001', expected a whole number, at most 10000"),
        (("--prompt", "x", "--out", "-"), "Without --out the results go to standard output"),
        (("--prompt", "x", "--stop", ""), "A stop string is empty"),
    ):
        done = generate(*words)
        assert done.code in (2, 3)
        assert said in done.err


def test_bytes_that_are_not_utf_8_are_replaced_and_a_finished_file_stays(generate, tmp_path):
    words = ("--prompt", "\udcff abc", "--n", "2", "--out", tmp_path / "out.jsonl")
    first, again, other = generate(*words), generate(*words), generate(*words, "--seed", "1")
    assert (first.code, again.code, other.code) == (0, 0, 2)
    assert "all texts of a prompt are the same" in first.err
    assert "is already finished, so nothing was done" in again.err
    assert "Choose another name, or delete it" in other.err
    assert parsed((tmp_path / "out.jsonl").read_text())[0]["prompt"] == "\N{REPLACEMENT CHARACTER} abc"


STANDS_STILL = """
import time
from pathlib import Path
from zero2all.infer.engine import Engine
step, part = Engine.step, Path({!r})
def held_step(engine):  # once some results are there
    while part.exists() and part.read_bytes().count(b"\\n") > 4:
        time.sleep(1)
    return step(engine)
Engine.step = held_step
"""


def test_killed_command_continues(start, generate, lines_file, tmp_path, trained_workspace):
    path = lines_file(*({"prompt": f"{PROMPT} {n}", "max_new_tokens": 10 + 7 * n % 61} for n in range(12)))
    words = (*SHARED, "--work", trained_workspace.root, "--prompts", path, "--out")
    part = tmp_path / "killed.jsonl.part"
    killed = start(*words, tmp_path / "killed.jsonl", code=STANDS_STILL.format(str(part)) + Z2A)
    killed.wait_until(lambda: part.exists() and part.read_bytes().count(b"\n") > 4)
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    finished = part.read_bytes().count(b"\n") - 1
    assert not (tmp_path / "killed.jsonl").exists()
    again = generate("--prompts", path, "--out", tmp_path / "killed.jsonl")
    assert again.code == 0
    assert f"{finished} texts of 12 are already finished" in again.err
    results = parsed((tmp_path / "killed.jsonl").read_text())
    assert [result["index"] for result in results] == list(range(12))
    names = sorted(path.name for path in tmp_path.glob("*.jsonl*"))
    assert names == ["killed.jsonl", "killed.jsonl.job", "prompts.jsonl"]
