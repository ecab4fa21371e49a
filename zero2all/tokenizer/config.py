"""The options of a tokenizer, and its control tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from zero2all.common.schema import NaturalInt, PositiveInt, Problem, Range
from zero2all.tokenizer.sampling import parse_bytes, take_problem

Kind = Literal["bpe", "hf-bbpe"]
Normalisation = Literal["none", "nfc", "nfkc"]

PRETOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The regular expression of Qwen2, which cuts text into pretokens: no piece ever crosses their borders. Fast encoders
have code for it, and are 6 to 80 times slower on any other."""
ISOLATED_HAN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The same with runs of Han characters by themselves, no punctuation mark attached: for comparison."""
PATTERNS = {"qwen2": PRETOKEN_PATTERN, "isolated-han": ISOLATED_HAN_PATTERN}
"""Patterns by name, for `--pattern`."""


BYTE_COUNT = 256
ROLES = ("begin", "end", "end_of_prompt", "message_start", "message_end", "pad")
"""The roles of control tokens; the place in this tuple is the token's id in a vocabulary of ours."""


@dataclass(frozen=True)
class SpecialsConfig:
    """The control tokens of a new vocabulary, marks that only the program may set, never the text: `tokenizer.specials`
    of the config.

    They take the first ids of every vocabulary that we train, in the order of `names()`, so that an id means the same
    thing in all of them. A later stage (tools, images) can use the reserved ones without moving any id.
    """

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


@dataclass(frozen=True)
class TokenizerConfig:
    """The `tokenizer` section of the config, and the flags of `z2a tokenizer train`."""

    vocab_size: int = 64_000
    """Number of token ids: control tokens, the 256 bytes and the learned pieces together."""

    kind: Kind = "bpe"
    """Which trainer: `bpe` is ours, exact in little memory; `hf-bbpe` is that of the `tokenizers` library."""

    take: dict[str, str] | str | None = None
    """Which share of the text to train on: {news: 20/44, wiki: 2GB} by source, or one share or amount for all of them
    together; None trains on everything. Sources that are not named are taken whole."""

    normalise: Normalisation = "none"
    """Unicode form that text is brought into before it is cut: none keeps every text exactly; nfc joins accents to
    their letters; nfkc also folds full-width letters, ligatures and the like. Text comes back in that form."""

    pattern: str | None = None
    """kind hf-bbpe: `qwen2`, `isolated-han` or a regular expression of yours that cuts text into pretokens; None
    takes qwen2, which fast encoders know."""

    min_piece_count: PositiveInt = 2
    """A piece is learned only if it occurs at least this many times in the training text."""

    max_piece_bytes: Annotated[int, Range(minimum=2)] | None = None
    """Longest piece in UTF-8 bytes (a Chinese character has 3). None sets no limit, so in text made from few
    templates, a whole Chinese clause (which has no spaces) may become one piece."""

    max_memory: str | None = None
    """Memory that training may use, such as 4GB: kind bpe keeps to it, hf-bbpe refuses to start when it would need
    more. None: half of what is free for bpe, nearly all of it for hf-bbpe."""

    exact: bool = True
    """kind bpe: learn exactly the merges of plain BPE. false allows it to give that up, and to say so, where
    `max_memory` leaves no other way."""

    threads: PositiveInt | None = None
    """Threads of training; the result does not depend on it. None: one per core."""

    specials: SpecialsConfig = field(default_factory=SpecialsConfig)
    """The control tokens."""

    @property
    def memory_bytes(self) -> int | None:
        """`max_memory` as a number."""
        return None if self.max_memory is None else parse_bytes(self.max_memory)

    def problems(self, place: str) -> list[Problem]:
        """What is wrong between fields that are each fine alone."""
        found = self.specials.problems(f"{place}.specials")
        control = len(self.specials.names())
        smallest = control + BYTE_COUNT + 1
        if self.vocab_size < smallest:
            expected = f"at least {smallest} for {control} control tokens, {BYTE_COUNT} bytes and one piece"
            found.append(Problem(f"{place}.vocab_size", self.vocab_size, expected))
        if self.max_memory is not None and parse_bytes(self.max_memory) is None:
            found.append(Problem(f"{place}.max_memory", self.max_memory, "an amount such as 4GB or 500MB"))
        shares = {"": self.take} if isinstance(self.take, str) else (self.take or {})
        for name, share in shares.items():
            trouble = take_problem(share)
            if trouble:
                found.append(Problem(f"{place}.take{f'.{name}' if name else ''}", share, trouble))
        if self.pattern is not None and self.kind != "hf-bbpe":
            expected = f"null, because kind {self.kind} cuts text in its own way (kind hf-bbpe takes a pattern)"
            found.append(Problem(f"{place}.pattern", self.pattern, expected))
        return found
