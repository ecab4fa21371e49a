"""The control tokens: marks that only the program may set, never the text.

They take the first ids of every vocabulary that we train, in the order of `SpecialsConfig.names()`, so that an id
means the same thing in all of them. A later stage (tools, images) can use the reserved ones without moving any id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from zero2all.common.schema import NaturalInt, Problem

BYTE_COUNT = 256
ROLES = ("begin", "end", "end_of_prompt", "message_start", "message_end", "pad")
"""The roles of control tokens; the place in this tuple is the token's id in a vocabulary of ours."""


@dataclass(frozen=True)
class SpecialsConfig:
    """The control tokens of a new vocabulary: `tokenizer.specials` of the config."""

    begin: str = "<|begin_of_text|>"
    """Comes before every document (bos)."""
    end: str = "<|end_of_text|>"
    """Comes after every document (eos)."""
    end_of_prompt: str = "<|end_of_prompt|>"
    """Ends what the model is given, before what it should write."""
    message_start: str = "<|message_start|>"
    """Opens a message of a chat; the role follows it."""
    message_end: str = "<|message_end|>"
    """Closes a message of a chat."""
    pad: str = "<|pad|>"
    """Fills rows that are too short."""
    reserved: NaturalInt = 8
    """How many tokens `<|reserved_0|>`, `<|reserved_1|>`, … are kept for later stages."""
    extra: list[str] = field(default_factory=list)
    """Control tokens of your own; they take the ids after the reserved ones."""

    def names(self) -> tuple[str, ...]:
        """All control tokens; the place in this tuple is the id."""
        return (*self.roles().values(), *(f"<|reserved_{number}|>" for number in range(self.reserved)), *self.extra)

    def roles(self) -> dict[str, str]:
        """The token of each role."""
        return {role: getattr(self, role) for role in ROLES}

    def problems(self, place: str) -> list[Problem]:
        """Names that clash with each other or with text."""
        names = self.names()
        where = [*(f"{place}.{role}" for role in ROLES), *[f"{place}.reserved"] * self.reserved]
        where += [f"{place}.extra[{index}]" for index in range(len(self.extra))]
        found = []
        for index, name in enumerate(names):
            trouble = _name_trouble(name) or _trouble_among(name, index, names)
            if trouble:
                found.append(Problem(where[index], name, trouble))
        return found


def _name_trouble(name: str) -> str | None:
    """What was expected instead of `name`, or None if it can be a control token."""
    if not name:
        return "a name that is not empty"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "a name that is valid UTF-8 (this one has a lone surrogate)"
    if len(name) == 1:
        return "a name of several characters, because single characters are pieces of text"
    if any(character.isspace() or character == "▁" or ord(character) < 32 for character in name):
        return "a name without white space and without ▁, which text encoders rewrite"
    if not name.isascii() and byte_alphabet().keys() >= set(name):
        # Such a name is, letter for letter, the spelling of some other text inside a byte-level vocabulary.
        return "a name that is not the byte-level spelling of other text (Ġ, Ċ and the like), such as <|…|>"
    return None


def _trouble_among(name: str, index: int, names: Sequence[str]) -> str | None:
    if name in names[:index]:
        return "a name that no other control token has"
    for other in names:
        if other != name and name and name in other:
            return f"a name that is not part of another control token ({other!r} contains it)"
    return None


CONTROL_TOKENS: tuple[str, ...] = SpecialsConfig().names()
"""The control tokens of a vocabulary made with the default names."""


def byte_alphabet() -> dict[str, int]:
    """The visible character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
