"""Whatever spreads a model over processes trains like one process, sends the bytes of the formula, and each layout
resumes from each other. All fast cases share one group of two processes and one of four; the rest is in `make layouts`.
"""

import functools
import json
from collections import Counter
from functools import partial

import pytest

from tests.parallel import layouts
from zero2all.estimate.communication import communication_per_step
from zero2all.estimate.memory import MemorySettings
from zero2all.ops.footprint import Footprint
from zero2all.parallel.buckets import plan_buffers
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import held_table, layout_table
from zero2all.parallel.world import World
from zero2all.train.optimizers.factory import cut_of
from zero2all.train.step_stats import SCALARS

STEPS = 2
# What a case has in common with the run of one process; the rest spreads it.
MODEL_FIELDS = ["optimizer", "tied", "lora", "model", "documents", "recompute", "z_loss", "micro", "dtype", "steps"]
MODEL_FIELDS += ["objective"]
BIASES = {"attention_bias": "all", "mlp_bias": True, "qk_norm": True, "init_qk_gain": 1.5}
TWO, FIVE = {"layers": 2}, {"model": {"layers": 5}}
GATHER = {"context": 2, "context_method": "gather"}
INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "chunks": 2, **FIVE}
MOE = {"moe": layouts.MOE}
# 2 million parameters: enough for a sum of squares to lose digits.
IN_FLOAT32 = {"steps": 1, "with_tensors": False, "model": {"hidden_size": 128, "vocab_size": 8192, "layers": 1}}
CASES = {
    2: {
        "replicate": {"zero": 0},
        "ZeRO-1": {"zero": 1},
        "ZeRO-2, muon": {"zero": 2, "optimizer": "muon"},
        "ZeRO-1, tied, muon": {"zero": 1, "tied": True, "optimizer": "muon"},
        "ZeRO-2, offload": {"zero": 2, "offload": "optimizer"},
        "ulysses": {"context": 2, "documents": True, "recompute": "selective"},
        "gather": {**GATHER, "documents": True, "recompute": "full"},
        "tensor, tied, documents, z, selective": {
            **{"tensor": 2, "tied": True, "documents": True, "z_loss": 1e-2, "recompute": "selective"},
            "model": {"vocab_size": 30, **TWO},  # the second rank has only padding
        },
        "tensor, biases, copied kv heads, full": {
            **{"tensor": 2, "copy_kv_heads": True, "recompute": "full", "model": {**BIASES, "kv_heads": 1, **TWO}}
        },
        # Rows of q, columns of out and down, pairs of rows of gate and up; both ranks have the same rows of k and v.
        "tensor, muon": {"tensor": 2, "copy_kv_heads": True, "optimizer": "muon", "model": {"kv_heads": 1, **TWO}},
        "1f1b, uneven passes": {"pipeline": 2, "documents": True, "z_loss": 0.01, "micro": 3, **FIVE},
        "interleaved": INTERLEAVED,
        "zero_bubble": {"pipeline": 2, "schedule": "zero_bubble", "recompute": "full", **FIVE},
        "gpipe, fewer passes than stages": {"pipeline": 2, "schedule": "gpipe", "micro": 8, **FIVE},
        "expert, ZeRO-1, recompute": {"zero": 1, "expert": 2, "recompute": "full", "model": MOE},
        "objective, ZeRO-3": {"objective": True, "zero": 3, "documents": True},
        "objective, tensor": {"objective": True, "tensor": 2, "tied": True, "model": TWO},
        "objective, uneven passes": {"objective": True, "pipeline": 2, "micro": 3, "documents": True, **FIVE},
        "objective, gather": {"objective": True, **GATHER, "documents": True},
        "expert, ZeRO-2, muon": {"zero": 2, "expert": 2, "optimizer": "muon", "model": MOE},
        "LoRA, ZeRO-2, experts": {"zero": 2, "lora": 3, "model": MOE},
        "LoRA, ZeRO-3": {"zero": 3, "lora": 3, "model": {**BIASES, **TWO}},
        "LoRA, tensor": {"tensor": 2, "copy_kv_heads": True, "lora": 3, "model": {**BIASES, "kv_heads": 1, **TWO}},
        "LoRA, pipeline": {"pipeline": 2, "schedule": "zero_bubble", "lora": 3, **FIVE},
    },
    4: {
        "ulysses, one kv head": {"context": 4, "model": {"heads": 4, "kv_heads": 1}},
        "gather, ZeRO-1, tied": {**GATHER, "zero": 1, "tied": True},
        "tensor, ZeRO-1, muon": {"tensor": 2, "zero": 1, "optimizer": "muon", "model": TWO},
        "tensor, ZeRO-3, muon": {"tensor": 2, "zero": 3, "optimizer": "muon", "model": TWO},
        "four stages": {"pipeline": 4, **FIVE},
        "interleaved, ZeRO-1": {**INTERLEAVED, "zero": 1},
        "pipeline, ZeRO-3": {"pipeline": 2, "zero": 3, **FIVE},
        "LoRA, tensor x ZeRO-3": {"tensor": 2, "zero": 3, "lora": 3, "model": {**BIASES, **TWO}},
        "replicate x zero_bubble": {"pipeline": 2, "schedule": "zero_bubble", **FIVE},
    },
}
for of_size in CASES.values():
    of_size |= {name: {"optimizer": "adamw", "steps": STEPS, **case} for name, case in of_size.items()}
IN_A_RING = {  # layouts of four processes that are saved, each resumed under the next one
    "adamw": ["replicate", "ZeRO-2", "pipeline, 1f1b", "ZeRO-3", "shard x interleaved, ZeRO-1", "hybrid ZeRO-1"],
    "muon": ["ZeRO-2", "tensor", "hybrid ZeRO-3"],  # in each another process owns a matrix
}


@pytest.fixture(scope="module")
def found(warm, tmp_path_factory):
    """What the cases of so many processes came to."""

    @functools.cache
    def run(size):
        folder = tmp_path_factory.mktemp("group")
        more = {"float32": {"optimizer": "adamw", "tensor": 2, "dtype": "float32", **IN_FLOAT32}}
        if size == 4:
            of = {"folder": str(folder / "runs"), "every": False, **FIVE}
            more = {f"pairs of {kind}": {**of, "layouts": n, "optimizer": kind} for kind, n in IN_A_RING.items()}
            more["pairs of muon"]["folder"] += " of muon"
        return layouts.run(warm, folder, size, {**CASES[size], **more})

    return run


@functools.cache
def alone(case):
    """One process, from JSON: cases with the same model and optimizer have one."""
    return layouts.course(World(), **json.loads(case))


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_processes_train_like_one(found, size, name):
    given = {field: value for field, value in CASES[size][name].items() if field in MODEL_FIELDS}
    exact = alone(json.dumps(given))
    assert found(size)[name]["loads"] == exact["loads"], "the routing of tokens to experts differs"
    layouts.assert_same_course(found(size)[name], exact)


@pytest.mark.parametrize("kind", IN_A_RING)
def test_layouts_resume_from_each_other(found, kind):
    pairs = {name: each for name, each in found(4)[f"pairs of {kind}"].items() if "->" in name}
    assert len(pairs) == len(IN_A_RING[kind])
    for name, (differ, loss) in pairs.items():
        assert differ == [], name
        assert loss < 1e-9, name


def test_the_gradient_norm_of_float32_is_exact_in_one_process_and_in_two(found):
    exact = layouts.course(World(), "adamw", **IN_FLOAT32)["figures"][0][1]
    plain = layouts.course(World(), "adamw", dtype="float32", **IN_FLOAT32)["figures"][0][1]
    assert [plain, found(2)["float32"]["figures"][0][1]] == pytest.approx([exact, exact], rel=1e-6)


def test_what_is_cut_is_held_once_and_a_matrix_of_muon_has_one_mean_square(found):
    whole = found(2)["replicate"]["own_bytes_by_rank"]
    assert whole[0] == whole[1]
    assert sum(found(2)["ZeRO-1"]["own_bytes_by_rank"]) == whole[0], "each moment once"
    assert sum("mean_squares" in name for name in found(2)["tensor, muon"]["tensors"]) == 2 * 6
    tensors = found(2)["expert, ZeRO-2, muon"]["tensors"]
    biases = [name for name in tensors if name.endswith("router.bias")]
    assert len(biases) == 2, "each block with experts has one in the checkpoint"
    assert all(tensors[name].abs().max() > 0 for name in biases)


FIGURES = len(SCALARS) + 2 * layouts.CHANNELS + 2 * layouts.SAMPLES + 2 * 2  # two per rank


def by_formula(case, size, *sizes):
    """What a process hands to collectives in a step."""
    spread = {name: value for name, value in case.items() if name not in MODEL_FIELDS}
    mesh = ParallelConfig(**spread).sizes(size)
    axes = {name: getattr(mesh, name) for name in ("replicate", "shard", "context", "tensor", "expert")}
    settings = MemorySettings(
        layouts.SEQ_LEN, layouts.MICRO, {"optimizer": Footprint()}, precision="float64", **axes,
        zero=case.get("zero", 0), optimizer=case["optimizer"], recompute=case.get("recompute", "none"),
        context_method=case.get("context_method", "ulysses"),
        passes=layouts.SAMPLES // (mesh.replicate * mesh.shard) // layouts.MICRO,
    )  # fmt: skip
    model = layouts.run_config(tied_embeddings=case.get("tied", False), **case.get("model", {})).model
    return communication_per_step(model, settings, *sizes)


def buffers_of(case):
    """The values of the flat buffers by spread, with their padding, and those of the range of rank 0."""
    model = layouts.run_config(tied_embeddings=case.get("tied", False), **case.get("model", {})).model
    table, shards = layout_table(model), 2 if case.get("zero") else 1
    held = held_table(table, [one.holder for one in table], Mesh(MeshSizes(tensor=case.get("tensor", 1))))
    found, own = Counter(), Counter()
    for bucket in plan_buffers(held, shards, int(0.002e6) // 8, partial(cut_of, case["optimizer"])).buckets:
        found[bucket.spread] += bucket.span.stop - bucket.span.start
        own[bucket.spread] += bucket.borders[1] - bucket.borders[0]
    return found, own


TENSOR = ("tensor, tied, documents, z, selective", "tensor, biases, copied kv heads, full")


@pytest.mark.parametrize("name", ["replicate", "ZeRO-1", "ZeRO-2, muon", *TENSOR])
def test_bytes_sent_are_those_of_the_formula(found, name):
    case = CASES[2][name]
    expected: Counter[str] = Counter()
    for one in by_formula(case, 2, FIGURES, *buffers_of(case)):
        expected[one.collective] += one.given
    assert found(2)[name]["sent"] == expected


@pytest.mark.parametrize(("size", "name"), [(2, "ulysses"), (2, "gather"), (4, "ulysses, one kv head")])
def test_bytes_sent_for_attention_are_those_of_the_formula(found, size, name):
    transfers = [one for one in by_formula(CASES[size][name], size) if one.what != "gradients"]
    sent = {kind: amount for kind, amount in found(size)[name]["sent"].items() if kind != "all-reduce"}
    assert sent == {one.collective: one.given for one in transfers}


ALL_TO_ALL = {2: ("tensor, muon", "expert, ZeRO-1, recompute"), 4: ("tensor, ZeRO-1, muon", "tensor, ZeRO-3, muon")}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in ALL_TO_ALL.items() for name in names])
def test_matrices_of_muon_and_tokens_of_experts_are_sent_all_to_all_by_the_formula(found, size, name):
    counted = [of_rank["all-to-all"] for of_rank in found(size)[name]["sent_by_rank"]]
    transfers = [one for one in by_formula(CASES[size][name], size) if one.collective == "all-to-all"]
    assert sum(counted) / len(counted) == sum(one.given for one in transfers)


def test_stages_send_activations_over_each_border_once_a_pass(found):
    of_a_micro_batch = layouts.SEQ_LEN * layouts.MODEL.hidden_size * 8
    for name, borders in (("1f1b, uneven passes", 1), ("interleaved", 3)):
        sent = [of_rank["send"] for of_rank in found(2)[name]["sent_by_rank"]]
        assert sent == [borders * layouts.SAMPLES * of_a_micro_batch] * 2, "values one way, their gradients the other"
