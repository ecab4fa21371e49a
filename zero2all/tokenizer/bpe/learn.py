"""The training in order: count pairs of characters, choose T, count fragments, merge. And why it is exact.

**What is learned.** Text is split into pretokens by the pattern. Symbols are whole characters; a merge joins two
neighbouring symbols, the most frequent pair first, ties by left and then right place in the vocabulary. A character
enters the vocabulary when no pair is more frequent than it, with the UTF-8 prefixes by which a byte-level encoder
builds it up; a rarer one stays a prefix and single bytes, and nothing is ever merged with it. Training ends when the
vocabulary is full. None of this mentions T.

**Why cutting does not change it.** Pretokens are cut between characters x and y whenever xy occurs fewer than T times.
Suppose cut and uncut training agree so far. Two neighbouring symbols u, v, where u ends in x and v begins with y, stand
on an occurrence of xy. If xy occurs T times or more, no such place was cut, and both runs count (u, v) alike. If not,
(u, v) occurs fewer than T times in either. So they can only disagree about pairs below T. The count of the best pair
never rises (a new pair is no more frequent than the merge that made its newer symbol), so as long as the last merge has
T occurrences, every choice was made among pairs on which both agree. That is checked at the end; if pairs run out
before the vocabulary is full, T was too high, and pass 2 is done again with a lower one. Counts of single characters
come from the uncut text. A limit on the length of a piece forbids the same pairs in both runs. Cutting less than
allowed (a pair counted too high by a sketch, or let through by a filter) is always safe.

What pass 1 counts: pairs of characters in all text, and words in a sample of it, to guess T from both.

T should be just below the count of the last merge. The number of merges that reach a count f is about 0.75 for every
pair of characters with f occurrences (not counting ASCII pairs), as in Chinese, where most pieces are two characters,
and 1.5 for every word with f occurrences, as in English, where words share parts. On 45 MB of Chinese, 30 MB of English
and mixes of 60 MB and 1 GB, the merges made were within 6 % of that (2026-11-15). A wrong guess costs another pass,
never a wrong result.

How much memory each stage may take, out of a limit on the whole process.
"""

from __future__ import annotations

import ctypes
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from zero2all.common.cores import usable_cores
from zero2all.common.errors import UsageError
from zero2all.common.files import human_bytes
from zero2all.common.manifest import fingerprint
from zero2all.common.progress import progress, say
from zero2all.tokenizer.bpe.bigrams import Bigrams, BigramWorker, PairFilter
from zero2all.tokenizer.bpe.counting import BlockReader, CountingRun
from zero2all.tokenizer.bpe.fragments import CharacterCode, Fragments, FragmentWorker
from zero2all.tokenizer.bpe.merging import Alphabet, Merged, MergeLoop
from zero2all.tokenizer.bpe.scan import pretokens
from zero2all.tokenizer.bpe.words import FIRST_SYMBOL, Words, rarest_that_fit, symbol_order, words_of
from zero2all.tokenizer.config import BYTE_COUNT, Normalisation
from zero2all.tokenizer.parts import TextPart
from zero2all.tokenizer.text import TooFewPiecesError, require_text, text_facts

COUNTING_RULES = 1
"""Raise this when the same text would be counted differently, so that no older state is taken over."""
FIRST_PASS = "pairs"
FIRST_SHARE = 0.8
"""T begins at this share of the last merge's count, as `FirstPass` guesses it: a T that is too high costs a pass."""
NEXT_SHARE = 0.6
"""T falls to this share of itself when pairs run out."""


@dataclass(frozen=True)
class LearnedBpe:
    """A byte-level BPE vocabulary without control tokens."""

    pieces: list[bytes]
    """By place: the 256 bytes (byte b at place b), prefixes of characters, characters, learned pieces."""
    merges: list[tuple[int, int]]
    """Places in `pieces`, in the order of ranks; merge k makes `pieces[256 + k]`."""
    threshold: int
    """Neighbouring characters that occur together fewer times than this were cut apart; 0: nothing was cut."""
    last_count: int
    """How often the pair of the last learned merge occurred; never below `threshold`."""
    exact: bool
    """Proven equal to what training without any cut gives. False only after an explicit `exact=False`."""
    facts: dict[str, Any]
    """What the manifest records: sizes, counts of everything repaired or removed, spills, seconds. All JSON."""


@dataclass(frozen=True)
class BpeRules:
    """What decides the vocabulary, beside the text and its size."""

    normalisation: Normalisation = "none"
    min_piece_count: int = 2
    max_piece_bytes: int | None = None
    """None: no bound."""
    forbidden: Sequence[str] = ()
    """The control tokens: strings in the text that spell one are removed and counted."""
    exact: bool = True
    """False: the rarest fragments may be left out where memory does not suffice, and the result says so."""
    cut: bool = True
    """False: train without any cut, to compare with."""


@dataclass(frozen=True)
class BpeResources:
    """What the training may use. None of it changes the vocabulary."""

    scratch: Path
    """For the state of an interrupted run and for what does not fit into memory. It is kept after an error, and the
    next call with the same text and rules continues from it; on success the caller removes it."""
    max_memory: int | None = None
    """Resident memory of the process, in bytes. None: no bound."""
    threads: int | None = None
    """None: one per core."""
    save_every_seconds: float = 60.0
    """The counts are saved between parts, at most this often."""


DEFAULT_RULES = BpeRules()


def learn_bpe(
    parts: Sequence[TextPart],
    pieces_wanted: int,
    resources: BpeResources,
    rules: BpeRules = DEFAULT_RULES,
    say: Callable[[str], None] = say,
) -> LearnedBpe:
    """Learn `pieces_wanted` pieces (vocabulary size less control tokens) from the text of `parts`."""
    scratch, forbidden, normalisation = resources.scratch, rules.forbidden, rules.normalisation
    min_piece_count = rules.min_piece_count
    if pieces_wanted <= BYTE_COUNT:
        raise UsageError(
            f"A vocabulary of {pieces_wanted:,} pieces is too small: it must hold the {BYTE_COUNT} bytes and "
            f"at least one learned piece. Ask for {BYTE_COUNT + 1 + len(forbidden)} token ids or more."
        )
    started = time.monotonic()
    threads = resources.threads or usable_cores()
    return_freed_memory()
    pretokens("warm")  # loads the compiler's run-time, so that its memory is counted as the program's own
    memory = Memory(resources.max_memory, threads)
    identity = {
        "rules": COUNTING_RULES,
        "parts": [[part.name, part.fingerprint] for part in parts],
        "normalisation": normalisation,
        "forbidden": sorted(forbidden),
    }
    reader = BlockReader(normalisation, forbidden)
    run = CountingRun(parts, reader, threads, scratch, resources.save_every_seconds, fingerprint(identity))
    clock = _Clock()
    first = FirstPass(sum(part.size_bytes for part in parts), scratch / FIRST_PASS, memory.for_tables())
    seen = run.count(FIRST_PASS, "bpe pairs", first, {}, keep=True)
    bigrams = first.bigrams
    text = text_facts(bigrams.text_bytes(), seen)
    require_text(text)
    clock.lap("pairs")
    guess = int(FIRST_SHARE * first.guess(pieces_wanted - BYTE_COUNT, min_piece_count)) if rules.cut else 0
    del first
    trainer = _Trainer(run, bigrams, memory, pieces_wanted, rules, say, clock)
    threshold, merged, alphabet = trainer.train(max(guess, min_piece_count) if rules.cut else 0)
    if merged.short_of:
        vocab_size = pieces_wanted + len(forbidden)
        raise TooFewPiecesError(vocab_size, vocab_size - merged.short_of, text, min_piece_count)
    last_count = int(merged.counts[-1]) if merged.counts.size else 0
    if last_count and last_count < threshold:
        raise AssertionError(f"the last merge has {last_count} occurrences and the cut {threshold}: a bug of ours")
    pieces, merges = _vocabulary(alphabet, merged)
    facts = {
        "text": {**text, "documents_changed_by_normalisation": seen["normalised_documents"]},
        **trainer.facts,
        "characters": merged.admitted,
        "learned": int(merged.counts.size),
        "pairs_of_characters": bigrams.distinct,
        "pairs_counted_by_sketch": bigrams.sketch_bits > 0,
        "threads": threads,
        "seconds": {**clock.seconds, "all": round(time.monotonic() - started, 2)},
        "peak_memory_bytes": peak_resident(),
    }
    return LearnedBpe(pieces, merges, threshold, last_count, trainer.facts["dropped_pieces"] == 0, facts)


class _Clock:
    """Seconds per stage, added up over attempts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + now - self.last, 2)
        self.last = now


@dataclass
class _Trainer:
    """Pass 2 and merging, repeated with a lower T as long as pairs run out."""

    run: CountingRun
    bigrams: Bigrams
    memory: Memory
    wanted: int
    rules: BpeRules
    say: Callable[[str], None]
    clock: _Clock
    facts: dict[str, Any] = field(default_factory=lambda: {"thresholds_tried": []})

    def train(self, threshold: int) -> tuple[int, Merged, Alphabet]:
        """The merges and the threshold they were found with; 0 does not cut."""
        while True:
            self.facts["thresholds_tried"].append(threshold)
            merged, alphabet = self._attempt(threshold)
            if merged.short_of == 0 or threshold <= self.rules.min_piece_count:
                return threshold, merged, alphabet
            lower = max(self.rules.min_piece_count, int(NEXT_SHARE * threshold))
            self.say(
                f"Cutting at pairs of characters seen fewer than {threshold:,} times left {merged.short_of:,} "
                f"of {self.wanted:,} pieces unfilled. The text is read again with {lower:,}."
            )
            threshold = lower

    def _attempt(self, threshold: int) -> tuple[Merged, Alphabet]:
        characters = self.bigrams.characters
        code_points = (characters >= max(1, threshold)).nonzero()[0]  # a rarer character has no frequent pair
        self.bigrams.restore(self.run.scratch / FIRST_PASS)
        pairs = self.bigrams.filter(threshold) if threshold else PairFilter.of_everything()
        self.bigrams.release()  # it stays on disk, and the memory is for the fragments
        code = CharacterCode(code_points, characters[code_points])
        fragments = Fragments(code, pairs, self.run.scratch / "pieces", self.memory.for_tables())
        self.run.count("pieces", "bpe pieces", fragments, {"threshold": threshold})
        self.facts["spills"], self.facts["spilled_bytes"] = fragments.spills, fragments.spilled_bytes()
        if fragments.spills:
            self.say(
                f"Not all fragments fit into memory at once: {human_bytes(fragments.spilled_bytes())} of them "
                f"went through {self.run.scratch}. The result is still exact."
            )
        self.clock.lap("pieces")
        alphabet = _alphabet(code_points, characters)
        words = self._words(fragments, alphabet.ordered)
        del fragments, pairs, code
        self.facts["unique_pieces"], self.facts["dropped_pieces"] = words.unique, words.dropped
        self.facts["symbols"] = words.size - 1
        return self._merge(words, alphabet, threshold), alphabet

    def _words(self, fragments: Fragments, ordered: np.ndarray) -> Words:
        limit = self.memory.for_words()
        if limit is None or self.rules.exact:
            return words_of(fragments, ordered, limit)
        drop_below = rarest_that_fit(fragments, ordered, limit)
        words = words_of(fragments, ordered, None, drop_below)
        if words.dropped:
            self.say(
                f"APPROXIMATE: {words.dropped:,} of {words.unique:,} fragments, those seen fewer than "
                f"{drop_below:,} times, did not fit into memory and were left out."
            )
        return words

    def _merge(self, words: Words, alphabet: Alphabet, threshold: int) -> Merged:
        to_give = self.wanted - BYTE_COUNT
        least = max(threshold, self.rules.min_piece_count)
        pool_bytes = self.memory.for_places()
        with progress("bpe merges", total=to_give, unit="pieces") as bar:
            loop = MergeLoop(words, alphabet, to_give, least, self.rules.max_piece_bytes)
            merged = loop.run(bar, self.run.threads, pool_bytes)
        self.facts["arrangements"] = loop.arrangements
        self.clock.lap("merges")
        return merged


def _alphabet(code_points: np.ndarray, counts: np.ndarray) -> Alphabet:
    """The characters to start from; `counts` is by code point."""
    ordered = symbol_order(code_points, counts[code_points])
    spelled = [chr(code).encode() for code in ordered.tolist()]
    costs = []
    prefixes: set[bytes] = set()
    for character in spelled:
        if len(character) > 1:
            new = {character[:size] for size in range(2, len(character))} - prefixes
            prefixes |= new
            costs.append(1 + len(new))
    lengths = np.array([len(character) for character in spelled], np.int32)
    return Alphabet(ordered, counts[ordered[ordered >= 128]], np.array(costs, np.int64), lengths)


def _vocabulary(alphabet: Alphabet, merged: Merged) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Pieces and merges as a byte-level encoder needs them: bytes, prefixes, characters, learned pieces.

    First the encoder's merges build prefixes and characters from bytes. First and later bytes of UTF-8 differ, so these
    merges neither cross characters nor compete with each other; having the lowest ranks, they are all done before the
    first learned merge, and leave just the symbols that training started from.
    """
    codes = alphabet.ordered.tolist()
    ascii_codes = [code for code in codes if code < 128]
    characters = [chr(code).encode() for code in codes if code >= 128][: merged.admitted]
    prefixes = {character[:size] for character in characters for size in range(2, len(character))}
    pieces = [bytes([byte]) for byte in range(BYTE_COUNT)]
    place_of = {piece: place for place, piece in enumerate(pieces)}
    merges: list[tuple[int, int]] = []
    for piece in [*sorted(prefixes, key=lambda prefix: (len(prefix), prefix)), *characters]:
        merges.append((place_of[piece[:-1]], piece[-1]))
        place_of[piece] = len(pieces)
        pieces.append(piece)
    first_character = len(pieces) - len(characters)
    first_merge = FIRST_SYMBOL + len(codes)

    def place(symbol: int) -> int:
        if symbol >= first_merge:
            return first_character + len(characters) + symbol - first_merge
        number = symbol - FIRST_SYMBOL
        return ascii_codes[number] if number < len(ascii_codes) else first_character + number - len(ascii_codes)

    for left, right in zip(merged.lefts.tolist(), merged.rights.tolist(), strict=True):
        pair = place(left), place(right)
        merges.append(pair)
        pieces.append(pieces[pair[0]] + pieces[pair[1]])
    assert len(set(pieces)) == len(pieces), "two merges made the same piece: a bug of ours"
    return pieces, merges


SAMPLED_BYTES = 64 << 20
"""Words are counted in about this much of the text, in blocks taken evenly from all of it."""
FIRST_WITHOUT_WORDS = 0x2E80
"""From here on, scripts have no spaces between words."""
MERGES_PER_PAIR = 0.75
MERGES_PER_WORD = 1.5


class FirstPass:
    """The counts of pass 1."""

    def __init__(self, total_bytes: int, scratch: Path, max_bytes: int | None) -> None:
        self.bigrams = Bigrams(max_bytes)
        self.sample_every = max(1, total_bytes // SAMPLED_BYTES)
        code_points = np.arange(FIRST_WITHOUT_WORDS)
        code = CharacterCode(code_points, np.zeros(code_points.size, np.int64))
        self.words = Fragments(code, PairFilter.of_everything(), scratch, None)

    def worker(self) -> FirstPassWorker:
        """A counter for one thread."""
        return FirstPassWorker(self.bigrams.worker(), self.words.worker(), self.sample_every)

    def merges_at_least(self, count: int) -> float:
        """About how many merges and characters have at least this count."""
        pairs = np.count_nonzero(self.bigrams.pair_counts() >= count)
        words = np.count_nonzero(self.word_counts >= count / self.sample_every)
        characters = np.count_nonzero(self.bigrams.characters[128:] >= count)
        return float(MERGES_PER_PAIR * pairs + MERGES_PER_WORD * words + characters)

    def guess(self, pieces: int, lowest: int) -> int:
        """The count that about `pieces` merges and characters reach, but at least `lowest`."""
        self.word_counts = self.words.counts()
        low, high = lowest, int(self.bigrams.pair_counts().max(initial=lowest))
        while low < high:
            middle = (low + high + 1) // 2
            if self.merges_at_least(middle) >= pieces:
                low = middle
            else:
                high = middle - 1
        return low

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the counts."""
        (folder / "words").mkdir()
        return {"bigrams": self.bigrams.save(folder), "words": self.words.save(folder / "words")}

    def load(self, folder: Path, facts: dict[str, Any]) -> None:
        """Continue from what `save` wrote."""
        self.bigrams.load(folder, facts["bigrams"])
        self.words.load(folder / "words", facts["words"])


class FirstPassWorker:
    """One thread's counts."""

    def __init__(self, bigrams: BigramWorker, words: FragmentWorker, sample_every: int) -> None:
        self.bigrams, self.words, self.sample_every = bigrams, words, sample_every

    def add(self, codes: np.ndarray, number: int) -> None:
        """Count one block."""
        self.bigrams.add(codes)
        if number % self.sample_every == 0:
            self.words.add(codes)

    def flush(self) -> None:
        """Hand everything over."""
        self.bigrams.flush()
        self.words.flush()


LARGE_ARRAY = 1 << 17
_M_MMAP_THRESHOLD = -3
PER_THREAD = 12 << 20
"""A worker's own tables, and the blocks that wait for it."""
FOR_READING = 40 << 20
"""Documents on their way from the files, the character tables, the pairs of the merge loop."""
LEAST = 32 << 20
"""Below this the tables could hardly hold the alphabet and its pairs."""
TABLE_SHARE = 0.55
"""While fragments become words, both are in memory: the table may take this share."""
PLACES_SHARE = 0.3
"""The least share that must be left for the places of pairs when the words are in memory."""


class Memory:
    """A limit on the resident memory of this process, or none."""

    def __init__(self, limit: int | None, threads: int) -> None:
        self.limit = limit
        self.free: int | None = None
        if limit is not None:
            reserved = _resident() + FOR_READING + threads * PER_THREAD
            self.free = limit - reserved
            if self.free < LEAST:
                raise UsageError(
                    f"A memory limit of {human_bytes(limit)} is too small to hold the alphabet and its pairs: the "
                    f"program itself takes {human_bytes(reserved)} with --threads {threads}. Set --max-memory to "
                    f"{human_bytes(reserved + LEAST)} or more, or lower --threads."
                )

    def for_tables(self) -> int | None:
        """Bytes for the big table of a counting pass."""
        return None if self.free is None else int(TABLE_SHARE * self.free)

    def for_words(self) -> int | None:
        """Bytes for all words together."""
        return None if self.free is None else int((1 - PLACES_SHARE) * self.free)

    def for_places(self) -> int | None:
        """Bytes for the places of pairs, now that the words are in memory."""
        if self.limit is None:
            return None
        return max(0, self.limit - _resident() - FOR_READING // 2)


def return_freed_memory() -> None:
    """Make glibc give the memory of large arrays back to the system as soon as they are freed.

    By default it keeps more and more of it in its heap. Training 45 MB of Chinese took 20 MB more that way.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_ARRAY)


def peak_resident() -> int:
    """The most memory that this process ever had resident, in bytes.

    Not `ru_maxrss` on Linux: a child inherits that of its parent.
    """
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
