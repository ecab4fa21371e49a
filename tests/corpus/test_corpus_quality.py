"""Taught models and own filters: what they learn, what they say of texts, and what a build does with it."""

import json
import math
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.corpus.corpus_helpers import HERE, both, plain_options, tree
from zero2all.common.errors import BadInputError, UsageError
from zero2all.corpus import EngineConfig, Source, build_corpus, load_settings, quality
from zero2all.corpus.quality import SCORE_KEY, QualityConfig, find_model, scores_of
from zero2all.corpus.teach import make_model, teach

WORDS = {
    "good": "river stone window morning letter quiet garden bridge winter candle story teacher 花园",
    "bad": "click offer buy cheap deal discount seo keyword link promo order bonus 优惠",
}
COMMON = ["the", "of", "and", "is", "to", "in", "that", "it", "was", "for"]


def texts(kind, count, seed=0):
    rng = random.Random(f"{kind}{seed}")
    return [" ".join(rng.choices(WORDS[kind].split() + COMMON, k=60)) + "." for _ in range(count)]


def write_lines(path, found):
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found))
    return path


def teach_files(workspace, counts=(150, 150)):
    raw = [write_lines(workspace / f"{kind}.jsonl", texts(kind, n)) for kind, n in zip(WORDS, counts, strict=True)]
    return make_model([Source(path.stem, path, "en") for path in raw], workspace)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    teach_files(folder)
    return folder


def build(workspace, found, name="corpus", engine=HERE, **settings):
    source = Source("own", write_lines(workspace / "raw.jsonl", found), "en")
    return build_corpus(workspace / name, [source], plain_options(quality=QualityConfig(**settings)), engine)


def test_a_classifier_tells_apart_texts_it_has_not_seen_and_gives_the_same_bytes_again(workspace, tmp_path):
    folder, report = teach_files(tmp_path)
    assert tree(folder) == tree(workspace / "taught/quality")
    assert report["auc"] == 1.0
    assert report["examples"]["good"]["read"] == 150
    line = report["thresholds"][-1]
    assert line["dropped"]["bad"] == 1.0
    assert 0.3 < line["dropped"]["good"] <= 0.5, "fewer than half, where several have the score of the middle"
    assert line["below"][-1]["score"] < line["min_score"] <= line["above"][0]["score"]
    model = find_model(tmp_path, "quality")
    assert min(model.scores(texts("good", 50, 1))) > 0.5 > max(model.scores(texts("bad", 50, 1)))
    assert not list((tmp_path / "taught").glob(".*")), "the examples are gone"


def test_perplexity_is_that_of_witten_and_bell():
    learned = ["a b a b", "a c"] * 20
    table, _ = teach("reference", {"reference": (learned, learned[:2])})
    a, b, unseen = 60 / 123, 40 / 123, 3 * 2**-17 / 123  # 120 units of 3 kinds
    chances = [a, (40 + 2 * b) / 62, (20 + a) / 41, (40 + 2 * b) / 62]  # `a` is followed by 2 kinds, `b` by 1
    usual, unknown = scores_of(["a b a b", "x y"], "reference", table)
    assert usual == pytest.approx(sum(map(math.log2, chances)) / 4, abs=1e-3)
    assert unknown == pytest.approx(math.log2(unseen), abs=1e-3)


def test_a_build_stores_scores_and_drops_what_lies_below_with_samples(workspace):
    found = texts("good", 40, 3) + texts("bad", 10, 3) + ["", "短"]
    stored = build(workspace, found, "stored", model="quality")["sources"]["own"]
    assert stored["dropped"] == {"empty": 1}
    records = both(workspace / "stored", "own")
    model = find_model(workspace, "quality")
    assert [record["others"][SCORE_KEY] for record in records] == model.scores([each["content"] for each in records])
    report = build(workspace, found, "dropped", model="quality", min_score=0.55)
    assert report["sources"]["own"]["dropped"] == {"empty": 1, "low_score": 11}
    sample = json.loads((workspace / "dropped/own/dropped/low_score.jsonl").read_text().splitlines()[0])
    assert sample["measures"]["score"] < 0.55


FILTER = """
import time
def judge(record):
    assert record["file"] == "raw.jsonl" and record["place"] and record["source"] == "own"
    number = int(record["content"].split()[-1])
    if number == 6:
        raise ValueError("no such number")
    if number == 7:
        time.sleep(60)
    return [None, True, False, "too-odd", 0.25, "two words"][number]
"""


def own_build(folder, numbers, **settings):
    (folder / "mine.py").write_text(FILTER)
    found = [f"A text that is long enough, with the number {number}" for number in numbers]
    return build(folder, found, filter=f"{folder / 'mine.py'}:judge", **settings)["sources"]["own"]


def test_a_filter_of_the_user_keeps_drops_and_scores(tmp_path):
    assert own_build(tmp_path, range(5))["dropped"] == {"filter_dropped": 1, "filter_too-odd": 1}
    assert [record["others"].get(SCORE_KEY) for record in both(tmp_path / "corpus", "own")] == [None, None, 0.25]
    other = own_build(tmp_path, range(5), min_score=0.5, engine=EngineConfig(workers=2))
    assert other["dropped"]["low_score"] == 1, "also in other processes"


def test_a_filter_in_a_yaml_file_is_looked_for_beside_it(tmp_path):
    (tmp_path / "corpus.yaml").write_text("sources: {own: raw.jsonl}\nquality: {filter: 'mine.py:judge'}\n")
    settings = load_settings([str(tmp_path / "corpus.yaml")])
    assert settings.options.quality.filter == f"{tmp_path / 'mine.py'}:judge"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (5, r"returned two words at raw\.jsonl, .*Expected: True"),
        (6, r"mine\.py:judge failed at raw\.jsonl, byte 0.*ValueError: no such number, line 7"),
        (7, r"failed at raw\.jsonl.*it took more than 0\.2 seconds, line 9"),
    ],
)
def test_what_a_filter_does_wrong_is_told_with_file_and_record(tmp_path, monkeypatch, number, words):
    monkeypatch.setattr(quality, "FILTER_SECONDS", 0.2)
    with pytest.raises(BadInputError, match=words):
        own_build(tmp_path, [number])
    assert not (tmp_path / "corpus/own").exists()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"min_score": 0.5}, UsageError, "nothing gives a score"),
        ({"model": "reference"}, BadInputError, "Run `z2a corpus teach` first"),
        ({"filter": "nowhere.py:keep"}, UsageError, "cannot be read"),
        ({"filter": "keep"}, UsageError, "Expected FILE.py:FUNCTION"),
        ({"filter": f"{__file__}:nothing"}, UsageError, "There is no function `nothing`"),
    ],
)
def test_settings_that_name_nothing_are_refused(workspace, settings, error, words):
    with pytest.raises(error, match=words):
        build(workspace, texts("good", 3), "refused", **settings)


def test_a_model_that_is_damaged_or_of_another_version_is_refused(tmp_path):
    folder, _ = teach_files(tmp_path)
    path, manifest = folder / "model.safetensors", folder / "manifest.json"
    whole = path.read_bytes()
    for data in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:100], b""):
        path.write_bytes(data)
        with pytest.raises(BadInputError, match="Run `z2a corpus teach` again"):
            build(tmp_path, texts("good", 3), model="quality")
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(BadInputError, match=r"in taught format 0; .*Run `z2a corpus teach` again"):
        build(tmp_path, texts("good", 3), model="quality")
    assert not (tmp_path / "corpus/own").exists()


def test_classes_that_make_no_model_are_refused(tmp_path):
    with pytest.raises(UsageError, match="good, ja cannot be taught"):
        make_model([Source("good", tmp_path), Source("ja", tmp_path)], tmp_path)
    with pytest.raises(BadInputError, match="`bad` has 10 different texts"):
        teach_files(tmp_path, (150, 10))
    assert not (tmp_path / "taught/quality").exists()


def test_teaching_that_was_killed_ends_with_the_same_model(workspace, tmp_path):
    for kind in WORDS:
        write_lines(tmp_path / f"{kind}.jsonl", texts(kind, 150))
    words = [f"{kind}={tmp_path / kind}.jsonl:en" for kind in WORDS]
    command = [sys.executable, "-m", "zero2all", "corpus", "teach", *words, "--work", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        while not (tmp_path / "taught/.examples/.build").exists() and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    teach_files(tmp_path)
    assert tree(tmp_path / "taught") == tree(workspace / "taught")
