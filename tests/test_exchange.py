"""Models that leave for, and come from, the Hugging Face world: the same tensors, the same logits, the same text."""

import dataclasses
import itertools
import os
import random
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zero2all import exchange
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, write_json
from zero2all.common.workspace import open_workspace
from zero2all.exchange import export_run, import_folder
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.job import Request
from zero2all.infer.load import load_run
from zero2all.infer.text import generate
from zero2all.model import hf
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.hf_config import LAYOUTS, from_hf_config, hf_layout
from zero2all.model.moe import routers
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.packed.writer import pack_corpus
from zero2all.parallel.parameter_table import init_weights, model_parts
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.chat import Dialogue, Message
from zero2all.tokenizer.extend import Extender
from zero2all.tokenizer.template import own_chat
from zero2all.train.run import train
from zero2all.train.saved_config import load_run_config

LOGITS_TOLERANCE = 1e-4
VOCAB_ROWS = 352

LLAMA = {
    "vocab_size": VOCAB_ROWS,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GLM = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "num_nextn_predict_layers": 0,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
QWEN3_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "head_dim": 8,
}
FOLDERS = {
    "llama": ("llama", {}, {}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama, bfloat16": ("llama", {"mlp_bias": True}, {"dtype": torch.bfloat16}),
    "llama, float16": ("llama", {}, {"dtype": torch.float16}),
    "llama, sharded": ("llama", {"attention_bias": True}, {"max_shard_size": "20KB"}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}, {}),
    "llama, wide heads": ("llama", {"head_dim": 32, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}, {}),
    "llama, llama3 scaling": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {},
    ),
    "llama, linear scaling": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2, tied, bfloat16": ("qwen2", {"tie_word_embeddings": True}, {"dtype": torch.bfloat16}),
    "qwen2, yarn, sharded": (
        "qwen2",
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        {"max_shard_size": "20KB"},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8}, {}),
    "qwen3": ("qwen3", {"head_dim": 16}, {}),
    "qwen3, biases, tied, bfloat16": (
        "qwen3",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
        {"dtype": torch.bfloat16},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE, {}),
    "qwen3_moe, dense layer, sharded": (
        "qwen3_moe",
        QWEN3_MOE | {"mlp_only_layers": [0], "rope_theta": 1e6},
        {"max_shard_size": "20KB"},
    ),
    "glm4_moe, qk_norm": ("glm4_moe", GLM | {"use_qk_norm": True}, {}),
    "glm4_moe, bfloat16": ("glm4_moe", GLM, {"dtype": torch.bfloat16}),
    "glm4_moe, biases": ("glm4_moe", GLM | {"attention_bias": True, "first_k_dense_replace": 0}, {}),
}


@pytest.fixture(scope="session")
def foreign_tokenizer(tmp_path_factory):
    """A byte-level tokenizer made and saved by transformers, as any model folder has one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["The capital of France is Paris. 中国的首都是北京。"] * 50, trainer)
    folder = tmp_path_factory.mktemp("foreign") / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture
def make_folder(tmp_path, foreign_tokenizer):
    """An untrained model made and saved by transformers, with random biases and norms: mixing them up must show."""

    def make(layout="llama", values=None, saving=None):
        import transformers

        class_name = LAYOUTS[layout].removesuffix("ForCausalLM")
        config_class = getattr(transformers, f"{class_name}Config")
        model_class = getattr(transformers, f"{class_name}ForCausalLM")
        saving = dict(saving or {})
        dtype = saving.pop("dtype", torch.float32)
        torch.manual_seed(0)
        model = model_class(config_class(**LLAMA | (values or {}), bos_token_id=0, eos_token_id=1))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.5)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.mul_(5)
        model.to(dtype)
        for module in model.modules():
            if hasattr(module, hf.HF_ROUTER_BIAS):  # float32 in every folder
                bias = module.e_score_correction_bias
                module.e_score_correction_bias = bias.float().normal_(0, 0.1)
        folder = tmp_path / "theirs"
        model.save_pretrained(folder, **saving)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(foreign_tokenizer / name, folder)
        return folder

    return make


@pytest.fixture
def workspace(tmp_path):
    return open_workspace(tmp_path / "work", create=True)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def their_logits(folder, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits


def our_logits(loaded, ids):
    with torch.no_grad():
        return loaded.model.logits(loaded.model(ids.to(loaded.device))).cpu()


def random_ids(rows=3, length=40, below=VOCAB_ROWS):
    return torch.randint(below, (rows, length), generator=torch.Generator().manual_seed(1))


def assert_close_logits(ours, theirs):
    assert theirs.std() > 0.1, "logits that are all alike would agree with anything"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=LOGITS_TOLERANCE)


@pytest.fixture(scope="session")
def exported(trained, trained_workspace, tmp_path_factory):
    """The trained run as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export_run(trained, trained_workspace.tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def theirs(exported):
    """That folder as transformers loads it."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(exported).eval()


# --- a trained run, exported ---


def test_exported_run_gives_our_logits_in_transformers(trained, theirs):
    tokenizer = trained.tokenizer
    texts = ["中国的首都是北京。法国", "The capital of France is Paris. The answer", "我知道日本的首都是东京。" * 6]
    for ids in [[tokenizer.begin_id, *tokenizer.encode_text(text)] for text in texts]:
        with torch.no_grad():
            assert_close_logits(our_logits(trained, torch.tensor([ids])), theirs(torch.tensor([ids])).logits)
    ids = random_ids(rows=4, length=128, below=trained.config.model.vocab_ids)
    with torch.no_grad():
        assert_close_logits(our_logits(trained, ids), theirs(ids).logits)


def test_exported_tokenizer_encodes_and_decodes_as_ours(trained, exported):
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(exported)
    for text in ("中国的首都是北京。", "The capital of France is Paris.", "<|end_of_text|> 🌍\n\t x"):
        ids = trained.tokenizer.encode_text(text)
        assert auto(text)["input_ids"] == [trained.tokenizer.begin_id, *ids], "as `z2a generate` reads it"
        assert auto(text, add_special_tokens=False)["input_ids"] == ids
        assert auto.decode(auto(text)["input_ids"], skip_special_tokens=True) == text
        assert auto.decode(ids) == text
    assert load_tokenizer(exported).fingerprint == trained.tokenizer.fingerprint
    assert (auto.bos_token_id, auto.eos_token_id) == (trained.tokenizer.begin_id, trained.tokenizer.end_id)


TEXTS = {
    "zh": "我知道中国的首都是北京，法国的首都是巴黎。",
    "en": "The capital of France is Paris. I know that Tokyo is in Japan.",
    "code": "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
}


def cut_prompts(count: int) -> list[str]:
    """Beginnings and middles of the texts in turn, cut anywhere: also within words."""
    draw, texts = random.Random(1), itertools.cycle(TEXTS.values())
    found = []
    for text in itertools.islice(texts, count):
        first = draw.choice((0, draw.randrange(len(text) - 2)))
        found.append(text[first : first + draw.randrange(1, 30)])
    return found


def test_64_prompts_get_the_greedy_tokens_of_transformers_together_and_one_by_one(trained, theirs):
    tokenizer = trained.tokenizer
    rows = [[tokenizer.begin_id, *tokenizer.encode_text(prompt)] for prompt in cut_prompts(64)]
    together, alone = Engine(trained, EngineSettings(max_batch=24)), Engine(trained, EngineSettings(max_batch=1))
    asked = [Request(row, 12, alternatives=2) for row in rows]
    ours = [sorted(engine.run(asked), key=lambda job: job.number) for engine in (together, alone)]
    never = together.vocabulary.never.tolist()  # ours writes no control tokens; a model trained so little would
    compared = 0
    for number, row in enumerate(rows):
        with torch.no_grad():
            found = theirs.generate(torch.tensor([row]), max_new_tokens=12, do_sample=False, suppress_tokens=never)
        expected = [token for token in found[0, len(row) :].tolist() if token not in tokenizer.end_ids]
        for job in (jobs[number] for jobs in ours):
            gaps = [first - second for (_, first), (_, second) in (choice.alternatives for choice in job.choices)]
            sure = next((place for place, gap in enumerate(gaps) if gap <= 1e-4), len(gaps))
            compared += sure
            assert expected[:sure] == job.new_ids[:sure]
    assert compared > 2 * 64 * 6


def test_exported_config_says_what_the_model_is(trained, exported):
    values, shape = read_json(exported / "config.json"), trained.config.model
    assert (values["architectures"], values["torch_dtype"]) == (["LlamaForCausalLM"], "float32")
    assert values["eos_token_id"] == read_json(exported / "generation_config.json")["eos_token_id"]
    assert from_hf_config(values, exported) == dataclasses.replace(shape, head_dim=shape.head_size)


def test_exported_run_comes_back_bit_equal(trained, exported, workspace):
    import_folder(exported, workspace, "back")
    back = load_run(workspace, "back")
    assert back.tokenizer.fingerprint == trained.tokenizer.fingerprint
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, back.model.state_dict()[name].cpu()), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_run_can_be_exported_in_a_narrower_dtype(trained, trained_workspace, tmp_path, dtype):
    export_run(trained, trained_workspace.tokenizer, tmp_path / "hf", dtype)
    stored = tensors_of(tmp_path / "hf")
    assert {tensor.dtype for tensor in stored.values()} == {hf.DTYPES[dtype]}
    expected = trained.model.embedding.weight[: trained.config.model.vocab_ids].to(hf.DTYPES[dtype])
    assert torch.equal(stored["model.embed_tokens.weight"], expected)


def test_large_model_is_exported_in_shards_with_an_index(trained, trained_workspace, theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 100_000)
    export_run(trained, trained_workspace.tokenizer, tmp_path / "hf")
    index = read_json(tmp_path / "hf/model.safetensors.index.json")
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert not (tmp_path / "hf/model.safetensors").exists()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, framework="pt") as shard:
            assert torch.equal(shard.get_tensor(name), theirs.state_dict()[name])
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors_of(tmp_path / "hf").values())
    assert torch.equal(
        their_logits(tmp_path / "hf", torch.tensor([[1, 2, 3]])), theirs(torch.tensor([[1, 2, 3]])).logits
    )


@pytest.mark.parametrize("there", ["file", "folder with something in it"])
def test_export_replaces_nothing(trained, trained_workspace, tmp_path, there):
    target = tmp_path / "hf"
    if there == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(UsageError, match="already exists and is not an empty folder"):
        export_run(trained, trained_workspace.tokenizer, target)
    assert (target if there == "file" else target / "mine").read_text() == "mine"


def test_export_fills_an_empty_folder_even_the_current_one(trained, trained_workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export_run(trained, trained_workspace.tokenizer, type(tmp_path)("."))
    assert (tmp_path / "model.safetensors").is_file()


def test_failed_export_leaves_nothing_behind(trained, trained_workspace, tmp_path):
    shape = dataclasses.replace(trained.config.model, attention_bias="qkv", mlp_bias=True)
    no_layout = dataclasses.replace(trained, model=Z2all(shape, trained.model.ops))
    with pytest.raises(BadInputError, match="has no Hugging Face layout"):
        export_run(no_layout, trained_workspace.tokenizer, tmp_path / "hf")
    assert names_in(tmp_path) == []


# --- untrained models of transformers, imported and exported again ---


@pytest.mark.parametrize("kind", FOLDERS)
def test_imported_model_gives_their_logits_and_leaves_bit_equal(make_folder, workspace, tmp_path, kind):
    layout, values, saving = FOLDERS[kind]
    folder = make_folder(layout, values, saving)
    if "max_shard_size" in saving:
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    import_folder(folder, workspace, "imported")
    loaded = load_run(workspace, "imported")
    assert loaded.step == 0
    ids = random_ids()
    assert_close_logits(our_logits(loaded, ids), their_logits(folder, ids))

    export_run(loaded, workspace.tokenizer, tmp_path / "again")
    before, after = tensors_of(folder), tensors_of(tmp_path / "again")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    assert_same_config(folder, tmp_path / "again")


def moe_model(router_bias=0.0, qk_norm=False, **settings):
    """A model of ours with experts, and its weights by name."""
    moe = MoeConfig(experts=4, expert_size=16, **settings)
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        heads=4,
        kv_heads=2,
        max_seq_len=32,
        moe=moe,
        qk_norm=qk_norm,
    )
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    init_weights(model, 1)
    for _, router in routers(model):
        router.bias.fill_(router_bias)
    return config, {name: part.values for name, part in model_parts(model).items()}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"router": "softmax", "shared_experts": 1}, "moe.router softmax, moe.shared_experts 1"),
        ({"router": "sigmoid"}, "GLM-4 MoE needs: sigmoid, 1 or more"),
        ({"router": "softmax", "router_bias": 0.1}, "has balancing biases. Mixtral has none"),
        ({"router": "softmax", "qk_norm": True, "router_bias": 0.1}, "has balancing biases. Qwen3-MoE has none"),
        ({"router": "sigmoid", "qk_norm": True}, "Qwen3-MoE needs: softmax, 0, any, none or all, true"),
    ],
)
def test_experts_that_no_layout_has_are_refused_in_words(settings, words):
    config, tensors = moe_model(**settings)
    with pytest.raises(BadInputError, match=re.escape(words)):
        list(hf.to_hf_tensors(config, tensors))


@pytest.mark.parametrize("options", [{"attention_bias": "qkv"}, {"mlp_bias": True}], ids=str)
def test_qk_norm_with_what_qwen3_does_not_have_is_refused_in_words(options):
    with pytest.raises(BadInputError, match="Qwen3, which has qk_norm, needs: attention_bias none or all, mlp_bias"):
        hf_layout(ModelConfig(vocab_size=64, qk_norm=True, **options))


def without_key_norm(folder):
    change_tensors(lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))(folder)


@pytest.mark.parametrize(
    ("layout", "spoil", "words"),
    [
        ("qwen3", without_key_norm, "a model with qk_norm, but model.layers.1.self_attn.k_norm.weight is missing"),
        ("qwen3", lambda folder: change_config(model_type="llama")(folder), "q_norm.weight is unknown"),
        ("qwen3_moe", lambda folder: change_config(norm_topk_prob=False)(folder), "norm_topk_prob False != True"),
        ("qwen3_moe", lambda folder: change_config(decoder_sparse_step=2)(folder), "decoder_sparse_step 2 != 1"),
        ("qwen3_moe", lambda folder: change_config(mlp_only_layers=[1])(folder), "mlp_only_layers [1] != [0]"),
        ("qwen3_moe", lambda folder: change_config(mlp_only_layers=1)(folder), "mlp_only_layers is '1', expected a"),
    ],
)
def test_a_qwen3_that_would_compute_differently_is_refused(make_folder, workspace, layout, spoil, words):
    folder = make_folder(layout, {"head_dim": 8} if layout == "qwen3" else QWEN3_MOE)
    spoil(folder)
    with pytest.raises(BadInputError, match=re.escape(words)):
        import_folder(folder, workspace, "run")


def assert_same_config(before, after):
    """Equal in all that transformers computes with, as its own config class reads both."""
    from transformers import AutoConfig

    one, other = (AutoConfig.from_pretrained(folder).to_dict() for folder in (before, after))
    for name in ("transformers_version", "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id"):
        one.pop(name, None)
        other.pop(name, None)
    if one["rope_parameters"]["rope_type"] == "yarn":  # ours spells their defaults out
        one["rope_parameters"] = {"beta_fast": 32, "beta_slow": 1, **one["rope_parameters"]}
    assert one.keys() <= other.keys()
    assert {name: other[name] for name in one} == one


def test_imported_tokenizer_becomes_that_of_the_workspace(make_folder, workspace, foreign_tokenizer):
    from transformers import AutoTokenizer

    import_folder(make_folder(), workspace, "imported")
    auto = AutoTokenizer.from_pretrained(foreign_tokenizer)
    ours = load_run(workspace, "imported").tokenizer
    text = "The capital of 中国 is </s> 北京"
    assert ours.decode(ours.encode_text(text)) == text
    assert ours.encode_text("The capital of 中国") == auto("The capital of 中国")["input_ids"]
    assert (ours.begin_id, ours.end_id) == (0, 1)


def test_imported_run_is_continued_by_training(make_folder, workspace, trained_workspace, tiny_config):
    shutil.copytree(trained_workspace.corpus, workspace.corpus)
    import_folder(make_folder("qwen2", {"tie_word_embeddings": True}), workspace, "continued")
    pack_corpus(workspace.corpus, workspace.tokenizer, workspace.packed)
    start = load_run(workspace, "continued")
    config = dataclasses.replace(
        tiny_config,
        model=start.config.model,
        train=dataclasses.replace(tiny_config.train, name="continued", steps=3),
        schedule=dataclasses.replace(tiny_config.schedule, warmup_steps=1),
        optim=dataclasses.replace(tiny_config.optim, lr_max=1e-6),
    )
    with pytest.raises(UsageError, match=r"another setting \(model.qk_norm: False -> True\)"):
        train(dataclasses.replace(config, model=dataclasses.replace(config.model, qk_norm=True)), workspace)
    notes = []
    train(config, workspace, say=notes.append)
    assert any("resumed continued at step 0" in note for note in notes)
    after = load_run(workspace, "continued")
    assert (after.step, after.stored_dtype) == (3, "float32")
    # Three steps of 1e-6: still the imported weights, not random ones, but no longer the same.
    assert not torch.equal(after.model.embedding.weight, start.model.embedding.weight)
    torch.testing.assert_close(after.model.embedding.weight, start.model.embedding.weight, rtol=0, atol=1e-4)


def test_config_of_an_imported_run_can_be_loaded_and_fits_the_model(make_folder, workspace):
    done = import_folder(make_folder(values={"max_position_embeddings": 37}), workspace, "short")
    config = load_run_config(done.run)
    assert (config.train.name, config.data.seq_len, config.model.max_seq_len) == ("short", 37, 37)
    assert config.train.tokens_per_step % (37 * config.train.micro_batch_samples) == 0


def test_several_ends_of_a_chat_model_are_kept_and_stop_generation(make_folder, workspace, tmp_path):
    folder = make_folder()
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 300, 301], "temperature": 0.6})
    import_folder(folder, workspace, "chat")
    loaded = load_run(workspace, "chat")
    assert loaded.tokenizer.end_ids == (1, 300, 301)
    export_run(loaded, workspace.tokenizer, tmp_path / "again")
    assert read_json(tmp_path / "again/generation_config.json")["eos_token_id"] == [1, 300, 301]
    assert read_json(tmp_path / "again/config.json")["eos_token_id"] == [1, 300, 301]
    with torch.no_grad():  # a model that wants nothing but id 300
        loaded.model.head.weight.zero_()
        loaded.model.head.weight[300] = 1e3
        hidden = loaded.model(torch.tensor([[5, 6]]))
        loaded.model.head.weight[300] *= hidden[0, -1].sum().sign()
    assert generate(Engine(loaded), "The", 5) == ""


# --- a tokenizer that was extended ---


def extended_tokenizer(folder, target, pieces):
    extender = Extender(folder)
    extender.add(pieces)
    extender.save(target)
    return target


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_grow_with_an_extended_tokenizer(make_folder, workspace, tmp_path, tied):
    folder = make_folder(values={"tie_word_embeddings": tied})
    pieces = [f" 词{first}{second}" for first in "abcdefgh" for second in "ijklmnop"]
    larger = extended_tokenizer(folder, tmp_path / "larger", pieces)
    done = import_folder(folder, workspace, "grown", larger, resize_embeddings=True)
    loaded = load_run(workspace, "grown")
    old, new = load_tokenizer(folder), load_tokenizer(larger)
    assert loaded.tokenizer.vocab_size == new.vocab_size > VOCAB_ROWS
    assert loaded.model.config.vocab_ids == done.resized.rows == new.vocab_size
    assert len(loaded.model.embedding.weight) == -(-new.vocab_size // 64) * 64
    assert (done.resized.rows_before, done.resized.new_ids) == (VOCAB_ROWS, new.vocab_size - old.vocab_size)
    theirs = tensors_of(folder)
    for ours, name in (("embedding.weight", "model.embed_tokens.weight"), ("head.weight", "lm_head.weight")):
        if ours not in loaded.model.state_dict() or name not in theirs:
            assert tied
            continue
        grown = loaded.model.state_dict()[ours].cpu()
        assert torch.equal(grown[: old.vocab_size], theirs[name][: old.vocab_size])
        (number,) = new.encode_text(pieces[0])
        torch.testing.assert_close(grown[number], theirs[name][old.encode_text(pieces[0])].mean(dim=0))
    ids = random_ids(below=old.vocab_size)
    assert_close_logits(
        our_logits(loaded, ids)[..., : old.vocab_size], their_logits(folder, ids)[..., : old.vocab_size]
    )
    export_run(loaded, workspace.tokenizer, tmp_path / "out")
    assert their_logits(tmp_path / "out", torch.tensor([[number]])).shape[-1] == done.resized.rows


def test_padded_rows_take_new_ids_before_the_model_grows(make_folder, workspace, tmp_path):
    folder = make_folder()
    larger = extended_tokenizer(folder, tmp_path / "larger", ["量子"])
    done = import_folder(folder, workspace, "grown", larger, resize_embeddings=True)
    assert (done.resized.rows, done.resized.rows_before) == (VOCAB_ROWS, VOCAB_ROWS)
    (number,) = load_tokenizer(larger).encode_text("量子")
    before = tensors_of(folder)["model.embed_tokens.weight"][load_tokenizer(folder).encode_text("量子")].mean(dim=0)
    grown = load_run(workspace, "grown").model.embedding.weight
    torch.testing.assert_close(grown[number].detach().cpu(), before)
    import_folder(folder, open_workspace(tmp_path / "w2", create=True), "same", larger)
    assert load_run(open_workspace(tmp_path / "w2"), "same").config.model.vocab_ids == VOCAB_ROWS


def test_a_tokenizer_that_is_too_large_or_moves_ids_is_refused(make_folder, workspace, tmp_path, trained_workspace):
    folder = make_folder()
    larger = extended_tokenizer(folder, tmp_path / "larger", [f"量{chr(0x4E00 + n)}" for n in range(60)])
    with pytest.raises(BadInputError, match="add --resize-embeddings"):
        import_folder(folder, workspace, "run", larger)
    with pytest.raises(BadInputError, match=r"does not extend the tokenizer of the model: id 0 is '<s>'"):
        import_folder(folder, workspace, "run", trained_workspace.tokenizer, resize_embeddings=True)
    assert files_below(workspace.root) == ["workspace.json"]


# --- the compatible layout ---


def test_compatible_export_renders_chats_as_text_with_our_ids(trained, trained_workspace, tmp_path):
    from tokenizers import Tokenizer as Raw
    from transformers import AutoTokenizer

    export_run(trained, trained_workspace.tokenizer, tmp_path / "hf", tokenizer_layout="compatible")
    auto = AutoTokenizer.from_pretrained(tmp_path / "hf")
    chat = [{"role": "user", "content": "中国的首都是"}, {"role": "assistant", "content": "北京。"}]
    rendered = auto.apply_chat_template(chat, tokenize=True, return_dict=False)
    ours = own_chat(trained.tokenizer)
    parts = ours.parts(Dialogue([Message(turn["role"], turn["content"]) for turn in chat]))
    assert list(rendered) == ours.ids_of(parts)
    raw = Raw.from_file(str(tmp_path / "hf/tokenizer.json"))
    assert raw.encode("<|end_of_text|>", add_special_tokens=False).ids == [trained.tokenizer.end_id], (
        "and so text can spell control tokens"
    )
    assert load_tokenizer(tmp_path / "hf").encode_text("<|end_of_text|>") != [trained.tokenizer.end_id]
    assert load_tokenizer(tmp_path / "hf").control == trained.tokenizer.control


def test_tensors_that_old_folders_carry_beside_the_weights_are_no_obstacle(make_folder, workspace):
    folder = make_folder(values={"tie_word_embeddings": True}, saving={"dtype": torch.float16})
    tensors = tensors_of(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"other": torch.ones(1)}, folder / "consolidated.safetensors")
    import_folder(folder, workspace, "old")
    assert load_run(workspace, "old").stored_dtype == "float16"


def test_folder_of_mixed_dtypes_is_kept_in_float32(make_folder, workspace):
    folder = make_folder(saving={"dtype": torch.bfloat16})
    tensors = tensors_of(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    import_folder(folder, workspace, "mixed")
    assert load_run(workspace, "mixed").stored_dtype == "float32"


# --- what is refused, and that nothing is left of it ---


def change_config(**changes):
    def change(folder):
        values = {**read_json(folder / "config.json"), **changes}
        write_json(folder / "config.json", {name: value for name, value in values.items() if value is not ...})

    return change


def change_tensors(change_one):
    def change(folder):
        tensors = tensors_of(folder)
        change_one(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def pickled_only(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")


def truncated(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def shard_missing(folder):
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": names})


def narrower(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:, 1:].contiguous()


def index(name):
    """An index whose every weight lies in `name`, a path or whatever else."""

    def change(folder):
        weights = dict.fromkeys(tensors_of(folder), name)
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weights})

    return change


def outside(name):
    """The weights beside the folder, and an index that leads to them."""

    def change(folder):
        named = name.format(parent=folder.parent)
        index(named)(folder)
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")

    return change


def fifo(name):
    def change(folder):
        if name != "model.safetensors":
            index(name)(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def spoiled(value):
    def change(tensors):
        tensors["model.norm.weight"][3] = value
        tensors["model.layers.1.mlp.up_proj.weight"][:2] = value

    return change_tensors(change)


def twice(folder):
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    names = {"a": "model.safetensors", "b": "again.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": names})


def double_name(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"vocab_size": 353,', 1))


def rope(**values):
    return change_config(rope_parameters={"rope_theta": 10000.0, **values})


REFUSED = {
    "no folder": (shutil.rmtree, "is not a Hugging Face model folder"),
    "pickled weights only": (pickled_only, r"only pickled weights \(pytorch_model.bin\).*never loads"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "half a file": (truncated, "not a readable safetensors file"),
    "a shard is missing": (shard_missing, "model-00002-of-00002.safetensors is missing"),
    "config is no object": (lambda folder: (folder / "config.json").write_text("[1]"), "expected a JSON object"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
    "unknown model type": (
        change_config(model_type="gpt2"),
        "model_type 'gpt2'. Only llama, qwen2, qwen3, qwen3_moe, mixtral, glm4_moe",
    ),
    "no model type": (change_config(model_type=...), "model_type None"),
    "no vocabulary size": (change_config(vocab_size=...), "has no vocab_size"),
    "no width": (change_config(hidden_size=...), "hidden_size: got None"),
    "heads that do not divide": (change_config(num_key_value_heads=4), r"kv_heads: got 4, expected a divisor"),
    "sliding window": (change_config(sliding_window=64), "sets sliding_window"),
    "layers of several kinds": (change_config(layer_types=["full_attention", "sliding_attention"]), "sets layer_types"),
    "quantised": (change_config(quantization_config={"bits": 4}), "sets quantization_config"),
    "partial rotary": (change_config(partial_rotary_factor=0.5), "sets partial_rotary_factor"),
    "partial rotary, new place": (rope(rope_type="default", partial_rotary_factor=0.5), "sets partial_rotary_factor"),
    "another activation": (change_config(hidden_act="gelu"), "hidden_act 'gelu'. Only silu"),
    "unknown scaling": (rope(rope_type="longrope", factor=2.0), "'longrope'. Only linear, llama3 and yarn"),
    "scaling without factor": (rope(rope_type="linear"), "has no factor"),
    "scaling per kind of layer": (rope(full_attention={"rope_type": "linear"}), "its rope scaling sets full_attention"),
    "yarn with the strength of others": (rope(rope_type="yarn", factor=2.0, mscale=1.5), "sets mscale"),
    "a strength without yarn": (rope(rope_type="linear", factor=2.0, attention_factor=1.5), "sets attention_factor"),
    "missing tensor": (
        change_tensors(lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight")),
        "model.layers.1.self_attn.k_proj.weight is missing",
    ),
    "unknown tensor": (
        change_tensors(lambda tensors: tensors.update({"model.layers.0.q_norm.weight": torch.ones(8)})),
        "model.layers.0.q_norm.weight is unknown",
    ),
    "misshapen tensor": (
        change_tensors(narrower),
        r"mlp.up_proj.weight has shape \(80, 47\) instead of \(80, 48\)",
    ),
    "another vocabulary than the config says": (change_config(vocab_size=360), r"has shape \(352, 48\) instead of"),
    "integer weights": (
        change_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})),
        "stores .*I8",
    ),
    "an absolute path in the index": (outside("{parent}/outside.safetensors"), "names the file '/.*without slashes"),
    "a path upwards in the index": (outside("../outside.safetensors"), "names the file '../outside.safetensors'"),
    "a path below in the index": (index("below/model.safetensors"), "names the file 'below/model.safetensors'"),
    "a NUL in the index": (index("model\0.safetensors"), "names the file"),
    "a number in the index": (index(5), "5 is missing"),
    "an object in the index": (index({"a": "/etc/passwd"}), "names the file"),
    "an index of nothing": (
        lambda folder: write_json(folder / "model.safetensors.index.json", {"weight_map": {}}),
        "no weight_map",
    ),
    "a fifo for weights": (fifo("model.safetensors"), "neither a file nor a link to one"),
    "a fifo in the index": (fifo("model-00001-of-00001.safetensors"), "neither a file nor a link to one"),
    "a device in place of weights": (
        lambda folder: [
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors").symlink_to("/dev/zero"),
        ],
        "neither a file nor a link to one",
    ),
    "a tensor in two files": (twice, "so does another file"),
    "a name twice in the config": (double_name, "'vocab_size' is listed twice"),
    "NaN weights": (
        spoiled(float("nan")),
        r"97 weights in .* are NaN or infinite, in 2 of 21 tensors",
    ),
    "infinite weights": (spoiled(float("-inf")), "97 weights in .* are NaN or infinite"),
    "layers without end": (change_config(num_hidden_layers=10**7), r"layers: got 10000000, .* at most 10000"),
    "more layers than weights": (change_config(num_hidden_layers=9_000), "is 9,000, but the weights have 2 layers"),
    "widths without end": (change_config(hidden_size=10**15), r"hidden_size: got 1000000000000000, .* at most"),
    "ids without end": (change_config(vocab_size=10**30), r"vocab_size: got 1000000000000000000000000000000, "),
    "an end of text without end": (change_config(eos_token_id=10**30), "'10{30}' as eos_token_id; .* 0 to 351"),
    "an end of text that is none": (change_config(eos_token_id=[1, True]), "'True' as eos_token_id"),
    "an end of text beyond the model": (
        lambda folder: write_json(folder / "generation_config.json", {"eos_token_id": [1, -1]}),
        "generation_config.json names '-1' as eos_token_id",
    ),
    "positions without end": (change_config(max_position_embeddings=10**12), r"max_seq_len: got 1000000000000, "),
    "a number for a list": (change_config(layer_types=5), "layer_types is '5', expected a list"),
    "a text for an object": (change_config(rope_scaling="x"), "rope_scaling is 'x', expected an object"),
    "a number for an object": (change_config(rope_parameters=7), "rope_parameters is '7', expected an object"),
    "a list for a model type": (change_config(model_type=["llama"]), "model_type \\['llama'\\]"),
    "a list for a kind of scaling": (rope(rope_type=["yarn"], factor=2.0), "has the rope scaling \\['yarn'\\]"),
    "a text for true or false": (change_config(tie_word_embeddings="no"), "tie_word_embeddings is 'no'"),
    "yarn without a base": (
        rope(rope_type="yarn", factor=2.0, rope_theta=1.0),
        "rope_theta: got 1.0, expected .* above 1",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer in"),
}


@pytest.fixture(scope="module")
def refusable(tmp_path_factory, foreign_tokenizer):
    """One folder to copy and spoil."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("refusable") / "theirs"
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(foreign_tokenizer / name, folder)
    return folder


def files_below(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_compute_differently_is_refused_and_leaves_nothing(refusable, tmp_path, workspace, kind):
    spoil, message = REFUSED[kind]
    folder = shutil.copytree(refusable, tmp_path / "theirs")
    spoil(folder)
    before = files_below(workspace.root)
    with pytest.raises(BadInputError, match=message):
        import_folder(folder, workspace, "run")
    assert files_below(workspace.root) == before


def test_a_folder_of_links_as_a_hugging_face_cache_keeps_them_is_imported(refusable, tmp_path, workspace):
    cache = tmp_path / "cache"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/main").mkdir(parents=True)
    for number, path in enumerate(refusable.iterdir()):
        shutil.copy(path, cache / f"blobs/{number}")
        (cache / "snapshots/main" / path.name).symlink_to(f"../../blobs/{number}")
    import_folder(cache / "snapshots/main", workspace, "run")
    assert load_run(workspace, "run").step == 0


def test_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(refusable, tmp_path, workspace):
    folder = shutil.copytree(refusable, tmp_path / "theirs")
    tokenizer = read_json(folder / "tokenizer.json")
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "content": "<new>", "id": VOCAB_ROWS})
    write_json(folder / "tokenizer.json", tokenizer)
    before = files_below(workspace.root)
    with pytest.raises(BadInputError, match=r"has 353 ids, but its model has only 352 rows"):
        import_folder(folder, workspace, "run")
    assert files_below(workspace.root) == before


def test_workspace_keeps_its_own_tokenizer(refusable, trained_workspace):
    with pytest.raises(UsageError, match=r"already has another tokenizer\. Import into a workspace of its own"):
        import_folder(refusable, trained_workspace, "other")
    assert names_in(trained_workspace.runs) == ["tiny"]


def test_existing_run_is_not_replaced(refusable, workspace):
    import_folder(refusable, workspace, "run")
    before = files_below(workspace.root)
    with pytest.raises(UsageError, match="The run run already exists"):
        import_folder(refusable, workspace, "run")
    assert files_below(workspace.root) == before


@pytest.mark.parametrize("name", ["a/b", "../run", ".hidden"])
def test_run_name_must_be_a_plain_folder_name(refusable, workspace, name):
    before = files_below(workspace.root)
    with pytest.raises(UsageError, match=re.escape(f"train.name: got '{name}'")):
        import_folder(refusable, workspace, name)
    assert files_below(workspace.root) == before


def test_import_interrupted_before_its_checkpoint_leaves_no_run(refusable, workspace, monkeypatch):
    """A run folder with a config but no checkpoint would be trained from random weights."""

    def interrupted(run, *_):
        assert (run / "config.yaml").is_file(), "the worst moment: the config is written, the weights are not"
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange, "write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_folder(refusable, workspace, "run")
    assert names_in(workspace.runs) == []
    monkeypatch.undo()
    import_folder(refusable, workspace, "run")
    assert load_run(workspace, "run").step == 0
