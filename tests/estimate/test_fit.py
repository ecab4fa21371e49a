"""What would make a run fit, and GPUs by name."""

from pathlib import Path

import pytest

from tests.estimate.test_pass_memory import FOOTPRINTS
from zero2all.common.errors import UsageError
from zero2all.estimate.fit import changes_that_help, process_bytes
from zero2all.estimate.gpus import CARDS, GIB, Card, named_card
from zero2all.estimate.memory import MemorySettings, estimate_memory
from zero2all.model.config import ModelConfig
from zero2all.predict.memory_report import memory_report

MODEL = ModelConfig(vocab_size=64000, hidden_size=4096, intermediate_size=14336, layers=32, heads=32, kv_heads=8)
DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = MemorySettings(4096, 4, FOOTPRINTS["own"], passes=2)


def test_every_change_that_is_named_needs_less_and_says_rightly_whether_it_fits():
    card = named_card("h200")
    now = process_bytes(estimate_memory(MODEL, SETTINGS), SETTINGS)
    assert now > card.memory_bytes
    changes = changes_that_help(MODEL, SETTINGS, card)
    for change in changes:
        needed = process_bytes(estimate_memory(MODEL, change.settings), change.settings)
        assert needed == change.process_bytes < now
        assert change.fits == (needed <= card.memory_bytes)
    named = {change.text: change.fits for change in changes}
    assert named["--parallel.offload optimizer"]
    assert not named["--train.recompute selective"]


def test_where_no_change_is_enough_alone_pairs_are_tried():
    card = Card("small", 60 * GIB, 8)
    fitting = [change for change in changes_that_help(MODEL, SETTINGS, card, ranks=1) if change.fits]
    assert fitting
    for change in fitting:
        alone = change.fields.keys() - {"train.recompute_every"}
        assert len(alone) == 2 or "parallel.zero" in alone


def test_what_a_run_does_already_is_not_proposed():
    settings = MemorySettings(4096, 1, FOOTPRINTS["own"], recompute="full", offload="optimizer")
    found = changes_that_help(MODEL, settings, named_card("a100-80g"))
    for change in found:
        assert not change.fields.keys() & {"train.micro_batch_samples", "optim.kind"}
    kinds = [change.text for change in found if change.fields.keys() <= {"train.recompute", "train.recompute_every"}]
    assert kinds == ["--train.recompute groups --train.recompute_every 2"]


def test_cards_that_people_have_at_home_are_known_and_an_unknown_gpu_gets_no_guess():
    for name, gib in {"4090": 23.6, "RTX 3090": 23.6, "rtx-4080": 15.5, "5090": 31.3}.items():
        assert named_card(name).memory_bytes == gib * GIB
    assert named_card("H200") is CARDS["h200"]
    assert named_card("h200").workspace_bytes == 64 * 2**20
    with pytest.raises(UsageError, match=r"b300 is not known\. Known are a100"):
        named_card("b300")


def test_the_figures_of_the_pages_are_those_of_the_tool():
    """What docs/faq.md and docs/recipes.md say of z2all-100m and of z2all-1b."""

    def needed(source: str, card: str, *words: str) -> str:
        return f"{memory_report(source, list(words), named_card(card), 1).process_bytes / GIB:.1f}"

    small = [needed("z2all-100m", "4090", "--train.micro_batch_samples", str(samples)) for samples in (8, 16, 32)]
    faq, *recipes = ((DOCS / name).read_text() for name in ("faq.md", "recipes.md", "recipes.zh.md"))
    assert [words for words in (f"takes {small[2]} GiB", f"{small[0]} GiB") if words not in faq] == []
    assert f"takes {needed('z2all-1b', 'h200')} GiB" in faq
    assert all(" / ".join(small) in page for page in recipes)
