"""The arithmetic and the checks of a model's shape."""

import pytest

from zero2all.model.config import ModelConfig, MoeConfig, RopeScaling, parameter_counts
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
@pytest.mark.parametrize("bias", ["none", "qkv", "all"])
@pytest.mark.parametrize("more", ["", "mlp_bias qk_norm", "tied_embeddings qk_norm", "embedding_norm"])
def test_parameter_counts_are_those_of_the_built_model(shape, bias, more):
    config = ModelConfig(31, max_seq_len=8, attention_bias=bias, **dict.fromkeys(more.split(), True), **shape)
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    embedding, head, total = sizes["embedding.weight"], sizes.get("head.weight", 0), sum(sizes.values())
    assert parameter_counts(config) == {
        "embedding": embedding,
        "blocks": total - embedding - head,
        "head": head,
        "total": total,
        "active": total,
        # The head is one matrix more; a tied one is the embedding, so that counts in its place.
        "matmul": matrices - (embedding if head else 0),
    }


def test_counts_of_an_unresolved_vocabulary_are_our_own_bug():
    with pytest.raises(AssertionError, match="resolve the config"):
        parameter_counts(ModelConfig())


SAME_FACTORS = RopeScaling("llama3", 4.0, 64, low_freq_factor=4.0)


def test_shapes_that_do_not_fit_together_are_named():
    for config, field, expected in (
        (ModelConfig(hidden_size=10, heads=4, kv_heads=2), "m.hidden_size", "multiple of m.heads (4)"),
        (ModelConfig(hidden_size=12, heads=4, kv_heads=2), "m.head_dim", "even width"),
        (ModelConfig(hidden_size=10, heads=4, kv_heads=2, head_dim=3), "m.head_dim", "even width"),
        (ModelConfig(heads=32, kv_heads=5), "m.kv_heads", "divisor of m.heads (32)"),
        (ModelConfig(moe=MoeConfig(6, 7)), "m.moe.experts_per_token", "at most m.moe.experts (6)"),
        (ModelConfig(layers=3, moe=MoeConfig(6, dense_layers=3)), "m.moe.dense_layers", "fewer than m.layers (3)"),
        (ModelConfig(rope_scaling=RopeScaling("yarn", 4.0)), "m.rope_scaling.original_seq_len", "for yarn"),
        (ModelConfig(rope_scaling=SAME_FACTORS), "m.rope_scaling.high_freq_factor", "above low_freq_factor"),
    ):
        (problem,) = config.problems("m")
        assert problem.field == field
        assert expected in str(problem)


def test_shapes_that_fit_have_no_problems():
    assert ModelConfig(hidden_size=10, heads=3, kv_heads=1, head_dim=6).problems("m") == []
    assert ModelConfig(rope_scaling=RopeScaling("llama3", 8.0, 8192)).problems("m") == []
