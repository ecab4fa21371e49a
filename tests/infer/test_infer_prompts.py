"""Prompts from a file, and the results of many prompts on disk."""

import json

import pytest

from zero2all.common.errors import BadInputError, RunLockedError, UsageError
from zero2all.infer.batch import BatchResults, finished
from zero2all.infer.prompts import Prompt, read_prompts
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import TextRequest

USUAL = Prompt(TextRequest("", 20, Sampling(temperature=0.5, seed=7), stop=("END",)))


def test_lines_of_text_are_prompts_and_empty_ones_are_passed_over():
    prompts = read_prompts("The cat\r\n\n  \n 中国\n".encode(), "p.txt", USUAL)
    found = [(prompt.request.prompt, prompt.place, prompt.request.sampling) for prompt in prompts]
    usual = USUAL.request.sampling
    assert found == [("The cat", "p.txt line 1", usual), (" 中国", "p.txt line 4", usual)]
    assert read_prompts(b"{x", "p.txt", USUAL)[0].request.prompt == "{x"
    with pytest.raises(BadInputError, match="has no prompts"):
        read_prompts(b"\n \n", "p.txt", USUAL)


def test_json_lines_have_settings_of_their_own_and_each_sample_its_own_seed():
    line = {"prompt": "a\nb", "id": 4, "n": 3, "temperature": 1, "top_k": 3, "stop": "x", "max_new_tokens": 5}
    first, second = read_prompts(f'{json.dumps(line)}\n{{"prompt": ""}}'.encode(), "standard input", USUAL)
    assert first.request == TextRequest("a\nb", 5, Sampling(1, 3, seed=7), stop=("x",))
    assert (first.id, first.n) == (4, 3)
    assert [request.sampling.seed for request in first.samples()] == [7, 8, 9]
    assert second.request == USUAL.request


def test_json_lines_are_known_by_the_first_one_whatever_the_name(capsys):
    first, second = read_prompts(b'\xef\xbb\xbf\n{"prompt": "a"}\n{"prompt": "b"}', "p.txt", USUAL)
    assert (first.request.prompt, second.request.prompt) == ("a", "b")
    assert capsys.readouterr().err == ""
    mixed = read_prompts(b'\xef\xbb\xbfa\n{"prompt": "b"}', "p.txt", USUAL)
    assert [prompt.request.prompt for prompt in mixed] == ["a", '{"prompt": "b"}']
    assert "p.txt line 2 is a JSON object with `prompt`, but the first line is not" in capsys.readouterr().err


def test_bad_bytes_are_said_in_the_same_words_in_text_and_json_up_to_twenty_times():
    for data, name in ((b"\xff", "p.txt"), (b'{"prompt": "\xff"}', "p.jsonl")):
        with pytest.raises(BadInputError, match=r"Correct the file:\n  line 1: 'utf-8' codec can't decode byte 0xff"):
            read_prompts(data, name, USUAL)
    with pytest.raises(BadInputError, match=r"(?s)25 lines of p.txt.*line 21:.*and 5 more lines") as caught:
        read_prompts(b"good\n" + b"\xff\x1b\n" * 25, "p.txt", USUAL)
    assert "line 22:" not in str(caught.value)


def test_line_that_cannot_be_used_is_named():
    for line, said in (
        ("{", "line 2: "),
        ('{"prompt": 3}', "an object with `prompt`"),
        ('{"prompt": "a", "tempreature": 1}', "Did you mean `temperature`"),
        ('{"prompt": "a", "top_k": 1.5}', "`top_k` is '1.5', expected a whole number"),
        ('{"prompt": "a", "n": 10001}', "`n` is '10001', expected a whole number from 1 to 10000"),
        ('{"prompt": "a", "top_p": 2}', "top_p is 2; it must be"),
        ('{"prompt": "a", "stop": [""]}', "`stop` is"),
        ('{"prompt": "\\ud800"}', "line 2: "),
    ):
        with pytest.raises(BadInputError, match=r"(?s)1 line of p.jsonl cannot be used.*line 2: ") as caught:
            read_prompts(f'{{"prompt": "good"}}\n{line}\n'.encode(), "p.jsonl", USUAL)
        assert said in str(caught.value)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_come_in_the_order_of_the_prompts_and_the_part_goes(tmp_path):
    out = tmp_path / "deep" / "o*.jsonl"
    with BatchResults(out, "job") as results:
        for index in (2, 0, 1):
            results.add({"index": index, "text": f"{index}中"})
        results.add({"index": 1, "sample": 1, "error": "too long"})
        assert results.join([(0, 0), (1, 0), (1, 1), (2, 0)]) == 1
    assert [(line["index"], line.get("sample", 0)) for line in lines_of(out)] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert sorted(path.name for path in out.parent.iterdir()) == ["o*.jsonl", "o*.jsonl.job"]


def test_finished_results_are_known_and_never_replaced_by_others(tmp_path):
    out = tmp_path / "o.jsonl"
    assert finished(out, "one") is None
    with BatchResults(out, "one") as results:
        results.add({"index": 0, "error": "too long"})
        results.join([(0, 0)])
    assert finished(out, "one") == 1
    with pytest.raises(UsageError, match=r"exists already.*Choose another name, or delete it"):
        finished(out, "two")
    out.write_text("mine")
    with pytest.raises(UsageError, match="or it was changed"):
        finished(out, "one")
    (tmp_path / "o.jsonl.part").write_text('{"job": "one"}\n')  # killed before the part was removed
    assert finished(out, "one") is None


def test_what_a_killed_process_finished_is_known_and_its_half_line_is_not(tmp_path):
    out, part = tmp_path / "o.jsonl", tmp_path / "o.jsonl.part"
    with BatchResults(out, "job") as results:
        results.add({"index": 0})
        results.add({"index": 1})
    part.write_bytes(part.read_bytes() + b'{"index": 2, "te')
    with BatchResults(out, "job") as results:
        assert set(results.done) == {(0, 0), (1, 0)}
        results.add({"index": 2})
        results.join([(0, 0), (1, 0), (2, 0)])
    assert lines_of(out) == [{"index": 0}, {"index": 1}, {"index": 2}]


def test_two_commands_cannot_write_the_same_part(tmp_path):
    with BatchResults(tmp_path / "o.jsonl", "one") as results:
        results.add({"index": 0})
        with pytest.raises(RunLockedError, match="Another process is writing"):
            BatchResults(tmp_path / "o.jsonl", "one")
    with pytest.raises(UsageError, match=r"part holds results of another job .*delete the file"):
        BatchResults(tmp_path / "o.jsonl", "two")
