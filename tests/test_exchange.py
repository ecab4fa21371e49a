"""Models that leave for, and come from, the Hugging Face world: the same tensors, the same logits, the same text."""

import dataclasses
import os
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.infer.tiny import random_model
from zero2all import exchange
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, write_json
from zero2all.common.workspace import open_workspace
from zero2all.exchange import export_run, import_folder
from zero2all.infer.engine import Engine
from zero2all.infer.load import load_run
from zero2all.infer.text import generate
from zero2all.model import hf
from zero2all.model.config import LoraConfig, ModelConfig, MoeConfig
from zero2all.model.hf_config import LAYOUTS, from_hf_config, hf_layout
from zero2all.model.lora import initial_adapters, merge, write_adapter_folder
from zero2all.model.moe import routers
from zero2all.model.z2all import Z2all
from zero2all.packed.writer import pack_corpus
from zero2all.parallel.parameter_table import model_parts
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.chat import Dialogue, Message
from zero2all.tokenizer.extend import Extender
from zero2all.tokenizer.template import own_chat
from zero2all.train.run import train
from zero2all.train.saved_config import load_run_config

LOGITS_TOLERANCE = 1e-4
VOCAB_ROWS = 352

LLAMA = {"vocab_size": VOCAB_ROWS, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128}
GLM = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2}
GLM |= {"num_nextn_predict_layers": 0, "head_dim": 8}
GLM |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8}
QWEN3_MOE |= {"norm_topk_prob": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
TIED, BIASES = {"tie_word_embeddings": True}, {"attention_bias": True}
SHARDED, HALF = {"max_shard_size": "20KB"}, {"dtype": torch.bfloat16}
FOLDERS = {
    "llama, all biases, sharded": ("llama", BIASES | {"mlp_bias": True}, SHARDED),
    "llama, tied, float16": ("llama", TIED, {"dtype": torch.float16}),
    "llama, biases of the MLP, bfloat16": ("llama", {"mlp_bias": True, "rope_scaling": LINEAR}, HALF),
    "llama, one key head": ("llama", {"num_key_value_heads": 1, "rope_scaling": LLAMA3}, {}),
    "llama, wide heads": ("llama", {"head_dim": 32, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}, {}),
    "qwen2, yarn, sharded": ("qwen2", {"rope_theta": 1e6, "rope_scaling": YARN}, SHARDED),
    "mistral, wide heads": ("mistral", {"head_dim": 16, "sliding_window": None, "rope_theta": 1e6}, SHARDED),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8}, {}),
    "qwen3": ("qwen3", {"head_dim": 16}, {}),
    "qwen3, biases, tied, bfloat16": ("qwen3", BIASES | TIED | {"head_dim": 8}, HALF),
    "qwen3_moe, dense layer, sharded": ("qwen3_moe", QWEN3_MOE | {"mlp_only_layers": [0], "rope_theta": 1e6}, SHARDED),
    "glm4_moe, qk_norm, bfloat16": ("glm4_moe", GLM | {"use_qk_norm": True}, HALF),
    "glm4_moe, biases": ("glm4_moe", GLM | BIASES | {"first_k_dense_replace": 0}, {}),
}


@pytest.fixture(scope="session")
def foreign_tokenizer(tmp_path_factory):
    """A byte-level tokenizer made and saved by transformers, as any model folder has one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    given = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], **given)
    backend.train_from_iterator(["The capital of France is Paris. 中国的首都是北京。"] * 50, trainer)
    folder = tmp_path_factory.mktemp("foreign") / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory, foreign_tokenizer):
    """An untrained model made and saved by transformers, with random biases and norms: mixing them up must show."""

    def make(layout="llama", values=None, dtype=torch.float32, **saving):
        import transformers

        config_class = getattr(transformers, LAYOUTS[layout].replace("ForCausalLM", "Config"))
        torch.manual_seed(0)
        config = config_class(**LLAMA | (values or {}), bos_token_id=0, eos_token_id=1)
        model = getattr(transformers, LAYOUTS[layout])(config)
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
        folder = tmp_path_factory.mktemp("theirs") / "theirs"
        model.save_pretrained(folder, **saving)
        return shutil.copytree(foreign_tokenizer, folder, dirs_exist_ok=True)

    return make


@pytest.fixture(scope="session")
def llama_folder(make_folder):
    """One folder to read, or to copy and change."""
    return make_folder()


@pytest.fixture
def workspace(tmp_path):
    return open_workspace(tmp_path / "work", create=True)


def files_below(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_tensors(folder, other):
    before, after = tensors_of(folder), tensors_of(other)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


@torch.no_grad()
def their_logits(folder, ids):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits


@torch.no_grad()
def our_logits(loaded, ids):
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


def test_exported_weights_may_be_read_by_those_who_may_read_the_config(exported):
    weights, config = ((exported / name).stat().st_mode for name in ("model.safetensors", "config.json"))
    assert weights == config


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


def test_exported_run_gives_our_logits_in_transformers_and_comes_back_bit_equal(trained, exported, workspace):
    ids = random_ids(rows=4, length=128, below=trained.config.model.vocab_ids)
    assert_close_logits(our_logits(trained, ids), their_logits(exported, ids))
    import_folder(exported, workspace, "back")
    back = load_run(workspace, "back")
    assert back.tokenizer.fingerprint == trained.tokenizer.fingerprint
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, back.model.state_dict()[name].cpu()), name
    values, shape = read_json(exported / "config.json"), trained.config.model
    assert (values["architectures"], values["torch_dtype"]) == (["LlamaForCausalLM"], "float32")
    assert from_hf_config(values, exported) == dataclasses.replace(shape, head_dim=shape.head_size)


def test_large_model_is_exported_in_shards_in_the_dtype_asked_for(trained, trained_workspace, exported, tmp_path):
    folder = tmp_path / "hf"
    with patch.object(hf, "SHARD_BYTES", 50_000):
        export_run(trained, trained_workspace.tokenizer, folder, "float16")
    index, whole = read_json(folder / "model.safetensors.index.json"), tensors_of(exported)
    files = {path.name for path in folder.glob("*.safetensors")}
    assert len(files) > 2
    assert set(index["weight_map"].values()) == files
    assert "model.safetensors" not in files
    assert index["weight_map"].keys() == whole.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], whole[name].half())
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 2 for tensor in whole.values())


def test_export_replaces_nothing_and_a_failed_one_leaves_nothing(trained, trained_workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export_run(trained, trained_workspace.tokenizer, Path())  # an empty folder, even the current one
    before = files_below(tmp_path)
    assert "model.safetensors" in before
    for target in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(UsageError, match="already exists and is not an empty folder"):
            export_run(trained, trained_workspace.tokenizer, target)
    shape = dataclasses.replace(trained.config.model, attention_bias="qkv", mlp_bias=True)
    no_layout = dataclasses.replace(trained, model=Z2all(shape, trained.model.ops))
    with pytest.raises(BadInputError, match="has no Hugging Face layout"):
        export_run(no_layout, trained_workspace.tokenizer, tmp_path / "hf")
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("kind", FOLDERS)
def test_imported_model_gives_their_logits_and_leaves_bit_equal(make_folder, workspace, tmp_path, kind):
    layout, values, saving = FOLDERS[kind]
    folder = make_folder(layout, values, **saving)
    if "max_shard_size" in saving:
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    import_folder(folder, workspace, "imported")
    loaded = load_run(workspace, "imported")
    assert loaded.step == 0
    ids = random_ids()
    assert_close_logits(our_logits(loaded, ids), their_logits(folder, ids))

    export_run(loaded, workspace.tokenizer, tmp_path / "again")
    assert_same_tensors(folder, tmp_path / "again")
    assert_same_config(folder, tmp_path / "again")


def test_what_no_layout_has_is_refused_in_words():
    for moe, qk_norm, router_bias, words in (
        ({"router": "softmax", "shared_experts": 1}, False, 0.0, "moe.router softmax, moe.shared_experts 1"),
        ({"router": "sigmoid"}, False, 0.0, "GLM-4 MoE needs: sigmoid, 1 or more"),
        ({"router": "softmax"}, False, 0.1, "has balancing biases. Mixtral has none"),
        ({"router": "softmax"}, True, 0.1, "has balancing biases. Qwen3-MoE has none"),
        ({"router": "sigmoid"}, True, 0.0, "Qwen3-MoE needs: softmax, 0, any, none or all, true"),
    ):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2, "max_seq_len": 32}
        model = random_model(ModelConfig(64, **sizes, moe=MoeConfig(experts=4, expert_size=16, **moe), qk_norm=qk_norm))
        for _, router in routers(model):
            router.bias.fill_(router_bias)
        with pytest.raises(BadInputError, match=re.escape(words)):
            list(hf.to_hf_tensors(model.config, {name: part.values for name, part in model_parts(model).items()}))
        for options in ({"attention_bias": "qkv"}, {"mlp_bias": True}):
            with pytest.raises(BadInputError, match="Qwen3, which has qk_norm, needs: attention_bias none or all, mlp"):
                hf_layout(ModelConfig(vocab_size=64, qk_norm=True, **options))


def test_a_qwen3_that_would_compute_differently_is_refused(make_folder, workspace):
    folder = make_folder("qwen3", {"head_dim": 8})
    without("model.layers.1.self_attn.k_norm.weight")(folder)
    with pytest.raises(BadInputError, match=r"a model with qk_norm, but model.layers.1.self_attn.k"):
        import_folder(folder, workspace, "run")
    folder = make_folder("qwen3_moe", QWEN3_MOE)
    whole = read_json(folder / "config.json")
    for values, words in (
        ({"norm_topk_prob": False}, "norm_topk_prob False != True"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 != 1"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers [1] != [0]"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is '1', expected a"),
    ):
        write_json(folder / "config.json", whole | values)
        with pytest.raises(BadInputError, match=re.escape(words)):
            import_folder(folder, workspace, "run")
    assert files_below(workspace.root) == ["workspace.json"]


def assert_same_config(before, after):
    """Equal in all that transformers computes with, as its own config class reads both."""
    from transformers import AutoConfig

    one, other = (AutoConfig.from_pretrained(folder).to_dict() for folder in (before, after))
    if one["rope_parameters"]["rope_type"] == "yarn":  # ours spells their defaults out
        one["rope_parameters"] = {"beta_fast": 32, "beta_slow": 1, **one["rope_parameters"]}
    names = one.keys() - {"transformers_version", "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id"}
    if one["model_type"] == "mistral":  # without a window it is a Llama, and leaves as one
        names -= {"model_type", "architectures", "sliding_window"}
    assert names <= other.keys()
    assert {name: other[name] for name in names} == {name: one[name] for name in names}


def test_imported_tokenizer_is_that_of_the_workspace_and_the_config_fits_the_model(llama_folder, tmp_path, workspace):
    from transformers import AutoTokenizer

    folder = shutil.copytree(llama_folder, tmp_path / "theirs")
    change_config(max_position_embeddings=37)(folder)
    done = import_folder(folder, workspace, "imported")
    auto, ours = AutoTokenizer.from_pretrained(folder), load_run(workspace, "imported").tokenizer
    text = "The capital of 中国 is </s> 北京"
    assert ours.decode(ours.encode_text(text)) == text
    assert ours.encode_text("The capital of 中国") == auto("The capital of 中国")["input_ids"]
    assert (ours.begin_id, ours.end_id) == (0, 1)
    config = load_run_config(done.run)
    assert (config.train.name, config.data.seq_len, config.model.max_seq_len) == ("imported", 37, 37)
    assert config.train.tokens_per_step % (37 * config.train.micro_batch_samples) == 0


def test_imported_run_is_continued_by_training(make_folder, workspace, trained_workspace, tiny_config):
    shutil.copytree(trained_workspace.corpus, workspace.corpus)
    import_folder(make_folder("qwen2", TIED), workspace, "continued")
    pack_corpus(workspace.corpus, workspace.tokenizer, workspace.packed)
    start = load_run(workspace, "continued")
    changes = {"train": {"name": "continued", "steps": 3}, "schedule": {"warmup_steps": 1}, "optim": {"lr_max": 1e-6}}
    sections = {name: dataclasses.replace(getattr(tiny_config, name), **values) for name, values in changes.items()}
    config = dataclasses.replace(tiny_config, model=start.config.model, **sections)
    with pytest.raises(UsageError, match=r"another setting \(model.qk_norm: False -> True\)"):
        train(dataclasses.replace(config, model=dataclasses.replace(config.model, qk_norm=True)), workspace)
    notes = []
    train(config, workspace, say=notes.append)
    assert any("resumed continued at step 0" in note for note in notes)
    after = load_run(workspace, "continued")
    assert (after.step, after.stored_dtype) == (3, "float32")
    # Three steps of 1e-6: still the imported weights, not random ones, but no longer the same.
    found, imported = (each.model.embedding.weight for each in (after, start))
    assert not torch.equal(found, imported)
    torch.testing.assert_close(found, imported, rtol=0, atol=1e-4)


def test_several_ends_of_a_chat_model_are_kept_and_stop_generation(llama_folder, workspace, tmp_path):
    folder = shutil.copytree(llama_folder, tmp_path / "theirs")
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 300, 301], "temperature": 0.6})
    import_folder(folder, workspace, "chat")
    loaded = load_run(workspace, "chat")
    assert loaded.tokenizer.end_ids == (1, 300, 301)
    export_run(loaded, workspace.tokenizer, tmp_path / "again")
    for name in ("generation_config.json", "config.json"):
        assert read_json(tmp_path / "again" / name)["eos_token_id"] == [1, 300, 301]
    with torch.no_grad():  # a model that wants nothing but id 300
        loaded.model.head.weight.zero_()
        loaded.model.head.weight[300] = 1e3
        hidden = loaded.model(torch.tensor([[5, 6]]))
        loaded.model.head.weight[300] *= hidden[0, -1].sum().sign()
    assert generate(Engine(loaded), "The", 5) == ""


def extended_tokenizer(folder, target, pieces):
    extender = Extender(folder)
    extender.add(pieces)
    extender.save(target)
    return target


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_grow_with_an_extended_tokenizer(make_folder, workspace, trained_workspace, tmp_path, tied):
    folder = make_folder(values={"tie_word_embeddings": tied})
    pieces = [f" 词{first}{second}" for first in "abcdefgh" for second in "ijklmnop"]
    larger = extended_tokenizer(folder, tmp_path / "larger", pieces)
    with pytest.raises(BadInputError, match="add --resize-embeddings"):
        import_folder(folder, workspace, "run", larger)
    with pytest.raises(BadInputError, match=r"does not extend the tokenizer of the model: id 0 is '<s>'"):
        import_folder(folder, workspace, "run", trained_workspace.tokenizer, resize_embeddings=True)
    assert files_below(workspace.root) == ["workspace.json"]

    done = import_folder(folder, workspace, "grown", larger, resize_embeddings=True)
    loaded = load_run(workspace, "grown")
    old, new = load_tokenizer(folder), load_tokenizer(larger)
    assert loaded.tokenizer.vocab_size == new.vocab_size > VOCAB_ROWS
    assert loaded.model.config.vocab_ids == done.resized.rows == new.vocab_size
    assert len(loaded.model.embedding.weight) == -(-new.vocab_size // 64) * 64
    assert (done.resized.rows_before, done.resized.new_ids) == (VOCAB_ROWS, new.vocab_size - old.vocab_size)
    theirs = tensors_of(folder)
    (number,) = new.encode_text(pieces[0])
    names = {"embedding.weight": "model.embed_tokens.weight"} | ({} if tied else {"head.weight": "lm_head.weight"})
    for ours, name in names.items():
        grown = loaded.model.state_dict()[ours].cpu()
        assert torch.equal(grown[: old.vocab_size], theirs[name][: old.vocab_size])
        torch.testing.assert_close(grown[number], theirs[name][old.encode_text(pieces[0])].mean(dim=0))
    ids = random_ids(below=old.vocab_size)
    assert_close_logits(*(each[..., : old.vocab_size] for each in (our_logits(loaded, ids), their_logits(folder, ids))))
    export_run(loaded, workspace.tokenizer, tmp_path / "out")
    assert their_logits(tmp_path / "out", torch.tensor([[number]])).shape[-1] == done.resized.rows


def test_padded_rows_take_new_ids_before_the_model_grows(llama_folder, workspace, tmp_path):
    larger = extended_tokenizer(llama_folder, tmp_path / "larger", ["量子"])
    done = import_folder(llama_folder, workspace, "grown", larger, resize_embeddings=True)
    assert (done.resized.rows, done.resized.rows_before) == (VOCAB_ROWS, VOCAB_ROWS)
    (number,) = load_tokenizer(larger).encode_text("量子")
    pieces = load_tokenizer(llama_folder).encode_text("量子")
    before = tensors_of(llama_folder)["model.embed_tokens.weight"][pieces].mean(dim=0)
    grown = load_run(workspace, "grown").model.embedding.weight
    torch.testing.assert_close(grown[number].detach().cpu(), before)
    other = open_workspace(tmp_path / "other", create=True)
    import_folder(llama_folder, other, "same", larger)
    assert load_run(other, "same").config.model.vocab_ids == VOCAB_ROWS


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
    end, again = "<|end_of_text|>", load_tokenizer(tmp_path / "hf")
    assert raw.encode(end, add_special_tokens=False).ids == [trained.tokenizer.end_id], "text can spell control tokens"
    assert again.encode_text(end) != [trained.tokenizer.end_id]
    assert again.control == trained.tokenizer.control


def test_tensors_that_old_folders_carry_beside_the_weights_are_no_obstacle(make_folder, workspace):
    folder = make_folder(values=TIED, dtype=torch.float16)
    tensors = tensors_of(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"other": torch.ones(1)}, folder / "consolidated.safetensors")
    import_folder(folder, workspace, "old")
    assert load_run(workspace, "old").stored_dtype == "float16"
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    import_folder(folder, workspace, "mixed")
    assert load_run(workspace, "mixed").stored_dtype == "float32"


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


def without(name):
    return change_tensors(lambda tensors: tensors.pop(name))


def with_tensor(name, values):
    return change_tensors(lambda tensors: tensors.update({name: values}))


def file(change, name="model.safetensors"):
    """A folder of which that file has changed."""
    return lambda folder: change(folder / name)


def pickled_only(weights):
    weights.rename(weights.with_name("pytorch_model.bin"))


def with_index(weights, *names):
    write_json(weights.with_name("model.safetensors.index.json"), {"weight_map": dict(zip("ab", names, strict=False))})


def twice(weights):
    shutil.copy(weights, weights.with_name("again.safetensors"))
    with_index(weights, "model.safetensors", "again.safetensors")


def to_device(weights):
    weights.unlink()
    weights.symlink_to("/dev/zero")


def narrower(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:, 1:].contiguous()


def spoiled(value):
    def change(tensors):
        tensors["model.norm.weight"][3] = value
        tensors["model.layers.1.mlp.up_proj.weight"][:2] = value

    return change_tensors(change)


def generation(**values):
    return lambda folder: write_json(folder / "generation_config.json", values)


def index(name):
    """An index whose every weight lies in `name`, a path or whatever else."""

    def change(folder):
        weights = dict.fromkeys(tensors_of(folder), name)
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weights})

    return change


def outside(name):
    """The weights beside the folder, and an index that leads to them."""

    def change(folder):
        index(name.format(parent=folder.parent))(folder)
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")

    return change


def fifo(folder):
    index("model-1.safetensors")(folder)
    os.mkfifo(folder / "model-1.safetensors")


def one_id_more(path):
    tokenizer = read_json(path)
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "content": "<new>", "id": VOCAB_ROWS})
    write_json(path, tokenizer)


def rope(**values):
    return change_config(rope_parameters={"rope_theta": 10000.0, **values})


REFUSED = {
    "no folder": (shutil.rmtree, "is not a Hugging Face model folder"),
    "pickled weights only": (file(pickled_only), r"only pickled weights \(pytorch_model.bin\).*never loads"),
    "no weights": (file(Path.unlink), "has no weights"),
    "half a file": (file(lambda path: path.write_bytes(path.read_bytes()[:9000])), "not a readable safetensors file"),
    "config is no object": (file(lambda path: path.write_text("[1]"), "config.json"), "expected a JSON object"),
    "config is no JSON": (file(lambda path: path.write_text("{"), "config.json"), "cannot be read as JSON"),
    "unknown model type": (change_config(model_type="gpt2"), "model_type 'gpt2'. Only llama, qwen2, qwen3, qwen3_moe"),
    "no vocabulary size": (change_config(vocab_size=...), "has no vocab_size"),
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
    "missing tensor": (without("model.layers.1.self_attn.k_proj.weight"), "self_attn.k_proj.weight is missing"),
    "unknown tensor": (with_tensor("model.layers.0.q_norm.weight", torch.ones(8)), "layers.0.q_norm.weight is unknown"),
    "misshapen tensor": (change_tensors(narrower), r"mlp.up_proj.weight has shape \(80, 47\) instead of \(80, 48\)"),
    "integer weights": (with_tensor("model.norm.weight", torch.ones(48, dtype=torch.int8)), "stores .*I8"),
    "an absolute path in the index": (outside("{parent}/outside.safetensors"), "names the file '/.*without slashes"),
    "a path upwards in the index": (outside("../outside.safetensors"), "names the file '../outside.safetensors'"),
    "a NUL in the index": (index("model\0.safetensors"), "names the file"),
    "a file that is missing in the index": (index(5), "5 is missing"),
    "an object in the index": (index({"a": "/etc/passwd"}), "names the file"),
    "an index of nothing": (file(with_index), "no weight_map"),
    "a fifo in the index": (fifo, "neither a file nor a link to one"),
    "a device in place of weights": (file(to_device), "neither a file nor a link to one"),
    "a tensor in two files": (file(twice), "so does another file"),
    "NaN weights": (spoiled(float("nan")), r"97 weights in .* are NaN or infinite, in 2 of 21 tensors"),
    "layers without end": (change_config(num_hidden_layers=10**7), r"layers: got 10000000, .* at most 10000"),
    "more layers than weights": (change_config(num_hidden_layers=9_000), "is 9,000, but the weights have 2 layers"),
    "an end of text without end": (change_config(eos_token_id=10**30), "'10{30}' as eos_token_id; .* 0 to 351"),
    "an end of text that is none": (change_config(eos_token_id=[1, True]), "'True' as eos_token_id"),
    "an end of text beyond the model": (generation(eos_token_id=[1, -1]), "config.json names '-1' as eos_token_id"),
    "positions without end": (change_config(max_position_embeddings=10**12), r"max_seq_len: got 1000000000000, "),
    "a text for an object": (change_config(rope_scaling="x"), "rope_scaling is 'x', expected an object"),
    "a list for a model type": (change_config(model_type=["llama"]), "model_type \\['llama'\\]"),
    "a list for a kind of scaling": (rope(rope_type=["yarn"], factor=2.0), "has the rope scaling \\['yarn'\\]"),
    "yarn without a base": (rope(rope_type="yarn", factor=2.0, rope_theta=1.0), "rope_theta: got 1.0, .* above 1"),
    "one id more than rows": (file(one_id_more, "tokenizer.json"), "has 353 ids, but its model has only 352"),
    "no tokenizer": (file(Path.unlink, "tokenizer.json"), "no tokenizer in"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_compute_differently_is_refused_and_leaves_nothing(llama_folder, tmp_path, workspace, kind):
    spoil, message = REFUSED[kind]
    folder = shutil.copytree(llama_folder, tmp_path / "theirs")
    spoil(folder)
    before = files_below(workspace.root)
    with pytest.raises(BadInputError, match=message):
        import_folder(folder, workspace, "run")
    assert files_below(workspace.root) == before


def test_no_run_is_replaced_its_name_is_plain_and_a_tokenizer_stays(llama_folder, workspace, trained_workspace):
    import_folder(llama_folder, workspace, "run")
    before = files_below(workspace.root)
    for name in ("run", "a/b", "../run", ".hidden"):
        said = "The run run already exists" if name == "run" else re.escape(f"train.name: got '{name}'")
        with pytest.raises(UsageError, match=said):
            import_folder(llama_folder, workspace, name)
    assert files_below(workspace.root) == before
    with pytest.raises(UsageError, match=r"already has another tokenizer\. Import into a workspace of its own"):
        import_folder(llama_folder, trained_workspace, "other")
    assert [path.name for path in trained_workspace.runs.iterdir()] == ["tiny"]


def test_import_interrupted_before_its_checkpoint_leaves_no_run(llama_folder, workspace, monkeypatch, tmp_path):
    """It would be trained from random weights. It is repeated from links, as a cache of Hugging Face has them."""

    def interrupted(run, *_):
        assert (run / "config.yaml").is_file(), "the worst moment: the config is written, the weights are not"
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange, "write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_folder(llama_folder, workspace, "run")
    assert list(workspace.runs.iterdir()) == []
    monkeypatch.undo()
    for path in llama_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    import_folder(tmp_path, workspace, "run")
    assert load_run(workspace, "run").step == 0


def test_a_run_with_adapters_comes_from_and_leaves_for_peft_and_is_merged_for_use(llama_folder, workspace, tmp_path):
    model, base, _ = hf.read_hf_folder(llama_folder)
    lora = LoraConfig(rank=2, alpha=3.0)
    adapters = {name: torch.randn_like(one) for name, one in initial_adapters(model, lora, 0).items()}
    (tmp_path / "adapter").mkdir()
    write_adapter_folder(tmp_path / "adapter", model, lora, base | adapters, "theirs")
    run = import_folder(llama_folder, workspace, "with", adapter=tmp_path / "adapter").run
    exchange.export_adapter(run, tmp_path / "again")
    assert_same_tensors(tmp_path / "adapter", tmp_path / "again")
    loaded = load_run(workspace, "with")
    merge(base, adapters, model, lora)
    assert all(torch.equal(tensor, base[name]) for name, tensor in loaded.weights().items())
    export_run(loaded, workspace.tokenizer, tmp_path / "merged")
    assert len(tensors_of(tmp_path / "merged")) == len(tensors_of(llama_folder))
    with pytest.raises(UsageError, match="without has no adapters"):
        exchange.export_adapter(import_folder(llama_folder, workspace, "without").run, tmp_path / "none")
