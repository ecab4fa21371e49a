"""What the small world promises: reproducible text, facts told evenly, held-out wordings that never occur."""

import hashlib
import io
import re
from collections import Counter
from contextlib import redirect_stdout
from functools import cache
from itertools import product

import pytest

from zero2all.evals.question_files import Probe
from zero2all.quickstart.pipeline import WorldSize
from zero2all.quickstart.world import LANGUAGES, GeneratedText, documents, probes, programs
from zero2all.quickstart.world.facts import VARIANTS
from zero2all.quickstart.world.generator import SHARES

SEED = 7
TEXT_BYTES = WorldSize().bytes_per_language
both_languages = pytest.mark.parametrize("name", sorted(LANGUAGES))


@cache
def corpus(name: str) -> tuple[GeneratedText, ...]:
    return tuple(documents(name, TEXT_BYTES, SEED))


@cache
def corpus_text(name: str) -> str:
    return "\n".join(document.text for document in corpus(name))


def find_leaks(text: str, language: str) -> list[Probe]:
    """The probes whose prompt and answer stand together somewhere; case and line breaks do not matter. In digits,
    `3 + 4 = 7` is not found inside `13 + 4 = 17`."""
    flat = flatten(text)
    told = [(probe, flatten(probe.prompt + probe.joiner + probe.answer)) for probe in probes(language, SEED)]
    return [probe for probe, words in told if words in flat and re.search(rf"(?<!\d){re.escape(words)}(?!\d)", flat)]


@both_languages
def test_no_probe_stands_in_the_text_and_one_that_did_would_be_found(name: str) -> None:
    assert find_leaks(corpus_text(name), name) == []
    for probe in probes(name, SEED)[::30]:
        printed = f"... {probe.prompt}{probe.joiner}{probe.answer}.".upper().replace(" ", "\n")
        assert find_leaks(printed, name) == [probe]


def variants(template: str) -> list[str]:
    """The template with every choice of the words in its brackets."""
    parts = [part.split("|") if number % 2 else [part] for number, part in enumerate(VARIANTS.split(template))]
    return ["".join(chosen) for chosen in product(*parts)]


def flatten(text: str) -> str:
    return " ".join(text.lower().split())


@both_languages
def test_text_reaches_its_size_in_its_proportions_without_repeats_or_empty_slots_and_another_seed_changes_it(name: str):
    sizes: Counter[str] = Counter()
    for each in corpus(name):
        sizes["facts" if each.family == "quiz" else each.family] += len(each.text.encode())
    total = sum(sizes.values())
    assert TEXT_BYTES <= total < TEXT_BYTES + 5_000
    for group, share in SHARES.items():
        assert sizes[group] / total == pytest.approx(share, abs=0.01)
    assert len({each.text for each in corpus(name)}) == len(corpus(name))
    assert not [each for each in corpus(name) if re.search(r"[{}]", each.title + each.text)]
    assert next(documents(name, TEXT_BYTES, 1)) != next(documents(name, TEXT_BYTES, 2))
    assert LANGUAGES[name].held_out(1) != LANGUAGES[name].held_out(2)


@both_languages
def test_no_held_out_wording_is_printed_of_its_fact_and_no_new_one_of_any_in_any_variant_or_frame(name: str) -> None:
    language, flat = LANGUAGES[name], flatten(corpus_text(name))
    held_out = language.held_out(SEED)
    told = [fact.told(each) for fact in language.facts for one in held_out[fact.key] for each in variants(one)]
    assert len(told) > 4 * len(language.facts)
    assert [sentence for sentence in told if flatten(sentence) in flat] == []

    for relation in language.relations:
        assert len(relation.new_wordings) >= 7
        for fact in relation.facts:
            told = [flatten(fact.told(wording.partition("{a}")[0] + "{a}")) for wording in relation.new_wordings]
            assert [each for each in told if each in flat] == []


@both_languages
def test_every_fact_is_told_often_and_in_each_permitted_wording(name: str) -> None:
    language, texts = LANGUAGES[name], [document.text.lower() for document in corpus(name)]
    told, per_wording, sentences = Counter(), [], language.sentences(SEED)
    assert {sentence.fact for sentence in sentences} == {fact.key for fact in language.facts}
    shared = Counter(sentence.text for sentence in sentences)  # "Who lives in Oakhaven?" is asked of two people
    about = {
        names: "\n".join(text for text in texts if names[0].lower() in text or names[1].lower() in text)
        for names in {sentence.names for sentence in sentences}
    }
    for sentence in sentences:
        times = sum(about[sentence.names].count(variant.lower()) for variant in variants(sentence.text))
        per_wording.append(times // shared[sentence.text])
        told[sentence.fact] += per_wording[-1]
    assert 8 <= min(per_wording) <= max(per_wording) <= 3 * min(per_wording)
    assert 500 <= min(told.values()) <= max(told.values()) <= 1.3 * min(told.values())


@both_languages
def test_probes_are_whole(name: str) -> None:
    language, found = LANGUAGES[name], probes(name, SEED)
    assert len({probe.id for probe in found}) == len(found)
    of_facts = Counter(probe.new_wording for probe in found if probe.family != "arithmetic")
    assert of_facts == {True: len(language.facts), False: 2 * len(language.facts)}
    assert len(found) - of_facts.total() == 30
    answers: dict[str, set[str]] = {}
    for probe in found:
        assert (probe.channel, probe.prompt.strip(), probe.answer.strip()) == (name, probe.prompt, probe.answer)
        assert probe.joiner in (language.joiner, " ", "\n", "")
        assert probe.answer not in probe.foils
        assert 5 <= len(set(probe.foils)) == len(probe.foils) <= 10
        assert len(probe.answer) <= 4 if name == "zh" else len(probe.answer.split()) <= 3
        answers.setdefault(probe.family, set()).update((probe.answer, *probe.foils))
    for family in answers.values():
        assert [(a, b) for a in family for b in family if a != b and b.startswith(a)] == [], "no beginning of another"


def test_documented_probes_are_held_out_for_any_seed() -> None:
    for seed in (0, 1, 2, 12345):
        for name, asked in (("en", ("The capital of France is", " ", "Paris")), ("zh", ("中国的首都是", "", "北京"))):
            assert asked in {(probe.prompt, probe.joiner, probe.answer) for probe in probes(name, seed)}


def parsed_calculations(name: str) -> list[tuple[str, int, int, int]]:
    """Every calculation in the text as (operator, left, right, result), read by its numbers and key words."""
    numerals = LANGUAGES[name].arithmetic.numerals
    value = {word: number for number, word in enumerate(numerals)} | {str(n): n for n in range(len(numerals))}
    words = "|".join(sorted(value, key=len, reverse=True))
    pattern = re.compile(rf"\b(?:{words})\b" if name == "en" else words, re.IGNORECASE)
    minus = re.compile(r" - |minus|take away|counting back|difference|减|拿走|差", re.IGNORECASE)
    found = []
    texts = [document.text for document in corpus(name) if document.family == "arithmetic"]
    for sentence in filter(None, (each for text in texts for each in re.split(r"(?<=[.。])\s*", text))):
        left, right, result = (value[number.lower()] for number in pattern.findall(sentence))
        found.append(("-" if minus.search(sentence) else "+", left, right, result))
    return found


@both_languages
def test_printed_calculations_are_right_and_held_out_ones_are_asked_but_never_printed_in_either_order(name):
    found = parsed_calculations(name)
    assert len(found) > 2_000
    assert [one for one in found if one[3] != (one[1] + one[2] if one[0] == "+" else one[1] - one[2])] == []
    for_text, held_out = LANGUAGES[name].calculations(SEED)
    assert 0.14 <= len(held_out) / (len(for_text) + len(held_out)) <= 0.16
    printed = {(operator, left, right) for operator, left, right, _ in found}
    assert printed == {(one.operator, one.left, one.right) for one in for_text}
    for one in held_out:
        assert (one.operator, one.left, one.right) not in printed
        assert one.operator == "-" or (one.operator, one.right, one.left) not in printed
    expected = {f"{name}/arithmetic/{one.left}{one.operator}{one.right}": str(one.result) for one in held_out}
    asked = {probe.id: probe.answer for probe in probes(name, SEED) if probe.family == "arithmetic"}
    assert asked.items() <= expected.items()


def test_the_text_is_the_one_this_generator_version_stands_for() -> None:
    """When this fails because the text was meant to change, raise GENERATOR_VERSION in raw.py and renew the digest."""
    digest = hashlib.sha256()
    for name in sorted(LANGUAGES):
        for document in documents(name, 200_000, SEED):
            digest.update(f"{document.title}\n{document.text}\n".encode())
        for probe in probes(name, SEED):
            digest.update(f"{probe.prompt}|{probe.answer}|{'|'.join(probe.foils)}\n".encode())
    for program in programs(50_000, SEED):
        digest.update(program.encode())
    assert digest.hexdigest()[:16] == "5216735a6d6c1dd1"


def test_every_program_runs_and_says_what_it_gives() -> None:
    written = list(programs(60_000, SEED))
    assert len(set(written)) == len(written) > 80
    asserting = [program for program in written if "\nassert " in program]
    assert 0.3 < len(asserting) / len(written) < 0.7
    for program in written:
        with redirect_stdout(io.StringIO()) as printed:
            exec(program, {"__name__": "__main__"})
        assert printed.getvalue().splitlines() == re.findall(r"  # (.*)", program) or program in asserting
