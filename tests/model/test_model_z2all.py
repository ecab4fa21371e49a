"""The transformer: what it may look at, what it starts from, and that its shortcuts change nothing."""

import dataclasses
import math

import pytest
import torch

from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.init import QK_NORMS
from zero2all.model.z2all import Z2all
from zero2all.ops.attention import document_mask
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights, model_parts

SIZES = {"hidden_size": 32, "intermediate_size": 48, "layers": 3, "heads": 4, "kv_heads": 2, "max_seq_len": 24}
BASE = ModelConfig(97, **SIZES, init_std=0.2)
VARIANTS = {
    "plain": BASE,
    "all biases": dataclasses.replace(BASE, attention_bias="all", mlp_bias=True),
    "Qwen2-like": dataclasses.replace(BASE, attention_bias="qkv", tied_embeddings=True),
    "one head": dataclasses.replace(BASE, heads=1, kv_heads=1),
    "narrow heads": dataclasses.replace(BASE, heads=6, kv_heads=3, head_dim=2),
    "qk_norm": dataclasses.replace(BASE, qk_norm=True, head_dim=6),
    "embedding_norm": dataclasses.replace(BASE, embedding_norm=True),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def build(config: ModelConfig = BASE, seed: int = 0, **ops: str) -> Z2all:
    """A model in eval mode, its biases not zero and the weights of its qk_norm not one."""
    model = Z2all(config, resolve(OpsConfig(**ops), "cpu"))
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2, generator=generator)
            elif name.endswith(QK_NORMS):
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def tokens(rows: int = 2, length: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Z2all, ids: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
    return model.logits(model(ids, document_ids=document_ids))


@variants
@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_later_tokens_change_no_earlier_logit(config, attention):
    model, ids = build(config, attention=attention), tokens()
    before = logits(model, ids)
    for place in (1, 7, 19):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 97
        after = logits(model, changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place:], before[:, place:])


def test_input_longer_than_the_model_is_an_error():
    logits(build(), tokens(length=24))
    with pytest.raises(ValueError, match=r"25 positions exceed model.max_seq_len \(24\)"):
        logits(build(), tokens(length=25))


def test_initial_weights_have_the_spread_of_their_kind():
    config = dataclasses.replace(BASE, hidden_size=128, intermediate_size=256, init_std=0.02, attention_bias="all")
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    init_weights(model, 7)
    into_residual = 0.02 / math.sqrt(2 * config.layers)
    for name, parameter in model.state_dict().items():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            expected = into_residual if name.endswith(("out.weight", "down.weight")) else 0.02
            if name in ("embedding.weight", "head.weight"):
                parameter, padding = parameter.split((config.vocab_size, 31))
                assert not padding.any()
            assert float(parameter.std()) == pytest.approx(expected, rel=0.04), name
            assert abs(float(parameter.mean())) < 4 * expected / math.sqrt(parameter.numel()), name


def test_initial_weights_of_embedding_head_residual_and_qk_norm_are_settings():
    chosen = {"init_std": None, "init_embedding_std": 0.8, "init_head_std": 0.001, "init_residual": "zero"}
    moe = MoeConfig(experts=4, expert_size=64, shared_experts=1, dense_layers=1)
    config = dataclasses.replace(BASE, hidden_size=64, moe=moe, qk_norm=True, init_qk_gain=1.2, **chosen)
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    init_weights(model, 7)
    parts = {name: part.values for name, part in model_parts(model).items()}
    spreads = {"embedding.weight": 0.8, "head.weight": 0.001, "blocks.1.attention.k.weight": 1 / 8}
    for name, expected in spreads.items():
        assert float(parts[name][:97].std()) == pytest.approx(expected, rel=0.04)
    for name in ("1.attention.out.weight", "1.feed_forward.experts.down", "1.feed_forward.shared.down.weight"):
        assert not parts[f"blocks.{name}"].any()
    assert not parts["blocks.0.feed_forward.down.weight"].any()
    assert parts["blocks.0.attention.q_norm.weight"].tolist() == pytest.approx([1.2] * 16)
    assert config.head_std == 0.001
    assert dataclasses.replace(config, tied_embeddings=True).head_std == 0.8


def test_qk_norm_makes_attention_forget_the_size_of_the_projections():
    config = dataclasses.replace(VARIANTS["qk_norm"], rms_norm_eps=1e-12)
    model, ids = build(config).double(), tokens()
    before = logits(model, ids)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[: (config.heads + config.kv_heads) * 6] *= 100  # queries and keys
    torch.testing.assert_close(logits(model, ids), before, rtol=1e-6, atol=1e-6)


def test_the_losses_are_minus_the_log_probability_of_the_next_token():
    model, ids = build(), tokens(length=21)
    chances = logits(model, ids[:, :-1]).double().softmax(dim=-1)
    expected = -chances.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).log()
    torch.testing.assert_close(model.loss(ids[:, :-1], ids[:, 1:])[1].double(), expected, rtol=1e-5, atol=1e-6)


def test_tied_head_is_the_embedding_and_learns_from_both_its_uses():
    model, ids = build(VARIANTS["Qwen2-like"]), tokens(length=21)
    assert model.head is None
    model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
    unseen = [token for token in range(97) if token not in ids[:, :-1].flatten().tolist()]
    assert model.embedding.weight.grad[unseen].abs().sum() > 0


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("wide", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_fp32_residual_stays_float32_under_autocast(wide, dtype):
    model, ids, seen = build(dataclasses.replace(BASE, fp32_residual=wide)), tokens(length=21), set()
    for block in model.blocks:
        block.register_forward_hook(lambda _block, _inputs, output: seen.add(output[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        losses = model.loss(ids[:, :-1], ids[:, 1:])[1]
    assert seen == {dtype}
    assert losses.dtype == torch.float32


@pytest.mark.parametrize("place", ["embedding_dropout", "attention_dropout", "residual_dropout"])
@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_dropout_acts_in_training_only(place, attention):
    model, ids = build(dataclasses.replace(BASE, **{place: 0.5}), attention=attention), tokens()
    without = logits(build(attention=attention), ids)
    assert torch.equal(logits(model, ids), without)
    model.train()
    torch.manual_seed(0)
    first = logits(model, ids)
    torch.manual_seed(0)
    assert torch.equal(logits(model, ids), first)
    assert not torch.allclose(first, without)


@variants
@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_what_the_model_says_of_a_document_does_not_depend_on_its_neighbours(config, attention):
    model, document = build(config, attention=attention), tokens(1, 13, seed=3)
    first, other = (torch.cat((tokens(1, 11, seed=seed), document), dim=1) for seed in (1, 2))
    alone, document_ids = logits(model, document), torch.tensor([[0] * 11 + [1] * 13])
    beside_first, beside_other = (logits(model, ids, document_ids)[:, 11:] for ids in (first, other))
    assert torch.equal(beside_first, beside_other)
    torch.testing.assert_close(beside_first, alone, rtol=1e-4, atol=1e-4)
    crossing = logits(model, first)[:, 11:]
    assert not torch.allclose(crossing, alone, rtol=1e-4, atol=1e-4)  # without the mask they matter


def test_documents_are_prepared_once_per_pass_for_all_layers():
    seen: list[torch.Tensor] = []

    def prepare(document_ids):
        seen.append(document_ids)
        return document_mask(document_ids)

    model = build()
    model.ops = dataclasses.replace(model.ops, prepare_documents=prepare)
    for _ in range(2):
        logits(model, tokens(), torch.tensor([[0] * 9 + [1] * 11] * 2))
    assert len(seen) == 2
