"""The arithmetic and the checks of a model's shape."""

import itertools

import pytest

from zero2all.config import load_config
from zero2all.model.config import ModelConfig, RopeScaling, parameter_counts
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve

SHAPES = {
    "small": {"hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 4, "kv_heads": 2},
    "one head": {"hidden_size": 6, "intermediate_size": 5, "layers": 1, "heads": 1, "kv_heads": 1},
    "wide heads": {"hidden_size": 10, "intermediate_size": 7, "layers": 3, "heads": 6, "kv_heads": 3, "head_dim": 4},
    "narrow heads": {"hidden_size": 64, "intermediate_size": 8, "layers": 1, "heads": 8, "kv_heads": 1, "head_dim": 2},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("attention_bias", ["none", "qkv", "all"])
def test_parameter_counts_are_those_of_the_built_model(shape, attention_bias):
    for mlp_bias, tied, qk_norm, embedding_norm in itertools.product((False, True), repeat=4):
        if tied and embedding_norm:
            continue
        config = ModelConfig(
            vocab_size=31,
            max_seq_len=8,
            attention_bias=attention_bias,
            mlp_bias=mlp_bias,
            tied_embeddings=tied,
            qk_norm=qk_norm,
            embedding_norm=embedding_norm,
            **shape,
        )
        model = Z2all(config, resolve(OpsConfig(), "cpu"))
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        matrices = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
        embedding, head = sizes["embedding.weight"], sizes.get("head.weight", 0)
        assert parameter_counts(config) == {
            "embedding": embedding,
            "blocks": sum(
                size for name, size in sizes.items() if name.startswith(("blocks.", "norm.", "embedding_norm."))
            ),
            "head": head,
            "total": sum(sizes.values()),
            "active": sum(sizes.values()),
            # The head is one matrix more; a tied one is the embedding, so that counts in its place.
            "matmul": sum(sizes[name] for name in matrices) - (0 if tied else embedding),
        }


def test_reference_model_has_1255_million_parameters():
    counts = parameter_counts(load_config("z2all-1b").model)
    assert round(counts["total"] / 1e6, 1) == 1255.5
    assert round(counts["matmul"] / 1e6, 1) == 1123.7


def test_counts_of_an_unresolved_vocabulary_are_our_own_bug():
    with pytest.raises(AssertionError, match="resolve the config"):
        parameter_counts(ModelConfig())


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        (ModelConfig(hidden_size=10, heads=4, kv_heads=2), "m.hidden_size", r"multiple of m.heads \(4\)"),
        (ModelConfig(hidden_size=12, heads=4, kv_heads=2), "m.head_dim", "even width"),
        (ModelConfig(hidden_size=10, heads=4, kv_heads=2, head_dim=3), "m.head_dim", "even width"),
        (ModelConfig(heads=32, kv_heads=5), "m.kv_heads", r"divisor of m.heads \(32\)"),
        (ModelConfig(rope_scaling=RopeScaling("yarn", 4.0)), "m.rope_scaling.original_seq_len", "for yarn"),
        (
            ModelConfig(rope_scaling=RopeScaling("llama3", 4.0, 64, low_freq_factor=4.0)),
            "m.rope_scaling.high_freq_factor",
            "above low_freq_factor",
        ),
    ],
)
def test_shapes_that_do_not_fit_together_are_named(config, field, expected):
    (problem,) = config.problems("m")
    assert problem.field == field
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(str(problem))


def test_shapes_that_fit_have_no_problems():
    assert ModelConfig(hidden_size=10, heads=3, kv_heads=1, head_dim=6).problems("m") == []
    assert ModelConfig(rope_scaling=RopeScaling("llama3", 8.0, 8192)).problems("m") == []
