"""The parser of the command line: argparse, with errors in our own words and the nearest name for a mistyped one."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from zero2all.cli.terminal import fitted, wrapped
from zero2all.common.errors import UsageError
from zero2all.common.language import columns
from zero2all.common.language import translate as t

LIKENESS = 0.6
"""How alike two names must be before one is suggested for the other (0 to 1)."""
VERB = "VERB"


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that was probably meant. The dashes of flags do not count: they make all flags alike."""
    names = {candidate.lstrip("-"): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lstrip("-"), list(names), n=1, cutoff=LIKENESS)
    return names[found[0]] if found else None


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as they are written, gives the longest verb a place on the line of its help, and translates."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(fitted(text, width), width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help and t(action.help).replace("%", "%%")  # argparse would fill it in

    def add_text(self, text: str | None) -> None:
        """A description, or an example with its notes."""
        super().add_text(text and t(text))

    def start_section(self, heading: str | None) -> None:
        """Such as `options`."""
        super().start_section(heading and t(heading))

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """The first line."""
        super().add_usage(usage, actions, groups, t("usage: ") if prefix is None else prefix)

    def format_help(self) -> str:
        """Everything, with a Chinese colon after a Chinese heading."""
        return re.sub(r"(?m)(?<=[\u4e00-\u9fff]):$", "：", super().format_help())

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None) -> str:
        """With further lines below the first, whose Chinese characters argparse counts as one column each."""
        text = super()._format_usage(usage, actions, groups, prefix)
        lacking = 0 if usage or not prefix else columns(prefix) - len(prefix)
        return text.replace("\n ", "\n " + " " * lacking)

    def add_argument(self, action: argparse.Action) -> None:
        """Also count the width of a verb's indented name, which argparse forgets."""
        super().add_argument(action)
        for verb in self._iter_indented_subactions(action):
            width = len(self._format_action_invocation(verb)) + self._current_indent
            self._action_max_length = max(self._action_max_length, width)


class Parser(argparse.ArgumentParser):
    """One word of the command line. Its errors are UsageErrors in plain words."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=HelpFormatter, allow_abbrev=False)
        self.renamed: dict[str, str] = {}
        """Verbs of before -> the command that does it now."""
        self.removed: dict[str, str] = {}
        """Verbs of before -> what to do instead."""
        self._negative_number_matcher = re.compile(r"-\.?\d")  # also -7B: a value, which its flag refuses

    @property
    def verbs(self) -> dict[str, Parser]:
        """The verbs below this word; none for a verb."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """Every flag by name."""
        return dict(self._option_string_actions)

    @property
    def positionals(self) -> list[argparse.Action]:
        """The arguments without a flag, except for the verb."""
        return [action for action in self._get_positional_actions() if action.metavar != VERB]

    def find(self, words: list[str]) -> Parser:
        """The parser of the verb that a command line begins with: this one where it names none."""
        inner = self.verbs.get(words[0]) if words else None
        return self if inner is None else inner.find(words[1:])

    def verb(self, word: str) -> Parser:
        """The verb of this name; an error with the nearest name where there is none."""
        found = self.verbs.get(word)
        if found is None:
            raise UsageError(self._explain_verb(word))
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse with the positional words first: argparse would give up on an optional one at the first flag."""
        if args is not None and any(action.nargs in ("?", "*") for action in self.positionals):
            args = self._positionals_first(list(args))
        return super().parse_known_args(args, namespace)

    def _positionals_first(self, words: list[str]) -> list[str]:
        if "--" in words:
            return words
        positional: list[str] = []
        rest: list[str] = []
        room = 0.0  # values that the flag before may still take
        for word in words:
            if _is_flag(word):
                name, equals, _ = word.partition("=")
                action = self.flags.get(name)
                room = 0.0 if equals or action is None else _most_values(action)
                rest.append(word)
            elif room > 0:
                room -= 1
                rest.append(word)
            else:
                positional.append(word)
        return [*positional, *rest]

    def error(self, message: str) -> NoReturn:
        """Called by argparse with words of its own."""
        raise UsageError(self._explain(message))

    def _explain(self, message: str) -> str:
        """An error of argparse in our words."""
        if missing := re.fullmatch(r"the following arguments are required: (.+)", message):
            return self._explain_missing(missing[1].split(", "))
        if either := re.fullmatch(r"one of the arguments (.+) is required", message):
            flags = f" {t('or')} ".join(either[1].split())
            return t(f"`{self.prog}` needs {flags}. See `{self.prog} --help`.")
        argument = re.fullmatch(r"argument (.+?): (.+)", message, re.DOTALL)
        if argument is None:
            return t(f"{message}. See `{self.prog} --help`.")
        name, problem = argument[1], argument[2]
        if choice := re.match(r"invalid choice: (.+) \(choose from ", problem, re.DOTALL):
            value = ast.literal_eval(choice[1])
            return self._explain_verb(value) if name == VERB else self._explain_choice(name, str(value))
        if problem.startswith("expected ") and problem.endswith((" argument", " arguments")):
            return t(f"{name} needs a value. See `{self.prog} --help`.")
        if other := re.fullmatch(r"not allowed with argument (.+)", problem):
            return t(f"{name} and {other[1]} exclude each other. Give one of them.")
        if given := re.fullmatch(r"ignored explicit argument (.+)", problem):
            return t(f"{name} takes no value, but got {given[1]}.")
        return t(f"{name}: {problem}. See `{self.prog} --help`.")

    def _explain_missing(self, names: list[str]) -> str:
        if names == [VERB]:
            return t(f"`{self.prog}` needs a verb: {', '.join(self.verbs)}. See `{self.prog} --help`.")
        return t(f"`{self.prog}` needs {', '.join(names)}. See `{self.prog} --help`.")

    def _explain_verb(self, word: str) -> str:
        if word in self.removed:
            return t(self.removed[word])
        if word in self.renamed:
            return t(f"`{self.prog} {word}` is now `{self.renamed[word]}`.")
        meant = closest(word, self.verbs)
        is_first = " " not in self.prog
        if is_first and meant is None:
            return t(f"There is no verb `{word}`. `z2a --help` lists the verbs.")
        if is_first:
            return t(f"There is no verb `{word}`. Did you mean `{meant}`? `z2a --help` lists the verbs.")
        if meant is None:
            return t(f"`{self.prog}` has no verb `{word}`. Use one of: {', '.join(self.verbs)}.")
        return t(f"`{self.prog}` has no verb `{word}`. Did you mean `{meant}`? See `{self.prog} --help`.")

    def _explain_choice(self, name: str, value: str) -> str:
        actions = (*self.flags.values(), *self.positionals)
        choices = next(action.choices for action in actions if argparse._get_action_name(action) == name)
        names = [str(choice) for choice in choices or ()]
        meant = closest(value, names)
        if meant is None:
            return t(f"{name}: got {value!r}, expected one of {', '.join(names)}.")
        return t(f"{name}: got {value!r}, expected one of {', '.join(names)}. Did you mean `{meant}`?")


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and not re.match(r"-\.\d", word)


def _most_values(action: argparse.Action) -> float:
    if isinstance(action.nargs, int):
        return action.nargs
    return {"?": 1.0, "*": float("inf"), "+": float("inf")}.get(str(action.nargs), 1.0)
