"""Write a tokenizer folder that Hugging Face tools can load, and in which text never produces a control id.

The folder holds `tokenizer.json`, `tokenizer_config.json`, the chat template and, last, our `manifest.json`; a
SentencePiece tokenizer also has its `sentencepiece.model`. The control tokens are in the model's vocabulary, but
nothing leads to them: no merge makes one (BPE), and their score is too low for any segmentation (unigram).
tokenizer.json declares no added tokens; only tokenizer_config.json does, together with `split_special_tokens`. So
`tokenizers.Tokenizer.from_file` reads `<|end_of_text|>` in a text as ordinary characters, and so does `AutoTokenizer`,
which still knows the special ids for decoding and for `eos_token_id`. (If transformers saves the folder again, plain
`tokenizers` will recognise them.)

The *compatible* layout, for tools that render chat templates as text, gives the property up: see `compatible_files`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import package_text, staged_folder, write_atomic, write_json
from zero2all.common.manifest import fingerprint, write_manifest
from zero2all.tokenizer.config import PRETOKEN_PATTERN, SpecialsConfig, byte_alphabet

NO_LENGTH_LIMIT = int(1e30)
"""What transformers writes as `model_max_length` when the tokenizer itself sets no limit."""
TOKENIZER_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
SENTENCEPIECE_NAME = "sentencepiece.model"
"""Not `tokenizer.model`: transformers would prefer a file of that name to tokenizer.json and convert it its own way."""
CHAT_TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER_NAME, CONFIG_NAME, "special_tokens_map.json", CHAT_TEMPLATE_NAME, SENTENCEPIECE_NAME)
OTHER_FILES = ("special_tokens_map.json", CHAT_TEMPLATE_NAME, "generation_config.json")
"""What a folder of others may have beside them that decides something."""
NORMALIZERS: dict[str, dict[str, Any] | None] = {"none": None, "nfc": {"type": "NFC"}, "nfkc": {"type": "NFKC"}}


def tokenizer_fingerprint(
    tokenizer_json: dict[str, Any], control: dict[str, int], begin: str | None, end: str, pad: str | None
) -> str:
    """The name of a tokenizer: two with the same fingerprint give the same ids for every text.

    Packed shards and checkpoints record it, so that tokens of one vocabulary are never read with another. The parts of
    tokenizer.json that our loader overrides do not count, nor what an export adds, nor does the order of keys.
    """
    relevant = {key: value for key, value in tokenizer_json.items() if key not in ("version", "truncation", "padding")}
    opening = begin or end
    if relevant.get("post_processor") == opening_processor(opening, control.get(opening, -1)):
        relevant["post_processor"] = None
    special = {"control": control, "begin": begin, "end": end, "pad": pad}
    return fingerprint({"tokenizer": relevant, "special": special})


def tokenizer_json_of(
    pieces: Sequence[bytes], merges: Sequence[tuple[int, int]], control: Sequence[str], normalisation: str = "none"
) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE: control tokens first, then `pieces` in order; merges name places in it."""
    visible = {byte: character for character, byte in byte_alphabet().items()}
    names = ["".join(visible[byte] for byte in piece) for piece in pieces]
    split = {"type": "Split", "pattern": {"Regex": PRETOKEN_PATTERN}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return assembled_json(
        NORMALIZERS[normalisation],
        {"type": "Sequence", "pretokenizers": [split, byte_level]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        bpe_model(vocabulary_of(control, names), [[names[left], names[right]] for left, right in merges]),
    )


def assembled_json(normalizer: Any, pre_tokenizer: Any, decoder: Any, model: dict[str, Any]) -> dict[str, Any]:
    """A whole tokenizer.json."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def bpe_model(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """The `model` of a BPE in tokenizer.json."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def vocabulary_of(control: Sequence[str], pieces: Sequence[str]) -> dict[str, int]:
    """Name to id, control tokens first. A control token that is also a piece would be an id that text can reach."""
    taken = set(control).intersection(pieces)
    if taken:
        raise BadInputError(
            f"The control token {sorted(taken)[0]!r} is also a piece learned from the text, so text would "
            "produce it. Give it another name in tokenizer.specials; names of the form <|…|> are safe."
        )
    vocab = {name: number for number, name in enumerate([*control, *pieces])}
    assert len(vocab) == len(control) + len(pieces), "two pieces have the same spelling"
    return vocab


def save_tokenizer(
    folder: Path,
    tokenizer_json: dict[str, Any],
    specials: SpecialsConfig,
    content: dict[str, Any],
    inputs: str,
) -> None:
    """Write `folder`, whole or not at all. `content` is what the manifest says about the training."""
    control = {name: number for number, name in enumerate(specials.names())}
    facts = {
        "vocab_size": len(tokenizer_json["model"]["vocab"]),
        "fingerprint": tokenizer_fingerprint(tokenizer_json, control, specials.begin, specials.end, specials.pad),
        **content,
    }
    with staged_folder(folder) as partial:
        write_json(partial / TOKENIZER_NAME, tokenizer_json)
        write_json(partial / CONFIG_NAME, _hugging_face_config(specials))
        write_atomic(partial / CHAT_TEMPLATE_NAME, template_text(specials.message_start, specials.message_end).encode())
        write_manifest(partial, "tokenizer", inputs, facts)


def template_text(start: str, end: str) -> str:
    """Our template with these marks."""
    text = package_text(__package__, "chat_template.jinja")
    return text.replace("MESSAGE_START", start).replace("MESSAGE_END", end)


def _hugging_face_config(specials: SpecialsConfig) -> dict[str, Any]:
    """Makes `AutoTokenizer` use tokenizer.json as it is and split control strings that occur in text."""
    roles = {"bos_token": specials.begin, "eos_token": specials.end, "pad_token": specials.pad}
    names = specials.names()
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(number): {"content": name, **plain} for number, name in enumerate(names)},
        **roles,
        "additional_special_tokens": [name for name in names if name not in roles.values()],
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": NO_LENGTH_LIMIT,
        "control_roles": specials.roles(),
    }


def opening_processor(name: str, number: int) -> dict[str, Any]:
    """The `post_processor` that puts the token which opens a document before a text, for exports.

    In our own folder there is none: whoever packs or scores with `tokenizers` gets the text's ids alone.
    """
    opening, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [opening, text],
        "pair": [opening, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def compatible_files(tokenizer_json: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same tokenizer with control tokens as ordinary added tokens, which text CAN spell, for tools that need it.

    Such tools render a chat as one text with the marks in it and encode that; with our own layout they would get
    the marks as plain characters. A message can then contain marks as well.
    """
    declared = config.get("added_tokens_decoder", {})
    added = [{"id": int(number), **token} for number, token in sorted(declared.items(), key=lambda item: int(item[0]))]
    known = {token["id"] for token in added}
    others = [token for token in tokenizer_json.get("added_tokens", []) if token["id"] not in known]
    changed = {name: value for name, value in config.items() if name != "split_special_tokens"}
    return {**tokenizer_json, "added_tokens": sorted([*others, *added], key=lambda token: token["id"])}, changed
