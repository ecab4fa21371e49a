"""The pages fit together: links, pictures, names and headings. Commands are in test_docs_commands.py."""

import re
import subprocess
import sys
from urllib.parse import unquote

import pytest

from tests.pages import ROOT, Page, of_each_page, pages, report
from zero2all.common.progress import human_count, human_seconds
from zero2all.config import load_config
from zero2all.model.config import parameter_counts
from zero2all.quickstart.choose import LAWS, PRESETS, SEQ_LEN, Speed, choices, vocabulary
from zero2all.quickstart.speedrun import PILOT_SHARE, RESERVE

PAGES = {str(page): page for page in pages()}
TRANSLATED = sorted(name for name in PAGES if name.endswith(".zh.md"))
README_LINES = 200
PICTURE_BYTES = 200 << 10
FILE = re.compile(r"(?:benchmarks|configs|docs|scripts|tests|zero2all)/[\w./-]+\.(?:py|md|sh|yaml|json|png|css)")
MOVED = {"docs/measurements.md"}
"""Pages that only say where their text is now, for old links."""


@of_each_page
def test_links_pictures_and_files_of_the_repository_that_are_named_exist(page):
    for place, target in page.links:
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = unquote(target).partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        if not path.exists():
            yield f"{place}: the link {target} leads to no file"
        elif anchor and path.suffix == ".md" and anchor not in Page(path).anchors:
            yield f"{place}: {file or 'this page'} has no heading for #{anchor}"
        elif path.suffix == ".png" and path.stat().st_size > PICTURE_BYTES:
            yield f"{place}: {file} has {path.stat().st_size:,} bytes, at most {PICTURE_BYTES:,} are allowed"
    named = ((place, text) for place, text in page.spans if FILE.fullmatch(text))
    yield from (f"{place}: there is no {text}" for place, text in named if not (ROOT / text).exists())


def test_every_page_is_reached_from_the_readme():
    reached, rest = set(), ["README.md"]
    while rest:
        name = rest.pop()
        if name in reached or name not in PAGES:
            continue
        reached.add(name)
        page = PAGES[name]
        targets = [(page.path.parent / target.partition("#")[0]).resolve() for _, target in page.links]
        rest += [target.relative_to(ROOT).as_posix() for target in targets if target.is_relative_to(ROOT)]
    report([f"{name}: no page links to it" for name in sorted(PAGES.keys() - reached - MOVED)])


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translation_has_the_headings_of_its_original(name):
    original = name.replace(".zh.md", ".md")
    assert original in PAGES, f"{name}: there is no {original}"
    ours, theirs = PAGES[name].headings, PAGES[original].headings
    for (line, level, text), (other_line, other_level, other) in zip(ours, theirs, strict=False):
        assert level == other_level, f"{name}:{line} has another level than {original}:{other_line}: {text}, {other}"
    left = theirs[len(ours) :] or ours[len(theirs) :]
    assert not left, f"{name} has {len(ours)} headings, {original} {len(theirs)}; left over from line {left[0][0]}"


@pytest.mark.parametrize(("name", "minutes"), [("README.md", "minutes"), ("README.zh.md", "分钟")])
def test_a_readme_is_short_and_begins_with_what_you_get(name, minutes):
    lines = PAGES[name].lines
    assert len(lines) <= README_LINES, f"{name} has {len(lines)} lines, at most {README_LINES} are allowed"
    wanted = ("make quickstart", "make test", minutes, "<img src=")
    missing = [words for words in wanted if words not in "\n".join(lines[:40])]
    assert missing == [], f"missing in the first 40 lines of {name}"


@of_each_page
def test_a_page_has_one_title_no_level_is_left_out_and_no_placeholder_is_left(page):
    level = 0
    for number, found, text in page.headings:
        if found > level + 1 or (found == 1 and level > 0):
            yield f"{page}:{number}: `{text}` has level {found} after level {level}"
        level = found
    words = re.compile(r"\b(?:TODO|FIXME|TBD|[A-Z]{3,}_[A-Z_]{3,})\b")
    prose = [(number, re.sub(r"`[^`]*`", "", line)) for number, line in enumerate(page.prose, 1)]
    blocks = [(number, line) for block in page.blocks for number, line in enumerate(block.lines, block.number)]
    lines = [*prose, *((number, line) for number, line in blocks if words.fullmatch(line.strip()))]
    yield from (f"{page}:{number}: {found[0]}" for number, line in lines if (found := words.search(line)))


def test_the_tables_of_learning_speed_are_those_of_the_results():
    shown = subprocess.check_output([sys.executable, "benchmarks/learning.py", "show"], cwd=ROOT, text=True)
    tables = shown.split("\n\n")
    assert [len(table.splitlines()) > 4 for table in tables] == [True, True]
    for name in ("learning.md", "learning.zh.md"):
        assert all(table in (ROOT / "docs" / name).read_text() for table in tables), name
    ratios = re.findall(r"(\S+) \|$", tables[0], re.MULTILINE)[2:]
    assert f"{min(ratios)} to {max(ratios)} of its time" in (ROOT / "README.md").read_text()
    assert f"它 {min(ratios)} 到 {max(ratios)} 的时间" in (ROOT / "README.zh.md").read_text()


def test_the_tables_of_reinforcement_learning_are_those_of_the_results():
    shown = subprocess.check_output([sys.executable, "benchmarks/rl.py", "show"], cwd=ROOT, text=True)
    for name in ("rl.md", "rl.zh.md"):
        assert all(table in (ROOT / "docs" / name).read_text() for table in shown.strip().split("\n\n")), name


BUYERS = {
    "2 CPU cores, 3 MB of text": ("cpu", Speed(0.0, 51e-6, 96e9), 0.85e6, 3e6),
    "the same, 100 MB": ("cpu", Speed(0.0, 51e-6, 96e9), 28e6, 100e6),
    "RTX 4090, 4 GB": ("cuda", Speed(0.0165, 0.0, 0.9 * 66e12), 1e9, 4e9),
    "H200, 4 GB": ("cuda", Speed(0.0045, 0.0, 404e12), 1e9, 4e9),
}
"""Machine and text of the table in speedrun.md: device, speed, tokens and bytes of the text."""


def test_the_table_of_what_an_hour_buys_is_what_would_be_chosen():
    rows = [row for buyer in BUYERS.values() for row in map(bought, [buyer] * 3, ("5 min", "1 h", "10 h"))]
    for name in ("speedrun.md", "speedrun.zh.md"):
        text = (ROOT / "docs" / name).read_text()
        assert [row for row in rows if row not in text] == [], f"{name} should have:\n" + "\n".join(rows)


def bought(buyer: tuple[str, Speed, float, float], time: str) -> str:
    """A row without its first cell. The time for the text is not counted."""
    (device, speed, unique, text_bytes), (number, unit) = buyer, time.split()
    seconds, (fixed, share) = int(number) * {"min": 60, "h": 3600}[unit], RESERVE[device]
    fields = {"model.vocab_size": vocabulary(text_bytes, speed.flops * seconds), "data.seq_len": SEQ_LEN[device]}
    config = load_config(PRESETS[device], [f"--{name}={value}" for name, value in fields.items()])
    left = (seconds * (1 - share) - fixed) * (1 - PILOT_SHARE)
    best = choices(config, unique, left, speed, LAWS[device])[0]
    millions = parameter_counts(best.model)["total"] / 1e6
    shape = f"{millions:.3g} M, {best.model.layers} x {best.model.hidden_size} | {best.model.vocab_size:,}"
    read = f"{human_count(best.tokens)} | {best.tokens / unique:.1f} | {best.tokens_per_step:,}"
    return f"| {time} | {shape} | {read} | {human_seconds(best.seconds)} | {best.loss:.3f} |"
