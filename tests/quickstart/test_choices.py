"""What the quickstart chooses for how much text, as tables."""

from zero2all.config import config_from_values, config_values, load_config
from zero2all.quickstart import own_text

PRESET = load_config("quickstart")


def test_a_single_text_is_cut_into_enough_documents_to_hold_some_out() -> None:
    table = {2_000: (300, 0.1), 20_000: (333, 0.1), 300_000: (5_000, 0.1), 8_000_000: (8_000, 0.05)}
    for raw_bytes, (piece_bytes, valid_share) in (table | {10**9: (8_000, 0.02)}).items():
        chosen = own_text.cutting(raw_bytes)
        assert (chosen["text_piece_bytes"], chosen["valid_share"]) == (piece_bytes, valid_share)
        assert chosen["split_text_above_bytes"] == 3 * piece_bytes


def test_the_vocabulary_grows_with_the_text_and_is_learned_from_no_more_than_it_has_use_for() -> None:
    sizes = {0: 320, 5_000: 320, 20_000: 768, 41_000: 1_600, 100_000: 3_072, 10**8: 3_072}
    assert {text_bytes: own_text.vocabulary_size(text_bytes, 3_072) for text_bytes in sizes} == sizes
    assert own_text.vocabulary_settings(3_000_000, PRESET) == {"tokenizer.vocab_size": 3_072}
    assert own_text.vocabulary_settings(10**9, PRESET) == {"tokenizer.vocab_size": 3_072, "tokenizer.take": "20MB"}
    assert own_text.vocabulary_settings(10**9, PRESET, {"tokenizer.take", "tokenizer.vocab_size"}) == {}


def test_samples_model_and_steps_grow_with_the_text() -> None:
    found = {100: (32, 64, 2), 8_000: (64, 64, 156), 29_000: (64, 64, 566), 60_000: (64, 96, 469)}
    found |= {300_000: (128, 128, 630), 1_200_000: (128, 192, 630), 10**9: (128, 192, 630)}
    for tokens, (seq_len, hidden, steps) in found.items():
        config = own_text.with_settings(PRESET, own_text.run_settings({"own-en": tokens}, PRESET))
        assert (config.data.seq_len, config.model.hidden_size, config.train.steps) == (seq_len, hidden, steps)
        assert config.data.mixture is None
        assert config.schedule.warmup_steps <= steps
        config_from_values(config_values(config), "that was chosen")  # which complains of what does not fit together
    chosen = own_text.run_settings({"en": 2_000_000}, PRESET) | {"data.mixture": PRESET.data.mixture}
    assert own_text.with_settings(PRESET, chosen) == PRESET, "there is text enough for it"


def test_what_a_person_sets_stays_and_the_rest_fits_to_it() -> None:
    for words in (
        "--data.seq_len 256 --train.micro_batch_samples=4 --data.mixture={'own-en':1}",
        "--train.tokens_per_step 4096",
        "--model.hidden_size 96 --model.heads 3 --model.kv_heads 1 --train.steps 7 --schedule.warmup_steps 2",
    ):
        asked, given = load_config("quickstart", words.split()), own_text.given_fields(words.split())
        config = own_text.with_settings(asked, own_text.run_settings({"own-en": 8_000}, asked, given))
        for name in given:
            section, _, field = name.partition(".")
            assert getattr(getattr(config, section), field) == getattr(getattr(asked, section), field)
        config_from_values(config_values(config), "that was chosen")


def test_a_source_smaller_than_one_sample_is_left_out_and_named() -> None:
    tokens = {"own-en": 9_000, "own-other": 20}
    config = own_text.with_settings(PRESET, {**own_text.run_settings(tokens, PRESET), "model.vocab_size": 512})
    assert config.data.mixture == {"own-en": 9_000.0, "own-other": 0.0}
    said = own_text.settings_in_words(tokens, config, ())
    assert "not trained on: own-other, 20 tokens, less than one sample" in said


def test_the_forecast_grows_with_the_text() -> None:
    assert [own_text.forecast(size, PRESET, ()) for size in (20_000, 3_000_000)] == ["one or two minutes", "5 minutes"]
    longer = own_text.with_settings(PRESET, {"train.steps": 5250})
    assert own_text.forecast(3_000_000, longer, ["train.steps"]) == "39 minutes"
