"""GGUF files: the tensors and the tokenizer that llama.cpp expects, the way back, and what is refused.

llama.cpp itself is asked by benchmarks/gguf_llama.py, since building it takes half an hour.
"""

import dataclasses
import json
import random
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.infer.tiny import TEXTS, random_model
from zero2all.cli import main
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, write_json
from zero2all.common.workspace import Workspace
from zero2all.exchange import import_folder
from zero2all.gguf import CONTROL, NORMAL, PRE_TOKENIZERS, UNUSED, _pre_tokenizer, export_gguf, import_gguf
from zero2all.infer.load import LoadedModel, load_run
from zero2all.model.config import ModelConfig, MoeConfig, RopeScaling
from zero2all.tokenizer import load_tokenizer, train_tokenizer
from zero2all.tokenizer.config import ISOLATED_HAN_PATTERN
from zero2all.tokenizer.hf_bbpe import pretokens

gguf = pytest.importorskip("gguf")

SHAPE = {"vocab_size": 305, "hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "kv_heads": 2}
SHAPE |= {"max_seq_len": 64}
SOFTMAX = MoeConfig(experts=4, experts_per_token=2, expert_size=32, router="softmax", balance_rate=0.0)
LLAMA3, YARN = (RopeScaling(kind, 4.0, 32) for kind in ("llama3", "yarn"))
MODELS = {
    "llama": {},
    "llama, biases, tied, llama3": {"attention_bias": "all", "mlp_bias": True, "tied_embeddings": True}
    | {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "llama, wide heads, linear": {"head_dim": 32, "rope_scaling": RopeScaling("linear", 2.0)},
    "mixtral": {"moe": SOFTMAX},
    "qwen2, yarn": {"attention_bias": "qkv", "rope_scaling": YARN},
    "qwen3": {"qk_norm": True, "head_dim": 32, "rms_norm_eps": 1e-6},
    "qwen3moe": {"qk_norm": True, "moe": SOFTMAX},
}
LLAMA_CPP = {
    "qwen2": r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
LLAMA_CPP["llama-bpe"] = LLAMA_CPP["smaug-bpe"] = LLAMA_CPP["qwen2"].replace(r"|\p{N}|", r"|\p{N}{1,3}|")
"""As src/llama-vocab.cpp writes them (llama-cpp-python 0.3.36); of gpt-2's it leaves the last alternative out, which
cuts the same, as what no alternative takes is a pretoken."""
HARD = "don't I'LL 've 3.14 2026 中文，标点。 e\u0301 ﬁ Ａ  \t\n\r\n\n x_y--!! 🙂 ½² İı ' ’s"
HARD += "\u05e9\u05dc\u05d5 \u0639\u0631 \u200d\u00a0\u3000\x00\x85"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf") / "tokenizer"
    train_tokenizer(TEXTS * 100, 300, folder, "tiny")  # 305 rows: the last five have no piece
    return folder


@pytest.fixture
def make(tokenizer_folder):
    """A model with random weights, norms and biases: mixing them up must show."""

    def make(**values):
        model = random_model(ModelConfig(**SHAPE | values))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
        return LoadedModel("tiny", 0, model, load_tokenizer(tokenizer_folder))

    return make


def read(path):
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {one.name: one for one in reader.tensors}


def imported(path, tmp_path, name="back"):
    workspace = Workspace(tmp_path / "imported")
    import_gguf(path, workspace, name)
    return load_run(workspace, name)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_comes_back_as_the_same_model(name, make, tokenizer_folder, tmp_path):
    loaded, path = make(**MODELS[name]), tmp_path / "model.gguf"
    export_gguf(loaded, tokenizer_folder, path, "f32")
    assert read(path)[0]["general.architecture"] == re.split(",", name)[0].replace("mixtral", "llama")
    back = imported(path, tmp_path)
    ids = torch.randint(0, 290, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(back.model(ids), loaded.model(ids))
    weights = back.weights()
    assert weights.keys() == loaded.weights().keys()
    assert all(torch.equal(weights[one], tensor) for one, tensor in loaded.weights().items())
    same = ("rope_theta", "rope_scaling", "rms_norm_eps", "qk_norm", "attention_bias", "tied_embeddings", "max_seq_len")
    ours, theirs = loaded.model.config, back.model.config
    assert [getattr(ours, field) for field in same] == [getattr(theirs, field) for field in same]
    assert back.tokenizer.fingerprint == loaded.tokenizer.fingerprint
    assert not list(tmp_path.glob("z2a-gguf-*"))


def test_rows_of_llama_lie_as_neighbouring_pairs_and_those_of_qwen_as_halves(make, tokenizer_folder, tmp_path):
    for name, values in {"llama": {}, "qwen3": {"qk_norm": True}}.items():
        loaded, path = make(**values), tmp_path / f"{name}.gguf"
        export_gguf(loaded, tokenizer_folder, path, "f32")
        tensors, width = read(path)[1], 16
        for letter in "qk":
            ours = loaded.weights()[f"blocks.1.attention.{letter}.weight"].detach().numpy()
            theirs = tensors[f"blk.1.attn_{letter}.weight"].data
            head, pair = 1, 3
            places = (2 * pair, 2 * pair + 1) if name == "llama" else (pair, pair + width // 2)
            for half, place in enumerate(places):
                assert np.array_equal(theirs[head * width + place], ours[head * width + half * width // 2 + pair])


def test_llama3_scaling_is_a_tensor_of_divisors(make, tokenizer_folder, tmp_path):
    export_gguf(make(rope_scaling=LLAMA3), tokenizer_folder, tmp_path / "m.gguf", "f16")
    divisors = read(tmp_path / "m.gguf")[1]["rope_freqs.weight"].data
    assert divisors.dtype == np.float32
    assert divisors[[0, -1]] == pytest.approx([1.0, 4.0])


ROUNDING = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 127, "q4_0": 1 / 7}


@pytest.mark.parametrize("kind", ROUNDING)
def test_each_type_rounds_matrices_and_keeps_vectors(kind, make, tokenizer_folder, tmp_path):
    loaded, path = make(), tmp_path / "model.gguf"
    export_gguf(loaded, tokenizer_folder, path, kind)
    kinds = {name: one.tensor_type.name.lower() for name, one in read(path)[1].items()}
    found = [kinds[f"{part}.weight"] for part in ("blk.0.attn_norm", "blk.0.ffn_down", "output")]
    assert found == ["f32", kind, "q8_0" if kind == "q4_0" else kind]
    back, exact = imported(path, tmp_path).weights(), loaded.weights()
    for name, tensor in exact.items():
        if kind in ("f16", "bf16") and tensor.dim() == 2:
            assert torch.equal(back[name], tensor.to({"f16": torch.half, "bf16": torch.bfloat16}[kind]).float())
        assert (back[name] - tensor).abs().max() <= ROUNDING[kind] * tensor.abs().max() * (tensor.dim() > 1)


def test_the_tokenizer_is_in_the_file(make, tokenizer_folder, tmp_path):
    loaded, path = make(), tmp_path / "model.gguf"
    export_gguf(loaded, tokenizer_folder, path)
    fields, tokenizer = read(path)[0], loaded.tokenizer
    key = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    source = read_json(tokenizer_folder / "tokenizer.json")["model"]
    assert (key["model"], key["pre"], key["add_bos_token"]) == ("gpt2", "qwen2", True)
    assert [key[f"{name}_token_id"] for name in ("bos", "eos", "padding", "eot")] == [0, 1, 5, 4]
    assert key["tokens"][:305] == [*source["vocab"], *(f"[PAD{number}]" for number in range(300, 305))]
    kinds = [CONTROL if n in tokenizer.control_ids else UNUSED if n >= 300 else NORMAL for n in range(305)]
    assert key["token_type"] == kinds
    assert key["merges"] == [" ".join(merge) for merge in source["merges"]]
    assert "message_start|>assistant" in fields["tokenizer.chat_template"]
    assert "generation %" not in fields["tokenizer.chat_template"]


def test_llama_cpps_regular_expressions_cut_as_ours():
    draw = random.Random(0)
    texts = ["".join(draw.choices(HARD, k=draw.randrange(1, 30))) for _ in range(300)]
    for name, (pattern, _) in PRE_TOKENIZERS.items():
        theirs = {**_pre_tokenizer("x"), "pretokenizers": [*_pre_tokenizer("x")["pretokenizers"]]}
        theirs["pretokenizers"][0] = {**theirs["pretokenizers"][0], "pattern": {"Regex": LLAMA_CPP[name]}}
        for text in texts:
            assert pretokens(_pre_tokenizer(pattern), text) == pretokens(theirs, text), (name, text)


def changed(folder, tmp_path, **values):
    """The tokenizer with other values at the top of tokenizer.json."""
    copy = tmp_path / "changed"
    copy.mkdir()
    write_json(copy / "tokenizer.json", {**read_json(folder / "tokenizer.json"), **values})
    write_json(copy / "tokenizer_config.json", read_json(folder / "tokenizer_config.json"))
    return copy


TOKENIZERS = {
    "does not do: 'e\u0301te\u0301'": {"normalizer": {"type": "NFC"}},
    "'中文，标点。' is ['中文', '，', '标点', '。'] here, ['中文', '，标点', '。'] in qwen2": {
        "pre_tokenizer": _pre_tokenizer(ISOLATED_HAN_PATTERN)
    },
    "has only byte-level BPE; this tokenizer is another (no pre-tokenizer)": {"pre_tokenizer": None},
}


@pytest.mark.parametrize("words", TOKENIZERS)
def test_a_tokenizer_that_llama_cpp_cannot_reproduce_is_named(words, make, tokenizer_folder, tmp_path):
    folder = changed(tokenizer_folder, tmp_path, **TOKENIZERS[words])
    loaded = dataclasses.replace(make(), tokenizer=load_tokenizer(folder))
    with pytest.raises(BadInputError, match=re.escape(words)):
        export_gguf(loaded, folder, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("m.gguf*"))


REFUSED = {
    "not converted yet": {"moe": MoeConfig(experts=4, expert_size=32, shared_experts=1)},
    "Qwen3 has no attention_bias": {"qk_norm": True, "attention_bias": "all"},
    "hidden_size / heads": {"attention_bias": "qkv", "head_dim": 32},
    "only its Llama has the rope_scaling llama3": {"qk_norm": True, "rope_scaling": LLAMA3},
    "attention_factor": {"rope_scaling": dataclasses.replace(YARN, attention_factor=1.5)},
    "needs a multiple of 32": {"hidden_size": 72, "heads": 4, "kv_heads": 4},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_model_that_the_format_cannot_hold_is_refused(words, make, tokenizer_folder, tmp_path):
    with pytest.raises(BadInputError, match=words):
        export_gguf(make(**REFUSED[words]), tokenizer_folder, tmp_path / "m.gguf", "q4_0")
    assert not list(tmp_path.glob("m.gguf*"))


def test_values_beyond_float16_are_refused_and_leave_no_file(make, tokenizer_folder, tmp_path):
    loaded = make()
    with torch.no_grad():
        loaded.weights()["blocks.1.feed_forward.down.weight"][0, 0] = 1e5
    with pytest.raises(BadInputError, match=r"blk.1.ffn_down.weight has values above 65504.*--type bf16"):
        export_gguf(loaded, tokenizer_folder, tmp_path / "m.gguf", "f16")
    assert list(tmp_path.iterdir()) == []
    export_gguf(loaded, tokenizer_folder, tmp_path / "m.gguf", "bf16")
    with pytest.raises(UsageError, match="a new file"):
        export_gguf(loaded, tokenizer_folder, tmp_path / "m.gguf", "bf16")


def test_a_cut_or_damaged_file_is_bad_input_and_leaves_no_workspace(make, tokenizer_folder, tmp_path):
    export_gguf(make(), tokenizer_folder, tmp_path / "m.gguf", "q8_0")
    whole, draw = (tmp_path / "m.gguf").read_bytes(), random.Random(0)
    cut = [whole[:size] for size in (0, 3, 40, 2000, len(whole) // 2, len(whole) - 100)]
    workspace, bad = Workspace(tmp_path / "imported"), tmp_path / "bad.gguf"
    for data in cut:
        bad.write_bytes(data)
        with pytest.raises(BadInputError, match=r"bad\.gguf"):
            import_gguf(bad, workspace, "back")
        assert not workspace.root.exists()
    kinds = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8  # behind two types
    bad.write_bytes(whole[:kinds] + (1 << 50).to_bytes(8, "little") + whole[kinds + 8 :])
    with pytest.raises(BadInputError, match=r"bad\.gguf is not a whole GGUF file .*it ends inside a field"):
        import_gguf(bad, workspace, "back")
    for number in range(20):
        place = draw.randrange(24, 1000)
        bad.write_bytes(whole[:place] + draw.randbytes(8) + whole[place + 8 :])
        with suppress(BadInputError):  # a name, a merge or a description may have been hit without harm
            import_gguf(bad, Workspace(tmp_path / f"flipped{number}"), "back")
    assert not list(tmp_path.glob("z2a-gguf-*"))


def test_the_verbs_write_and_read_a_file(make, tokenizer_folder, tmp_path, capsys):
    loaded = make()
    export_gguf(loaded, tokenizer_folder, tmp_path / "a.gguf", "f32")
    work = tmp_path / "work"
    main(["import", str(tmp_path / "a.gguf"), "--work", str(work), "--name", "one"])
    options = ["export", "one", "--work", str(work), "--to"]
    assert main([*options, "gguf", "--out", str(tmp_path / "b.gguf"), "--type", "f32"]) == 0
    assert "for llama.cpp, ollama, LM Studio" in capsys.readouterr().out
    first, second = (read(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    assert first[1].keys() == second[1].keys()
    assert all(np.array_equal(one.data, second[1][name].data) for name, one in first[1].items())
    assert {**first[0], "general.name": "one"} == second[0]
    assert main([*options, "gguf", "--out", str(tmp_path / "folder")]) == 2
    assert main([*options, "hf", "--out", str(tmp_path / "folder"), "--type", "f16"]) == 2
    assert main([*options, "gguf", "--out", str(tmp_path / "c.gguf"), "--dtype", "float16"]) == 2
    assert main([*options, "mlx", "--out", str(tmp_path / "mlx")]) == 0
    assert "for mlx_lm.load" in capsys.readouterr().out
    import_folder(tmp_path / "mlx", Workspace(tmp_path / "again"), "two")
    manifest = next((work / "runs" / "one" / "checkpoints").glob("*/manifest.json"))
    assert json.loads(manifest.read_text())["imported_from"] == str(tmp_path / "a.gguf")
    assert Path(work / "tokenizer" / "chat_template.jinja").is_file()
