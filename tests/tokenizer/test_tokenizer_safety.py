"""Text can never produce a control id by any way to load it, nor close a message of a chat."""

import json
import shutil

import pytest

from benchmarks.tokenizer_fuzz import adversarial, attack
from zero2all.common.files import read_json, write_json
from zero2all.tokenizer import CONTROL_TOKENS, train_tokenizer
from zero2all.tokenizer.save import compatible_files

transformers = pytest.importorskip("transformers")


def test_adversarial_strings_make_no_control_id_by_any_route(folder, texts, tmp_path):
    # Fragments of the names are in the training text, so that their pieces are learned.
    fragments = [name[1:-1] * 9 for name in CONTROL_TOKENS]
    train_tokenizer([*texts, *fragments], 700, tmp_path / "nfkc", "inputs", kind="hf-bbpe", normalise="nfkc")
    for attacked in (folder, tmp_path / "nfkc"):
        found = attack(attacked, 3000)
        assert found["strings_with_a_control_id"] == {"zero2all": 0, "tokenizers": 0, "AutoTokenizer": 0}
        assert found["strings_where_the_routes_differ"] == 0


def test_the_attack_finds_control_ids_where_there_are_some(folder, tmp_path):
    """Without this, the test above could not fail."""
    names = list(CONTROL_TOKENS)
    attacks = list(adversarial(names, ["x"], 500))
    assert attacks == list(adversarial(names, ["x"], 500))
    assert sum(any(name in text for name in names) for text in attacks) > 200
    copy = shutil.copytree(folder, tmp_path / "copy")
    compatible = compatible_files(read_json(copy / "tokenizer.json"), read_json(copy / "tokenizer_config.json"))
    for name, content in zip(("tokenizer.json", "tokenizer_config.json"), compatible, strict=True):
        write_json(copy / name, content)
    (copy / "manifest.json").unlink()
    found = attack(copy, 500)["strings_with_a_control_id"]
    assert found["zero2all"] == 0, "our loader switches them off in any layout"
    assert found["tokenizers"] > 100
    assert found["AutoTokenizer"] > 100


CUSTOM_CLASS = '''
import json, os
from transformers import PreTrainedTokenizer

class SmallestTokenizer(PreTrainedTokenizer):
    """One id a character: the smallest tokenizer that Hugging Face cannot build from tokenizer.json."""

    vocab_files_names = {"vocab_file": "characters.json"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        with open(vocab_file, encoding="utf-8") as file:
            self.ids = json.load(file)
        self.characters = {number: character for character, number in self.ids.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return {**self.ids, **self.added_tokens_encoder}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.ids.get(token, self.ids["?"])

    def _convert_id_to_token(self, index):
        return self.characters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        name = (filename_prefix + "-" if filename_prefix else "") + self.vocab_files_names["vocab_file"]
        path = os.path.join(save_directory, name)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.ids, file, ensure_ascii=False)
        return (path,)
'''


def test_the_custom_class_route_of_the_guide_works_with_trust_remote_code(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = tmp_path / "mine"
    source.mkdir()
    (source / "tokenization_characters.py").write_text(CUSTOM_CLASS)
    (source / "characters.json").write_text(json.dumps({c: n for n, c in enumerate("?天地玄黄 abc")}))
    auto_map = {"AutoTokenizer": ["tokenization_characters.SmallestTokenizer", None]}
    write_json(source / "tokenizer_config.json", {"tokenizer_class": "SmallestTokenizer", "auto_map": auto_map})
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    loaded = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=True)
    assert loaded("天地 x", add_special_tokens=False)["input_ids"] == [1, 2, 5, 0]
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/characters.json").is_file(), "save_vocabulary wrote it"
