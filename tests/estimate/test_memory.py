"""The memory of a run by arithmetic, held against measurements and against what torch really keeps."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zero2all.config import load_config
from zero2all.config.training import OptimConfig
from zero2all.estimate.flops import compute_mfu, flops_per_token, recomputed_flops_per_token
from zero2all.estimate.gpus import named_card
from zero2all.estimate.memory import GIB, MemorySettings, estimate_memory, optimizer_bytes
from zero2all.estimate.pass_memory import pass_memory
from zero2all.model.config import ModelConfig, MoeConfig, parameter_counts
from zero2all.model.z2all import Z2all
from zero2all.ops import linear_cross_entropy
from zero2all.ops.config import OpsConfig
from zero2all.ops.footprint import Footprint
from zero2all.ops.registry import footprints, resolve
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import init_weights, layout_table
from zero2all.train.micro_batch import memory_settings
from zero2all.train.state import new_state


@pytest.fixture(autouse=True)
def chunks_as_measured(monkeypatch):
    """Of 8,192 rows: the measurements here are older than larger ones."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 8192)


def saved_bytes_per_token(model, settings):
    """What all blocks, the last norm and the head's input have saved at the end of the forward pass."""
    sizes = settings.sizes(model)
    return pass_memory(model, settings).saved_per_token + sizes.value_bytes * sizes.hidden_size


def preset(name: str, vocab_size: int) -> ModelConfig:
    return dataclasses.replace(load_config(name).model, vocab_size=vocab_size)


AS_IT_WAS = str(Path(__file__).parents[2] / "benchmarks/z2all-1b-adamw.yaml")
"""The preset z2all-1b, as it was when it was measured."""
BILLION = preset(AS_IT_WAS, 64320)
FUSED = {"rope": "triton", "rms_norm": "triton", "swiglu": "triton", "linear": "fp32_wgrad", "attention": "sdpa_cudnn"}
FUSED |= {"linear_cross_entropy": "triton", "optimizer": "fused", "embedding": "triton"}


def fused(**others: str) -> dict[str, Footprint]:
    """The operators of a GPU with Triton, with AdamW on whole masters, but for `others`."""
    return footprints(FUSED | others)


WORKSPACES = named_card("h200").workspace_bytes
QUACK = {"attention": "fa4", "swiglu": "quack", "linear_cross_entropy": "quack", "optimizer": "triton"}
OWN = {"optimizer": "triton"}
STEPS = {"linear": "plain", "rms_norm": "eager", "rope": "eager", "swiglu": "eager", "embedding": "torch"}
LARGE = ModelConfig(65536, 4096, intermediate_size=14336, layers=32, heads=32, kv_heads=8, max_seq_len=4096)


def test_peak_of_a_step_of_the_1b_model_is_what_an_h200_measured():
    """benchmarks/results/ablation.json."""
    for operators, samples, peak_gib in (
        (OWN, 16, 53.7136),
        (QUACK, 16, 54.8924),
        (QUACK, 2, 23.9709),
        (QUACK | {"linear": "fp8", "swiglu": "triton"}, 16, 59.1483),
        (QUACK | {"optimizer": "fused"}, 16, 57.2309),
        (QUACK | {"rope": "eager"}, 16, 58.3299),
        (QUACK | {"rms_norm": "eager"}, 16, 66.1424),
        (QUACK | {"rms_norm": "triton_lean"}, 16, 49.2693),
        (QUACK | {"swiglu": "eager"}, 16, 77.5799),
        (QUACK | {"linear": "plain", "swiglu": "triton"}, 16, 62.4549),
        (QUACK | {"linear_cross_entropy": "off", "cross_entropy": "eager"}, 16, 91.3721),
        (STEPS | {"attention": "sdpa_flash", "linear_cross_entropy": "off", "cross_entropy": "eager"}, 16, 133.8357),
    ):
        settings = MemorySettings(2048, samples, fused(**operators), passes=4, workspace_bytes=WORKSPACES)
        assert estimate_memory(BILLION, settings).step_peak / GIB == pytest.approx(peak_gib, rel=3e-4)


def test_so_are_those_of_larger_models_with_offload_and_recomputation():
    """benchmarks/results/offload.json."""
    for layers, settings, peak_gb in (
        (32, {"micro_batch_samples": 1, "passes": 2}, 136.5574),
        (32, {"micro_batch_samples": 1, "passes": 2, "offload": "optimizer"}, 61.3928),
        (44, {"micro_batch_samples": 16, "offload": "optimizer", "recompute": "full"}, 123.4277),
    ):
        model = dataclasses.replace(LARGE, layers=layers)
        given = MemorySettings(seq_len=4096, operators=fused(**OWN), workspace_bytes=WORKSPACES, **settings)
        assert estimate_memory(model, given).step_peak / 1e9 == pytest.approx(peak_gb, rel=3e-4)


def test_so_are_those_of_a_mixture_of_experts_and_its_checkpoint_needs_more_than_its_passes_when_it_is_small():
    """benchmarks/results/moe.json; gpu_axes.json: 3.24 GB with 8 experts, when split masters are split again."""
    settings = MemorySettings(2048, 16, fused(**OWN), passes=4, workspace_bytes=WORKSPACES)
    peak = estimate_memory(preset("z2all-moe", 64320), settings).step_peak
    assert peak / GIB == pytest.approx(31.2446, rel=1e-3)
    moe = MoeConfig(experts=8, expert_size=512, shared_experts=1)
    model = dataclasses.replace(preset("z2all-100m", 16000), moe=moe)
    small = estimate_memory(model, dataclasses.replace(settings, seq_len=512, micro_batch_samples=2))
    assert (small.worst.name, small.total / 1e9) == ("checkpoint", pytest.approx(3.24, abs=0.005))


PIPELINES = json.loads((Path(__file__).parents[2] / "benchmarks/results/gpu_pipeline.json").read_text())
MOST_TOO_MUCH = {"1f1b": 0.11, "gpipe": 0.11, "interleaved": 0.28, "zero_bubble": 0.04}
"""Small stages with few passes: how far the host gets ahead of the device is bounded, not known."""


@pytest.mark.parametrize("row", PIPELINES["rows"], ids=lambda row: " ".join(map(str, list(row.values())[:4])))
def test_no_process_of_a_pipeline_needs_4_percent_more_than_its_estimate(row):
    samples, seq_len, passes = map(int, row["batch"].split("x"))
    words = ["--model.layers", "8", "--model.vocab_size", "16000", "--train.recompute", row["recompute"]]
    words += ["--train.tokens_per_step", str(samples * seq_len * passes), "--parallel.pipeline", str(row["ranks"])]
    words += ["--parallel.schedule", row["schedule"], "--parallel.chunks"]
    words += ["2" if row["schedule"] == "interleaved" else "1"]
    config, ops = load_config(AS_IT_WAS, words), resolve(OpsConfig(), "cpu")
    for rank, peak in enumerate(row["peaks_mb"]):
        settings = memory_settings(config, ops, Mesh(MeshSizes(pipeline=row["ranks"]), rank), samples)
        known = {"operators": footprints(PIPELINES["operators"]), "documents": False, "workspace_bytes": WORKSPACES}
        settings = dataclasses.replace(settings, **known)
        error = estimate_memory(config.model, settings).step_peak / 1e6 / peak - 1
        assert -0.04 < error < MOST_TOO_MUCH[row["schedule"]], (rank, error)


SMALL = ModelConfig(vocab_size=64, hidden_size=64, intermediate_size=160, layers=3, heads=8, kv_heads=2, max_seq_len=32)
ROWS = 4


def bytes_torch_keeps(model: Z2all, length: int) -> int:
    """Distinct memory that autograd holds after a forward pass, weights and tables left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(ROWS, length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model(tokens)
        kept[hidden.untyped_storage().data_ptr()] = hidden.untyped_storage()  # the head keeps it
    return sum(storage.nbytes() for storage in kept.values())


def test_experts_keep_what_torch_keeps_and_states_of_all_of_them():
    moe = MoeConfig(experts=6, experts_per_token=2, expert_size=48, shared_experts=1, dense_layers=1)
    config = dataclasses.replace(SMALL, moe=moe)
    ops = resolve(OpsConfig(rms_norm="eager", attention="sdpa", swiglu="torch"), "cpu")
    model = Z2all(config, ops)
    init_weights(model, 1)
    settings = MemorySettings(32, ROWS, ops.footprints, "float32")
    kept = bytes_torch_keeps(model, 32)
    assert saved_bytes_per_token(config, settings) * settings.tokens == pytest.approx(kept, rel=0.03)
    parameters = parameter_counts(config)["total"]
    assert estimate_memory(config, settings).state == 16 * parameters
    for kind in ("muon", "adamw_8bit"):
        state = new_state(Z2all(config, ops), OptimConfig(kind), torch.float32)
        moments = sum(part.values.nbytes for part in state.optimizer_tensors().values() if part.shape)
        assert round(optimizer_bytes(config, kind), 6) == moments, kind
    halves = estimate_memory(config, dataclasses.replace(settings, zero=1, shard=4, expert=2))
    weights = next(part.bytes for part in halves.parts if part.name == "weights")
    experts = sum(one.numel for one in layout_table(config) if one.kind == "expert")
    assert weights == pytest.approx(4 * (parameters - experts / 2), rel=0.01)


@pytest.mark.parametrize(
    ("attention", "swiglu", "precision", "qk_norm"),
    [
        ("sdpa", "torch", "float32", False),
        ("sdpa", "eager", "bfloat16", True),
        ("math", "torch", "bfloat16", False),
        ("math", "eager", "float32", True),
    ],
)
def test_kept_bytes_are_those_that_torch_keeps(attention, swiglu, precision, qk_norm):
    config = dataclasses.replace(SMALL, qk_norm=qk_norm)
    # torch's norm is no fused one on the CPU
    ops = resolve(OpsConfig(rms_norm="eager", attention=attention, swiglu=swiglu), "cpu")
    model = Z2all(config, ops).to(getattr(torch, precision)).train()
    settings = MemorySettings(32, ROWS, ops.footprints, precision=precision)
    expected = saved_bytes_per_token(config, settings) * settings.tokens
    assert bytes_torch_keeps(model, 32) == pytest.approx(expected, rel=0.03)


def test_bytes_of_a_parameter_by_optimizer_precision_and_masters():
    """The first are those that docs/optimizers.md measured, with q, k and v apart."""
    model = load_config("z2all-100m").model
    total = parameter_counts(model)["total"]
    kinds = {"adamw": 8.0, "muon": 5.604, "adamw_8bit": 2.032, "adamw_bf16": 4.0}
    assert {kind: round(optimizer_bytes(model, kind) / total, 3) for kind in kinds} == kinds
    assert optimizer_bytes(model, "adamw_bf16", kahan=True) == 6 * total
    total = parameter_counts(LLAMA)["total"]
    assert estimate_of().state == 16 * total  # split masters
    for changes in ({"precision": "float16"}, {"optimizer": "muon"}, {"operators": fused()}):
        assert bytes_of("masters", **changes) == 4 * total, changes
    for changes, each in (({"optimizer": "adamw_bf16"}, 8), ({"precision": "float32"}, 16)):
        assert estimate_of(operators=fused(), **changes).state == each * total


def test_table_has_a_line_for_each_part_and_the_sum_on_the_device_and_on_the_host():
    lines = [line.split() for line in estimate_memory(BILLION, MemorySettings(2048, 16, fused())).lines()]
    device = ["activations", "working", "total"]
    assert [line[0] for line in lines] == ["weights", "masters", "gradients", "optimizer", *device]
    assert lines[-1][1:] == ["55.99", "GiB"]
    lines = [line.split()[0] for line in estimate_of(offload="optimizer").lines()]
    assert lines == ["weights", "gradients", *device, "in", "masters", "optimizer", "staging", "total"]


LLAMA = dataclasses.replace(LARGE, vocab_size=64000, max_seq_len=2048)  # 7.5 B, as in the table of the ZeRO paper
SPLIT = fused(optimizer="triton")


def estimate_of(model: ModelConfig = LLAMA, operators: dict[str, Footprint] = SPLIT, **settings: object):
    return estimate_memory(model, MemorySettings(2048, 1, operators, **settings))


def bytes_of(name: str, place: str = "device", **settings: object) -> float:
    return sum(part.bytes for part in estimate_of(**settings).parts if (part.name, part.place) == (name, place))


def test_7_5_billion_parameters_on_64_gpus():
    """Computed: 2 weights, 2 masters, 4 gradients and 8 states a parameter. The table of the ZeRO paper has 31.4
    instead of 46.2 GB, because there gradients take 2 bytes and masters 4."""
    assert parameter_counts(LLAMA)["total"] == pytest.approx(7.5e9, rel=0.001)
    found = [estimate_of(zero=zero, shard=64).state / 1e9 for zero in (0, 1, 2, 3)]
    by_hand = [7.5 * 16, 7.5 * (2 + 4 + 10 / 64), 7.5 * (2 + 14 / 64), 7.5 * 16 / 64]
    assert found == pytest.approx(by_hand, rel=0.001)
    assert [round(size, 1) for size in by_hand] == [120.0, 46.2, 16.6, 1.9]
    for zero in (0, 1, 2, 3):
        assert estimate_of(zero=zero, replicate=4, shard=8).parts == estimate_of(zero=zero, shard=8).parts
        assert estimate_of(zero=zero).state == estimate_of().state


def test_zero_3_keeps_whole_gradients_until_the_last_of_several_passes():
    one, two = (estimate_of(zero=3, shard=8, passes=passes).total for passes in (1, 2))
    assert two > one + 20e9
    assert two > estimate_of(zero=2, shard=8, passes=2).total
    assert estimate_of(zero=2, shard=8, passes=2).phases == estimate_of(zero=2, shard=8).phases


def test_zero_2_borrows_three_buckets_and_a_table():
    largest = 4 * 4096 * 2 * 14336  # gate and up: more than a bucket of 128 MB
    table = 4 * 64000 * 4096
    assert bytes_of("buckets", zero=2, shard=8) == 3 * largest + table
    assert bytes_of("buckets", zero=2, shard=8, bucket_bytes=1e9) == 3e9 + table
    small = dataclasses.replace(SMALL, layers=1)
    assert bytes_of("buckets", zero=2, shard=2, model=small) == 4 * parameter_counts(small)["total"]
    assert bytes_of("buckets", zero=1, shard=8) == bytes_of("buckets", zero=3, shard=8) == 0


def test_in_float32_the_weights_are_the_masters_and_every_process_has_them():
    wide = {"precision": "float32", "shard": 8}
    total = parameter_counts(LLAMA)["total"]
    assert [bytes_of("weights", zero=zero, **wide) for zero in (0, 1, 2, 3)] == [4.0 * total] * 3 + [0]
    assert [bytes_of("masters", zero=zero, **wide) for zero in (0, 1, 2)] == [0] * 3
    assert bytes_of("masters", zero=3, **wide) == pytest.approx(4 * total / 8)


def test_flat_values_are_cut_at_multiples_of_128_or_as_the_fullest_process_owns_where_it_is_known():
    part = -(-parameter_counts(SMALL)["total"] // (3 * 128)) * 128
    assert bytes_of("optimizer", model=SMALL, zero=1, shard=3) == 8 * part
    assert bytes_of("masters", model=SMALL, zero=1, shard=3) == 2 * part
    owned = {"zero": 1, "shard": 8, "optimizer": "muon", "owned": (3e9, 1e9)}
    assert bytes_of("masters", **owned) == 4 * 4e9
    assert bytes_of("optimizer", **owned) == pytest.approx(4 * 3e9 + 8 * 1e9, rel=5e-4)  # and a mean square a line
    assert bytes_of("gradients", **owned) == 4 * parameter_counts(LLAMA)["total"]
    assert bytes_of("gradients", **(owned | {"zero": 2})) == 4 * 4e9


def test_offloaded_states_are_12_bytes_a_parameter_on_the_host_shared_by_the_shard_processes():
    total, pieces = parameter_counts(LLAMA)["total"], 3 * 2**24
    one, eight = (estimate_of(offload="optimizer", zero=1, shard=shard) for shard in (1, 8))
    assert one.host == 12 * total + 6 * pieces
    assert eight.state == one.state == 6 * total
    assert eight.host - 6 * pieces == pytest.approx(12 * total / 8, rel=1e-6)
    assert estimate_of(offload="optimizer", precision="float32").host == 12 * total + 8 * pieces


def test_full_recomputation_does_the_forward_of_the_blocks_again():
    again = recomputed_flops_per_token(BILLION, 2048, "full", 1, fused())
    matrices = 22 * (2048 * 3072 + 2048 * 2048 + 3 * 2048 * 5632)
    attention = 4 * 22 * 2048 * 2048
    seed = 2 * (matrices + 22 * 2 * 2048) + attention
    assert again == {"palm": 2 * matrices + attention, "causal": 2 * matrices + attention / 2, "seed": seed}


def test_hfu_is_mfu_without_recomputation_and_more_with_it():
    def hfu(kind: str, device: str = "NVIDIA H200") -> float | None:
        again = recomputed_flops_per_token(BILLION, 2048, kind, 1, fused())
        spent = {name: flops + again[name] for name, flops in flops_per_token(BILLION, 2048).items()}
        return compute_mfu(spent, 70_000, device).get("causal")

    assert hfu("none") == pytest.approx(70_000 * 7.296e9 / 989e12, rel=1e-3)
    assert hfu("none") < hfu("selective") < hfu("full") < 4 / 3 * hfu("none")
    assert hfu("full", "another device") is None
