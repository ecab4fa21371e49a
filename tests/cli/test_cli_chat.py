"""`z2a chat`: in a real pseudo-terminal, through a pipe, and what it lets through to the terminal."""

import io
import itertools
import os
import pty
import re
import sys
import termios
from pathlib import Path

import pytest

from tests.bigram import saying
from tests.processes import Program, Screen
from zero2all.common.errors import UsageError
from zero2all.infer.conversation import Conversation
from zero2all.infer.sampling import Sampling
from zero2all.infer.service import Service
from zero2all.infer.talk import MOST_TURNS, Talk, Typed, read_message
from zero2all.infer.tools import TOOLS
from zero2all.tokenizer.chat import Dialogue, Message
from zero2all.tokenizer.template import own_chat

IN_TERMINAL = """
import fcntl, os, pathlib, sys, termios, time
hold = pathlib.Path(sys.argv.pop(1))
os.setsid()
handle = os.open(sys.argv.pop(1), os.O_RDWR)
fcntl.ioctl(handle, termios.TIOCSCTTY, 0)
for number in range(3):
    os.dup2(handle, number)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
os.environ.update(TERM="xterm")
os.environ.pop("NO_COLOR", None)

from zero2all.infer.engine import Engine
step, steps = Engine.step, 0
def held_step(engine):  # while that file is there, an answer stands still after its first tokens
    global steps
    steps = steps + 1 if hold.exists() else 0
    while steps > 20 and hold.exists():
        time.sleep(0.01)
    return step(engine)
Engine.step = held_step

from zero2all.cli import main
sys.exit(main())
"""


class Typist(Screen):
    def type(self, text: str, *wanted: str) -> str:
        self.seen = b""
        os.write(self.handle, text.encode())
        for words in wanted:
            self.wait_for(words.encode())
        return self.seen.decode()

    def interrupt(self, program: Program, wanted: str) -> None:
        """Ctrl-C while the program waits for a key. Python's readline misses one that comes a moment too early: when
        it has the terminal give it single keys, but does not sleep yet."""

        def waits_for_a_key() -> bool:
            is_sleeping = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
            return is_sleeping and not termios.tcgetattr(self.handle)[3] & termios.ICANON

        program.wait_until(waits_for_a_key)
        self.type("\x03", wanted, "\n> ")


@pytest.fixture
def terminal(start, trained_workspace, tmp_path):
    ours, theirs = pty.openpty()
    words = ["chat", "tiny", "--work", trained_workspace.root, "--device", "cpu", "--max-new-tokens", "40"]
    program = start(tmp_path / "hold", os.ttyname(theirs), *words, code=IN_TERMINAL)
    typist = Typist(ours)
    typist.wait_for(b"\n> ")
    yield typist, program
    os.close(ours)
    os.close(theirs)


def test_talking_in_a_terminal(terminal, tmp_path):
    typist, program = terminal
    greeting = typist.seen.decode()
    assert "tiny at step 30: 0.1 M parameters, float32, cpu" in greeting
    assert "with plain continuation: this is a base model, which continues your text" in greeting
    typist.type("/plain\n", "plain continuation", "\n> ")
    typist.type("/set temperature 0\n", "temperature 0.0", "\n> ")
    typist.type("The capital of", "The capital of")
    hold = tmp_path / "hold"
    hold.touch()
    typist.type("\n", "is")
    assert b"tokens/s" not in typist.seen, "the answer is shown as it is written"
    hold.unlink()
    typist.wait_for(b"tokens/s")
    answer = re.search(r"\r\n(.+)\r\n\x1b\[2m40 tokens, [\d,]+ tokens/s\x1b", typist.seen.decode())
    assert answer, "with its speed, dimmed"
    typist.wait_for(b"\n> ")
    typist.type("/set max_new_tokens 100\n", "max_new_tokens 100", "\n> ")
    typist.type("I know", "I know")
    hold.touch()
    typist.type("\n", "that")
    typist.type("\x03", "Stopped. The text so far is kept", "\n> ")
    hold.unlink()
    typist.interrupt(program, "Press Ctrl-D or type /quit")
    typist.type("/undo\n", "Removed: I know", "\n> ")
    assert "44 of 128 tokens used by 2 messages" in typist.type("/tokens\n", "tokens used by", "\n> ")
    again = typist.type("/retry\n", "tokens/s", "\n> ")
    assert "The temperature is 0, so the answer will be the same" in again
    # In the history, /tokens stands two lines up.
    typist.type("\x1b[A\x1b[A\n", "of 128 tokens used by 2 messages", "\n> ")
    typist.type("\x04")
    assert program.wait() == 0


@pytest.fixture
def pipe(z2a, trained_workspace, monkeypatch):
    def run(text: bytes, *words):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))
        return z2a("chat", "tiny", "--work", trained_workspace.root, "--device", "cpu", "--temperature", "0", *words)

    return run


def test_pipe_gets_one_answer_for_each_message_and_nothing_else(pipe):
    alone = [pipe(text.encode(), "--frame", "plain", "--max-new-tokens", "8").out for text in ("The capital", "中国")]
    both = pipe("The capital\n\n/reset\n/tokens\n中国\n".encode(), "--frame", "plain", "--max-new-tokens", "8")
    assert (both.code, both.out) == (0, "".join(alone))
    assert all(text.strip() for text in alone)
    assert both.err.splitlines() == ["Started a new conversation.", "0 of 128 tokens used by 0 messages."]


def test_oldest_messages_are_dropped_with_a_word_and_one_that_is_too_long_is_refused_and_the_talk_goes_on(pipe):
    ended = pipe(b"\xff\xfe\n" + b"The capital of France?\n" * 4, "--frame", "template", "--max-new-tokens", "16")
    assert (ended.code, "fit into the context and are left out: " in ended.err) == (0, True)
    ended = pipe(b"x" * 300 + b"\nThe capital\n/tokens\n", "--frame", "plain", "--max-new-tokens", "4")
    assert ended.code == 3
    assert "301 tokens. The context has room for 128" in ended.err
    assert "used by 2 messages" in ended.err


COMMANDS = {
    "/help": "/set NAME VALUE",
    "/undo": "There is no message to remove",
    "/retry": "There is no message to answer",
    "/set": "temperature 0.0, top_k 0, top_p 1.0",
    "/set top_p 2": "top_p is 2.0; it must be above 0",
    "/set top_k some": "top_k is 0. Set it to a whole number, for example `/set top_k 0`",
    "/set stop x": "There is no setting stop. The settings are temperature, top_k,",
    "/set max_new_tokens 0": "max_new_tokens is 0; it must be at least 1",
    "/system Be kind": "System message: Be kind",
    "/sytsem x": "There is no command /sytsem. Did you mean `system`",
}


def test_commands_say_what_they_did_or_what_is_wrong(pipe):
    ended = pipe("\n".join([*COMMANDS, "/quit", "The capital"]).encode())
    assert (ended.code, ended.out) == (0, "")
    assert [line for line, said in COMMANDS.items() if said not in ended.err] == []


def test_messages_of_several_lines():
    for typed, message in (
        (["one\\", "two\\", "three"], Typed("one\ntwo\nthree")),
        (["one\\"], Typed("one\n")),
        (['"""', "one\\", "", 'two"""'], Typed("one\\\n\ntwo", is_block=True)),
        (['"""one"""'], Typed("one", is_block=True)),
        (['"""one'], Typed("one", is_block=True, is_open=True)),
    ):
        lines = iter(typed)
        assert [read_message(lambda _, lines=lines: next(lines, None)) for _ in range(2)] == [message, None]


def test_a_block_is_never_a_command_and_an_open_one_is_dropped(pipe):
    ended = pipe(b'"""/quit"""\n"""/set top_k 5"""\n/set\n/tokens\n"""one', "--frame", "plain", "--max-new-tokens", "2")
    assert [words for words in ("top_k 0,", "used by 4 messages") if words not in ended.err] == []
    assert 'before the closing """: this message was dropped' in ended.err
    assert ended.code == 3


@pytest.fixture
def talk_to():
    services = []

    def make(loaded, frame, **settings):
        services.append(Service(loaded))
        conversation = Conversation(loaded, services[-1].engine.max_len, frame)
        return Talk(services[-1], conversation, Sampling(), max_new_tokens=20, **settings)

    yield make
    for service in services:
        service.close()


def as_in_terminal(monkeypatch):
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)


def test_answer_ends_at_the_end_of_the_message(bigram, border_tokenizer, talk_to, logits, capsys):
    """The model writes `Rome` after the head of the assistant's message, then ends the message, then goes on."""
    end = border_tokenizer.encode_control("<|message_end|>")
    head, rome = border_tokenizer.encode_text("assistant\n")[-1], border_tokenizer.encode_text("Rome")
    for last, following in itertools.pairwise([head, *rome, end, *rome]):
        logits[last, following] = 30.0
    talk = talk_to(bigram(logits), "template")
    talk._say("首都")
    assert capsys.readouterr().out == "Rome\n"
    assert talk.conversation.messages == [Message("user", "首都"), Message("assistant", "Rome")]


def test_an_answer_that_was_cut_says_by_what(bigram, talk_to, logits, capsys, monkeypatch, border_tokenizer):
    as_in_terminal(monkeypatch)
    (space,) = border_tokenizer.encode_text(" ")
    logits[:, space] = 30.0
    talk = talk_to(bigram(logits), "plain")
    for most, said in ((3, "cut at max_new_tokens"), (10_000, "cut because the context is full")):
        talk.max_new_tokens = most
        talk._say("x")
        assert said in capsys.readouterr().out


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def test_a_call_is_answered_and_the_model_goes_on_from_its_own_ids(bigram, talk_to, logits, capsys, monkeypatch):
    as_in_terminal(monkeypatch)
    talk = talk_to(bigram(logits, 1024), "template")
    talk.conversation.tools, talk.max_new_tokens = [TOOLS["calculator"].spec], 300
    prompts, submit = [], talk.service.submit

    def keep(request, deliver):
        prompts.append(request.prompt)
        return submit(request, deliver)

    monkeypatch.setattr(talk.service, "submit", keep)
    saying(talk.service, f"<think>\nI ask.\n</think>\n\nWell\n{CALL}", "It is 42.", "Rome")
    talk._say("6 * 7?")
    shown = capsys.readouterr().out
    plain = shown.replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert re.search(r"^I ask\.\nWell\n109 .*\ncalculator: 6\*7 -> 42\nIt is 42\.\n9 tok", plain)
    assert "<" not in shown
    assert shown.index("\x1b[0m") < shown.index("Well") < shown.index("calculator"), "thoughts are dim"
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}}
    said = [Message("user", "6 * 7?"), Message("assistant", "Well", "I ask.", (call,)), Message("tool", "42")]
    assert talk.conversation.messages == [*said, Message("assistant", "It is 42.")]
    template = own_chat(talk.service.loaded.tokenizer)
    assert prompts[1] == template.encode(Dialogue(said, talk.conversation.tools)), "no id of the answer has changed"
    talk._retry("")
    assert talk.conversation.messages == [said[0], Message("assistant", "Rome")]


def test_a_model_that_only_calls_is_stopped_and_the_person_goes_on(bigram, talk_to, logits, capsys):
    talk = talk_to(bigram(logits, 2048), "template")
    talk.conversation.tools, talk.max_new_tokens = [TOOLS["calculator"].spec], 300
    saying(talk.service, *[CALL] * MOST_TURNS, "Rome <tool_call>x</tool_call>")
    talk._say("?")
    told = capsys.readouterr()
    assert ("8 times without an answer" in told.err, told.out.strip()) == (True, "")
    talk._say("!")
    assert talk.conversation.messages[::2] == [Message("user", "!")]
    told = capsys.readouterr()
    assert (told.out, "not understood" in told.err) == ("Rome <tool_call>x</tool_call>\n", True)


def test_thinking_is_switched_where_the_template_has_a_switch(bigram, talk_to, logits):
    talk = talk_to(bigram(logits, 1024), "template")
    talk._thinking("off")
    assert talk.conversation.thinking is False
    for word in ("", "maybe"):
        with pytest.raises(UsageError, match="on or off"):
            talk._thinking(word)
    talk._thinking("on")
    talk.conversation.frame = "plain"
    with pytest.raises(UsageError, match="need the model's template"):
        talk._say("x")


def test_the_model_cannot_command_the_terminal(speller, talk_to, capsys, monkeypatch):
    as_in_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    talk = talk_to(speller("首都", "\x1b[2J", "Rome", "\n", "\x9b"), "plain")
    talk._say("首都")
    shown = capsys.readouterr().out
    assert shown.startswith("\N{REPLACEMENT CHARACTER}[2JRome\n\N{REPLACEMENT CHARACTER}")
    assert "\x1b" not in shown
    assert talk.conversation.messages[-1].text == "\x1b[2JRome\n\x9b", "the text itself is kept as it is"
