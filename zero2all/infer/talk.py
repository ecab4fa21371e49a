"""Talking to a model in the terminal, or through a pipe."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass

from zero2all.common.errors import BadInputError, UsageError, UserError
from zero2all.common.language import padded, translate
from zero2all.common.progress import TEXT_MARKS, counted, say, terminal_safe
from zero2all.common.schema import nearest_hint
from zero2all.infer.chat import ChatPrompt, choose, prompt_after
from zero2all.infer.conversation import Conversation
from zero2all.infer.sampling import Sampling
from zero2all.infer.service import Service
from zero2all.infer.text import Piece, TextRequest
from zero2all.infer.tools import TOOLS, Written, run_call
from zero2all.tokenizer.chat import LEARNED_ROLE, Message
from zero2all.tokenizer.text import well_formed

PROMPT, MORE_PROMPT = "> ", "… "
BLOCK_MARK = '"""'
MOST_TURNS = 8
"""Of one answer: each but the last calls functions."""
ReadLine = Callable[[str], str | None]

OWN_FRAME_NOTE = "It answers each question by itself, and in the wording of its text: ask as its text asks."
HELP = {
    "/help": "show this list",
    "/undo": "remove your last message and its answer",
    "/retry": "generate another answer to the last message",
    "/system TEXT": "set how the model should behave; - removes it, no text shows it",
    "/set NAME VALUE": "change temperature, top_k, top_p, min_p, repetition_penalty, seed or max_new_tokens; no name "
    "shows them",
    "/thinking on|off": "whether the model thinks before it answers, where its template has a switch",
    "/template /frame /plain": "format the conversation with the model's template, as a dialogue, or as one text",
    "/tokens": "show how much of the context is used",
    "/reset": "start a new conversation",
    "/quit": "quit (also Ctrl-D); Ctrl-C stops an answer",
}


@dataclass(frozen=True)
class Typed:
    """What a person typed: a line, or several that belong together."""

    text: str
    is_block: bool = False
    """It stood between triple quotes: a message, never a command."""
    is_open: bool = False
    """The input ended before the block did."""


class Talk:
    """One conversation, its settings and its terminal."""

    def __init__(
        self,
        service: Service,
        conversation: Conversation,
        sampling: Sampling,
        max_new_tokens: int,
        stop: tuple[str, ...] = (),
    ) -> None:
        self.service, self.conversation, self.stop = service, conversation, stop
        self.sampling, self.max_new_tokens = sampling, max_new_tokens
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._is_dim = self._is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._answers = 0
        self._dropped = 0
        self._has_failed = False
        self._commands: dict[str, Callable[[str], object]] = {
            "help": self._help,
            "undo": self._undo,
            "retry": self._retry,
            "system": self._system,
            "set": self._set,
            "reset": self._reset,
            "tokens": self._tokens,
            "thinking": self._thinking,
            **{name: self._frame_command(name) for name in ("template", "frame", "plain")},
        }

    def run(self) -> int:
        """Answer until the input ends. Returns the exit code: through a pipe, 3 where a message got no answer."""
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401 (input() then has a history and editing keys)
            self._greet()
        else:
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        while True:
            try:
                typed = read_message(_typed_line if self._is_terminal else _piped_line)
                if typed is None or (typed.text.strip() in ("/quit", "/exit") and not typed.is_block):
                    break
                if typed.is_open:
                    self._has_failed = True
                    self._note(f"The input ended before the closing {BLOCK_MARK}: this message was dropped.")
                elif typed.text.strip():
                    self._take(typed)
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                print()
                self._note("Press Ctrl-D or type /quit to quit.")
        if self._is_terminal:
            print()
            return 0
        return BadInputError.exit_code if self._has_failed else 0

    def _take(self, typed: Typed) -> None:
        """A command, or something to answer."""
        message = typed.text
        word, _, rest = message.partition(" ")
        try:
            if typed.is_block or not message.startswith("/") or "/" in word[1:]:  # /usr/bin is a path
                self._say(message)
            elif word[1:] in self._commands:
                self._commands[word[1:]](rest.strip())
            else:
                hint = nearest_hint(word[1:], [*self._commands, "quit"])
                self._note(f"There is no command {word}. {hint} To send this as a message, begin with a space.")
        except UserError as error:
            self._note(str(error))

    # Answers -----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        messages = self.conversation.messages
        if messages and messages[-1].role != LEARNED_ROLE:
            self.conversation.undo()  # it got no answer
        messages.append(Message("user", text))
        try:
            self._answer()
        except UserError:  # it cannot be answered
            self._has_failed = True
            self.conversation.undo()
            raise

    def _answer(self) -> None:
        conversation = self.conversation
        fitted = conversation.fitted(self.max_new_tokens)
        if fitted.dropped > self._dropped:
            self._note(f"The oldest messages no longer fit into the context and are left out: {fitted.dropped:,}.")
        self._dropped = fitted.dropped
        prompt = fitted.prompt
        tools = {name: tool for name, tool in TOOLS.items() if tool.spec in conversation.tools}
        for _ in range(MOST_TURNS):
            request = TextRequest(
                prompt.prompt,
                self.max_new_tokens,
                dataclasses.replace(self.sampling, seed=self.sampling.seed + self._answers),
                (*prompt.stop, *self.stop),
                heal=prompt.heal,
                end_ids=prompt.end_ids,
            )
            self._answers += 1  # every answer has draws of its own
            written, ids, last = self._stream(request, prompt)
            if written != Written():
                conversation.messages.append(written.message())
            self._report(written, last)
            if not written.calls or last is None or last.finish != "stop":
                return
            results = [Message("tool", run_call(call, tools)) for call in written.calls]
            conversation.messages += results
            for call, result in zip(written.calls, results, strict=True):
                given = ", ".join(map(str, call["function"]["arguments"].values()))
                self._note(f"{call['function']['name']}: {given} -> {result.text}")
            prompt = prompt_after(self.service.loaded, prompt, ids, results, conversation.thinking)
        self._note(f"The model has called functions {MOST_TURNS} times without an answer. /retry tries again.")

    def _report(self, written: Written, last: Piece | None) -> None:
        """Say how an answer ended."""
        if last is None:
            kept = written != Written()
            self._note(
                "Stopped. The text so far is kept; /undo removes it." if kept else "Stopped. /retry tries again."
            )
        elif last.finish == "error":
            self._has_failed = True
            self._note(last.error)
        elif not written.text and not written.calls:
            self._note("The answer is empty. Try /retry, or another format: /template /frame /plain.")
        elif self._is_terminal and last.usage is not None:
            seconds = max(last.usage.seconds, 1e-9)
            new_tokens = last.usage.new_tokens
            self._note(f"{counted(new_tokens, 'token')}, {new_tokens / seconds:,.0f} tokens/s")
            if last.finish == "length" and new_tokens >= self.max_new_tokens:
                self._note("The answer was cut at max_new_tokens; /set max_new_tokens 1000 allows more.")
            elif last.finish == "length":
                self._note("The answer was cut because the context is full; /reset starts a new conversation.")
        if written.refused:
            self._note(f"Calls that are not understood and stay text: {written.refused}.")

    def _stream(self, request: TextRequest, prompt: ChatPrompt) -> tuple[Written, list[int], Piece | None]:
        """Print an answer as it comes; its parts, its ids and its last piece, None where it was stopped with Ctrl-C."""
        answer, shown, last = "", Written(), None
        ids: list[int] = []
        try:
            with closing(self.service.stream(request)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    answer, last = answer + piece.text, piece
                    ids += piece.tokens
                    shown = self._show(prompt, answer, shown, piece.finish is not None)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            shown, last = self._show(prompt, answer, shown, True), None
        if shown.text or not (shown.thought or shown.calls):
            print(flush=True)
        return shown if prompt.how == "plain" else dataclasses.replace(shown, text=shown.text.rstrip()), ids, last

    def _show(self, prompt: ChatPrompt, answer: str, before: Written, is_whole: bool) -> Written:
        """Print what the answer has grown by: a thought dim, and beside a pipe on stderr."""
        now = prompt.read(answer, is_whole)
        if prompt.how != "plain":
            now = dataclasses.replace(now, text=now.text.lstrip())
        thought, text = now.thought[len(before.thought) :], now.text[len(before.text) :]
        if self._is_terminal:
            thought, text = (terminal_safe(fresh, keep=TEXT_MARKS) for fresh in (thought, text))
        aside = sys.stdout if self._is_terminal else sys.stderr
        if thought:
            print(f"\x1b[2m{thought}\x1b[0m" if self._is_dim else thought, end="", flush=True, file=aside)
        if now.thought and not before.text and (text or is_whole):
            print(file=aside)
        print(text, end="", flush=True)
        return now

    # Commands ----------------------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        width = max(map(len, HELP)) + 2
        for name, words in HELP.items():
            self._note(padded(name, width) + translate(words))
        self._note(f"For several lines, end a line with \\, or put the text between {BLOCK_MARK} and {BLOCK_MARK}.")

    def _undo(self, _: str) -> None:
        taken = self.conversation.undo()
        shown = "" if taken is None else taken if len(taken) <= 60 else f"{taken[:60]}…"
        self._note("There is no message to remove." if taken is None else f"Removed: {shown}")

    def _retry(self, _: str) -> None:
        if not self.conversation.take_back_answer():
            self._note("There is no message to answer.")
            return
        if self.sampling.is_greedy:
            self._note("The temperature is 0, so the answer will be the same; `/set temperature 0.8` changes that.")
        self._answer()

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "-" else text
        system = self.conversation.system
        self._note(f"System message: {system}" if system else "There is no system message.")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        settings = {**dataclasses.asdict(self.sampling), "max_new_tokens": self.max_new_tokens}
        if name and name not in settings:
            self._note(f"There is no setting {name}. The settings are {', '.join(settings)}.")
            return
        if name:
            try:
                number = type(settings[name])(value)
            except ValueError:
                kind = "a whole number" if isinstance(settings[name], int) else "a number"
                self._note(f"{name} is {settings[name]}. Set it to {kind}, for example `/set {name} {settings[name]}`.")
                return
            least = {"max_new_tokens": 1, "seed": 0}.get(name, number)
            if number < least:
                raise UsageError(f"{name} is {number}; it must be at least {least}.")
            if name == "max_new_tokens":
                self.max_new_tokens = number
            else:
                self.sampling = dataclasses.replace(self.sampling, **{name: number})
            settings[name] = number
        self._note(", ".join(f"{key} {setting}" for key, setting in settings.items()))

    def _thinking(self, word: str) -> None:
        if word not in ("on", "off"):
            raise UsageError("Thinking is on or off: /thinking on, /thinking off.")
        self.conversation.thinking = word == "on"

    def _reset(self, _: str) -> None:
        self.conversation.messages.clear()
        self._dropped = 0
        self._note("Started a new conversation.")

    def _frame_command(self, name: str) -> Callable[[str], None]:
        def change(_: str) -> None:
            self.conversation.frame = name
            self._note(f"The conversation is now formatted with {_in_words(name)}.")

        return change

    def _tokens(self, _: str) -> None:
        conversation = self.conversation
        count = counted(len(conversation.messages), "message")
        used, dropped = 0, 0
        if conversation.messages:
            fitted = conversation.newest(self.max_new_tokens)
            used, dropped = fitted.tokens, fitted.dropped
        self._note(f"{used:,} of {conversation.max_len:,} tokens used by {count}.")
        if dropped:
            self._note(f"The oldest messages no longer fit into the context and are left out: {dropped:,}.")

    # Words to the person -----------------------------------------------------------------------------------------

    def _greet(self) -> None:
        loaded = self.service.loaded
        step = "" if loaded.config is None else f" at step {loaded.step:,}"
        dtype = str(loaded.model.embedding.weight.dtype).removeprefix("torch.")
        self._note(f"{loaded.name}{step}: {loaded.parameters / 1e6:,.1f} M parameters, {dtype}, {loaded.device}")
        if self.conversation.frame == "auto":
            choice = choose(loaded)
            self._note(f"The conversation is formatted with {_in_words(choice.how)}: {choice.why}.")
            if choice.how == "frame":
                self._note(OWN_FRAME_NOTE)
        self._note("Type /help for the commands.")

    def _note(self, text: str) -> None:
        """A line of ours, dim in the terminal and on stderr beside a pipe."""
        text = terminal_safe(text, keep="\n")
        if not self._is_terminal:
            say(text)  # which translates it
        else:
            text = translate(text)
            print(f"\x1b[2m{text}\x1b[0m" if self._is_dim else text, flush=True)


def read_message(read: ReadLine) -> Typed | None:
    """The next message: a line, lines that end with a backslash, or a block in triple quotes; None at the end."""
    line = read(PROMPT)
    if line is None:
        return None
    if line.startswith(BLOCK_MARK):
        return _block(line.removeprefix(BLOCK_MARK), read)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(MORE_PROMPT) or "")
    return Typed("\n".join(lines))


def _block(first: str, read: ReadLine) -> Typed:
    lines, line = [], first
    while not line.endswith(BLOCK_MARK):
        lines.append(line)
        following = read(MORE_PROMPT)
        if following is None:
            return Typed("\n".join(lines), is_block=True, is_open=True)
        line = following
    return Typed("\n".join([*lines, line.removesuffix(BLOCK_MARK)]).strip("\n"), is_block=True)


def _typed_line(prompt: str) -> str | None:
    try:
        return well_formed(input(prompt))  # bytes that are no UTF-8 come as surrogates
    except EOFError:
        return None


def _piped_line(_: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _in_words(how: str) -> str:
    return {"template": "the model's template", "frame": "a written dialogue", "plain": "plain continuation"}[how]
