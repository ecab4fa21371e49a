"""The explaining pictures of the docs (docs/pictures.py): each is there in both themes, small, and has its words."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

DOCS = Path(__file__).parents[1] / "docs"
MAX_BYTES = 200_000


def load_pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


pictures = load_pictures()


@pytest.mark.parametrize("name", pictures.CAPTIONS)
def test_every_picture_is_there_in_both_themes_with_a_caption_an_alt_text_and_a_function_that_draws_it(name):
    paths = [pictures.picture_path(name, theme) for theme in pictures.THEME_NAMES]
    assert max(path.stat().st_size for path in paths) <= MAX_BYTES
    ((width, _),) = {Image.open(path).size for path in paths}
    assert width == 1440  # twice the width of a column, for sharp text on any screen
    words = pictures.CAPTIONS[name]
    assert words.caption.endswith(".")
    assert 20 < len(words.alt) < 140
    assert '"' not in words.alt  # it stands in an HTML attribute
    tree = ast.parse((DOCS / "images" / f"{words.drawn_by}.py").read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert pictures.function_name(name) in functions


def test_no_drawing_module_and_no_picture_in_two_themes_is_without_a_caption():
    drawn = {path.stem for path in (DOCS / "images").glob("draw_*.py")}
    assert drawn == {words.drawn_by for words in pictures.CAPTIONS.values()}
    light = {path.stem.removesuffix("-light") for path in (DOCS / "images").glob("*-light.png")}
    assert light == {*pictures.CAPTIONS, "board"}  # board.py takes that one


def test_both_readmes_and_the_picture_show_one_run():
    """docs/images/quickstart_run.py writes the record and the blocks, docs/pictures.py the picture."""
    record = json.loads((DOCS / "images" / "quickstart-run.json").read_text(encoding="utf-8"))
    figures = record["figures"]
    for theme in pictures.THEME_NAMES:
        assert json.loads(Image.open(pictures.picture_path("result", theme)).info["Description"]) == figures
    of_channels = (
        [f"{name} {figures[key][name]:.2f}" for name in ("code", "en", "zh")] for key in ("bits per byte", "gzip")
    )
    bits, gzip = map(", ".join, of_channels)
    facts = f"{figures['all facts']:.1%}"
    for name, key in (("README.md", "printed"), ("README.zh.md", "printed_zh")):
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        lines = record[key]
        assert "\n".join(["```", *lines, "```"]) in text, f"{name} shows another run"
        assert [bits in line and gzip in line for line in lines].count(True) == 1
        assert [facts in line for line in lines].count(True) == 1
        assert f"{figures['held-out loss']:.3f}" in next(line for line in lines if "630" in line)
        assert f" {facts.removesuffix('%')} %" in text.partition(lines[0])[0], "the promise is of that run"


def test_a_missing_workspace_and_an_unknown_name_are_refused_in_words(tmp_path, capsys):
    assert pictures.main(["--work", str(tmp_path / "nowhere"), "bpe"]) == 3
    assert "z2a quickstart --work" in capsys.readouterr().err
    assert pictures.main(["bpee"]) == 2
    assert "near-copies" in capsys.readouterr().err
