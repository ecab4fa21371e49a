"""What the small world promises: reproducible text, facts told evenly, held-out wordings that never occur."""

import hashlib
import io
import re
from collections import Counter
from contextlib import redirect_stdout
from functools import cache
from itertools import product
from string import Formatter

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
    likely = [(probe, words) for probe, words in told if words in flat]
    return [probe for probe, words in likely if re.search(rf"(?<!\d){re.escape(words)}(?!\d)", flat)]


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
    for document in corpus(name):
        sizes["facts" if document.family == "quiz" else document.family] += len(document.text.encode())
    total = sum(sizes.values())
    assert TEXT_BYTES <= total < TEXT_BYTES + 5_000
    for group, share in SHARES.items():
        assert sizes[group] / total == pytest.approx(share, abs=0.01)
    assert len({document.text for document in corpus(name)}) == len(corpus(name))
    assert not [document for document in corpus(name) if re.search(r"[{}]", document.title + document.text)]
    assert next(documents(name, TEXT_BYTES, 1)) != next(documents(name, TEXT_BYTES, 2))
    assert LANGUAGES[name].held_out(1) != LANGUAGES[name].held_out(2)


@both_languages
def test_a_held_out_wording_is_printed_of_its_fact_in_no_variant_or_frame(name: str) -> None:
    language, flat = LANGUAGES[name], flatten(corpus_text(name))
    held_out = language.held_out(SEED)
    told = [fact.told(each) for fact in language.facts for one in held_out[fact.key] for each in variants(one)]
    assert len(told) > 4 * len(language.facts)
    assert [sentence for sentence in told if flatten(sentence) in flat] == []


@both_languages
def test_no_new_wording_is_printed_of_any_fact_in_any_frame_or_after_any_lead_in(name: str) -> None:
    language, flat = LANGUAGES[name], flatten(corpus_text(name))
    for relation in language.relations:
        assert len(relation.new_wordings) >= 7
        for fact in relation.facts:
            told = [flatten(fact.told(wording.partition("{a}")[0] + "{a}")) for wording in relation.new_wordings]
            assert [each for each in told if each in flat] == []


@both_languages
def test_no_wording_contains_another(name: str) -> None:
    for relation in LANGUAGES[name].relations:
        printed = (*relation.answer_last, *relation.reverse_statements, *relation.reverse_questions)
        for fact in relation.facts[:3]:
            others = {each: fact.told(each).lower() for one in printed for each in variants(one)}
            for wording in (*relation.answer_last, *relation.new_wordings):
                own = variants(wording)
                for each in own:
                    told = fact.told(each.partition("{a}")[0] + "{a}").lower() if "{a}" in each else others[each]
                    assert [other for other, text in others.items() if told in text and other not in own] == []


@both_languages
def test_every_fact_is_told_often_and_in_each_permitted_wording(name: str) -> None:
    language, texts = LANGUAGES[name], [document.text.lower() for document in corpus(name)]
    told: Counter[tuple[str, str]] = Counter()
    per_wording: list[int] = []
    sentences = language.sentences(SEED)
    shared = Counter(sentence.text for sentence in sentences)  # "Who lives in Oakhaven?" is asked of two people
    about = {
        names: "\n".join(text for text in texts if names[0].lower() in text or names[1].lower() in text)
        for names in {sentence.names for sentence in sentences}
    }
    for sentence in sentences:
        text = about[sentence.names]
        times = sum(text.count(variant.lower()) for variant in variants(sentence.text)) // shared[sentence.text]
        per_wording.append(times)
        told[sentence.fact] += times
    assert min(per_wording) >= 8
    assert max(per_wording) <= 3 * min(per_wording)
    assert set(told) == {fact.key for fact in language.facts}
    assert min(told.values()) >= 500
    assert max(told.values()) <= 1.3 * min(told.values())


@both_languages
def test_held_out_wordings_are_used_with_other_facts(name: str) -> None:
    language, text = LANGUAGES[name], corpus_text(name).lower()
    held_out = language.held_out(SEED)
    assert {len(templates) for templates in held_out.values()} == {2}
    for relation in language.relations:
        for template in relation.answer_last:
            users = [fact for fact in relation.facts if template not in held_out[fact.key]]
            assert len(users) >= 3
            assert all(any(fact.told(each).lower() in text for each in variants(template)) for fact in users)


@both_languages
def test_there_are_at_most_eighty_facts_and_thirty_wordings_at_least(name: str) -> None:
    language = LANGUAGES[name]
    assert 50 <= len(language.facts) <= 80
    assert len({fact.key for fact in language.facts}) == len(language.facts)
    for relation in language.relations:
        assert len(set(relation.answer_last)) == len(relation.answer_last) >= 30
        templates = [language.template(relation, wording) for wording in relation.answer_last]
        assert all(re.fullmatch(r'[.。"”]+', each.partition("{a}")[2]) for each in (*templates, *relation.new_wordings))


@both_languages
def test_probes_are_whole(name: str) -> None:
    language, found = LANGUAGES[name], probes(name, SEED)
    assert len({probe.id for probe in found}) == len(found)
    of_facts = [probe for probe in found if probe.family != "arithmetic"]
    assert sum(probe.new_wording for probe in of_facts) == len(language.facts)
    assert sum(not probe.new_wording for probe in of_facts) == 2 * len(language.facts)
    assert len(found) - len(of_facts) == 30
    answers: dict[str, set[str]] = {}
    for probe in found:
        assert probe.channel == name
        assert probe.prompt == probe.prompt.strip()
        assert probe.answer == probe.answer.strip()
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
    for document in corpus(name):
        if document.family != "arithmetic":
            continue
        for sentence in re.split(r"(?<=[.。])\s*", document.text):
            if sentence:
                left, right, result = (value[number.lower()] for number in pattern.findall(sentence))
                found.append(("-" if minus.search(sentence) else "+", left, right, result))
    return found


@both_languages
def test_printed_calculations_are_right_and_held_out_ones_are_asked_but_never_printed_in_either_order(
    name: str,
) -> None:
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


@both_languages
def test_story_questions_can_be_answered_whatever_wording_was_chosen(name: str) -> None:
    """Each slot of an answer stands in every wording of at least one part of the story."""
    book = LANGUAGES[name].stories
    pronouns = {slot for _, slots in book.people for slot in slots}
    for arc in book.arcs:
        parts = (book.openings, *arc.scenes, book.closings)
        for question, answer in (*book.questions, *arc.questions):
            slots = {slot for _, slot, _, _ in Formatter().parse(answer) if slot} - pronouns
            for slot in slots:
                always = [part for part in parts if all(f"{{{slot}}}" in wording for wording in part)]
                assert always, f"{arc.title}: {question} needs {slot}"


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
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(program, {"__name__": "__main__"})
        assert printed.getvalue().splitlines() == re.findall(r"  # (.*)", program) or program in asserting
