"""Bytes of a step by collective, against numbers computed by hand."""

from dataclasses import replace

from zero2all.estimate.communication import Transfer, by_axis, bytes_sent, communication_per_step
from zero2all.estimate.memory import MemorySettings
from zero2all.estimate.memory_settings import HeldStage
from zero2all.model.config import ModelConfig, MoeConfig, parameter_counts
from zero2all.ops.footprint import Footprint

MODEL = ModelConfig(vocab_size=64, hidden_size=64, intermediate_size=160, layers=3, heads=8, kv_heads=2, max_seq_len=32)
PARAMETERS = parameter_counts(MODEL)["total"]
G, W = 4.0 * PARAMETERS, 2.0 * PARAMETERS


def of_step(figures: int = 0, **changes: object) -> list[tuple[str, str, int, float]]:
    settings = MemorySettings(32, 4, {"optimizer": Footprint()}, **changes)
    found = communication_per_step(MODEL, settings, figures)
    return [(each.collective, each.axis, each.ranks, each.whole) for each in found]


def test_a_ring_sends_an_all_reduce_nearly_twice_and_the_others_nearly_once():
    kinds = [Transfer(kind, "", "shard", 4, 100.0) for kind in ("all-reduce", "reduce-scatter", "all-gather")]
    assert [kind.sent for kind in kinds] == [150.0, 75.0, 75.0]
    assert [kind.given for kind in kinds] == [100.0, 100.0, 25.0], "to a gather only the part of the process"
    assert bytes_sent(kinds) == 300.0


def test_shared_sequences_send_heads_or_keys_in_every_block_and_again_where_it_is_recomputed():
    of_head = 5 * 4 * 32 // 4 * 8 * 2.0  # passes, tokens of a rank, head width, bytes
    gradients = ("all-reduce", "context", 4, G)
    few = 2 * 8 + 2 * 4  # queries, outputs, and two key/value heads repeated for four ranks
    assert of_step(context=4, passes=5) == [gradients, ("all-to-all", "context", 4, 2 * 3 * few * of_head)]
    gathered = 3 * 2 * 2 * 4 * of_head  # blocks, keys and values, heads, ranks
    both = [("all-gather", "context", 4, 2 * gathered), ("reduce-scatter", "context", 4, gathered)]
    assert of_step(context=4, passes=5, context_method="gather", recompute="full") == [gradients, *both]


ENDS = 4 * (64 * 64 + 64)  # embedding and last norm


def test_zero_2_scatters_in_every_pass_and_zero_3_gathers_twice_in_each_and_reduces_its_ends_twice():
    for settings, expected in (
        ({"zero": 3, "figures": 10}, []),  # one process
        ({"replicate": 4, "passes": 5}, [("all-reduce", "replicate", 4, G)]),
        ({"zero": 1, "passes": 5}, [("reduce-scatter", "shard", 4, G), ("all-gather", "shard", 4, W)]),
        ({"zero": 2, "passes": 5}, [("reduce-scatter", "shard", 4, 5 * G), ("all-gather", "shard", 4, W)]),
        ({"zero": 3}, [("reduce-scatter", "shard", 4, G), ("all-gather", "shard", 4, 2 * W)]),
        ({"zero": 3, "passes": 5}, [("reduce-scatter", "shard", 4, G + ENDS), ("all-gather", "shard", 4, 10 * W)]),
    ):
        shared = {"shard": 4} if "zero" in settings and expected else {}
        assert of_step(**settings, **shared) == expected


def test_hybrid_also_sums_the_part_of_a_process_over_the_replicas():
    for zero in (1, 2, 3):
        alone = of_step(zero=zero, shard=4, passes=3)
        scattered = next(whole for kind, _, _, whole in alone if kind == "reduce-scatter")
        both = [*alone, ("all-reduce", "replicate", 2, scattered / 4)]
        assert sorted(of_step(zero=zero, shard=4, replicate=2, passes=3)) == sorted(both)


def test_gradients_without_masters_have_two_bytes_but_fsdp_sums_in_float32_and_figures_and_padding_count():
    assert of_step(replicate=2, optimizer="adamw_bf16") == [("all-reduce", "replicate", 2, G / 2)]
    assert of_step(zero=3, shard=2, optimizer="adamw_bf16")[0] == ("reduce-scatter", "shard", 2, G)
    assert of_step(zero=1, shard=4, replicate=2, figures=20)[-2] == ("all-reduce", "replicate x shard", 8, 160.0)
    settings = MemorySettings(32, 4, {"optimizer": Footprint()}, zero=1, shard=2)
    assert [each.whole for each in communication_per_step(MODEL, settings, buffers={"cut": 1000})] == [4000.0, 2000.0]


def test_stages_send_the_hidden_states_of_their_tokens_on_and_their_gradients_back():
    middle = HeldStage(1, has_embedding=False, has_head=False, sends=2)
    found = of_step(pipeline=3, stage=middle, passes=5, context=2, tensor=2)
    hidden = 5 * 4 * 32 // 2 // 2 * 64 * 2.0  # passes, tokens of a context rank, of a tensor rank, width, bytes
    assert found[-1] == ("send", "pipeline", 3, 2 * hidden)


def test_tokens_go_to_their_experts_and_back_and_gradients_of_experts_over_the_processes_that_have_them():
    moe = MoeConfig(experts=8, experts_per_token=2, expert_size=32, dense_layers=1)
    model = replace(MODEL, moe=moe)
    settings = MemorySettings(32, 4, {"optimizer": Footprint()}, passes=5, zero=1, shard=4, expert=2)
    found = {(one.collective, one.axis): one for one in communication_per_step(model, settings)}
    pairs = 5 * 4 * 32 * 2  # passes, tokens, experts per token
    of_pair = 4 * 64 * 2 + 2 * 4  # there and back, forward and backward; gates in float32, forward and backward
    counts = 5 * 8 * 8  # passes, experts, bytes
    assert found["all-to-all", "expert"].whole == 2 * (pairs * of_pair + counts), "two blocks have experts"
    assert found["all-to-all", "expert"].hidden_by == ""
    experts = 2 * 4 * 3 * 64 * 32  # blocks, experts of a process, matrices
    assert found["reduce-scatter", "expert_shard"].whole == 4.0 * experts
    assert found["reduce-scatter", "expert_shard"].ranks == 2
    assert found["reduce-scatter", "shard"].whole == 4.0 * (parameter_counts(model)["total"] - 2 * experts)


def test_an_axis_that_can_hide_its_traffic_bears_a_slow_link_better_than_one_that_sends_less():
    settings = MemorySettings(32, 4, {"optimizer": Footprint()}, replicate=2, tensor=2)
    order = by_axis(communication_per_step(MODEL, settings, figures=100))
    assert [axis.axis for axis in order] == ["replicate", "tensor"]
    assert order[0].waited == 0 < order[1].waited
    late = replace(settings, overlap=False)
    assert by_axis(communication_per_step(MODEL, late))[-1].waited > 0
